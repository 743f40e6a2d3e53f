"""Translates a compose file into what our machine's own Docker Engine is given, and names what cannot be carried over.

The engine and its Compose do the work, in the machine. What changes here is only what leads out of the file: images
that are built before there is a sample, and files of this computer.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inspect_ai.util import ComposeBuild, ComposeConfig, ComposeHealthcheck, ComposeService
from pydantic import BaseModel, ValidationError

from provisioner.errors import UsageError
from provisioner.family.files import MAXIMUM_TOTAL_BYTES
from provisioner.inspect.compose import EXTENSION, MAXIMUM_BYTES, ComposeFile, Room, interpolated, strings, variables_in
from provisioner.validation import lines_of, listed, shown

# Compose names the images that it builds after it.
PROJECT = "sandbox"
# Where the machine has what was copied, and what Compose reads.
DIRECTORY = "/opt/sandbox"

# Keys beside those of Inspect's models which mean the same to an engine in a machine.
_TOP = frozenset({"name", "version"})
_SERVICE = frozenset(
    {
        *("annotations", "cpu_period", "cpu_quota", "cpu_shares", "cpuset", "dns", "dns_opt", "dns_search"),
        *("domainname", "group_add", "ipc", "labels", "links", "mac_address", "oom_kill_disable", "oom_score_adj"),
        *("logging", "pid", "stop_signal", "sysctls"),
    }
)
_INSIDE_SERVICE: dict[str, tuple[type[BaseModel], frozenset[str]]] = {
    "build": (
        ComposeBuild,
        frozenset({"args", "dockerfile_inline", "extra_hosts", "labels", "network", "shm_size", "target"}),
    ),
    "healthcheck": (ComposeHealthcheck, frozenset({"disable"})),
}
_NETWORK = frozenset({"attachable", "driver", "driver_opts", "enable_ipv6", "internal", "ipam", "labels", "name"})
_VOLUME = frozenset({"driver", "labels", "name"})
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,99}")
# As Docker reads sizes (docker/go-units, RAMInBytes): 512m, 512MB, 512MiB, 2 Gi, 1t, or bytes.
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# A line of a file of variables, as Compose reads it. Without a value, the variable is that of its own environment.
_ENV_LINE = re.compile(r"(?:export\s+)?(?P<name>[\w.\-\[\]]+)\s*(?:[=:]\s*(?P<value>.*))?", re.ASCII)
_QUOTED = re.compile(r"""'[^']*'|"(?P<expanded>(?:[^"\\]|\\.)*)\"""")
_DRIVE_OR_PATH = re.compile(r"[./~]")
# The engine's own socket: as on any Docker host, a container that has it controls the machine.
_SOCKETS = ("/var/run/docker.sock", "/run/docker.sock")

# For Debian, its engine and Compose; and for a service whose file says no limit.
_BASE_MEMORY_GIB = 1.0
# Java takes a quarter of the machine for its heap, and nearly as much beside it.
_MEMORY_GIB = 1.0
_LEAST_MEMORY_GIB = 2.0
# As a machine of a configuration may have.
_MOST_CPUS, _MOST_MEMORY_GIB = 1024, 65536
# What an entry of a directory takes in an archive beside its contents, and more.
_ENTRY_BYTES = 1 << 12


@dataclass(frozen=True)
class Project:
    """What a machine with a Docker Engine is given.

    Args:
        services: the names of the services, the default first.
        build: the compose file by which images are built and pulled, as JSON.
        run: the compose file by which a sample's containers start, as JSON.
        images: the images that have to be there before a sample starts, and are not built.
        local: those of them that come from archives alone.
        sources: names in DIRECTORY, and the files or directories here that are copied to them.
        copied_bytes: the size of the copies.
        dockerfiles: the text of all Dockerfiles.
        cpus, memory_gb: the least that the machine has; memory in GiB.
        online: the services that would reach the internet in Docker.
        notes: what the file's author may not expect.
    """

    services: tuple[str, ...]
    build: str
    run: str
    images: tuple[str, ...]
    local: frozenset[str]
    sources: tuple[tuple[str, str], ...]
    copied_bytes: int
    dockerfiles: str
    cpus: float
    memory_gb: float
    online: tuple[str, ...]
    notes: tuple[str, ...] = ()


