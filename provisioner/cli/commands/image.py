"""The commands `image build`, `image list` and `image prune`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from provisioner.base.errors import InfrastructureError
from provisioner.base.printable import printable
from provisioner.cli.family_sessions import builder_session, refuse_or_warn
from provisioner.cli.options import EnvFileOption, FamilyArgument, Launch
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import session
from provisioner.clouds.registry import Where
from provisioner.images.build import build_all
from provisioner.session import Phases, Session
from provisioner.store.snapshots import SnapshotStore


def build(
    family: FamilyArgument,
    env_file: EnvFileOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the machine of a failed build up, to log in to.")] = False,
    *,
    where: Where,
    launch: Launch,
) -> Result:
    """Builds the missing images of a family."""
    opened, loaded = builder_session(family, env_file, where, launch)
    opened = replace(opened, keep_builder=keep)
    refuse_or_warn(opened, loaded, None)
    phases = Phases(opened.progress)
    with phases.phase("images"):
        name, aux = build_all(opened, loaded)
    data = {"family": loaded.name, "image": name, "aux_images": aux, "seconds": phases.finished[0].seconds}
    return Result(data, "\n".join([name, *aux]))


def list_images() -> Result:
    """Lists all finished images, and names those whose records cannot be read."""
    opened = session()
    used: set[str] | None = None
    try:
        used = _in_use(opened)
    except InfrastructureError as error:
        opened.progress.note(f"It is not known which images are in use. {error.message} {error.hint or ''}".rstrip())
    images = [
        {
            **image.model_dump(mode="json"),
            "bytes": opened.images.disk_bytes(image.name),
            "in_use": None if used is None else image.name in used,
        }
        for image in opened.images.all()
    ]
    rows = [
        [
            i["name"],
            i["kind"],
            i["cloud"],
            i["family"] or "-",
            f"{i['bytes'] / 1e6:,.0f} MB",
            {True: "yes", False: "no", None: "unknown"}[i["in_use"]],
        ]
        for i in images
    ]
    lines = [table(["NAME", "KIND", "CLOUD", "FAMILY", "DISK", "IN USE"], rows)]
    unreadable = [
        {"name": name, "directory": str(opened.images.path(name)), "message": error.message, "hint": error.hint}
        for name, error in opened.images.unreadable().items()
    ]
    lines += [printable(f"{each['name']}: {each['message']} {each['hint'] or ''}").rstrip() for each in unreadable]
    return Result({"images": images, "unreadable": unreadable}, "\n".join(lines))


def prune(
    everything: Annotated[bool, typer.Option("--all", help="Remove all images that are not in use.")] = False,
    *,
    where: Where,
) -> Result:
    """Removes unused images."""
    opened = session(where=where)
    removed = opened.images.prune(
        _in_use(opened), cloud=opened.cloud.name, discard=opened.cloud.discard, everything=everything
    )
    return Result({"removed": removed}, "\n".join(removed) or "Nothing to remove.")


def _in_use(opened: Session) -> set[str]:
    """Returns the images of all environments, those that are frozen too: their disks are layers over the images'."""
    frozen = [snapshot.environment for snapshot in SnapshotStore(opened.home).all()]
    return {machine.image for each in (*opened.environments.all(), *frozen) for machine in each.machines.values()}


COMMANDS = {
    "build": (build, "Build a family's image and its tasks' aux images, unless they exist."),
    "list": (list_images, "List finished images."),
    "prune": (prune, "Remove images that newer ones have replaced, and unfinished builds."),
}
