"""The sandbox provider `provisioner` of Inspect: one object for each machine of a sample."""

from __future__ import annotations

import errno
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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

from provisioner.base.errors import (
    CommandTimeoutError,
    Interrupted,
    MachineLostError,
    NotStartedError,
    ProvisionerError,
)
from provisioner.base.models import Environment, Role
from provisioner.base.printable import encodable
from provisioner.base.progress import describe
from provisioner.clouds.local.sizing import available_memory_gib
from provisioner.inspect import clean_up, evals, evidence, forks
from provisioner.inspect.blocking import call, end, is_new, launch, look, prepare, reporting, shorten_collections
from provisioner.inspect.compose import METADATA
from provisioner.inspect.configuration import (
    COMPOSE_FILE_NAMES,
    FILE_NAMES,
    by_reference,
    compose_references,
    configuration_of,
    from_log,
    image_metadata,
    references,
    with_metadata,
)
from provisioner.inspect.evals import Origin, origin_of_sample
from provisioner.inspect.failures import (
    LossError,
    NotUpError,
    Output,
    before_samples,
    file_errors,
    full_message,
    in_full,
    unavailable,
)
from provisioner.inspect.machine_family import workdir
from provisioner.inspect.sample import Ending, SampleMachines
from provisioner.inspect.services import (
    SIGNALLED,
    Container,
    ServicesError,
    inspect_containers,
    published_ports,
    read_file,
    write_file,
)
from provisioner.machines.create import aux_user
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
# Inspect's names of the machines of a family.
NAMES: dict[Role, str] = {"primary": "default", "aux": "aux"}


def refuse_null(*texts: str) -> None:
    """Raises ValueError if a text has a null character, of which Inspect makes a tool error, as Python's own does."""
    if any("\0" in text for text in texts):
        raise ValueError("embedded null byte")


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
            self._write(connection, self._path(file), _encoded(contents))

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
            data = self._read(connection, self._path(file), limit_bytes)
            return data.decode() if text else data

        with file_errors(file):
            return await self._on_machine(work)

    def _run(self, connection: Connection, argv: list[str], **options: Any) -> Completed:
        """Runs a command in the sandbox, as Connection.run does in the machine."""
        done = connection.run(argv, **options)
        if done.exit_code == KILLED or done.errno in (errno.ESRCH, errno.ESTALE):  # its container has ended
            self.machines.look_for_shortage(self._role, connection)
        return done

    def _write(self, connection: Connection, path: str, data: bytes) -> None:
        connection.write_file(path, data, user=self._user)

    def _read(self, connection: Connection, path: str, limit_bytes: int) -> bytes:
        return connection.read_file(path, limit_bytes, user=self._user)

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
        refuse_null(path)
        return str(PurePosixPath(self._directory) / encodable(path)) if path else path

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
        with before_samples(), full_message():
            configuration = await prepare(partial(configuration_of, config))
            values = await prepare(partial(image_metadata, configuration, by_reference(metadata)))
        evals.use(config)
        _clouds.add(configuration.cloud)
        if configuration.fork != "none":
            forks.watch()
        if any("\0" in value or encodable(value) != value for value in values.values()):  # environ(7)
            return {}  # the sample itself says what is wrong
        return {METADATA + name: value for name, value in values.items()}

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
                name.removeprefix(METADATA): each for name, each in os.environ.items() if name.startswith(METADATA)
            }
            if needed := references(configuration):
                depends_on_sample = True
                if not needed <= given.keys():
                    return None
                configuration = with_metadata(configuration, given)
            depends_on_sample = depends_on_sample or bool(compose_references(configuration))
            for line in configuration.given_by:
                if is_new(line):
                    _log.warning("%s", line)
            return SampleMachines(configuration, Origin(task_name), given)

        try:
            with before_samples(), full_message():
                machines = await prepare(prepared)
            if not machines:
                return
            progress, redactor = machines.session.progress, machines.session.redactor
            with before_samples(), full_message(redactor), reporting(progress, "its images are ready"):
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

        def configure() -> SampleMachines:
            given = configuration_of(config, evals.directories.get(origin.eval_id))
            machines = SampleMachines(with_metadata(given, metadata), origin, metadata)
            if references(given):  # task_init may not have known which family it is
                machines.refuse_mistakes()
            return machines

        with full_message():
            machines = await prepare(configure)
        session = machines.session
        try:
            with full_message(session.redactor), reporting(session.progress, "its machines are up"):
                fork = forks.fork_of(machines, origin, sample_id)
                async with forks.place_in(fork, machines) as place:  # waits for the environment that it is a copy of
                    await forks.bring_up(machines)  # waits for budget and memory; creates, boots, proves the isolation
                    if place != "copy":
                        await launch(machines.wait_until_ready, machines.cancelled)
                    containers = await launch(machines.start_containers, machines.cancelled)
                    if fork and place == "first":
                        await launch(partial(forks.freeze, fork, machines), machines.cancelled)
            transcript().info(await look(partial(evidence.of_beginning, machines)), source="provisioner")
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await _destroy(machines)
                await _tell(partial(evidence.of_failure, machines, "did_not_come_up", _said(error, machines)))
            raise
        clean_up.MACHINES[machines.environment.id] = machines
        return _sandboxes(machines, containers)

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Destroys a sample's machines, however it ended. What cannot be removed is told, and stays recorded."""
        for machines in {sandbox.as_type(ProvisionerSandbox).machines for sandbox in environments.values()}:
            with anyio.CancelScope(shield=True):
                if not interrupted:
                    await look(machines.look_last)
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
                    continue
                try:
                    await end(partial(clean_up.leave, machines))
                except Exception as error:  # those of the other samples are left, too
                    _log.error("A sample's machines could not be handed over to you: %s", _said(error, machines))
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


