"""Patches moto where it differs from EC2 in a way that Terraform would take for a change.

- A network interface without a public address has no association, where moto shows an empty one.
- An instance that was launched with a network interface is in that interface's groups, where moto shows none.
- ModifyInstanceAttribute does not know what becomes of an instance that is switched off.
- DeleteSubnet ends the subnet's associations with its route table and its network ACL.
- CreateServiceLinkedRole says InvalidInput where the role exists.
- A spot instance has a request.
- A dry run of any EC2 request does nothing.
- An account has quotas of vCPUs, and Service Quotas tells them.
- A network ACL holds 20 rules in each direction.
- A root volume is no smaller than its AMI's.
- What CreateImage has made, and the stop before it, show only at the next question.
- Some accounts are on the free plan, or may not use the key of their disks; and EC2 forgets ended instances.
- VPC Block Public Access can be asked for.
- ModifyInstanceAttribute without groups leaves the groups alone, where moto takes them all away.

It also makes moto faster, which took too long with hundreds of environments. Unpatched, moto searches the tags of all
resources for those of one, searches all members of a class for each request, and takes seconds to list all instance
types, of which only a few families are left here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, ClassVar

from moto.core import responses
from moto.core.responses import ActionResult, BaseResponse
from moto.core.utils import camelcase_to_underscores
from moto.ec2.exceptions import EC2ClientError, InvalidAMIIdError
from moto.ec2.models import EC2Backend
from moto.ec2.models.amis import Ami
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instance_types import INSTANCE_TYPES, InstanceTypeBackend
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.responses import EC2Response
from moto.ec2.responses._base_response import EC2BaseResponse
from moto.ec2.responses.amis import AmisResponse
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix, random_spot_request_id
from moto.iam.exceptions import EntityAlreadyExists, InvalidInput
from moto.iam.models import IAMBackend
from moto.servicequotas.models import ServiceQuotasBackend

# AWS is no faster. The provider's SDK closes a request's body as soon as the answer begins; where the transport has not
# yet looked for the body's end, it takes that for a failure to send and drops the answer, and the SDK calls again.
ANSWER_SECONDS = 0.01
FAMILIES = ("t2", "t3", "t4g", "m5", "c5", "r5", "g4dn", "p3")


def take_time() -> None:
    """Waits before each answer."""
    time.sleep(ANSWER_SECONDS)


@cache
def close_gaps() -> None:
    """Patches moto; again makes no difference."""
    for gap in (
        _associations, _groups, _switching_off, _deleted_subnets, _own_tags, _spot_role, _spot_requests, _root_volumes,
        _long_acls, _vcpus, _dry_runs, _new_images, _modes, _public_access,
    ):  # fmt: skip
        gap()
    sold: Any = InstanceTypeBackend
    sold.instance_types = [one for one in sold.instance_types if one["InstanceType"].split(".")[0] in FAMILIES]
    dispatch: Any = responses
    dispatch.method_names_from_class = cache(dispatch.method_names_from_class)


def replaces(owner: type, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has a function take the place of a method, which it gets as its first argument; or of a property's getter."""
    original: Any = getattr(owner, name)

    def replace(patched: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(original, property):
            setattr(owner, name, property(lambda self: patched(original.fget, self)))
        else:
            setattr(owner, name, wraps(original)(lambda *args, **named: patched(original, *args, **named)))
        return patched

    return replace


def _dry_runs() -> None:
    @replaces(BaseResponse, "call_action")
    def act(original: Any, self: Any) -> Any:
        if isinstance(self, EC2BaseResponse) and self._get_bool_param("DryRun"):
            setattr(self, camelcase_to_underscores(self._get_action()), self.error_on_dryrun)
        return original(self)


def _associations() -> None:
    @replaces(NetworkInterface, "association")
    def association(original: Any, self: Any) -> Any:
        return original(self) or None


def _groups() -> None:
    @replaces(Instance, "prep_nics")
    def prep_nics(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not self.security_groups:
            self.security_groups = list(self.nics[0]._group_set)

    @replaces(EC2Backend, "modify_instance_security_groups")
    def modify_groups(original: Any, self: Any, instance_id: str, groups: list[str]) -> None:
        if groups:
            original(self, instance_id, groups)


def _switching_off() -> None:
    @replaces(InstanceResponse, "_dot_value_instance_attribute_handler")
    def dotted(original: Any, self: Any) -> bool:
        behavior = self._get_param("InstanceInitiatedShutdownBehavior.Value") or self._get_param(
            "InstanceInitiatedShutdownBehavior", {}
        ).get("Value")
        if behavior:
            instance_id = self._get_param("InstanceId")
            self.ec2_backend.modify_instance_attribute(instance_id, "instance_initiated_shutdown_behavior", behavior)
        return bool(behavior) or bool(original(self))


def _deleted_subnets() -> None:
    @replaces(EC2Backend, "delete_subnet")
    def delete_subnet(original: Any, self: Any, subnet_id: str) -> Any:
        deleted = original(self, subnet_id)
        for table in self.route_tables.values():
            for name in [name for name, subnet in table._associations.items() if subnet == subnet_id]:
                del table._associations[name]
        for acl in self.network_acls.values():
            for name in [name for name, association in acl._associations.items() if association.subnet_id == subnet_id]:
                del acl._associations[name]
        return deleted


def _spot_role() -> None:
    @replaces(IAMBackend, "create_service_linked_role")
    def create(original: Any, self: Any, *arguments: Any) -> Any:
        try:
            return original(self, *arguments)
        except EntityAlreadyExists as error:
            raise InvalidInput("Service role name X has been taken in this account.") from error


def _own_tags() -> None:
    @replaces(TaggedEC2Resource, "get_tags")
    def own_tags(_: Any, self: Any) -> list[dict[str, str]]:
        kind = EC2_PREFIX_TO_RESOURCE.get(get_prefix(self.id), "") if self.id else ""
        return [
            {"resource_id": self.id, "key": key, "value": value, "resource_type": kind}
            for key, value in self.ec2_backend.tags.get(self.id, {}).items()
        ]


# Amazon VPC user guide, "Amazon VPC quotas": rules in each direction, with the one that denies the rest.
RULES = 20
# The rule that denies the rest, which moto's ACLs lack. It counts.
LAST = 32767


def _long_acls() -> None:
    @replaces(EC2Backend, "create_network_acl_entry")
    def create(original: Any, self: Any, network_acl_id: str, *arguments: Any, **named: Any) -> Any:
        entry = original(self, network_acl_id, *arguments, **named)
        acl = self.get_network_acl(network_acl_id)
        others = [one for one in acl.network_acl_entries if one.egress == entry.egress and int(one.rule_number) < LAST]
        if len(others) + 1 > RULES:
            acl.network_acl_entries.remove(entry)
            raise EC2ClientError("NetworkAclEntryLimitExceeded", "You've reached the limit of rules in a network ACL.")
        return entry


# Amazon EC2 user guide, "Amazon EC2 instance type quotas": on demand and spot apart; all standard families together.
# The default is of an account that has asked for more: a new one has 5 or 32.
DEFAULT_VCPUS = 4000
STANDARD = {"on-demand": "L-1216C47A", "spot": "L-34B43A08"}
# By region and code, where a test wants others.
quotas: dict[tuple[str, str], int] = {}


def _vcpus() -> None:
    def quota(region: str, code: str) -> int:
        return quotas.get((region, code), DEFAULT_VCPUS)

    def is_standard(name: Any) -> bool:
        return str(name)[:1] in "acdhimrtz"

    def vcpus(name: Any) -> int:
        return int(INSTANCE_TYPES.get(str(name), {}).get("VCpuInfo", {}).get("DefaultVCpus", 1))

    @replaces(EC2Backend, "run_instances")
    def run(original: Any, self: Any, image_id: str, count: int, *arguments: Any, **named: Any) -> Any:
        market = "spot" if named.get("instance_market_options") else "on-demand"
        instances = [one for row in self.reservations.values() for one in row.instances]
        used = sum(
            vcpus(one.instance_type)
            for one in instances
            if one.state in ("pending", "running") and is_standard(one.instance_type)
            if ("spot" if one.lifecycle == "spot" else "on-demand") == market
        )
        name = named.get("instance_type")
        if is_standard(name) and used + count * vcpus(name) > quota(self.region_name, STANDARD[market]):
            if market == "spot":
                raise EC2ClientError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
            raise EC2ClientError("VcpuLimitExceeded", "You have requested more vCPU capacity than your current limit.")
        return original(self, image_id, count, *arguments, **named)

    @replaces(ServiceQuotasBackend, "get_service_quota")
    def tell(original: Any, self: Any, service_code: str, quota_code: str) -> Any:
        if service_code != "ec2":
            return original(self, service_code, quota_code)
        return {"ServiceCode": "ec2", "QuotaCode": quota_code, "Value": float(quota(self.region_name, quota_code))}


AMAZON = "137112412989"


def add_vendor_image(backend: Any, name: str, root_gib: int, owner: str = AMAZON, architecture: str = "x86_64") -> str:
    """Adds a vendor's image with a root volume of its own size, and returns its id."""
    image = backend.register_image(name)
    image.owner_id, image.architecture, image.root_gib = owner, architecture, root_gib
    image.owner_alias = "amazon" if owner == AMAZON else None
    return str(image.id)


def _root_volumes() -> None:
    """EC2 API reference, "EbsBlockDevice": a volume's size must be equal to or larger than its snapshot's."""

    @replaces(Ami, "block_device_mappings")
    def shown(original: Any, self: Any) -> Any:
        mappings = original(self)
        if hasattr(self, "root_gib"):
            mappings[0]["Ebs"]["VolumeSize"] = self.root_gib
        return mappings

    @replaces(EC2Backend, "run_instances")
    def run(original: Any, self: Any, image_id: str, *args: Any, **kwargs: Any) -> Any:
        image = self.amis.get(image_id)
        roots: list[Any] = image.block_device_mappings if image else []
        for root, mapping in itertools.product(roots, kwargs.get("block_device_mappings") or []):
            asked, least = int(mapping.get("Ebs", {}).get("VolumeSize") or 0), root["Ebs"]["VolumeSize"]
            if mapping["DeviceName"] == root["DeviceName"] and 0 < asked < least:
                raise EC2ClientError(
                    "InvalidBlockDeviceMapping",
                    f"Volume of size {asked}GB is smaller than snapshot '{root['Ebs']['SnapshotId']}', expect size>= "
                    f"{least}GB",
                )
        return original(self, image_id, *args, **kwargs)


class SpotRequest:
    """A request that RunInstances made, with the attributes of EC2's SpotInstanceRequest."""

    type = "one-time"
    status: ClassVar = {"Code": "fulfilled", "Message": "Your spot request is fulfilled."}
    tags: ClassVar[list[dict[str, str]]] = []

    def __init__(self, instance: Any) -> None:
        self.id = self.spot_instance_request_id = random_spot_request_id()
        self.instance_id = instance.id
        self.cancelled = False
        self._instance = instance

    @property
    def state(self) -> str:
        """What EC2 calls it now."""
        if self._instance.state == "terminated":
            return "closed"
        return "cancelled" if self.cancelled else "active"

    def get_filter_value(self, name: str, *_: Any) -> str:
        """Returns what a filter compares."""
        return {"state": self.state, "spot-instance-request-id": self.spot_instance_request_id}[name]


def _spot_requests() -> None:
    """EC2 user guide, "Spot Instance request status": RunInstances makes a one-time request without tags.

    It is `active` while its instance runs, and `closed` once that has ended.
    """

    @replaces(EC2Backend, "run_instances")
    def run(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        reservation = original(self, *args, **kwargs)
        if kwargs.get("instance_market_options"):
            for instance in reservation.instances:
                request = SpotRequest(instance)
                instance.instance_lifecycle = "spot"
                instance.spot_instance_request_id = request.spot_instance_request_id
                self.spot_instance_requests[request.spot_instance_request_id] = request
        return reservation

    @replaces(EC2Backend, "cancel_spot_instance_requests")
    def cancel(original: Any, self: Any, request_ids: list[str]) -> Any:
        ours = [self.spot_instance_requests.get(name) for name in request_ids]
        if not all(isinstance(request, SpotRequest) for request in ours):
            return original(self, request_ids)
        for request in ours:
            request.cancelled = True
        return ours


def _new_images() -> None:
    """What one request has changed, the next may not see yet.

    EC2 API reference, "Ensuring idempotency" and "Eventual consistency": DescribeImages may say at first that a new
    image does not exist, and CreateImage that an instance that has just been stopped is neither running nor stopped.
    """

    def is_unseen(resource: Any) -> bool:  # only the first call finds that
        unseen = getattr(resource, "unseen", 0)
        resource.unseen = 0
        return bool(unseen)

    @replaces(Instance, "stop")
    def stop(original: Any, self: Any) -> Any:
        self.unseen = 1
        return original(self)

    @replaces(EC2Backend, "create_image")
    def create(
        original: Any, self: Any, instance_id: str, name: str, description: str, tag_specifications: list[Any]
    ) -> Any:
        instance = self.get_instance(instance_id)
        if instance.state not in ("running", "stopped") or is_unseen(instance):
            raise EC2ClientError("IncorrectInstanceState", f"Instance '{instance_id}' is not 'running' or 'stopped'.")
        # moto does not know the tags of snapshots.
        image_tags = [given for given in tag_specifications if given["ResourceType"] == "image"]
        image = original(self, instance_id, name, description, image_tags)
        for tag in (tag for given in tag_specifications if given not in image_tags for tag in given["Tags"]):
            image.ebs_snapshot.add_tag(tag["Key"], tag["Value"])
        image.unseen = 1
        return image

    @replaces(AmisResponse, "describe_images")
    def describe(original: Any, self: Any) -> Any:
        answer = original(self)
        images = answer.result["Images"]
        seen = [image for image in images if not is_unseen(image)]
        if self._get_param("ImageIds", []) and len(seen) < len(images):
            raise InvalidAMIIdError([image.id for image in images if image not in seen])
        answer.result["Images"] = seen
        return answer


FREE_TYPES = ("t3.micro", "t3.small", "t4g.micro", "t4g.small", "c7i-flex.large", "m7i-flex.large")
NOT_FREE = (
    "The specified instance type is not eligible for Free Tier. For a list of Free Tier instance types, run "
    "'describe-instance-types' with the filter 'free-tier-eligible=true'."
)
ENDED_AT_LAUNCH = ("Client.InternalError: Client error on launch", "Client.InternalError")


@dataclass
class Modes:
    """How the accounts of this process behave.

    Args:
        free_plan: whether they are on the free plan.
        without_key: whether the key of every disk is closed to them.
        public_access: the mode of VPC Block Public Access.
        forgets_after_seconds: how long an ended instance is known.
        lingers: whether instances that are told to end stay in `shutting-down`, as those with GPUs do for many minutes.
    """

    free_plan: bool = False
    without_key: bool = False
    public_access: str = "off"
    forgets_after_seconds: float = 3600.0
    lingers: bool = False
    _ended: list[tuple[float, Any]] = field(default_factory=list)

    def reset(self) -> None:
        """Lets the accounts behave as usual."""
        usual = Modes()
        self.free_plan, self.without_key = usual.free_plan, usual.without_key
        self.forgets_after_seconds, self.public_access = usual.forgets_after_seconds, usual.public_access
        self.end_lingering()

    def end_lingering(self) -> None:
        """Lets the instances end that are shutting down."""
        self.lingers = False
        for _, instance in self._ended:
            instance._state.name, instance._state.code = "terminated", 48

    def note_end(self, instance: Any) -> None:
        """Notes that an instance has ended."""
        self._ended.append((time.monotonic(), instance))

    def forget_ended(self, before: float | None = None) -> None:
        """Forgets the instances that ended too long ago.

        Args:
            before: a time of the monotonic clock; None for as long ago as EC2 remembers.
        """
        if not self._ended:
            return
        before = time.monotonic() - self.forgets_after_seconds if before is None else before
        for _, instance in [pair for pair in self._ended if pair[0] < before]:
            reservations = instance.ec2_backend.reservations
            for name, reservation in list(reservations.items()):
                if instance in reservation.instances:
                    reservation.instances.remove(instance)
                    if not reservation.instances:
                        del reservations[name]
        self._ended = [pair for pair in self._ended if pair[0] >= before]


modes = Modes()


def _modes() -> None:
    """What EC2 does in some accounts or after some time.

    - An account of the free plan may launch a few types only (AWS Billing user guide, "Free Tier"; EC2 user guide,
      "Amazon EC2 Free Tier").
    - An instance whose disk's key these credentials may not use ends as soon as it has started (Amazon EC2 user guide,
      "Instance terminates immediately").
    - EC2 no longer knows an instance that ended an hour ago (EC2 API reference, "TerminateInstances").
    - An instance may take long to end (EC2 user guide, "How instance termination works").
    """

    @replaces(EC2Backend, "run_instances")
    def run(original: Any, self: Any, image_id: str, count: int, *arguments: Any, **named: Any) -> Any:
        if modes.free_plan and named.get("instance_type") not in FREE_TYPES:
            raise EC2ClientError("InvalidParameterCombination", NOT_FREE)
        reservation = original(self, image_id, count, *arguments, **named)
        if modes.without_key:
            for instance in reservation.instances:
                instance.terminate()
                instance.state_reason = StateReason(*ENDED_AT_LAUNCH)
        return reservation

    @replaces(Instance, "terminate")
    def terminate(original: Any, self: Any) -> Any:
        if self.state != "terminated":
            modes.note_end(self)
        previous = original(self)
        if modes.lingers:
            self._state.name, self._state.code = "shutting-down", 32
        return previous


def _public_access() -> None:
    def describe(self: Any) -> ActionResult:
        options = {"State": "default-state", "InternetGatewayBlockMode": modes.public_access, "ManagedBy": "account"}
        return ActionResult({"VpcBlockPublicAccessOptions": options})

    ec2: Any = EC2Response
    ec2.describe_vpc_block_public_access_options = describe
