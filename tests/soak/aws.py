"""The soak test's work on `aws`: image builders and environments in turn, by the real provider against moto."""

from __future__ import annotations

import base64
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import boto3

from provisioner.base.models import Environment
from provisioner.clouds.aws import schedules
from provisioner.clouds.aws.api import Api
from provisioner.environment import sweep
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws.account import NOTHING, REGION, Account, make_environment
from tests.aws.proxy import serving
from tests.provider_mirror import use_provider_mirror


class AwsWork:
    """Creates and destroys image builders and environments in its own account."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "log"
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        use_provider_mirror()
        api = self._exit.enter_context(serving())
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)
        os.environ |= {
            "AWS_ENDPOINT_URL": api.url, "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
        }  # fmt: skip
        self._account = Account(self._directory)
        self._session = self._account.session()
        create_shared_network(self._session, self._account.record(self._session, REGION))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Starts a controller of a builder or an environment, from its reservation to its end."""
        kind = "builder" if number % 3 == 2 else "task"
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.soak.aws", str(self._directory), kind], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def phase(self) -> str:
        """Returns the last output of the work."""
        lines = self._log.read_text().splitlines()
        return lines[-1][:60] if lines else "starting"

    def unlimited(self) -> list[str]:
        """Returns the instances that nothing would end."""
        ec2 = self._account.client()
        scheduled = set(schedules.names(Api(None, REGION), REGION))
        problems = []
        for reservation in ec2.describe_instances()["Reservations"]:
            for instance in reservation["Instances"]:
                if instance["State"]["Name"] != "running":
                    continue
                tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}

                def attribute(name: str, answer: str, instance: str = instance["InstanceId"]) -> str:
                    described = ec2.describe_instance_attribute(InstanceId=instance, Attribute=name)
                    return str(described[answer].get("Value", ""))

                timer = "systemctl poweroff" in base64.b64decode(attribute("userData", "UserData")).decode()
                behavior = attribute("instanceInitiatedShutdownBehavior", "InstanceInitiatedShutdownBehavior")
                ends = timer and behavior == "terminate"
                name = f"{tags['provisioner:environment']}.{tags['provisioner:role']}"
                if not ends and name not in scheduled:
                    problems.append(f"{instance['InstanceId']} has no limit")
        return problems

    def sweep(self) -> int:
        """Sweeps and returns the number of orphans."""
        done = sweep.sweep(self._session, lambda _: self._session, [REGION])
        assert [orphan for orphan in done if orphan.problem] == []
        return len(done)

    def left(self) -> list[str]:
        """Returns the resources that should be gone; images may stay."""
        resources = {**self._account.everything(), "images": []}
        left = [f"{kind} {name}" for kind, names in resources.items() for name in names if resources != NOTHING]
        left += [f"hold {entry.environment}" for entry in self._session.ledger.entries(unsettled=True)]
        stacks = self._session.home.stacks.glob("*/")
        left += [str(path) for path in stacks if not path.name.startswith((".", "network-"))]
        return left + [str(path) for path in self._session.home.environments.glob("*")]


def main() -> None:
    """The controller that is killed: `python -m tests.soak.aws DIRECTORY task|builder`."""
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    session = Account(directory).session()
    print("hold and record", flush=True)
    record = make_environment(session, full_internet=kind == "builder", aux=kind == "task")
    if kind == "builder":
        record = session.environments.update(record, kind="builder")
    print(f"create ({kind})", flush=True)
    [record] = create_machines(session, [record])
    if kind == "builder":
        _switch_off(session, record)
    else:
        print("up", flush=True)
        time.sleep(2)
    print(f"destroy ({kind})", flush=True)
    destroy_machines(session, record)
    print("ended", flush=True)


def _switch_off(session: Session, builder: Environment) -> None:
    """As before an image is captured: from here on, only the schedule and the sweep end it."""
    print("image", flush=True)
    session.cloud.keep_when_off(builder)
    boto3.client("ec2", REGION).stop_instances(InstanceIds=[builder.endpoints["primary"].instance_id])
    time.sleep(2)


if __name__ == "__main__":
    main()