class ServiceSandbox(ProvisionerSandbox):
    """One service of a compose file: a container in a sample's machine.

    Args:
        machines: the sample's machine.
        container: which of its containers.
    """

    def __init__(self, machines: SampleMachines, container: Container) -> None:
        super().__init__(machines, "primary", "", container.directory, {})
        # With another first process once the engine has started it again.
        self.container = container

    def _run(self, connection: Connection, argv: list[str], **options: Any) -> Completed:
        """Runs a command in the container, with the rights of `docker exec`."""
        done = super()._run(connection, argv, container=(self.container.identity, self.container.pid), **options)
        is_silent = not (done.stdout_size.total_bytes or done.stderr_size.total_bytes)
        if done.errno in (errno.ESRCH, errno.ESTALE) or (done.exit_code > SIGNALLED and is_silent):
            self._ask_engine(connection)
        if done.errno == errno.ESTALE:  # nothing ran
            return super()._run(connection, argv, container=(self.container.identity, self.container.pid), **options)
        return done

    def _ask_engine(self, connection: Connection) -> None:
        """Asks the engine whether the container runs, and notes if it was started again."""
        [state] = inspect_containers(connection, self.container.identity)
        if state.status != "running":
            error = ServicesError(f"The container of the service {self.container.service} does not run: {state}.")
            error.service = self.container.service
            raise error
        if self.container.pid not in (0, state.pid):
            words = (
                f"The engine has started the container of the service {self.container.service} again (restarts so far: "
                f"{state.restarts}): what ran in it has ended."
            )
            if self.machines.configuration.on_restart == "fail":
                raise MachineLostError(words)
            self.machines.notes.append(words)
        self.container = replace(self.container, pid=state.pid, ports=published_ports(state.ports))

    def _write(self, connection: Connection, path: str, data: bytes) -> None:
        write_file(partial(self._run, connection), self.container, path, data)

    def _read(self, connection: Connection, path: str, limit_bytes: int) -> bytes:
        return read_file(partial(self._run, connection), self.container, path, limit_bytes)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Returns how a person gets a shell in the container. Asks no machine.

        Its ports are those of the machine, which `provisioner ssh ENV -- -L` takes.
        """
        machine = await super().connection(user="root")
        who = ["--user", user] if user else []
        shell = ["docker", "exec", "--interactive", "--tty", *who, self.container.identity, "/bin/sh"]
        return SandboxConnection.model_validate(
            {
                "type": machine.type,
                "command": f"{machine.command} -- -t {shlex.quote(shlex.join(shell))}",
                "ports": list(self.container.ports) or None,
                "container": self.container.identity,
            }
        )


def _encoded(contents: str | bytes) -> bytes:
    """Returns text as UTF-8. Takes its time for 50 MiB, so that only threads of ours call it."""
    return contents.encode(errors="replace") if isinstance(contents, str) else contents


def _default_user(environment: Environment, role: Role) -> str:
    """Returns the user of a machine, whose home is /home/USER."""
    return aux_user(environment.machines[role].distribution) if role == "aux" else "agent"


def _sandboxes(machines: SampleMachines, containers: Sequence[Container]) -> dict[str, SandboxEnvironment]:
    """Returns a sandbox for each service of a compose file, else for each machine; the default is the first."""
    if machines.project:
        return {container.service: ServiceSandbox(machines, container) for container in containers}
    environment, configuration = machines.environment, machines.configuration
    if configuration.family:
        users = {role: _default_user(environment, role) for role in environment.roles}
        return {
            NAMES[role]: ProvisionerSandbox(machines, role, user, f"/home/{user}", {}) for role, user in users.items()
        }
    plain = [(role, configuration.by_role[role]) for role in environment.roles]
    return {
        machine.name: ProvisionerSandbox(machines, role, machine.user, workdir(machine), dict(machine.env))
        for role, machine in plain
    }


async def _destroy(machines: SampleMachines) -> Ending | None:
    """Destroys a sample's machines. Raises nothing: the record stays, and a later clean-up tries again."""
    try:
        return await end(partial(clean_up.destroy, machines))
    except Exception as error:
        said = _said(error, machines)
        _log.error("%s", said)
        await _tell(partial(evidence.of_failure, machines, "was_not_destroyed", said))
        return None


async def _tell(facts: Callable[[], evidence.Facts]) -> None:
    """Writes facts into the sample's log, as far as possible: what is being cleared away must not depend on that."""
    try:
        transcript().info(await look(facts), source="provisioner")
    except Exception as error:
        _log.error("Not in the sample's log: %s", describe(error))


def _said(error: BaseException, machines: SampleMachines) -> str:
    redactor = machines.session.redactor
    return in_full(error, redactor) if isinstance(error, ProvisionerError) else redactor.redact(describe(error))
