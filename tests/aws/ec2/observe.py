"""Reads EC2's network from moto's backend, in network.py's terms. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from tests.aws.ec2.network import AclEntry, Group, GroupRule, Interface, Network, Route, Subnet, Vpc


def observe(instances: Iterable[tuple[Any, Any]]) -> Network:
    """Returns the network of all regions.

    Args:
        instances: pairs of a region's backend and a moto instance that has a machine.
    """
    return Network(_interface(backend, instance) for backend, instance in instances)


def _interface(backend: Any, instance: Any) -> Interface:
    nic = instance.nics[0]
    # ModifyInstanceAttribute changes the instance's groups; a launch with an interface of its own sets only the latter.
    groups = instance.security_groups or nic._group_set
    return Interface(
        instance_id=instance.id,
        address=IPv4Address(nic.private_ip_address),
        public_address=IPv4Address(nic.public_ip) if nic.public_ip else None,
        vpc=_vpc(backend.get_vpc(nic.subnet.vpc_id)),
        subnet=_subnet(backend, nic.subnet),
        # Looked up again by id, as deleted groups permit nothing.
        groups=tuple(_group(current) for group in groups if (current := backend.get_security_group_from_id(group.id))),
        metadata=instance.metadata_options.http_endpoint != "disabled",
    )


def _vpc(vpc: Any) -> Vpc:
    networks = tuple(
        IPv4Network(association["cidr_block"]) for association in vpc.get_cidr_block_association_set(ipv6=False)
    )
    return Vpc(vpc.id, networks, _true(vpc.enable_dns_support))


def _true(value: Any) -> bool:
    """Reads a boolean of the API, which moto keeps as a boolean or as text."""
    return str(value).lower() == "true"


def _group(group: Any) -> Group:
    return Group(group.id, tuple(_rules(group.ingress_rules)), tuple(_rules(group.egress_rules)))


def _rules(rules: Iterable[Any]) -> Iterable[GroupRule]:
    for rule in list(rules):
        network = rule.cidr_ipv4 and IPv4Network(rule.cidr_ipv4, strict=False)
        group_id = (rule.source_group or {}).get("GroupId")
        if network is None and group_id is None:
            continue  # IPv6 and prefix lists, which nothing here uses
        first, last = rule.from_port, rule.to_port
        yield GroupRule(str(rule.ip_protocol), _port(first), _port(last), network, group_id)


def _port(value: Any) -> int:
    return -1 if value is None else int(value)


def _subnet(backend: Any, subnet: Any) -> Subnet:
    tables = [table for table in list(backend.route_tables.values()) if table.vpc_id == subnet.vpc_id]
    own = [table for table in tables if subnet.id in list(table._associations.values())]
    main = [table for table in tables if table.main_association_id]
    acls = [
        acl
        for acl in list(backend.network_acls.values())
        if any(association.subnet_id == subnet.id for association in acl.associations)
    ]
    return Subnet(
        subnet.id,
        IPv4Network(subnet.cidr_block),
        tuple(route for table in (own or main)[:1] for route in _routes(backend, table)),
        tuple(entry for acl in acls[:1] for entry in _acl_entries(acl)),
    )


def _routes(backend: Any, table: Any) -> Iterable[Route]:
    for route in table.routes:
        if not route.destination_cidr_block:
            continue
        gateway = backend.internet_gateways.get(getattr(route.gateway, "id", None))
        attached = gateway is not None and gateway.vpc is not None and gateway.vpc.id == table.vpc_id
        yield Route(IPv4Network(route.destination_cidr_block), local=bool(route.local), internet=attached)


def _acl_entries(acl: Any) -> Iterable[AclEntry]:
    for entry in list(acl.network_acl_entries):
        if not entry.cidr_block:
            continue
        yield AclEntry(
            number=int(entry.rule_number),
            egress=_true(entry.egress),
            allow=entry.rule_action == "allow",
            protocol=int(entry.protocol),
            network=IPv4Network(entry.cidr_block, strict=False),
            first=_port(entry.port_range_from),
            last=_port(entry.port_range_to),
        )
