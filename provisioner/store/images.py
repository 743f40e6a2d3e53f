"""Keeps finished images: one directory per image, either complete or absent. Builds no images."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from provisioner.base import strict_json
from provisioner.base.errors import InfrastructureError, ProvisionerError, UsageError
from provisioner.base.models import Record, SetupData
from provisioner.base.progress import Progress
from provisioner.store.files import disk_bytes, locked, remove_tree, write_atomically
from provisioner.store.home import TEMPLATES, UNFINISHED, Home

STATUS = "var/lib/dpkg/status"
# A desktop with CUDA has about 3,000 packages and a record of 5 MB.
MAXIMUM_STATUS_BYTES = 8 << 20
MAXIMUM_PACKAGES = 20_000

# Debian Policy 5.6.1, 5.6.8 and 5.6.12: what names, architectures and versions are made of.
_FIELDS = (b"Package", b"Status", b"Architecture", b"Version")
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]{1,99}")
_ARCHITECTURE = re.compile(r"[a-z0-9-]{1,32}")
_VERSION = re.compile(r"[0-9][A-Za-z0-9.+:~-]{0,99}")


def installed_packages(status: bytes) -> tuple[str, ...]:
    """Returns the installed packages as NAME:ARCHITECTURE=VERSION, which apt-get understands too, sorted. Pure.

    Args:
        status: the contents of STATUS. Only the first MAXIMUM_STATUS_BYTES and MAXIMUM_PACKAGES count; what is not
            a package is left out.
    """
    packages = set()
    for fields in _paragraphs(status[:MAXIMUM_STATUS_BYTES]):
        name, architecture, version = (fields.get(key, "") for key in ("Package", "Architecture", "Version"))
        plain = _NAME.fullmatch(name) and _ARCHITECTURE.fullmatch(architecture) and _VERSION.fullmatch(version)
        if plain and fields.get("Status", "").endswith(" installed"):
            packages.add(f"{name}:{architecture}={version}")
    return tuple(sorted(packages)[:MAXIMUM_PACKAGES])


def _paragraphs(status: bytes) -> Iterator[dict[str, str]]:
    """Yields the fields that matter of one paragraph after the other, line by line: millions of lines cost little."""
    fields: dict[str, str] = {}
    for line in io.BytesIO(status):
        key, separator, value = line.rstrip(b"\n").partition(b": ")
        if separator and key in _FIELDS:
            fields[key.decode()] = value.decode(errors="replace")
        elif line == b"\n":
            yield fields
            fields = {}
    yield fields


Kind = Literal["vendor", "base", "layer", "family", "aux"]
# Upper layers are removed first, so that a crash in between leaves no image without its base.
REMOVED_IN_TURN: tuple[Kind, ...] = ("aux", "family", "layer", "base", "vendor")

R = TypeVar("R", bound=Record)


class Image(Record):
    """The record of a finished image, kept in its directory as image.json.

    Args:
        kind: `vendor` is a distribution's own image, which a builder turns into a base image; `layer` is what build
            steps, or all of them and install(), have made of a base image.
        cloud: the cloud whose machines can boot from it.
        base: the image that this one was built from; None for the lowest layer.
        family: the task family that it was built for; None for a base image.
        needs: other images that its environments need (a family's aux images).
        packages: its Debian packages, as NAME:ARCHITECTURE=VERSION. Those of family and aux images are the word of a
            machine in which the family's code had root; empty if this home did not build the image.
        layers: images from which a later build may begin, though nothing needs them.
    """

    name: str
    kind: Kind
    created_at: datetime
    cloud: str = "local"
    base: str | None = None
    family: str | None = None
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()


class ImageStore:
    """The images directory of a home."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def path(self, name: str) -> Path:
        """images/NAME."""
        return self._home.images / name

    def disk(self, name: str) -> Path:
        """Returns the image's disk: disk.raw of a base image, disk.qcow2 of any other."""
        raw = self.path(name) / "disk.raw"
        return raw if raw.exists() else self.path(name) / "disk.qcow2"

    def finished(self, name: str) -> bool:
        """Returns whether the image exists and is complete."""
        return (self.path(name) / "image.json").exists()

    def names(self) -> set[str]:
        """Returns the names of all images that this home has or makes."""
        return {path.name.removeprefix(UNFINISHED) for path in self._home.images.iterdir()}

    @contextlib.contextmanager
    def building(
        self, name: str, progress: Progress, held: Callable[[Path], bool] = lambda _: True
    ) -> Iterator[Path | None]:
        """Locks the image and yields an empty directory to build in, or None if the image is finished.

        Of two simultaneous builds of one image, the second waits here and then finds it finished.

        Args:
            name: the image's name.
            progress: receives a line when it waits.
            held: returns whether the cloud still has the image that a finished image's directory describes.
        """

        def wait() -> None:
            progress.note(f"Waiting for another provisioner that is building {name}")

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
                progress.note(f"The cloud no longer has the image {name}")
                self._remove(self.path(name))
            directory = self._home.images / f"{UNFINISHED}{name}"
            remove_tree(directory)
            directory.mkdir(mode=0o700)
            try:
                yield directory
            finally:
                log = directory / "build.log"
                if log.exists():  # the build failed: keep its log
                    log.replace(self._home.archive / f"{name}.build.log")
                remove_tree(directory)

    def finish(self, image: Image, directory: Path) -> None:
        """Turns a built directory into the finished image, atomically."""
        write_atomically(directory / "image.json", image.model_dump_json(indent=2))
        try:
            directory.rename(self.path(image.name))
        except OSError as error:
            raise InfrastructureError(f"The image {image.name} could not be moved into place: {error}") from error

    def load(self, name: str) -> Image:
        """Returns the record of a finished image.

        Raises:
            UsageError: there is no such image.
            InfrastructureError: its record cannot be read.
        """
        return _read(self.path(name) / "image.json", Image)

    def setup_data(self, name: str) -> SetupData:
        """Returns the setup data stored with a family image.

        Raises:
            UsageError: there is no such image.
            InfrastructureError: it cannot be read.
        """
        return _read(self.path(name) / "setup-data.json", SetupData)

    def all(self, begin: str = "") -> list[Image]:
        """Returns the finished images whose names begin so, oldest first, without those that `unreadable` returns."""
        return self._read_all(begin)[0]

    def unreadable(self) -> dict[str, InfrastructureError]:
        """Returns the names of images whose records are damaged or of another version, each with the error."""
        return self._read_all("")[1]

    def _read_all(self, begin: str) -> tuple[list[Image], dict[str, InfrastructureError]]:
        images, unreadable = [], {}
        for path in sorted(self._home.images.glob(f"{begin}*/image.json")):
            name = path.parent.name
            if name.startswith(UNFINISHED):
                continue
            try:
                images.append(self.load(name))
            except UsageError:  # another command has just removed it
                continue
            except InfrastructureError as error:
                unreadable[name] = error
        return sorted(images, key=lambda image: (image.created_at, image.name)), unreadable

    def disk_bytes(self, name: str) -> int:
        """Returns the disk space that the image occupies, in bytes."""
        return disk_bytes(self.path(name))

    def prune(
        self, in_use: set[str], *, cloud: str, discard: Callable[[Path], None], everything: bool = False
    ) -> list[str]:
        """Removes unused images and the remains of interrupted builds.

        Args:
            in_use: names of images that environments run from; they and the images that they need are kept.
            cloud: removes only this cloud's images.
            discard: removes an image's resources outside its directory.
            everything: removes all unused images, not only those that a newer image of the same family replaces, layers
                that lead to none of the others and base images that no other image needs.

        Returns:
            the names of the removed images and directories.

        Raises:
            InfrastructureError: the record of an image cannot be read, so which others it needs is not known.
        """
        images, unreadable = self._read_all("")
        for error in unreadable.values():
            raise error
        keep = set(in_use) if everything else in_use | current(images)
        keep |= needed_by(keep, images)
        if not everything:
            keep |= {layer for image in images if image.name in keep for layer in image.layers}
            keep |= needed_by(keep, images)
        removed = [image for image in images if image.name not in keep and image.cloud == cloud]
        unfinished = self.remove_unfinished()
        self.remove(removed, discard)
        return [image.name for image in removed] + unfinished

    def remove(self, images: list[Image], discard: Callable[[Path], None]) -> None:
        """Removes images that nothing uses, first those that are built on others of them.

        Args:
            discard: removes an image's resources outside its directory.

        Raises:
            ProvisionerError: some could not be removed, the first of them for this. They and what they need are kept.
        """
        errors: list[ProvisionerError] = []
        kept: set[str] = set()
        for image in sorted(images, key=lambda each: REMOVED_IN_TURN.index(each.kind)):
            if image.name in kept:
                continue
            try:
                discard(self.path(image.name))
            except ProvisionerError as error:
                errors.append(error)
                kept |= {*needed_by({image.name}, images), *image.layers}
            else:
                self._remove(self.path(image.name))
        if errors:
            raise errors[0]

    def remove_unfinished(self) -> list[str]:
        """Removes the directories of interrupted builds, of images and of templates, and returns their names."""
        root = self._home.images
        locks = {path: self._lock(path.name.removeprefix(UNFINISHED)) for path in root.glob(f"{UNFINISHED}*")}
        for path in root.glob(f"*/{TEMPLATES}/{UNFINISHED}*"):
            if path.is_dir():  # no lock of one
                locks[path] = path.with_name(f"{path.name.removeprefix(UNFINISHED)}.lock")
        removed = []
        for path, lock in locks.items():
            # What is locked is being made.
            of_image = lock.parent == self._home.locks
            with (
                contextlib.suppress(TimeoutError, FileNotFoundError),
                locked(lock, wait_seconds=0, make_parents=of_image),
            ):
                if path.exists():  # it was not finished meanwhile
                    remove_tree(path)
                    removed.append(str(path.relative_to(root)))
        return removed

    def _remove(self, directory: Path) -> None:
        doomed = directory.with_name(f"{UNFINISHED}{directory.name}")
        directory.rename(doomed)
        remove_tree(doomed)

    def _lock(self, name: str) -> Path:
        return self._home.locks / f"image-{name}"


def _read(path: Path, kind: type[R]) -> R:
    """Reads one of the records in an image's directory."""
    try:
        return strict_json.load_file(kind, path)
    except FileNotFoundError as error:
        name = path.parent.name
        raise UsageError(f"There is no image {name}.", hint="`provisioner image list` shows all images.") from error
    except (OSError, ValueError) as error:
        raise InfrastructureError(
            f"The record {path} cannot be read: {type(error).__name__}.",
            hint="It is damaged, was changed by hand, or was written by another version of provisioner. If you no "
            f"longer need that version and no machine runs from the image, remove the directory {path.parent}: the "
            "image is built again when it is needed.",
            details=str(error),
        ) from error


def current(images: list[Image]) -> set[str]:
    """Returns the newest image of each family and the newest base images. Pure."""
    newest: dict[tuple[str, str | None], str] = {}
    for image in images:
        if image.kind not in ("aux", "layer"):
            label = image.family or image.name.rpartition("-")[0]
            newest[(image.kind, label)] = image.name
    return set(newest.values())


def needed_by(names: set[str], images: list[Image]) -> set[str]:
    """Returns the images that `names` need, directly or indirectly: bases and aux images. Pure."""
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
