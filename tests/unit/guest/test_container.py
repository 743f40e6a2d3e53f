"""Tests calls in a container as the exec server carries them out, with a stand-in for runc; and the engine's users."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from provisioner_guest.cgroup import Cgroup
from provisioner_guest.exec import container

from provisioner.ssh.exec_frames import CallEnd
from tests.unit.guest.test_exec import call, running

ID = "0123456789abcdef"
# Starts a process as runc does, says why it cannot, and ends once the process runs.
RUNC = """#!/usr/bin/env python3
import json, os, sys, time
given = dict(zip(sys.argv, sys.argv[1:]))
process = json.load(open(given["--process"]))
json.dump([process, sys.argv], open(f"{os.path.dirname(__file__)}/seen", "w"))
heard, said = os.pipe()
if (pid := os.fork()) == 0:
    os.setsid()
    os.chdir(process["cwd"])
    try:
        os.execvpe(process["args"][0], process["args"], dict(each.split("=", 1) for each in process["env"]))
    except OSError as error:
        os.write(said, (error.strerror or "").lower().encode())
    os._exit(1)
os.close(said)
if why := os.read(heard, 100).decode():
    words = f'exec failed: unable to start container process: exec: "{process["args"][0]}": {why}'
    open(given["--log"], "a").write(json.dumps({"level": "error", "msg": words}) + "\\n")
    sys.exit(255)
open(given["--pid-file"], "w").write(str(pid))
"""
PROCESS = {
    "user": {"uid": 7, "gid": 8, "additionalGids": [8]}, "cwd": "/", "terminal": True, "noNewPrivileges": False,
    "env": ["PATH=/usr/bin:/bin", "HOSTNAME=web", "TERM=xterm", "COLOUR=red"],
    "capabilities": {"bounding": ["CAP_CHOWN"]}, "apparmorProfile": "docker-default", "args": ["sleep", "infinity"],
}  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """What the engine and runc keep of a container, whose first process is this one."""
    bundle, state = tmp_path / "bundle", tmp_path / "states" / ID
    for directory in (bundle, state, tmp_path / "containers" / ID, tmp_path / "root" / "etc"):
        directory.mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps({"process": PROCESS, "root": {"path": str(tmp_path / "root")}}))
    labels = {"labels": ["x=y", f"bundle={bundle}"]}
    runs = {"init_process_pid": os.getpid(), "cgroup_paths": {"": "/nowhere"}, "config": labels}
    (state / "state.json").write_text(json.dumps(runs))
    (tmp_path / "containers" / ID / "hostconfig.json").write_text('{"GroupAdd": ["staff"]}')
    (tmp_path / "root" / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nagent:x:1000:100::/:/bin/sh\n")
    (tmp_path / "root" / "etc" / "group").write_text("users:x:100:\nwheel:x:10:root,agent\nstaff:x:50:\n")
    (tmp_path / "runc").write_text(RUNC)
    (tmp_path / "runc").chmod(0o755)
    return tmp_path


@pytest.fixture
def server(engine: Path) -> Iterator[Path]:
    """Runs an exec server, and yields its socket."""
    where = (
        f"from provisioner_guest.exec import container\ncontainer.RUNC = {str(engine / 'runc')!r}\n"
        f"container.NUMBERS = {str(engine)!r}\n"
        f"container.STATES, container.ENGINE = {str(engine / 'states')!r}, {str(engine / 'containers')!r}\n"
    )
    with running(engine / "socket", where):
        yield engine / "socket"


def seen(engine: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the process and the arguments that runc was given."""
    process, argv = json.loads((engine / "seen").read_text())
    return process, argv


def test_a_command_gets_what_the_containers_first_process_has(server: Path, engine: Path) -> None:
    argv = ["sh", "-c", 'cat; echo "$GIVEN $COLOUR"; exit 124']
    given = {"GIVEN": "given", "COLOUR": "blue"}
    stdout, end = call(server, b"in ", container=ID, user="", argv=argv, environment=given)
    assert (stdout, end) == (b"in given blue\n", CallEnd(code=124))
    process, argv = seen(engine)
    same = ("user", "cwd", "noNewPrivileges", "capabilities", "apparmorProfile")
    assert {key: process[key] for key in same} == {key: PROCESS[key] for key in same}
    assert process["env"] == ["PATH=/usr/bin:/bin", "HOSTNAME=web", "COLOUR=blue", "GIVEN=given"]
    assert (process["terminal"], argv[-1]) == (False, ID)
    assert not list(engine.glob("process-*"))


def test_a_named_user_has_its_groups_and_those_that_the_file_adds(server: Path, engine: Path) -> None:
    assert call(server, container=ID, user="agent", argv=["true"])[1] == CallEnd(code=0)
    assert seen(engine)[0]["user"] == {"uid": 1000, "gid": 100, "additionalGids": [100, 10, 50]}


