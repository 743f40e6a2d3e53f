"""The local cloud: QEMU machines on the controller itself.

A machine is a directory in its environment's directory; Terraform starts and ends it through machine.py. Whether it
lives is asked of the kernel (locks, processes), never of a record.
"""

from __future__ import annotations

import contextlib
import ipaddress
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from provisioner.base.config import Settings
from provisioner.base.errors import CapacityError, HostError, InfrastructureError, StillThereError, UsageError
from provisioner.base.models import BaseImage, Destination, Environment, MachineSize, Role, VMSpec
from provisioner.base.progress import Progress
from provisioner.clouds.cloud import (
    Capture,
    Cloud,
    EnvironmentResources,
    ModuleVariables,
    StackValues,
    TerminationReason,
    TerraformType,
)
from provisioner.clouds.local import host, images, machine, orphans, sizing, surface, watchdog
from provisioner.clouds.local.credentials import credentials
from provisioner.clouds.local.frozen import snapshots
from provisioner.clouds.local.network import captures, egress, outside_view
from provisioner.clouds.local.network.egress import GATEWAY, MAX_RULES
from provisioner.clouds.local.vm import disk, machine_logs, processes, qemu, shutdown
from provisioner.clouds.local.vm.confinement import CARD_ADDRESS
from provisioner.clouds.local.vm.credential_port import CREDENTIALS
from provisioner.clouds.sizing import BUILDER_CPUS, BUILDER_MEMORY_GIB, DEFAULT_MEMORY_GIB, MINIMUM_DISK_GIB
from provisioner.recording.isolation import Surface
from provisioner.ssh.keys import ed25519_key_pair
from provisioner.store.files import locked, read_end, write_atomically
from provisioner.store.home import Home
from provisioner.store.images import ImageStore
from provisioner.store.snapshots import SnapshotStore

if TYPE_CHECKING:  # reading manifests takes YAML, which takes long to import
    from provisioner.family.manifest import Resources

KVM_ANSWER = "kvm.json"
# In the machine's directory: whether it runs under KVM.
ACCELERATOR = "accelerator"
# QEMU answers at once; its version is worth no longer wait.
VERSION_SECONDS = 1.0
HOST_KEY = "host_key.pub"
# The other end of the management card, and an address beside it.
MANAGEMENT_GATEWAYS = (CARD_ADDRESS, "10.0.2.3")
SMALLEST = MachineSize(cpus=1, memory_gib=DEFAULT_MEMORY_GIB, disk_gib=MINIMUM_DISK_GIB)


class LocalVariables(ModuleVariables):
    """The variables that only terraform/local/environment takes.

    Args:
        directory: the environment's directory.
    """

    directory: Annotated[str, TerraformType("string")]


_NO_KVM = "No machine starts under KVM here, and require_kvm refuses to emulate one."


