"""Fills gaps of moto that matter for instances with real machines. Patches moto in this process, once.

These patches:
- public addresses are our own, on the host's loopback;
- StopInstances goes through `stopping` until the machine is off; TerminateInstances ends the machine before it returns;
- RebootInstances reaches the guest;
- GetConsoleOutput returns the machine's serial console;
- ModifyInstanceMetadataOptions keeps the other options, and is `pending` until it takes effect;
- CreateImage takes a stopped instance's disk, tags snapshots too, and reports the root device and its size;
- an instance launched without block devices gets a root volume of its image's size under its image's device name;
- the network interface that a launch creates is deleted with its instance.
"""

from __future__ import annotations

import base64
import copy
import random
import socket
from collections.abc import Callable
from typing import Any

from moto.core.responses import ActionResult
from moto.core.types import Base64EncodedString
from moto.core.utils import utcnow
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend, elastic_network_interfaces
from moto.ec2.models.amis import Ami
from moto.ec2.models.instances import Instance
from moto.ec2.responses.general import General

from tests.aws.ec2.ami import DISK_GIB
from tests.aws.ec2.launch import root_gib
from tests.aws.ec2.reconciler import Reconciler
from tests.aws.moto_gaps import close_gaps


def install(machines: Reconciler) -> None:
    """Patches moto so that `machines` carries out what moto only records."""
    close_gaps()
    _replace(elastic_network_interfaces, random_public_ip=loopback_address)
    _patch_states(machines)
    _patch_launch()
    _patch_images(machines)
    _patch_metadata_options()

    def get_console_output(self: General) -> ActionResult:
        instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
        output = Base64EncodedString(base64.b64encode(machines.console(instance.id)).decode())
        return ActionResult({"InstanceId": instance.id, "Timestamp": utcnow(), "Output": output})

    _replace(General, get_console_output=get_console_output)


def _replace(owner: object, **replacements: object) -> None:
    for name, replacement in replacements.items():
        assert hasattr(owner, name), f"this moto has no {name}: find its replacement"
        setattr(owner, name, replacement)


def loopback_address() -> str:
    """Returns a free address in 127.64.0.0/10, with no listener on port 22, for use as a public address.

    Raises:
        OSError: this user may not listen on port 22.
    """
    while True:
        address = f"127.{random.randint(64, 127)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
        with socket.socket() as trial:
            try:
                trial.bind((address, 22))
            except PermissionError:
                raise
            except OSError:
                continue
        return address


def _incorrect_state(instance: Any) -> EC2ClientError:
    return EC2ClientError("IncorrectInstanceState", f"Instance {instance.id} is {instance.state}.")


def _patch_states(machines: Reconciler) -> None:
    stop, start, reboot, terminate = Instance.stop, Instance.start, Instance.reboot, Instance.terminate

    def patched_stop(self: Any) -> Any:
        if self.state == "stopping":
            return copy.copy(self._state)
        previous = stop(self)
        if machines.has_machine(self.id):
            self._state.name, self._state.code = "stopping", 64
            machines.press(self.id, "poweroff")
        return previous

    def patched_start(self: Any) -> Any:
        if self.state == "stopping":
            raise _incorrect_state(self)
        return start(self)

    def patched_reboot(self: Any) -> None:
        reboot(self)
        machines.press(self.id, "reboot")

    def patched_terminate(self: Any) -> Any:
        if self.state == "terminated":  # not an error on EC2
            return copy.copy(self._state)
        previous = terminate(self)
        machines.end(self.id)
        return previous

    _replace(Instance, stop=patched_stop, start=patched_start, reboot=patched_reboot, terminate=patched_terminate)


def _patch_launch() -> None:
    prep_nics = Instance.prep_nics

    def patched_prep_nics(self: Any, nic_spec: list[dict[str, Any]], *args: Any, **kwargs: Any) -> None:
        brought = {nic.get("NetworkInterfaceId") for nic in nic_spec}
        prep_nics(self, nic_spec, *args, **kwargs)
        for nic in self.nics.values():
            if nic.id not in brought:
                nic.delete_on_termination = True

    def setup_defaults(self: Any) -> None:
        images = self.ec2_backend.describe_images(filters={"image-id": self.image_id})
        size = getattr(images[0], "root_gib", DISK_GIB) if images else DISK_GIB
        volume = self.ec2_backend.create_volume(size=size, zone_name=self._placement.zone)
        self.ec2_backend.attach_volume(volume.id, self.id, self.root_device_name, True)

    _replace(Instance, prep_nics=patched_prep_nics, setup_defaults=setup_defaults)


def _patch_images(machines: Reconciler) -> None:
    create_image: Callable[..., Any] = EC2Backend.create_image
    copy_image: Callable[..., Any] = EC2Backend.copy_image

    def patched_create(
        self: Any, instance_id: str, name: str, description: str, tag_specifications: list[dict[str, Any]]
    ) -> Any:
        instance = self.get_instance(instance_id)
        if machines.has_machine(instance_id) or instance.state == "terminated":
            raise _incorrect_state(instance)
        ours = [specification for specification in tag_specifications if specification["ResourceType"] == "snapshot"]
        rest = [specification for specification in tag_specifications if specification not in ours]
        image = create_image(self, instance_id, name, description, rest)
        for tag in (tag for specification in ours for tag in specification["Tags"]):
            image.ebs_snapshot.add_tag(tag["Key"], tag["Value"])
        image.root_gib = image.ebs_snapshot.volume.size = root_gib(self, instance)
        image.root_device_name, image.root_device_type = instance.root_device_name, "ebs"
        machines.capture(instance_id, image.id)
        return image

    def patched_copy(self: Any, source_image_id: str, *args: Any, **kwargs: Any) -> Any:
        image = copy_image(self, source_image_id, *args, **kwargs)
        machines.copy_image(source_image_id, image.id)
        return image

    def block_device_mappings(self: Any) -> list[dict[str, Any]]:
        disk = {
            "SnapshotId": self.ebs_snapshot.id,
            "VolumeSize": getattr(self, "root_gib", DISK_GIB),
            "DeleteOnTermination": True,
            "VolumeType": "gp3",
        }
        return [{"DeviceName": self.root_device_name, "Ebs": disk}]

    _replace(EC2Backend, create_image=patched_create, copy_image=patched_copy)
    _replace(Ami, block_device_mappings=property(block_device_mappings))


def _patch_metadata_options() -> None:
    modify: Callable[..., Any] = EC2Backend.modify_instance_metadata_options
    known = {
        "http_tokens": "http_tokens",
        "http_put_response_hop_limit": "hop_limit",
        "http_endpoint": "http_endpoint",
        "http_protocol_ipv6": "http_protocol",
        "instance_metadata_tags": "metadata_tags",
    }

    def patched(self: Any, instance_id: str, **wanted: Any) -> Any:
        now = self.get_instance(instance_id).metadata_options
        for name, argument in known.items():
            if wanted.get(argument) is None:
                wanted[argument] = getattr(now, name)
        options = modify(self, instance_id, **wanted)
        options.state = "pending"
        return options

    _replace(EC2Backend, modify_instance_metadata_options=patched)
