"""Tests the ledger: reservations, settlements, budgets, and any number of controllers at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sqlite3
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provisioner.base.config import Settings, StandingBudgets
from provisioner.base.errors import BudgetError, InfrastructureError
from provisioner.base.models import Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.costs.ledger import Budget, Entry, Ledger, Spending, totals
from provisioner.costs.prices import micro_usd
from provisioner.machines.claims import reserve
from provisioner.session import Session
from provisioner.store.home import Home
from tests.unit.conftest import CommandLine
from tests.waiting import BOUND_SECONDS

BEGIN = datetime(2026, 1, 31, 23, tzinfo=UTC)


def entry(name: str, held: int, command: str = "c1", **changes: Any) -> Entry:
    values: dict[str, Any] = {
        "environment": name, "kind": "task", "cloud": "aws", "region": "us-east-1", "family": "fam", "task": "main",
        "batch": "", "project": "default", "command": command, "launched_at": BEGIN,
        "expires_at": BEGIN + timedelta(hours=4), "reserved_micro_usd": held, **changes,
    }  # fmt: skip
    return Entry.model_validate(values)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger")


def budget(micro_usd: int, scope: str = "project", of: str = "default") -> list[Budget]:
    return [Budget.model_validate({"scope": scope, "of": of, "micro_usd": micro_usd, "name": "the budget"})]


def test_a_hold_that_does_not_fit_is_refused_with_the_arithmetic(ledger: Ledger) -> None:
    ledger.reserve(entry("a", 600_000), budget(1_000_000))
    ledger.reserve(entry("b", 300_000), budget(1_000_000))
    ledger.settle("a", BEGIN + timedelta(hours=1), 150_000)
    with pytest.raises(BudgetError) as refused:
        ledger.reserve(entry("c", 550_001), budget(1_000_000))
    assert "0.1500 USD spent + 0.3000 USD reserved + 0.5501 USD for this launch" in refused.value.message
    assert refused.value.exit_code == 8
    assert [each.environment for each in ledger.entries()] == ["a", "b"]
    ledger.reserve(entry("c", 550_000), budget(1_000_000))
    assert [each.environment for each in ledger.entries(unsettled=True)] == ["b", "c"]


def test_the_latest_ends_are_of_unsettled_launches_that_hold_money_or_are_on_the_cloud(ledger: Ledger) -> None:
    assert (ledger.latest_ends("aws").paid, ledger.latest_ends("aws").on_cloud) == (None, None)
    hours = {"settled": 9, "free": 8, "elsewhere": 7, "here": 6, "earlier": 5}
    for name, hour in hours.items():
        cloud = "local" if name in ("free", "elsewhere") else "aws"
        held = 0 if name == "free" else 1
        ledger.reserve(entry(name, held, cloud=cloud, expires_at=BEGIN + timedelta(hours=hour)))
    ledger.settle("settled", BEGIN, 1)
    ends = [(each.paid, each.on_cloud) for each in map(ledger.latest_ends, ("aws", "local", "gone"))]
    paid = BEGIN + timedelta(hours=7)
    assert ends == [(paid, BEGIN + timedelta(hours=6)), (paid, BEGIN + timedelta(hours=8)), (paid, None)]


def test_a_refusal_says_whether_waiting_may_help(ledger: Ledger) -> None:
    ledger.reserve(entry("spent", 200, "c1"))
    ledger.settle("spent", BEGIN + timedelta(hours=1), 200)
    ledger.reserve(entry("runs", 700))
    for amount, may_fit in ((300, True), (800, True), (801, False), (2000, False)):
        with pytest.raises(BudgetError) as refused:
            ledger.reserve(entry("new", amount), budget(1000))
        assert refused.value.may_fit_later == may_fit
    with pytest.raises(BudgetError) as refused:
        ledger.reserve(entry("new", 300), [*budget(1000), *budget(400, "command", "c1")])
    assert not refused.value.may_fit_later


def test_a_settlement_counts_once_and_an_unknown_one_not_at_all(ledger: Ledger, tmp_path: Path) -> None:
    ledger.settle("nobody", BEGIN, 5)
    assert not (tmp_path / "ledger").exists()
    ledger.reserve(entry("a", 100))
    ledger.settle("a", BEGIN + timedelta(hours=1), 40)
    ledger.settle("a", BEGIN + timedelta(hours=9), 99)
    [settled] = ledger.entries()
    assert (settled.actual_micro_usd, settled.counted_micro_usd) == (40, 40)
    assert settled.ended_at == BEGIN + timedelta(hours=1)


def test_each_kind_of_budget_counts_what_is_its_own(ledger: Ledger) -> None:
    ledger.reserve(entry("a", 50, command="c1", project="p1"))
    ledger.reserve(entry("b", 50, command="c2", project="p1", launched_at=BEGIN + timedelta(hours=2)))
    fits = [("command", "c1", 60), ("project", "p1", 110), ("month", "2026-01", 60), ("month", "2026-02", 60)]
    for scope, of, least in fits:
        changes = {"launched_at": BEGIN} if of != "2026-02" else {"launched_at": BEGIN + timedelta(hours=3)}
        new = entry("c", 10, command="c1", project="p1", **changes)
        with pytest.raises(BudgetError):
            ledger.reserve(new, budget(least - 1, scope, of))
        ledger.reserve(new, budget(least, scope, of))
        ledger.settle("c", BEGIN, 0)


def test_a_longer_hold_has_to_fit_too(ledger: Ledger) -> None:
    ledger.reserve(entry("a", 100))
    later = BEGIN + timedelta(hours=8)
    with pytest.raises(BudgetError):
        ledger.extend("a", later, 200, lambda _: budget(199))
    ledger.extend("a", later, 200, lambda _: budget(200))
    [held] = ledger.entries()
    assert (held.reserved_micro_usd, held.expires_at) == (200, later)
    ledger.settle("a", BEGIN, 7)
    ledger.extend("a", later, 999)
    assert ledger.entries()[0].counted_micro_usd == 7


def test_what_has_no_record_settles_by_its_share_of_the_hold(ledger: Ledger) -> None:
    for name, after, expected in (("a", 1, 25), ("b", 99, 100)):
        ledger.reserve(entry(name, 100))
        ledger.settle_late(name, BEGIN + timedelta(hours=after))
        assert next(each for each in ledger.entries() if each.environment == name).actual_micro_usd == expected


@pytest.mark.parametrize(
    ("lives", "ended"),
    [(timedelta(hours=4), -timedelta(hours=3)), (timedelta(0), timedelta(0)), (-timedelta(hours=1), timedelta(0))],
    ids=["clock-set-back", "no-life", "ends-first"],
)
def test_a_life_that_cannot_be_told_costs_all_that_was_reserved(
    ledger: Ledger, lives: timedelta, ended: timedelta
) -> None:
    ledger.reserve(entry("a", 100, expires_at=BEGIN + lives))
    ledger.settle_late("a", BEGIN + ended)
    [settled] = ledger.entries()
    assert (settled.actual_micro_usd, settled.ended_at) == (100, BEGIN + lives)


class InterruptedByCommit(sqlite3.Connection):
    """A connection with a Ctrl-C during COMMIT, which Python raises after it."""

    interrupted = False

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        done = super().execute(sql, *args)
        if sql == "COMMIT" and not InterruptedByCommit.interrupted:
            InterruptedByCommit.interrupted = True
            raise KeyboardInterrupt
        return done


def test_ctrl_c_during_a_reservation_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    home.make()
    session = Session(home=home, cloud=LocalCloud(home, Settings()))
    size = MachineSize(cpus=1, memory_gib=1, disk_gib=16)
    now = datetime.now(UTC)
    environment = Environment(
        id="env", cloud="local", stack="env", family="fam", task="main", status="creating", created_at=now,
        expires_at=now + timedelta(hours=1), setup=TaskSetup(), full_internet=False,
        machines={"primary": MachineRecord(image="i", size=size, user="root")},
    )  # fmt: skip
    monkeypatch.setattr(InterruptedByCommit, "interrupted", False)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=InterruptedByCommit))
    with pytest.raises(KeyboardInterrupt):
        reserve(session, environment)
    assert InterruptedByCommit.interrupted
    assert session.ledger.entries(unsettled=True) == []


def test_a_damaged_ledger_stops_launches_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_bytes(b"no database" * 500)
    with pytest.raises(InfrastructureError, match="cannot be used") as error:
        Ledger(tmp_path / "ledger").reserve(entry("a", 1))
    assert "Nothing is launched" in (error.value.hint or "")


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "settle", "extend"]), st.integers(0, 5), st.integers(0, 120)), max_size=40
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(0, 200))
def test_whatever_happens_the_budget_holds_and_the_sums_add_up(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int, int]], room: int
) -> None:
    ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger")
    model: dict[str, tuple[int, int | None]] = {}  # environment -> held, actual
    for action, number, amount in actions:
        name = f"e{number}"
        others = sum(h if a is None else a for other, (h, a) in model.items() if other != name)
        fits = others + amount <= room
        held, actual = model.get(name, (0, None))
        if action == "settle":
            ledger.settle(name, BEGIN, min(amount, held))
            if name in model and actual is None:
                model[name] = (held, min(amount, held))
        elif action == "reserve" and name not in model:
            try:
                ledger.reserve(entry(name, amount), budget(room))
                model[name] = (amount, None)
                assert fits
            except BudgetError:
                assert not fits
        elif action == "extend" and name in model and actual is None and amount >= held:
            try:
                ledger.extend(name, BEGIN, amount, lambda _: budget(room))
                model[name] = (amount, None)
                assert fits
            except BudgetError:
                assert not fits
        assert {
            each.environment: (each.reserved_micro_usd, each.actual_micro_usd) for each in ledger.entries()
        } == model
        assert sum(each.counted_micro_usd for each in ledger.entries()) <= room


def launch(path: Path, names: list[str], results: Any, start: Any) -> None:
    """Runs a controller that launches environments one after the other and settles some of them."""
    start.wait()
    ledger = Ledger(path)
    for name in names:
        try:
            ledger.reserve(entry(name, micro_usd(Decimal("0.5"))), budget(micro_usd(Decimal(20))))
            results.put((name, "ran"))
        except BudgetError:
            results.put((name, "refused"))


def test_a_hundred_launches_from_eight_processes_never_overshoot(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results, start = context.Queue(), context.Event()
    names = [f"env-{number}" for number in range(100)]
    controllers = [
        context.Process(target=launch, args=(tmp_path / "ledger", names[number::8], results, start))
        for number in range(8)
    ]
    for controller in controllers:
        controller.start()
    start.set()
    outcomes = [results.get(timeout=BOUND_SECONDS)[1] for _ in names]
    for controller in controllers:
        controller.join()
    assert (outcomes.count("ran"), outcomes.count("refused")) == (40, 60)
    held = Ledger(tmp_path / "ledger").entries()
    assert sum(each.reserved_micro_usd for each in held) == 20_000_000
    # Settling for less makes room for further launches, to the cent.
    for each in held:
        Ledger(tmp_path / "ledger").settle(each.environment, BEGIN, 125_000)
    for number in range(30):
        Ledger(tmp_path / "ledger").reserve(entry(f"late-{number}", 500_000), budget(20_000_000))
    with pytest.raises(BudgetError):
        Ledger(tmp_path / "ledger").reserve(entry("last", 1), budget(20_000_000))


def test_a_killed_controller_leaves_whole_entries(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for round_number in range(5):
        results, start = context.Queue(), context.Event()
        names = [f"r{round_number}-{number}" for number in range(200)]
        controller = context.Process(target=launch, args=(tmp_path / "ledger", names, results, start))
        controller.start()
        start.set()
        results.get(timeout=BOUND_SECONDS)
        os.kill(controller.pid or 0, signal.SIGKILL)
        controller.join()
        entries = Ledger(tmp_path / "ledger").entries()
        assert sum(each.reserved_micro_usd for each in entries) <= 20_000_000
        assert {each.reserved_micro_usd for each in entries} == {500_000}


@pytest.mark.parametrize(
    ("spending", "limits"),
    [
        ({}, []),
        ({"budget": 2}, [("command", "c", 2_000_000, "the budget given")]),
        ({"month": "0.0000001"}, [("month", "2026-01", 1, "the budget of 2026-01")]),
        ({"projects": {"other": 1}}, []),
        ({"projects": {"p": 0}}, [("project", "p", 0, "the budget of the project p")]),
    ],
    ids=["none", "command", "month", "other-project", "project"],
)
def test_only_what_was_set_is_a_limit(spending: dict[str, object], limits: list[tuple[object, ...]]) -> None:
    spent = Spending.model_validate({"command": "c", "project": "p", **spending})
    assert [(one.scope, one.of, one.micro_usd, one.name) for one in spent.budgets(BEGIN)] == limits


def test_every_command_has_a_name_of_its_own() -> None:
    assert Spending().command != Spending().command


def test_the_operators_settings_are_the_standing_budgets() -> None:
    standing = StandingBudgets(month=Decimal(500), projects={"a": Decimal(100), "b": Decimal(1)})
    spending = Spending.of(Settings(project="a", budget=standing), Decimal(20))
    budgets = {limit.scope: (limit.of, limit.micro_usd) for limit in spending.budgets(BEGIN)}
    assert budgets == {
        "command": (spending.command, 20_000_000), "project": ("a", 100_000_000), "month": ("2026-01", 500_000_000),
    }  # fmt: skip
    assert spending.batch == ""
    assert Spending.of(Settings()).budgets(BEGIN) == []


def test_sums_are_by_what_was_asked_for() -> None:
    entries = [
        entry("a", 10, batch="b1"),
        entry("b", 20, batch="b1", ended_at=BEGIN, actual_micro_usd=5),
        entry("c", 40, launched_at=BEGIN + timedelta(hours=2)),
    ]
    by_batch = {
        total.group: (total.launches, total.reserved_micro_usd, total.actual_micro_usd)
        for total in totals(entries, "batch")
    }
    assert by_batch == {"b1": (2, 10, 5), "": (1, 40, 0)}
    assert [total.group for total in totals(entries, "day")] == ["2026-01-31", "2026-02-01"]


def test_costs_are_shown_as_table_json_and_csv(provisioner: CommandLine) -> None:
    assert provisioner("costs").stdout == "Nothing has been launched yet.\n"
    provisioner.home.mkdir(exist_ok=True)
    ledger = Ledger(provisioner.home / "ledger.sqlite")
    ledger.reserve(entry("env-a", 250_000))
    ledger.reserve(entry("env-b", 50_000))
    ledger.settle("env-b", BEGIN + timedelta(hours=1), 12_500)
    table = provisioner("costs").stdout
    assert "env-a" in table
    assert "0.2500 USD  0.0125 USD" in table.splitlines()[-3]
    assert table.splitlines()[-1].startswith("Not included on aws: ")
    data = provisioner("costs", "--json", "--by", "family").json
    assert (data["reserved_usd"], data["actual_usd"], data["totals"][0]["launches"]) == (0.25, 0.0125, 2)
    rows = provisioner("costs", "--csv").stdout.splitlines()
    assert rows[0].startswith("environment,kind,cloud,region,family,task")
    assert rows[2].endswith("0.0125")
    assert provisioner("costs", "--by", "moon").code == 2


def test_a_ledger_of_another_version_is_refused(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger")) as connection:
        connection.execute("PRAGMA user_version = 1")
    with pytest.raises(InfrastructureError, match=r"written by another version of provisioner \(schema 1\)"):
        Ledger(tmp_path / "ledger").reserve(entry("a", 1))
