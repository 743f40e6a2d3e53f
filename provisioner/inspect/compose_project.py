"""Translates a resolved compose file into what a machine's own Docker Engine is given, and names what cannot be.

The engine and its Compose do the work, in the machine. What changes here is only what leads out of the file: images
that are built before there is a sample, and files of this computer.
"""

from __future__ import annotations

import contextlib
import graphlib
import ipaddress
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provisioner.base.errors import UsageError
from provisioner.base.validation import listed, shown
from provisioner.family.files import MAXIMUM_TOTAL_BYTES
from provisioner.inspect.compose import MAXIMUM_BYTES, PROJECT, ComposeFile, resolve

# Where the machine has what was copied, and what Compose reads.
DIRECTORY = "/opt/sandbox"

# The keys that mean the same to an engine in a machine, and those that nothing is left of once a file is resolved or an
# image is built. Compose has checked their values.
_TOP = frozenset({"configs", "name", "networks", "secrets", "services", "version", "volumes"})
_SERVICE = frozenset(
    {
        *("annotations", "attach", "blkio_config", "build", "cap_add", "cap_drop", "cgroup", "cgroup_parent"),
        *("command", "configs", "cpu_count", "cpu_percent", "cpu_period", "cpu_quota", "cpu_rt_period"),
        *("cpu_rt_runtime", "cpu_shares", "cpus", "cpuset", "depends_on", "deploy", "device_cgroup_rules", "devices"),
        *("dns", "dns_opt", "dns_search", "domainname", "entrypoint", "environment", "expose", "extra_hosts"),
        *("group_add", "healthcheck", "hostname", "image", "init", "ipc", "labels", "links", "logging", "mac_address"),
        *("mem_limit", "mem_reservation", "mem_swappiness", "memswap_limit", "network_mode", "networks"),
        *("oom_kill_disable", "oom_score_adj", "pid", "pids_limit", "platform", "ports", "privileged", "read_only"),
        *("restart", "runtime", "scale", "secrets", "security_opt", "shm_size", "stdin_open", "stop_grace_period"),
        *("stop_signal", "sysctls", "tmpfs", "tty", "ulimits", "user", "userns_mode", "uts", "volumes"),
        *("volumes_from", "working_dir"),
    }
)
_SPENT = frozenset({"develop", "env_file", "label_file", "profiles", "pull_policy"})
_BUILD = frozenset(
    {
        *("additional_contexts", "args", "context", "dockerfile", "dockerfile_inline", "extra_hosts", "labels"),
        *("network", "shm_size", "tags", "target", "ulimits"),
    }
)
# The builder keeps nothing, pulls each image that it does not have, and builds for its own platform.
_BUILD_SPENT = frozenset({"cache_from", "cache_to", "no_cache", "platforms", "pull"})
_NETWORK = frozenset(
    {"attachable", "driver", "driver_opts", "enable_ipv6", "external", "internal", "ipam", "labels", "name"}
)
# Those that each engine has, and makes no second time.
_ENGINES_NETWORKS = ("bridge", "host", "none")
_VOLUME = frozenset({"driver", "labels", "name"})
_PLATFORMS = (None, "linux", "linux/amd64", "linux/x86_64")
# What a machine has itself, whatever this computer has.
_DEVICES = re.compile(r"/dev/(net/tun|fuse|loop-control|loop\d+|null|zero|full|u?random|tty|ptmx|mapper/control)")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,99}")
# The engine's own socket: as on any Docker host, a container that has it controls the machine.
_SOCKETS = ("/var/run/docker.sock", "/run/docker.sock")
# Of the local cloud's machines: the card of their controller, and that of the internet.
_CONTROL, _INTERNET = ipaddress.ip_network("10.0.2.0/24"), ipaddress.ip_network("10.0.3.0/24")

# The cgroup of all containers, unless the file names another.
SLICE = "containers.slice"
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
        build: the compose file by which images are built and pulled, as JSON; services in the order of their builds.
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


