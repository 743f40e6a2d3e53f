"""Evals of the tests: one sample each, whose machine ends in some way."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.util import CheckpointConfig, Manual, SandboxEnvironmentSpec, checkpointer, sandbox

from provisioner.base.models import Environment
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.inspect.configuration import Configuration, Machine
from provisioner.inspect.scoring import score_metr_task

# The variable that names a file by which a test and its eval tell each other something.
FLAG = "PROVISIONER_TEST_FLAG"


def _task(plan: Solver, configuration: Configuration | None = None, time_limit: int | None = None) -> Task:
    spec = SandboxEnvironmentSpec("provisioner", configuration or Configuration())
    return Task(dataset=[Sample(input="hello", sandbox=spec)], solver=plan, time_limit=time_limit)


@solver
def fail_on_a_slow_cloud() -> Solver:
    """Raises an error, after which the cloud takes its time to say what is left. Sets the flag when it is asked."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        ask = LocalCloud.remaining

        def slowly(cloud: LocalCloud, environment: Environment) -> list[str]:
            Path(os.environ[FLAG]).touch()
            time.sleep(3)
            return ask(cloud, environment)

        mock.patch.object(LocalCloud, "remaining", slowly).start()
        raise RuntimeError("on purpose")

    return solve


@solver
def sleep() -> Solver:
    """Sleeps in the machine."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        await sandbox().exec(["sleep", "600"])
        return state

    return solve


@solver
def look() -> Solver:
    """Asks the machine's service, which reads a file of the configuration, for what it says; and for its Python."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        script = "import flask; print('Python of', flask.__file__.split('/flask/')[0])"
        print((await sandbox("box").exec(["python3", "-c", script])).stdout)
        print((await sandbox("box").exec(["bash", "-lc", "command -v python3; find /usr/local -name '*py*'"])).stdout)
        command = 'echo "$(cat /run/said), $COLOUR"'
        print((await sandbox("box").exec(["bash", "-c", command], timeout=60)).stdout)
        return state

    return solve


@solver
def fail_at_first() -> Solver:
    """Fails, and creates the file that the environment names, unless it is there."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        assert (await sandbox("box").exec(["cat", "/srv/greeting"])).stdout == "hello"
        flag = Path(os.environ[FLAG])
        if not flag.exists():
            flag.touch()
            raise RuntimeError("not yet")
        return state

    return solve


@solver
def work_in_two_parts() -> Solver:
    """Does half of its work, and fails after a checkpoint. A retry finds that half, and does the rest."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        async with checkpointer() as checkpoints:
            if checkpoints.attempt == "initial":
                first = "mkdir /srv/work && cd /srv/work && printf first > part && chmod 640 part && ln -s part link"
                assert (await sandbox().exec(["sh", "-c", first])).success
                await checkpoints.checkpoint()
                raise RuntimeError("on purpose")
            second = "cd /srv/work && printf ' second' >> link && stat -c %a part && cat part"
            state.output.completion = (await sandbox().exec(["sh", "-c", second])).stdout
        return state

    return solve


@scorer(metrics=[accuracy()])
def slow() -> Scorer:
    """Says that it has begun, and works in the machine for long."""

    async def score(state: TaskState, target: Target) -> Score:
        Path(os.environ[FLAG]).touch()
        await sandbox().exec(["sleep", "600"])
        return Score(value=1)

    return score


@contextlib.contextmanager
def _signs(name: str) -> Iterator[None]:
    """Says by files, in the directory that the environment names, that something has begun and ended."""
    directory = Path(os.environ[FLAG])
    (directory / f"{name} begun").touch()
    yield
    (directory / f"{name} ended").touch()


@solver
def signal_exec() -> Solver:
    """Says while it runs a command."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        with _signs("exec"):
            await sandbox().exec(["sleep", "3"])
        return state

    return solve


@scorer(metrics=[accuracy()])
def signal_score() -> Scorer:
    """Says while the family scores."""
    judge = score_metr_task()

    async def score(state: TaskState, target: Target) -> Score | None:
        with _signs("score"):
            return await judge(state, target)

    return score


@task
def goes_through_all_phases() -> Task:
    """Works with the family in the directory that the environment names, and says how far it is."""
    family = Path(os.environ[FLAG]) / "phases"
    spec = SandboxEnvironmentSpec("provisioner", Configuration(family=str(family), task="main"))
    return Task(dataset=[Sample(input="hello", sandbox=spec)], solver=signal_exec(), scorer=signal_score())


@task
def scores_for_long() -> Task:
    """Its scorer works until it is interrupted."""
    return Task(dataset=[Sample(input="hello")], solver=[], scorer=slow(), sandbox="provisioner")


@task
def fails_at_first() -> Task:
    """Fails once, in a machine with a file of the controller's."""
    source = Path(tempfile.gettempdir()) / "provisioner-greeting"
    source.write_text("hello")
    return _task(
        fail_at_first(), Configuration(machines=(Machine(name="box", files=(("/srv/greeting", str(source)),)),))
    )


@task
def continues_from_a_checkpoint() -> Task:
    """Fails after a checkpoint of the machine's files, and continues from it when it is retried."""
    done = _task(work_in_two_parts())
    done.checkpoint = CheckpointConfig(trigger=Manual(), sandbox_paths={"default": ["/srv/work"]})
    return done


@task
def is_destroyed_slowly() -> Task:
    """Its solver raises an error, and its machine's destruction takes seconds."""
    return _task(fail_on_a_slow_cloud())


@task
def sleeps() -> Task:
    """Its time limit ends a command."""
    return _task(sleep(), time_limit=5)


@task
def sleeps_for_long() -> Task:
    """Works until it is killed."""
    return _task(sleep())


@task
def forks_epochs() -> Task:
    """Its first epoch is frozen, and the second is a copy of it."""
    spec = SandboxEnvironmentSpec("provisioner", Configuration(fork="epochs"))
    return Task(dataset=[Sample(input="hello", sandbox=spec)], solver=sleep(), epochs=2)


@task
def services_and_files() -> Task:
    """Its machine has a file, a package of Python, a service and a variable."""
    source = Path(tempfile.mkdtemp()) / "greeting"
    source.write_text("the service says hello")
    machine = Machine(
        name="box",
        files=(("/srv/greeting", str(source)),),
        env=(("COLOUR", "red"),),
        packages=("python3-flask",),
        run=("python3 -c 'import flask'",),
        services=(
            ("greeter", "python3 -c \"import flask, shutil; shutil.copy('/srv/greeting', '/run/said')\"; sleep 9d"),
        ),
        ready="test -e /run/said",
    )
    return _task(look(), Configuration(machines=(machine,)))
