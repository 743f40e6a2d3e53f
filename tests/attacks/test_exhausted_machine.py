"""Attack on a real machine: an agent takes all memory and processes, leaves processes behind, and powers off.

What must hold: its limits leave root room to log in while it does so, it ends whole at its time limit, its submission
is scored, and what it leaves behind writes nothing any more. A machine that is switched off from within is its failure.
By a login it says nothing to what root runs, and by what a scoring runs of its own it gets nothing out of its cgroup.
"""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from provisioner.base.errors import AgentError, MachineLostError
from provisioner.base.models import Environment
from provisioner.environment import lifecycle, operations
from provisioner.environment.agent import AgentCommand as Agent
from provisioner.environment.agent import readmit, run_agent, stop
from provisioner.family.loader import load_family
from provisioner.machines.connect import connect
from provisioner.session import Session
from provisioner.ssh.connection import Connection

pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("exhausted"), pytest.mark.campaign]
FAMILY = Path(__file__).parents[1] / "contract" / "families" / "echo"
# Kills what serves its login, leaves a process in a session of its own, takes memory until it is killed for that, and
# then all processes that it can. Its first process needs no other and no more memory, so that only its time ends it;
# the others ask to be killed before it when memory is short.
ATTACK = r"""
echo 0.25 > ~/submission.txt
pkill -KILL -u agent sshd
echo survived
{
    echo 1000 > /proc/$BASHPID/oom_score_adj
    setsid sh -c 'while sleep 0.2; do date +%s.%N > /tmp/alive; done' &
    (head -c 3G /dev/zero > /dev/shm/full) &
    tail /dev/zero
    bomb() { bomb | bomb & }
    bomb
} &
exec sleep 1000
"""
CGROUP = "/sys/fs/cgroup/agent"
# Lets the agent log in to its own machine.
OWN_KEY = """
mkdir -p /home/agent/.ssh
ssh-keygen -q -t ed25519 -N '' -f /home/agent/.ssh/own
cat /home/agent/.ssh/own.pub >> /home/agent/.ssh/authorized_keys
"""
LOG_IN = "ssh -o StrictHostKeyChecking=no -o BatchMode=yes -i /home/agent/.ssh/own agent@127.0.0.1"
# What a login's programs shall do: those of a login for the user, and root's, should they have the user's environment.
TRACE = r"printf 'LD_DEBUG DEFAULT=files\nLD_DEBUG_OUTPUT DEFAULT=/tmp/trace\n' > /home/agent/.pam_environment"
# A family that runs the agent's program in score(), as agent, and leaves a process of its own.
RUNS_THE_AGENTS = """
import subprocess, time

class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def score(t, submission):
        subprocess.run(["runuser", "-u", "agent", "--", "sh", "/home/agent/solution.sh"])
        subprocess.Popen(["sleep", "5555"], start_new_session=True)
        time.sleep(float(submission))
        return 1.0
"""
# Stays, in sessions and a user namespace of its own, and in processes of which none lives long.
STAYS = r"""
setsid sleep 1111 &
unshare --user setsid sleep 2222 &
setsid sh -c 'comet() { sleep 0.1; comet & }; comet' &
sleep 1
"""
SLEEPERS = "for pid in $(pgrep -x sleep); do cat /proc/$pid/cgroup; done | sort -u"


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest) -> Session:
    open_session: Callable[[Mapping[str, str]], Session] = request.getfixturevalue("open_session")
    return open_session({})


@pytest.fixture(scope="module")
def environment(session: Session) -> Iterator[Environment]:
    environment = lifecycle.up(session, load_family(FAMILY), "main")
    yield environment
    lifecycle.destroy(session, environment)


@pytest.fixture(scope="module")
def root(session: Session, environment: Environment) -> Iterator[Connection]:
    with connect(session, environment, "primary") as connection:
        yield connection


def text(connection: Connection, script: str) -> str:
    return connection.run(["sh", "-c", script], timeout_seconds=60).stdout.decode().strip()


def agent(tmp_path: Path, script: str, seconds: float) -> Agent:
    (tmp_path / "run.sh").write_text(script)
    return Agent(tmp_path, "exec bash run.sh", timedelta(seconds=seconds))


