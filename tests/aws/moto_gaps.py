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
- ModifyInstanceAttribute without groups leaves the groups alone, where moto takes them all away.

It also makes moto faster, which took too long with hundreds of environments. Unpatched, moto searches the tags of all
resources for those of one, searches all members of a class for each request, and takes seconds to list all instance
types, of which only a few families are left here.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from moto.core import responses
from moto.core.responses import BaseResponse
from moto.core.utils import camelcase_to_underscores
from moto.ec2.models import EC2Backend
from moto.ec2.models.core import TaggedEC2Resource
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instance_types import InstanceTypeBackend
from moto.ec2.models.instances import Instance
from moto.ec2.responses._base_response import EC2BaseResponse
from moto.ec2.responses.instances import InstanceResponse
from moto.ec2.utils import EC2_PREFIX_TO_RESOURCE, get_prefix
from moto.iam.exceptions import EntityAlreadyExists, InvalidInput
from moto.iam.models import IAMBackend

from tests.aws.account_modes import add_modes
from tests.aws.acl_limits import refuse_long_acls
from tests.aws.new_images import delay_new_images
from tests.aws.root_volumes import refuse_small_root_volumes
from tests.aws.spot_requests import add_spot_requests
from tests.aws.vcpu_limits import limit_vcpus

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
    _associations()
    _groups()
    _switching_off()
    _deleted_subnets()
    _own_tags()
    _spot_role()
    add_spot_requests()
    refuse_small_root_volumes()
    refuse_long_acls()
    limit_vcpus()
    _dry_runs()
    delay_new_images()
    add_modes()
    sold: Any = InstanceTypeBackend
    sold.instance_types = [one for one in sold.instance_types if one["InstanceType"].split(".")[0] in FAMILIES]
    dispatch: Any = responses
    dispatch.method_names_from_class = cache(dispatch.method_names_from_class)


def _dry_runs() -> None:
    act: Any = BaseResponse.call_action

    def patched(self: Any) -> Any:
        if isinstance(self, EC2BaseResponse) and self._get_bool_param("DryRun"):
            setattr(self, camelcase_to_underscores(self._get_action()), self.error_on_dryrun)
        return act(self)

    setattr(BaseResponse, "call_action", patched)  # noqa: B010


def _associations() -> None:
    association: Any = NetworkInterface.association

    def shown_association(self: Any) -> Any:
        return association.fget(self) or None

    setattr(NetworkInterface, "association", property(shown_association))  # noqa: B010 - mypy forbids the assignment


def _groups() -> None:
    prep_nics: Any = Instance.prep_nics
    modify_groups: Any = EC2Backend.modify_instance_security_groups

    def patched_prep_nics(self: Any, *args: Any, **kwargs: Any) -> None:
        prep_nics(self, *args, **kwargs)
        if not self.security_groups:
            self.security_groups = list(self.nics[0]._group_set)

    def patched_modify_groups(self: Any, instance_id: str, groups: list[str]) -> None:
        if groups:
            modify_groups(self, instance_id, groups)

    setattr(Instance, "prep_nics", patched_prep_nics)  # noqa: B010
    setattr(EC2Backend, "modify_instance_security_groups", patched_modify_groups)  # noqa: B010


def _switching_off() -> None:
    dotted: Any = InstanceResponse._dot_value_instance_attribute_handler

    def patched_dotted(self: Any) -> bool:
        behavior = self._get_param("InstanceInitiatedShutdownBehavior.Value") or self._get_param(
            "InstanceInitiatedShutdownBehavior", {}
        ).get("Value")
        if behavior:
            instance_id = self._get_param("InstanceId")
            self.ec2_backend.modify_instance_attribute(instance_id, "instance_initiated_shutdown_behavior", behavior)
        return bool(behavior) or bool(dotted(self))

    setattr(InstanceResponse, "_dot_value_instance_attribute_handler", patched_dotted)  # noqa: B010


def _deleted_subnets() -> None:
    delete_subnet: Any = EC2Backend.delete_subnet

    def patched_delete_subnet(self: Any, subnet_id: str) -> Any:
        deleted = delete_subnet(self, subnet_id)
        for table in self.route_tables.values():
            for name in [name for name, subnet in table._associations.items() if subnet == subnet_id]:
                del table._associations[name]
        for acl in self.network_acls.values():
            for name in [name for name, association in acl._associations.items() if association.subnet_id == subnet_id]:
                del acl._associations[name]
        return deleted

    setattr(EC2Backend, "delete_subnet", patched_delete_subnet)  # noqa: B010


def _spot_role() -> None:
    create: Any = IAMBackend.create_service_linked_role

    def patched(self: Any, *arguments: Any) -> Any:
        try:
            return create(self, *arguments)
        except EntityAlreadyExists as error:
            raise InvalidInput("Service role name X has been taken in this account.") from error

    setattr(IAMBackend, "create_service_linked_role", patched)  # noqa: B010


def _own_tags() -> None:
    def own_tags(self: Any) -> list[dict[str, str]]:
        kind = EC2_PREFIX_TO_RESOURCE.get(get_prefix(self.id), "") if self.id else ""
        return [
            {"resource_id": self.id, "key": key, "value": value, "resource_type": kind}
            for key, value in self.ec2_backend.tags.get(self.id, {}).items()
        ]

    setattr(TaggedEC2Resource, "get_tags", own_tags)  # noqa: B010
