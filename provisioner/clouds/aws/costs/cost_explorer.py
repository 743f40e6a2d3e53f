"""Asks Cost Explorer what environments have cost, by the tag that their resources bear.

AWS bills each request (AWS Cost Management pricing: 0.01 USD). A tag is known there once the account has activated it
as a cost allocation tag, and for what was billed since (AWS Billing user guide, "Activating user-defined cost
allocation tags").
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from typing import Annotated, Any

from botocore.exceptions import ClientError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from provisioner.clouds.aws.api import Api, asking, code_of
from provisioner.clouds.aws.tags import ENVIRONMENT_TAG
from provisioner.costs.bill import Bill
from provisioner.errors import HostError, InfrastructureError

# Cost Explorer has one endpoint (AWS General Reference, "AWS Cost Explorer endpoints").
REGION = "us-east-1"
METRIC = "UnblendedCost"
MOST_PAGES = 100
# GetCostAndUsage's answer while Cost Explorer prepares its first data; in an account that never enabled it, an
# AccessDeniedException with these words.
NOT_YET = "DataUnavailableException"
NEVER_ON = "not enabled for cost explorer"
HINT = (
    "Switch Cost Explorer on in the AWS console (Billing and Cost Management), and activate the tag "
    f"{ENVIRONMENT_TAG} there (Cost allocation tags). Its first data come a day later."
)


class _Answer(BaseModel):
    """A part of an answer. AWS may add fields to it."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Amount(_Answer):
    Amount: Annotated[Decimal, Field(max_digits=40, allow_inf_nan=False)]
    Unit: str = "USD"


class _Group(_Answer):
    Keys: Annotated[list[str], Field(min_length=1, max_length=1)]
    Metrics: dict[str, _Amount]


class _Day(_Answer):
    Groups: tuple[_Group, ...] = ()
    Estimated: bool = False


_DAYS = TypeAdapter(list[_Day])


def bill(api: Api, begin: date, end: date) -> Bill:
    """Returns what AWS bills for these days, by environment.

    Args:
        end: the day after the last.

    Raises:
        HostError: Cost Explorer is not switched on, or the credentials lack the right.
        InfrastructureError: it does not answer, or what it answers is not of the documented form.
    """
    sums: dict[str, Decimal] = {}
    estimated, requests = False, 0
    for days in _pages(api, begin, end):
        requests += 1
        for day in days:
            estimated = estimated or day.Estimated
            for group in day.Groups:
                # "TAG$VALUE", and nothing behind the dollar sign for what bears no such tag.
                name = group.Keys[0].partition("$")[2]
                sums[name] = sums.get(name, Decimal(0)) + _usd(group)
    untagged = sums.pop("", Decimal(0))
    return Bill(usd_by_environment=sums, untagged_usd=untagged, estimated=estimated, requests=requests)


def _usd(group: _Group) -> Decimal:
    amount = group.Metrics.get(METRIC)
    if amount is None or amount.Unit != "USD":
        raise InfrastructureError(f"Cost Explorer's answer has no {METRIC} in USD.")
    return amount.Amount


def _pages(api: Api, begin: date, end: date) -> Iterator[list[_Day]]:
    request: dict[str, Any] = {
        "TimePeriod": {"Start": begin.isoformat(), "End": end.isoformat()},
        "Granularity": "DAILY",
        "Metrics": [METRIC],
        "GroupBy": [{"Type": "TAG", "Key": ENVIRONMENT_TAG}],
    }
    for _ in range(MOST_PAGES):
        with asking("Asking Cost Explorer"):
            try:
                answer = api.client("ce", REGION).get_cost_and_usage(**request)
            except ClientError as error:
                if code_of(error) == NOT_YET or NEVER_ON in str(error).lower():
                    raise HostError("Cost Explorer has no data of this account.", hint=HINT) from error
                raise
        try:
            yield _DAYS.validate_python(answer.get("ResultsByTime"))
        except ValidationError as error:
            raise InfrastructureError("Cost Explorer's answer is not of the documented form.") from error
        token = answer.get("NextPageToken")
        if not token:
            return
        request["NextPageToken"] = token
    raise InfrastructureError(f"Cost Explorer's answer has more than {MOST_PAGES} pages.")
