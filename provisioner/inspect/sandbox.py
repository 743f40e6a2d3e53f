"""The sandbox provider `provisioner` of Inspect: one object for each machine of a sample."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar, overload

import anyio
from inspect_ai.log import transcript
from inspect_ai.util import (
    ExecResult,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel

from provisioner.best_effort import describe
from provisioner.clouds.local.sizing import available_memory_gib
from provisioner.errors import CommandTimeoutError, Interrupted, NotStartedError, ProvisionerError
from provisioner.inspect import clean_up, evals, evidence, forks
from provisioner.inspect.blocking import call, end, launch, prepare, shorten_collections
from provisioner.inspect.configuration import (
    COMPOSE_FILE_NAMES,
    FILE_NAMES,
    Machine,
    by_reference,
    compose_references,
    configuration_of,
    from_log,
    image_metadata,
    references,
    with_metadata,
)
from provisioner.inspect.failures import before_samples, in_full, told_in_full
from provisioner.inspect.listener import told
from provisioner.inspect.losses import LossError, NotUpError, Output, file_errors, unavailable
from provisioner.inspect.origin import Origin
from provisioner.inspect.plain_family import workdir
from provisioner.inspect.private import origin_of_sample
from provisioner.inspect.readiness import PAUSE_SECONDS, wait_until_ready
from provisioner.inspect.sample import Ending, SampleMachines
from provisioner.machines.create import aux_user
from provisioner.models import Environment, Role
from provisioner.printable import encodable
from provisioner.ssh.connection import HANDSHAKE_SECONDS, Connection
from provisioner.ssh.exchange import Completed

Result = TypeVar("Result")
# The exit code of a command that signal 9 ended, as the kernel does when memory is short.
KILLED = 128 + 9

_log = logging.getLogger("provisioner.inspect")

# Unless --max-sandboxes says otherwise: in a cloud elsewhere, and on this host by its memory and cores. Agents mostly
# wait for their models, so two machines share a core, as Inspect's docker provider has it.
SANDBOXES_AT_ONCE = 50
GIB_PER_SANDBOX = 1.0
SANDBOXES_PER_CORE = 2
# The clouds of the evals that run. Inspect asks for the number of sandboxes without a configuration, but after it has
# shown each one to task_init_environment.
_clouds: set[str] = set()
# The variables that carry a sample's metadata to task_init.
VARIABLE = "SAMPLE_METADATA_"
# Inspect's names of the machines of a family.
NAMES: dict[Role, str] = {"primary": "default", "aux": "aux"}


def refuse_null(*texts: str) -> None:
    """Raises ValueError if a text has a null character, of which Inspect makes a tool error, as Python's own does."""
    if any("\0" in text for text in texts):
        raise ValueError("embedded null byte")


def path_in(directory: str, path: str) -> str:
    """Returns a path, if it is relative, in a directory.

    Raises:
        ValueError: it has a null character.
    """
    refuse_null(path)
    return str(PurePosixPath(directory) / encodable(path)) if path else path


