"""Images as AMIs: the distributions' own, found by owner and name, and ours, found by tag."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import Api, asking, code_of, tagged, tags_of
from provisioner.errors import ImageBuildError, InfrastructureError
from provisioner.models import Architecture, BaseImage, Distribution, Record
from provisioner.store.files import write_atomically

FILE = "ami.json"
IMAGE_TAG = "provisioner:image"
# A first snapshot of some GiB takes two to ten minutes.
AVAILABLE_SECONDS = 3600
POLL_SECONDS = 2.0

# distribution -> (owner, pattern of names).
# https://wiki.debian.org/Cloud/AmazonEC2Image: Debian's account.
# https://aws.amazon.com/releasenotes/aws-deep-learning-base-ami-gpu-ubuntu-20-04: Amazon's own, with CUDA and drivers.
VENDORS: dict[Distribution, tuple[str, str]] = {
    "debian-12": ("136693071363", "debian-12-{architecture}-*"),
    "ubuntu-20.04-cuda": ("amazon", "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 20.04) *"),
}
# The API's names, and Debian's.
ARCHITECTURES: dict[Architecture, tuple[str, str]] = {"x64": ("x86_64", "amd64"), "arm64": ("arm64", "arm64")}


class Ami(Record):
    """What an image's directory says of it, in ami.json.

    Args:
        ours: made by a provisioner, and so removed by one.
    """

    id: str
    region: str
    ours: bool


def read(image: Path) -> Ami:
    """What an image's directory says."""
    return Ami.model_validate_json((image / FILE).read_bytes())


def write(ami: Ami, image: Path) -> None:
    """Describes an AMI in a directory."""
    write_atomically(image / FILE, ami.model_dump_json(indent=2))


def vendor_ami(api: Api, region: str, base: BaseImage) -> tuple[str, str]:
    """The id and name of the newest AMI of a distribution.

    Raises:
        ImageBuildError: the region has none.
    """
    owner, pattern = VENDORS[base.distribution]
    for_api, for_debian = ARCHITECTURES[base.architecture]
    filters = [
        {"Name": "name", "Values": [pattern.format(architecture=for_debian)]},
        {"Name": "architecture", "Values": [for_api]},
        {"Name": "state", "Values": ["available"]},
    ]
    with asking(f"Looking for the AMI of {base.distribution}"):
        # Ubuntu 20.04 is out of support, and its AMIs are deprecated; they still start.
        found = api.client("ec2", region).describe_images(Owners=[owner], Filters=filters, IncludeDeprecated=True)
    if not found["Images"]:
        raise ImageBuildError(
            f"{region} has no AMI of {base.distribution} for {base.architecture}.", hint="Use another --region."
        )
    newest = max(found["Images"], key=lambda image: str(image["CreationDate"]))
    return str(newest["ImageId"]), str(newest["Name"])


def exists(api: Api, ami: Ami) -> bool:
    """Whether an AMI is still there and can be used."""
    filters = [{"Name": "image-id", "Values": [ami.id]}, {"Name": "state", "Values": ["available"]}]
    with asking(f"Looking for {ami.id}"):
        return bool(api.client("ec2", ami.region).describe_images(Filters=filters, IncludeDeprecated=True)["Images"])


def find(api: Api, region: str, name: str) -> Ami | None:
    """The AMI of ours that is tagged with an image's name, once it can be used; None if there is none."""
    with asking(f"Looking for the image {name}"):
        found = api.client("ec2", region).describe_images(Owners=["self"], Filters=tagged(IMAGE_TAG, name))["Images"]
    for image in sorted(found, key=lambda one: str(one["ImageId"])):
        if image["State"] in ("available", "pending"):
            return wait_until_available(api, Ami(id=image["ImageId"], region=region, ours=True))
    return None


def create(api: Api, region: str, instance_id: str, name: str, tags: dict[str, str]) -> Ami:
    """Turns a stopped instance's root volume into an AMI, and waits for it.

    Raises:
        InfrastructureError: AWS could not make it.
    """
    ours = tags_of({**tags, IMAGE_TAG: name, "Name": name})
    kinds = [{"ResourceType": kind, "Tags": ours} for kind in ("image", "snapshot")]
    with asking("Creating the AMI"):
        try:
            made = api.client("ec2", region).create_image(
                InstanceId=instance_id, Name=name, Description="provisioner", TagSpecifications=kinds
            )
        except ClientError as error:
            # The name is a hash of the contents: another controller was faster, or a killed one got this far.
            if code_of(error) == "InvalidAMIName.Duplicate" and (known := find(api, region, name)):
                return known
            raise
    return wait_until_available(api, Ami(id=made["ImageId"], region=region, ours=True))


def wait_until_available(api: Api, ami: Ami) -> Ami:
    """Waits until machines can start from an AMI.

    Raises:
        InfrastructureError: AWS could not make it, or not in time.
    """
    deadline = time.monotonic() + AVAILABLE_SECONDS
    while True:
        with asking(f"Waiting for {ami.id}"):
            images = api.client("ec2", ami.region).describe_images(ImageIds=[ami.id])["Images"]
        state = images[0]["State"] if images else "missing"
        if state == "available":
            return ami
        if state not in ("pending", "missing") or time.monotonic() > deadline:
            why = images[0].get("StateReason", {}).get("Message", "") if images else ""
            raise InfrastructureError(f"The AMI {ami.id} is {state}. {why}".strip())
        time.sleep(POLL_SECONDS)


def remove(api: Api, ami: Ami) -> None:
    """Deregisters an AMI of ours and deletes its snapshots. Safe to repeat."""
    ec2 = api.client("ec2", ami.region)
    with asking(f"Removing {ami.id}"):
        images: list[dict[str, Any]] = ec2.describe_images(
            Owners=["self"], Filters=[{"Name": "image-id", "Values": [ami.id]}]
        )["Images"]
        for image in images:
            ec2.deregister_image(ImageId=ami.id)
            for device in image.get("BlockDeviceMappings", []):
                if snapshot := device.get("Ebs", {}).get("SnapshotId"):
                    _gone(ec2.delete_snapshot, "InvalidSnapshot.NotFound", SnapshotId=snapshot)


def _gone(delete: Any, fine: str, **what: str) -> None:
    try:
        delete(**what)
    except ClientError as error:
        if code_of(error) != fine:
            raise
