"""Tests what Inspect's logs and its operator hear of a sample's machines, on a fake cloud."""

from __future__ import annotations

import errno
import gc
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from inspect_ai.event import InfoEvent
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.util import (
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    override_sandbox_output_limit,
)
from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy

from provisioner.base.errors import (
    CommandTimeoutError,
    Interrupted,
    IsolationError,
    MachineLostError,
    MissingVariablesError,
    NotStartedError,
    StillThereError,
    TaskError,
    TaskFamilyError,
    UsageError,
)
from provisioner.base.models import Distribution
from provisioner.environment import lifecycle
from provisioner.images import build
from provisioner.inspect import clean_up, configuration, sample, services
from provisioner.inspect import sandbox as sandbox_module
from provisioner.inspect.blocking import call, end, shorten_collections
from provisioner.inspect.configuration import Configuration, Machine
from provisioner.inspect.evals import Origin
from provisioner.inspect.failures import LossError, PreparationError
from provisioner.inspect.sample import SampleMachines
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.inspect.services import Watch
from provisioner.machines.connect import connect
from provisioner.session import Session
from provisioner.ssh.connection import HANDSHAKE_SECONDS, Connection
from provisioner.ssh.exchange import Completed
from provisioner.store.images import ImageStore
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP, Fails
from tests.unit.fakes.world import with_aux
from tests.unit.inspect.conftest import Configured
from tests.waiting import BOUND_SECONDS

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def machines_of_samples(monkeypatch: pytest.MonkeyPatch) -> dict[str, SampleMachines]:
    """The samples of the process, none at first."""
    kept: dict[str, SampleMachines] = {}
    monkeypatch.setattr(clean_up, "MACHINES", kept)
    monkeypatch.setattr(sandbox_module, "_clouds", set())
    return kept


@pytest.fixture
def transcript() -> Iterator[Transcript]:
    """The sample's transcript."""
    own = Transcript()
    init_transcript(own)
    yield own
    init_transcript(Transcript())


async def _init(given: Configuration) -> dict[str, SandboxEnvironment]:
    return await ProvisionerSandbox.sample_init("task", given, {})


async def _clean_up(sandboxes: dict[str, SandboxEnvironment]) -> None:
    await ProvisionerSandbox.sample_cleanup("task", None, sandboxes, False)


def _infos(transcript: Transcript) -> list[dict[str, Any]]:
    return [event.data for event in transcript.events if isinstance(event, InfoEvent) and isinstance(event.data, dict)]


async def test_the_log_says_how_machines_ended_and_what_they_cost(
    cloud: FakeCloud, session: Session, configured: Configured, transcript: Transcript
) -> None:
    cloud.usd = Decimal(3600)
    await _clean_up(await _init(configured()))
    begin, ending = _infos(transcript)
    assert ending["environment"] == begin["environment"]
    assert "destroy" in ending["phases"]
    [entry] = session.ledger.entries(environment=ending["environment"])
    assert entry.actual_micro_usd
    assert ending["usd"] == entry.actual_micro_usd / 1e6
    assert begin["usd_reserved"] == ending["usd_reserved"] == entry.reserved_micro_usd / 1e6


async def test_the_log_carries_the_proof_and_the_hash(
    session: Session, configured: Configured, transcript: Transcript
) -> None:
    await _clean_up(await _init(configured()))
    begin, ending = _infos(transcript)
    assert begin["isolation"]["proven"] is True
    assert "ipv6" in begin["isolation"]["must_not_reach"]
    assert begin["machines"]["primary"]["memory_gib"] == 1
    assert begin["versions"]["Terraform"] == "1.11.4"
    archived = session.environments.record(begin["environment"])
    assert archived is not None
    assert archived.gone_at is not None
    assert (ending["recording"], ending["gone_at"]) == (archived.recording, archived.gone_at.isoformat())
    assert len(ending["recording"]) == 64