@sandboxenv(name="provisioner")
class ProvisionerSandbox(SandboxEnvironment):
    """One machine of a sample.

    Args:
        machines: the sample's machines.
        role: which of them.
        user: the user that runs commands and owns files, unless a call says otherwise.
        directory: the directory of relative paths.
        variables: of each command.
    """

    def __init__(
        self, machines: SampleMachines, role: Role, user: str, directory: str, variables: dict[str, str]
    ) -> None:
        super().__init__()
        self.machines = machines
        self._role: Role = role
        self._user = user
        self._directory = directory
        self._variables = variables

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a command, without a terminal. Nothing is ever run twice, so `timeout_retry` changes nothing.

        Raises:
            TimeoutError: it did not end in time; all its processes were ended.
            PermissionError: its program may not be executed.
            SandboxUnavailableError: the machine does not answer, now or in an earlier call.
            ValueError: there is a null character in an argument, as subprocess raises it.
        """
        output = Output()

        def work(connection: Connection) -> ExecResult[str]:
            words, variables = [encodable(word) for word in cmd], {**self._variables, **(env or {})}
            refuse_null(*words, *variables, *variables.values(), user or "")
            try:
                done = self._run(
                    connection,
                    words,
                    user=user or self._user,
                    cwd=self._path(cwd) if cwd else self._directory,
                    environment={name: encodable(value) for name, value in variables.items()},
                    stdin=_encoded(input or b""),
                    on_stdout=output.stdout.write,
                    on_stderr=output.stderr.write,
                    timeout_seconds=timeout,
                    limit_bytes=0,  # `output` keeps it
                )
            except NotStartedError as error:
                if timeout is None or timeout >= HANDSHAKE_SECONDS:
                    raise
                # A busy machine may need longer to start it than the caller waits. It is not lost.
                raise CommandTimeoutError(error.message) from error
            return output.result(done)

        try:
            return await self._on_machine(work)
        except CommandTimeoutError as error:
            if timeout is None:
                raise
            raise output.timed_out(timeout, error.message) from error

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a file as the default user, and makes its directories.

        Raises:
            PermissionError, IsADirectoryError: as the machine says.
            TimeoutError: the link is too slow for a file of that size.
        """

        def work(connection: Connection) -> None:
            connection.write_file(self._path(file), _encoded(contents), user=self._user)

        with file_errors(file):
            await self._on_machine(work)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Reads a file as the default user.

        Raises:
            FileNotFoundError, PermissionError, IsADirectoryError: as the machine says.
            UnicodeDecodeError: it is not UTF-8 although text was asked for.
            OutputLimitExceededError: it is too large.
            TimeoutError: the link is too slow for a file of the size that may be read.
        """
        limit_bytes = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE

        def work(connection: Connection) -> str | bytes:
            data = connection.read_file(self._path(file), limit_bytes, user=self._user)
            return data.decode() if text else data

        with file_errors(file):
            return await self._on_machine(work)

    def _run(self, connection: Connection, argv: list[str], **options: Any) -> Completed:
        """Runs a command in the sandbox, as Connection.run does in the machine."""
        done = connection.run(argv, **options)
        if done.exit_code == KILLED or done.errno in (errno.ESRCH, errno.ESTALE):  # its container has ended
            self.machines.look_for_shortage(self._role, connection)
        return done

    async def _on_machine(self, work: Callable[[Connection], Result]) -> Result:
        """Works on the machine in a thread.

        Raises:
            SandboxUnavailableError: the machine is lost, which ends the sample unless its agent is to blame; or what
                the call is for does not run in it.
        """
        try:
            return await call(partial(self.machines.on, self._role, work))
        except LossError as error:
            raise unavailable(error) from error
        except NotUpError as error:
            raise SandboxUnavailableError(f"{error.message} {error.details or ''}".strip()) from error
        finally:
            while self.machines.notes:
                transcript().info({"note": self.machines.notes.popleft()}, source="provisioner")

    def _path(self, path: str) -> str:
        return path_in(self._directory, path)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Returns how a person logs in: as root, if the user has no login. Does no I/O."""
        machine = "" if self._role == "primary" else f" --machine {self._role}"
        asked = user or self._user
        try:
            environment = self.machines.environment
        except ProvisionerError as error:
            raise ConnectionError(error.message) from error
        identity = environment.id
        login = asked if asked in ("root", _default_user(environment, self._role)) else "root"
        return SandboxConnection(type="provisioner", command=f"provisioner ssh {identity}{machine} --user {login}")

    @classmethod
    def default_concurrency(cls) -> int | None:
        """Returns how many sandboxes run at once unless the operator says otherwise.

        For machines of this host: what its memory and cores have room for. Elsewhere neither matters.
        """
        if _clouds and "local" not in _clouds:
            return SANDBOXES_AT_ONCE
        cores = len(os.sched_getaffinity(0))
        return max(1, min(int(available_memory_gib() / GIB_PER_SANDBOX), SANDBOXES_PER_CORE * cores))

    def default_polling_interval(self) -> float:
        """Returns how often Inspect asks a service in the machine for requests, in seconds, unless it says longer."""
        return 0.2

    @classmethod
    def config_files(cls) -> list[str]:
        """Returns the names of configuration files beside a task."""
        return FILE_NAMES + COMPOSE_FILE_NAMES

    @classmethod
    def is_docker_compatible(cls) -> bool:
        """Says that compose files and Dockerfiles are read."""
        return True

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Returns the configuration that a log holds."""
        return from_log(config)

    @classmethod
    async def task_init_environment(
        cls, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, str]:
        """Returns the sample's metadata that its images depend on, as variables for a task_init of its own."""
        with before_samples(), told_in_full():
            configuration = await end(partial(configuration_of, config))
            values = await end(partial(image_metadata, configuration, by_reference(metadata)))
        evals.use(config)
        _clouds.add(configuration.cloud)
        if configuration.fork != "none":
            forks.watch()
        if not all(map(_can_be_variable, values.values())):
            return {}  # the sample itself says what is wrong
        return {VARIABLE + name: value for name, value in values.items()}

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Builds the images before the first sample.

        Where images depend on samples, what is wrong with those of one sample is only noted: that sample will fail.
        """
        depends_on_sample = False

        def prepared() -> SampleMachines | None:
            nonlocal depends_on_sample
            configuration = configuration_of(config)
            given = {
                name.removeprefix(VARIABLE): each for name, each in os.environ.items() if name.startswith(VARIABLE)
            }
            if needed := references(configuration):
                depends_on_sample = True
                if not needed <= given.keys():
                    return None
                configuration = with_metadata(configuration, given)
            depends_on_sample = depends_on_sample or bool(compose_references(configuration))
            for line in configuration.given_by:
                _tell_operator(line)
            return SampleMachines(configuration, Origin(task_name), given)

        try:
            with before_samples(), told_in_full():
                machines = await end(prepared)
            if not machines:
                return
            progress, redactor = machines.session.progress, machines.session.redactor
            with before_samples(), told_in_full(redactor), told(progress, "its images are ready"):
                await launch(machines.build_images, machines.cancelled)
            shorten_collections()
        except ProvisionerError as error:
            if isinstance(error, Interrupted) or not depends_on_sample:
                raise
            _log.warning("An image that depends on a sample's metadata could not be built: %s", error.message)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Brings up a sample's machines, or a copy of another's, proven isolated. If it fails, none is left."""
        sample_id: str | int | None = metadata.get("__sample_id__")
        origin = origin_of_sample(task_name, sample_id)

        def prepared() -> SampleMachines:
            given = configuration_of(config, evals.directory_of(origin.eval_id))
            machines = SampleMachines(with_metadata(given, metadata), origin, metadata)
            if references(given):  # task_init may not have known which family it is
                machines.refuse_mistakes()
            return machines

        with told_in_full():
            machines = await prepare(prepared)
        try:
            with told_in_full(machines.session.redactor), told(machines.session.progress, "its machines are up"):
                services = await forks.bring_up_sample(machines, origin, sample_id, _services)
            environment = machines.environment
            transcript().info(await end(partial(evidence.of_beginning, machines)), source="provisioner")
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await _destroy(machines)
                await _tell(partial(evidence.of_failure, machines, _said(error, machines)))
            raise
        clean_up.MACHINES[environment.id] = machines
        if services:
            return services
        configuration = machines.configuration
        sandboxes: dict[str, SandboxEnvironment] = {}
        for role in environment.roles:
            if configuration.family:
                user = _default_user(environment, role)
                sandboxes[NAMES[role]] = cls(machines, role, user, f"/home/{user}", {})
            else:
                plain = configuration.by_role[role]
                sandboxes[plain.name] = cls(machines, role, plain.user, workdir(plain), dict(plain.env))
        return sandboxes

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Destroys a sample's machines, however it ended. What cannot be removed is told, and stays recorded."""
        of = {id(machines): machines for machines in map(_machines, environments.values())}
        for machines in of.values():
            with anyio.CancelScope(shield=True):
                if not interrupted:
                    await end(machines.look_last)
                ending = await _destroy(machines)
                if ending:
                    await _tell(partial(evidence.of_end, machines, ending))

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Destroys what is left of the samples or, with --no-sandbox-cleanup, leaves it and says how to log in."""
        _clouds.clear()
        with anyio.CancelScope(shield=True):
            for machines in list(clean_up.MACHINES.values()):
                if cleanup:
                    await _destroy(machines)
                else:
                    await _leave(machines)
            await forks.end_all()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Destroys environments of evals that no running process looks after.

        Raises:
            CleanUpError: some are left; Inspect's command line shows which, and ends with the error's exit code.
        """
        try:
            with anyio.CancelScope(shield=True):
                await end(partial(clean_up.destroy_abandoned, id))
        except ProvisionerError as error:
            raise clean_up.CleanUpError.of(error) from error


