"""Knows moto's resources, for the judgement of calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moto.ec2.models import ec2_backends

from tests.aws.rights.requests import ACCOUNT

# DescribeImages calls these accounts `amazon`.
AMAZON = ("801119661308", "137112412989", "898082745236")


class MotoWorld:
    """The resources of moto's default account."""

    def tags(self, region: str, resource: str) -> Mapping[str, str]:
        """Returns the tags of a resource, by its id, or a key pair's name."""
        backend = _backend(region)
        pair = backend.key_pairs.get(resource)
        tags: Mapping[str, str] = backend.tags.get(pair.id if pair else resource, {})
        return tags

    def lacks_key_pair(self, region: str, name: str) -> bool:
        """Returns whether no key pair has this name."""
        return bool(name) and name not in _backend(region).key_pairs

    def owner(self, region: str, resource: str) -> str:
        """Returns who owns an image or a snapshot."""
        backend = _backend(region)
        owned = backend.amis.get(resource) or backend.snapshots.get(resource)
        owner = str(owned.owner_id) if owned else "unknown"
        return "amazon" if owner in AMAZON else owner

    def associated(self, region: str, association: str) -> list[str]:
        """Returns the ids of what an association joins."""
        backend = _backend(region)
        for table in backend.route_tables.values():
            if association in table._associations:
                return [table.id, table._associations[association]]
        # The new ACL is a parameter of its own, and the old one is not asked about.
        for acl in backend.network_acls.values():
            if association in acl._associations:
                return [acl._associations[association].subnet_id]
        return []


def _backend(region: str) -> Any:
    return ec2_backends[ACCOUNT][region]
