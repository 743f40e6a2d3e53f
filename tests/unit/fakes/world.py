"""Families, images and environments for unit tests, in a session with a real home and a fake cloud."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from provisioner.base.clock import now
from provisioner.base.models import BaseImage, Distribution, Environment, MachineRecord, MachineSize, Role, TaskSetup
from provisioner.family.loader import TaskFamily, load_family
from provisioner.family.setup_data import parse_setup_data
from provisioner.images import build
from provisioner.images.layers import family_image_name
from provisioner.isolation.proof import prove_isolation
from provisioner.machines.boot import boot_machines
from provisioner.machines.create import create_machines, record_environment
from provisioner.session import Session
from provisioner.store.images import Image
from tests.unit.fakes.sshd import Sshd

SIZE = MachineSize(cpus=1, memory_gib=1, disk_gib=16)
MODULE = """
class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}
"""


@dataclass
class Told:
    """Records the progress that a session reports."""

    notes: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def phase_started(self, name: str) -> None:
        self.phases.append(f"{name}...")

    def phase_finished(self, name: str, seconds: float) -> None:
        assert self.phases[-1] == f"{name}...", f"{name} ended, and {self.phases[-1]} had begun"
        self.phases[-1] = name

    def note(self, text: str) -> None:
        self.notes.append(text)

    def output(self, text: str) -> None:
        self.texts.append(text)


class Trigger(Told):
    """Does something when an agent first says something.

    Args:
        action: runs in a thread of its own, as it may end the one that listens.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._thread = threading.Thread(target=action)

    def output(self, text: str) -> None:
        super().output(text)
        if "begun" in text and self._thread.ident is None:
            self._thread.start()


def lock_out(sshd: Sshd) -> None:
    """Ends a machine's connections, and refuses new ones."""
    sshd.authorize = lambda _user, _key: False
    sshd.cut()


def agents(directory: Path, script: str) -> Path:
    """Writes an agent's directory with a script, run.sh, and returns it."""
    directory.mkdir(exist_ok=True)
    (directory / "run.sh").write_text(script)
    return directory


def family(directory: Path, **files: str) -> TaskFamily:
    """Writes and loads a family called `fam`, with a module and the given files."""
    root = directory / "fam"
    root.mkdir(exist_ok=True)
    for name, text in {"fam.py": MODULE, **files}.items():
        (root / name).write_text(text)
    return load_family(root)


def store_image(session: Session, fam: TaskFamily, setup: dict[str, Any]) -> str:
    """Stores a family's image and setup data in the home, as if a builder had built it."""
    base = build.base_image(session, BaseImage(role="primary"))
    name = family_image_name(fam, base, session.variables)
    with session.images.building(name, session.progress) as directory:
        assert directory is not None
        (directory / "setup-data.json").write_text(parse_setup_data(setup).model_dump_json())
        image = Image(name=name, kind="family", created_at=now(), cloud="local", base=base, family=fam.name)
        session.images.finish(image, directory)
    return name


def environment(identity: str = "env", roles: tuple[Role, ...] = ("primary",), **changes: Any) -> Environment:
    """Returns the record of an environment that has no machines yet."""
    begin = now()
    new = Environment(
        id=identity, cloud="local", stack=identity, family="fam", task="main", status="creating", attended=True,
        created_at=begin, expires_at=begin + timedelta(hours=1), setup=TaskSetup(instructions="Do it."),
        has_score=True, full_internet=False,
        machines={role: MachineRecord(image="base", size=SIZE, user="root") for role in roles},
    )  # fmt: skip
    return Environment.model_validate(new.model_dump() | changes)


def with_aux(distribution: Distribution) -> Environment:
    """Returns the record of an environment with an aux VM of that distribution, which has no machines yet."""
    new = environment(roles=("primary", "aux"))
    aux = new.machines["aux"].model_copy(update={"distribution": distribution})
    return new.model_copy(update={"machines": {**new.machines, "aux": aux}})


def created(session: Session, *new: Environment) -> list[Environment]:
    """Creates the machines of environments of one stack, in one apply."""
    for planned in new:
        record_environment(session, planned)
    return create_machines(session, list(new))


def boot_and_prove(session: Session, booting: Environment) -> None:
    """Proves the isolation of an environment whose machines exist."""
    connections = boot_machines(session, booting)
    try:
        prove_isolation(session, booting, connections)
    finally:
        for connection in connections.values():
            connection.close()


def up(session: Session, new: Environment | None = None) -> Environment:
    """Brings up an environment and records that its start() has run."""
    [booting] = created(session, new or environment())
    for connection in boot_machines(session, booting).values():
        connection.close()
    return session.environments.update(booting, status="ready", started_at=now())


def told_of(session: Session) -> Told:
    """Returns the progress that a session has reported."""
    assert isinstance(session.progress, Told)
    return session.progress
