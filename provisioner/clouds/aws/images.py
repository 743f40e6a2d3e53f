"""Images as AMIs: the distributions' own are found by owner and name, ours by tag."""

from __future__ import annotations

import re
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from provisioner.base import strict_json
from provisioner.base.clock import now
from provisioner.base.errors import ImageBuildError, InfrastructureError
from provisioner.base.models import Architecture, BaseImage, Distribution, Environment, Record
from provisioner.base.progress import Progress
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import HOME_TAG, OWNER_TAG, Api, asking, code_of, tag, tagged, tags_of
from provisioner.clouds.cloud import UnrecordedImage
from provisioner.store.files import write_atomically
from provisioner.store.images import Image, ImageStore

FILE = "ami.json"
IMAGE_TAG = "provisioner:image"
# A first snapshot of a few GiB takes two to ten minutes.
AVAILABLE_SECONDS = 3600
# What EC2 has just done may not show in its next answers (EC2 API reference, "Eventual consistency").
VISIBLE_WITHIN_SECONDS = 120.0
POLL_SECONDS = 2.0
# CreateImage, of an instance that is being switched off (EC2 API reference, "Error codes").
STILL_STOPPING = "IncorrectInstanceState"
# CreateImage's error for a taken name; the AMI may already be gone, or not show yet.
NAME_TAKEN = "InvalidAMIName.Duplicate"
# EC2 API reference, "Image": states in which nothing will ever start from it.
FAILED = ("error", "failed", "invalid")
# DeleteSnapshot, of an AMI's that has just been deregistered.
SNAPSHOT_IN_USE = "InvalidSnapshot.InUse"

# distribution -> (owner, patterns of names, the best first).
# https://wiki.debian.org/Cloud/AmazonEC2Image: Debian's account.
# https://aws.amazon.com/releasenotes/aws-deep-learning-base-ami-gpu-ubuntu-20-04: Amazon's own, with CUDA and drivers.
# AWS builds it no longer, and removes it some day; that with 22.04 takes its place then.
VENDORS: dict[Distribution, tuple[str, ...]] = {
    "debian-12": ("136693071363", "debian-12-{architecture}-*"),
    "debian-13": ("136693071363", "debian-13-{architecture}-*"),
    "ubuntu-20.04-cuda": (
        "amazon",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 20.04) *",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04) *",
    ),
}
# The API's names, and Debian's.
ARCHITECTURES: dict[Architecture, tuple[str, str]] = {"x64": ("x86_64", "amd64"), "arm64": ("arm64", "arm64")}


class Ami(Record):
    """What an image's directory says of its AMI, in ami.json.

    Args:
        ours: whether a provisioner created it, and so removes it.
        account: the account that it is in; empty until it is written.
    """

    id: str
    region: str
    ours: bool
    account: str = ""


class VendorAmi(Record):
    """An AMI of a distribution.

    Args:
        root_gib: the size of its root volume. EC2 refuses a smaller one (EC2 API reference, "EbsBlockDevice").
    """

    id: str
    name: str
    root_gib: int


def read(image: Path) -> Ami:
    """Reads which AMI an image's directory describes."""
    return strict_json.load_file(Ami, image / FILE)


def write(ami: Ami, image: Path) -> None:
    """Writes the description of an AMI to a directory."""
    write_atomically(image / FILE, ami.model_dump_json(indent=2))


def vendor_ami(account: Account, base: BaseImage) -> VendorAmi:
    """Returns the newest AMI of a distribution in the account's region, as it was some seconds ago.

    Raises:
        ImageBuildError: the region has none.
    """
    return account.answers.get(("vendor", base), lambda: _newest(account.api, account.region, base))


def _newest(api: Api, region: str, base: BaseImage) -> VendorAmi:
    owner, *patterns = VENDORS[base.distribution]
    for_api, for_debian = ARCHITECTURES[base.architecture]
    named = [pattern.format(architecture=for_debian) for pattern in patterns]
    filters = [
        {"Name": "name", "Values": named},
        {"Name": "architecture", "Values": [for_api]},
        {"Name": "state", "Values": ["available"]},
    ]
    with asking(f"Looking for the AMI of {base.distribution}"):
        # Ubuntu 20.04 is out of support and its AMIs are deprecated, but they still start.
        answer = api.client("ec2", region).describe_images(Owners=[owner], Filters=filters, IncludeDeprecated=True)
    by_pattern = ([one for one in answer["Images"] if one["Name"].startswith(name.rstrip("*"))] for name in named)
    found = next((images for images in by_pattern if images), [])
    if not found:
        raise ImageBuildError(
            f"{region} has no AMI of {base.distribution} for {base.architecture}.",
            hint=f"If the account has the setting Allowed AMIs, an administrator adds {owner} to it (EC2 console, "
            "Settings, or the organization's declarative policy). Or use another region.",
            settings=("region",),
        )
    newest = max(found, key=lambda image: str(image["CreationDate"]))
    devices = {device["DeviceName"]: device.get("Ebs", {}) for device in newest["BlockDeviceMappings"]}
    root = devices.get(newest.get("RootDeviceName"), {})
    return VendorAmi(id=newest["ImageId"], name=newest["Name"], root_gib=root.get("VolumeSize", 0))


