"""Reads an eval's compose file or Dockerfile, and has Compose resolve it. Runs nothing of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from inspect_ai.util import ComposeConfig, ComposeService, is_compose_yaml, is_dockerfile

from provisioner import strict_json, strict_yaml
from provisioner.errors import UsageError
from provisioner.inspect import compose_program
from provisioner.printable import encodable
from provisioner.store.home import Home

MAXIMUM_BYTES = 1 << 20
MAXIMUM_VALUES = 100_000
# The key at a compose file's top whose value is a configuration of ours.
EXTENSION = "x-provisioner"
METADATA = "SAMPLE_METADATA_"
# Compose names after it the images that it builds, and the networks.
PROJECT = "sandbox"

# What Inspect's docker sandbox makes of a Dockerfile alone.
_OF_A_DOCKERFILE = {"command": ["tail", "-f", "/dev/null"], "init": True, "stop_grace_period": "1s"}
# Of a compose file, the files that it names, and those that these name.
_MOST_FILES, _MOST_CHARACTERS = 200, 8 << 20
_PATH = re.compile(r"[^\s\"'\[\]{},:=]+")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNSET = re.compile(r'The \\?"(\w+)\\?" variable is not set')
# Compose reads what these name on this computer.
_READS = frozenset({"env_file", "extends", "include"})
_PLAIN_PATH = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")
# The samples of a process mostly name the same file: one asks Compose, and the others wait for its answer.
_lock = threading.Lock()


@dataclass
class Texts:
    """What is known of the texts of a compose file and of the files that it names, before Compose reads them.

    Args:
        words: all that may be a variable's name.
        paths: the relative paths, made absolute.
        digest: a hash of all of it.
        services: from names to what the files say of a service, in the files' order.
    """

    words: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    digest: str = ""
    services: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ComposeFile:
    """A compose file as it is written.

    Args:
        where: what messages call it.
        directory: the directory of its relative paths.
        document: its mapping, of plain values.
        texts: what is known of its texts; None for a Dockerfile, which Compose need not resolve.
        path: its path; None for a model of Inspect's.
    """

    where: str
    directory: Path
    document: Mapping[str, Any]
    texts: Texts | None = None
    path: Path | None = None

    @property
    def settings(self) -> object:
        """What it says for us, under `x-provisioner`; None if it says nothing."""
        return self.document.get(EXTENSION)

    @property
    def metadata_names(self) -> set[str]:
        """The names of the sample's metadata that it may refer to, as references have them."""
        words = self.texts.words if self.texts else ()
        return {word.removeprefix(METADATA) for word in words if word.startswith(METADATA)}


@dataclass(frozen=True)
class Resolved:
    """A compose file with all variables in their places.

    Args:
        document: the canonical form of the file: https://docs.docker.com/reference/compose-file.
        unset: the variables that are not set, and stand for nothing.
    """

    document: dict[str, Any]
    unset: tuple[str, ...] = ()


def is_compose(path: str) -> bool:
    """Returns whether a file is a compose file or a Dockerfile by its name, as Inspect's docker sandbox decides."""
    return is_compose_yaml(path) or is_dockerfile(path)


def is_url(registry: str) -> bool:
    """Returns whether a registry is a mirror's address, and not a directory."""
    return registry.startswith(("http://", "https://"))


def read(given: str | ComposeConfig, *, has_internet: bool = False) -> ComposeFile:
    """Reads a compose file or a Dockerfile by its path, or takes Inspect's model of a compose file.

    Args:
        has_internet: whether the machine reaches any of it, so that the container of a Dockerfile alone may, too.

    Raises:
        UsageError: the file cannot be read, or has no services.
    """
    if isinstance(given, ComposeConfig):
        return _of_model(given)
    path = Path(given).absolute()
    if is_dockerfile(given):
        if not path.is_file():
            raise UsageError(f"{path} does not exist, or is no file.")
        service = {"build": {"context": str(path.parent), "dockerfile": path.name}, **_OF_A_DOCKERFILE}
        if not has_internet:
            service["network_mode"] = "none"
        return ComposeFile(str(path), path.parent, {"services": {"default": service}})
    value = strict_yaml.read(path, "The compose file", MAXIMUM_BYTES, plain=True)
    if not isinstance(value, dict) or not (_services(value) or value.get("include")):
        raise UsageError(f"{path} is no compose file: it must have `services`, and at least one.")
    # Aliases of YAML can stand for many times what the file holds.
    if any(number >= MAXIMUM_VALUES for number, _ in enumerate(_values(value))):
        raise UsageError(f"{path} says more than {MAXIMUM_VALUES} values.")
    return ComposeFile(str(path), path.parent, value, _texts(path, _text(path), value), path)


def _of_model(given: ComposeConfig) -> ComposeFile:
    if not given.services:
        raise UsageError("The ComposeConfig has no services.")
    document = given.model_dump(mode="json", by_alias=True, exclude_none=True)
    for service in document["services"].values():
        for name, info in ComposeService.model_fields.items():
            if info.alias and name in service:  # as Inspect's logs have it
                service[info.alias] = service.pop(name)
    texts = _texts(Path.cwd() / "ComposeConfig.yaml", json.dumps(document), document)
    return ComposeFile("The ComposeConfig", Path.cwd(), document, texts)


