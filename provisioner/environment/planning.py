"""Plans an environment before anything of it exists: its machines, and their images, which are built if need be."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from provisioner.base.clock import TEARDOWN, now
from provisioner.base.errors import ShortageError, UnavailableError
from provisioner.base.models import (
    Destination,
    Environment,
    MachineRecord,
    MachineSize,
    PrimaryDistribution,
    Record,
    Role,
    SetupData,
    TaskSetup,
)
from provisioner.clouds.registry import not_priced
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.costs.prices import CostLine, cost, hourly, worst_hourly
from provisioner.family.check import Checked
from provisioner.family.env_file import check_required, required_of_env_file
from provisioner.family.loader import TaskFamily
from provisioner.family.setup_data import require_task
from provisioner.images import build
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
        HostError: the controller cannot run the machines as it must.
        ImageBuildError: an image could not be built.
    """
    # The manifest can be read without the family's code, so impossible resources are refused before a build.
    primary_size(session, family, task)
    session.cloud.check_allowlist(allowed)
    image, setup_data = build.family_image(session, family)
    setup = require_task(setup_data, family.name, task)
    check_required(session.variables, setup)
    spec = setup.aux_vm_spec
    # Again: with an image, the cloud may know more of itself.
    sizes = session.cloud.choose(family.manifest.resources(task), spec)
    records: dict[Role, MachineRecord] = {
        "primary": _record(session, family, image, sizes["primary"]).model_copy(update={"hostname": family.hostname})
    }
    if spec:
        image = build.aux_image(session, family, spec, sizes["aux"])
        records["aux"] = MachineRecord(image=image, distribution=spec.base_image_type, size=sizes["aux"], user="root")
    for role, neighbour in family.neighbours.items():
        size = primary_size(session, neighbour, task)
        records[role] = _record(session, neighbour, build.family_image(session, neighbour)[0], size)
    sizes = {role: record.size for role, record in records.items()}
    if family.neighbours and (shortage := session.cloud.shortage(sizes, 1)):
        raise ShortageError(f"The machines do not fit now: {shortage}.", hint=_LESS)
    return Plan(family, task, setup, setup_data, records, () if setup.full_internet else allowed)


def _record(session: Session, family: TaskFamily, image: str, size: MachineSize) -> MachineRecord:
    """Returns the record of a machine of a family's image."""
    distribution = build.primary_base(session, family).distribution
    return MachineRecord(image=image, distribution=distribution, size=build.fitting_image(size, family), user="root")


def primary_size(session: Session, family: TaskFamily, task: str) -> MachineSize:
    """Chooses the size of a family's primary machine, before its image is built.

    Raises:
        UnavailableError: the cloud cannot provide it. What it says names a machine of our own by its name.
    """
    try:
        return session.cloud.choose(family.manifest.resources(task), None)["primary"]
    except UnavailableError as error:
        if family.hostname:  # it is the primary machine of a family that provisioner makes up
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


class Forecast(Record):
    """An estimate of a task's environment.

    Args:
        base_image: the base image of the primary machine.
        image: the family's image; None if it is not built, so that permissions are not known yet.
        outlook: what is to be done for the image; empty if it is built.
        full_internet: whether the task has internet; None if that is not known yet.
        has_aux_vm: whether it has an aux VM, which `machines` then has; None if that is not known yet.
        needs: the required variables that are not set, as far as they are known.
        machines: the size of each machine.
        accelerator: what would run their instructions, in words; empty where all machines are alike.
        room: what the machines need of what is short, such as the host's disk or the account's quota, and how much
            there is of it; empty where that is no concern.
        lines: the parts that cost money by the hour; empty on a cloud that costs nothing.
        not_included: what it may cost besides, in words; empty if there is nothing.
        egress_gb: how many gigabytes it may send, which `worst_micro_usd` contains; 0 if that costs nothing.
        limit_seconds: its time to live.
        earlier_runs: how many runs of the task the ledger has settled.
        usual_micro_usd: what those cost on average, in millionths of a US dollar; without any, the cost until the end
            of its time to live in the first place that is tried.
        worst_micro_usd: its worst-case cost until the end of its time to live, in millionths of a US dollar.
        builder_micro_usd: the worst-case cost of each image that is not built yet, in millionths of a US dollar.
    """

    family: str
    task: str
    cloud: str
    region: str
    base_image: PrimaryDistribution
    image: str | None
    outlook: str = ""
    full_internet: bool | None
    has_aux_vm: bool | None
    needs: tuple[str, ...]
    machines: dict[Role, MachineSize]
    accelerator: str = ""
    room: str = ""
    lines: tuple[CostLine, ...]
    not_included: str = ""
    egress_gb: float
    limit_seconds: float
    earlier_runs: int
    usual_micro_usd: int
    worst_micro_usd: int
    builder_micro_usd: int


def forecast(
    session: Session, family: TaskFamily, task: str, checked: Checked | None = None, *, allowlist: bool = False
) -> Forecast:
    """Chooses the machines as `run` would, as far as that is possible without building anything.

    Args:
        checked: what the family's text tells, for as long as its image is not built.
        allowlist: whether the environment is to have one.

    Raises:
        UsageError: the task is unknown, or the cloud cannot provide its machines.
        UnavailableError: a price is not known.
    """
    resources = family.manifest.resources(task)
    checked = checked or Checked(family.name)
    image = build.built_family_image(session, family)
    setup = require_task(session.images.setup_data(image), family.name, task) if image else None
    spec = setup.aux_vm_spec if setup else None
    sizes = session.cloud.choose(resources, spec)
    sizes["primary"] = build.fitting_image(sizes["primary"], family)
    needs = required_of_env_file(setup) if setup else checked.needs
    # Assume the more expensive case for what is not known yet.
    has_way_out = allowlist or setup is None or setup.full_internet
    lines = session.cloud.costs(sizes, has_way_out=has_way_out, spot=True)
    builder = session.cloud.builder_size(
        build.primary_base(session, family), max(MINIMUM_DISK_GIB, *(size.disk_gib for size in sizes.values()))
    )
    building = session.cloud.costs({"primary": builder}, has_way_out=True, spot=False)
    earlier_runs, mean = session.ledger.mean_cost(session.cloud.name, family.name, task) if lines else (0, 0)
    egress = session.cloud.egress()
    has_aux_vm = bool(spec) if setup else checked.has_aux_vm
    may_have_aux_vm = has_aux_vm is None and bool(lines)
    aux_vm = "an aux VM: its size is known once the image is built" if may_have_aux_vm else ""
    return Forecast(
        family=family.name,
        task=task,
        cloud=session.cloud.name,
        region=session.cloud.region,
        base_image=family.manifest.base_image or session.base_image,
        image=image,
        outlook="" if image else build.outlook(session, family),
        full_internet=setup.full_internet if setup else None,
        has_aux_vm=has_aux_vm,
        needs=tuple(name for name in needs if name not in session.variables),
        machines=sizes,
        accelerator=session.cloud.accelerator(),
        room=session.cloud.room(sizes),
        lines=lines,
        not_included="; ".join(part for part in (aux_vm, not_priced(session.cloud.name)) if part),
        egress_gb=float(egress.gb) if has_way_out else 0,
        limit_seconds=session.ttl.total_seconds(),
        earlier_runs=earlier_runs,
        usual_micro_usd=mean if earlier_runs else cost(hourly(lines), session.ttl + TEARDOWN) if lines else 0,
        worst_micro_usd=_worst(lines, session.ttl) + (egress.micro_usd if has_way_out else 0),
        builder_micro_usd=_worst(building, session.builder_ttl) + egress.micro_usd,
    )


def _worst(lines: tuple[CostLine, ...], ttl: timedelta) -> int:
    return cost(worst_hourly(lines), ttl + TEARDOWN) if lines else 0