def test_no_descriptor_of_the_server_reaches_a_container(server: Path) -> None:
    stdout, _ = call(server, container=ID, user="", argv=["sh", "-c", "readlink /proc/self/fd/* | sort -u"])
    assert not [line for line in stdout.split() if b"socket" in line]


def test_a_signal_is_an_exit_code_and_a_process_in_the_background_is_not_waited_for(server: Path) -> None:
    script = "sleep 60 > /dev/null 2>&1 & echo $!; kill -9 $$"
    stdout, end = call(server, container=ID, user="", argv=["sh", "-c", script])
    os.kill(int(stdout), 9)
    assert end == CallEnd(code=137)


def test_the_server_keeps_the_time_limit_of_a_command_in_a_container(server: Path) -> None:
    assert call(server, container=ID, user="", argv=["sleep", "60"], timeout_seconds=0.5)[1] == CallEnd(timed_out=True)


@pytest.mark.parametrize(
    ("request_", "what", "number"),
    [
        ({"argv": ["nonexistent"]}, "program", errno.ENOENT),
        ({"argv": ["/etc/passwd"]}, "program", errno.EACCES),
        ({"user": "nobody-there"}, "user", errno.ENOENT),
        ({"container": "f" * 64}, "container", errno.ESRCH),
        ({"container_pid": 1}, "container", errno.ESTALE),
    ],
    ids=["missing", "forbidden", "user", "not-running", "started-again"],
)
def test_why_a_command_does_not_start_in_a_container_is_said(
    server: Path, request_: dict[str, Any], what: str, number: int
) -> None:
    _, end = call(server, **{"container": ID, "user": "", "argv": ["true"], **request_})
    assert end is not None
    assert (end.what, end.errno) == (what, number)


def test_only_commands_run_in_containers_and_these_have_an_id(server: Path) -> None:
    for identity in ("../" + ID, "0123", "G" * 64):
        assert call(server, container=identity, argv=["true"]) == (b"", None)
    assert call(server, container=ID, operation="read", path="/etc/passwd") == (b"", None)


PASSWD = [
    line.split(":")
    for line in ("root:x:0:0:::", "app:x:10:20:::", "7:x:30:40:::", "odd:x:?:4:::", "big:x:4294967295:0::")
]
GROUP = [line.split(":") for line in ("root:x:0:", "extra:x:60:other,app", "more:x:61:app", "app:x:20:")]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("app", (10, [20, 60, 61])),
        ("10", (10, [20, 60, 61])),
        ("app:extra", (10, [60])),
        ("app:99", (10, [99])),
        ("7", (7, [0])),
        ("odd", (0, [4])),
        (":extra", (0, [60])),
        ("4242", (4242, [0])),
    ],
)
def test_users_are_resolved_by_the_engines_rules(text: str, ids: tuple[int, list[int]]) -> None:
    assert container.user(text, PASSWD, GROUP) == {"uid": ids[0], "gid": ids[1][0], "additionalGids": ids[1]}


@pytest.mark.parametrize("text", ["none", "app:none", "big", "-1", "2147483648", "²"])
def test_a_user_that_the_engine_refuses_is_none(text: str) -> None:
    with pytest.raises(LookupError):
        container.user(text, PASSWD, GROUP)


def test_a_file_of_users_is_read_inside_of_the_container_alone(tmp_path: Path) -> None:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "passwd").write_text("outside:x:1:1:::\n")
    link, inside = tmp_path / "root" / "etc" / "passwd", tmp_path / "root" / "passwd"
    entries = partial(container._entries, str(tmp_path / "root"), "etc/passwd")
    assert entries() == []
    link.symlink_to("../../../../../../passwd")
    inside.write_text("inside:x:1:1:::\n")
    [entry] = entries()
    assert entry[0] == "inside"
    inside.unlink()
    with socket.socket(socket.AF_UNIX) as listener:  # which cannot be opened: its kind is known before
        for make in (os.mkfifo, lambda path: listener.bind(str(path))):
            make(inside)
            with pytest.raises(OSError, match="no regular file"):
                entries()
            inside.unlink()
    inside.write_bytes(b"\n" * ((4 << 20) + 1))
    with pytest.raises(OSError, match="too long"):
        entries()
    inside.write_text("a\n" * 20_000)
    with pytest.raises(OSError, match="too many entries"):
        entries()


def test_a_cgroup_that_went_with_its_container_ends_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("provisioner_guest.cgroup.is_available", lambda: True)
    (tmp_path / "scope").mkdir()
    cgroup = Cgroup("1-2", "", str(tmp_path / "scope"))
    assert [each.name for each in (tmp_path / "scope").iterdir()] == ["call-1-2"]
    (tmp_path / "scope" / "call-1-2").rmdir()
    (tmp_path / "scope").rmdir()
    cgroup.end()
