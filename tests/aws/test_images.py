"""Tests capturing images: EC2 shows a new image, and an instance's new state, some seconds late."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args

import pytest
from moto.ec2.models import ec2_backends

from provisioner.base.clock import now
from provisioner.base.errors import HostError, ImageBuildError, InfrastructureError
from provisioner.base.models import BaseImage, PrimaryDistribution
from provisioner.clouds.aws import images
from provisioner.clouds.aws.api import Api
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.clouds.sizing import CUDA_DISK_GIB, MINIMUM_DISK_GIB
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.store.images import Image
from tests.aws.account import AMI, REGION, Account, MakeEnvironment
from tests.aws.ec2.server import DEBIAN_OWNER
from tests.aws.moto_gaps import add_vendor_image
from tests.aws.proxy import Fault, FaultyApi
from tests.aws.rights.requests import ACCOUNT
from tests.command_line import provisioner

CUDA_AMI = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 20.04) 20250101"
CUDA_ROOT_GIB = 75
DEBIAN_ROOT_GIB = 8
TAGS = {"provisioner:owner": "me"}


@pytest.fixture
def builder(account: Account) -> Iterator[str]:
    """The id of a builder that has just been switched off."""
    ec2 = account.client()
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "provisioner:owner", "Value": "me"}]}]
    started = ec2.run_instances(ImageId=AMI, MinCount=1, MaxCount=1, TagSpecifications=tags)
    instance_id = started["Instances"][0]["InstanceId"]
    ec2.stop_instances(InstanceIds=[instance_id])
    yield instance_id
    ec2.terminate_instances(InstanceIds=[instance_id])


def test_an_image_is_captured_although_ec2_shows_it_late(api: FaultyApi, account: Account, builder: str) -> None:
    opened = Api(None, REGION)
    made = images.create(opened, REGION, builder, "family-late", TAGS)
    assert images.exists(opened, made)
    refused = [request for request in api.requests if request["Action"] == "CreateImage"]
    assert len(refused) > 1
    [image] = account.client().describe_images(ImageIds=[made.id])["Images"]
    snapshot = image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    [described] = account.client().describe_snapshots(SnapshotIds=[snapshot])["Snapshots"]
    assert {tag["Key"] for tag in described["Tags"]} == {"provisioner:owner", "provisioner:image", "Name"}
    images.remove(opened, made, "family-late")


def snapshots(account: Account) -> list[str]:
    ours = [{"Name": "tag-key", "Values": ["provisioner:image"]}]
    described = account.client().describe_snapshots(OwnerIds=["self"], Filters=ours)["Snapshots"]
    return [snapshot["SnapshotId"] for snapshot in described]


def discard(session: Session, made: images.Ami, name: str) -> None:
    """Discards an image as `image prune` does."""
    directory = session.home.images / name
    directory.mkdir(exist_ok=True)
    images.write(made, directory)
    session.cloud.discard(directory)


def test_a_snapshot_in_use_is_deleted_later(api: FaultyApi, account: Account, builder: str) -> None:
    session = account.session()
    made = images.create(Api(None, REGION), REGION, builder, "family-in-use", TAGS)
    fault = api.inject(Fault("DeleteSnapshot", "InvalidSnapshot.InUse", times=2))
    discard(session, made, "family-in-use")
    assert len(fault.hits) == 2
    assert snapshots(account) == []


def test_a_snapshot_whose_image_is_gone_already_is_deleted(api: FaultyApi, account: Account, builder: str) -> None:
    session = account.session()
    made = images.create(Api(None, REGION), REGION, builder, "family-half-gone", TAGS)
    other = images.create(Api(None, REGION), REGION, builder, "family-kept", TAGS)
    # The process that removed it was killed in between.
    account.client().deregister_image(ImageId=made.id)
    assert len(snapshots(account)) == 2
    discard(session, made, "family-half-gone")
    [kept] = snapshots(account)
    discard(session, other, "family-kept")
    assert kept not in snapshots(account) == []


def test_an_image_of_another_account_is_not_discarded(account: Account) -> None:
    made = images.Ami(id=AMI, region=REGION, ours=True, account="210987654321")
    with pytest.raises(HostError, match="The image elsewhere is in the AWS account 210987654321"):
        discard(account.session(), made, "elsewhere")


def test_a_sweep_lists_images_that_this_home_lacks_and_how_to_delete_them(account: Account, builder: str) -> None:
    session, opened = account.session(), Api(None, REGION)
    tags = {**TAGS, "provisioner:home": session.home.identity}
    lost = images.create(opened, REGION, builder, "family-own", tags)
    made = images.create(opened, REGION, builder, "family-being-made", {**TAGS, "provisioner:home": "0123"})
    ec2_backends[ACCOUNT][REGION].amis[made.id].state = "pending"
    theirs = images.create(opened, REGION, builder, "family-lost", {**TAGS, "provisioner:home": "0123"})
    used_here = images.create(opened, REGION, builder, "family-used-here", {**TAGS, "provisioner:home": "4567"})
    with session.images.building("family-used-here", session.progress) as directory:
        assert directory
        assert session.cloud.find_image("family-used-here", directory)
        image = Image(name="family-used-here", kind="family", created_at=now(), cloud="aws")
        session.images.finish(image, directory)
    sweep = ["sweep", "--cloud", "aws", "--region", REGION]
    said = json.loads(provisioner(session.home, *sweep, "--json").stdout)
    assert said["found"] == []
    listed, own = sorted(said["unrecorded_images"], key=lambda each: each["name"])
    assert (listed["name"], listed["home"], listed["owner"]) == ("family-lost", "0123", "me")
    assert (own["name"], own["home"]) == ("family-own", session.home.identity)
    assert listed["gib"] > 0
    text = provisioner(session.home, *sweep).stdout
    assert text.startswith("Nothing to remove.\n\nImages that this home does not have")
    assert all(command in text for command in listed["removal"])
    # It has removed none of them. What it prints does, with its snapshot.
    discard(session, lost, "family-own")
    discard(session, made, "family-being-made")
    session.cloud.discard(session.images.path("family-used-here"))
    assert used_here.id not in text
    assert made.id not in text
    assert [each["ImageId"] for each in account.client().describe_images(Owners=["self"])["Images"]] == [theirs.id]
    [deregister, delete] = [command.split() for command in listed["removal"]]
    assert deregister[:3] == ["aws", "ec2", "deregister-image"]
    account.client(region=deregister[4]).deregister_image(ImageId=deregister[-1])
    assert delete[:3] == ["aws", "ec2", "delete-snapshot"]
    account.client(region=delete[4]).delete_snapshot(SnapshotId=delete[-1])
    assert snapshots(account) == []


def test_a_failed_image_keeps_its_name_for_the_next(api: FaultyApi, account: Account, builder: str) -> None:
    opened = Api(None, REGION)
    failed = images.create(opened, REGION, builder, "family-failed", TAGS)
    ec2_backends[ACCOUNT][REGION].amis[failed.id].state = "failed"
    assert images.find(opened, REGION, "family-failed") is None
    assert snapshots(account) == []
    # The name is free a little later.
    fault = api.inject(Fault("CreateImage", "InvalidAMIName.Duplicate", times=1))
    made = images.create(opened, REGION, builder, "family-failed", TAGS)
    assert (made.id != failed.id, len(fault.hits)) == (True, 1)
    images.remove(opened, made, "family-failed")


def test_a_builder_has_room_for_the_image_that_it_starts_from(account: Account, environment: MakeEnvironment) -> None:
    session = account.session()
    ami = add_vendor_image(ec2_backends[ACCOUNT][REGION], CUDA_AMI, CUDA_ROOT_GIB)
    base = BaseImage(role="aux", distribution="ubuntu-20.04-cuda")
    name = session.cloud.base_image(base, session.progress)
    size = session.cloud.builder_size(base, MINIMUM_DISK_GIB)
    record = environment(session, aux=False, full_internet=True)
    machine = record.machines["primary"].model_copy(update={"image": name, "size": size})
    builder = session.environments.update(record, kind="builder", machines={"primary": machine})
    [builder] = create_machines(session, [builder])
    [volume] = account.client().describe_volumes()["Volumes"]
    destroy_machines(session, builder)
    account.client().deregister_image(ImageId=ami)
    assert volume["Size"] == CUDA_ROOT_GIB
    # What asks for more gets more.
    assert session.cloud.builder_size(base, CUDA_DISK_GIB).disk_gib == CUDA_DISK_GIB


def test_each_debian_starts_from_its_own_newest_ami(account: Account) -> None:
    session = account.session()
    backend = ec2_backends[ACCOUNT][REGION]
    names = ["debian-12-amd64-20260101-0000", "debian-13-amd64-20260101-0000"]
    amis = [add_vendor_image(backend, name, DEBIAN_ROOT_GIB, DEBIAN_OWNER) for name in names]
    # Neither another account's of that name, nor another architecture's, nor one with other packages.
    others = [
        add_vendor_image(backend, names[1], DEBIAN_ROOT_GIB, "210987654321"),
        add_vendor_image(backend, "debian-13-arm64-20260101-0000", DEBIAN_ROOT_GIB, DEBIAN_OWNER, "arm64"),
        add_vendor_image(backend, "debian-13-backports-amd64-20260101-0000", DEBIAN_ROOT_GIB, DEBIAN_OWNER),
    ]
    try:
        for which, name, ami in zip(get_args(PrimaryDistribution), names, amis, strict=True):
            base = BaseImage(role="primary", distribution=which)
            vendor = session.cloud.base_image(base, session.progress)
            assert vendor.startswith(f"vendor-{name}-")
            assert images.read(session.images.path(vendor)).id == ami
            assert session.cloud.builder_size(base, 1).disk_gib == DEBIAN_ROOT_GIB
    finally:
        for ami in [*amis, *others]:
            account.client().deregister_image(ImageId=ami)


def test_a_region_without_an_ami_of_debian_13_is_named(account: Account) -> None:
    session = account.session()
    with pytest.raises(ImageBuildError, match=f"{REGION} has no AMI of debian-13 for x64") as caught:
        session.cloud.base_image(BaseImage(role="primary", distribution="debian-13"), session.progress)
    assert "Allowed AMIs" in (caught.value.hint or "")
    assert DEBIAN_OWNER in (caught.value.hint or "")


def test_the_next_ubuntu_takes_the_place_of_one_that_is_gone(account: Account) -> None:
    backend, base = ec2_backends[ACCOUNT][REGION], BaseImage(role="aux", distribution="ubuntu-20.04-cuda")
    newer = CUDA_AMI.replace("20.04", "22.04").replace("2025", "2026")
    amis = {name: add_vendor_image(backend, name, CUDA_ROOT_GIB) for name in (CUDA_AMI, newer)}

    def chosen() -> str:
        cloud = account.session().cloud  # a new one remembers no answer
        assert isinstance(cloud, AwsCloud)
        return images.vendor_ami(cloud.account, base).id

    assert chosen() == amis[CUDA_AMI]
    account.client().deregister_image(ImageId=amis[CUDA_AMI])
    assert chosen() == amis[newer]
    account.client().deregister_image(ImageId=amis[newer])


def test_a_builder_that_never_stops_is_an_error(
    api: FaultyApi, account: Account, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "VISIBLE_WITHIN_SECONDS", 1.0)
    monkeypatch.setattr(images, "POLL_SECONDS", 0.05)
    opened = Api(None, REGION)
    fault = api.inject(Fault("CreateImage", "IncorrectInstanceState"))
    with pytest.raises(InfrastructureError, match="IncorrectInstanceState"):
        images.create(opened, REGION, builder, "family-never", TAGS)
    assert fault.hits
    with pytest.raises(InfrastructureError, match="ami-00000000 is missing"):
        images.wait_until_available(opened, images.Ami(id="ami-00000000", region=REGION, ours=True))