class LocalCloud(Cloud):
    """QEMU on this machine.

    Args:
        home: where machines and images live.
        settings: the operator's settings.
    """

    name = "local"
    keeps_layers = True
    scarcity = sizing.SCARCITY
    module_variables = LocalVariables
    gateways = dict.fromkeys((True, False), (*MANAGEMENT_GATEWAYS, GATEWAY))

    def __init__(self, home: Home, settings: Settings) -> None:
        self._home = home
        self._settings = settings
        self._images = ImageStore(home)
        self._snapshots = SnapshotStore(home)

    @property
    def closed(self) -> tuple[str, ...]:
        """Returns addresses of private networks that the settings do not open."""
        opened = [ipaddress.IPv4Network(text) for text in self._settings.private_networks]
        ends = [address for private in egress.PRIVATE for address in (private[1], private[-2])]
        return tuple(str(each) for each in ends if not any(each in network for network in opened))

    # Requirements

    def problems(self) -> list[tuple[str, str]]:
        """Lists what is missing to run machines here."""
        problems = host.problems()
        if self._settings.require_kvm and host.expects_kvm(self._home.root / KVM_ANSWER) is False:
            remedy = "docs/how-to/local.md says how to use KVM. Or take require_kvm out of the settings."
            problems.append((_NO_KVM, remedy))
        count, text = self._room()
        if not count:
            problems.append((text, "Free some space: `provisioner image prune`, or `image prune --all`"))
        return problems

    def notes(self) -> list[str]:
        """Lists what works, but could work better."""
        memory = sizing.memory_text([SMALLEST], sizing.available_memory_gib())
        return [
            *host.notes(self._home.root / KVM_ANSWER),
            self._room()[1],
            f"Memory: an environment of one small machine takes {memory}.",
        ]

    def _room(self) -> tuple[int, str]:
        """Returns how many more of the smallest machines the host's disk has room for, and a text that says so."""
        room, share = disk.room(self._home.environments), self._share_bytes([SMALLEST])
        count = room.bytes // share
        return count, (
            f"Disk: {room.free_bytes / disk.GIB:.1f} GiB free, {room.bytes / disk.GIB:.1f} GiB available to new "
            f"machines: {count} more fit ({MINIMUM_DISK_GIB} GiB each, {share / disk.GIB:.1f} GiB guaranteed)."
        )

    def _kernel(self, image: str) -> Path:
        return self._images.disk(image).with_name("vmlinuz")

    def _kvm_works(self, image: str) -> bool:
        return host.kvm_works(self._kernel(image), self._home.root / KVM_ANSWER)

    def _refuse_emulation(self, *, required: bool = False) -> None:
        """Refuses to emulate machines if the settings, or what is to run, require KVM.

        KVM is tried with the kernel of any image. While there is none, only what is certain counts.
        """
        if not (required or self._settings.require_kvm):
            return
        answer, names = self._home.root / KVM_ANSWER, self._home.images.glob("*/image.json")
        kernel = next((path for each in names if (path := each.with_name("vmlinuz")).exists()), None)
        if (host.kvm_works(kernel, answer) if kernel else host.expects_kvm(answer)) is False:
            raise HostError(
                _NO_KVM,
                hint="`provisioner doctor` says what is missing.",
            )

    # Sizing

    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """Chooses the smallest machines that fit.

        Raises:
            UnavailableError: this host cannot provide them.
            HostError: KVM is required, and does not work here.
        """
        self._refuse_emulation(required=resources.require_kvm)
        sizes = sizing.choose_machines(resources, aux)
        most_gib = disk.most_bytes(self._home.environments) / disk.GIB
        sizing.check_disks_fit(sizes.values(), overcommit=self._settings.disk_overcommit, host_disk_gib=most_gib)
        return sizes

    def room(self, sizes: Mapping[Role, MachineSize]) -> str:
        """Says how much of the host's disk the machines are guaranteed, and how much is available to them now."""
        share, available = self._share_bytes(sizes.values()), disk.room(self._home.environments).bytes
        return (
            f"{share / disk.GIB:.1f} GiB of the host's disk guaranteed, of {available / disk.GIB:.1f} GiB "
            f"available to new machines now; {sizing.memory_text(sizes.values(), sizing.available_memory_gib())}"
        )

    def accelerator(self) -> str:
        """Says whether machines would start under KVM, as it was last tried. Tries nothing."""
        words = {True: "KVM", False: "none: machines are emulated (TCG)", None: "not known yet: KVM was not tried"}
        return words[host.expects_kvm(self._home.root / KVM_ANSWER)]

    def shortage(self, sizes: Mapping[Role, MachineSize], count: int) -> str:
        """Says that the host's memory has no room for so many more environments, if it has not."""
        return sizing.memory_shortage(sizes.values(), count, sizing.available_memory_gib())

    def capacity(self, sizes: Mapping[Role, MachineSize]) -> int:
        """Returns how many more environments fit on this host if each uses all of its memory and its share of disk."""
        on_disk = disk.room(self._home.environments).bytes // self._share_bytes(sizes.values())
        return min(sizing.fitting(sizes.values(), sizing.available_memory_gib()), on_disk)

    def _share_bytes(self, sizes: Iterable[MachineSize]) -> int:
        return sum(disk.share_bytes(size.disk_gib, self._settings.disk_overcommit) for size in sizes)

    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """Returns the size that every builder has, with its own disk.

        Raises:
            HostError: the settings require KVM, which does not work here.
        """
        self._refuse_emulation()
        return MachineSize(cpus=BUILDER_CPUS, memory_gib=BUILDER_MEMORY_GIB, disk_gib=disk_gib)

    # Images

    def base_image(self, base: BaseImage, progress: Progress) -> str:
        """Returns the name of a base image; those of one distribution are built together if one is missing."""
        return images.base_image(self._images, base, self._settings.ca_bundle_path, progress)

    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        """Moves the powered-off builder's disk to `destination`, backed by its base image through a relative path.

        Raises:
            ImageBuildError: the builder's disk is not what it must be, as after an attack on its QEMU, or its template
                is gone.
        """
        directory = self._directory(environment, "primary")
        images.capture(self._images, environment.machines["primary"], directory, destination)

    def keep_layer(self, environment: Environment, destination: Path) -> None:
        """Copies the disk of a builder, which stands still meanwhile.

        Raises:
            CapacityError: the host's disk has no room for it.
            InfrastructureError: QEMU or the copy failed.
            ImageBuildError: as for `capture`.
        """
        directory, room = self._directory(environment, "primary"), disk.room(self._home.environments)
        images.copy(self._images, environment.machines["primary"], directory, destination, room.bytes)

    # Stacks

    def stack_values(self, environment: Environment) -> StackValues:
        """Returns the environment's directory, and each role's image as a file."""
        return StackValues(
            images={role: str(self._images.disk(record.image)) for role, record in environment.machines.items()},
            variables=LocalVariables(directory=str(self._home.environments / environment.id)),
        )

    # Machines

    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        """Claims disk space, and writes each machine's credentials, its time to live and whether it runs under KVM.

        Raises:
            CapacityError: the host's disk has no room for the machines.
            HostError: the settings require KVM, which does not work here.
        """
        disks = {self._directory(environment, role): each.size.disk_gib for role, each in environment.machines.items()}
        with locked(self._home.locks / "disk"):
            disk.claim(self._home.environments, disks, self._settings.disk_overcommit)
        for role, record in environment.machines.items():
            directory = self._directory(environment, role)
            host_key = ed25519_key_pair()
            told = directory / CREDENTIALS
            told.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, value in credentials(environment, role, host_key.private, authorized_keys[role]).items():
                (told / name).touch(mode=0o600)
                (told / name).write_text(value)
            write_atomically(directory / HOST_KEY, host_key.public)
            _write_ttl(directory, environment)
            has_kvm = self._kvm_works(record.image)
            if not has_kvm:
                self._refuse_emulation()  # again: KVM may never have been tried here before
            write_atomically(directory / ACCELERATOR, "kvm" if has_kvm else "tcg")
            write_atomically(directory / egress.OPENED, "\n".join(self._settings.private_networks))
            write_atomically(directory / machine.PEERS, "\n".join(set(environment.machines) - {role}))
            # Hardly any machine will ever boot from a layer, so that a template of it would only cost time.
            is_layer = self._images.finished(record.image) and self._images.load(record.image).kind == "layer"
            if self._settings.templates and not is_layer:
                write_atomically(directory / machine.WANTS_TEMPLATE, "")
            if environment.recorded:
                write_atomically(directory / captures.WANTED, "")
            if environment.snapshot:
                frozen = self._snapshots.machine(environment.snapshot, role)
                write_atomically(directory / machine.SNAPSHOT, str(frozen))

    def _directory(self, environment: Environment, role: Role) -> Path:
        """environments/ID/ROLE: docs/reference/directory-layout.md lists what lies there."""
        return self._home.environments / environment.id / role

    def host_key(self, environment: Environment, role: Role) -> str | None:
        """Returns the key that the machine was given."""
        return (self._directory(environment, role) / HOST_KEY).read_text()

    def alive(self, environment: Environment, role: Role) -> bool:
        """Whether the machine's QEMU lives."""
        return qemu.live_pid(self._directory(environment, role) / qemu.PIDFILE) is not None

    def termination_reason(self, environment: Environment, role: Role) -> TerminationReason:
        """Returns why a machine ended: the watchdog's reason if it took too much of the disk, else QEMU's."""
        directory = self._directory(environment, role)
        if eviction := disk.eviction(directory):
            return TerminationReason(eviction, from_within=True)
        message, from_within = shutdown.reason(directory)
        return TerminationReason(message, from_within=from_within)

    def impairment(self, environment: Environment, role: Role) -> str:
        """Tells that QEMU paused the machine, unless the environment itself fills the host's disk."""
        if not qemu.paused_by_full_disk(self._directory(environment, role)):
            return ""
        with contextlib.suppress(OSError):
            directories = [self._directory(environment, each) for each in environment.machines]
            if not any(disk.must_go(each) or disk.eviction(each) for each in directories):
                return "the host's disk is full: QEMU paused the machine"
        return ""

    def standstill(self, environment: Environment, role: Role) -> str:
        """Tells that a signal has stopped the machine's QEMU."""
        pid = qemu.live_pid(self._directory(environment, role) / qemu.PIDFILE)
        stopped = pid is not None and processes.is_stopped(pid)
        return f"its QEMU is stopped: `kill -CONT {pid}` continues it" if stopped else ""

    def console(self, environment: Environment, role: Role) -> str:
        """Returns the end of the serial console's log."""
        directory = self._directory(environment, role)
        text = read_end(directory / machine_logs.SERIAL, machine_logs.LIMIT_BYTES).decode(errors="replace")
        reason = disk.eviction(directory)
        return f"{text}\n[provisioner: {reason}]\n" if reason else text

    def move_ttl(self, environment: Environment) -> None:
        """Tells the machines' watchdogs when to end them."""
        for role in environment.machines:
            if (directory := self._directory(environment, role)).is_dir():
                _write_ttl(directory, environment)

    # Isolation

    def check_allowlist(self, allowed: Collection[Destination]) -> str:
        """Makes sure that the egress proxy takes it.

        Raises:
            UsageError: it is too long.
        """
        if len(allowed) > MAX_RULES:
            raise UsageError(
                f"An allowlist of {len(allowed)} addresses is too long: {MAX_RULES} are possible.",
                hint="A name counts once for each of its addresses.",
            )
        return ""

    def isolation_differences(self, environment: Environment) -> list[str]:
        """Looks at each machine's cards, network and egress proxy from this host."""
        return [
            difference
            for role in environment.machines
            for difference in outside_view.differences(
                self._directory(environment, role), environment, role, self._settings.private_networks
            )
        ]

    def surface(self, environment: Environment) -> dict[Role, Surface]:
        """Returns each machine's devices, and how its QEMU and egress proxy are enclosed.

        Raises:
            IsolationError: it cannot be seen.
        """
        return {role: surface.look(self._directory(environment, role), role) for role in environment.machines}

    def versions(self, environment: Environment) -> dict[str, str]:
        """Names QEMU's accelerator and version, and the kernels that it started, by their files."""
        found: dict[str, str] = {}
        directory = self._directory(environment, "primary")
        with contextlib.suppress(OSError):
            found["accelerator"] = (directory / ACCELERATOR).read_text().upper()
        with contextlib.suppress(OSError, ValueError, qemu.QMPError), qemu.QMP(directory, VERSION_SECONDS) as qmp:
            found["QEMU"] = qmp.version()
        for role, record in environment.machines.items():
            with contextlib.suppress(OSError, ValueError):
                found[f"kernel of the {role} machine"] = images.kernel_version(self._kernel(record.image))
        return found

    # Snapshots

    def snapshot_needs(self, environment: Environment) -> dict[str, str]:
        """Names QEMU's version, its devices, the accelerator, under KVM the processor, and the disks of the images.

        Raises:
            HostError: the settings require KVM, which does not work here.
        """
        self._refuse_emulation()
        needs = {"QEMU": host.qemu_version(), "the set of devices": snapshots.devices()}
        for role, record in environment.machines.items():
            image = self._images.disk(record.image)
            try:
                needs[f"image of the {role} machine"] = snapshots.identity(image)
            except OSError:
                raise UsageError(f"The image {record.image} of the {role} machine is gone.") from None
        works = self._kvm_works(environment.machines["primary"].image)
        return {**needs, "accelerator": "kvm" if works else "tcg", **({"processor": host.processor()} if works else {})}

    def freeze(self, environment: Environment, directory: Path) -> None:
        """Freezes all machines of an environment in one moment.

        Raises:
            CapacityError: the host's disk has no room for their memory and disks.
            InfrastructureError: QEMU failed.
        """
        subjects = [self._subject(environment, role, directory / role) for role in environment.machines]
        try:
            needed, room = sum(each.needed_bytes for each in subjects), disk.room(self._home.environments)
            if needed > room.bytes:
                raise CapacityError(
                    f"The disk of this host has no room for a snapshot: it may take {needed / disk.GIB:.1f} GiB, "
                    f"and {room.bytes / disk.GIB:.1f} GiB are available.",
                    hint="Free some space: `provisioner snapshot remove`, `provisioner image prune`.",
                )
            snapshots.freeze(subjects)
        except (OSError, subprocess.SubprocessError, qemu.QMPError) as error:
            raise InfrastructureError(f"{environment.id} could not be frozen: {error}") from error

    def _subject(self, environment: Environment, role: Role, target: Path) -> snapshots.Subject:
        record, directory = environment.machines[role], self._directory(environment, role)
        image = self._images.disk(record.image)
        settings = {
            "image": str(image),
            "cpus": record.size.cpus,
            "memory_gib": record.size.memory_gib,
            "full_internet": environment.full_internet,
            "allowed_destinations": environment.allowed_destinations,
        }
        launch = machine.described(directory, settings)
        return snapshots.Subject(directory, image, launch, record.size.disk_gib, target)

    # Clean-up

    def captures(self, environment: Environment) -> list[Capture]:
        """Lists the captures in the machines' directories."""
        found = {role: captures.existing(self._directory(environment, role)) for role in environment.machines}
        return [Capture(role, card, path) for role in found for card, path in found[role]]

    def list_resources(self, regions: Sequence[str] | None) -> list[EnvironmentResources]:
        """Lists the directories of this home's environments, and what runs in them, even if they are gone."""
        return orphans.survey(self._home)

    def delete_resources(self, resources: EnvironmentResources) -> bool:
        """Ends the processes and removes the directory."""
        orphans.clear(self._home, resources.environment)
        return True

    def remaining(self, environment: Environment) -> list[str]:
        """Lists processes and directories of the environment's machines that still exist."""
        remaining = []
        for role in environment.machines:
            directory = self._directory(environment, role)
            if (pid := qemu.live_pid(directory / qemu.PIDFILE)) is not None:
                remaining.append(f"QEMU process {pid} of the {role} machine")
            if (pid := egress.pid_of(directory)) is not None:
                remaining.append(f"network process {pid} of the {role} machine")
            if directory.exists():
                remaining.append(f"directory {directory}")
        return remaining

    def remove(self, environment: Environment) -> None:
        """Ends the machines that Terraform forgot, and removes their directories.

        Raises:
            StillThereError: a process would not end.
            InfrastructureError: a directory could not be removed.
        """
        errors: list[InfrastructureError] = []
        for role in environment.machines:  # one that does not end keeps no other alive
            try:
                machine.destroy(self._directory(environment, role))
            except machine.MachineError as error:
                errors.append(StillThereError(f"{role} machine of {environment.id}: {error}"))
            except OSError as error:
                errors.append(InfrastructureError(f"{role} machine of {environment.id}: {error}"))
        for each in errors:
            raise each


def _write_ttl(directory: Path, environment: Environment) -> None:
    write_atomically(directory / watchdog.EXPIRY, str(environment.expires_at.timestamp()))
