"""Plans an environment before anything of it exists: its machines, and their images, which are built if need be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from provisioner.clock import now
from provisioner.errors import ShortageError, UnavailableError
from provisioner.family.env_file import check_required
from provisioner.family.loader import TaskFamily
from provisioner.family.setup_data import require_task
from provisioner.images import build
from provisioner.models import (
    Destination,
    Distribution,
    Environment,
    MachineRecord,
    MachineSize,
    Role,
    SetupData,
    TaskSetup,
)
from provisioner.session import Session

# Only a configuration's own machines have neighbours.
_LESS = "Ask for less in cpus and memory_gb of the machines, or wait until others have ended."


@dataclass(frozen=True)
class Plan:
    """The plan of an environment, made before anything of it exists.

    Args:
        setup: the task's setup data.
        setup_data: the setup data of the whole family.
        records: image and size of each machine.
    """

    family: TaskFamily
    task: str
    setup: TaskSetup
    setup_data: SetupData
    records: dict[Role, MachineRecord]
    allowed: tuple[Destination, ...]


def plan(session: Session, family: TaskFamily, task: str, allowed: tuple[Destination, ...] = ()) -> Plan:
    """Chooses the machines and builds the missing images.

    Raises:
        UsageError: the task is unknown, variables are missing, or the cloud cannot provide the machines.
        ImageBuildError: an image could not be built.
    """
    resources = family.manifest.resources(task)
    # The manifest can be read without the family's code, so impossible resources are refused before a build.
    sizes = {"primary": primary_size(session, family, task)}
    session.cloud.check_allowlist(allowed)
    family_image, setup_data = build.family_image(session, family)
    setup = require_task(setup_data, family.name, task)
    check_required(session.variables, setup)
    built: dict[Role, tuple[str, Distribution]] = {
        "primary": (family_image, build.primary_base(session, family).distribution)
    }
    if spec := setup.aux_vm_spec:
        sizes = session.cloud.choose(resources, spec)
        built["aux"] = (build.aux_image(session, family, spec, sizes["aux"]), spec.base_image_type)
    sizes = {**sizes, "primary": build.fitting_image(sizes["primary"], family)}
    records = {
        role: MachineRecord(image=image, distribution=distribution, size=sizes[role], user="root")
        for role, (image, distribution) in built.items()
    }
    if family.hostname:
        records["primary"] = records["primary"].model_copy(update={"hostname": family.hostname})
    for role, neighbour in family.neighbours.items():
        size = primary_size(session, neighbour, task)
        image, _ = build.family_image(session, neighbour)
        records[role] = MachineRecord(
            image=image,
            distribution=build.primary_base(session, neighbour).distribution,
            size=build.fitting_image(size, neighbour),
            user="root",
        )
    sizes = {role: record.size for role, record in records.items()}
    if family.neighbours and (shortage := session.cloud.shortage(sizes, 1)):
        raise ShortageError(f"The machines do not fit now: {shortage}.", hint=_LESS)
    return Plan(family, task, setup, setup_data, records, () if setup.full_internet else allowed)


def primary_size(session: Session, family: TaskFamily, task: str) -> MachineSize:
    """Chooses the size of a family's primary machine, before its image is built.

    Raises:
        UnavailableError: the cloud cannot provide it. What it says names a machine of our own by its name.
    """
    with _named(family):
        return session.cloud.choose(family.manifest.resources(task), None)["primary"]


@contextlib.contextmanager
def _named(family: TaskFamily) -> Iterator[None]:
    """Has an error name a machine of our own, which is the primary one of a family that provisioner makes up."""
    try:
        yield
    except UnavailableError as error:
        if family.hostname:
            error.message = error.message.replace("primary machine", family.title)
            error.args = (error.message,)
            hint = (error.hint or "").replace("the manifest or an aux VM's spec", f"the {family.title}")
            error.hint = hint.replace("the manifest", f"the {family.title}") or None
        raise


def new_environment(session: Session, planned: Plan, identity: str) -> Environment:
    """Returns the record of an environment of which nothing exists yet."""
    created_at = now()
    return Environment(
        id=identity,
        cloud=session.cloud.name,
        stack=identity,
        family=planned.family.name,
        task=planned.task,
        family_version=planned.family.manifest.version or "",
        status="creating",
        shared_ledger=bool(session.database),
        attended=True,
        batch=session.spending.batch,
        label=session.label,
        created_at=created_at,
        expires_at=created_at + session.ttl,
        time_limits=session.time_limits,
        setup=planned.setup,
        has_score=planned.setup_data.has_score,
        has_intermediate_score=planned.setup_data.has_intermediate_score,
        has_aggregate_scores=planned.setup_data.has_aggregate_scores,
        has_teardown=planned.setup_data.has_teardown,
        score_visible_to_agent=planned.family.manifest.scoring(planned.task).visible_to_agent,
        full_internet=planned.setup.full_internet,
        allowed_destinations=planned.allowed,
        machines=planned.records,
        recorded=session.record,
    )
