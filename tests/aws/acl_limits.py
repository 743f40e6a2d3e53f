"""Refuses more rules than a network ACL holds, as EC2 does without a larger quota.

Amazon VPC user guide, "Amazon VPC quotas": 20 in each direction, with the one that denies the rest.
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend

RULES = 20
# The rule that denies the rest, which moto's ACLs lack. It counts.
LAST = 32767


def refuse_long_acls() -> None:
    """Patches moto."""
    create: Any = EC2Backend.create_network_acl_entry

    def patched(self: Any, network_acl_id: str, *arguments: Any, **named: Any) -> Any:
        entry = create(self, network_acl_id, *arguments, **named)
        acl = self.get_network_acl(network_acl_id)
        others = [one for one in acl.network_acl_entries if one.egress == entry.egress and int(one.rule_number) < LAST]
        if len(others) + 1 > RULES:
            acl.network_acl_entries.remove(entry)
            raise EC2ClientError("NetworkAclEntryLimitExceeded", "You've reached the limit of rules in a network ACL.")
        return entry

    setattr(EC2Backend, "create_network_acl_entry", patched)  # noqa: B010
