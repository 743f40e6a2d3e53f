"""Measures Inspect's sandbox `provisioner`: calls in a machine, and samples that start together.

Usage: python benchmarks/evals.py [--calls 20] [--local 10] [--epochs 10] [--start 20] [--compose 3] [--samples 200]

Calls: medians of a command's round trip, and of writing and reading 10 MB, in a local machine, under asyncio and under
trio; beside OpenSSH's client over one open connection to the same machine, and Inspect's docker sandbox where Docker
runs.

Local: so many samples at once from a template, the seconds until each has run its first command.

Epochs: so many of one sample at once, each brought up, and then all but one forked; the seconds until each has run its
first command. They are of a family whose start() takes so many seconds.

Compose: so many samples of a compose file with two services, one after the other, of which all but the first are forked
(`fork: samples`); the seconds from each one's start to the end of its first command, and the medians of a command in a
service and in its machine. Aims: a copy in a tenth of the first one's time, and a service's command in three times the
machine's.

Samples: so many at once on the aws cloud, a moto server and a loopback SSH in its place, which give way to all else, as
a real cloud would take no processor of this host. Stacks are runs of Terraform; the longest stall is how late the event
loop was for a timer of 10 ms, and an idle process shows what of it is this host's; CPU seconds are those of this
process and of what it started. 0 leaves a part out.

Not called inspect.py: Python finds a program's directory first, and would take it for its own module of that name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import anyio

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.event import SampleInitEvent, SandboxEvent  # noqa: E402
from inspect_ai.log import EvalSample  # noqa: E402
from inspect_ai.solver import Generate, Solver, TaskState, solver  # noqa: E402
from inspect_ai.util import SandboxEnvironment, SandboxEnvironmentSpec, sandbox  # noqa: E402
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv  # noqa: E402

from provisioner import Home  # noqa: E402
from provisioner.inspect.configuration import Configuration, Machine  # noqa: E402
from provisioner.inspect.sandbox import ProvisionerSandbox  # noqa: E402
from provisioner.ssh.openssh import ssh_command  # noqa: E402
from provisioner.store.environments import EnvironmentStore  # noqa: E402
from provisioner.store.snapshots import SnapshotStore  # noqa: E402
from tests.aws.loopback import FAMILY, account_of_many  # noqa: E402
from tests.batch.many import variables  # noqa: E402
from tests.inspect.images import registry_of_archives  # noqa: E402
from tests.provider_mirror import use_provider_mirror  # noqa: E402

DATA = os.urandom(10_000_000)
TIMER_SECONDS = 0.01
# Of the event loop's longest stall.
AIM_MS = 100
WATCHING = f"""
import select, sys, time
late, ended = 0.0, False
while not ended:
    begin = time.perf_counter()
    ended = bool(select.select([sys.stdin], [], [], {TIMER_SECONDS})[0])
    late = max(late, time.perf_counter() - begin - {TIMER_SECONDS})
print(late)
"""
EVENT_LOOPS = ("asyncio", "trio")
STARTING = """
import time

class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def get_instructions(t):
        return ""

    @staticmethod
    def start(t):
        time.sleep(SECONDS)
"""


async def timed(work: Callable[[], Awaitable[object]], calls: int) -> float:
    """Returns the median seconds of a call, after one that does not count."""
    seconds = []
    for _ in range(calls + 1):
        begin = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def show(name: str, command: float, write: float, read: float) -> None:
    """Prints seconds of one kind of machine."""
    print(
        f"{name:20} command {command * 1000:7.1f} ms, write 10 MB {write:6.2f} s, read 10 MB {read:6.2f} s", flush=True
    )


async def measure_calls(name: str, sandbox: SandboxEnvironment, calls: int) -> None:
    """Prints the figures of calls in one machine."""

    async def run() -> None:
        assert (await sandbox.exec(["true"])).success

    few = max(1, calls // 5)
    exec_seconds = await timed(run, calls)
    write = await timed(lambda: sandbox.write_file("data", DATA), few)
    read = await timed(lambda: sandbox.read_file("data", text=False), few)
    show(name, exec_seconds, write, read)


class SshClient:
    """Makes the same calls with OpenSSH's client over one open connection.

    Args:
        command: the client with its options, up to the destination.
        directory: for the connection's socket.
    """

    def __init__(self, command: Sequence[str], directory: Path) -> None:
        control = ("-o", f"ControlPath={directory}/control", "-o", "ControlMaster=auto", "-o", "ControlPersist=120")
        self._command = [command[0], *control, *command[1:]]

    async def __call__(self, remote: str, stdin: bytes = b"") -> bytes:
        """Runs a command in the machine."""
        return (await anyio.run_process([*self._command, remote], input=stdin, stderr=subprocess.DEVNULL)).stdout

    async def measure(self, calls: int) -> None:
        """Prints its figures."""
        few = max(1, calls // 5)
        exec_seconds = await timed(lambda: self("true"), calls)
        write = await timed(lambda: self("cat > /workspace/data", DATA), few)
        read = await timed(lambda: self("cat /workspace/data"), few)
        show("ssh", exec_seconds, write, read)


def of_one_machine(calls: int) -> None:
    """Measures calls in a local machine, and beside it with what else there is."""
    configuration = Configuration(machines=(Machine(),))
    anyio.run(ProvisionerSandbox.task_init, "calls", configuration)
    found = anyio.run(ProvisionerSandbox.sample_init, "calls", configuration, {})
    try:
        sandbox = found["default"].as_type(ProvisionerSandbox)
        for loop in EVENT_LOOPS:
            anyio.run(measure_calls, f"provisioner, {loop}", sandbox, calls, backend=loop)
        environment, environments = sandbox.machines.environment, sandbox.machines.session.environments
        known_hosts = environments.directory(environment.id) / "keys" / "known_hosts_primary"
        with tempfile.TemporaryDirectory() as directory:
            command = ssh_command(environments.login(environment, "primary", "root"), known_hosts)
            client = SshClient(command, Path(directory))
            anyio.run(client.measure, calls)
            subprocess.run([*client._command, "-O", "exit"], capture_output=True, check=False)
    finally:
        anyio.run(partial(ProvisionerSandbox.sample_cleanup, "calls", configuration, found, interrupted=False))
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        anyio.run(of_docker, calls)
    else:
        print("docker               does not run here")


async def of_docker(calls: int) -> None:
    """Measures calls in a container of Inspect's docker sandbox."""
    docker = registry_find_sandboxenv("docker")
    await docker.task_init("calls", None)
    found = await docker.sample_init("calls", None, {})
    await measure_calls("docker", found["default"], calls)
    await docker.sample_cleanup("calls", None, found, interrupted=False)
    await docker.task_cleanup("calls", None, True)


