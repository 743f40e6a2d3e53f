"""The command `sweep`: removes orphans."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from provisioner.base.clock import parse_duration
from provisioner.base.errors import StillThereError, UsageError
from provisioner.base.progress import best_effort
from provisioner.cli.output import Result, table
from provisioner.cli.sessions import session, session_of, shared_database
from provisioner.clouds.cloud import UnrecordedImage
from provisioner.clouds.registry import CLOUDS, Where, clouds_with_places
from provisioner.environment import sweep


def main(
    all_regions: Annotated[bool, typer.Option("--all-regions", help="Search every region of the account.")] = False,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Skip what is younger than this, such as 2h.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    *,
    where: Where,
) -> Result:
    """Finds orphans, looks a second time, and removes them."""
    least = {"older_than": parse_duration(older_than)} if older_than is not None else {}
    opened = session(where=where)
    if all_regions and not CLOUDS[where.cloud].has_places:
        raise UsageError(f"--all-regions is for --cloud {clouds_with_places()}.")
    regions: list[str] | None = list(where.regions) or [opened.cloud.region]
    if all_regions or not opened.cloud.region:
        regions = opened.cloud.open_regions(opened.progress.note)
    database = shared_database()
    orphans = sweep.sweep(
        opened,
        lambda environment: session_of(environment, opened),
        regions,
        dry_run=dry_run,
        shared=session(where=where, database=database).ledger if database else None,
        **least,
    )
    images: list[UnrecordedImage] = []
    for region in regions or ():
        with best_effort(opened.progress, f"Looking for images in {region}"):
            images += opened.cloud.unrecorded_images(region)
    stuck = [orphan for orphan in orphans if orphan.problem]
    if stuck:
        raise StillThereError(
            f"{len(orphans) - len(stuck)} of {len(orphans)} were removed; these were not: "
            f"{', '.join(orphan.environment for orphan in stuck)}.",
            hint="`provisioner sweep` tries again.",
            details="\n".join(f"{orphan.environment}: {orphan.problem}" for orphan in stuck) + _images_text(images),
        )
    data: dict[str, Any] = {
        "dry_run": dry_run,
        "found": [orphan.model_dump(mode="json") for orphan in orphans],
        "unrecorded_images": [image.model_dump(mode="json") for image in images],
    }
    return Result(data, f"{_swept_text(orphans, dry_run=dry_run)}{_images_text(images)}")


def _swept_text(orphans: list[sweep.Orphan], *, dry_run: bool) -> str:
    rows = [[orphan.environment, orphan.region or "-", f"{len(orphan.resources)}", orphan.reason] for orphan in orphans]
    if not rows:
        return "Nothing to remove."
    head = "Would be removed:" if dry_run else "Removed:"
    return f"{head}\n{table(['ENVIRONMENT', 'REGION', 'RESOURCES', 'REASON'], rows)}"


def _images_text(images: list[UnrecordedImage]) -> str:
    if not images:
        return ""
    rows = [
        [
            *(image.name, image.home or "-", image.owner or "-", image.region, str(image.gib)),
            *(f"{moment:%Y-%m-%d}" if moment else "-" for moment in (image.created_at, image.used_at)),
        ]
        for image in images
    ]
    listed = table(["IMAGE", "HOME", "OWNER", "REGION", "GIB", "CREATED", "LAST USED"], rows)
    commands = "\n".join(command for image in images for command in image.removal)
    return (
        f"\n\nImages that this home does not have, and that are left alone:\n{listed}\n\n"
        f"If no other home uses them, these delete them, in this order:\n{commands}"
    )