@cache
def _tell_operator(line: str) -> None:
    """Logs a line once: hundreds of samples have it in common."""
    _log.warning("%s", line)


def _encoded(contents: str | bytes) -> bytes:
    """Returns text as UTF-8. Takes its time for 50 MiB, so that only threads of ours call it."""
    return contents.encode(errors="replace") if isinstance(contents, str) else contents


def _can_be_variable(value: str) -> bool:
    """Returns whether a process may have a variable with that value (environ(7))."""
    return "\0" not in value and encodable(value) == value


def _default_user(environment: Environment, role: Role) -> str:
    """Returns the user of a machine, whose home is /home/USER."""
    return aux_user(environment.machines[role].distribution) if role == "aux" else "agent"


async def _services(machines: SampleMachines) -> dict[str, SandboxEnvironment]:
    """Waits until machines are ready. Returns the services of a compose file, started; there are none without one."""
    if not machines.snapshot:
        await launch(partial(_wait_until_ready, machines), machines.cancelled)
    if not machines.project:
        return {}
    from provisioner.inspect.services import start_services  # whose sandboxes are of this class

    return await start_services(machines)


def _wait_until_ready(machines: SampleMachines) -> None:
    def pause() -> None:
        machines.session.check()
        time.sleep(PAUSE_SECONDS)

    for role, machine in machines.configuration.by_role.items():

        def work(connection: Connection, machine: Machine = machine) -> list[str]:
            return wait_until_ready(machine, connection, pause)

        if machine.ready or machine.services:
            with machines.more_phases() as phases, phases.phase("ready"):
                notes = machines.on(role, work)
            for note in notes:
                machines.session.progress.note(note)


