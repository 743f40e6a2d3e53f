"""Tests that samples and epochs start from one frozen environment, in evals on a fake cloud with a mock model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from provisioner.base.errors import CapacityError, InfrastructureError, ProvisionerError
from provisioner.costs.prices import MICRO
from provisioner.environment import lifecycle, snapshots, sweep
from provisioner.inspect import clean_up, evals, forks, sample, services
from provisioner.inspect import sandbox as sandbox_module
from provisioner.inspect.compose_project import Project
from provisioner.inspect.configuration import Configuration
from provisioner.inspect.evals import Origin
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.sandbox import ProvisionerSandbox, ServiceSandbox
from provisioner.inspect.services import Container, ServicesError
from provisioner.session import Session
from provisioner.store.files import is_locked
from provisioner.store.snapshots import SnapshotStore
from tests.inspect.epochs import beginning
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.inspect.conftest import Configured
from tests.waiting import BOUND_SECONDS, until_in_loop

# By the task that samples begin with outside of `eval`.
ORIGINS = {
    "in this eval": Origin("task", "eval", "1"),
    "in another eval": Origin("task", "other", "1"),
    "in none": Origin("task"),
}


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "asyncio"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, cloud: FakeCloud, configured: Configured, anyio_backend: str) -> None:
    """Has Inspect run on the event loop, without its pause of up to a second before each sample."""
    cloud.guest_defaults["programs"] = dict.fromkeys(("/bin/sh", "bash", "true"), b"")
    monkeypatch.setenv("INSPECT_ASYNC_BACKEND", anyio_backend)
    monkeypatch.setattr(ProvisionerSandbox, "default_concurrency", classmethod(lambda _: None))
    of_eval = evals.origin_of_sample
    monkeypatch.setattr(sandbox_module, "origin_of_sample", lambda task, name: ORIGINS.get(task) or of_eval(task, name))
    monkeypatch.setattr(forks, "_forks", {})
    monkeypatch.setattr(forks, "_most", {})


BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"], indirect=True)


@solver
def doing(work: Callable[[TaskState], None]) -> Solver:
    """Does something in each epoch, and works in the machine."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        work(state)
        assert (await sandbox().exec(["true"])).success
        return state

    return solve


def _evaluated(
    tmp_path: Path,
    configuration: Configuration,
    work: Callable[[TaskState], None] = lambda _: None,
    *,
    samples: int = 1,
    **settings: Any,
) -> EvalLog:
    spec = SandboxEnvironmentSpec("provisioner", configuration)
    task = Task(dataset=[Sample(input="x", id=n) for n in range(samples)], solver=doing(work), sandbox=spec)
    [log] = eval(
        task, model="mockllm/model", log_dir=str(tmp_path / "logs"), display="none", **{"epochs": 3, **settings}
    )
    return log


def _assert_nothing_left(session: Session, cloud: FakeCloud) -> None:
    assert cloud.existing() == []
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []
    assert SnapshotStore(session.home).all() == []


@BOTH
@pytest.mark.parametrize(("fork", "samples", "epochs"), [("epochs", 1, 3), ("samples", 3, 2)])
def test_one_comes_up_and_the_others_are_copies_of_it(
    session: Session, cloud: FakeCloud, configured: Configured, tmp_path: Path, fork: str, samples: int, epochs: int
) -> None:
    log = _evaluated(tmp_path, configured(fork=fork), samples=samples, epochs=epochs)
    assert log.status == "success", log.error
    began = [beginning(sample) for sample in log.samples or []]
    [first] = [each for each in began if each["frozen_as"]]
    count = samples * epochs
    assert [each["forked_from"] for each in began if each is not first] == [first["environment"]] * (count - 1)
    assert first["forked_from"] is None
    assert list(cloud.frozen) == [first["frozen_as"]]
    assert len({each["environment"] for each in began}) == count
    labels = set()
    for each in began:
        machine = cloud.machine(each["environment"])
        assert each["isolation"]["proven"]
        assert ("freeze" in each["phases"]) == ("start" in machine.guest.operations) == (each is first)
        # One connection from the machine's boot to its end, and with the frozen keys that by which a copy is renewed.
        assert machine.sshd.logins == (1 if each is first else 2)
        [entry] = session.ledger.entries(environment=each["environment"])
        assert entry.batch == f"inspect-{log.eval.eval_id}"
        record = session.environments.record(each["environment"])
        assert record is not None
        assert record.gone_at is not None
        labels.add(record.label)
    assert len(labels) == count
    _assert_nothing_left(session, cloud)


