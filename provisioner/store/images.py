"""Where finished images lie: one directory per image, whole or not there at all. Builds nothing itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from provisioner.errors import InfrastructureError, UsageError
from provisioner.models import Record, SetupData
from provisioner.progress import Progress
from provisioner.store.files import remove_tree, write_atomically
from provisioner.store.home import Home
from provisioner.store.locks import is_locked, locked

Kind = Literal["vendor", "base", "family", "aux"]
UNFINISHED = ".building-"


class Image(Record):
    """What is known of a finished image, kept in its directory as image.json.

    Args:
        kind: `vendor` is a distribution's own image, which a builder turns into a base image.
        cloud: where machines can boot from it.
        base: the image that this one was made from; None for the first one.
        family: the task family that it was built for; None for a base image.
        needs: images that environments of this one need beside it (a family's aux images).
    """

    name: str
    kind: Kind
    created_at: datetime
    cloud: str = "local"
    base: str | None = None
    family: str | None = None
    needs: tuple[str, ...] = ()


class ImageStore:
    """The images directory of a home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def path(self, name: str) -> Path:
        """images/NAME."""
        return self._home.images / name

    def disk(self, name: str) -> Path:
        """The image's disk: disk.raw of a base image, disk.qcow2 of any other."""
        directory = self.path(name)
        raw = directory / "disk.raw"
        return raw if raw.exists() else directory / "disk.qcow2"

    def finished(self, name: str) -> bool:
        """Whether the image is there, whole."""
        return (self.path(name) / "image.json").exists()

    @contextlib.contextmanager
    def building(
        self, name: str, progress: Progress, held: Callable[[Path], bool] = lambda _: True
    ) -> Iterator[Path | None]:
        """Holds the image's lock; gives an empty directory to build in, or None if the image is finished.

        Two builds of one image at once make one: the second waits here, and finds it finished.

        Args:
            held: whether the cloud still has what a finished image's directory describes.
        """

        def wait() -> None:
            progress.note(f"Another provisioner builds {name}; waiting for it")

        def usable() -> bool:
            return self.finished(name) and held(self.path(name))

        if usable():
            yield None
            return
        with locked(self._lock(name), on_wait=wait):
            if usable():
                yield None
                return
            if self.finished(name):
                progress.note(f"The cloud has lost the image {name}")
                self._remove(self.path(name))
            directory = self._home.images / f"{UNFINISHED}{name}"
            remove_tree(directory)
            directory.mkdir(mode=0o700)
            try:
                yield directory
            finally:
                log = directory / "build.log"
                if log.exists():  # a failed build: keep what it said
                    log.replace(self._home.archive / f"{name}.build.log")
                remove_tree(directory)

    def finish(self, image: Image, directory: Path) -> None:
        """Makes a built directory the image, in one step."""
        write_atomically(directory / "image.json", image.model_dump_json(indent=2))
        try:
            directory.rename(self.path(image.name))
        except OSError as error:
            raise InfrastructureError(f"Image {image.name} could not be put in place: {error}") from error

    def load(self, name: str) -> Image:
        """The record of a finished image.

        Raises:
            UsageError: there is no such image.
        """
        try:
            return Image.model_validate_json((self.path(name) / "image.json").read_bytes())
        except FileNotFoundError as error:
            raise UsageError(f"There is no image {name}.", hint="`provisioner image list` shows them.") from error

    def setup_data(self, name: str) -> SetupData:
        """The setup data stored beside a family image."""
        return SetupData.model_validate_json((self.path(name) / "setup-data.json").read_bytes())

    def all(self) -> list[Image]:
        """All finished images, oldest first."""
        names = [path.parent.name for path in self._home.images.glob("*/image.json")]
        found = [self.load(name) for name in names if not name.startswith(UNFINISHED)]
        return sorted(found, key=lambda image: (image.created_at, image.name))

    def disk_bytes(self, name: str) -> int:
        """What the image takes on the disk, in bytes."""
        return sum(path.stat().st_blocks * 512 for path in self.path(name).iterdir() if path.is_file())

    def prune(
        self, in_use: set[str], *, cloud: str, discard: Callable[[Path], None], everything: bool = False
    ) -> list[str]:
        """Removes images, and what interrupted builds left.

        Args:
            in_use: names of images that environments run from; never removed, nor what they build on.
            cloud: whose images; those of others stay.
            discard: removes what an image has outside its directory.
            everything: remove all others; else only those that a newer image of the same family replaces, and
                base images that nothing builds on any more.

        Returns:
            the names that were removed.
        """
        images = self.all()
        keep = set(in_use) if everything else in_use | current(images)
        keep |= needed_by(keep, images)
        removed = [image.name for image in images if image.name not in keep and image.cloud == cloud]
        # Layers go before what they lie on, so that a crash in between leaves no image without its base.
        order = {"aux": 0, "family": 0, "base": 1, "vendor": 2}
        for image in sorted((i for i in images if i.name in removed), key=lambda i: order[i.kind]):
            discard(self.path(image.name))
            self._remove(self.path(image.name))
        return removed + self.remove_unfinished()

    def remove_unfinished(self) -> list[str]:
        """Removes what interrupted builds left; returns what that was called."""
        removed = []
        for directory in self._home.images.glob(f"{UNFINISHED}*"):
            if not is_locked(self._lock(directory.name.removeprefix(UNFINISHED))):
                remove_tree(directory)
                removed.append(directory.name)
        return removed

    def _remove(self, directory: Path) -> None:
        doomed = directory.with_name(f"{UNFINISHED}{directory.name}")
        directory.rename(doomed)
        remove_tree(doomed)

    def _lock(self, name: str) -> Path:
        return self._home.locks / f"image-{name}"


def current(images: list[Image]) -> set[str]:
    """The newest image of each family, and the newest base images. Pure."""
    newest: dict[tuple[str, str | None], str] = {}
    for image in images:
        if image.kind != "aux":
            label = image.family or image.name.rpartition("-")[0]
            newest[(image.kind, label)] = image.name
    return set(newest.values())


def needed_by(names: set[str], images: list[Image]) -> set[str]:
    """The images that `names` need: their bases and aux images, and theirs in turn. Pure."""
    by_name = {image.name: image for image in images}
    needed: set[str] = set()
    pending = list(names)
    while pending:
        image = by_name.get(pending.pop())
        if image is None:
            continue
        for name in (*image.needs, *([image.base] if image.base else [])):
            if name not in needed:
                needed.add(name)
                pending.append(name)
    return needed
