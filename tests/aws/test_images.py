"""Tests capturing images: EC2 shows a new image, and an instance's new state, some seconds late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provisioner.clouds.aws import images
from provisioner.clouds.aws.api import Api
from provisioner.errors import InfrastructureError
from tests.aws.account import AMI, REGION, Account
from tests.aws.proxy import Fault, FaultyApi

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


def test_an_image_is_captured_although_ec2_shows_neither_the_stop_nor_the_image_yet(
    api: FaultyApi, account: Account, builder: str
) -> None:
    opened = Api(None, REGION)
    made = images.create(opened, REGION, builder, "family-late", TAGS)
    assert images.exists(opened, made)
    refused = [request for request in api.requests if request["Action"] == "CreateImage"]
    assert len(refused) > 1
    [image] = account.client().describe_images(ImageIds=[made.id])["Images"]
    snapshot = image["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
    [described] = account.client().describe_snapshots(SnapshotIds=[snapshot])["Snapshots"]
    assert {tag["Key"] for tag in described["Tags"]} == {"provisioner:owner", "provisioner:image", "Name"}
    images.remove(opened, made)


def test_a_builder_that_never_stops_and_an_image_that_never_shows_are_errors(
    api: FaultyApi, account: Account, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "SEEN_SECONDS", 1.0)
    monkeypatch.setattr(images, "POLL_SECONDS", 0.05)
    opened = Api(None, REGION)
    fault = api.inject(Fault("CreateImage", "IncorrectInstanceState"))
    with pytest.raises(InfrastructureError, match="IncorrectInstanceState"):
        images.create(opened, REGION, builder, "family-never", TAGS)
    assert len(fault.hits) > 1
    with pytest.raises(InfrastructureError, match="ami-00000000 is missing"):
        images.wait_until_available(opened, images.Ami(id="ami-00000000", region=REGION, ours=True))