def exists(api: Api, ami: Ami) -> bool:
    """Whether an AMI still exists and can be used."""
    filters = [{"Name": "image-id", "Values": [ami.id]}, {"Name": "state", "Values": ["available"]}]
    with asking(f"Looking for {ami.id}"):
        return bool(api.client("ec2", ami.region).describe_images(Filters=filters, IncludeDeprecated=True)["Images"])


def find(api: Api, region: str, name: str) -> Ami | None:
    """Finds our AMI that is tagged with an image's name, and waits until it can be used; None if there is none.

    An AMI that AWS could not make is removed: it would keep its snapshot, and its name, which must be unique.
    """
    with asking(f"Looking for the image {name}"):
        images = api.client("ec2", region).describe_images(Owners=["self"], Filters=tagged(IMAGE_TAG, name))["Images"]
    for image in sorted(images, key=lambda image: str(image["ImageId"])):
        if image["State"] in ("available", "pending"):
            return wait_until_available(api, Ami(id=image["ImageId"], region=region, ours=True))
        if image["State"] in FAILED:
            remove(api, Ami(id=image["ImageId"], region=region, ours=True), name)
    return None


def create(api: Api, region: str, instance_id: str, name: str, tags: dict[str, str]) -> Ami:
    """Turns a stopped instance's root volume into an AMI, and waits for it.

    Raises:
        InfrastructureError: AWS could not create it.
    """
    our_tags = tags_of({**tags, IMAGE_TAG: name, "Name": name})
    kinds = [{"ResourceType": kind, "Tags": our_tags} for kind in ("image", "snapshot")]
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while True:
        with asking("Creating the AMI"):
            try:
                created = api.client("ec2", region).create_image(
                    InstanceId=instance_id, Name=name, Description="provisioner", TagSpecifications=kinds
                )
                break
            except ClientError as error:
                # The name is a hash of the contents: another controller was faster, or was killed at this point.
                if code_of(error) == NAME_TAKEN and (existing := find(api, region, name)):
                    return existing
                if code_of(error) not in (STILL_STOPPING, NAME_TAKEN) or time.monotonic() > deadline:
                    raise
        time.sleep(POLL_SECONDS)
    return wait_until_available(api, Ami(id=created["ImageId"], region=region, ours=True))


def wait_until_available(api: Api, ami: Ami) -> Ami:
    """Waits until machines can start from an AMI.

    Raises:
        InfrastructureError: AWS could not create it, or not in time.
    """
    begin = time.monotonic()
    # Not by ImageIds: an id that does not show yet would be an error.
    filters = [{"Name": "image-id", "Values": [ami.id]}]
    while True:
        with asking(f"Waiting for {ami.id}"):
            images = api.client("ec2", ami.region).describe_images(Filters=filters)["Images"]
        state = images[0]["State"] if images else "missing"
        if state == "available":
            return ami
        patience = {"pending": AVAILABLE_SECONDS, "missing": VISIBLE_WITHIN_SECONDS}.get(state, 0)
        if time.monotonic() - begin > patience:
            why = images[0].get("StateReason", {}).get("Message", "") if images else ""
            raise InfrastructureError(f"The AMI {ami.id} is {state}. {why}".strip())
        time.sleep(POLL_SECONDS)


def remove(api: Api, ami: Ami, name: str) -> None:
    """Deregisters an AMI of ours and deletes its snapshots, also where an earlier removal ended in between.

    Args:
        name: the image's name, with which its snapshots are tagged.

    Raises:
        InfrastructureError: a snapshot is still in use after two minutes.
    """
    ec2 = api.client("ec2", ami.region)
    of_ami = [{"Name": "image-id", "Values": [ami.id]}]
    with asking(f"Removing {ami.id}"):
        snapshots = ec2.describe_snapshots(OwnerIds=["self"], Filters=tagged(IMAGE_TAG, name))["Snapshots"]
        ids = [snapshot["SnapshotId"] for snapshot in snapshots]
        for image in ec2.describe_images(Owners=["self"], Filters=of_ami)["Images"]:
            devices = [device.get("Ebs", {}) for device in image.get("BlockDeviceMappings", [])]
            ids += [device["SnapshotId"] for device in devices if device.get("SnapshotId")]
            ec2.deregister_image(ImageId=ami.id)
        deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
        for snapshot in dict.fromkeys(ids):
            while not _is_deleted(ec2, snapshot, deadline):
                time.sleep(POLL_SECONDS)


