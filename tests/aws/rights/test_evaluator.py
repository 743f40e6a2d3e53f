"""Tests the evaluator alone, against what IAM's documentation says of its language."""

from __future__ import annotations

from typing import Any

import pytest

from tests.aws.rights.evaluator import Request, Values, allowed

pytestmark = pytest.mark.story

INSTANCE = "arn:aws:ec2:eu-west-1:123456789012:instance/i-1"


def policy(effect: str = "Allow", condition: Any = None, **changed: Any) -> dict[str, Any]:
    statement = {"Effect": effect, "Action": ["ec2:Stop*"], "Resource": "arn:aws:ec2:*:*:instance/*", **changed}
    if condition:
        statement["Condition"] = condition
    return {"Version": "2012-10-17", "Statement": [statement]}


def test_a_request_needs_an_allow_and_no_deny() -> None:
    stop = Request("ec2:StopInstances", INSTANCE)
    both = {**policy(), "Statement": [*policy()["Statement"], *policy("Deny")["Statement"]]}
    assert allowed(policy(), stop)
    assert not allowed(policy("Deny"), stop)
    assert not allowed(both, stop)
    assert not allowed(policy(), Request("ec2:StartInstances", INSTANCE))


def test_actions_are_compared_without_case_and_arns_part_by_part() -> None:
    assert allowed(policy(Action="EC2:stopinstances"), Request("ec2:StopInstances", INSTANCE))
    assert not allowed(policy(), Request("ec2:StopInstances", INSTANCE.replace("instance/", "volume/")))
    assert not allowed(policy(Resource="arn:aws:ec2:*"), Request("ec2:StopInstances", INSTANCE))
    # A vendor's image belongs to no account.
    image = Request("ec2:StopInstances", "arn:aws:ec2:eu-west-1::image/ami-1")
    assert allowed(policy(Resource="arn:aws:ec2:*:*:image/*"), image)
    assert allowed(policy(Resource="*"), image)


@pytest.mark.parametrize(
    ("condition", "values", "expected"),
    [
        ({"Null": {"k": "false"}}, ("x",), True),
        ({"Null": {"k": "false"}}, None, False),
        ({"Null": {"k": "true"}}, None, True),
        ({"StringEquals": {"k": ["x", "y"]}}, ("y",), True),
        ({"StringEquals": {"k": "x"}}, ("X",), False),
        ({"StringEquals": {"k": "x"}}, None, False),
        ({"StringLike": {"k": "?*"}}, ("",), False),
        ({"StringLike": {"k": "?*"}}, ("env",), True),
        ({"ForAllValues:StringEquals": {"k": ["x", "y"]}}, ("x", "z"), False),
        ({"ForAllValues:StringEquals": {"k": ["x", "y"]}}, None, True),
        ({"StringEquals": {"k": "x"}, "Null": {"other": "false"}}, ("x",), False),
    ],
    ids=[
        "there", "not-there", "missing", "one-of-two", "case", "equals-missing", "like-empty", "like", "not-all",
        "all-of-none", "both",
    ],
)  # fmt: skip
def test_conditions(condition: Any, values: Values | None, expected: bool) -> None:
    context = {} if values is None else {"k": values}
    assert allowed(policy(condition=condition), Request("ec2:StopInstances", INSTANCE, context)) is expected


def test_what_it_does_not_know_is_an_error() -> None:
    stop = Request("ec2:StopInstances", INSTANCE, {"k": ("x",)})
    for unknown in (policy(condition={"ArnLike": {"k": "x"}}), policy(NotAction="x"), policy(Effect="Maybe")):
        with pytest.raises(AssertionError):
            allowed(unknown, stop)
