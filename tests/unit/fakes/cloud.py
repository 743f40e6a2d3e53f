"""A fake cloud in a directory. The fake Terraform creates machines as files; each answers SSH on the loopback.

It refuses what a real cloud would: to prepare twice, to capture a disk in use, to harden a machine that is not up.
It has all methods of a cloud, so that unit tests of code that uses a cloud need not write their own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from provisioner.base.clock import now
from provisioner.base.errors import (
    CapacityError,
    InfrastructureError,
    MachineLostError,
    StillThereError,
    TerraformError,
)
from provisioner.base.models import BaseImage, Environment, MachineSize, Role, VMSpec
from provisioner.base.progress import Progress
from provisioner.clouds.cloud import Cloud, EnvironmentResources, SharedNetwork, StackValues, TerminationReason
from provisioner.clouds.local.cloud import LocalVariables
from provisioner.clouds.sizing import size_of_aux_vm, size_of_primary
from provisioner.costs.prices import CostLine
from provisioner.family.manifest import Resources
from provisioner.recording.isolation import Surface
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.ssh.keys import KeyPair
from provisioner.store.files import write_atomically
from provisioner.store.home import Home
from provisioner.store.images import Image, ImageStore
from tests.unit.fakes.guest import Guest
from tests.unit.fakes.sshd import Sshd

CRATER = "crater"


@dataclass
class Machine:
    """A prepared machine: its SSH server, its guest, and the keys of users other than root."""

    sshd: Sshd
    guest: Guest
    authorized_keys: Mapping[str, str]


@dataclass
class Faults:
    """Faults of the cloud that a test switches on.

    Attributes:
        unreachable: the cloud does not answer questions.
        stuck: the cloud removes no machine.
        places: the next places if Terraform fails; None if the failure is not about capacity.
        lost_images: names of images that the cloud has lost.
        no_room: there is no room for a layer.
        refuses_to_harden: hardening a machine fails.
        differences: how the environments' isolation differs from what the permission calls for.
        surface: what machines meet of their host.
    """

    unreachable: bool = False
    stuck: bool = False
    places: list[tuple[str, dict[str, str]]] | None = None
    lost_images: set[str] = field(default_factory=set)
    no_room: bool = False
    refuses_to_harden: bool = False
    differences: list[str] = field(default_factory=list)
    surface: dict[Role, Surface] = field(default_factory=dict)


class FakeCloud(Cloud):
    """Keeps machines as files and answers as a cloud does.

    Args:
        directory: the directory of the files.
        home: the provisioner home whose images the cloud has.
        usd: the price of a machine per hour; 0 if machines are free.
        region: the cloud's only region.
    """

    name = "local"  # stacks are rendered with this cloud's modules, which the fake Terraform does not read
    parallelism: int | None = None
    module_variables = LocalVariables
    gateways = dict.fromkeys((True, False), ("192.0.2.1",))

    def __init__(self, directory: Path, home: Home, usd: Decimal = Decimal(0), region: str = CRATER) -> None:
        self.directory, self.home, self.usd, self.region = directory, home, usd, region
        self.faults = Faults()
        self.machines: dict[tuple[str, Role], Machine] = {}
        self.hardened: list[str] = []
        self.ttls: dict[str, Any] = {}
        self.kept_when_off: set[str] = set()
        # Snapshot -> role -> the host key that the frozen machine shows, and the controller's key that it knows.
        self.frozen: dict[str, dict[Role, tuple[KeyPair, str]]] = {}
        self.refuses_renewal: set[Role] = set()
        self.needs = {"QEMU": "7.2"}
        self.origin = ""
        self.off: set[tuple[str, Role]] = set()
        self.foreign_images: set[str] = set()
        self.vendor_images = self.keeps_layers = False
        self.network: SharedNetwork | None = None
        self.next_cloud: FakeCloud | None = None
        self.renewed: list[str] = []
        self.consoles: dict[Role, str] = {}
        self.ending = TerminationReason()
        self.impairments: dict[Role, str] = {}
        self.guest_defaults: dict[str, Any] = {}
        self._preparing = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)

    # Methods for tests.

    def terraform_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        return {"FAKE_CLOUD": ours["FAKE_CLOUD"]}

    def machine(self, environment: Environment | str, role: Role = "primary") -> Machine:
        """Returns a prepared machine."""
        return self.machines[environment if isinstance(environment, str) else environment.id, role]

    def guest(self, role: Role = "primary") -> Guest:
        """Returns the guest of the only machine with a role."""
        [machine] = [machine for (_, its), machine in self.machines.items() if its == role]
        return machine.guest

    def existing(self) -> list[str]:
        """Returns all existing machines, as ENVIRONMENT/ROLE."""
        return sorted(str(path.relative_to(self.directory / "machines")) for path in self._files())

    def runs(self) -> list[str]:
        """Returns Terraform's runs except init, as COMMAND STACK."""
        path = self.directory / "runs"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if not line.startswith("init ")]

    def terraform_fails(
        self, command: str = "apply", summary: str = "It broke", *, environment: str = "", creates: bool = False
    ) -> None:
        """Makes the next run of a Terraform command fail: before it creates anything, or before it saves the state."""
        fault = {"command": command, "summary": summary, "environment": environment, "creates": creates}
        (self.directory / "fault.json").write_text(json.dumps(fault))

    def end_machine(self, environment: Environment | str, role: Role = "primary") -> None:
        """Ends a machine without provisioner, as a crash does."""
        identity = environment if isinstance(environment, str) else environment.id
        self._path(identity, role).unlink()
        self.machines[identity, role].sshd.cut()

    def close(self) -> None:
        """Ends the machines and their SSH servers."""
        for machine in self.machines.values():
            machine.guest.close()
            machine.sshd.close()

    def _files(self) -> list[Path]:
        return list((self.directory / "machines").glob("*/*"))

    def _path(self, identity: str, role: Role) -> Path:
        return self.directory / "machines" / identity / role

    def _ask(self) -> None:
        if self.faults.unreachable:
            raise InfrastructureError("The cloud does not answer.")

    def _may_log_in(self, identity: str, role: Role, user: str, key: str) -> bool:
        spec = json.loads(self._path(identity, role).read_text())
        lines = self.machines[identity, role].authorized_keys.get(user, "").splitlines()
        return key == spec["public_key"] if user == "root" else key in lines

    def _power_off(self, identity: str, role: Role) -> None:
        if identity in self.kept_when_off:
            self.off.add((identity, role))
        else:
            self._path(identity, role).unlink()

    # Methods of a cloud.

    def problems(self) -> list[tuple[str, str]]:
        return []

    def notes(self) -> list[str]:
        return []

    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        sizes: dict[Role, MachineSize] = {"primary": size_of_primary(resources)}
        return sizes | ({"aux": size_of_aux_vm(aux)} if aux else {})

    def costs(self, sizes: Mapping[Role, MachineSize], *, has_way_out: bool, spot: bool) -> tuple[CostLine, ...]:
        if not self.usd:
            return ()
        return tuple(
            CostLine(
                what=role, usd_per_hour=self.usd, worst_usd_per_hour=2 * self.usd, source="moon", as_of=date(2026, 1, 1)
            )
            for role in sizes
        )

    def usd_per_hour(self, environment: Environment) -> Decimal:
        return self.usd * len(environment.machines)

    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        return MachineSize(cpus=1, memory_gib=1, disk_gib=disk_gib)

    def base_image(self, base: BaseImage, progress: Progress) -> str:
        name = f"vendor-{base.distribution}" if self.vendor_images else f"{base.label}-0123456789abcdef"
        images = ImageStore(self.home)
        with images.building(name, progress) as directory:
            if directory is not None:
                kind = "vendor" if self.vendor_images else "base"
                image = Image.model_validate({"name": name, "kind": kind, "created_at": now(), "cloud": self.name})
                images.finish(image, directory)
        return name

    def has_image(self, image: Path) -> bool:
        assert (image / "image.json").exists()
        return image.name not in self.faults.lost_images

    def find_image(self, name: str, destination: Path) -> bool:
        if name not in self.foreign_images:
            return False
        (destination / "ami.json").write_text(name)
        return True

    def keep_when_off(self, environment: Environment) -> None:
        assert environment.kind == "builder"
        self.kept_when_off.add(environment.id)

    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        if (environment.id, "primary") not in self.off or not self._path(environment.id, "primary").exists():
            raise InfrastructureError("There is no disk of a powered-off machine.")
        (destination / "disk.qcow2").write_text(f"disk of {environment.id} as {name}")

    def keep_layer(self, environment: Environment, destination: Path) -> None:
        assert self._path(environment.id, "primary").exists(), "a layer is of a machine that runs"
        if self.faults.no_room:
            raise CapacityError("There is no room.")
        (destination / "disk.qcow2").write_text(f"disk of {environment.id}")

    def discard(self, image: Path) -> None:
        (image / "ami.json").unlink(missing_ok=True)

    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        assert authorized_keys.keys() == environment.machines.keys()
        with self._preparing:  # commands that run at once
            self._prepare(environment, authorized_keys)

    def _prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        endpoints = self._endpoints()
        for role, keys in authorized_keys.items():
            identity = environment.id
            assert (identity, role) not in self.machines, "it is prepared twice"
            path = self._path(identity, role)

            def power_off(identity: str = identity, role: Role = role) -> None:
                self._power_off(identity, role)

            def may_log_in(user: str, key: str, identity: str = identity, role: Role = role) -> bool:
                return self._may_log_in(identity, role, user, key)

            guest = Guest(self.directory / f"home-{identity}-{role}", power_off)
            for name, value in self.guest_defaults.items():
                setattr(guest, name, {**guest.values, **value} if name == "values" else value)
            sshd = Sshd(guest.obey, may_log_in, path.exists)
            self.machines[identity, role] = Machine(sshd, guest, keys)
            if environment.snapshot:
                self._resume_copy(self.machines[identity, role], *self.frozen[environment.snapshot][role], role)
            address = f"192.0.2.{2 + list(authorized_keys).index(role)}" if len(authorized_keys) > 1 else None
            endpoints.setdefault(identity, {})[role] = {
                "host": "127.0.0.1", "port": sshd.port, "private_address": address, "origin": self.origin,
            }  # fmt: skip
        write_atomically(self.directory / "endpoints.json", json.dumps(endpoints))

    def _resume_copy(self, copy: Machine, host_key: KeyPair, controller: str, role: Role) -> None:
        """Has a machine know what the frozen one knew, until it takes credentials of its own."""
        authorize = copy.sshd.authorize
        copy.sshd.shown_key_pair = host_key
        copy.sshd.authorize = lambda user, key: (user, key) == ("root", controller)

        def renew() -> None:
            copy.sshd.shown_key_pair, copy.sshd.authorize = copy.sshd.key_pair, authorize

        if role not in self.refuses_renewal:
            copy.guest.renewal = renew

    def snapshot_needs(self, environment: Environment) -> dict[str, str]:
        return self.needs

    def freeze(self, environment: Environment, directory: Path) -> None:
        if self.faults.stuck:
            raise InfrastructureError(f"{environment.id} could not be frozen.")
        for role in environment.machines:
            (directory / role).mkdir()
            (directory / role / "memory").write_bytes(b"memory")
        self.frozen[directory.name.removeprefix(".building-")] = {
            role: (
                self.machine(environment, role).sshd.shown_key_pair,
                json.loads(self._path(environment.id, role).read_text())["public_key"],
            )
            for role in environment.machines
        }

    def _endpoints(self) -> dict[str, dict[str, Any]]:
        path = self.directory / "endpoints.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def place(self, environment: Environment) -> dict[str, str]:
        return {"region": self.region, "zone": "a"}

    def next_place(self, environment: Environment, error: TerraformError) -> tuple[str, dict[str, str]] | None:
        if self.faults.places is None:
            return None
        if not self.faults.places:
            raise CapacityError(f"{self.region} has no machine to give.")
        return self.faults.places.pop(0)

    def shared_network(self, environment: Environment) -> SharedNetwork | None:
        assert environment.placement, "an environment has a place before it has a network"
        exists = self.network and (self.directory / "networks" / self.network.stack).exists()
        return None if exists and self.network and self.network.new else self.network

    def stack_values(self, environment: Environment) -> StackValues:
        images = {role: machine.image for role, machine in environment.machines.items()}
        return StackValues(images, LocalVariables(directory=""))

    def host_key(self, environment: Environment, role: Role) -> str | None:
        return self.machine(environment, role).sshd.host_key if self._path(environment.id, role).exists() else None

    def harden(self, environment: Environment, connections: Mapping[Role, Connection]) -> None:
        assert connections.keys() == environment.machines.keys()
        assert all(self._path(environment.id, role).exists() for role in connections)
        if self.faults.refuses_to_harden:
            raise MachineLostError("It could not be hardened.")
        self.hardened.append(environment.id)

    def alive(self, environment: Environment, role: Role) -> bool:
        self._ask()
        return self._path(environment.id, role).exists() and (environment.id, role) not in self.off

    def termination_reason(self, environment: Environment, role: Role) -> TerminationReason:
        assert not self.alive(environment, role)
        return self.ending

    def impairment(self, environment: Environment, role: Role) -> str:
        return self.impairments.get(role, "")

    def console(self, environment: Environment, role: Role) -> str:
        if role not in environment.endpoints:  # EC2 is asked by the instance's id
            return ""
        if role in self.consoles:
            return self.consoles[role]
        return "".join(f"console line {number} of {role}\n" for number in range(20))

    def move_ttl(self, environment: Environment) -> None:
        self.ttls[environment.id] = environment.expires_at

    def renew_lease(self, environment: Environment) -> None:
        assert environment.endpoints
        self.renewed.append(environment.id)

    def list_resources(self, regions: Sequence[str] | None) -> list[EnvironmentResources]:
        self._ask()
        return [
            EnvironmentResources(environment=name, resources=("machine",))
            for name in {path.parent.name for path in self._files()}
        ]

    def delete_resources(self, resources: EnvironmentResources) -> bool:
        for path in self._files():
            if path.parent.name == resources.environment:
                path.unlink()
        return True

    def remaining(self, environment: Environment) -> list[str]:
        self._ask()
        return [f"{role} machine" for role in environment.machines if self._path(environment.id, role).exists()]

    def remove(self, environment: Environment) -> None:
        if self.faults.stuck:
            raise StillThereError(f"The machine of {environment.id} does not end.")
        for role in environment.machines:
            self._path(environment.id, role).unlink(missing_ok=True)

    def isolation_differences(self, environment: Environment) -> list[str]:
        return self.faults.differences

    def surface(self, environment: Environment) -> dict[Role, Surface]:
        return self.faults.surface

    def fallback(self) -> FakeCloud | None:
        return self.next_cloud


def assert_nothing_is_left(session: Session, cloud: FakeCloud) -> None:
    """Asserts that no machine, no record and no open reservation is left."""
    assert cloud.existing() == []
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []
