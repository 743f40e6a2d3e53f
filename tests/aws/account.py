"""Provides an AWS account to tests: sessions on it, records of environments, and a list of its resources."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError
from moto.cloudwatch.models import cloudwatch_backends
from moto.ec2.models.amis import AMIS

from provisioner.base.clock import DEFAULT_TTL, now
from provisioner.base.config import Settings
from provisioner.base.models import Destination, Environment, MachineRecord, MachineSize, Role, TaskSetup
from provisioner.clouds.aws import images
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.machines import claims
from provisioner.machines.create import record_environment
from provisioner.session import Session
from provisioner.store.environments import new_id
from provisioner.store.images import Image, ImageStore
from tests.aws.moto_gaps import modes
from tests.aws.rights.judge import inspector
from tests.aws.rights.requests import ACCOUNT
from tests.aws.rights.world import AMAZON
from tests.homes import new_home

REGION = "us-east-1"
CONTROLLER = "203.0.113.10/32"
IMAGE = "family-tests-0000000000000000"
# One of Amazon's images: listing them all takes moto seconds.
AMI = next(ami["ami_id"] for ami in AMIS if ami["architecture"] == "x86_64" and ami["owner_id"] in AMAZON)
TYPES = ("t3.small", "t3.medium")


class Notes:
    """A listener that keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def phase_started(self, name: str) -> None: ...

    def phase_finished(self, name: str, seconds: float) -> None: ...

    def output(self, text: str) -> None: ...


class Account:
    """The account that the AWS environment variables select.

    Args:
        directory: the parent directory of its controllers' homes.
    """

    def __init__(self, directory: Path) -> None:
        self.progress = Notes()
        self._directory = directory

    def client(self, service: str = "ec2", region: str = REGION) -> Any:
        return inspector(os.environ["AWS_ENDPOINT_URL"], service, region)

    def session(self, name: str = "home", regions: tuple[str, ...] = (REGION,), **options: Any) -> Session:
        """Returns the session of a controller with its own home, which has a finished image in the first region."""
        home = new_home(self._directory / name)
        settings = Settings(controller_cidrs=options.pop("controller_cidrs", (CONTROLLER,)))
        store = ImageStore(home)
        if not store.finished(IMAGE):
            directory = home.images / ".building-tests"
            directory.mkdir()
            images.write(images.Ami(id=AMI, region=regions[0], ours=False), directory)
            store.finish(Image(name=IMAGE, kind="family", created_at=now(), cloud="aws"), directory)
        return Session(home=home, cloud=AwsCloud(home, settings, regions, **options), progress=self.progress)

    def record(self, session: Session, region: str) -> Environment:
        """Returns the record of a placed environment that will never be created."""
        size = MachineSize(cpus=2, memory_gib=2, disk_gib=16, types=TYPES)
        return Environment(
            id=new_id("tests", "placed"),
            cloud="aws",
            placement={"region": region},
            stack="none",
            family="tests",
            task="main",
            status="creating",
            created_at=now(),
            expires_at=now() + DEFAULT_TTL,
            setup=TaskSetup(),
            full_internet=False,
            machines={"primary": MachineRecord(image=IMAGE, size=size, user="root")},
        )

    def everything(self, region: str = REGION) -> dict[str, list[str]]:
        """Returns all resources in the account that environments may leave behind, by kind."""
        ec2 = self.client(region=region)
        instances = [i for r in ec2.describe_instances()["Reservations"] for i in r["Instances"]]
        groups = ec2.describe_security_groups()["SecurityGroups"]
        return {
            "instances": [i["InstanceId"] for i in instances if i["State"]["Name"] != "terminated"],
            "volumes": [v["VolumeId"] for v in ec2.describe_volumes()["Volumes"]],
            "groups": [g["GroupId"] for g in groups if g["GroupName"] != "default"],
            "keys": [k["KeyName"] for k in ec2.describe_key_pairs()["KeyPairs"]],
            "images": [i["ImageId"] for i in ec2.describe_images(Owners=["self"])["Images"]],
            "schedules": self._schedules(region),
            "subnets": [
                s["SubnetId"]
                for s in ec2.describe_subnets()["Subnets"]
                if any(tag["Key"] == "provisioner:environment" for tag in s.get("Tags", []))
            ],
        }

    def send(self, instance_id: str | None, sent_bytes: float, minutes_ago: float, region: str = REGION) -> None:
        """Lets CloudWatch show what an instance has sent in the five minutes that ended some minutes ago."""
        metric = {
            "MetricName": "NetworkOut",
            "Dimensions": [{"Name": "InstanceId", "Value": instance_id}],
            "Timestamp": now().replace(tzinfo=None) - timedelta(minutes=minutes_ago),  # as moto compares it
            "Value": sent_bytes,
            "Unit": "Bytes",
        }
        # Not by PutMetricData, in which AWS takes no namespace of its own.
        cloudwatch_backends[ACCOUNT][region].put_metric_data("AWS/EC2", [metric])

    def forget_ended_instances(self) -> None:
        """Lets an hour pass for the instances that have ended."""
        modes.forget_ended(time.monotonic())

    def fire_schedules(self, region: str = REGION) -> list[str]:
        """Does what the schedules do at their time.

        Returns:
            EC2's refusals. EventBridge Scheduler repeats what EC2 refused, in the same words, and reports nothing.
        """
        scheduler, ec2 = self.client("scheduler", region), self.client(region=region)
        refusals = []
        for name in self._schedules(region):
            target = scheduler.get_schedule(GroupName="provisioner", Name=name)["Target"]
            assert target["Arn"] == "arn:aws:scheduler:::aws-sdk:ec2:terminateInstances"
            try:
                ec2.terminate_instances(**json.loads(target["Input"]))
            except ClientError as error:
                refusals.append(error.response["Error"]["Code"])
        return refusals

    def _schedules(self, region: str) -> list[str]:
        scheduler = self.client("scheduler", region)
        groups = [group["Name"] for group in scheduler.list_schedule_groups()["ScheduleGroups"]]
        return [s["Name"] for g in groups for s in scheduler.list_schedules(GroupName=g)["Schedules"]]


NOTHING: dict[str, list[str]] = {
    "instances": [], "volumes": [], "groups": [], "keys": [], "images": [], "subnets": [], "schedules": [],
}  # fmt: skip


MakeEnvironment = Callable[..., Environment]


def make_environment(
    session: Session,
    *,
    aux: bool = True,
    full_internet: bool = False,
    stack: str | None = None,
    allowed: tuple[Destination, ...] = (),
    types: tuple[str, ...] = TYPES,
) -> Environment:
    """Returns the record of an environment that does not exist yet."""
    roles: tuple[Role, ...] = ("primary", "aux") if aux else ("primary",)
    size = MachineSize(cpus=2, memory_gib=2, disk_gib=16, types=types)
    identity, created_at = new_id("tests", "main"), now()
    environment = Environment(
        id=identity,
        cloud="aws",
        stack=stack or identity,
        family="tests",
        task="main",
        status="creating",
        created_at=created_at,
        expires_at=created_at + DEFAULT_TTL,
        setup=TaskSetup(),
        full_internet=full_internet,
        allowed_destinations=allowed,
        machines={role: MachineRecord(image=IMAGE, size=size, user="root") for role in roles},
    )
    environment = claims.reserve(session, environment)
    record_environment(session, environment)
    return environment