def test_samples_share_nothing_and_snapshots_go_at_the_end(
    session: Session, cloud: FakeCloud, configured: Configured, tmp_path: Path
) -> None:
    seen: dict[tuple[object, int], int] = {}

    def count(state: TaskState) -> None:
        seen[state.sample_id, state.epoch] = len(SnapshotStore(session.home).all())

    log = _evaluated(tmp_path, configured(fork="epochs"), count, samples=2, epochs=2, max_samples=1)
    assert seen == {(0, 1): 1, (1, 1): 2, (0, 2): 2, (1, 2): 1}
    of: dict[object, set[str]] = {}
    for each in log.samples or []:
        began = beginning(each)
        of.setdefault(each.id, set()).add(began["forked_from"] or began["environment"])
    assert [len(origins) for origins in of.values()] == [1, 1]
    assert of[0] != of[1]
    _assert_nothing_left(session, cloud)


@pytest.mark.parametrize(("fork", "samples"), [("epochs", 2), ("samples", 1)])
def test_what_nothing_else_starts_from_is_not_frozen(
    session: Session, cloud: FakeCloud, configured: Configured, tmp_path: Path, fork: str, samples: int
) -> None:
    log = _evaluated(tmp_path, configured(fork=fork), samples=samples, epochs=1)
    assert [beginning(sample)["frozen_as"] for sample in log.samples or []] == [None] * samples
    assert cloud.frozen == {}
    _assert_nothing_left(session, cloud)


