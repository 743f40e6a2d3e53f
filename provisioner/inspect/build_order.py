"""Finds the order in which a compose file's images are built: each after the images that it is made from. Pure."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from provisioner.errors import UsageError

_INSTRUCTION = re.compile(r"\s*(ARG|FROM|COPY|ADD|RUN)\s+(.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^${}]*))?\})")
_SOURCE = re.compile(r"(?:--|,|\s)from=([^\s,]+)")


@dataclass(frozen=True)
class Build:
    """How one service's image is built.

    Args:
        image: its name.
        dockerfile: the Dockerfile's text.
        target: the stage that is built; empty for the last.
        args: build arguments.
        contexts: from the names of further contexts to images or directories.
    """

    image: str
    dockerfile: str
    target: str = ""
    args: Mapping[str, str] = field(default_factory=dict)
    contexts: Mapping[str, str] = field(default_factory=dict)


def ordered(builds: Mapping[str, Build]) -> list[str]:
    """Returns the services' names in the order of their builds.

    Raises:
        UsageError: images are made from each other.
    """
    made = {full_name(build.image): name for name, build in builds.items()}
    needs = {
        name: [made[image] for image in map(full_name, bases(build)) if made.get(image, name) != name]
        for name, build in builds.items()
    }
    try:
        return list(graphlib.TopologicalSorter(needs).static_order())
    except graphlib.CycleError as error:
        raise UsageError(f"their images are made from each other: {' from '.join(error.args[1])}") from None


def short_name(image: str) -> str:
    """Returns an image's name without what the Docker Hub's may leave out."""
    return re.sub(r"^(docker\.io/)?(library/)?", "", image)


def full_name(image: str) -> str:
    """Returns an image's name with its tag, and without what the Docker Hub's may leave out."""
    name = short_name(image)
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def bases(build: Build) -> set[str]:
    """Returns the images that an image is made from, as far as its Dockerfile tells before it is built."""
    args: dict[str, str] = {}
    stages: list[tuple[str, list[str]]] = []
    for kind, rest in _instructions(build.dockerfile):
        if kind == "ARG" and not stages:
            name, _, default = rest.partition("=")
            args[name.strip()] = build.args.get(name.strip(), default.strip().strip("\"'"))
        elif kind == "FROM":
            words = [word for word in _replaced(rest, args).split() if not word.startswith("--")]
            stages.append((words[2] if len(words) > 2 else "", words[:1]))
        elif stages:
            stages[-1][1].extend(_SOURCE.findall(_replaced(rest, args)))
    return _reached(stages, build)


def _reached(stages: list[tuple[str, list[str]]], build: Build) -> set[str]:
    """Returns what the stages need that are built, beside each other."""
    numbers = {name.lower(): number for number, (name, _) in enumerate(stages) if name}
    numbers |= {str(number): number for number in range(len(stages))}
    waiting = [numbers.get(build.target.lower(), len(stages) - 1)] if stages else []
    images: set[str] = set()
    for stage in waiting:
        for source in stages[stage][1]:
            # A stage may have the name of the image that it is made from.
            inner = numbers.get(source.lower(), stage)
            if inner < stage:
                waiting += {inner} - set(waiting)
            else:
                images.add(build.contexts.get(source, source).removeprefix("docker-image://"))
    return images


def _instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    lines = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"[\\`]\s*\n", " ", lines).splitlines():
        if match := _INSTRUCTION.match(line):
            yield match[1].upper(), match[2]


def _replaced(text: str, args: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: args.get(match[1] or match[2]) or match[3] or "", text)