def translated(file: ComposeFile, metadata: Mapping[str, str], *, has_internet: bool = False) -> Project:
    """Translates a compose file.

    Args:
        metadata: the sample's, by the names that references have.
        has_internet: whether the machine reaches any of it.

    Raises:
        UsageError: it is not valid, or says what cannot be carried over; the message has one line per key.
        HostError: there is no Compose to read it.
    """
    translation = _Translation(file, has_internet)
    project = translation.project(*resolve(file, metadata))
    if translation.problems:
        raise UsageError(f"{file.where} cannot be carried over to a machine:{listed(translation.problems)}")
    return project


@dataclass
class _Translation:
    """Translates one file, and collects what is wrong with it.

    Args:
        file: the file as it is written.
        has_internet: as for translated.
        problems: lines of the form `path.of.keys: problem`.
        sources: names in DIRECTORY, by what is copied to them and its kind: contexts are removed once they are built.
        made: names in DIRECTORY, by the directories that do not exist, and that the engine makes.
        dockerfiles: the texts of the Dockerfiles.
    """

    file: ComposeFile
    has_internet: bool
    problems: list[str] = field(default_factory=list)
    sources: dict[tuple[str, str], str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    dockerfiles: list[str] = field(default_factory=list)
    copied_bytes: int = 0

    def project(self, document: dict[str, Any], unset: tuple[str, ...]) -> Project:
        """Returns the project, of use only if there are no problems."""
        written = self.file.texts.services if self.file.texts else {}
        services = {
            name: document["services"][name]
            for name in (*written, *document["services"])
            if name in document["services"]
        }
        self._refuse_unknown("", document, _TOP)
        if not services:
            self._refuse("services", "there is none without a profile: delete `profiles` of those that the eval needs")
        kept = {
            "networks": {name: self._network(name, each or {}) for name, each in document.get("networks", {}).items()},
            "volumes": {
                name: self._named_volume(name, each or {}) for name, each in document.get("volumes", {}).items()
            },
            **{kind: self._given_files(kind, document.get(kind, {})) for kind in ("secrets", "configs")},
        }
        keys: dict[str, str] = {}
        for key, network in kept["networks"].items():
            if not network.get("external") and (other := keys.setdefault(network.get("name", key), key)) != key:
                self._refuse(f"networks.{key}.name", f"networks.{other} has the same: use that key alone")
        used = {name: each.get("image") or f"{PROJECT}-{name}" for name, each in services.items()}
        builds, needs = {}, {}
        for name, service in services.items():
            self._refuse_service(name, service)
            if "build" in service:
                builds[name], needs[name] = self._build(name, service["build"], used)
        runs = {name: self._run(name, service, used[name]) for name, service in services.items()}
        built = {used[name] for name in builds}
        marked = [name for name in services if (written.get(name) or {}).get("x-default")]
        first = [*marked[-1:], *(["default"] if not marked and "default" in services else [])]
        local = {used[name] for name in services if (written.get(name) or {}).get("x-local")} - built
        memory_gib = sum(self._memory_gib(name, each) for name, each in services.items())
        return Project(
            services=tuple(dict.fromkeys([*first, *services])),
            build=_json({"name": PROJECT, "services": {name: builds[name] for name in self._order(used, needs)}}),
            run=_json({"name": PROJECT, "services": runs, **{key: each for key, each in kept.items() if each}}),
            images=tuple(dict.fromkeys(image for image in used.values() if image not in built)),
            local=frozenset(local),
            sources=tuple((name, source) for (_, source), name in self.sources.items()),
            copied_bytes=self.copied_bytes,
            dockerfiles="\n".join([*self.dockerfiles, *sorted(set().union(*needs.values()))]),
            cpus=max([1.0, *(self._cpus(name, each) for name, each in services.items())]),
            memory_gb=max(_LEAST_MEMORY_GIB, _BASE_MEMORY_GIB + memory_gib),
            online=tuple(name for name, each in services.items() if _is_online(each, kept["networks"])),
            notes=tuple(_notes(services, document.get("networks", {}), unset)),
        )

    def _order(self, images: Mapping[str, str], needs: Mapping[str, set[str]]) -> list[str]:
        """Returns the services' names in the order of their builds: each after the images that it is made from."""
        made = {full_name(images[name]): name for name in needs}
        others = {
            name: {made[image] for image in map(full_name, each) if made.get(image, name) != name}
            for name, each in needs.items()
        }
        try:
            return list(graphlib.TopologicalSorter(others).static_order())
        except graphlib.CycleError as error:
            self._refuse("services", f"their images are made from each other: {' from '.join(error.args[1])}")
            return []

    def _refuse(self, where: str, why: str) -> None:
        self.problems.append(f"{where}: {why}")

    def _refuse_unknown(self, where: str, value: Mapping[str, Any], known: frozenset[str]) -> None:
        for key in value:
            if key not in known and not key.startswith("x-"):
                self._refuse(f"{where}.{shown(key)[1:-1]}".lstrip("."), _WHY.get(key, _NOT_CARRIED))

    def _network(self, name: str, network: dict[str, Any]) -> dict[str, Any]:
        where = f"networks.{name}"
        self._refuse_unknown(where, network, _NETWORK)
        if (driver := network.get("driver", "bridge")) not in ("bridge", "default"):
            self._refuse(f"{where}.driver", f"{shown(driver)} leads out of the machine: use bridge")
        for number, config in enumerate((network.get("ipam") or {}).get("config") or []):
            with contextlib.suppress(ValueError):  # the engine says so
                subnet = ipaddress.ip_network(config.get("subnet", ""), strict=False)
                taken = [_CONTROL, *([_INTERNET] if self.has_internet else [])]
                if hits := [each for each in taken if subnet.version == 4 and subnet.overlaps(each)]:
                    self._refuse(
                        f"{where}.ipam.config.{number}.subnet",
                        f"{subnet} overlaps {hits[0]}, the machine's own network: choose another, as 172.30.0.0/24",
                    )
        is_engines = network.get("name") in _ENGINES_NETWORKS
        if is_engines and not network.get("external"):
            self._refuse(
                f"{where}.name", f"{network['name']} is the engine's own: choose another, or add `external: true`"
            )
        return {key: value for key, value in network.items() if is_engines or key != "external"}

    def _named_volume(self, name: str, volume: dict[str, Any]) -> dict[str, Any]:
        where = f"volumes.{name}"
        on_tmpfs = (volume.get("driver_opts") or {}).get("type") == "tmpfs"
        self._refuse_unknown(where, volume, _VOLUME | ({"driver_opts"} if on_tmpfs else set()))
        if (driver := volume.get("driver", "local")) != "local":
            self._refuse(f"{where}.driver", f"{shown(driver)} leads out of the machine: use local")
        return volume

    def _given_files(self, kind: str, given: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Returns the secrets or configs of the file, each with its copy."""
        found = {}
        for name, each in given.items():
            where = f"{kind}.{name}"
            if path := each.get("file"):
                found[name] = {**each, "file": self._file(f"{where}.file", path)}
            elif "content" in each:
                found[name] = each
            else:
                self._refuse(where, "only a `file` can be carried over: write it into one")
        return found

    def _refuse_service(self, name: str, service: dict[str, Any]) -> None:
        where = f"services.{name}"
        if not _NAME.fullmatch(name):
            self._refuse(f"services.{shown(name)}", "a service's name has up to 100 letters, digits, ., _ and -")
        self._refuse_unknown(where, service, _SERVICE | _SPENT)
        for key, why in _wrong(service):
            self._refuse(f"{where}.{key}", why)

    def _build(self, name: str, given: dict[str, Any], used: Mapping[str, str]) -> tuple[dict[str, Any], set[str]]:
        """Returns the part of a service by which its image is built, and the images that it is made from."""
        where = f"services.{name}.build"
        self._refuse_unknown(where, given, _BUILD | _BUILD_SPENT)
        build = {key: value for key, value in given.items() if key in _BUILD}
        contexts = {
            key: self._context(f"{where}.additional_contexts.{key}", value, used)
            for key, value in (given.get("additional_contexts") or {}).items()
        }
        if contexts:
            build["additional_contexts"] = contexts
        context = str(given.get("context") or "")
        build["context"] = self._context(f"{where}.context", context, {})
        text = given.get("dockerfile_inline")
        if text is None:
            path = Path(os.path.normpath(Path(context, given.get("dockerfile") or "Dockerfile")))
            inside = path.is_relative_to(context)
            # What lies in a context that is copied may be read, wherever that is.
            is_taken = build["context"] != context if inside else self._path(f"{where}.dockerfile", str(path))
            text = self._text(f"{where}.dockerfile", path) if is_taken else ""
            build["dockerfile"] = (
                os.path.relpath(path, context) if inside else self._copied(f"{where}.dockerfile", path, "context")
            )
        self.dockerfiles.append(text)
        return {"image": used[name], "build": build}, bases(
            text, given.get("args") or {}, contexts, given.get("target") or ""
        )

    def _context(self, where: str, given: str, used: Mapping[str, str]) -> str:
        """Returns where the machine has a build's context, or the image that is one."""
        kind, colon, rest = given.partition(":")
        if colon and kind == "service" and rest in used:
            return f"docker-image://{used[rest]}"
        if given.startswith("docker-image://"):
            return given
        if not given.startswith("/"):
            self._refuse(where, "it must be a directory here: clone what lies elsewhere")
            return given
        source = self._path(where, given)
        if source and not source.is_dir():
            self._refuse(where, f"{source} is no directory")
            source = None
        return self._copied(where, source, "context") if source else given

    def _text(self, where: str, path: Path) -> str:
        """Returns what a Dockerfile says, and refuses one that cannot be read or is too large."""
        if not path.is_file():  # a FIFO would keep the reader waiting
            self._refuse(where, f"{path} does not exist, or is no file")
            return ""
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

    def _run(self, name: str, given: dict[str, Any], image: str) -> dict[str, Any]:
        """Returns a service as a sample's machine starts it."""
        where = f"services.{name}"
        gone = _SPENT | {"build"}
        # Compose writes null for what the file does not say, and for variables that are not set.
        run = {key: value for key, value in _said(given).items() if key not in gone and not key.startswith("x-")}
        run["image"] = image
        run.setdefault("cgroup_parent", SLICE)
        if "environment" in run:
            run["environment"] = _said(run["environment"])
        if volumes := run.get("volumes"):
            run["volumes"] = [self._volume(f"{where}.volumes.{number}", each) for number, each in enumerate(volumes)]
        return run

    def _volume(self, where: str, given: dict[str, Any]) -> dict[str, Any]:
        kind = given.get("type")
        if kind == "bind":
            makes = bool((given.get("bind") or {}).get("create_host_path"))
            return {**given, "source": self._file(where, given.get("source") or "", makes=makes)}
        if kind not in ("volume", "tmpfs"):
            self._refuse(f"{where}.type", f"{shown(kind)} cannot be carried over: use bind, volume or tmpfs")
        return given

    def _file(self, where: str, given: str, *, makes: bool = False) -> str:
        """Returns where the machine has a copy of a file or directory of this computer's."""
        if given in _SOCKETS:
            return given
        path = self._path(where, given)
        if not path:
            return given
        if path.is_file() or path.is_dir():
            return self._copied(where, path, "files")
        if makes and not path.exists():
            return f"{DIRECTORY}/{self.made.setdefault(str(path), f'new{len(self.made)}')}"
        self._refuse(where, f"{path} is no file or directory")
        return given

    def _path(self, where: str, given: str) -> Path | None:
        """Returns the path, and refuses one outside of the file's directory: it may be a host's own.

        A relative one may lead there if its author wrote it so, and no variable or link.
        """
        path, directory = Path(os.path.normpath(given)), self.file.directory
        written = self.file.texts.paths if self.file.texts else set()
        if path.is_relative_to(directory) or str(path) in written:
            real, root = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
            unlinked = Path(os.path.normpath(root / os.path.relpath(path, directory)))
            if real in (path, unlinked) or real.is_relative_to(root):
                return path
            self._refuse(where, f"{path} is a link that leads out of the file's directory: copy what it leads to")
            return None
        self._refuse(
            where, f"{path} lies outside of the file's directory, and is not copied: name it by a relative path"
        )
        return None

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

    def _cpus(self, name: str, service: dict[str, Any]) -> float:
        """Returns the whole cores that a service may use; 0 if it says nothing."""
        limit = _resources(service, "limits").get("cpus")
        key, given = ("deploy.resources.limits.cpus", limit) if limit else ("cpus", service.get("cpus"))
        return math.ceil(self._number(f"services.{name}.{key}", given or 0, _MOST_CPUS, "cores"))

    def _memory_gib(self, name: str, service: dict[str, Any]) -> float:
        """Returns the memory that a service may use: its limit, else what it reserves, else a default."""
        given = {
            "deploy.resources.limits.memory": _resources(service, "limits").get("memory"),
            "mem_limit": service.get("mem_limit"),
            "deploy.resources.reservations.memory": _resources(service, "reservations").get("memory"),
            "mem_reservation": service.get("mem_reservation"),
        }
        most = _MOST_MEMORY_GIB << 30
        sizes = [self._number(f"services.{name}.{key}", each, most, "bytes") for key, each in given.items() if each]
        return next((size / (1 << 30) for size in sizes if size), _MEMORY_GIB)

    def _number(self, where: str, given: object, most: int, unit: str) -> float:
        number = float(str(given))  # Compose writes sizes as text, in bytes
        if 0 <= number <= most:
            return number
        self._refuse(where, f"it must be from 0 to {most} {unit}, not {shown(given)}")
        return 0


_NOT_CARRIED = "has no meaning in a machine, or is unknown here: delete it"
_NO_GPU = "a sample's machine has no GPU: delete it, or run this eval in Docker"
_WHY = {
    "container_name": "delete the line: Inspect's docker sandbox refuses it, too",
    "external": "delete the line: there is nothing outside of the sample's machine",
    "gpus": _NO_GPU,
    "driver_opts": "delete it: the engine's volumes lie on the machine's own disk",
    "external_links": "delete it: there is nothing outside of the sample's machine",
    "secrets": "delete it, and use `args` or a file of the context: no build here has secrets",
    "ssh": "delete it, and clone what it is for into the context",
}


def _wrong(service: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Returns the keys of a service whose values cannot be carried over, and why."""
    options = [option.replace(":", "=", 1) for option in service.get("security_opt") or []]
    profiles = [option.partition("=")[2] for option in options if option.startswith("seccomp=")]
    copies = [service.get("scale", 1), (service.get("deploy") or {}).get("replicas", 1)]
    platforms = (service.get("build") or {}).get("platforms") or [None]
    ports = [number for number, port in enumerate(service.get("ports") or []) if _takes_ssh(port)]
    devices = [
        each["source"] if isinstance(each, dict) else each.split(":")[0] for each in service.get("devices") or []
    ]
    checks = (
        (
            "devices",
            not all(map(_DEVICES.fullmatch, devices)),
            "a machine has none of this computer's devices, only its own, as /dev/net/tun, /dev/fuse and /dev/loop0: "
            "delete the others",
        ),
        ("runtime", service.get("runtime") not in (None, "runc"), "delete it: the machine's engine has runc alone"),
        ("platform", service.get("platform") not in _PLATFORMS, "machines are linux/amd64: delete it"),
        ("build.platforms", not any(each in _PLATFORMS for each in platforms), "machines are linux/amd64: delete it"),
        (
            "network_mode",
            str(service.get("network_mode")).startswith("container:"),
            "name a service of the file: service:NAME",
        ),
        ("deploy.resources.reservations.devices", bool(_resources(service, "reservations").get("devices")), _NO_GPU),
        (
            "scale",
            any(each not in (0, 1) for each in copies),
            "a sandbox is one container: write services of their own",
        ),
        (
            "security_opt",
            any(profile not in ("unconfined", "builtin") for profile in profiles),
            "a seccomp profile of your own cannot be carried over: use seccomp=unconfined, or delete it",
        ),
        (f"ports.{ports[0] if ports else 0}", bool(ports), "the machine's own SSH server has port 22: publish another"),
    )
    return ((key, why) for key, is_wrong, why in checks if is_wrong)


def _notes(
    services: Mapping[str, dict[str, Any]], networks: Mapping[str, dict[str, Any] | None], unset: tuple[str, ...]
) -> Iterator[str]:
    """Returns what means something else than its author may expect."""
    for name in unset:
        yield f"The variable {name} is not set: Compose puts nothing in its place."
    for each in networks.values():
        if each and each.get("external") and each.get("name") not in _ENGINES_NETWORKS:
            yield f"The external network {each['name']} is the sample's own: nothing outside of its machine is on it."
    gateways = [
        name for name, each in services.items() if any("host-gateway" in host for host in each.get("extra_hosts") or [])
    ]
    if gateways:
        yield f"host-gateway leads {', '.join(gateways)} to the sample's machine, not to this computer as in Docker."


def _resources(service: dict[str, Any], kind: str) -> dict[str, Any]:
    resources = (service.get("deploy") or {}).get("resources") or {}
    return resources.get(kind) or {}


def _sizes(source: Path) -> Iterator[int]:
    """Returns about how many bytes each entry of a file or directory takes in an archive. Links count as links."""
    if source.is_file():
        yield source.stat().st_size
    for directory, directories, names in os.walk(source):
        for name in (*directories, *names):
            with contextlib.suppress(OSError):  # the copy says so
                yield _ENTRY_BYTES + Path(directory, name).lstat().st_size


def _is_online(service: dict[str, Any], networks: Mapping[str, dict[str, Any]]) -> bool:
    """Returns whether a service would reach the internet in Docker."""
    if mode := service.get("network_mode"):
        return mode != "none" and not mode.startswith("service:")
    used = [networks.get(name, {}) for name in service.get("networks") or ["default"]]
    return not all(network.get("internal") or network.get("name") == "none" for network in used)


def _takes_ssh(port: dict[str, Any]) -> bool:
    """Returns whether a port takes that of the machine's own SSH server. Of a range, the engine chooses one."""
    return port.get("published") == "22" and port.get("protocol", "tcp") == "tcp"


def _said(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if each is not None}


def _json(value: object) -> str:
    """Returns a compose file, in which all variables are replaced already: Compose would replace them again."""
    return json.dumps(_escaped(value))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in value]
    return {key: _escaped(each) for key, each in value.items()} if isinstance(value, dict) else value


_INSTRUCTION = re.compile(r"\s*(ARG|FROM|COPY|ADD|RUN)\s+(.*)", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^${}]*))?\})")
_SOURCE = re.compile(r"(?:--|,|\s)from=([^\s,]+)")


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
    text = "\n".join(line for line in dockerfile.splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"[\\`]\s*\n", " ", text).splitlines()
    for match in filter(None, map(_INSTRUCTION.match, lines)):
        kind, rest = match[1].upper(), match[2]
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


def _replaced(text: str, args: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: args.get(match[1] or match[2]) or match[3] or "", text)
