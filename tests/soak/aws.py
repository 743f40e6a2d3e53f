"""The work on `aws`: the real provider against a moto server; image builders and environments in turns."""

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

from provisioner.clouds.aws import schedules
from provisioner.environment import sweep
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.machines.destroy import destroy_machines
from provisioner.models import Environment
from provisioner.session import Session
from tests.aws.account import NOTHING, REGION, Account, make_environment
from tests.aws.proxy import serving
from tests.provider_mirror import use_provider_mirror


class AwsWork:
    """Work on an account of its own."""

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
        """A builder, or an environment, from its hold to its end."""
        kind = "builder" if number % 3 == 2 else "task"
        with self._log.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.soak.aws", str(self._directory), kind], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def phase(self) -> str:
        """What the work said last."""
        lines = self._log.read_text().splitlines()
        return lines[-1][:60] if lines else "starting"

    def unlimited(self) -> list[str]:
        """Instances that nothing would end."""
        ec2 = self._account.client()
        scheduled = set(schedules.names(self._session.cloud.account.api, REGION))  # type: ignore[attr-defined]
        found = []
        for reservation in ec2.describe_instances()["Reservations"]:
            for instance in reservation["Instances"]:
                if instance["State"]["Name"] != "running":
                    continue
                tags = {tag["Key"]: tag["Value"] for tag in instance["Tags"]}

                def attribute(name: str, answer: str, instance: str = instance["InstanceId"]) -> str:
                    told = ec2.describe_instance_attribute(InstanceId=instance, Attribute=name)
                    return str(told[answer].get("Value", ""))

                timer = "systemctl poweroff" in base64.b64decode(attribute("userData", "UserData")).decode()
                behavior = attribute("instanceInitiatedShutdownBehavior", "InstanceInitiatedShutdownBehavior")
                ends = timer and behavior == "terminate"
                if not ends and tags["provisioner:environment"] not in scheduled:
                    found.append(f"{instance['InstanceId']} has no limit")
        return found

    def sweep(self) -> int:
        """Sweeps; how much that was."""
        done = sweep.sweep(self._session, lambda _: self._session, [REGION])
        assert [one for one in done if one.trouble] == []
        return len(done)

    def left(self) -> list[str]:
        """What is still there and should not be; images are meant to stay."""
        found = {**self._account.everything(), "images": []}
        left = [f"{kind} {name}" for kind, names in found.items() for name in names if found != NOTHING]
        left += [f"hold {entry.environment}" for entry in self._session.ledger.entries(unsettled=True)]
        stacks = self._session.home.stacks.glob("*/")
        left += [str(path) for path in stacks if not path.name.startswith((".", "network-"))]
        return left + [str(path) for path in self._session.home.environments.glob("*")]


def main() -> None:
    """The controller that is killed: `python -m tests.soak.aws DIRECTORY task|builder`."""
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    session = Account(directory).session()
    print("hold and record", flush=True)
    made = make_environment(session, full_internet=kind == "builder", aux=kind == "task")
    if kind == "builder":
        made = session.environments.update(made, kind="builder")
    print(f"create ({kind})", flush=True)
    [made] = create_machines(session, [made])
    if kind == "builder":
        _switch_off(session, made)
    else:
        print("up", flush=True)
        time.sleep(2)
    print(f"destroy ({kind})", flush=True)
    destroy_machines(session, made)
    print("ended", flush=True)


def _switch_off(session: Session, builder: Environment) -> None:
    """As before an image is captured: from here on, only the schedule and the sweep end it."""
    print("image", flush=True)
    session.cloud.keep_when_off(builder)
    boto3.client("ec2", REGION).stop_instances(InstanceIds=[builder.endpoints["primary"].instance_id])
    time.sleep(2)


if __name__ == "__main__":
    main()
