"""The local cloud: QEMU machines on the controller itself. No account, no root, no daemon.

A machine is a directory in its environment's directory; terraform/local starts and ends it through
clouds/local/machine.py. Whether it lives is asked of the kernel (locks, processes), never of a record.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

from provisioner.clock import now
from provisioner.clouds import Ending, Found
from provisioner.clouds.local import egress_proxy, images, kvm, machine, orphans, qemu, watchdog
from provisioner.clouds.sizing import (
    BUILDER_CPUS,
    BUILDER_MEMORY_GIB,
    check_local_limits,
    check_local_memory,
    size_of_aux_vm,
    size_of_primary,
)
from provisioner.config import Settings
from provisioner.costs.prices import CostLine
from provisioner.errors import InfrastructureError, StillThereError, TerraformError
from provisioner.family.manifest import Resources
from provisioner.models import BaseImage, Environment, MachineSize, Role, VMSpec
from provisioner.progress import Progress
from provisioner.remote.keys import ed25519_key_pair
from provisioner.remote.ssh import Connection
from provisioner.store.files import write_atomically
from provisioner.store.home import Home
from provisioner.store.images import Image, ImageStore

CONSOLE_LIMIT_BYTES = 1 << 20
KVM_ANSWER = "kvm.json"
HOST_KEY = "host_key.pub"

# program -> Debian package
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "passt": "passt",
    "mke2fs": "e2fsprogs",
    "unshare": "util-linux",
    "newuidmap": "uidmap",
    "ip": "iproute2",
    "ssh": "openssh-client",
}


class LocalCloud:
    """QEMU on this machine.

    Args:
        home: where machines and images live.
        settings: the operator's settings.
    """

    name = "local"
    region = ""
    parallelism: int | None = None

    def __init__(self, home: Home, settings: Settings) -> None:
        self._home = home
        self._settings = settings
        self._images = ImageStore(home)

    def problems(self) -> list[tuple[str, str]]:
        """What is missing to run machines here."""
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        missing = sorted({package for program, package in PROGRAMS.items() if not shutil.which(program, path=path)})
        found = []
        if missing:
            found.append((f"Missing packages: {' '.join(missing)}", f"sudo apt-get install {' '.join(missing)}"))
        if os.geteuid() != 0 and "newuidmap" not in missing and not _user_namespaces_work():
            found.append(
                (
                    "This user cannot make user namespaces with subordinate ids.",
                    'sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 "$USER"; '
                    "sudo sysctl kernel.unprivileged_userns_clone=1",
                )
            )
        return found

    def notes(self) -> list[str]:
        """What works, but could work better."""
        if not os.access("/dev/kvm", os.R_OK | os.W_OK):
            return ["No usable /dev/kvm: machines are emulated, and several times slower. Are you in the kvm group?"]
        if kvm.known_answer(self._home.root / KVM_ANSWER) is False:
            return ["/dev/kvm is there, but no kernel boots under it: machines are emulated, and several times slower."]
        return []

    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """The smallest machines that fit.

        Raises:
            UnavailableError: this host cannot give them.
        """
        memory_gib = _host_memory_gib()
        sizes: dict[Role, MachineSize] = {"primary": size_of_primary(resources)}
        check_local_limits(sizes["primary"], host_memory_gib=memory_gib, gpu=resources.gpu is not None)
        if aux:
            sizes["aux"] = size_of_aux_vm(aux)
            check_local_limits(sizes["aux"], host_memory_gib=memory_gib, spec=aux)
        check_local_memory(sizes.values(), host_memory_gib=memory_gib)
        return sizes

    def costs(self, sizes: Mapping[Role, MachineSize], *, full_internet: bool, spot: bool) -> tuple[CostLine, ...]:
        """Nobody sends a bill for one's own machine."""
        return ()

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """Nobody sends a bill for one's own machine."""
        return Decimal(0)

    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """Every builder is the same."""
        return MachineSize(cpus=BUILDER_CPUS, memory_gib=BUILDER_MEMORY_GIB, disk_gib=disk_gib)

    def base_image(self, base: BaseImage, progress: Progress) -> str:
        """The name of the base image for a role; both are built together where one is missing."""
        bundle = self._settings.ca_bundle_path
        digest = images.digest(bundle)
        names: dict[Role, str] = {"primary": f"base-primary-{digest}", "aux": f"base-aux-{digest}"}
        if not all(self._images.finished(name) for name in names.values()):
            self._build_base_images(f"base-{digest}", names, bundle, progress)
        return names[base.role]

    def _build_base_images(self, lock: str, names: dict[Role, str], bundle: Path | None, progress: Progress) -> None:
        with self._images.building(lock, progress) as directory:
            if directory is None or all(self._images.finished(name) for name in names.values()):
                return
            progress.note("Building the base images (once; one or two minutes)")
            images.build(directory, bundle, progress.output)
            for role, name in names.items():
                finished = directory / role
                finished.mkdir(mode=0o700)
                (directory / f"{role}.raw").rename(finished / "disk.raw")
                for shared in ("vmlinuz", "initrd.img", "build.log"):
                    os.link(directory / shared, finished / shared)
                if not self._images.finished(name):
                    self._images.finish(Image(name=name, kind="base", created_at=now()), finished)

    def holds(self, image: Path) -> bool:
        """An image is its directory."""
        return True

    def adopt(self, name: str, destination: Path) -> bool:
        """Nobody else makes images here."""
        return False

    def discard(self, image: Path) -> None:
        """An image is its directory."""

    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        """Writes each machine's boot credentials, its host key among them, into its directory."""
        addresses = private_addresses(environment.id)
        hosts = ["127.0.0.1 localhost", "::1 localhost"]
        if len(environment.machines) > 1:
            hosts += [f"{addresses[role].ip} {role}" for role in environment.machines]
        for destination in environment.allowed_destinations:
            address = destination.cidr.split("/")[0]
            hosts += [f"{address} {name}" for name in destination.host_names]
        for role, record in environment.machines.items():
            host_key = ed25519_key_pair()
            credentials = {"hostname": role, "hosts": "\n".join(hosts) + "\n", "host_key": host_key.private}
            credentials["expires_at"] = str(int(environment.expires_at.timestamp()))
            credentials |= {f"authorized_keys.{user}": lines for user, lines in authorized_keys[role].items()}
            if len(environment.machines) > 1:
                credentials["private_address"] = str(addresses[role])
            if environment.full_internet or environment.allowed_destinations:
                credentials["internet"] = f"{egress_proxy.GUEST_ADDRESS} {egress_proxy.GATEWAY}\n"
            if environment.full_internet:
                credentials["resolver"] = egress_proxy.RESOLVER
            if record.size.disk_gib > images.DISK_GIB:
                credentials["grow"] = "yes"
            directory = self.machine_directory(environment, role)
            self._write_credentials(directory, credentials)
            (directory / HOST_KEY).write_text(host_key.public)
            _write_limit(directory, environment)
            kernel = self._images.disk(record.image).with_name("vmlinuz")
            works = kvm.kvm_works(kernel, self._home.root / KVM_ANSWER)
            (directory / "accelerator").write_text("kvm" if works else "tcg")

    def _write_credentials(self, directory: Path, credentials: dict[str, str]) -> None:
        target = directory / "credentials"
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, value in credentials.items():
            path = target / name
            path.touch(mode=0o600)
            path.write_text(value)

    def machine_directory(self, environment: Environment, role: Role) -> Path:
        """environments/ID/ROLE: docs/directory-layout.md lists what lies there."""
        return self._home.environments / environment.id / role

    def gateways(self, environment: Environment) -> list[str]:
        """User networking's gateway and name server, and the gateway of passt."""
        return ["10.0.2.2", "10.0.2.3", egress_proxy.GATEWAY]

    def place(self, environment: Environment) -> dict[str, str]:
        """There is one place."""
        return {}

    def elsewhere(self, environment: Environment, error: TerraformError) -> tuple[str, dict[str, str]] | None:
        """There is one place."""
        return None

    def foundation(self, environment: Environment) -> None:
        """Environments share nothing."""

    def raze(self, environment: Environment) -> None:
        """Environments share nothing."""

    def fallback(self) -> None:
        """There is one place."""

    def root_files(self, environment: Environment) -> dict[str, str]:
        """Terraform itself is all that it takes."""
        return {}

    def host_key(self, environment: Environment, role: Role) -> str | None:
        """The key that the machine was given."""
        return (self.machine_directory(environment, role) / HOST_KEY).read_text()

    def seal(self, environment: Environment, connections: Mapping[Role, Connection]) -> None:
        """The machines boot as they shall stay."""

    def stack_values(self, environment: Environment) -> dict[str, Any]:
        """The environment's directory, and each role's image as a file."""
        return {
            "directory": str(self._home.environments / environment.id),
            "images": {role: str(self._images.disk(record.image)) for role, record in environment.machines.items()},
        }

    def alive(self, environment: Environment, role: Role) -> bool:
        """Whether QEMU holds its pidfile's lock."""
        return qemu.live_pid(self.machine_directory(environment, role) / "qemu.pid") is not None

    def ending(self, environment: Environment, role: Role) -> Ending:
        """A process that has ended says nothing."""
        return Ending()

    def keep_when_off(self, environment: Environment) -> None:
        """A machine that is off keeps its disk."""

    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        """Moves the powered-off builder's disk to `destination` and hangs it on its base image by a relative path."""
        base = self._images.disk(environment.machines["primary"].image)
        disk = destination / "disk.qcow2"
        (self.machine_directory(environment, "primary") / "disk.qcow2").rename(disk)
        backing = f"../{base.parent.name}/{base.name}"
        subprocess.run(
            ["qemu-img", "rebase", "-q", "-u", "-b", backing, "-F", "raw", "disk.qcow2"],
            cwd=destination, check=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        for name in ("vmlinuz", "initrd.img"):
            os.link(base.parent / name, destination / name)
        with disk.open("rb") as file:
            os.fsync(file.fileno())

    def console(self, environment: Environment, role: Role) -> str:
        """The end of the serial console's log."""
        path = self.machine_directory(environment, role) / "serial.log"
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()[-CONSOLE_LIMIT_BYTES:].decode(errors="replace")
        return ""

    def move_limit(self, environment: Environment) -> None:
        """Tells the machines' watchdogs."""
        for role in environment.machines:
            if (directory := self.machine_directory(environment, role)).is_dir():
                _write_limit(directory, environment)

    def renew(self, environment: Environment) -> None:
        """The lease is a lock, which all controllers here see."""

    def survey(self, regions: Sequence[str] | None) -> list[Found]:
        """The directories of this home's environments, and what runs in them, even if they are gone."""
        return orphans.survey(self._home)

    def clear(self, found: Found) -> bool:
        """Ends the processes and removes the directory. What other homes make costs nothing."""
        orphans.clear(self._home, found.environment)
        return True

    def left(self, environment: Environment) -> list[str]:
        """Processes and directories of the environment's machines that are still there."""
        found = []
        for role in environment.machines:
            directory = self.machine_directory(environment, role)
            if (pid := qemu.live_pid(directory / "qemu.pid")) is not None:
                found.append(f"QEMU process {pid} of the {role} machine")
            if (pid := machine.network_pid(directory)) is not None:
                found.append(f"network process {pid} of the {role} machine")
            if directory.exists():
                found.append(f"directory {directory}")
        return found

    def remove(self, environment: Environment) -> None:
        """Ends what Terraform forgot.

        Raises:
            StillThereError: a process would not end.
            InfrastructureError: a directory could not be removed.
        """
        for role in environment.machines:
            try:
                machine.destroy(self.machine_directory(environment, role))
            except machine.MachineError as error:
                raise StillThereError(f"{role} machine of {environment.id}: {error}") from error
            except OSError as error:
                raise InfrastructureError(f"{role} machine of {environment.id}: {error}") from error


def _write_limit(directory: Path, environment: Environment) -> None:
    write_atomically(directory / watchdog.LIMIT, str(environment.expires_at.timestamp()))


def private_addresses(environment_id: str) -> dict[Role, ipaddress.IPv4Interface]:
    """The addresses of an environment's machines on their own link.

    A /29 out of 10.213.0.0/16, by the environment's id. The link joins the two machines and nothing else, so that
    two environments with the same addresses do not disturb each other.
    """
    block = int.from_bytes(sha256(environment_id.encode()).digest()[:2], "big") & ~7
    first = int(ipaddress.IPv4Address("10.213.0.0")) + block
    return {
        "primary": ipaddress.IPv4Interface((first + 2, 29)),
        "aux": ipaddress.IPv4Interface((first + 3, 29)),
    }


def _host_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _user_namespaces_work() -> bool:
    probe = ["unshare", "--map-root-user", "--map-auto", "--mount", "true"]
    return subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0
