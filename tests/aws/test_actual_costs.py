"""`costs --actual` on answers of Cost Explorer in the documented form (AWS API reference, "GetCostAndUsage")."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from typing import Any

import pytest
from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import Api
from provisioner.clouds.aws.costs import cost_explorer
from provisioner.errors import HostError, InfrastructureError
from tests.aws.account import Account
from tests.aws.proxy import FaultyApi

BEGIN = date(2026, 11, 1)
Queue = Callable[..., None]


def group(value: str, amount: str, unit: str = "USD") -> dict[str, Any]:
    return {
        "Keys": [f"provisioner:environment${value}"],
        "Metrics": {"UnblendedCost": {"Amount": amount, "Unit": unit}},
    }


def day(number: int, *groups: dict[str, Any], estimated: bool = False) -> dict[str, Any]:
    period = {"Start": f"2026-11-{number:02}", "End": f"2026-11-{number + 1:02}"}
    return {"TimePeriod": period, "Total": {}, "Groups": list(groups), "Estimated": estimated}


@pytest.fixture
def queue(account: Account, api: FaultyApi) -> Queue:
    """Returns a function that queues answers of Cost Explorer."""

    def put(*answers: dict[str, Any]) -> None:
        whole = [{"GroupDefinitions": [], "DimensionValueAttributes": [], **answer} for answer in answers]
        body = json.dumps({"results": whole}).encode()
        url = f"{api.url}/moto-api/static/ce/cost-and-usage-results"
        urllib.request.urlopen(urllib.request.Request(url, data=body, method="POST")).close()

    return put


_ends = itertools.count(3)


@pytest.fixture
def end() -> date:
    """Returns a day of the test's own: moto gives the same answer to the same question."""
    return date(2026, 11, next(_ends))


@pytest.fixture
def ours() -> Api:
    return Api(None, "eu-west-1")


@pytest.mark.usefixtures("account")
def test_days_and_pages_are_summed_by_environment(queue: Queue, ours: Api, end: date) -> None:
    queue(
        {
            "ResultsByTime": [day(1, group("a", "0.0104"), group("", "3.5"))],
            "NextPageToken": "more",
        },
        {"ResultsByTime": [day(2, group("a", "0.0000000416"), group("b", "1E-7"), estimated=True)]},
    )
    found = cost_explorer.bill(ours, BEGIN, end)
    assert found.usd_by_environment == {"a": Decimal("0.0104000416"), "b": Decimal("1E-7")}
    assert (found.untagged_usd, found.estimated, found.requests) == (Decimal("3.5"), True, 2)


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(
    "damaged",
    [
        {"ResultsByTime": [day(1, group("a", "NaN"))]},
        {"ResultsByTime": [day(1, group("a", "much"))]},
        {"ResultsByTime": [day(1, group("a", "1", "EUR"))]},
        {"ResultsByTime": [day(1, {"Keys": [], "Metrics": {}})]},
        {"ResultsByTime": [day(1, {"Keys": ["x$a"], "Metrics": {}})]},
    ],
)
def test_an_answer_of_another_form_is_no_bill(queue: Queue, ours: Api, end: date, damaged: dict[str, Any]) -> None:
    queue(damaged)
    with pytest.raises(InfrastructureError, match="Cost Explorer's answer"):
        cost_explorer.bill(ours, BEGIN, end)


@pytest.mark.usefixtures("account")
def test_pages_without_end_are_given_up(queue: Queue, ours: Api, end: date, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_explorer, "MOST_PAGES", 3)
    queue(*[{"ResultsByTime": [], "NextPageToken": "more"}] * 4)
    with pytest.raises(InfrastructureError, match="more than 3 pages"):
        cost_explorer.bill(ours, BEGIN, end)


@pytest.mark.usefixtures("account")
@pytest.mark.parametrize(
    ("code", "message", "hint"),
    [
        ("DataUnavailableException", "no", "activate the tag"),
        ("AccessDeniedException", "User not enabled for cost explorer access", "Switch Cost Explorer on"),
        ("AccessDeniedException", "User: arn:aws:iam::1:user/me is not authorized to perform: ce:Get", "aws policy"),
    ],
    ids=["no-data-yet", "never-switched-on", "no-right"],
)
def test_a_refusal_says_what_to_do(
    ours: Api, end: date, monkeypatch: pytest.MonkeyPatch, code: str, message: str, hint: str
) -> None:
    def refuse(**_: object) -> None:
        raise ClientError({"Error": {"Code": code, "Message": message}}, "GetCostAndUsage")

    monkeypatch.setattr(ours.client("ce", "us-east-1"), "get_cost_and_usage", refuse)
    with pytest.raises(HostError) as raised:
        cost_explorer.bill(ours, BEGIN, end)
    assert hint in str(raised.value.hint)
