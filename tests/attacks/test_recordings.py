"""Attacks on what is recorded: floods, packets and names that machines choose, and forged results."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.redaction import Redactor
from provisioner.clouds.local.network.captures import existing
from provisioner.machines.recordings import read_capture
from provisioner.recording import manifest, packets
from provisioner.recording.calls import Call, CallLog
from provisioner.recording.casts import LIMIT_BYTES, Cast, DamagedCastError, events_of, header_of
from provisioner.recording.manifest import MANIFEST, load, problems, seal
from provisioner.recording.published import check_results
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import write_atomically
from provisioner.store.home import Home
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment
from tests.unit.recording.test_packets import HEADER, record

ROOT = Path(__file__).parents[2]
NAMES = {
    "root": "/etc/passwd",
    "parents": "../../../../../../etc/passwd",
    "parent": "..",
    "itself": ".",
    "empty": "",
    "below": "a/b",
    "hidden": ".hidden",
    "nul": "x\0y",
    "no-ascii": "\N{EURO SIGN}",
}


@pytest.mark.parametrize(
    "flood", [b"\x1b" * 65536, b"\xff" * 65536, b"aaaa" * 16384], ids=["escape", "no-utf8", "secret"]
)
def test_a_flood_of_output_leaves_a_bounded_recording(tmp_path: Path, flood: bytes) -> None:
    begin = time.process_time()
    with Cast(tmp_path, "agent", Redactor({"TOKEN": "aaaa"})) as cast:
        for _ in range(320):  # 20 MiB
            cast.show(flood)
    assert (tmp_path / "agent-1.cast").stat().st_size <= LIMIT_BYTES
    assert time.process_time() - begin < 60
    last = ""
    for event in events_of(tmp_path / "agent-1.cast"):
        last = event.kind
    assert last in "om"


def test_a_recording_of_one_endless_line_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "agent-1.cast"
    with path.open("wb") as file:
        file.write(b'{"version": 2}\n[0, "o", "')
        file.truncate(8 << 30)
    with pytest.raises(DamagedCastError, match="line 2 cannot be read"):
        list(events_of(path))


@pytest.mark.parametrize(
    "text",
    ["\x1b]52;c;AAAA\x07", "\x1b[2J\x1b[H", "\x9b31m", "a\rb", "\u202ereversed", "\x1b" * 1000, "\x1b]0;title\x1b\\"],
    ids=["clipboard", "clear", "c1", "return", "bidi", "escapes", "title"],
)
def test_a_replay_controls_no_terminal(provisioner: CommandLine, text: str) -> None:
    store = EnvironmentStore(Home(provisioner.home))
    Home(provisioner.home).make()
    env = store.save(environment("echo-main-bcd234", recorded=True))
    with Cast(store.logs(env.id), "terminal", Redactor({}), f"run {text}") as cast:
        for character in text:  # sequences that span events
            cast.output(character)
    shown = provisioner("replay", env.id).stdout
    assert shown.startswith("==> terminal-1: run ")
    assert all(character.isprintable() or character in "\n\t" for character in shown)


@pytest.mark.parametrize(
    "line",
    [f'[1{"0" * 400}, "o", "x"]', f'[-1{"0" * 400}, "o", "x"]', '[1e999, "o", "x"]', '[NaN, "o", "x"]', "[" * 100_000,
     '[1e300, "o", "x"]', '{"a": 1, "a": 2}', '[0, "o", "\\ud800"]', "[0"],
    ids=["huge", "huge-negative", "infinite", "nan", "deep", "millennia", "twice", "surrogate", "cut"],
)  # fmt: skip
def test_a_line_that_is_no_event_ends_a_replay_with_its_number(provisioner: CommandLine, line: str) -> None:
    store = EnvironmentStore(Home(provisioner.home))
    Home(provisioner.home).make()
    env = store.save(environment("echo-main-bcd234"))
    (store.logs(env.id) / "a-1.cast").write_text(f'{{"version": 2}}\n[0, "o", "before"]\n{line}\n')
    done = provisioner("replay", env.id)
    assert (done.code, "before" in done.stdout, "cannot be read further: line 3" in done.stderr) == (1, True, True)
    [part] = provisioner("replay", env.id, "--json").json["parts"]
    assert (len(part["events"]), part["damaged"].startswith("line 3 ")) == (1, True)


def test_a_time_that_goes_back_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "a-1.cast"
    path.write_text('{"version": 2}\n[5, "o", "a"]\n[-1e9, "o", "b"]\n[4, "o", "c"]\n')
    assert [event.seconds for event in events_of(path)] == [5, 5, 5]


def test_a_recordings_name_controls_no_terminal(provisioner: CommandLine) -> None:
    store = EnvironmentStore(Home(provisioner.home))
    Home(provisioner.home).make()
    env = store.save(environment("echo-main-bcd234"))
    (store.logs(env.id) / "a\x1b]0;title\x07\u202e.cast").write_text('{"version": 2}\n[0, "o", "x"]\n')
    (store.logs(env.id) / os.fsdecode(b"b\xff.cast")).write_text('{"version": 2}\n[0, "o", "x"]\n')
    done = provisioner("replay", env.id)
    refused = provisioner("replay", env.id, "--part", "other")
    assert (done.code, refused.code) == (0, 2)
    assert all(character.isprintable() or character == "\n" for character in done.stdout + refused.stderr)


@pytest.mark.parametrize(
    "call",
    [Call("execute", "agent", ["cat", "\ud800"]), Call("execute", "u" * 2_000_000, ["cat"]),
     Call("read", "agent", ["\x1b" * 1_000_000] * 40)],
    ids=["surrogate", "user", "arguments"],
)  # fmt: skip
def test_no_call_of_an_agent_makes_later_ones_unreadable(provisioner: CommandLine, call: Call) -> None:
    store = EnvironmentStore(Home(provisioner.home))
    Home(provisioner.home).make()
    env = store.save(environment("echo-main-bcd234"))
    log = CallLog(store.logs(env.id), "primary")
    for each in (call, Call("execute", "agent", ["cat", "/flag"])):
        with log.recorded(each):
            pass
    done = provisioner("replay", env.id, "--part", "calls")
    assert (done.code, done.stdout.count("\n"), "cat /flag" in done.stdout) == (0, 2, True)


def test_a_command_that_is_no_text_leaves_a_readable_recording(tmp_path: Path) -> None:
    with Cast(tmp_path, "agent", Redactor({}), "cat \udcff") as cast:
        cast.output("\ud800x\n")
    assert header_of(tmp_path / "agent-1.cast").command == "cat ?"
    assert [event.text for event in events_of(tmp_path / "agent-1.cast")] == ["?x\r\n"]


def test_a_capture_that_is_a_link_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "secret.pcap").write_bytes(HEADER + record(b"secret"))
    machine = tmp_path / "primary"
    machine.mkdir()
    (machine / "link.pcap").symlink_to("../secret.pcap")
    assert list(existing(machine)) == []
    with pytest.raises(OSError, match="symbolic links"):
        read_capture(machine / "link.pcap")


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFFFFF, 61, 0])
def test_false_lengths_and_times_of_a_capture_lead_nowhere(length: int) -> None:
    header = struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, -1, 0xFFFFFFFF, 0xFFFFFFFF, 1)
    first = struct.pack("=IIII", 0xFFFFFFFF, 0xFFFFFFFF, 60, 0) + b"\0" * 60
    capture = packets.whole(header + first + struct.pack("=IIII", 0, 0, length, length) + b"\0" * 60)
    assert len(capture) == len(header + first) + (64 if length == 0 else 0)
    for last_at in (0.0, -1e12, 1e12, 1_700_000_000.0):
        moved = packets.set_right(capture, last_at)
        assert [len(frame) for _, frame in packets.packets(moved)] == ([60, 0, 0, 0, 0] if length == 0 else [60])


def test_a_full_capture_is_read_in_seconds() -> None:
    capture = HEADER + record(bytes(54)) * (packets.LIMIT_BYTES // (16 + 54))
    begin = time.process_time()
    assert len(packets.set_right(packets.whole(capture), 0)) == len(capture)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_manifest_names_no_file_outside_of_its_directory(tmp_path: Path, name: str) -> None:
    entry = {"name": name, "bytes": 1, "sha256": "0" * 64, "previous": "0" * 64}
    forged = {"version": 1, "facts": {}, "entries": [entry], "head": "0" * 64}
    (tmp_path / MANIFEST).write_text(json.dumps(forged))
    with pytest.raises(ValueError, match="name"):
        load(tmp_path)


def test_a_sealed_files_link_to_a_secret_is_not_read(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "secret").write_text("secret")
    (logs / "a.log").write_text("secret")
    seal(logs, {}, write_atomically)
    (logs / "a.log").unlink()
    (logs / "a.log").symlink_to("../secret")
    [(name, problem)] = problems(logs, load(logs))
    assert (name, "cannot be read" in problem) == ("a.log", True)


@pytest.mark.parametrize("what", ["fifo", "device", "endless"])
def test_an_endless_manifest_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / MANIFEST
    if what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises((OSError, ValueError)):
        load(tmp_path)


def test_a_sealed_file_of_another_size_is_not_read_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("short")
    seal(tmp_path, {}, write_atomically)
    os.truncate(tmp_path / "a.log", 1 << 42)
    begin = time.process_time()
    assert problems(tmp_path, load(tmp_path)) == [("a.log", f"it has {1 << 42} bytes, not 5")]
    assert time.process_time() - begin < 5


MEMORY = """
import resource, sys
from pathlib import Path
from provisioner.recording.manifest import load
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    load(Path(sys.argv[1]))
except ValueError as error:
    print(str(error)[:100])
[peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(int(peak.split()[1]) // 1024)
"""


@pytest.mark.parametrize(
    "text",
    ["[" * 2_000_000, '{"facts": {' + ",".join(f'"{n}": 1' for n in range(400_000)) + "}}", "[" + "[]," * 1_000_000],
    ids=["deep", "keys", "lists"],
)
def test_a_huge_manifest_takes_little_memory(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    *said, mebibytes = done.stdout.splitlines()
    assert said
    assert int(mebibytes) < 200


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc", "..", "a/b", "x" * 10_000, 7, None, ["env"]],
    ids=["parents", "root", "parent", "below", "long", "number", "null", "list"],
)
def test_results_that_name_no_environment_lead_nowhere(tmp_path: Path, name: Any) -> None:
    asked: list[str] = []

    def find(environment: str) -> list[Path]:
        asked.append(environment)
        return []

    (tmp_path / "results.jsonl").write_text(
        json.dumps({"environment": name, "score": 1.0, "recording": "0" * 64}) + "\n"
    )
    [checked] = check_results(tmp_path / "results.jsonl", find)
    assert "is no name of an environment" in checked.problems[0].message
    assert len(checked.problems[0].message) < 300
    assert asked == []


def test_a_link_beside_results_does_not_lead_outside(provisioner: CommandLine, tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (outside / "a.log").touch()
    head = seal(outside, {}, write_atomically)
    (inside / "env").symlink_to(outside)
    results = inside / "results.jsonl"
    results.write_text(json.dumps({"environment": "env", "score": None, "recording": head}))
    done = provisioner("verify", str(results))
    assert (done.code, "its sealed logs are not here" in done.stdout) == (1, True)


def test_results_of_more_rows_than_any_batch_has_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text('{"environment": "e"}\n' * 10_001)
    with pytest.raises(ValueError, match="more than 10000 rows"):
        check_results(tmp_path / "results.jsonl", lambda _: [])


def test_hostile_words_of_forged_results_control_no_terminal(provisioner: CommandLine, tmp_path: Path) -> None:
    words = "\x1b]0;title\x07\u202e"
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps({"environment": words, "score": 1.0, "recording": words}))
    shown = provisioner("verify", str(results)).stdout
    assert all(character.isprintable() or character == "\n" for character in shown)
    logs = tmp_path / "logs"
    logs.mkdir()
    seal(logs, {"family": words}, write_atomically)
    (logs / words).touch()
    shown = provisioner("verify", str(logs)).stdout
    assert "it was added later" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_a_seal_names_no_more_than_a_manifest_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 1000)
    for number in range(20):
        (tmp_path / f"{number}.log").touch()
    with pytest.raises(ValueError, match="would have more"):
        seal(tmp_path, {}, write_atomically)