def test_an_epoch_that_cannot_be_frozen_fails_alone(
    session: Session, cloud: FakeCloud, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_the_first_freeze(monkeypatch, InfrastructureError("QEMU failed"))
    log = _evaluated(tmp_path, configured(fork="epochs"), fail_on_error=False)
    samples = log.samples or []
    [failed] = [sample.error for sample in samples if sample.error]
    assert "QEMU failed" in failed.message
    began = [beginning(sample) for sample in samples if not sample.error]
    [first] = [each["environment"] for each in began if each["frozen_as"]]
    assert [each["forked_from"] for each in began if not each["frozen_as"]] == [first]
    _assert_nothing_left(session, cloud)


def test_a_full_disk_fails_no_epoch_and_the_next_one_is_frozen(
    session: Session,
    cloud: FakeCloud,
    configured: Configured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _fail_the_first_freeze(monkeypatch, CapacityError("The disk of this host has no room for a snapshot."))
    log = _evaluated(tmp_path, configured(fork="epochs"))
    assert log.status == "success", log.error
    began = [beginning(sample) for sample in log.samples or []]
    assert sorted((bool(each["frozen_as"]), bool(each["forked_from"])) for each in began) == [
        (False, False),
        (False, True),
        (True, False),
    ]
    assert "comes up anew, and so does the next for now. The disk of this host has no room" in caplog.text
    _assert_nothing_left(session, cloud)


def _fail_the_first_freeze(monkeypatch: pytest.MonkeyPatch, error: ProvisionerError) -> None:
    freeze, errors = SampleMachines.freeze, [error]

    def fail_once(machines: SampleMachines) -> str:
        if errors:
            raise errors.pop()
        return freeze(machines)

    monkeypatch.setattr(SampleMachines, "freeze", fail_once)


def test_an_epoch_that_is_tried_again_is_a_copy_as_well(
    session: Session, cloud: FakeCloud, configured: Configured, tmp_path: Path
) -> None:
    tried: list[int] = []

    def fail_once(state: TaskState) -> None:
        tried.append(state.epoch)
        if tried.count(2) == 1 and state.epoch == 2:
            raise ValueError("not yet")

    log = _evaluated(tmp_path, configured(fork="epochs"), fail_once, epochs=2, max_samples=1, retry_on_error=1)
    assert log.status == "success", log.error
    assert tried == [1, 2, 2]
    assert len(cloud.frozen) == 1
    _assert_nothing_left(session, cloud)


def test_kept_copies_keep_their_snapshot(
    session: Session, cloud: FakeCloud, configured: Configured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _evaluated(tmp_path, configured(fork="epochs"), epochs=2, sandbox_cleanup=False)
    [snapshot] = SnapshotStore(session.home).all()
    sweep.sweep(session, lambda _: session, None)
    assert SnapshotStore(session.home).all() == [snapshot]
    for environment in session.environments.all():
        lifecycle.destroy(session, environment)
    clean_up.destroy_abandoned(None)
    assert f"snapshot {snapshot.name} removed" in capsys.readouterr().out
    _assert_nothing_left(session, cloud)


async def _up(configuration: Configuration, sample_id: Any = 1, begins: str = "in this eval") -> SampleMachines:
    found = await ProvisionerSandbox.sample_init(begins, configuration, {"__sample_id__": sample_id})
    return next(iter(found.values())).as_type(ProvisionerSandbox).machines


@BOTH
@pytest.mark.anyio
async def test_if_the_first_epoch_is_cancelled_the_next_one_is_frozen(
    session: Session, cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration, up = configured(fork="epochs"), []
    began = anyio.Event()

    def never(machines: SampleMachines) -> list[Container]:
        anyio.from_thread.run_sync(began.set)
        machines.cancelled.wait(BOUND_SECONDS)
        machines.session.check()
        return []

    with anyio.fail_after(BOUND_SECONDS):
        async with anyio.create_task_group() as group, anyio.create_task_group() as cancelled:
            with monkeypatch.context() as patch:
                patch.setattr(SampleMachines, "start_containers", never)
                cancelled.start_soon(_up, configuration)
                await began.wait()

            async def wait() -> None:
                up.append(await _up(configuration))

            group.start_soon(wait)
            await until_in_loop(lambda: forks._forks_of("eval")[0].first.statistics().tasks_waiting == 1)
            assert up == []
            cancelled.cancel_scope.cancel()
    [second] = up
    assert (second.snapshot, second.frozen_as) == ("", f"fork-{second.environment.id}")
    third = await _up(configuration)
    assert third.snapshot == second.frozen_as
    for machines in (second, third):
        machines.destroy()
    await forks.end_all()
    _assert_nothing_left(session, cloud)


PROJECT = Project(("web",), "{}", '{"services": {}}', (), frozenset(), (), 0, "", 1, 2, ())


@pytest.fixture
def projects(monkeypatch: pytest.MonkeyPatch) -> list[Project]:
    """Beside their family's machines, the samples that begin have the services of these compose files, in turn."""
    found = [PROJECT, PROJECT]
    monkeypatch.setattr(sample, "project_of", lambda *_: found.pop(0))
    monkeypatch.setattr(services, "start", lambda *_, **__: [Container("web", "0123456789ab", "app", "/srv")])
    return found


@pytest.mark.anyio
@pytest.mark.usefixtures("projects")
async def test_services_start_once_and_a_copy_is_asked_for_its_own(
    configured: Configured, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Container("web", "0123456789ab", "app", "/copy")
    monkeypatch.setattr(services, "running", lambda *_: [own])
    both = [
        (await ProvisionerSandbox.sample_init("in this eval", configured(fork="samples"), {"__sample_id__": number}))
        for number in "12"
    ]
    first, copy = (found["web"].as_type(ServiceSandbox) for found in both)
    assert (first.container.directory, copy.container) == ("/srv", own)
    phases = [[phase.name for phase in each.machines.environment.phases] for each in (first, copy)]
    assert (phases[0][-2:], phases[1][-1]) == (["services", "freeze"], "services")
    environment = first.machines.environment
    assert session.environments.reread(environment).phases == environment.phases
    for each in (first, copy):
        each.machines.destroy()
    await forks.end_all()


@pytest.mark.anyio
@pytest.mark.usefixtures("projects")
async def test_a_service_that_has_ended_since_the_freeze_fails_the_copy(
    session: Session, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> list[Container]:
        raise ServicesError("The service web is not up: exited, exit code 1.")

    monkeypatch.setattr(services, "running", ended)
    first = await _up(configured(fork="samples"))
    with pytest.raises(ServicesError, match="web is not up"):
        await _up(configured(fork="samples"), 2)
    assert session.environments.all() == [first.environment]
    first.destroy()
    await forks.end_all()


@pytest.mark.anyio
async def test_samples_whose_compose_files_say_something_else_with_their_metadata_are_no_copies(
    configured: Configured, projects: list[Project]
) -> None:
    projects[1] = replace(PROJECT, run='{"services": {"web": {"environment": {"LEVEL": "2"}}}}')
    both = [await _up(configured(fork="samples"), number) for number in range(2)]
    assert [machines.snapshot for machines in both] == ["", ""]
    for machines in both:
        machines.destroy()
    await forks.end_all()


@BOTH
@pytest.mark.anyio
async def test_the_end_of_a_run_destroys_what_ctrl_c_left(
    session: Session, cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [await _up(configured(fork="epochs")) for _ in range(2)]
    assert [machines.snapshot for machines in running] == ["", running[0].frozen_as]
    monkeypatch.setattr(clean_up, "MACHINES", {machines.environment.id: machines for machines in running})
    await ProvisionerSandbox.task_cleanup("shutdown", None, True)
    assert not is_locked(SnapshotStore(session.home).lease(running[0].frozen_as))
    _assert_nothing_left(session, cloud)


@pytest.mark.anyio
async def test_another_sample_eval_or_configuration_is_never_a_copy(session: Session, configured: Configured) -> None:
    forking = configured(fork="epochs")
    others = [
        await _up(forking),
        await _up(forking, "1"),
        await _up(forking, begins="in another eval"),
        await _up(configured(fork="epochs", ttl="3h")),
        await _up(configured(fork="samples")),
        await _up(configured(fork="samples"), begins="in another eval"),
        await _up(configured(fork="samples", ttl="3h")),
    ]
    assert len({machines.frozen_as for machines in others}) == 7
    assert {machines.snapshot for machines in others} == {""}
    for machines in others:
        machines.destroy()
    await forks.end_all()


@pytest.mark.anyio
async def test_without_an_eval_s_id_each_epoch_comes_up_anew(configured: Configured, cloud: FakeCloud) -> None:
    machines = await _up(configured(fork="epochs"), begins="in none")
    assert (machines.frozen_as, cloud.frozen) == ("", {})
    machines.destroy()


@pytest.mark.anyio
async def test_what_a_killed_eval_has_frozen_is_removed_by_the_sweep(
    session: Session, cloud: FakeCloud, configured: Configured
) -> None:
    machines = await _up(configured(fork="epochs"))
    machines.destroy()
    sweep.sweep(session, lambda _: session, None)
    assert len(SnapshotStore(session.home).all()) == 1  # this process may still need it
    snapshots.leave(machines.session, machines.frozen_as)  # as the kernel does for a process that ended
    sweep.sweep(session, lambda _: session, None)
    _assert_nothing_left(session, cloud)


# A sample reserves 2 dollars an hour, for four hours and the teardown.
BUDGET_USD = 26


def test_a_budget_for_three_of_five_samples_has_the_others_wait(
    cloud: FakeCloud, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.usd = Decimal(1)
    cloud.guest_defaults["programs"] = dict.fromkeys(("/bin/sh", "bash", "true"), b"")
    monkeypatch.setenv("INSPECT_ASYNC_BACKEND", "asyncio")
    monkeypatch.setattr(forks, "PAUSE_SECONDS", 0.05)
    running: set[str] = set()
    at_once: list[int] = []
    reserved_usd: list[float] = []

    @solver
    def wait_for_three() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            machines = sandbox().as_type(ProvisionerSandbox).machines
            running.add(machines.environment.id)
            entries = machines.session.ledger.entries(unsettled=True)
            at_once.append(len(running))
            reserved_usd.append(sum(entry.reserved_micro_usd for entry in entries) / MICRO)
            with anyio.fail_after(BOUND_SECONDS):
                while max(at_once) < 3:
                    await anyio.sleep(0.01)
            running.discard(machines.environment.id)
            return state

        return solve

    sandboxed = SandboxEnvironmentSpec("provisioner", configured(budget=BUDGET_USD))
    task = Task(dataset=[Sample(input=name) for name in "abcde"], solver=wait_for_three(), sandbox=sandboxed)
    [log] = eval(
        task,
        model="mockllm/model",
        max_samples=5,
        max_sandboxes=5,
        log_dir=str(tmp_path / "logs"),
        display="none",
    )
    assert (log.status, [sample.error for sample in log.samples or []]) == ("success", [None] * 5)
    assert max(at_once) == 3
    assert max(reserved_usd) <= BUDGET_USD
