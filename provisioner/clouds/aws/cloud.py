"""The aws cloud: EC2. What exists is asked of EC2 by tag, never of a record."""

from __future__ import annotations

import getpass
import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from provisioner.clock import now
from provisioner.clouds import UNFINISHED, Ending, Found, Foundation
from provisioner.clouds.aws import hardening, images, policy, schedules, tagged_resources
from provisioner.clouds.aws.api import LOGIN_HINT, NO_LOGIN, REFUSED, RIGHTS_HINT, Api, asking
from provisioner.clouds.aws.instance_types import choose_builder, choose_machines
from provisioner.clouds.aws.network import (
    HOME_TAG,
    NETWORK_TAG,
    Network,
    allowlist_subnet,
    controller_networks,
    find_network,
    raze_network,
    zones_of,
)
from provisioner.clouds.aws.placement import is_repetition, next_place, places, shortage
from provisioner.clouds.aws.pricing import Pricing
from provisioner.clouds.aws.user_data import cloud_config
from provisioner.config import Settings
from provisioner.costs.prices import CostLine
from provisioner.errors import (
    CapacityError,
    HostError,
    InfrastructureError,
    ProvisionerError,
    StillThereError,
    TerraformError,
)
from provisioner.family.manifest import Resources
from provisioner.models import BaseImage, Environment, MachineSize, Role, VMSpec
from provisioner.progress import Progress
from provisioner.remote.ssh import Connection
from provisioner.store.home import Home
from provisioner.store.images import Image, ImageStore
from provisioner.store.leases import LEASE

# RunInstances: a bucket of five requests, refilled twice a second (EC2 API request throttling).
PARALLELISM = 5
# Of the provider: it repeats a lack of capacity for many minutes by default; what to try next is ours to decide.
PROVIDER_RETRIES = 2
ALIVE_SECONDS = 3.0
# EC2 API reference, StateReason: the machine was shut down from within.
SWITCHED_OFF = "Client.InstanceInitiatedShutdown"
# Regions asked at once.
SURVEYS = 8


