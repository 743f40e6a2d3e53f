"""Decides by a policy whether a request is allowed, as IAM does, for the language that our policies use.

Whatever else a policy may say (IAM, "JSON policy element reference") is an error here, so that nothing is misread.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Values = tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """What IAM is asked.

    Args:
        action: such as `ec2:RunInstances`.
        resource: its ARN, or `*` for an action without resources.
        context: condition key -> values; a key that the request does not have is missing.
    """

    action: str
    resource: str
    context: Mapping[str, Values] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.action} on {self.resource} with {dict(self.context)}"


def allowed(policy: Mapping[str, Any], request: Request) -> bool:
    """Returns whether a statement allows the request and none denies it."""
    assert policy["Version"] == "2012-10-17"
    effects = {statement["Effect"] for statement in policy["Statement"] if _applies(statement, request)}
    assert effects <= {"Allow", "Deny"}
    return effects == {"Allow"}


def _applies(statement: Mapping[str, Any], request: Request) -> bool:
    unknown = statement.keys() - {"Sid", "Effect", "Action", "Resource", "Condition"}
    assert not unknown, unknown
    return (
        any(_matches(pattern.lower(), request.action.lower()) for pattern in _listed(statement["Action"]))
        and any(_is_resource(pattern, request.resource) for pattern in _listed(statement["Resource"]))
        and all(
            _holds(operator, request.context.get(key), _listed(expected))
            for operator, keys in statement.get("Condition", {}).items()
            for key, expected in keys.items()
        )
    )


def _is_resource(pattern: str, arn: str) -> bool:
    """A wildcard does not reach across the colons of an ARN's first five parts."""
    if pattern == "*":
        return True
    expected, actual = pattern.split(":", 5), arn.split(":", 5)
    return len(expected) == len(actual) and all(map(_matches, expected, actual))


def _holds(operator: str, actual: Values | None, expected: list[str]) -> bool:
    """Whether one condition holds. Several values of ours mean: any of them."""
    if operator == "Null":
        return (actual is None) == (expected == ["true"])
    if operator == "StringEquals":
        return actual is not None and any(value in expected for value in actual)
    if operator == "StringLike":
        return actual is not None and any(_matches(pattern, value) for pattern in expected for value in actual)
    if operator == "ForAllValues:StringEquals":
        return all(value in expected for value in actual or ())
    if operator == "ForAllValues:StringLike":
        return all(any(_matches(pattern, value) for pattern in expected) for value in actual or ())
    raise AssertionError(f"the evaluator does not know {operator}")


def _matches(pattern: str, text: str) -> bool:
    assert "[" not in pattern
    assert "${" not in pattern
    return bool(re.fullmatch(fnmatch.translate(pattern), text))


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
