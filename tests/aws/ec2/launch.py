"""Derives a machine's hardware, cloud-init files and metadata from moto's instance. Pure."""

from __future__ import annotations

import base64
import json
import os
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from tests.aws.ec2.ami import DISK_GIB
from tests.aws.ec2.machine import Hardware


def hardware(backend: Any, instance: Any, image: Path, boot: Path, *, quick: bool) -> Hardware:
    """Returns the hardware of an instance's machine.

    Args:
        backend, instance: moto's objects.
        image: the disk of the instance's image.
        boot: directory with `vmlinuz` and `initrd.img`.
        quick: whether cloud-init gets its data from SMBIOS, or as on EC2.
    """
    nic = instance.nics[0]
    kind = INSTANCE_TYPES[instance.instance_type]
    return Hardware(
        kernel=boot / "vmlinuz",
        initrd=boot / "initrd.img",
        image=image,
        disk_gib=root_gib(backend, instance),
        # More CPUs than the host has would only slow it down. Memory is allocated when it is touched.
        cpus=min(int(kind["VCpuInfo"]["DefaultVCpus"]), os.cpu_count() or 1),
        memory_mib=min(int(kind["MemoryInfo"]["SizeInMiB"]), _host_memory_mib() // 2),
        mac=nic.mac_address,
        address=IPv4Address(nic.private_ip_address),
        network=nic.subnet.cidr,
        public_address=IPv4Address(nic.public_ip) if nic.public_ip else None,
        instance_type=instance.instance_type,
        seed=_seed(backend, instance) if quick else {},
    )


def root_gib(backend: Any, instance: Any) -> int:
    """Returns the size of an instance's root volume."""
    device = instance.block_device_mapping.get(instance.root_device_name)
    volume = backend.volumes.get(device.volume_id) if device else None
    return int(volume.size) if volume else DISK_GIB


def _host_memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def _seed(backend: Any, instance: Any) -> dict[str, bytes]:
    nic = instance.nics[0]
    metadata = {
        "instance-id": instance.id,
        "dsmode": "local",
        "local-hostname": instance.private_dns_name,
        "public-keys": [key] if (key := _public_key(backend, instance)) else [],
    }
    card = {
        "match": {"macaddress": nic.mac_address},
        "addresses": [f"{nic.private_ip_address}/{nic.subnet.cidr.prefixlen}"],
        "gateway4": str(nic.subnet.cidr.network_address + 1),
    }
    return {
        "meta-data": json.dumps(metadata).encode(),
        "user-data": user_data(instance) or b"#cloud-config\n",
        "network-config": json.dumps({"version": 2, "ethernets": {"eth0": card}}).encode(),
    }


def _vpc_network(backend: Any, instance: Any) -> IPv4Network:
    return IPv4Network(backend.vpcs[instance.nics[0].subnet.vpc_id].cidr_block)


def _public_key(backend: Any, instance: Any) -> str | None:
    pair = backend.key_pairs.get(instance.key_name)
    return pair.public_key.strip() if pair else None


def user_data(instance: Any) -> bytes:
    """Returns an instance's user data, decoded."""
    return base64.b64decode(str(instance.user_data)) if instance.user_data else b""


def metadata_values(backend: Any, instance: Any) -> dict[str, bytes]:
    """Returns the paths and contents that the metadata service serves below /latest/."""
    nic = instance.nics[0]
    document = {
        "accountId": instance.owner_id,
        "architecture": instance.architecture,
        "availabilityZone": instance.availability_zone,
        "imageId": instance.image_id,
        "instanceId": instance.id,
        "instanceType": instance.instance_type,
        "privateIp": nic.private_ip_address,
        "region": backend.region_name,
    }
    # Of the instance identity role, which every instance has without a profile (Amazon EC2 user guide, "Instance
    # metadata categories").
    credentials = {
        "Code": "Success", "Type": "AWS-HMAC", "AccessKeyId": "ASIAIOSFODNN7EXAMPLE", "SecretAccessKey": "example",
        "Token": "example",
    }  # fmt: skip
    card = f"meta-data/network/interfaces/macs/{nic.mac_address}"
    values = {
        f"{card}/device-number": "0",
        f"{card}/interface-id": nic.id,
        f"{card}/local-hostname": instance.private_dns_name,
        f"{card}/local-ipv4s": nic.private_ip_address,
        f"{card}/mac": nic.mac_address,
        f"{card}/owner-id": instance.owner_id,
        f"{card}/subnet-id": nic.subnet.id,
        f"{card}/subnet-ipv4-cidr-block": str(nic.subnet.cidr),
        f"{card}/vpc-id": nic.subnet.vpc_id,
        f"{card}/vpc-ipv4-cidr-block": str(_vpc_network(backend, instance)),
        "meta-data/ami-id": instance.image_id,
        "meta-data/ami-launch-index": "0",
        "meta-data/block-device-mapping/ami": "/dev/xvda",
        "meta-data/block-device-mapping/root": "/dev/xvda",
        "meta-data/hostname": instance.private_dns_name,
        "meta-data/identity-credentials/ec2/info": json.dumps({"Code": "Success", "AccountId": instance.owner_id}),
        "meta-data/identity-credentials/ec2/security-credentials/ec2-instance": json.dumps(credentials),
        "meta-data/instance-id": instance.id,
        "meta-data/instance-type": instance.instance_type,
        "meta-data/local-hostname": instance.private_dns_name,
        "meta-data/local-ipv4": nic.private_ip_address,
        "meta-data/mac": nic.mac_address,
        "meta-data/placement/availability-zone": instance.availability_zone,
        "meta-data/placement/region": backend.region_name,
        "dynamic/instance-identity/document": json.dumps(document, indent=2),
    }
    if nic.public_ip:
        values["meta-data/public-ipv4"] = nic.public_ip
    if key := _public_key(backend, instance):
        values[f"meta-data/public-keys/0={instance.key_name}/openssh-key"] = key
    contents = {name: value.encode() for name, value in values.items()}
    if instance.user_data:
        contents["user-data"] = user_data(instance)
    return contents
