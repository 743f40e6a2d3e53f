"""Tests the commands for an environment that is up, as an operator types them."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import termios
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from provisioner.base.errors import TaskError
from provisioner.copying import transfer
from provisioner.environment import operations
from provisioner.machines.connect import connect, connect_kept
from provisioner.ssh.exchange import OUTPUT_LIMIT_BYTES
from provisioner.ssh.exec_frames import frame
from provisioner.ssh.openssh import KeptConnection
from tests.command_line import CLI, answer, provisioner, started, variables
from tests.local.conftest import FAMILIES, TOKEN, VARIABLES, Lab
from tests.ports import reserved_port
from tests.unit.fakes.copies import file, tree
from tests.waiting import BOUND_SECONDS, until

pytestmark = pytest.mark.vm
# An HTTP server that starts in no time on an emulated CPU. It listens when the command that starts it ends.
SERVER = """
$SIG{PIPE} = "IGNORE";
my $server = IO::Socket::INET->new(LocalAddr => "127.0.0.1:8123", Listen => 5) or die $!;
exit if fork;
while (my $client = $server->accept) {
    while (defined(my $line = <$client>)) { last if $line eq "\\r\\n" }
    print $client "HTTP/1.0 200 OK\\r\\n\\r\\nhello\\n";
}
"""


@pytest.fixture
def env_file(tmp_path: Path) -> str:
    path = tmp_path / "secrets.env"
    path.write_text("".join(f"{name}={value}\n" for name, value in VARIABLES.items()))
    return str(path)


def test_exec_passes_output_and_exit_code_on(lab: Lab) -> None:
    done = provisioner(
        lab.session.home,
        "exec",
        lab.environment.id,
        "--",
        "sh",
        "-c",
        'echo "$0 $(whoami)"; echo err >&2; exit 7',
        "a b",
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "a b agent\n", "err\n")
    as_root = answer(
        lab.session.home, "exec", lab.environment.id, "--machine", "aux", "--user", "root", "--", "id", "-u"
    )
    assert (as_root["exit_code"], as_root["stdout"]) == (0, "0\n")


def test_exec_goes_over_a_connection_that_openssh_keeps(lab: Lab) -> None:
    def is_kept() -> bool:
        with connect_kept(lab.session, lab.environment, "primary") as connection:
            return isinstance(connection, KeptConnection)

    until(is_kept)  # a starved machine may not answer OpenSSH in time: then a command connects by itself
    done = provisioner(
        lab.session.home, "exec", lab.environment.id, "--", "sh", "-c", "echo out; cat; exit 3", stdin="in\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\nin\n", "")


def test_exec_passes_input_on_and_ssh_makes_terminals(lab: Lab) -> None:
    data = "line\n" * 100_000
    done = provisioner(lab.session.home, "exec", lab.environment.id, "--", "wc", "-lc", stdin=data)
    assert (done.returncode, done.stdout.split()) == (0, ["100000", "500000"])
    for machine, user in (("primary", "agent"), ("aux", "admin")):
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (33, 99))
        before = termios.tcgetattr(theirs)
        script = "whoami; tty; stty size; read line; echo got $line; exit 9"
        command = [*CLI, "ssh", lab.environment.id, "--machine", machine, "--", "-t", script]
        process = subprocess.Popen(command, env=variables(lab.session.home), stdin=theirs, stdout=theirs)
        shown = ""
        while "33 99" not in shown:
            shown += os.read(ours, 1 << 16).decode()
        assert re.search(rf"{user}\r\n/dev/pts/\d+\r\n33 99", shown)
        os.write(ours, b"it\r")
        while "got it" not in shown:
            shown += os.read(ours, 1 << 16).decode()
        assert process.wait(BOUND_SECONDS) == 9
        assert termios.tcgetattr(theirs) == before
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("machine", ["primary", "aux"])
def test_ssh_brings_a_port_here_until_it_is_ended(lab: Lab, machine: str) -> None:
    lab.text(f"perl -MIO::Socket::INET -e {shlex.quote(SERVER)} < /dev/null > /dev/null 2>&1", machine)
    with reserved_port() as port:
        address = f"http://127.0.0.1:{port}/"
        bring = ["--", "-N", "-L", f"{port}:localhost:8123"]
        with started(lab.session.home, "ssh", lab.environment.id, "--machine", machine, *bring) as process:
            until(lambda: not refused(address))
            for _ in range(3):
                with urllib.request.urlopen(address, timeout=BOUND_SECONDS) as answered:
                    assert answered.status == 200
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=BOUND_SECONDS)
            assert process.returncode != 0
        assert refused(address)


def refused(address: str) -> bool:
    """Whether nothing listens at an address of this host."""
    try:
        with urllib.request.urlopen(address, timeout=BOUND_SECONDS):
            return False
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)


def test_a_user_that_a_machine_does_not_have_is_bad_input(lab: Lab) -> None:
    done = provisioner(lab.session.home, "exec", lab.environment.id, "--user", "admin", "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no user admin" in done.stderr


def test_ssh_gives_a_shell_with_a_pinned_host_key(lab: Lab) -> None:
    done = provisioner(lab.session.home, "ssh", lab.environment.id[-6:], stdin="whoami; hostname; exit 4\n")
    # The login shell may print a greeting first.
    assert done.returncode == 4, done.stderr
    assert done.stdout.endswith("\nagent\nprimary\n")
    aux = provisioner(lab.session.home, "ssh", lab.environment.id, "--machine", "aux", stdin="whoami\n")
    assert aux.returncode == 0, aux.stderr
    assert aux.stdout.endswith("\nadmin\n")


def test_cp_brings_files_and_directories_there_and_back(lab: Lab, tmp_path: Path) -> None:
    tree = tmp_path / "sent"
    (tree / "deep").mkdir(parents=True)
    (tree / "a b").write_bytes(b"\0\xff")
    (tree / "deep" / "$(id)").write_text("text")
    sent = provisioner(lab.session.home, "cp", str(tree), f"{lab.environment.id}:/home/agent/sent")
    assert sent.returncode == 0, sent.stderr
    assert lab.text("stat -c %U '/home/agent/sent/deep/$(id)'") == "agent"
    back = provisioner(lab.session.home, "cp", f"{lab.environment.id}:sent", str(tmp_path / "back"))
    assert back.returncode == 0, back.stderr
    assert (tmp_path / "back" / "a b").read_bytes() == b"\0\xff"
    assert (tmp_path / "back" / "deep" / "$(id)").read_text() == "text"
    refused = provisioner(lab.session.home, "cp", f"{lab.environment.id}:/root", str(tmp_path / "root"))
    assert refused.returncode != 0
    assert "Traceback" not in refused.stderr


def test_root_copies_through_no_link_of_the_agents(lab: Lab, tmp_path: Path) -> None:
    assert lab.run("ln -s /root /home/agent/planted", user="agent").exit_code == 0
    (tmp_path / "new").write_text("text")
    refused = provisioner(
        lab.session.home, "cp", "--user", "root", str(tmp_path / "new"), f"{lab.environment.id}:/home/agent/planted/"
    )
    assert (refused.returncode, lab.run("test -e /root/new").exit_code) == (2, 1)
    assert "planted: is a symbolic link that others could have placed" in refused.stderr


def test_a_replaced_exec_server_writes_nothing_here(lab: Lab, tmp_path: Path) -> None:
    answers = {
        "a way out": tree(file(b"../../outside")),
        "a link": tree(frame(b"l", b"a")),
        "less than promised": tree(file(b"a", b"x" * 100_000))[:-1],
    }
    inside = tmp_path / "inside"
    inside.mkdir()
    with connect(lab.session, lab.environment, "primary") as connection:
        for answer in answers.values():
            lab.lie(answer)
            with pytest.raises(TaskError, match="cannot be copied"):
                transfer.download(connection, "/etc/hostname", inside / "copy")
            assert list(inside.iterdir()) == []
            assert list(tmp_path.iterdir()) == [inside]
        transfer.download(connection, "/etc/hostname", inside / "copy")  # the real server is back


def test_what_exists_is_listed_and_shown(lab: Lab) -> None:
    listed = answer(lab.session.home, "list")
    assert lab.environment.id in json.dumps(listed)
    shown = answer(lab.session.home, "show", lab.environment.id)
    assert (shown["environment"], shown["status"]) == (lab.environment.id, "ready")
    assert TOKEN not in json.dumps(shown)
    assert lab.environment.id in provisioner(lab.session.home, "list").stdout


def test_logs_hold_console_terraform_and_operations(lab: Lab) -> None:
    logs = answer(lab.session.home, "logs", lab.environment.id)["logs"]
    assert {"console-primary", "console-aux", "terraform", "start"} <= set(logs)
    assert "Linux version" in logs["console-aux"]
    assert "Apply complete" in logs["terraform"]
    assert TOKEN not in json.dumps(logs)


@pytest.mark.campaign
def test_a_flood_on_the_console_leaves_both_ends_of_the_log(lab: Lab) -> None:
    log = lab.session.environments.directory(lab.environment.id) / "aux" / "run/serial.log"
    lab.run("yes ttyS0-is-full | head -c 3000000 > /dev/ttyS0; echo the-flood-is-over > /dev/ttyS0", "aux")
    assert log.stat().st_size < 2 << 20
    console = answer(lab.session.home, "logs", lab.environment.id)["logs"]["console-aux"]
    assert "Linux version" in console
    assert "ttyS0-is-full" in console
    assert "the-flood-is-over" in console


def test_score_takes_a_submission(lab: Lab, env_file: str) -> None:
    command = ("score", lab.environment.id, "--submission", "-")
    done = provisioner(lab.session.home, *command, "--env-file", env_file, "--json", stdin="0.25")
    scored = json.loads(done.stdout)
    assert (scored["status"], scored["score"]) == ("scored", 0.25)
    missing = provisioner(lab.session.home, *command, stdin="1")
    assert missing.returncode == 2
    assert "The following required environment variables are not set: LAB_TOKEN" in missing.stderr


def test_a_score_that_is_no_number_is_told_from_zero(lab: Lab, env_file: str) -> None:
    command = ("score", lab.environment.id, "--submission", "-", "--env-file", env_file, "--json")
    done = provisioner(lab.session.home, *command, stdin="NaN")
    said = json.loads(done.stdout)
    assert (said["status"], said["score"]) == ("nan", None)


def test_more_output_than_is_kept_is_cut_in_the_middle(lab: Lab) -> None:
    script = f"echo first; head -c {OUTPUT_LIMIT_BYTES + 100_000} /dev/zero; echo last"
    with connect(lab.session, lab.environment, "primary") as connection:
        done = connection.run(["sh", "-c", script])
    assert done.exit_code == 0
    assert len(done.stdout) < OUTPUT_LIMIT_BYTES + 100
    assert done.stdout.startswith(b"first\n")
    assert b"bytes cut out" in done.stdout
    assert done.stdout.endswith(b"last\n")


def test_a_replaced_helper_does_not_flood_the_controller(lab: Lab) -> None:
    program = "import sys, os\nfor _ in range(100): os.write(1, b'x' * 1000000)\n"
    helper = "/usr/lib/provisioner/guest/helper.py"
    with connect(lab.session, lab.environment, "primary") as connection:
        assert connection.run(["sh", "-c", "cat > /tmp/evil.py"], stdin=program.encode()).exit_code == 0
        assert connection.run(["mount", "--bind", "/tmp/evil.py", helper]).exit_code == 0
        try:
            driver = operations.driver(lab.session, lab.environment, connection)
            with pytest.raises(TaskError, match="more than 16 MiB"):
                driver.call("score", timeout_seconds=BOUND_SECONDS)
            garbage = "import sys; print('{' * 100000)"
            assert connection.run(["sh", "-c", "cat > /tmp/evil.py"], stdin=garbage.encode()).exit_code == 0
            answer = operations.driver(lab.session, lab.environment, connection).call(
                "score", timeout_seconds=BOUND_SECONDS
            )
            with pytest.raises(TaskError, match="its result cannot be read"):
                answer.value("score()")
        finally:
            assert connection.run(["umount", helper]).exit_code == 0


def test_tasks_of_a_built_family_are_listed(lab: Lab, env_file: str) -> None:
    assert "pair" in json.dumps(answer(lab.session.home, "tasks", str(FAMILIES / "lab"), "--env-file", env_file))
