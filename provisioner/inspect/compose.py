"""Reads an eval's compose file or Dockerfile, and has Compose resolve it, confined. Runs nothing of it.

Compose is the operator's own, or the one of Debian 13, which is fetched once and kept by its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from inspect_ai.util import ComposeConfig, ComposeService, is_compose_yaml, is_dockerfile

from provisioner.base import child_environment, strict_json, strict_yaml
from provisioner.base.errors import HostError, UsageError
from provisioner.base.printable import encodable, last_lines
from provisioner.base.validation import shown
from provisioner.clouds.local.host import DEBIAN_13_KEYS
from provisioner.clouds.local.images import sources
from provisioner.store.files import locked, write_atomically
from provisioner.store.home import Home

# As Inspect's docker sandbox wants.
LEAST_VERSION = (2, 21)
# Measured: 50 ms and 60 MiB for an eval's file.
MAXIMUM_SECONDS = 10
MAXIMUM_MEMORY_BYTES = 512 << 20
MAXIMUM_OUTPUT_BYTES = 1 << 20
_WAIT_SECONDS = 120.0
_FETCH_SECONDS = 600.0
# Where Docker's client looks for plugins (docker/cli, cli-plugins/manager), beside the user's own directory.
_PLUGINS = tuple(
    Path("/usr", *parts, "docker", "cli-plugins")
    for parts in (("local", "lib"), ("local", "libexec"), ("lib",), ("libexec",))
)
_NAME = "docker-compose"


def program(home: Home) -> Path:
    """Returns Compose: the operator's own if it is new enough, else Debian 13's, which is fetched into the home once.

    Raises:
        HostError: there is none, and it cannot be fetched.
    """
    return _installed(os.environ.get("PATH", "")) or fetched(home)


def run(
    compose: Path, arguments: Sequence[str], environment: Mapping[str, str], stdin: bytes = b""
) -> tuple[bytes, str]:
    """Runs Compose, and returns what it writes to stdout and to stderr.

    Args:
        environment: its variables.

    Raises:
        UsageError: it ends with an error, which is the message, or does not fit its limits.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            done = subprocess.run(
                [*_confined(), str(compose), *arguments], input=stdin, stdout=stdout, stderr=stderr,
                env=child_environment.for_compose(environment), timeout=_WAIT_SECONDS, check=False,
            )  # fmt: skip
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
        except (OSError, ValueError) as error:  # the variables are too long for a process, or hold what none can
            raise UsageError(f"Compose cannot be given the variables that it names: {error}.") from error
        for file in (stdout, stderr):
            file.seek(0)
        output, said = stdout.read(), stderr.read().decode(errors="replace")
    # A Go program that has no more memory ends with 2, and one that a limit ends by a signal.
    if code < 0 or code == 2 or code > 128 or said.rstrip().endswith("file too large"):
        raise UsageError(
            f"with its aliases and variables in their places, it is too large: Compose may take "
            f"{MAXIMUM_MEMORY_BYTES >> 20} MiB of memory and {MAXIMUM_SECONDS} s, and answer with "
            f"{MAXIMUM_OUTPUT_BYTES} bytes. Shorten it"
        )
    if code:
        errors = [line for line in said.splitlines() if line.strip() and "level=warning" not in line]
        raise UsageError(last_lines("\n".join(errors), 2000).removesuffix("."))
    return output, said


@cache
def _confined() -> tuple[str, ...]:
    """Returns the command prefix that confines Compose.

    Where the kernel gives this user no network namespace, as in some containers, Compose keeps this computer's network.
    It has no reason to use it: files of other computers, its only one, are switched off.
    """
    limits = {
        "data": MAXIMUM_MEMORY_BYTES,
        "cpu": MAXIMUM_SECONDS,
        "fsize": MAXIMUM_OUTPUT_BYTES,
        "nofile": 256,
        "core": 0,
    }
    root = ("--bounding-set", "-all,+dac_read_search") if os.geteuid() == 0 else ()
    rest = (
        *("prlimit", *(f"--{name}={limit}" for name, limit in limits.items()), "--"),
        *("setpriv", "--pdeathsig", "KILL", "--no-new-privs", *root, "--"),
    )
    for own in (("--net",), ("--map-current-user", "--net")):
        namespace = ("unshare", *own, "--")
        argv = [*namespace, *rest, "true"]
        tried = subprocess.run(argv, capture_output=True, env=child_environment.for_program({}), check=False)
        if tried.returncode == 0:
            return (*namespace, *rest)
    return rest


@cache
def _installed(path: str) -> Path | None:
    """Returns the operator's own Compose: a plugin of Docker's client, or a program of its own."""
    own = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "cli-plugins"
    plugins = [directory / _NAME for directory in (own, *_PLUGINS)] if shutil.which("docker", path=path) else []
    for each in (*plugins, Path(shutil.which(_NAME, path=path) or "/nonexistent")):
        if os.access(each, os.X_OK) and (version(each) or (0,)) >= LEAST_VERSION:
            return each
    return None


