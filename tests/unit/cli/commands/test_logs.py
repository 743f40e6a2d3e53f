"""Tests the command `logs`: its order and its options."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from provisioner.base.clock import now
from provisioner.base.models import Breakdown, Environment
from provisioner.cli.commands.logs import last_lines
from provisioner.store.environments import EnvironmentStore
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment


@pytest.fixture
def ended(store: EnvironmentStore) -> Environment:
    """An environment whose start() failed, and its logs."""
    failed = Breakdown(phase="start", message="start() failed", at=now())
    saved = store.save(environment("echo-main-bcd234").model_copy(update={"breakdown": failed}))
    for name in ("agent", "start", "terraform"):
        (store.logs(saved.id) / f"{name}.log").write_text("".join(f"{name} {number}\n" for number in range(5)))
    store.archive(saved)
    return saved


@pytest.mark.parametrize(
    ("phase", "order", "failed"),
    [
        ("start", "start agent install console-primary console-web terraform", 1),
        ("boot", "console-primary console-web terraform agent install start", 3),
        (None, "agent install start console-primary console-web terraform", 0),
    ],
    ids=["start", "boot", "nothing"],
)
def test_what_failed_comes_first_and_long_logs_last(
    provisioner: CommandLine, store: EnvironmentStore, phase: str | None, order: str, failed: int
) -> None:
    given = environment("echo-main-bcd234")
    machines = {**given.machines, "web": given.machines["primary"]}
    breakdown = Breakdown(phase=phase, message="it failed", at=now()) if phase else None
    saved = store.save(given.model_copy(update={"breakdown": breakdown, "machines": machines}))
    for name in order.split():
        (store.logs(saved.id) / f"{name}.log").write_text("x")
    store.archive(saved)
    parts = provisioner("logs", saved.id, "--list", "--json").json["parts"]
    assert [each["part"] for each in parts] == order.split()
    assert [each["failed"] for each in parts] == [place < failed for place in range(6)]
    shown = provisioner("logs", saved.id).stdout
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("==>")] == order.split()


def test_a_log_that_goes_meanwhile_hides_no_others(
    provisioner: CommandLine, ended: Environment, store: EnvironmentStore
) -> None:
    for name in range(10):  # whichever comes first in the directory
        (store.archived_logs(ended.id) / f"{name}.log").symlink_to("gone")
    parts = provisioner("logs", ended.id, "--list", "--json").json["parts"]
    assert [each["part"] for each in parts] == ["start", "agent", "terraform"]


def test_one_log_and_its_end(provisioner: CommandLine, ended: Environment) -> None:
    shown = provisioner("logs", ended.id, "--only", "agent", "--tail", "2").stdout
    assert shown == "==> agent <==\nagent 3\nagent 4\n"
    assert provisioner("logs", ended.id, "--tail", "0", "--json").json["logs"] == {
        "start": "",
        "agent": "",
        "terraform": "",
    }
    refused = provisioner("logs", ended.id, "--only", "nothing")
    assert (refused.code, "has no log 'nothing'" in refused.stderr, "--list" in refused.stderr) == (2, True, True)


def test_several_logs_are_chosen_and_shown_in_their_order(provisioner: CommandLine, ended: Environment) -> None:
    chosen = ("logs", ended.id, "--only", "agent", "--only", "start", "--tail", "1")
    assert provisioner(*chosen).stdout == "==> start <==\nstart 4\n\n==> agent <==\nagent 4\n"


def test_no_lines_of_a_log_are_its_heading_alone(provisioner: CommandLine, ended: Environment) -> None:
    assert provisioner("logs", ended.id, "--only", "agent", "--tail", "0").stdout == "==> agent <==\n\n"


def test_empty_logs_are_named_in_one_line(
    provisioner: CommandLine, ended: Environment, store: EnvironmentStore
) -> None:
    for name in ("agent", "terraform"):
        (store.logs(ended.id) / f"{name}.log").write_text("")
    assert provisioner("logs", ended.id, "--tail", "1").stdout == "==> start <==\nstart 4\n\nEmpty: agent, terraform.\n"


def test_terraforms_messages_are_shown_without_its_json(
    provisioner: CommandLine, ended: Environment, store: EnvironmentStore
) -> None:
    nested = f'{{"a": {"[" * 100_000}{"]" * 100_000}}}'
    detail = "There is no such key.\r==> score <==\n\x1b[0m==> x <=="
    error = json.dumps({"@message": "Error: no", "diagnostic": {"detail": detail}})
    written = f'{{"@message": "Plan: 2 to add"}}\n{error}\n{{not JSON}}\n{{"a": 1}}\n{nested}\nplain\n'
    (store.logs(ended.id) / "terraform.log").write_text(written)
    shown = provisioner("logs", ended.id, "--only", "terraform")
    said = ["Plan: 2 to add", "Error: no", "There is no such key.", "  ==> score <==", "  ==> x <=="]
    assert shown.stdout.splitlines()[1:] == [*said, "{not JSON}", '{"a": 1}', nested, "plain"]
    assert provisioner("logs", ended.id, "--json").json["logs"]["terraform"] == written


def test_the_list_of_logs_names_what_failed(provisioner: CommandLine, ended: Environment) -> None:
    lines = provisioner("logs", ended.id, "--list").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["PART", "BYTES"], ["start", "40", "failed"], ["agent", "40"], ["terraform", "60"],
    ]  # fmt: skip
    parts = provisioner("logs", ended.id, "--list", "--json").json["parts"]
    assert parts[0] == {"part": "start", "bytes": 40, "failed": True}


def test_a_fetched_console_does_not_replace_a_kept_one(provisioner: CommandLine, store: EnvironmentStore) -> None:
    saved = store.save(environment("echo-main-bcd234"))
    kept = store.logs(saved.id) / "console-primary.log"
    kept.write_text("the token is [redacted:TOKEN]\n")
    machine = store.directory(saved.id) / "primary"
    (machine / "run").mkdir(parents=True)
    (machine / "run/serial.log").write_text("the token is s3cret-value\nmore\n")
    assert provisioner("logs", saved.id).stdout == "==> console-primary <==\nthe token is s3cret-value\nmore\n"
    assert kept.read_text() == "the token is [redacted:TOKEN]\n"
    # Kept once more at the end, when there is nothing left to fetch: as if something else of it could not be destroyed.
    shutil.rmtree(machine)
    newer = (store.fetched_logs(saved.id) / kept.name).stat().st_mtime_ns + 1
    os.utime(kept, ns=(newer, newer))
    assert provisioner("logs", saved.id).stdout == "==> console-primary <==\nthe token is [redacted:TOKEN]\n"
    store.archive(store.record(saved.id) or saved)
    assert provisioner("logs", saved.id).stdout == "==> console-primary <==\nthe token is [redacted:TOKEN]\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, b""), (1, b"c"), (2, b"b\nc"), (9, b"a\nb\nc")], ids=["none", "one", "two", "all"]
)
def test_the_last_lines_of_a_log(count: int, text: bytes) -> None:
    assert last_lines(b"a\nb\nc", count) == text
    assert last_lines(b"a\nb\nc\n", count) == (text + b"\n" if count else b"")