def translated(file: ComposeFile, variables: Mapping[str, str]) -> Project:
    """Translates a compose file.

    Args:
        variables: those that Compose replaces in it.

    Raises:
        UsageError: it is not valid, or says what cannot be carried over; the message has one line per key.
    """
    document = {key: value for key, value in file.document.items() if key != EXTENSION}
    room = Room()
    replaced = interpolated(document, variables, room=room)
    translation = _Translation(file, variables, room)
    try:
        project = translation.project(replaced)
    except ValidationError as error:
        # Our own lines are about keys that Inspect's models do not know, or know.
        translation.problems += lines_of(error)
    if translation.problems:
        raise UsageError(f"{file.where} cannot be carried over to a machine:{listed(translation.problems)}")
    return project


@dataclass
class _Translation:
    """Translates one file, and collects what is wrong with it.

    Args:
        file: the file.
        variables: as for translated.
        room: what counts the characters of the result.
        problems: lines of the form `path.of.keys: problem`.
        sources: names in DIRECTORY, by what is copied to them and its kind: contexts are removed once they are built.
    """

    file: ComposeFile
    variables: Mapping[str, str]
    room: Room
    problems: list[str] = field(default_factory=list)
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    copied_bytes: int = 0
    dockerfiles: list[str] = field(default_factory=list)

    def project(self, document: dict[str, Any]) -> Project:
        """Returns the project, of use only if there are no problems.

        Raises:
            ValidationError: Inspect's models refuse a value.
        """
        self._refuse_unknown("", document, ComposeConfig, _TOP)
        services = {name: value if isinstance(value, dict) else {} for name, value in document["services"].items()}
        for name, service in services.items():
            if not _NAME.fullmatch(name):
                self._refuse(f"services.{shown(name)}", "a service's name has up to 100 letters, digits, ., _ and -")
            self._refuse_unknown(f"services.{name}", service, ComposeService, _SERVICE)
            for key, (model, more) in _INSIDE_SERVICE.items():
                if isinstance(value := service.get(key), dict):
                    self._refuse_unknown(f"services.{name}.{key}", value, model, more)
        if self.problems:
            return _nothing()
        config = ComposeConfig.model_validate(_known(document, services))
        self._networks(document.get("networks") or {})
        self._volumes(document.get("volumes") or {})
        for name in services:
            self._service(f"services.{name}", config.services[name], services[name], document)
        return self._translated(document, services, config)

    def _translated(self, document: dict[str, Any], services: dict[str, Any], config: ComposeConfig) -> Project:
        builds = {name: self._build(name, services[name]) for name, each in config.services.items() if each.build}
        built = {each["image"] for each in builds.values()}
        used = {name: each.image or builds.get(name, {}).get("image", "") for name, each in config.services.items()}
        runs = {name: self._run(name, service, used[name]) for name, service in services.items()}
        kept = {key: document[key] for key in ("networks", "volumes") if document.get(key)}
        local = {used[name] for name, service in services.items() if service.get("x-local")} - built
        return Project(
            services=_ordered(config),
            build=_json({"name": PROJECT, "services": builds}),
            run=_json({"name": PROJECT, "services": runs, **kept}),
            images=tuple(dict.fromkeys(image for image in used.values() if image not in built)),
            local=frozenset(local),
            sources=tuple((name, source) for (_, source), name in self.sources.items()),
            copied_bytes=self.copied_bytes,
            dockerfiles="\n".join(self.dockerfiles),
            cpus=max([1.0, *(self._cpus(name, each) for name, each in config.services.items())]),
            memory_gb=max(
                _LEAST_MEMORY_GIB,
                _BASE_MEMORY_GIB + sum(self._memory_gib(name, each) for name, each in config.services.items()),
            ),
            online=tuple(name for name, each in config.services.items() if _is_online(each, document)),
        )

    def _refuse(self, where: str, why: str) -> None:
        self.problems.append(f"{where}: {why}")

    def _refuse_unknown(
        self, where: str, value: Mapping[str, Any], model: type[BaseModel] | None, more: Iterable[str]
    ) -> None:
        known = {*more, *(info.alias or name for name, info in (model.model_fields if model else {}).items())}
        for key in value:
            if key not in known and not key.startswith("x-"):
                self._refuse(f"{where}.{shown(key)[1:-1]}".lstrip("."), _WHY.get(key, _NOT_CARRIED))

    def _networks(self, networks: Mapping[str, Any]) -> None:
        for name, network in networks.items():
            where = f"networks.{name}"
            self._refuse_unknown(where, network or {}, None, _NETWORK)
            if (driver := (network or {}).get("driver", "bridge")) not in ("bridge", "default"):
                self._refuse(f"{where}.driver", f"{shown(driver)} leads out of the machine; use bridge")

    def _volumes(self, volumes: Mapping[str, Any]) -> None:
        for name, volume in volumes.items():
            where = f"volumes.{name}"
            self._refuse_unknown(where, volume or {}, None, _VOLUME)
            if (driver := (volume or {}).get("driver", "local")) != "local":
                self._refuse(f"{where}.driver", f"{shown(driver)} leads out of the machine; use local")

    def _service(self, where: str, service: ComposeService, raw: dict[str, Any], document: dict[str, Any]) -> None:
        for key, why in _wrong(service):
            self._refuse(f"{where}.{key}".rstrip("."), why)
        self._references(where, service, raw, document)

    def _references(self, where: str, service: ComposeService, raw: dict[str, Any], document: dict[str, Any]) -> None:
        """Refuses names of what is not in the file, before Compose does so in a machine.

        Args:
            raw: the service as the file has it.
        """
        services, volumes = document["services"], document.get("volumes") or {}
        networks = {"default": {}, **(document.get("networks") or {})}
        links = [each.partition(":")[0] for each in _texts_of(raw.get("links"))]
        self._require_known(f"{where}.depends_on", service.depends_on or (), services, "services")
        self._require_known(f"{where}.networks", service.networks or (), networks, "networks")
        self._require_known(f"{where}.links", links, services, "services")
        self._require_known(f"{where}.volumes", _named_volumes(raw.get("volumes")), volumes, "volumes")
        for key in ("network_mode", "ipc", "pid"):
            kind, colon, name = str(raw.get(key) or "").partition(":")
            if colon and kind == "service":
                self._require_known(f"{where}.{key}", [name], services, "services")

    def _require_known(self, where: str, names: Iterable[str], known: Container[str], what: str) -> None:
        for name in names:
            if name not in known:
                self._refuse(where, f"{shown(name)} is not one of the file's {what}")

    def _build(self, name: str, raw: dict[str, Any]) -> dict[str, Any]:
        """Returns the part of a service by which its image is built."""
        where = f"services.{name}.build"
        given = raw["build"]
        build: dict[str, Any] = {"context": given} if isinstance(given, str) else dict(given)
        context = str(build.get("context") or ".")
        image = raw.get("image") or f"{PROJECT}-{name}"
        if "://" in context or context.startswith(("git@", "github.com/")):
            self._refuse(f"{where}.context", "it must be a directory here: clone what lies elsewhere")
            return {"image": image}
        source = self._path(f"{where}.context", context)
        if not source.is_dir():
            self._refuse(f"{where}.context", f"{source} is no directory")
            return {"image": image}
        if "dockerfile_inline" in build:
            self.dockerfiles.append(str(build["dockerfile_inline"]))
        else:
            given = str(build.get("dockerfile") or "Dockerfile")
            self._dockerfile(where, source, given)
            if Path(given).is_absolute():
                build["dockerfile"] = os.path.relpath(given, source)
        for key in ("args", "labels"):
            if key in build:
                build[key] = self._resolved(f"{where}.{key}", build[key])
        build["context"] = self._copied(f"{where}.context", source, "context")
        # The builder keeps nothing, and pulls each image that it does not have.
        for key in ("no_cache", "pull"):
            build.pop(key, None)
        return {"image": image, "build": _without_extensions(build)}

    def _dockerfile(self, where: str, context: Path, name: str) -> None:
        path = Path(os.path.normpath(context / name))
        if not path.is_relative_to(context):
            self._refuse(f"{where}.dockerfile", f"it must lie in the build's context {context}")
            return
        self.dockerfiles.append(self._text(f"{where}.dockerfile", path))

    def _text(self, where: str, path: Path) -> str:
        """Returns what a file says, and refuses one that cannot be read or is too large."""
        try:
            with path.open("rb") as file:
                data = file.read(MAXIMUM_BYTES + 1)
        except OSError as error:
            self._refuse(where, f"{path} cannot be read: {error.strerror}")
            return ""
        if len(data) > MAXIMUM_BYTES:
            self._refuse(where, f"{path} is larger than {MAXIMUM_BYTES >> 20} MiB")
            return ""
        return data.decode(errors="replace")

    def _run(self, name: str, raw: dict[str, Any], image: str) -> dict[str, Any]:
        """Returns a service as a sample's machine starts it."""
        where = f"services.{name}"
        run = {key: value for key, value in _without_extensions(raw).items() if key not in ("build", "pull_policy")}
        run["image"] = image
        if "environment" in run:
            run["environment"] = self._resolved(f"{where}.environment", run["environment"])
        if files := run.get("env_file"):
            listed_files = [files] if isinstance(files, str) else files
            known: set[str] = set()
            own = set(run.get("environment", ()))
            run["env_file"] = [self._env_file(f"{where}.env_file", each, known, own) for each in listed_files]
        if volumes := run.get("volumes"):
            run["volumes"] = [self._volume(f"{where}.volumes.{number}", each) for number, each in enumerate(volumes)]
        return run

    def _volume(self, where: str, given: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(given, str):
            source, colon, rest = given.partition(":")
            if not colon or not _DRIVE_OR_PATH.match(source):
                return given  # a volume of the engine's own
            return f"{self._file(where, source)}:{rest}"
        kind = given.get("type")
        if kind == "bind":
            return {**given, "source": self._file(f"{where}.source", str(given.get("source") or ""))}
        if kind not in ("volume", "tmpfs"):
            self._refuse(f"{where}.type", f"{shown(kind)} cannot be carried over: use bind, volume or tmpfs")
        return given

    def _file(self, where: str, given: str) -> str:
        """Returns where the machine has a copy of a file or directory of this computer's."""
        if given in _SOCKETS:
            return given
        path = self._path(where, given)
        if path.is_file() or path.is_dir():
            return self._copied(where, path, "files")
        self._refuse(where, f"{path} is no file or directory")
        return given

    def _env_file(self, where: str, given: str, known: set[str], own: set[str]) -> str:
        """Returns where the machine has a copy of a file of variables; Compose there has none of this computer's.

        Args:
            known: the variables of the service's files so far; those of this one are added.
            own: those that the service has from `environment`.
        """
        problems = len(self.problems)
        copy = self._file(where, given)
        if len(self.problems) == problems:
            path = self.file.directory / Path(given).expanduser()
            for name in _taken(self._text(where, path), self.variables, known, own):
                self._refuse(
                    where, f"{path} takes {name} from this computer: write its value, or move it to environment"
                )
        return copy

    def _path(self, where: str, given: str) -> Path:
        """Returns the absolute path, and refuses one outside of the file's directory: it may be a host's own.

        A relative one may lead there if its author wrote it so, and no variable.
        """
        path = Path(os.path.normpath(self.file.directory / Path(given).expanduser()))
        inside = path.is_relative_to(self.file.directory)
        is_written = given in {part for text in strings(self.file.document) for part in (text, text.partition(":")[0])}
        if not inside and (Path(given).is_absolute() or given.startswith("~") or not is_written):
            self._refuse(where, f"{path} lies outside of the file's directory, and is not copied into machines")
        return path

    def _copied(self, where: str, source: Path, kind: str) -> str:
        """Returns where the machine has a copy of a file or directory, and refuses more than an image may have."""
        if (kind, str(source)) not in self.sources:
            for size in _sizes(source):
                self.copied_bytes += size
                if self.copied_bytes > MAXIMUM_TOTAL_BYTES:
                    self._refuse(where, f"with {source}, more than {MAXIMUM_TOTAL_BYTES >> 30} GiB would be copied")
                    break
        name = self.sources.setdefault((kind, str(source)), f"{kind}{len(self.sources)}")
        return f"{DIRECTORY}/{name}"

    def _resolved(self, where: str, given: list[str] | dict[str, Any]) -> dict[str, Any]:
        """Returns variables with the values of those that Compose takes from its own environment."""
        pairs = given if isinstance(given, dict) else dict(_pair(each) for each in given)
        found = {}
        for name, value in pairs.items():
            if value is None and (value := self.variables.get(name)) is not None:
                self.room.count(len(value), where)
            if value is not None:
                found[name] = value
        return found

    def _cpus(self, name: str, service: ComposeService) -> float:
        """Returns the whole cores that a service may use; 0 if it says nothing."""
        resources = service.deploy.resources if service.deploy else None
        limits = resources.limits.cpus if resources and resources.limits else None
        key, given = ("deploy.resources.limits.cpus", limits) if limits else ("cpus", service.cpus)
        try:
            cpus = float(given or 0)
        except ValueError:
            cpus = math.nan
        if not 0 <= cpus <= _MOST_CPUS:
            self._refuse(f"services.{name}.{key}", f"it must be a number from 0 to {_MOST_CPUS}, not {shown(given)}")
            return 0
        return math.ceil(cpus)

    def _memory_gib(self, name: str, service: ComposeService) -> float:
        """Returns the memory that a service may use: its limit, else what it reserves, else a default."""
        resources = service.deploy.resources if service.deploy else None
        limits = resources.limits.memory if resources and resources.limits else None
        reserved = resources.reservations.memory if resources and resources.reservations else None
        given = {
            "deploy.resources.limits.memory": limits,
            "mem_limit": service.mem_limit,
            "deploy.resources.reservations.memory": reserved,
            "mem_reservation": service.mem_reservation,
        }
        sizes = [self._gib(f"services.{name}.{key}", size) for key, size in given.items() if size]
        return next((size for size in sizes if size), _MEMORY_GIB)

    def _gib(self, where: str, given: str) -> float:
        match = _SIZE.fullmatch(given.strip())
        size = float(match[1]) * _UNITS[match[2].lower()] / (1 << 30) if match else math.nan
        if not 0 <= size <= _MOST_MEMORY_GIB:
            self._refuse(where, f"it must be a size such as 512m or 2g, up to {_MOST_MEMORY_GIB}g, not {shown(given)}")
            return 0
        return size


_NOT_CARRIED = "unknown, or not carried over to a machine"
_WHY = {
    "container_name": "remove it: Inspect's docker sandbox refuses it, too",
    "external": "there is nothing outside of the sample's machine",
    "extends": "write the service out",
    "include": "write the services out",
    "secrets": "use a volume or environment",
    "configs": "use a volume",
    "profiles": "remove the service, or this key",
    "gpus": "a machine has no GPUs of this computer",
    "additional_contexts": "copy what it names into the context",
    "driver_opts": "the engine's volumes lie on the machine's own disk",
}


def _wrong(service: ComposeService) -> Iterator[tuple[str, str]]:
    """Returns the keys of a service, and why each cannot be carried over."""
    resources = service.deploy.resources if service.deploy else None
    reservations = resources.reservations if resources else None
    platforms = (None, "linux", "linux/amd64", "linux/x86_64")
    profiles = [each.partition("=")[2] for each in _options(service) if each.startswith("seccomp=")]
    ports = [str(number) for number, port in enumerate(service.ports or []) if _takes_ssh(str(port))]
    checks = (
        ("", not service.image and not service.build, "needs `image` or `build`"),
        ("devices", bool(service.devices), "a machine has none of this computer's devices"),
        ("runtime", service.runtime not in (None, "runc"), "the machine's engine has runc alone"),
        ("platform", service.platform not in platforms, "machines are linux/amd64"),
        (
            "network_mode",
            (service.network_mode or "").startswith("container:"),
            "name a service of the file: service:NAME",
        ),
        (
            "deploy.resources.reservations.devices",
            bool(reservations and reservations.devices),
            "a machine has no such devices, such as GPUs",
        ),
        (
            "security_opt",
            any(profile not in ("unconfined", "builtin") for profile in profiles),
            "a seccomp profile of your own cannot be carried over",
        ),
        (f"ports.{''.join(ports[:1])}", bool(ports), "the machine's own SSH server has port 22; publish another"),
    )
    return ((key, why) for key, is_wrong, why in checks if is_wrong)


def _options(service: ComposeService) -> list[str]:
    return [option.replace(":", "=", 1) for option in service.security_opt or []]


def _nothing() -> Project:
    return Project((), "", "", (), frozenset(), (), 0, "", 1, 1, ())


def _known(document: dict[str, Any], services: dict[str, Any]) -> dict[str, Any]:
    """Returns what Inspect's models check: a document without the keys that they do not know, all values as text."""
    known = {}
    for name, service in services.items():
        known[name] = {key: value for key, value in service.items() if key not in _SERVICE}
        for key, (_, more) in _INSIDE_SERVICE.items():
            if isinstance(value := service.get(key), dict):
                known[name][key] = {each: value[each] for each in value if each not in more}
    top = {key: value for key, value in document.items() if key not in _TOP}
    return {key: _texts(value) for key, value in {**top, "services": known}.items()}


def _texts(value: Any) -> Any:
    """Returns a value with text for each number and truth value: Compose takes `PORT: 80`, Inspect's models do not."""
    if isinstance(value, dict):
        return {key: _texts(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_texts(each) for each in value]
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _ordered(config: ComposeConfig) -> tuple[str, ...]:
    """Returns the services' names, that of the default first: marked so, or called default, or the first."""
    marked = [name for name, service in config.services.items() if service.x_default]
    named = ["default"] if "default" in config.services else []
    return tuple(dict.fromkeys([*marked[-1:], *(named if not marked else []), *config.services]))


def _sizes(source: Path) -> Iterator[int]:
    """Returns about how many bytes each entry of a file or directory takes in an archive. Links count as links."""
    if source.is_file():
        yield source.stat().st_size
    for directory, directories, names in os.walk(source):
        for name in (*directories, *names):
            with contextlib.suppress(OSError):  # the copy says so
                yield _ENTRY_BYTES + Path(directory, name).lstat().st_size


def _is_online(service: ComposeService, document: Mapping[str, Any]) -> bool:
    """Returns whether a service would reach the internet in Docker."""
    if service.network_mode:
        return service.network_mode != "none" and not service.network_mode.startswith("service:")
    networks = document.get("networks") or {}
    return not all((networks.get(name) or {}).get("internal") for name in service.networks or ["default"])


def _published(port: str) -> str:
    """Returns the port of the host in Compose's short form [IP:][HOST:]CONTAINER[/PROTOCOL]; empty if there is none."""
    return port.partition("/")[0].rpartition(":")[0].rpartition(":")[2]


def _takes_ssh(port: str) -> bool:
    """Returns whether a port, or a range that is published as a whole, takes that of the machine's own SSH server."""
    published = _PORTS.fullmatch(_published(port))
    if not published or (published[2] and "-" not in port.rpartition(":")[2]):  # the engine chooses one of the range
        return False
    return int(published[1]) <= 22 <= int(published[2] or published[1])


def _texts_of(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _named_volumes(volumes: object) -> Iterator[str]:
    """Returns the names of the file's volumes that a service mounts, in Compose's short or long form."""
    for each in volumes if isinstance(volumes, list) else []:
        if isinstance(each, dict):
            if each.get("type") == "volume" and each.get("source"):
                yield str(each["source"])
        elif (parts := str(each).partition(":"))[1] and not _DRIVE_OR_PATH.match(parts[0]):
            yield parts[0]


def _taken(text: str, variables: Mapping[str, str], known: set[str], own: set[str]) -> list[str]:
    """Returns those of the variables that a file of variables surely takes from Compose's environment.

    Args:
        known, own: as for _env_file.
    """
    taken: list[str] = []
    for line in map(str.strip, text.removeprefix("\ufeff").split("\n")):
        if not line or line.startswith("#"):
            continue
        match = _ENV_LINE.fullmatch(line)
        if not match:
            break
        if (value := match["value"]) is None:
            taken += {match["name"]} & variables.keys() - known - own
            continue
        quoted = _QUOTED.match(value)
        if value.startswith(("'", '"')) and not quoted:
            break  # what follows is the rest of the value
        expanded = re.sub(r"\\.", "", quoted["expanded"] or "") if quoted else re.split(r"\s#", value)[0]
        taken += sorted(variables_in(expanded) & variables.keys() - known)
        known.add(match["name"])
    return list(dict.fromkeys(taken))


def _pair(given: str) -> tuple[str, str | None]:
    name, sign, value = given.partition("=")
    return name, value if sign else None


def _without_extensions(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if not key.startswith("x-")}


def _json(value: object) -> str:
    """Returns a compose file, in which all variables are replaced already: Compose would replace them again."""
    return json.dumps(_escaped(value), sort_keys=True)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in value]
    return {key: _escaped(each) for key, each in value.items()} if isinstance(value, dict) else value
