"""Another user of the host reads what provisioner keeps, waits for a home to be taken over, or reads process lists.

Nothing in the home is open to others, whatever mode it was made with and whatever the umask is; a home that belongs to
another user is refused; a submission need not be an argument. A local machine's sshd listens in a network that others
cannot enter. tests/local looks at the files, processes and ports of real machines.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from provisioner.base.errors import HostError
from provisioner.ssh import namespace_program
from provisioner.ssh.namespaces import proxy_command
from provisioner.store.home import Home
from tests.command_line import provisioner
from tests.unit.fakes import enclosed
from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[2]


def open_to_others(root: Path) -> list[str]:
    return [str(path) for path in (root, *root.rglob("*")) if not path.is_symlink() and path.stat().st_mode & 0o077]


def test_a_home_that_others_could_enter_is_closed_with_a_note(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.root.mkdir(mode=0o755)
    home.root.chmod(0o755)
    first, second = provisioner(home, "list"), provisioner(home, "list")
    assert "Other users could enter the provisioner home" in first.stderr
    assert second.stderr == ""
    assert home.root.stat().st_mode & 0o777 == 0o700


def test_commands_write_for_the_operator_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for arguments in (["list"], ["costs"], ["image", "list"], ["sweep", "--dry-run"]):
        program = f"umask 0; exec {sys.executable} cli.py {' '.join(arguments)}"
        environment = {**os.environ, "PROVISIONER_HOME": str(home)}
        subprocess.run(["sh", "-c", program], cwd=ROOT, env=environment, check=True, capture_output=True)
    assert len(list(home.rglob("*"))) > 5
    assert open_to_others(home) == []


def test_a_home_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to the user"):
        Home(tmp_path).make()
    monkeypatch.setenv("PROVISIONER_HOME", str(tmp_path))
    from provisioner.cli.command import default_home

    with pytest.raises(HostError, match=re.escape(f"{tmp_path} cannot be used: it belongs to the user")):
        default_home()


def test_a_submission_on_standard_input_is_in_no_process_list(tmp_path: Path) -> None:
    family = str(ROOT / "examples" / "number_guess")
    environment = {**os.environ, "PROVISIONER_HOME": str(tmp_path / "home"), "PATH": "/nonexistent"}
    with subprocess.Popen(
        [sys.executable, "cli.py", "run", family, "easy", "--submission", "-"], cwd=ROOT, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as command:  # fmt: skip
        assert command.stdin is not None
        command.stdin.write(b"the-secret-answer")
        command.stdin.flush()
        assert b"the-secret-answer" not in Path(f"/proc/{command.pid}/cmdline").read_bytes()
        command.stdin.write(b"\xff")  # so that nothing is created
        _, said = command.communicate(timeout=BOUND_SECONDS)
    assert command.returncode == 2
    assert b"The submission in standard input is not UTF-8" in said


def test_a_submission_as_an_argument_is_refused(tmp_path: Path) -> None:
    environment = {**os.environ, "PROVISIONER_HOME": str(tmp_path / "home"), "PATH": "/nonexistent"}
    for command in (["run", "examples/number_guess", "easy"], ["score", "x"]):
        done = subprocess.run(
            [sys.executable, "cli.py", *command, "--submission", "42"], cwd=ROOT, env=environment,
            capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "cannot be an argument" in done.stderr
        assert "--submission-file FILE" in done.stderr


def test_what_listens_for_the_controller_cannot_be_connected_to(tmp_path: Path) -> None:
    with enclosed.listening(tmp_path) as (_, port), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def opened_to_all(directory: str) -> Path:
    """Lets everybody write to a directory, as for the strongest attacker."""
    path = Path(directory)
    path.chmod(0o777)
    return path


def connecting(pidfile: Path, port: int) -> str:
    """Our own command that connects to a machine, with a Python and a program that every user of the host may run."""
    python, *options, program, _, host, number = proxy_command(pidfile, "127.0.0.1", port)
    copied = Path(shutil.copy(program, pidfile.parent))
    copied.chmod(0o644)
    assert python == sys.executable
    return shlex.join([os.path.realpath(python), *options, str(copied), str(pidfile), host, number])


def as_user(user: int, command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command as another user of the host; its standard output is a socket, as OpenSSH's is."""
    switch = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "sh", "-c", command]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return subprocess.run(switch, stdout=theirs.fileno(), stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("way", ["our-program", "nsenter", "nsenter-user"])
@pytest.mark.parametrize("operator", [0, 65533], ids=["root", "user"])
def test_the_network_of_a_machine_cannot_be_entered(way: str, operator: int) -> None:
    with tempfile.TemporaryDirectory() as name, enclosed.listening(opened_to_all(name), operator) as (pidfile, port):
        pidfile.chmod(0o644)
        pid = namespace_program.holder(str(pidfile))
        commands = {
            "our-program": connecting(pidfile, port),
            "nsenter": f"nsenter --target {pid} --net true",
            "nsenter-user": f"nsenter --target {pid} --user --net true",
        }
        assert as_user(operator, commands["our-program"]).returncode == 0
        done = as_user(65534, commands[way])
    assert done.returncode != 0
    assert "Permission denied" in done.stderr or "not permitted" in done.stderr
