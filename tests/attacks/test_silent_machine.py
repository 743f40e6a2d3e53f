"""A machine that stays silent ends as the task's failure after a time limit, and holds no slot until the ttl.

The attacker is root in the machine: the family's code, or an agent that became root. It replaces the helper, or the
programs that the controller runs beside it, by something that never ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.base.errors import CommandTimeoutError, MachineLostError, ProvisionerError, TaskError
from provisioner.base.models import Environment, ScoreLogEntry, TimeLimits
from provisioner.driver import task_driver as driver_module
from provisioner.driver.task_driver import TaskDriver
from provisioner.environment import operations
from provisioner.environment.run import run, run_tests
from provisioner.machines import boot, recordings
from provisioner.machines.boot import boot_machines
from provisioner.session import Session
from provisioner.ssh import calls
from provisioner.ssh.connection import Connection
from tests.attacks.hostile_sshd import before_login
from tests.attacks.test_ssh_server import HANDSHAKES
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.exec_call import Call
from tests.unit.fakes.world import created, environment, up
from tests.waiting import BOUND_SECONDS

Hang = Callable[[], None]


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "GRACE_SECONDS", 0.2)


@pytest.fixture
def hang() -> Iterator[Hang]:
    """What never ends, as long as the test does not."""
    over = threading.Event()

    def hang() -> None:
        over.wait(BOUND_SECONDS)

    yield hang
    over.set()


def limited(operation: str, monkeypatch: pytest.MonkeyPatch) -> TimeLimits:
    """Shortens the limit of one operation, which is not to end in time; on a busy host the others take theirs."""
    if operation in ("settle_home", "read_submission"):
        monkeypatch.setattr(operations, "SETTLING_SECONDS" if operation == "settle_home" else "READING_SECONDS", 1)
        return TimeLimits()
    return TimeLimits(**{f"{operation}_seconds": 1})


def impatient(session: Session, operation: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    return replace(session, time_limits=limited(operation, monkeypatch))


@pytest.mark.parametrize("operation", ["start", "settle_home"])
def test_a_silent_start_is_the_tasks_failure(
    session: Session,
    cloud: FakeCloud,
    fam: object,
    operation: str,
    hang: Hang,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud.guest_defaults = {"during": {operation: hang}}
    with pytest.raises(TaskError, match="did not end in time") as caught:
        run(impatient(session, operation, monkeypatch), fam, "main", submission="7")  # type: ignore[arg-type]
    assert caught.value.exit_code == 7
    assert not isinstance(caught.value, MachineLostError)
    assert cloud.existing() == []


def test_a_silent_score_is_a_result(
    session: Session, cloud: FakeCloud, fam: object, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.guest_defaults = {"during": {"score": hang}}
    result = run(impatient(session, "score", monkeypatch), fam, "main", submission="7")  # type: ignore[arg-type]
    assert (result.outcome.kind, result.outcome.score) == ("timeout", None)
    assert cloud.existing() == []


def test_silent_tests_end(
    session: Session, cloud: FakeCloud, fam: object, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.guest_defaults = {"during": {"pytest": hang}}
    with pytest.raises(TaskError, match="pytest did not end in time"):
        run_tests(impatient(session, "tests", monkeypatch), fam, "main", [])  # type: ignore[arg-type]
    assert cloud.existing() == []


Use = Callable[[Session, Environment, TaskDriver], object]
USES: dict[str, Use] = {
    "teardown": operations.teardown,
    "read_submission": lambda _, __, driver: operations.read_submission(driver),
    "intermediate_score": operations.intermediate_score,
    "aggregate_scores": lambda session, env, driver: operations.end_score(
        session, env.model_copy(update={"has_intermediate_score": False, "has_aggregate_scores": True}), driver, None
    )[1],
}


@pytest.mark.parametrize("operation", USES)
def test_every_operation_ends_in_time(
    session: Session, cloud: FakeCloud, operation: str, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = up(session, environment(time_limits=limited(operation, monkeypatch), has_intermediate_score=True))
    cloud.machine(env).guest.during = {operation: hang}
    with Connection(session.environments.login(env, "primary", "root")) as connection:
        driver = operations.driver(session, env, connection)
        said = ""
        try:
            said = getattr(USES[operation](session, env, driver), "kind", "")
        except TaskError as error:
            said = error.message
    assert "timeout" in said or "in time" in said


@pytest.mark.parametrize("small", ["result", "file"])
def test_the_small_calls_beside_an_operation_end_in_time(
    session: Session,
    cloud: FakeCloud,
    small: str,
    hang: Hang,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = up(session)
    monkeypatch.setattr(calls, "SMALL_CALL_SECONDS", 1)
    guest = cloud.machine(env).guest
    answer = guest._as_programs

    def silent(call: Call, stdin: bytes) -> tuple[bytes, bytes]:
        if call.argv == [""]:
            hang()
        return answer(call, stdin)

    monkeypatch.setattr(guest, "_as_programs", silent)
    with Connection(session.environments.login(env, "primary", "root")) as connection:
        driver = operations.driver(session, env, connection)
        uses: dict[str, Callable[[], object]] = {
            "result": lambda: driver.call("score", timeout_seconds=1).value("score()"),
            "file": lambda: driver.put_file("/run/provisioner/x", b"text"),
        }
        with pytest.raises(TaskError) as caught:
            uses[small]()
    assert "in time" in caught.value.message or isinstance(caught.value, CommandTimeoutError)


@pytest.mark.parametrize("listener", ["silence", "line", "lines", "version", "length"])
def test_the_wait_for_a_boot_ends_whatever_answers(
    session: Session,
    cloud: FakeCloud,
    listener: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boot, "BOOT_SECONDS", 2)
    monkeypatch.setattr("provisioner.ssh.connection.HANDSHAKE_SECONDS", 1)
    [env] = created(session, environment())
    with before_login(HANDSHAKES[listener]) as port:
        endpoint = env.endpoints["primary"].model_copy(update={"port": port})
        env = session.environments.update(env, endpoints={"primary": endpoint})
        with pytest.raises(ProvisionerError) as caught:
            boot_machines(session, env)
    assert caught.value.message.isprintable()


def test_a_silent_journal_delays_nothing(
    session: Session, cloud: FakeCloud, hang: Hang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "JOURNAL_SECONDS", 1)
    env = up(session)

    def silent(*_: object) -> tuple[int, bytes, bytes]:
        hang()
        return 0, b"", b""

    monkeypatch.setattr(type(cloud.machine(env).guest), "_as_root", silent)
    recordings.keep_journals(session, env)


def test_a_score_log_never_makes_its_record_unreadable(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    """The family's code returns as much as it may, again and again; the record is needed to destroy the machines."""
    env = up(session, environment(has_intermediate_score=True))
    cloud.machine(env).guest.values["intermediate_score"] = {"score": 1, "details": {"x": ["\x01" * 100_000]}}
    with Connection(session.environments.login(env, "primary", "root")) as connection:
        driver = operations.driver(session, env, connection)
        for _ in range(6):
            env, _ = operations.intermediate_score(session, env, driver)
        with pytest.raises(TaskError, match="The score log is full"):
            operations.intermediate_score(session, env, driver)
    [again] = session.environments.all()
    assert isinstance(again.score_log[-1], ScoreLogEntry)
