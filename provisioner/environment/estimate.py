"""Estimates the machines and the cost of a task's environment before anything is created or built."""

from __future__ import annotations

from datetime import timedelta

from provisioner.clouds.registry import not_priced
from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.costs.prices import CostLine, cost, worst_hourly
from provisioner.family.check import Checked
from provisioner.family.env_file import required_of_env_file
from provisioner.family.loader import TaskFamily
from provisioner.family.setup_data import require_task
from provisioner.images import build
from provisioner.models import MachineSize, PrimaryDistribution, Record, Role
from provisioner.session import Session
from provisioner.ttl import TEARDOWN


class Forecast(Record):
    """An estimate of a task's environment.

    Args:
        base_image: the base image of the primary machine.
        image: the family's image; None if it is not built, so that permissions are not known yet.
        outlook: what is to be done for the image, and why; empty if it is built.
        full_internet: whether the task has internet; None if that is not known yet.
        has_aux_vm: whether it has an aux VM, which `machines` then has; None if that is not known yet.
        needs: the required variables that are not set, as far as they are known.
        machines: the size of each machine.
        room: what the machines need of what is short, such as the host's disk or the account's quota, and how much
            there is of it; empty where that is no concern.
        lines: the parts that cost money by the hour; empty on a cloud that costs nothing.
        not_included: what it may cost besides, in words; empty if there is nothing.
        limit_seconds: its time to live.
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
    room: str = ""
    lines: tuple[CostLine, ...]
    not_included: str = ""
    limit_seconds: float
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
        room=session.cloud.room(sizes),
        lines=lines,
        not_included="; ".join(part for part in (aux_vm, not_priced(session.cloud.name)) if part),
        limit_seconds=session.ttl.total_seconds(),
        worst_micro_usd=_worst(lines, session.ttl),
        builder_micro_usd=_worst(building, session.builder_ttl),
    )


def _worst(lines: tuple[CostLine, ...], ttl: timedelta) -> int:
    return cost(worst_hourly(lines), ttl + TEARDOWN) if lines else 0