def _machines(sandbox: SandboxEnvironment) -> SampleMachines:
    return sandbox.as_type(ProvisionerSandbox).machines


async def _destroy(machines: SampleMachines) -> Ending | None:
    """Destroys a sample's machines. Raises nothing: the record stays, and a later clean-up tries again."""
    try:
        return await end(partial(clean_up.destroy, machines))
    except Exception as error:
        said = _said(error, machines)
        _log.error("%s", said)
        await _tell(partial(evidence.of_failed_destruction, machines, said))
        return None


async def _tell(facts: Callable[[], evidence.Facts]) -> None:
    """Writes facts into the sample's log, as far as possible: what is being cleared away must not depend on that."""
    try:
        transcript().info(await end(facts), source="provisioner")
    except Exception as error:
        _log.error("Not in the sample's log: %s", describe(error))


async def _leave(machines: SampleMachines) -> None:
    """Leaves a sample's machines to the operator. Raises nothing: those of the other samples are left, too."""
    try:
        await end(partial(clean_up.leave, machines))
    except Exception as error:
        _log.error("A sample's machines could not be handed over to you: %s", _said(error, machines))


def _said(error: BaseException, machines: SampleMachines) -> str:
    redactor = machines.session.redactor
    return in_full(error, redactor) if isinstance(error, ProvisionerError) else redactor.redact(describe(error))