class AwsCloud:
    """EC2 in one region, with others to go on to.

    Args:
        home: where records and images' descriptions live.
        settings: the operator's settings.
        regions: the first is used, the others where it lacks capacity; empty: the settings' or boto3's own.
        profile: of the AWS configuration.
        spot: whether to try spot instances first.
        state: `s3://bucket/prefix` for Terraform's state, or empty for local files.
    """

    name = "aws"
    parallelism: int | None = PARALLELISM

    def __init__(
        self,
        home: Home,
        settings: Settings,
        regions: tuple[str, ...] = (),
        profile: str | None = None,
        *,
        spot: bool = False,
        state: str | None = None,
    ) -> None:
        self._home = home
        self._settings = settings
        self._others = regions[1:]
        self._profile = profile or settings.profile or ""
        self._spot = spot
        self._state = settings.state if state is None else state
        self._images = ImageStore(home)
        self._api = Api(self._profile, regions[0] if regions else settings.region)
        self.region = self._region = self._api.region
        self._networks: dict[str, Network] = {}
        self._given: set[str] = set()
        self._repeated: set[str] = set()
        self._seen: dict[tuple[str, Role], tuple[float, bool]] = {}

    # Before anything is created

    def problems(self) -> list[tuple[str, str]]:
        """Whether there are credentials, and whether they have the rights."""
        try:
            identity = self._identity
            refused = policy.refused(self._api, self._region, identity["Arn"])
        except ProvisionerError as error:
            return [(error.message, error.hint or "")]
        if not refused:
            return []
        return [(f"{identity['Arn']} lacks rights: {', '.join(refused)}", RIGHTS_HINT)]

    def notes(self) -> list[str]:
        """Where machines start and what prices are from."""
        try:
            controllers = ", ".join(sorted(self._controllers))
            return [
                f"Account {self._identity['Account']}, region {self._region}; machines let in {controllers}.",
                f"Prices: {self._pricing.sources()}.",
            ]
        except ProvisionerError as error:
            return [error.message]

    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """The cheapest machines that fit.

        Raises:
            UnavailableError: EC2 sells none, or for an unknown price.
        """
        chosen = choose_machines(resources, aux, self._pricing.market)
        return {"primary": chosen["primary"], **({"aux": chosen["aux"]} if aux else {})}

    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """The cheapest builder of an architecture."""
        return choose_builder(base.architecture, disk_gib, self._pricing.market)

    def costs(self, sizes: Mapping[Role, MachineSize], *, full_internet: bool, spot: bool) -> tuple[CostLine, ...]:
        """Instances, volumes and public addresses.

        Raises:
            UnavailableError: a price is not known.
        """
        zone = sorted(self._zones(self._region))[0] if spot and self._spot else None
        return self._pricing.costs(sizes, full_internet=full_internet, spot_zone=zone)

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """By the types and the market that the environment got; what is not known counts as its worst."""
        return self._pricing.usd_per_hour(environment)

    def fallback(self) -> AwsCloud | None:
        """The same in the next region."""
        if not self._others:
            return None
        return AwsCloud(self._home, self._settings, self._others, self._profile, spot=self._spot, state=self._state)

    @cached_property
    def _identity(self) -> dict[str, str]:
        with asking("Asking AWS who we are"):
            found = self._api.client("sts").get_caller_identity()
        return {"Account": str(found["Account"]), "Arn": str(found["Arn"])}

    @cached_property
    def _pricing(self) -> Pricing:
        own = Path(self._settings.prices).expanduser() if self._settings.prices else None
        return Pricing(self._api, self._region, self._identity["Account"], self._home.root / "market", own)

    @cached_property
    def _controllers(self) -> frozenset[str]:
        return controller_networks(self._settings.controller_cidrs)

    # Images

    def base_image(self, base: BaseImage, progress: Progress) -> str:
        """The distribution's newest AMI, from which a builder makes the base image."""
        ami_id, full_name = images.vendor_ami(self._api, self._region, base)
        where = sha256(f"{self._identity['Account']} {self._region} {ami_id}".encode()).hexdigest()[:8]
        name = f"vendor-{re.sub(r'[^a-z0-9]+', '-', full_name.lower()).strip('-')[:60]}-{where}"
        with self._images.building(name, progress) as directory:
            if directory is not None:
                images.write(images.Ami(id=ami_id, region=self._region, ours=False), directory)
                self._images.finish(Image(name=name, kind="vendor", created_at=now(), cloud=self.name), directory)
        return name

    def holds(self, image: Path) -> bool:
        """Whether the AMI is still there."""
        return images.exists(self._api, images.read(image))

    def adopt(self, name: str, destination: Path) -> bool:
        """Finds the AMI by its tag."""
        found = images.find(self._api, self._region, name)
        if found:
            images.write(found, destination)
        return found is not None

    def keep_when_off(self, environment: Environment) -> None:
        """From here on the instance stops when it is powered off; until here that would have terminated it."""
        instance = environment.endpoints["primary"].instance_id
        with asking("Letting the builder stop"):
            self._api.client("ec2", environment.placement["region"]).modify_instance_attribute(
                InstanceId=instance, InstanceInitiatedShutdownBehavior={"Value": "stop"}
            )

    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        """Makes an AMI of the stopped builder."""
        instance = environment.endpoints["primary"].instance_id or ""
        made = images.create(self._api, environment.placement["region"], instance, name, self._tags(environment))
        images.write(made, destination)

    def discard(self, image: Path) -> None:
        """Deregisters the AMI and deletes its snapshots; the distributions' own stay."""
        ami = images.read(image)
        if ami.ours:
            images.remove(self._api, ami)

    def _ami_id(self, name: str) -> str:
        if self._images.finished(name):
            return images.read(self._images.path(name)).id
        found = images.find(self._api, self._region, name)
        if found is None:
            raise InfrastructureError(f"The image {name} is gone from {self._region}.", hint="Run the command again.")
        return found.id

    # Creating

    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        """Keeps each machine's user data in the environment's directory."""
        for role in environment.machines:
            path = self._user_data(environment, role)
            path.write_text(cloud_config(role, authorized_keys.get(role, {}), environment.expires_at))

    def _user_data(self, environment: Environment, role: Role) -> Path:
        return self._home.environments / environment.id / f"user-data-{role}"

    def foundation(self, environment: Environment) -> Foundation | None:
        """The region's network, where it is not there or does not know this controller's address.

        Raises:
            HostError: another controller made it, and its state is not shared.
        """
        region = environment.placement["region"]
        found = find_network(self._api, region)
        known = found.controllers if found else frozenset()
        stack = f"network-aws-{self._identity['Account']}-{region}"
        cut_short = (self._home.stacks / stack / UNFINISHED).exists()
        if found and self._controllers <= known and not cut_short:
            self._networks[region] = found
            return None
        if found and not self._state and not (self._home.stacks / stack).exists():
            raise HostError(
                f"The network in {region} was made by another controller, and lets in {', '.join(sorted(known))} only.",
                hint="Share its Terraform state (--state s3://bucket/prefix), or let that controller add "
                f"{', '.join(sorted(self._controllers))} to its controller_cidrs.",
            )
        self._networks.pop(region, None)  # it is about to change
        values = {
            "region": region,
            "availability_zones": zones_of(self._api, region),
            "controller_cidrs": sorted(known | self._controllers),
            "tags": {
                NETWORK_TAG: region,
                HOME_TAG: self._home.identity,
                tagged_resources.OWNER_TAG: self._owner,
            },
        }
        new = found is None or cut_short
        return Foundation(stack=stack, values=values, root_files=self._root_files(region, stack), new=new)

    def raze(self, environment: Environment) -> None:
        """Removes the region's network, as far as this home has made it."""
        raze_network(self._api, environment.placement["region"], self._home.identity)

    def _network(self, region: str) -> Network:
        if region not in self._networks:
            found = find_network(self._api, region)
            if found is None:
                raise InfrastructureError(f"The network in {region} is not there, or not all of it.")
            self._networks[region] = found
        return self._networks[region]

    def place(self, environment: Environment) -> dict[str, str]:
        """The cheapest types in a zone; zones take turns from environment to environment."""
        return self._places(environment)[0]

    def elsewhere(self, environment: Environment, error: TerraformError) -> tuple[str, dict[str, str]] | None:
        """The next zone, type or market, by what EC2 says it lacks.

        Raises:
            CapacityError: that was the last one.
            HostError: EC2 refuses these credentials.
        """
        for codes, hint in ((REFUSED, RIGHTS_HINT), (NO_LOGIN, LOGIN_HINT)):
            if code := next((code for code in codes if re.search(rf"\b{code}\b", error.said)), None):
                raise HostError(f"{error.message} AWS said {code}.", hint=hint, details=error.details) from error
        if is_repetition(error.said) and environment.id not in self._repeated:
            self._repeated.add(environment.id)
            tagged_resources.remove(self._api, environment.placement["region"], environment.id)
            return "an answer of AWS was lost, and what it made is in the way; making it again", environment.placement
        found = shortage(error.said)
        if found is None:
            return None
        level, why = found
        current = environment.placement
        types = " and ".join(dict.fromkeys(current[role] for role in environment.machines))
        reason = why.format(types=types, zone=current["zone"])
        following = next_place(self._places(environment), current, level)
        if following is None:
            raise CapacityError(
                f"{environment.id} could not be created: {reason}, and there is nothing else to try.",
                hint="Allow another --region, widen the spec's ranges, or ask AWS for a larger quota.",
                details=error.details,
            )
        return f"{reason}; trying {_words(following, environment)}", following

    def _places(self, environment: Environment) -> list[dict[str, str]]:
        region = environment.placement.get("region", self._region)
        zones = sorted(self._zones(region))
        turn = int.from_bytes(sha256(environment.id.encode()).digest()[:2], "big") % len(zones)
        # A spot instance cannot be stopped, and a builder must be.
        spot = self._spot and environment.kind == "task"
        sizes = {str(role): machine.size for role, machine in environment.machines.items()}
        where = {"region": region, "account": self._identity["Account"], "profile": self._profile, "state": self._state}
        where |= self._allowlist(environment, region)
        return [{**where, **one} for one in places(sizes, zones[turn:] + zones[:turn], spot=spot)]

    def _zones(self, region: str) -> list[str]:
        found = self._networks.get(region) or find_network(self._api, region)
        if found is None:
            return zones_of(self._api, region)
        self._networks[region] = found
        return list(found.subnets["online"])

    def _allowlist(self, environment: Environment, region: str) -> dict[str, str]:
        """The network of the environment's own subnet, once chosen for good; none without an allowlist."""
        if not environment.allowed_destinations:
            return {}
        chosen = environment.placement.get("allowlist")
        if chosen is None:
            network = self._networks.get(region)
            chosen = allowlist_subnet(environment.id, {*(network.taken if network else ()), *self._given})
            self._given.add(chosen)
        return {"allowlist": chosen}

    def stack_values(self, environment: Environment) -> dict[str, Any]:
        """Network, instance types, user data and tags."""
        placement = environment.placement
        network = self._network(placement["region"])
        kind = "online" if environment.full_internet else "offline"
        allowlist = None
        if environment.allowed_destinations:
            allowlist = {
                "cidr": placement["allowlist"],
                "zone": placement["zone"],
                "gateway_id": network.gateways["offline"],
            }
        return {
            "images": {role: self._ami_id(machine.image) for role, machine in environment.machines.items()},
            "vpc_id": network.vpcs[kind],
            "subnet_id": network.subnets[kind][placement["zone"]],
            "controller_cidrs": sorted(network.controllers),
            "instance_types": {role: placement[role] for role in environment.machines},
            "user_data": {role: self._user_data(environment, role).read_text() for role in environment.machines},
            "spot": placement["market"] == "spot",
            "allowlist": allowlist,
            "expires_at": schedules.moment(environment.expires_at),
            "scheduler_role_arn": schedules.role_arn(self._identity["Account"], placement["region"]),
            "tags": self._tags(environment),
        }

    def _tags(self, environment: Environment) -> dict[str, str]:
        return {
            tagged_resources.OWNER_TAG: self._owner,
            HOME_TAG: self._home.identity,
            "provisioner:stack": environment.stack,
            "provisioner:batch": environment.batch or "none",
            tagged_resources.CREATED_TAG: tagged_resources.when(environment.created_at),
        }

    @cached_property
    def _owner(self) -> str:
        try:
            return getpass.getuser()
        except (KeyError, OSError):
            return "unknown"

    def root_files(self, environment: Environment) -> dict[str, str]:
        """The provider, and the backend of the state if it is not local."""
        return self._root_files(environment.placement["region"], environment.stack)

    def _root_files(self, region: str, stack: str) -> dict[str, str]:
        account = {"region": region, **({"profile": self._profile} if self._profile else {})}
        # Leases come and go without Terraform.
        ignored = {"keys": [tagged_resources.LEASE_TAG]}
        provider = {"provider": {"aws": [{**account, "max_retries": PROVIDER_RETRIES, "ignore_tags": [ignored]}]}}
        files = {"provider.tf.json": json.dumps(provider, indent=2)}
        if self._state:
            bucket, _, prefix = self._state.removeprefix("s3://").partition("/")
            key = "/".join(part for part in (prefix.strip("/"), stack, "terraform.tfstate") if part)
            backend = {"bucket": bucket, "key": key, "use_lockfile": True, "encrypt": True, **account}
            files["backend.tf.json"] = json.dumps({"terraform": {"backend": {"s3": backend}}}, indent=2)
        return files

    # Machines that are up

    def host_key(self, environment: Environment, role: Role) -> str | None:
        """The key that cloud-init printed on the console at the first boot."""
        return hardening.host_key(self.console(environment, role))

    def seal(self, environment: Environment, connections: Mapping[Role, Connection]) -> None:
        """Writes the hosts files, and switches the metadata service off.

        Raises:
            InfrastructureError: AWS did not confirm that in time.
        """
        hardening.seal(self._api, environment, connections)

    def _instances(self, environment: Environment) -> list[dict[str, Any]]:
        if "region" not in environment.placement:  # nothing was placed yet, so nothing was created
            return []
        return tagged_resources.instances(self._api, environment.placement["region"], environment.id)

    def alive(self, environment: Environment, role: Role) -> bool:
        """Whether EC2 calls the machine anything but stopped or terminated; asked every few seconds at most."""
        key = (environment.id, role)
        asked_at, answer = self._seen.get(key, (0.0, False))
        if time.monotonic() - asked_at > ALIVE_SECONDS:
            name = self._instance(environment, role)
            states = {one["InstanceId"]: one["State"]["Name"] for one in self._instances(environment)}
            answer = states.get(name, "terminated") not in ("stopped", "terminated")
            self._seen[key] = (time.monotonic(), answer)
        return answer

    def ending(self, environment: Environment, role: Role) -> Ending:
        """By its state reason, such as `Server.SpotInstanceTermination: ...` (EC2 API reference, StateReason)."""
        name = self._instance(environment, role)
        for one in self._instances(environment):
            if one["InstanceId"] == name:
                reason = one.get("StateReason") or {}
                code = str(reason.get("Code") or "")
                return Ending(str(reason.get("Message") or code), by_itself=code == SWITCHED_OFF)
        return Ending()

    def _instance(self, environment: Environment, role: Role) -> str | None:
        endpoint = environment.endpoints.get(role)
        return endpoint.instance_id if endpoint else None

    def console(self, environment: Environment, role: Role) -> str:
        """The end of the serial console, as EC2 keeps it."""
        instance = self._instance(environment, role)
        if instance is None:
            return ""
        try:
            with asking("Reading the console"):
                ec2 = self._api.client("ec2", environment.placement["region"])
                return str(ec2.get_console_output(InstanceId=instance, Latest=True).get("Output", ""))
        except InfrastructureError:  # an instance that is gone, or just coming, has none
            return ""

    def move_limit(self, environment: Environment) -> None:
        """Moves the schedule, and what the tags say of it."""
        region = environment.placement["region"]
        schedules.move(self._api, region, environment.id, environment.expires_at)
        tagged_resources.retag(
            self._api,
            region,
            environment.id,
            {tagged_resources.EXPIRY_TAG: tagged_resources.when(environment.expires_at)},
        )

    def renew(self, environment: Environment) -> None:
        """Says in a tag how long others shall take this controller for alive."""
        until = {tagged_resources.LEASE_TAG: tagged_resources.when(now() + LEASE)}
        tagged_resources.retag(self._api, environment.placement["region"], environment.id, until)

    def survey(self, regions: Sequence[str] | None) -> list[Found]:
        """All that carries our tags, region by region."""
        places = self._all_regions() if regions is None else regions
        with ThreadPoolExecutor(max_workers=SURVEYS) as pool:
            return [one for found in pool.map(lambda r: tagged_resources.survey(self._api, r), places) for one in found]

    def _all_regions(self) -> list[str]:
        with asking("Listing regions"):
            found = self._api.client("ec2").describe_regions()["Regions"]
        return sorted(str(region["RegionName"]) for region in found)

    def clear(self, found: Found) -> bool:
        """Removes what has the environment's tag.

        Returns:
            whether its schedule was there, which is made once all its instances are.

        Raises:
            StillThereError: something would not go.
        """
        complete = bool(schedules.names(self._api, found.region, found.environment))
        tagged_resources.remove(self._api, found.region, found.environment)
        if still := tagged_resources.left(self._api, found.region, found.environment):
            raise StillThereError(f"{found.environment} is not gone: {', '.join(still)}")
        return complete

    def left(self, environment: Environment) -> list[str]:
        """What EC2 still has with the environment's tag."""
        if "region" not in environment.placement:
            return []
        return tagged_resources.left(self._api, environment.placement["region"], environment.id)

    def remove(self, environment: Environment) -> None:
        """Removes what has the environment's tag."""
        if "region" in environment.placement:
            tagged_resources.remove(self._api, environment.placement["region"], environment.id)

    def gateways(self, environment: Environment) -> list[str]:
        """The subnet's router and the VPC's resolver: in a VPC, neither leads to the controller."""
        block = "10.214.0" if environment.full_internet else "10.215.0"
        return [f"{block}.1", f"{block}.2"]


def _words(place: Mapping[str, str], environment: Environment) -> str:
    types = " and ".join(dict.fromkeys(place[role] for role in environment.machines))
    return f"{types} in {place['zone']} ({place['market']})"
