"""What a task's environment would be and cost, told before anything is created or built."""

from __future__ import annotations

from datetime import timedelta

from provisioner.clouds.sizing import MINIMUM_DISK_GIB
from provisioner.costs.prices import CostLine, cost, worst_hourly
from provisioner.family.loader import TaskFamily
from provisioner.family.setup_data import require_task
from provisioner.images import build
from provisioner.models import BaseImage, MachineSize, Record, Role
from provisioner.session import Session
from provisioner.ttl import TEARDOWN


class Forecast(Record):
    """What an environment would be.

    Args:
        image: the family's image, if it is built. Without it nobody knows the task's permissions and aux VM yet.
        full_internet: None while that is not known.
        lines: what costs money by the hour; empty where nobody bills.
        limit_seconds: how long it may live.
        worst_micro_usd: what it costs at the most, to its limit, in millionths of a US dollar.
        builder_micro_usd: what each image that is not built yet costs at the most.
    """

    family: str
    task: str
    cloud: str
    region: str
    image: str | None
    full_internet: bool | None
    machines: dict[Role, MachineSize]
    lines: tuple[CostLine, ...]
    limit_seconds: float
    worst_micro_usd: int
    builder_micro_usd: int


def forecast(session: Session, family: TaskFamily, task: str) -> Forecast:
    """Decides the machines as `run` would, as far as that is known without building anything.

    Raises:
        UsageError: unknown task, or machines that the cloud cannot give.
        UnavailableError: a price is not known.
    """
    resources = family.manifest.resources(task)
    sizes = session.cloud.choose(resources, None)
    image = build.built_family_image(session, family)
    setup = require_task(session.images.setup_data(image), family.name, task) if image else None
    if setup and setup.aux_vm_spec:
        sizes = session.cloud.choose(resources, setup.aux_vm_spec)
    sizes["primary"] = build.fitting_image(sizes["primary"], family)
    # What is not known yet counts as the dearer.
    lines = session.cloud.costs(sizes, full_internet=setup.full_internet if setup else True, spot=True)
    builder = session.cloud.builder_size(
        BaseImage(role="primary"), max(MINIMUM_DISK_GIB, *(size.disk_gib for size in sizes.values()))
    )
    building = session.cloud.costs({"primary": builder}, full_internet=True, spot=False)
    return Forecast(
        family=family.name,
        task=task,
        cloud=session.cloud.name,
        region=session.cloud.region,
        image=image,
        full_internet=setup.full_internet if setup else None,
        machines=sizes,
        lines=lines,
        limit_seconds=session.limit.total_seconds(),
        worst_micro_usd=_worst(lines, session.limit),
        builder_micro_usd=_worst(building, session.builder_limit),
    )


def _worst(lines: tuple[CostLine, ...], limit: timedelta) -> int:
    return cost(worst_hourly(lines), limit + TEARDOWN) if lines else 0