async def test_a_last_look_that_fails_keeps_no_machine_from_being_destroyed(
    cloud: FakeCloud, session: Session, configured: Configured, transcript: Transcript, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sandboxes = await _init(Configuration())
    monkeypatch.setattr(Watch, "look", fail)
    await _clean_up(sandboxes)
    _, ending = _infos(transcript)
    assert ending["gone_at"]
    assert session.environments.all() == []


async def test_the_log_and_the_record_say_what_ended_out_of_memory(
    cloud: FakeCloud, session: Session, configured: Configured, transcript: Transcript
) -> None:
    kill = "6,3,1,-;oom-kill:constraint=CONSTRAINT_NONE,task_memcg=/system.slice/web.service,task=java,pid=8,uid=0"
    sandboxes = await _init(Configuration())
    environment = sandboxes["default"].as_type(ProvisionerSandbox).machines.environment
    cloud.machine(environment).guest.memory = [[kill], "", {}]
    await _clean_up(sandboxes)
    begin, ending = _infos(transcript)
    [told] = ending["memory"]
    assert told.startswith("The kernel ended java (process 8), out of memory: the machine's 1 GiB are full; raise")
    assert ending["restarts"] == {}
    archived = session.environments.record(begin["environment"])
    assert archived is not None
    assert archived.setup.warnings == (told,)


async def test_the_log_says_why_machines_did_not_come_up(
    cloud: FakeCloud, configured: Configured, transcript: Transcript
) -> None:
    cloud.faults.differences = ["primary machine: a card leads to the host's network"]
    with pytest.raises(IsolationError):
        await _init(configured())
    [failure] = _infos(transcript)
    assert "not isolated as promised" in failure["did_not_come_up"]
    assert failure["isolation"]["not_as_promised"] == [
        "seen from outside: primary machine: a card leads to the host's network"
    ]
    assert failure["gone_at"] is not None
    assert len(failure["recording"]) == 64


async def test_machines_that_remain_are_removed_at_the_tasks_end(
    cloud: FakeCloud,
    configured: Configured,
    transcript: Transcript,
    machines_of_samples: dict[str, SampleMachines],
    caplog: pytest.LogCaptureFixture,
) -> None:
    sandboxes = await _init(configured())
    cloud.faults.unreachable = True
    await _clean_up(sandboxes)
    assert any(record.levelno == logging.ERROR for record in caplog.records)
    begin, failure = _infos(transcript)
    assert failure["environment"] == begin["environment"]
    assert "is not gone" in failure["was_not_destroyed"]
    assert (failure["gone_at"], failure["recording"], failure["usd"]) == (None, "", None)
    assert len(machines_of_samples) == 1
    cloud.faults.unreachable = False
    await ProvisionerSandbox.task_cleanup("task", None, True)
    assert cloud.existing() == []
    assert machines_of_samples == {}


async def test_failed_machines_are_removed_at_the_tasks_end(
    cloud: FakeCloud, session: Session, configured: Configured, machines_of_samples: dict[str, SampleMachines]
) -> None:
    faults = cloud.faults

    def lose_the_cloud() -> None:
        faults.unreachable = True

    cloud.guest_defaults = {
        "values": {**cloud.guest_defaults["values"], "start": Fails("no")}, "during": {"start": lose_the_cloud}
    }  # fmt: skip
    with pytest.raises(StillThereError):
        await _init(configured())
    assert [kept.id for kept in session.environments.readable()] == list(machines_of_samples)
    assert len(machines_of_samples) == 1
    faults.unreachable = False
    await ProvisionerSandbox.task_cleanup("task", None, True)
    assert session.environments.readable() == []
    assert session.ledger.entries(unsettled=True) == []
    assert machines_of_samples == {}


async def test_all_kept_machines_are_named(
    cloud: FakeCloud,
    configured: Configured,
    machines_of_samples: dict[str, SampleMachines],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await _init(configured())
    await _init(Configuration(machines=(Machine(name="a"), Machine(name="b", user="agent"))))
    gone, stays = machines_of_samples.values()
    identity = stays.environment.id
    await end(lambda: lifecycle.destroy(gone.session, gone.environment))
    await ProvisionerSandbox.task_cleanup("task", None, False)
    assert "A sample's machines could not be handed over to you: " in caplog.text
    assert "has been destroyed" in caplog.text
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" #")[0].rstrip() for line in lines] == [
        f"provisioner ssh {identity} --user root",
        f"provisioner ssh {identity} --machine b",
    ]
    await end(stays.destroy)


async def test_a_sample_that_cannot_begin_says_what_to_do(cloud: FakeCloud, configured: Configured) -> None:
    tasks = {"main": {"instructions": "", "required_environment_variables": ["KEY"]}}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": tasks}}}
    with pytest.raises(MissingVariablesError, match=r"(?s)not set: KEY.*-T secrets_env_path=FILE") as raised:
        await _init(configured())
    assert str(raised.value) == raised.value.message