def _texts(first: Path, text: str, document: dict[str, Any]) -> Texts:
    """Reads a compose file and all files that it may name: more than Compose reads, and never run or copied for it."""
    texts, sha, left = Texts(services=dict(_services(document))), hashlib.sha256(), _MOST_CHARACTERS
    waiting = [first, first.parent / ".env"]
    for path in waiting:
        if path != first:
            text = _text(path)
        if (left := left - len(text)) < 0:
            break
        sha.update(f"{path}\0{text}\0".encode())
        texts.words.update(_WORD.findall(text))
        if path.suffix not in (".yaml", ".yml"):
            continue
        if path != first and "services" in text:
            texts.services |= {
                name: each for name, each in _services(_parsed(text)).items() if name not in texts.services
            }
        names = {*_PATH.findall(text), ".env"}
        relative = {name for name in names if not name.startswith(("/", "~"))}
        texts.paths.update(os.path.normpath(path.parent / name) for name in relative)
        near = {Path(os.path.normpath(base / name)) for base in (path.parent, first.parent) for name in names}
        # Path.is_file() raises an error for a name that is too long for a file.
        files = sorted(each for each in near - set(waiting) if os.path.isfile(each))  # noqa: PTH113
        waiting += files[: _MOST_FILES - len(waiting)]
    texts.digest = sha.hexdigest()
    return texts


def _text(path: Path) -> str:
    """Returns what a file says; nothing if it is none, or too large for Compose to read."""
    with suppress(OSError), path.open("rb") as file:
        data = file.read(MAXIMUM_BYTES + 1)
        return data.decode(errors="replace") if len(data) <= MAXIMUM_BYTES else ""
    return ""


def _parsed(text: str) -> object:
    with suppress(UsageError):  # Compose says what is wrong with it
        return strict_yaml.load(text.encode(), "the file", plain=True)
    return None


def _services(document: object) -> dict[str, Any]:
    services = document.get("services") if isinstance(document, dict) else None
    return services if isinstance(services, dict) else {}


def resolve(file: ComposeFile, metadata: Mapping[str, str]) -> Resolved:
    """Has Compose put variables, files and short forms in their places: of `.env`, this process and the sample.

    Args:
        metadata: the sample's, by the names that references have.

    Raises:
        UsageError: Compose finds it wrong, or metadata are missing.
        HostError: there is no Compose.
    """
    if not file.texts:
        return Resolved(dict(file.document))
    words = {*file.texts.words, "HOME"}
    given = {METADATA + name: encodable(value) for name, value in metadata.items() if METADATA + name in words}
    variables = {name: value for name, value in os.environ.items() if name in words and not name.startswith(METADATA)}
    text = b"" if file.path else json.dumps(file.document).encode()
    argv = ("--project-name", PROJECT, "--project-directory", str(file.directory), "--file", str(file.path or "-"))
    try:
        _refuse_other_files(file.document, given)
        with _lock:
            compose = compose_program.program(Home.default())
            output, said = _answer(
                compose, argv, tuple(sorted({**variables, **given}.items())), text, file.texts.digest
            )
        # Compose writes $$ for each $, as the answer may be read by Compose again.
        output = output.replace(b"$$", b"$")
        document = strict_json.parse(output, limit_bytes=MAXIMUM_BYTES, maximum_values=MAXIMUM_VALUES)
    except (UsageError, strict_json.NotStrictJsonError) as error:
        raise UsageError(f"{file.where} is not valid: {error}.") from None
    unset = tuple(dict.fromkeys(_UNSET.findall(said)))
    if missing := [name.removeprefix(METADATA).lower() for name in unset if name.startswith(METADATA)]:
        raise UsageError(f"{file.where} needs the sample's metadata {missing[0]!r}, which it lacks.")
    return Resolved(document, unset)


@lru_cache(maxsize=64)
def _answer(
    compose: Path, argv: tuple[str, ...], variables: tuple[tuple[str, str], ...], text: bytes, digest: str
) -> tuple[bytes, str]:  # `digest` is a key of the cache only
    return compose_program.run(compose, [*argv, "config", "--format", "json"], dict(variables), text)


def _refuse_other_files(document: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Refuses metadata that may lead Compose to a file of this computer that the author has not named."""
    places = {"": document, **{f"services.{name}.": each for name, each in _services(document).items()}}
    for where, place in places.items():
        for key in _READS & (place.keys() if isinstance(place, dict) else set()):
            texts = {each for each in _values(place[key]) if isinstance(each, str)}
            words = {word for text in texts for word in _WORD.findall(text)}
            for name in sorted(words & metadata.keys()):
                if not _PLAIN_PATH.fullmatch(metadata[name]):
                    said = name.removeprefix(METADATA).lower()
                    raise UsageError(f"{where}{key}: the sample's metadata {said!r} may be a file's name here, no path")


def _values(value: object) -> Iterator[object]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _values(item)