def version(compose: Path) -> tuple[int, ...] | None:
    """Returns the version of a Compose; None if it does not say it."""
    try:
        output, _ = run(compose, ["version", "--short"], {})
    except UsageError:
        return None
    found = re.match(rb"v?(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else None


def fetched(home: Home) -> Path:
    """Returns Debian 13's Compose, which is fetched into the home once, and kept by its hash.

    Raises:
        HostError: it cannot be fetched.
    """
    directory = home.root / "compose"
    with locked(home.locks / "compose"):
        for kept in directory.glob("[0-9a-f]" * 64):
            if kept.name == _digest(kept):
                return kept
        home.make()
        directory.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".fetching-") as scratch:
            new = _fetch(Path(scratch))
            kept = directory / _digest(new)
            write_atomically(kept, new.read_bytes(), mode=0o700)
        return kept


@cache
def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(directory: Path) -> Path:
    """Fetches Debian's package, which apt checks by the archive's signatures, and returns the program in it."""
    keys = ",".join(sorted(map(str, DEBIAN_13_KEYS.parent.glob("debian-archive-trixie-*.gpg"))))
    if not keys:
        raise _missing(f"the keys of Debian 13's archive are missing ({DEBIAN_13_KEYS})")
    lines = [line.replace("deb ", f"deb [signed-by={keys}] ", 1) for line in sources("debian-13")]
    (directory / "sources.list").write_text("\n".join(lines) + "\n")
    for name in ("lists", "archives", "tree"):
        (directory / name / "partial").mkdir(parents=True)
    options = {
        "Dir::State::Lists": f"{directory}/lists",
        "Dir::State::Status": "/dev/null",
        "Dir::Cache": str(directory),
        "Dir::Etc::SourceList": f"{directory}/sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Acquire::Languages": "none",
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "--quiet", *(f"--option={name}={value}" for name, value in options.items())]
    _run([*apt, "--error-on=any", "update"], directory)
    _run([*apt, "download", _NAME], directory)
    _run(["dpkg-deb", "--extract", *map(str, directory.glob("*.deb")), f"{directory}/tree"], directory)
    return directory / "tree/usr/libexec/docker/cli-plugins" / _NAME


