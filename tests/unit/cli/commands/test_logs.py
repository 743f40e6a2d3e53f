"""Tests the command `logs`: its order, its options, and logs that grow while they are followed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.base.models import Breakdown, Environment
from provisioner.cli.commands import logs
from provisioner.cli.commands.logs import END_GRACE, OVERLAP_BYTES, PIECE_BYTES, Followed, last_lines
from provisioner.store.environments import EnvironmentStore
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment

ROOT = Path(__file__).parents[4]


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
    assert provisioner(*chosen, "--follow").stdout == "\n==> agent <==\nagent 4\n\n==> start <==\nstart 4\n"


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


@pytest.mark.parametrize("more", ["--json", "--list"])
def test_following_prints_text(provisioner: CommandLine, ended: Environment, more: str) -> None:
    assert provisioner("logs", ended.id, "--follow", more).code == 2


def test_a_fetched_console_does_not_replace_a_kept_one(provisioner: CommandLine, store: EnvironmentStore) -> None:
    saved = store.save(environment("echo-main-bcd234"))
    kept = store.logs(saved.id) / "console-primary.log"
    kept.write_text("the token is [redacted:TOKEN]\n")
    machine = store.directory(saved.id) / "primary"
    machine.mkdir()
    (machine / "serial.log").write_text("the token is s3cret-value\nmore\n")
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


def test_following_a_log_of_many_short_lines_costs_little_memory(tmp_path: Path) -> None:
    size = 2 << 20
    (tmp_path / "agent.log").write_bytes(b"a\n" * (size // 2))
    program = """
import sys, tracemalloc
from pathlib import Path
from provisioner.cli.commands.logs import FollowedLogs
followed = FollowedLogs(("agent",), 1 << 30)
tracemalloc.start()
followed.show([Path(sys.argv[1])])
print(tracemalloc.get_traced_memory()[1], file=sys.stderr)
"""
    # In a process of its own: what other tests have left behind in this one allocates memory, too.
    command = [sys.executable, "-c", program, str(tmp_path / "agent.log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout) == size
    assert int(done.stderr) < 6 * size


def test_a_log_that_grows_is_read_on_also_from_the_archive(tmp_path: Path) -> None:
    path, archived = tmp_path / "agent.log", tmp_path / "archived.log"
    log = Followed(1)
    assert log.read(path) == b""
    path.write_text("one\ntwo\n")
    assert log.read(path) == b"two\n"
    with path.open("a") as file:
        file.write("three\n")
    assert (log.read(path), log.read(path)) == (b"three\n", b"")
    archived.write_text(path.read_text() + "four\n")
    path.unlink()
    assert (log.read(path), log.read(archived)) == (b"", b"four\n")


def test_a_rewritten_log_is_followed_from_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    lines = [f"line {number}\n".encode() for number in range(3000)]
    path.write_bytes(b"".join(lines[:2000]))
    log = Followed(10_000)
    assert log.read(path) == b"".join(lines[:2000])
    path.write_bytes(b"cut\n" + b"".join(lines[1000:2500]))
    assert log.read(path) == b"".join(lines[2000:2500])
    path.write_bytes(b"".join(lines[2490:2500]) + b"end\n" + b"".join(lines[1000:2500]) + b"more\n")
    assert log.read(path) == b"more\n"
    path.write_bytes(b"something else " * OVERLAP_BYTES)
    assert log.read(path).startswith(b"[...]\n")


@pytest.fixture
def followed(store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """An environment with a log, whose consoles no test asks a cloud for."""
    monkeypatch.setattr(logs, "_fetch", lambda *_: None)
    saved = store.save(environment("echo-main-bcd234"))
    (store.logs(saved.id) / "agent.log").write_text("early\n" * 50)
    return saved


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """What happens between two looks at the logs, one after the other."""
    coming: list[Callable[[], object]] = []
    monkeypatch.setattr("provisioner.cli.commands.logs.time.sleep", lambda _: coming.pop(0)())
    yield coming
    assert coming == []


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_following_ends_with_the_environment(
    provisioner: CommandLine, store: EnvironmentStore, followed: Environment, looks: list[Callable[[], object]]
) -> None:
    directory = store.logs(followed.id)

    def end() -> None:
        append(directory / "agent.log", b"last\n")
        (directory / "teardown.log").write_text("gone")
        store.archive(followed)

    looks += [partial(append, directory / "agent.log", b"\x1b[2Jlate\n"), end]
    done = provisioner("logs", followed.id, "--follow", "--tail", "2")
    expected = "\n==> agent <==\nearly\nearly\nlate\nlast\n\n==> teardown <==\ngone"
    assert (done.code, done.stdout) == (0, expected)


def test_following_shows_whole_lines_of_terraforms_messages(
    provisioner: CommandLine, store: EnvironmentStore, followed: Environment, looks: list[Callable[[], object]]
) -> None:
    path, long = store.logs(followed.id) / "terraform.log", "x" * (PIECE_BYTES + 1)
    line = json.dumps({"@level": "info", "@message": "Creating..."}).encode()
    looks += [partial(append, path, line[:9]), partial(append, path, line[9:] + b"\nplain\n" + long.encode())]
    looks += [partial(append, path, b"\n" + line), lambda: store.archive(followed)]
    done = provisioner("logs", followed.id, "--follow", "--only", "terraform")
    assert (done.code, done.stdout) == (0, f"Creating...\nplain\n{long}\nCreating...")


def test_following_shows_whole_characters(
    provisioner: CommandLine, store: EnvironmentStore, followed: Environment, looks: list[Callable[[], object]]
) -> None:
    path = store.logs(followed.id) / "agent.log"
    first, second = "ä".encode()[:1], "ä".encode()[1:]
    looks += [partial(append, path, first), partial(append, path, second + b"\x1b[3"), partial(append, path, b"1mb")]
    looks += [partial(append, path, first), lambda: store.archive(followed)]
    done = provisioner("logs", followed.id, "--follow", "--tail", "0", "--only", "agent")
    assert (done.code, done.stdout) == (0, "äb\N{REPLACEMENT CHARACTER}")


def test_following_ends_after_the_time_to_live(
    provisioner: CommandLine, store: EnvironmentStore, followed: Environment, looks: list[Callable[[], object]]
) -> None:
    looks.append(lambda: store.update(followed, expires_at=now() - 2 * END_GRACE))
    assert provisioner("logs", followed.id, "--follow", "--tail", "1").stdout == "\n==> agent <==\nearly\n"


def test_following_a_log_that_never_came_is_refused(provisioner: CommandLine, ended: Environment) -> None:
    assert provisioner("logs", ended.id, "--follow", "--only", "nothing").code == 2
    assert provisioner("logs", ended.id, "--follow", "--only", "agent", "--tail", "1").stdout == "agent 4\n"


def test_following_onto_a_full_disk_is_the_hosts_fault(provisioner: CommandLine, ended: Environment) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, ROOT / "cli.py", "logs", ended.id, "--follow"], check=False,
            env={**os.environ, "PROVISIONER_HOME": str(provisioner.home)}, stdout=full, stderr=subprocess.PIPE,
        )  # fmt: skip
    assert done.returncode == 3
    assert b"The output could not be written: No space left on device" in done.stderr
