"""Finds the order in which a compose file's images are built: each after the images that it is made from. Pure."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Mapping

from provisioner.errors import UsageError

_INSTRUCTION = re.compile(r"\s*(ARG|FROM|COPY|ADD|RUN)\s+(.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^${}]*))?\})")
_SOURCE = re.compile(r"(?:--|,|\s)from=([^\s,]+)")


def ordered(images: Mapping[str, str], needs: Mapping[str, set[str]]) -> list[str]:
    """Returns the services' names in the order of their builds.

    Args:
        images: from the services' names to those of their images.
        needs: from the names of the services that are built to what may be images of other services.

    Raises:
        UsageError: images are made from each other.
    """
    made = {full_name(images[name]): name for name in needs}
    others = {
        name: {made[image] for image in map(full_name, each) if made.get(image, name) != name}
        for name, each in needs.items()
    }
    try:
        return list(graphlib.TopologicalSorter(others).static_order())
    except graphlib.CycleError as error:
        raise UsageError(f"their images are made from each other: {' from '.join(error.args[1])}") from None


def short_name(image: str) -> str:
    """Returns an image's name without what the Docker Hub's may leave out."""
    return re.sub(r"^(docker\.io/)?(library/)?", "", image)


def full_name(image: str) -> str:
    """Returns an image's name with its tag, and without what the Docker Hub's may leave out."""
    name = short_name(image)
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def bases(dockerfile: str, args: Mapping[str, str], contexts: Mapping[str, str], target: str = "") -> set[str]:
    """Returns the images that a Dockerfile's target is made from, as far as it tells before it is built.

    Args:
        args: build arguments.
        contexts: from the names of further contexts to images or directories.
        target: the stage that is built, by its name or number; by default the last.
    """
    known: dict[str, str] = {}
    # What each stage is made from, by its name and its number: it refers to earlier stages only.
    stages: dict[str, set[str]] = {}
    images: set[str] = set()
    count = 0
    for kind, rest in _instructions(dockerfile):
        if kind == "ARG" and not count:
            name, _, default = rest.partition("=")
            known[name.strip()] = args.get(name.strip(), default.strip().strip("\"'"))
            continue
        words = [word for word in _replaced(rest, known).split() if not word.startswith("--")]
        if kind == "FROM":
            images = set()
        for source in words[:1] if kind == "FROM" else _SOURCE.findall(_replaced(rest, known)):
            images |= stages.get(source.lower(), {source})
        if kind == "FROM":  # a stage may have the name of the image that it is made from
            stages.update(dict.fromkeys([str(count), *(word.lower() for word in words[2:])], images))
            count += 1
    reached = stages.get(target.lower(), images)
    return {contexts.get(image, image).removeprefix("docker-image://") for image in reached}


def _instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    lines = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"[\\`]\s*\n", " ", lines).splitlines():
        if match := _INSTRUCTION.match(line):
            yield match[1].upper(), match[2]


def _replaced(text: str, args: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: args.get(match[1] or match[2]) or match[3] or "", text)