async def test_a_null_character_in_a_command_is_no_loss_of_the_machine(configured: Configured) -> None:
    sandboxes = await _init(Configuration(machines=(Machine(name="a"),)))
    with pytest.raises(ValueError, match="embedded null byte"):
        await sandboxes["a"].exec(["echo", "a\0b"])
    with pytest.raises(ValueError, match="embedded null byte"):
        await sandboxes["a"].exec(["true"], env={"A": "\0"})
    machine = sandboxes["a"]
    for refused in (
        machine.exec(["true"], cwd="\0"),
        machine.exec(["true"], user="\0"),
        machine.read_file("a\0"),
        machine.write_file("a\0", ""),
    ):
        with pytest.raises(ValueError, match="embedded null byte"):
            await refused
    await _clean_up(sandboxes)


async def test_a_machine_that_is_connected_to_again_delays_no_other(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandboxes = await _init(Configuration(machines=(Machine(name="a"), Machine(name="b"))))
    machines = sandboxes["a"].as_type(ProvisionerSandbox).machines
    waits, go_on = threading.Event(), threading.Event()

    def slow(session: Session, environment: Any, role: str) -> Any:
        if role == "b":
            waits.set()
            go_on.wait(BOUND_SECONDS)
        return connect(session, environment, role)

    monkeypatch.setattr(sample, "connect", slow)
    for connection in machines._connections.values():
        connection.close()
    async with anyio.create_task_group() as group:
        group.start_soon(call, lambda: machines.on("b", lambda _: None))
        await call(lambda: waits.wait(BOUND_SECONDS))
        with anyio.fail_after(BOUND_SECONDS):
            assert await call(lambda: machines.on("primary", lambda connection: connection.active))
        go_on.set()
    await _clean_up(sandboxes)


async def test_machines_of_an_unwritable_log_are_destroyed(
    cloud: FakeCloud,
    configured: Configured,
    machines_of_samples: dict[str, SampleMachines],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> Transcript:
        raise OSError("no space left")

    monkeypatch.setattr(sandbox_module, "transcript", refuse)
    with pytest.raises(OSError, match="no space left"):
        await _init(configured())
    assert cloud.existing() == []
    assert machines_of_samples == {}


async def test_a_samples_end_is_told_while_others_begin(
    machines_of_samples: dict[str, SampleMachines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written down by the event loop, and looked through in threads."""

    class Others(dict[str, SampleMachines]):
        """Another sample begins whenever a caller looks at one of them."""

        def items(self) -> Any:
            for item in super().items():
                self.setdefault("later", cast(SampleMachines, None))
                yield item

    class Ended:
        failed = None

        def destroy(self) -> str:
            return "ended"

    ended = cast(SampleMachines, Ended())
    monkeypatch.setattr(clean_up, "MACHINES", Others({"first": cast(SampleMachines, None), "ended": ended}))
    assert clean_up.destroy(ended) == cast(Any, "ended")


async def test_images_are_built_although_the_machines_do_not_fit_now(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples wait for the memory themselves."""
    monkeypatch.setattr(cloud, "shortage", lambda *_: "no room")
    await ProvisionerSandbox.task_init(
        "task", Configuration(machines=(Machine(name="a"), Machine(name="b", run=("true",))))
    )
    images = [image for image in ImageStore(cloud.home).all() if image.kind == "family"]
    assert len(images) == 2


async def test_the_notes_of_a_build_say_which_machine_it_is_for(
    configured: Configured, caplog: pytest.LogCaptureFixture
) -> None:
    machines = (Machine(name="box"), Machine(name="web", run=("true",)), Machine(name="vault", run=("true; true",)))
    await ProvisionerSandbox.task_init("startup", Configuration(machines=machines))
    for name in ("box", "web", "vault"):
        assert caplog.text.count(f"Building the image of machine {name} (family-sandbox-") == 1
    assert "machine web: run true" in caplog.text
    assert "the first build takes a minute or more" in caplog.text
    assert "startup: its images are ready after " in caplog.text


async def test_a_budget_without_effect_is_reported_once(
    configured: Configured, caplog: pytest.LogCaptureFixture
) -> None:
    given = configured(budget=5)
    await ProvisionerSandbox.task_init("startup", given)
    await _clean_up(await _init(given))
    assert caplog.text.count("`budget` bounds nothing here: machines of the local cloud are free of charge.") == 1
    caplog.clear()
    await ProvisionerSandbox.task_init("startup", configured())
    assert "budget" not in caplog.text


async def test_what_there_is_before_samples_is_collected_no_more(configured: Configured) -> None:
    gc.unfreeze()
    shorten_collections.cache_clear()
    await ProvisionerSandbox.task_init("startup", configured())
    assert gc.get_freeze_count() > 100_000
    gc.unfreeze()


async def test_a_familys_mistakes_are_told_before_an_image_is_built(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "family_image", lambda *_: pytest.fail("an image is built"))
    with pytest.raises(PreparationError, match="fam has no task 'escape'"):
        await ProvisionerSandbox.task_init("startup", configured(task="escape"))
    module = Path(configured().family) / "fam.py"
    module.write_text(f"{module.read_text()}\n    @staticmethod\n    def score(t):\n        return 1.0\n")
    with pytest.raises(PreparationError, match="fam cannot run:"):
        await ProvisionerSandbox.task_init("startup", configured())
    later = configured(task="${SAMPLE_METADATA_TASK}")
    await ProvisionerSandbox.task_init("startup", later)
    with pytest.raises(TaskFamilyError, match="fam cannot run:"):
        await ProvisionerSandbox.sample_init("task", later, {"task": "main"})


class _Machine:
    """Takes every call."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.read_limits: list[int] = []
        self.notes: deque[str] = deque()

    def on(self, _: str, work: Any) -> Any:
        return work(self)

    def run(self, argv: list[str], *, on_stdout: Callable[[bytes], None], **_: Any) -> Completed:
        self.calls.append(argv)
        if argv == ["long"]:
            on_stdout(b"12345678")
        return Completed(0, b"", b"")

    def read_file(self, _: str, limit_bytes: int, **__: Any) -> bytes:
        self.read_limits.append(limit_bytes)
        return b"text"

    def write_file(self, *_: Any, **__: Any) -> None:
        """Takes it."""


@pytest.mark.parametrize(("distribution", "user"), [("debian-12", "admin"), ("ubuntu-20.04-cuda", "ubuntu")])
async def test_a_person_logs_in_on_the_aux_vm_as_its_usual_user(distribution: Distribution, user: str) -> None:
    machines = cast(SampleMachines, SimpleNamespace(environment=with_aux(distribution)))
    connection = await ProvisionerSandbox(machines, "aux", user, f"/home/{user}", {}).connection()
    assert connection.command == f"provisioner ssh env --machine aux --user {user}"


async def test_half_characters_are_no_errors_of_ours() -> None:
    machine = _Machine()
    sandbox = ProvisionerSandbox(cast(SampleMachines, machine), "primary", "root", "/", {})
    assert (await sandbox.exec(["echo", "\ud800"], input="\ud800")).success
    assert await sandbox.read_file("/file") == "text"
    await sandbox.write_file("/file", "text")
    assert machine.calls == [["echo", "?"]]


async def test_the_limits_are_those_that_hold_at_each_call() -> None:
    machine = _Machine()
    sandbox = ProvisionerSandbox(cast(SampleMachines, machine), "primary", "root", "/", {})
    for limit in (4, 6):
        with override_sandbox_output_limit(limit):
            assert (
                await sandbox.exec(["long"])
            ).stdout == f"\n[... {8 - limit} bytes cut out ...]\n{'12345678'[-limit:]}"
            await sandbox.read_file("/file")
    assert (await sandbox.exec(["long"])).stdout == "12345678"
    await sandbox.read_file("/file")
    assert machine.read_limits == [4, 6, SandboxEnvironmentLimits.MAX_READ_FILE_SIZE]


async def test_a_command_that_starts_too_late_is_no_lost_machine(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.guest_defaults["programs"] = {"true": b""}
    sandboxes = await _init(Configuration())

    def run(*_: Any, **__: Any) -> Completed:
        raise NotStartedError("it did not start it")

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "run", run)
        with pytest.raises(TimeoutError, match="after 5 seconds"):
            await sandboxes["default"].exec(["true"], timeout=5)
    assert (await sandboxes["default"].exec(["true"])).success
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "run", run)
        with pytest.raises(SandboxUnavailableError):
            await sandboxes["default"].exec(["true"], timeout=HANDSHAKE_SECONDS)
    with pytest.raises(SandboxUnavailableError):
        await sandboxes["default"].exec(["true"])
    await _clean_up(sandboxes)


@pytest.mark.parametrize("lost", [MachineLostError("gone"), NotStartedError("frozen"), TaskError("lies")])
async def test_what_is_the_loss_of_a_machine_and_what_is_not(configured: Configured, lost: Exception) -> None:
    given = Configuration()
    machines = await end(lambda: SampleMachines(given, Origin("task")))

    def fail(error: Exception) -> None:
        raise error

    machines._connection = lambda _: None  # type: ignore[method-assign,assignment,return-value]
    for error in (CommandTimeoutError("over"), Interrupted("cancelled"), OSError("no such file")):
        with pytest.raises(type(error), match=str(error)):
            machines.on("primary", lambda _, error=error: fail(error))  # type: ignore[misc]
    with pytest.raises(LossError, match=str(lost)):
        machines.on("primary", lambda _: fail(lost))
    with pytest.raises(LossError, match=str(lost)):
        machines.on("primary", lambda _: None)


async def test_inspects_services_are_polled_five_times_a_second() -> None:
    sandbox = ProvisionerSandbox(cast(SampleMachines, _Machine()), "primary", "root", "/", {})
    assert SandboxEnvironmentProxy(sandbox).default_polling_interval() == 0.2


async def test_a_sample_may_be_cleaned_up_twice(
    cloud: FakeCloud, session: Session, configured: Configured, transcript: Transcript
) -> None:
    sandboxes = await _init(configured())
    for _ in range(2):
        await ProvisionerSandbox.sample_cleanup("task", None, sandboxes, True)
    assert cloud.existing() == []
    assert session.ledger.entries(unsettled=True) == []
    assert len(_infos(transcript)) == 2  # its beginning and one end


async def test_a_login_to_no_running_machine_is_a_connection_error(configured: Configured) -> None:
    given = configured()
    machines = await end(lambda: SampleMachines(given, Origin("task")))
    with pytest.raises(ConnectionError):
        await ProvisionerSandbox(machines, "primary", "agent", "/home/agent", {}).connection()
    sandboxes = await _init(given)
    assert (await sandboxes["default"].connection()).command.startswith("provisioner ssh ")
    await _clean_up(sandboxes)
    with pytest.raises(ConnectionError):
        await sandboxes["default"].connection()


@pytest.mark.parametrize(
    ("clouds", "memory_gib", "cores", "most"),
    [
        ((), 100.0, 4, 8),
        (("local",), 100.0, 4, 8),
        (("local",), 3.5, 4, 3),
        (("local",), 0.5, 4, 1),
        (("local",), 1000.0, 64, 128),
        (("aws",), 3.5, 1, 50),
        (("aws", "local"), 3.5, 4, 3),
    ],
    ids=["unknown", "cores", "memory", "little", "large", "aws", "both"],
)
async def test_sandboxes_at_once_depend_on_the_cloud(
    clouds: Sequence[str], memory_gib: float, cores: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "available_memory_gib", lambda: memory_gib)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    for cloud in clouds:
        given = Configuration.model_validate({"cloud": cloud})
        assert await ProvisionerSandbox.task_init_environment(given, {}) == {}
    assert ProvisionerSandbox.default_concurrency() == most
    await ProvisionerSandbox.task_cleanup("shutdown", None, True)
    monkeypatch.setattr(sandbox_module, "available_memory_gib", lambda: 1.0)
    assert ProvisionerSandbox.default_concurrency() == 1


OF_SAMPLE = Machine(name="a", run=("echo ${SAMPLE_METADATA_WORD} ${SAMPLE_METADATA_OTHER_WORD}",))


@pytest.mark.parametrize(
    ("machine", "metadata", "variables"),
    [
        (
            OF_SAMPLE,
            {"word": "x", "other word": 3, "more": "y"},
            {"SAMPLE_METADATA_WORD": "x", "SAMPLE_METADATA_OTHER_WORD": "3"},
        ),
        (OF_SAMPLE, {"word": "x", "other word": "a\0b"}, {}),
        (OF_SAMPLE, {"word": "x", "other word": "\ud800"}, {}),
    ],
    ids=["image", "null", "surrogate"],
)
async def test_metadata_for_images_needs_a_task_init_of_its_own(
    machine: Machine, metadata: dict[str, str], variables: dict[str, str]
) -> None:
    given = Configuration(machines=(machine,))
    assert await ProvisionerSandbox.task_init_environment(given, metadata) == variables


async def test_an_image_that_depends_on_a_sample_is_built_first(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = Configuration(machines=(Machine(name="a", run=("echo ${SAMPLE_METADATA_WORD}",)),))
    await ProvisionerSandbox.task_init("startup", given)
    assert [image for image in ImageStore(cloud.home).all() if image.kind == "family"] == []
    monkeypatch.setenv("SAMPLE_METADATA_WORD", "x")
    await ProvisionerSandbox.task_init("startup", given)
    assert len([image for image in ImageStore(cloud.home).all() if image.kind == "family"]) == 1
    caplog.clear()
    await _clean_up(await ProvisionerSandbox.sample_init("task", given, {"word": "x"}))
    assert "Building" not in caplog.text


async def test_an_image_that_fails_is_one_samples_error(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = configured(task="${SAMPLE_METADATA_TASK}")
    monkeypatch.setenv("SAMPLE_METADATA_TASK", "escape")
    await ProvisionerSandbox.task_init("startup", given)
    assert "has no task 'escape'" in caplog.text
    with pytest.raises(UsageError, match="has no task 'escape'"):
        await ProvisionerSandbox.sample_init("task", given, {"task": "escape"})


async def test_long_text_keeps_no_event_loop_waiting() -> None:
    threads: list[threading.Thread] = []

    class Text(str):
        __slots__ = ()

        def encode(self, *_: Any, **__: Any) -> bytes:
            threads.append(threading.current_thread())
            return b"text"

    class Data(bytes):
        def decode(self, *_: Any, **__: Any) -> str:
            threads.append(threading.current_thread())
            return "text"

    machine = _Machine()
    machine.read_file = lambda *_, **__: Data()  # type: ignore[method-assign]
    sandbox = ProvisionerSandbox(cast(SampleMachines, machine), "primary", "agent", "/", {})
    await sandbox.exec(["cat"], input=Text("long"))
    await sandbox.write_file("/file", Text("long"))
    assert await sandbox.read_file("/file") == "text"
    assert len(threads) >= 3
    assert threading.current_thread() not in threads


async def test_a_long_configuration_keeps_no_event_loop_waiting(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    threads: list[threading.Thread] = []

    def load(path: Path, beside: object) -> Configuration:
        threads.append(threading.current_thread())
        return Configuration(machines=(Machine(name="a"),))

    monkeypatch.setattr(configuration, "load", load)
    await ProvisionerSandbox.task_init("startup", str(tmp_path / "provisioner.yaml"))
    await _clean_up(await ProvisionerSandbox.sample_init("task", str(tmp_path / "provisioner.yaml"), {}))
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_a_sample_waits_until_its_machine_is_ready(
    cloud: FakeCloud, session: Session, configured: Configured, caplog: pytest.LogCaptureFixture
) -> None:
    cloud.guest_defaults |= {
        "programs": {"bash": b"", "systemctl": b"Id=web.service\nNRestarts=4\n"}, "journal": "no flask\nno web\n"
    }  # fmt: skip
    machine = Machine(name="box", services=(("web", "python3 app.py"),), ready=80)
    sandboxes = await ProvisionerSandbox.sample_init("task", Configuration(machines=(machine,)), {})
    assert "The service web of machine box has ended 4 times. It said last: no flask no web" in caplog.text
    [record] = session.environments.all()
    assert "ready" in [phase.name for phase in record.phases]
    await _clean_up(sandboxes)


async def test_a_machine_that_does_not_become_ready_is_destroyed(
    cloud: FakeCloud, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "FAILING_SECONDS", 0.0)
    cloud.guest_defaults["programs"] = {"systemctl": b"Id=web.service\nNRestarts=4\nResult=exit-code\n"}
    given = Configuration(machines=(Machine(name="box", services=(("web", "python3 app.py"),)),))
    with pytest.raises(Exception, match="The service web of machine box has ended 4 times, and does not stay up"):
        await ProvisionerSandbox.sample_init("task", given, {})
    assert cloud.existing() == []