async def together(configuration: Configuration, count: int) -> tuple[list[float], set[str]]:
    """Starts samples at once, runs a command in each, and ends them.

    Returns:
        the seconds until each had run its first command, and the stacks that they were created in.
    """
    seconds: list[float] = []
    stacks: set[str] = set()
    begin = time.perf_counter()

    async def sample() -> None:
        found = await ProvisionerSandbox.sample_init("together", configuration, {})
        sandbox = found["default"].as_type(ProvisionerSandbox)
        try:
            assert (await sandbox.exec(["true"])).success
            seconds.append(time.perf_counter() - begin)
            stacks.add(sandbox.machines.environment.stack)
        finally:
            await ProvisionerSandbox.sample_cleanup("together", configuration, found, interrupted=False)

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(sample)
    return seconds, stacks


async def longest_stall(work: Callable[[], Awaitable[None]]) -> float:
    """Returns by how many seconds the event loop was late at most for a timer while the work went on."""
    stall = 0.0

    async def watch() -> None:
        nonlocal stall
        while True:
            begin = time.perf_counter()
            await anyio.sleep(TIMER_SECONDS)
            stall = max(stall, time.perf_counter() - begin - TIMER_SECONDS)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await work()
        group.cancel_scope.cancel()
    return stall


@contextlib.contextmanager
def idle_process() -> Iterator[Callable[[], float]]:
    """Starts a process that only waits for such timers; yields what ends it and returns by how much it was late."""
    argv = [sys.executable, "-c", WATCHING]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield lambda: float(process.communicate()[0])


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of those of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


async def of_local_samples(count: int) -> None:
    """Measures samples that start together here."""
    configuration = Configuration()
    await together(configuration, 1)  # makes image and template unless they are there
    seconds, stacks = await together(configuration, count)
    print(
        f"{count} local samples: first command after {min(seconds):.1f} to {max(seconds):.1f} s, "
        f"median {statistics.median(seconds):.1f} s, {len(stacks)} runs of Terraform"
    )


def of_epochs(count: int, start_seconds: float, directory: Path) -> None:
    """Measures the epochs of one sample that start together here, brought up and forked."""
    family = directory / "starting"
    family.mkdir()
    (family / "starting.py").write_text(STARTING.replace("SECONDS", str(start_seconds)))
    _epochs(1, Configuration(family=str(family), task="main"), directory)  # makes image and template
    for fork, words in (("none", "brought up"), ("epochs", "forked")):
        configuration = Configuration.model_validate({"family": str(family), "task": "main", "fork": fork})
        seconds, frozen_bytes = _epochs(count, configuration, directory)
        print(
            f"{count} epochs {words}, start() of {start_seconds:g} s: first command after {min(seconds):.1f} to "
            f"{max(seconds):.1f} s, median {statistics.median(seconds):.1f} s; {frozen_bytes / 1e6:.0f} MB frozen",
            flush=True,
        )


