"""Tests what `costs --actual` shows, on a fake cloud's bill."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from provisioner.cli.commands import costs
from provisioner.clock import now
from provisioner.costs.bill import Bill
from provisioner.costs.ledger import Entry, Ledger
from provisioner.session import Session
from tests.unit.conftest import CommandLine
from tests.unit.fakes.cloud import FakeCloud


@pytest.fixture
def billed(session: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A ledger with two launches on AWS and one elsewhere, and a bill that names one of them and another home's."""
    launched = now() - timedelta(days=6)
    for name, place in (("first-aaa", "aws"), ("second-bbb", "aws"), ("third-ccc", "local")):
        entry = Entry(
            environment=name, kind="task", cloud=place, region="us-east-1", family="f", task="t", batch="",
            project="p", command="c", launched_at=launched, expires_at=launched + timedelta(hours=4),
            reserved_micro_usd=900_000,
        )  # fmt: skip
        session.ledger.reserve(entry)
        session.ledger.settle(name, launched + timedelta(hours=1), 500_000)
    bill = Bill(usd_by_environment={"first-aaa": Decimal("0.61"), "other": Decimal(2)}, untagged_usd=Decimal("3.25"))
    monkeypatch.setattr(cloud, "bill", lambda *_: bill)
    monkeypatch.setattr(costs, "session", lambda **_: replace(session, cloud=cloud))
    return session


@pytest.mark.usefixtures("billed")
def test_the_ledger_stands_beside_the_bill(provisioner: CommandLine) -> None:
    shown = [" ".join(line.split()) for line in provisioner("costs", "--cloud", "aws", "--actual").stdout.splitlines()]
    assert "first-aaa 0.5000 USD 0.6100 USD 0.1100 USD" in shown
    assert "second-bbb 0.5000 USD - - not on the bill" in shown
    assert "other - 2.0000 USD - not in the ledger" in shown
    assert "total of what is known 0.5000 USD 0.6100 USD 0.1100 USD" in shown
    assert not [line for line in shown if "third-ccc" in line]
    assert any("3.2500 USD of it has no environment's tag: public IPv4 addresses" in line for line in shown)


@pytest.mark.usefixtures("billed")
def test_it_is_json_for_machines(provisioner: CommandLine) -> None:
    data = provisioner("costs", "--cloud", "aws", "--actual", "--json").json
    assert [(row["environment"], row["difference_usd"], row["state"]) for row in data["comparisons"]] == [
        ("first-aaa", 0.11, "known"),
        ("second-bbb", None, "not on the bill"),
        ("other", None, "not in the ledger"),
    ]
    assert (data["ledger_usd"], data["bill_usd"], data["requests"]) == (0.5, 0.61, 1)


def test_a_bill_without_environments_explains_the_tag(
    provisioner: CommandLine, billed: Session, cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(billed.ledger, Ledger)
    monkeypatch.setattr(cloud, "bill", lambda *_: Bill(usd_by_environment={}))
    assert "cost allocation tag" in provisioner("costs", "--cloud", "aws", "--actual").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--actual"], "Give --cloud aws"),
        (["--actual", "--cloud", "aws", "--csv"], "Give --cloud aws"),
        (["--actual", "--cloud", "aws", "--by", "day"], "Give --cloud aws"),
        (["--cloud", "moon"], "There is no cloud 'moon'"),
        (["--cloud", "local", "--actual"], "Nothing has been launched on local yet."),
    ],
)
def test_what_cannot_be_compared_is_refused(provisioner: CommandLine, arguments: list[str], said: str) -> None:
    done = provisioner("costs", *arguments)
    assert said in done.stdout + done.stderr
    assert done.code == (0 if "yet" in said else 2)