def test_an_agent_that_takes_everything_is_ended_and_scored(
    session: Session, environment: Environment, root: Connection, tmp_path: Path
) -> None:
    ended = threading.Event()
    failures: list[str] = []

    def log_in() -> bool:
        """Root logs in once the agent has met its limit on memory, and tries until the agent has ended."""
        while not ended.wait(2):
            try:
                if text(root, f"grep -c 'oom_kill 0' {CGROUP}/memory.events || true") != "0":
                    continue
                with connect(session, environment, "primary") as connection:
                    connection.run(["true"], timeout_seconds=60)
                return not ended.is_set()
            except (MachineLostError, TimeoutError) as error:
                failures.append(str(error))
        return False

    with ThreadPoolExecutor(1) as pool:
        logged_in = pool.submit(log_in)
        try:
            done = run_agent(session, environment, agent(tmp_path, ATTACK, 180))
        finally:
            ended.set()
    assert (done.timed_out, done.stdout.splitlines()[0]) == (True, b"survived")
    assert logged_in.result(), f"root could not log in while the agent worked: {failures}"
    assert lifecycle.score(session, environment)[1].score == 0.25
    assert text(root, "pgrep -u agent") == ""
    alive = text(root, "cat /tmp/alive")
    time.sleep(1)
    assert text(root, "cat /tmp/alive") == alive
    # How far a fork bomb gets in this time depends on the processor.
    figures = text(root, f"cd {CGROUP} && cat memory.events && grep . memory.max memory.peak pids.max pids.peak")
    assert "oom_kill 0" not in figures.splitlines(), f"it did not meet its limit on memory: {figures}"


def test_nothing_logs_in_as_agent_while_it_is_scored(
    session: Session, environment: Environment, root: Connection
) -> None:
    text(root, f"runuser -u agent -- sh -c {shlex.quote(OWN_KEY)}")
    log_in = f"runuser -u agent -- {LOG_IN} cat /proc/self/cgroup"
    lifecycle.score(session, environment)
    assert text(root, log_in) == ""
    lifecycle.score(session, environment, readmit_agent=True)
    assert text(root, log_in) == "0::/agent/logins"


def test_a_login_runs_roots_programs_without_the_agents_words(root: Connection) -> None:
    text(root, f"runuser -u agent -- sh -c {shlex.quote(OWN_KEY + TRACE)}")
    assert text(root, f"runuser -u agent -- {LOG_IN} id -un") == "agent"
    time.sleep(3)  # what ends the login works on
    assert text(root, "stat -c %U /tmp/trace.* | sort -u; rm -f /tmp/trace.* /home/agent/.pam_environment") == "agent"


@pytest.fixture
def runs_the_agents(root: Connection) -> Iterator[None]:
    family = root.read_file("/root/echo.py", 1 << 20)
    root.write_file("/root/echo.py", RUNS_THE_AGENTS.encode())
    root.write_file("/home/agent/solution.sh", STAYS.encode(), user="agent")
    yield
    root.write_file("/root/echo.py", family)
    text(root, "pkill -x sleep; true")


@pytest.mark.usefixtures("runs_the_agents")
def test_processes_of_a_scoring_do_not_outlive_the_next(
    session: Session, environment: Environment, root: Connection
) -> None:
    assert lifecycle.score(session, environment, "0", readmit_agent=True)[1].score == 1.0
    agents, familys = text(root, SLEEPERS).splitlines()
    assert agents == "0::/agent/logins"
    assert familys.startswith("0::/provisioner/call-")  # only what is the agent's
    stop(root)
    assert text(root, SLEEPERS) == familys
    readmit(root)


@pytest.mark.usefixtures("runs_the_agents")
def test_a_scoring_whose_time_is_over_ends_whole(session: Session, environment: Environment, root: Connection) -> None:
    driver = operations.driver(session, environment, root)
    driver.put_file("/run/provisioner/late", b"1000")
    answer = driver.call("score", task="main", submission="/run/provisioner/late", timeout_seconds=20)
    assert isinstance(answer.result, dict)
    assert answer.result["kind"] == "timeout"
    assert text(root, SLEEPERS) == ""


def test_an_agent_that_switches_its_machine_off_has_failed(
    session: Session, environment: Environment, root: Connection, tmp_path: Path
) -> None:
    def switch_off() -> None:
        time.sleep(8)
        with contextlib.suppress(MachineLostError):
            root.run(["systemctl", "poweroff", "--force", "--force"])

    threading.Thread(target=switch_off, daemon=True).start()
    with pytest.raises(AgentError, match=r"switched off from within: primary machine \(QEMU says guest-shutdown"):
        run_agent(session, environment, agent(tmp_path, "sleep 1000", 100))