def _run(argv: list[str], directory: Path) -> None:
    try:
        subprocess.run(
            argv, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=child_environment.for_download(os.environ) | {"LC_ALL": "C"}, timeout=_FETCH_SECONDS, check=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise _missing(f"{argv[0]} is not installed") from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise _missing(f"{argv[0]} failed", (error.output or b"").decode(errors="replace")) from error


def _missing(why: str, details: str = "") -> HostError:
    return HostError(
        f"Compose files are read by Docker Compose. There is none of {'.'.join(map(str, LEAST_VERSION))} or later on "
        f"PATH, and Debian 13's could not be fetched: {why}.",
        hint="Install Docker's plugin docker-compose-plugin, or Debian's packages apt and debian-archive-keyring.",
        details=last_lines(details, 4000) if details else None,
    )


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
# What Compose reads on this computer: files of variables, which go into containers, and other compose files.
_OF_VARIABLES = frozenset({"env_file", "label_file"})
_READS = frozenset({"extends", "include", *_OF_VARIABLES})
# The samples of a process mostly name the same file: one finds Compose and asks it, and the others wait for its answer.
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
        UsageError: the file cannot be read, has no services, or names files that it may not.
    """
    if isinstance(given, ComposeConfig):
        return _of_model(given)
    path = Path(given).absolute()
    if not path.is_file():
        raise UsageError(f"{path} does not exist, or is no file.")
    if is_dockerfile(given):
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
    """Reads a compose file and all files that Compose reads for it, and refuses those that no file may name.

    Raises:
        UsageError: a file is named by an absolute path, by variables or through a link; or a compose file is not valid.
    """
    texts, sha, left = Texts(), hashlib.sha256(), _MOST_CHARACTERS
    waiting, bases = [(first, "include")], [first.parent]
    for path, key in waiting:
        said = text if path == first else _text(path)
        left -= len(said)
        if left < 0 or len(waiting) > _MOST_FILES:
            raise UsageError(
                f"{first} names more than {_MOST_FILES} files or {_MOST_CHARACTERS >> 20} MiB. Name fewer."
            )
        sha.update(f"{path}\0{said}\0".encode())
        if key in _OF_VARIABLES:
            continue
        texts.words.update(_WORD.findall(said))
        if key == ".env":
            continue
        value = document if path == first else strict_yaml.load(said.encode(), str(path), plain=True)
        texts.services |= {name: each for name, each in _services(value).items() if name not in texts.services}
        words = {word for each in _values(value) if isinstance(each, str) for word in _PATH.findall(each)}
        relative = {word for word in words if not word.startswith(("/", "~"))}
        texts.paths.update(os.path.normpath(path.parent / word) for word in relative)
        named = [(key, _checked(path, key, name)) for key, name in _reads(value)]
        directories = [path.parent / name for key, name in named if key == "project_directory"]
        bases = list(dict.fromkeys([*bases, path.parent, *directories]))
        for key, name in [*named, (".env", ".env")]:
            found = (_file(base, name, first.parent) for base in bases if key != "project_directory")
            waiting += [(each, key) for each in found if each and (each, key) not in waiting]
    texts.digest = sha.hexdigest()
    return texts


def _reads(value: object) -> Iterator[tuple[str, str]]:
    """Yields what Compose reads for a part of a compose file, wherever it stands: the keys, and the names."""
    if isinstance(value, dict):
        for key in _READS & value.keys():
            for item in value[key] if isinstance(value[key], list) else [value[key]]:
                given = item if isinstance(item, dict) else {} if key == "extends" else {"path": item}
                names = {key: given.get("file" if key == "extends" else "path")}
                if key == "include":
                    names["project_directory"] = given.get("project_directory")
                yield from ((of, text) for of, each in names.items() for text in _values(each) if isinstance(text, str))
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _reads(each)


def _checked(path: Path, key: str, name: str) -> str:
    """Returns the name of a file that Compose reads, with the operator's variables in their places."""
    full = name if key in _OF_VARIABLES or METADATA in name else os.path.expandvars(name)
    if name.startswith(("/", "~")) or "$" in full:
        raise UsageError(
            f"{path}: {key}: {shown(name)} may lead to any file here: write a relative path, without variables."
        )
    return full


def _file(base: Path, name: str, directory: Path) -> Path | None:
    """Returns the path of a file that Compose may read; None if there is none.

    Raises:
        UsageError: a link leads to it from the eval's directory, or it is no file on a disk.
    """
    path = Path(os.path.normpath(base / name))
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file() raises an error for a name that is too long
        if os.path.exists(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112 - a FIFO would keep Compose waiting
            raise UsageError(f"{path} is neither a file nor a directory.")
        return None
    real, written = Path(os.path.realpath(path)), Path(os.path.normpath(Path(os.path.realpath(base)) / name))
    if real != written and not real.is_relative_to(os.path.realpath(directory)):
        raise UsageError(f"{path} is a link that leads out of {directory}: copy the file.")
    if real.parts[1:2] in (("proc",), ("sys",), ("dev",)):
        raise UsageError(f"{path} is no file of an eval's: name another.")
    return path


def _text(path: Path) -> str:
    """Returns what a file says; nothing if it cannot be read, or is too large for Compose."""
    with suppress(OSError), path.open("rb") as file:
        data = file.read(MAXIMUM_BYTES + 1)
        return data.decode(errors="replace") if len(data) <= MAXIMUM_BYTES else ""
    return ""


def _services(document: object) -> dict[str, Any]:
    services = document.get("services") if isinstance(document, dict) else None
    return (
        {name: each for name, each in services.items() if isinstance(each, dict)} if isinstance(services, dict) else {}
    )


def resolve(file: ComposeFile, metadata: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Resolves a file with Compose: variables of `.env`, this process and the sample, other files, and short forms.

    Args:
        metadata: the sample's, by the names that references have.

    Returns:
        the canonical form of the file (https://docs.docker.com/reference/compose-file), and the names of the variables
        that are not set, and stand for nothing.

    Raises:
        UsageError: Compose finds it wrong, or metadata are missing.
        HostError: there is no Compose.
    """
    if not file.texts:
        return dict(file.document), ()
    words = {*file.texts.words, "HOME"}
    given = {METADATA + name: encodable(value) for name, value in metadata.items() if METADATA + name in words}
    variables = {name: value for name, value in os.environ.items() if name in words and not name.startswith(METADATA)}
    text = b"" if file.path else json.dumps(file.document).encode()
    argv = ("--project-name", PROJECT, "--project-directory", str(file.directory), "--file", str(file.path or "-"))
    try:
        with _lock:
            compose = program(Home.default())
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
    return document, unset


@lru_cache(maxsize=64)
def _answer(
    compose: Path, argv: tuple[str, ...], variables: tuple[tuple[str, str], ...], text: bytes, digest: str
) -> tuple[bytes, str]:  # `digest` is a key of the cache only
    return run(compose, [*argv, "config", "--format", "json"], dict(variables), text)


def _values(value: object) -> Iterator[object]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from _values(item)