def _epochs(count: int, configuration: Configuration, directory: Path) -> tuple[list[float], int]:
    """Returns the seconds until each epoch has run its first command, and what snapshots took of the disk."""
    seconds: list[float] = []
    frozen_bytes = 0

    @solver
    def first_command() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            nonlocal frozen_bytes
            assert (await sandbox().exec(["true"])).success
            seconds.append(time.perf_counter() - begin)
            store = SnapshotStore(Home.default())
            frozen_bytes = sum(store.disk_bytes(snapshot.name) for snapshot in store.all())
            return state

        return solve

    task = Task(
        dataset=[Sample(input="")], solver=first_command(), sandbox=SandboxEnvironmentSpec("provisioner", configuration)
    )
    begin = time.perf_counter()
    [log] = eval(
        task, model="mockllm/model", epochs=count, max_samples=count, max_sandboxes=count, display="none",
        log_dir=str(directory / "logs"),
    )  # fmt: skip
    assert log.status == "success", log.error
    return seconds, frozen_bytes


def of_compose(count: int, calls: int, directory: Path) -> None:
    """Measures samples of one compose file that start one after the other, all but the first as copies of it."""

    @solver
    def commands() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state.metadata["service"] = await timed(lambda: sandbox().exec(["true"]), calls)
            machines = sandbox().as_type(ProvisionerSandbox).machines
            machine = ProvisionerSandbox(machines, "primary", "root", "/", {})
            state.metadata["machine"] = await timed(lambda: machine.exec(["true"]), calls)
            return state

        return solve

    settings = {
        "compose": str(ROOT / "examples" / "inspect" / "containers" / "compose.yaml"),
        "registry": registry_of_archives(),
        "fork": "samples",
    }
    spec = SandboxEnvironmentSpec("provisioner", Configuration.model_validate(settings))
    task = Task(dataset=[Sample(input="") for _ in range(count)], solver=commands(), sandbox=spec)
    [log] = eval(task, model="mockllm/model", max_samples=1, display="none", log_dir=str(directory / "logs"))
    assert log.status == "success", log.error
    samples = sorted(log.samples or [], key=lambda sample: sample.started_at or "")
    first, *copies = map(_seconds_to_first_command, samples)
    service, machine = (statistics.median(each.metadata[kind] for each in samples) for kind in ("service", "machine"))
    print(
        f"{count} samples of a compose file: first command of the first one after {first:.1f} s, of its copies after "
        f"{', '.join(f'{seconds:.1f} s ({seconds / first:.0%})' for seconds in copies)} (aim: 10%); command in a "
        f"service {service * 1000:.0f} ms, in its machine {machine * 1000:.0f} ms: {service / machine:.1f} times "
        "(aim: 3)",
        flush=True,
    )


def _seconds_to_first_command(sample: EvalSample) -> float:
    [began] = [event.timestamp for event in sample.events if isinstance(event, SampleInitEvent)]
    ended = min(event.completed for event in sample.events if isinstance(event, SandboxEvent) and event.completed)
    return (ended - began).total_seconds()


async def of_many_samples(count: int, family: Path) -> None:
    """Measures samples that start together on the aws cloud."""
    configuration = Configuration(cloud="aws", region="us-east-1", family=str(family), task="main")
    await ProvisionerSandbox.task_init("together", configuration)
    await together(configuration, 1)  # makes the network
    results: list[tuple[list[float], set[str]]] = []

    async def work() -> None:
        results.append(await together(configuration, count))

    cpu, begin = cpu_seconds(), time.perf_counter()
    with idle_process() as lateness:
        stall = await longest_stall(work)
        late = lateness()
    wall, cpu = time.perf_counter() - begin, cpu_seconds() - cpu
    [(seconds, stacks)] = results
    print(
        f"{count} samples: {wall:.0f} s, first commands after {min(seconds):.0f} to {max(seconds):.0f} s, "
        f"{len(stacks)} stacks, longest stall of the event loop {stall * 1000:.0f} ms (aim: under {AIM_MS} ms; an idle "
        f"process beside it was late by {late * 1000:.0f} ms), "
        f"{cpu / count:.2f} CPU s each"
    )
    assert EnvironmentStore(Home.default()).readable() == []


def main() -> None:
    """Runs the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--local", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--start", type=float, default=20.0)
    parser.add_argument("--compose", type=int, default=3)
    parser.add_argument("--samples", type=int, default=200)
    options = parser.parse_args()
    if options.calls:
        of_one_machine(options.calls)
    if options.local:
        anyio.run(of_local_samples, options.local)
    if options.epochs:
        with tempfile.TemporaryDirectory() as name:
            of_epochs(options.epochs, options.start, Path(name))
    if options.compose:
        with tempfile.TemporaryDirectory() as name:
            of_compose(options.compose, options.calls or 1, Path(name))
    if not options.samples:
        return
    use_provider_mirror()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "many").mkdir()
        (directory / "many" / "many.py").write_text(FAMILY)
        with account_of_many(directory, niceness=10) as account:
            os.environ.update(variables(account.url, directory / "home", directory))
            anyio.run(of_many_samples, options.samples, directory / "many")


if __name__ == "__main__":
    main()
