"""Looks at the processes beside a real machine from the host, as an attacker would who has taken one over."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from provisioner.base.models import Environment, Role
from provisioner.clouds.local.network import egress
from provisioner.clouds.local.vm import qemu
from provisioner.session import Session
from tests.local.conftest import Lab


def processes(lab: Lab) -> dict[str, int]:
    """Returns the processes that parse what the primary machine sends, by name."""
    directory = lab.session.home.environments / lab.environment.id / "primary"
    pid, proxy = qemu.live_pid(directory / "run/qemu.pid"), egress.pid_of(directory)
    assert pid is not None
    if proxy is None:
        return {"qemu": pid}
    [passt] = Path(f"/proc/{proxy}/task/{proxy}/children").read_text().split()
    return {"qemu": pid, "egress proxy": proxy, "passt": int(passt)}


def backends(session: Session, environment: Environment, role: Role = "primary") -> set[str]:
    """Returns where the cards of a running machine lead, in QEMU's words: the kinds of its -netdev arguments."""
    pid = qemu.live_pid(session.home.environments / environment.id / role / "run/qemu.pid")
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return {value.partition(",")[0] for flag, value in pairwise(words) if flag == "-netdev"}


def rights(pid: int) -> dict[str, str]:
    """Returns what /proc/PID/status says, by its first word."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def check(lab: Lab, secret: str) -> None:
    """Checks that no process is root or may become it, and that none has a secret in its environment or arguments."""
    running = processes(lab)
    for name, pid in running.items():
        status = rights(pid)
        assert "0" not in status["Uid"].split() + status["Gid"].split(), name
        assert "0" not in status["Groups"].split(), name
        assert int(status["CapPrm"], 16) == int(status["CapEff"], 16) == 0, name
        assert status["NoNewPrivs"] == "1", name
        assert Path(f"/proc/{pid}/limits").read_text().split("Max core file size")[1].split()[0] == "0", name
    assert rights(running["qemu"])["Seccomp"] == "2"
    directory = lab.session.home.environments / lab.environment.id
    everything = {**running, **{f"process {pid}": pid for pid in _working_in(directory)}}
    assert len(everything) > len(running)  # the watchdog
    for name, pid in everything.items():
        for file in ("environ", "cmdline"):
            assert secret.encode() not in Path(f"/proc/{pid}/{file}").read_bytes(), f"{file} of {name}"
        assert b"PROVISIONER_" not in Path(f"/proc/{pid}/environ").read_bytes(), name
    for path in [directory, *directory.rglob("*")]:
        assert path.is_symlink() or not path.stat().st_mode & 0o007, path


def _working_in(directory: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if directory.resolve() in (process / "cwd").readlink().parents:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found