def _is_deleted(ec2: Any, snapshot: str, deadline: float) -> bool:
    """Deletes a snapshot; False if the AMI that was deregistered counts as its user for a while yet."""
    try:
        ec2.delete_snapshot(SnapshotId=snapshot)
    except ClientError as error:
        if code_of(error) == SNAPSHOT_IN_USE and time.monotonic() < deadline:
            return False
        if code_of(error) != "InvalidSnapshot.NotFound":
            raise
    return True


def ami_id(account: Account, store: ImageStore, name: str) -> str:
    """Returns the id of the AMI of an image, by its directory or by its tag.

    Raises:
        InfrastructureError: there is no such AMI in the account's region.
    """
    if store.finished(name):
        return read(store.path(name)).id
    ami = find(account.api, account.region, name)
    if ami is None:
        raise InfrastructureError(f"The image {name} is gone from {account.region}.", hint="Run the command again.")
    return ami.id


class AwsImages:
    """Images that are AMIs in the account's region; their directories only describe them."""

    account: Account
    store: ImageStore
    name: str

    def base_image(self, base: BaseImage, progress: Progress) -> str:
        """Returns the name of the distribution's newest AMI, from which a builder makes the base image."""
        account = self.account
        vendor = vendor_ami(account, base)
        where = sha256(f"{account.identity.account} {account.region} {vendor.id}".encode()).hexdigest()[:8]
        name = f"vendor-{re.sub(r'[^a-z0-9]+', '-', vendor.name.lower()).strip('-')[:60]}-{where}"
        with self.store.building(name, progress) as directory:
            if directory is not None:
                self._write(Ami(id=vendor.id, region=account.region, ours=False), directory)
                self.store.finish(Image(name=name, kind="vendor", created_at=now(), cloud=self.name), directory)
        return name

    def has_image(self, image: Path) -> bool:
        """Whether the AMI that a directory describes still exists."""
        ami = read(image)
        return self.account.answers.get(("exists", ami), lambda: exists(self.account.api, ami))

    def find_image(self, name: str, destination: Path) -> bool:
        """Finds the AMI by its tag."""
        ami = find(self.account.api, self.account.region, name)
        if ami:
            self._write(ami, destination)
        return ami is not None

    def keep_when_off(self, environment: Environment) -> None:
        """Sets the instance to stop, not to terminate, when it is powered off."""
        instance = environment.endpoints["primary"].instance_id
        with asking("Letting the builder stop"):
            self.account.api.client("ec2", environment.placement["region"]).modify_instance_attribute(
                InstanceId=instance, InstanceInitiatedShutdownBehavior={"Value": "stop"}
            )

    def capture(self, environment: Environment, name: str, destination: Path) -> None:
        """Makes an AMI of the stopped builder."""
        account, region = self.account, environment.placement["region"]
        instance = environment.endpoints["primary"].instance_id or ""
        self._write(create(account.api, region, instance, name, account.tags(environment)), destination)

    def _write(self, ami: Ami, directory: Path) -> None:
        write(ami.model_copy(update={"account": self.account.identity.account}), directory)

    def discard(self, image: Path) -> None:
        """Deregisters the AMI and deletes its snapshots; the distributions' own stay."""
        ami = read(image)
        if ami.ours:
            self.account.require_own(f"The image {image.name}", ami.account)
            remove(self.account.api, ami, image.name)

    def unrecorded_images(self, region: str) -> list[UnrecordedImage]:
        """Lists the AMIs in a region that homes have made, this one or others, and this home neither has nor makes."""
        filters = [{"Name": "tag-key", "Values": [IMAGE_TAG]}]
        with asking(f"Looking for images in {region}"):
            ec2 = self.account.api.client("ec2", region)
            images = ec2.describe_images(Owners=["self"], Filters=filters)["Images"]
        known = self.store.names()  # after the question: what was made meanwhile is known
        return [
            _unrecorded(image, region)
            for image in images
            if image["State"] != "pending" and tag(image, IMAGE_TAG) not in known
        ]


def _unrecorded(image: dict[str, Any], region: str) -> UnrecordedImage:
    disks = [device["Ebs"] for device in image.get("BlockDeviceMappings", []) if "Ebs" in device]
    snapshots = [disk["SnapshotId"] for disk in disks if disk.get("SnapshotId")]
    return UnrecordedImage(
        name=tag(image, IMAGE_TAG),
        region=region,
        home=tag(image, HOME_TAG),
        owner=tag(image, OWNER_TAG),
        gib=sum(disk.get("VolumeSize", 0) for disk in disks),
        created_at=image["CreationDate"],
        used_at=image.get("LastLaunchedTime"),
        removal=(
            f"aws ec2 deregister-image --region {region} --image-id {image['ImageId']}",
            *(f"aws ec2 delete-snapshot --region {region} --snapshot-id {snapshot}" for snapshot in snapshots),
        ),
    )
