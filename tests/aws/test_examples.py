"""The acceptance test of the aws cloud: container_escape from the command line, on EC2 with real machines behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta

import boto3
import pytest

from provisioner.image_store import now
from provisioner.paths import Home
from tests.aws.account import NOTHING
from tests.aws.ec2.fixture import ec2_session
from tests.command_line import ROOT, provisioner

# It builds four images and boots seven machines, one after the other.
pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("ec2"), pytest.mark.timeout(2400)]
EXAMPLE = str(ROOT / "examples" / "container_escape")
SOLVER = str(ROOT / "examples" / "container_escape_agents" / "solver")


def test_container_escape_is_built_solved_and_destroyed_on_ec2(ec2_home: Home) -> None:
    arguments = ("--cloud", "aws", "--agent", SOLVER, "--command", "bash solve.sh", "--json")
    done = provisioner(ec2_home, "run", EXAMPLE, "escape", *arguments)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["status"], result["score"]) == ("scored", 1.0)
    shown = json.loads(provisioner(ec2_home, "show", "--json", result["environment"]).stdout)
    # An offline aux VM has no way in but through the primary machine; its metadata service is off, by packets.
    assert shown["endpoints"]["aux"]["jump"] == "primary"
    metadata = [probe for probe in shown["probes"] if probe["probe"].startswith("metadata")]
    assert {probe["machine"] for probe in metadata} == {"primary", "aux"}
    assert not any(probe["reached"] for probe in metadata)
    assert json.loads(provisioner(ec2_home, "list", "--json").stdout)["environments"] == []

    ec2 = boto3.client("ec2")
    ours = [{"Name": "tag-key", "Values": ["provisioner:environment"]}]
    reservations = ec2.describe_instances(Filters=ours)["Reservations"]
    states = {instance["State"]["Name"] for found in reservations for instance in found["Instances"]}
    assert states == {"terminated"}
    left = {
        "volumes": ec2.describe_volumes(Filters=ours)["Volumes"],
        "groups": ec2.describe_security_groups(Filters=ours)["SecurityGroups"],
        "keys": ec2.describe_key_pairs(Filters=ours)["KeyPairs"],
    }
    assert left == {kind: NOTHING[kind] for kind in left}

    # Another controller of the same account has nothing to build: it finds the images by their tags.
    images = json.loads(provisioner(ec2_home, "image", "list", "--json").stdout)["images"]
    other = Home(ec2_home.root.parent / "other")
    built = provisioner(other, "image", "build", EXAMPLE, "--cloud", "aws", "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["image"] in {image["name"] for image in images}
    assert "build step" not in built.stderr
    assert "Reading the setup data" in built.stderr


def test_every_way_into_the_machines_works_on_ec2(ec2_home: Home) -> None:
    # What could cost more than the budget is not created.
    refused = provisioner(ec2_home, "up", EXAMPLE, "escape", "--cloud", "aws", "--budget", "0.01")
    assert (refused.returncode, "more than 0.0100 USD" in refused.stderr) == (8, True), refused.stderr
    up = provisioner(ec2_home, "up", EXAMPLE, "escape", "--cloud", "aws", "--budget", "3", "--json")
    assert up.returncode == 0, up.stderr
    env = json.loads(up.stdout)["environment"]
    try:
        # No option says which cloud: the record does.
        for machine, user in (("primary", "agent"), ("aux", "admin"), ("aux", "root")):
            done = provisioner(
                ec2_home, "exec", env, "--machine", machine, "--user", user, "--", "sh", "-c", "id -un; hostname"
            )
            assert done.stdout == f"{user}\n{machine}\n", done.stderr
            shell = provisioner(ec2_home, "ssh", env, "--machine", machine, "--user", user, stdin="id -un\n")
            assert (shell.returncode, shell.stdout.strip().splitlines()[-1:]) == (0, [user]), shell.stderr
        # The aux VM's name leads to it; the internet's names lead nowhere.
        found = provisioner(ec2_home, "exec", env, "--user", "root", "--", "getent", "hosts", "aux")
        assert found.stdout.startswith("10.215."), found.stderr
        # Another host key than the console's is refused, by our client and by OpenSSH.
        keys = ec2_home.environments / env / "keys"
        pinned = (keys / "host_aux.pub").read_text()
        (keys / "host_aux.pub").write_text((keys / "host_primary.pub").read_text())
        refused = provisioner(ec2_home, "exec", env, "--machine", "aux", "--", "true")
        assert (refused.returncode, "host key" in refused.stderr) == (5, True)
        assert provisioner(ec2_home, "ssh", env, "--machine", "aux", stdin="true\n").returncode == 255
        (keys / "host_aux.pub").write_text(pinned)
        _outlive_the_limit(ec2_home, env)
    finally:
        gone = provisioner(ec2_home, "destroy", env)
    assert gone.returncode == 0, gone.stderr


def _outlive_the_limit(home: Home, env: str) -> None:
    """Root on the machines does what it can against their end, and they end all the same."""
    session = ec2_session(home)
    record = session.environments.find(env)
    timer = ("exec", env, "--user", "root", "--", "systemctl", "is-active", "provisioner-limit.timer")
    assert provisioner(home, *timer).stdout == "active\n"
    moved = provisioner(home, "extend", env, "1h", "--json")
    assert moved.returncode == 0, moved.stderr
    record = session.environments.find(env)
    assert record.expires_at - record.created_at > timedelta(hours=4, minutes=59)
    stopped = provisioner(
        home, "exec", env, "--machine", "aux", "--user", "root", "--", "systemctl", "stop", "provisioner-limit.timer"
    )
    assert stopped.returncode == 0, stopped.stderr
    # Powered off from inside, as the timer does it, a machine is terminated, and not kept.
    provisioner(home, "exec", env, "--user", "root", "--", "systemctl", "poweroff", "--force")
    instances = {role: endpoint.instance_id for role, endpoint in record.endpoints.items()}

    def states() -> dict[str, str]:
        told = boto3.client("ec2").describe_instances(InstanceIds=list(instances.values()))["Reservations"]
        known = {one["InstanceId"]: one["State"]["Name"] for found in told for one in found["Instances"]}
        return {role: known[instance] for role, instance in instances.items() if instance}

    _wait(lambda: states() == {"primary": "terminated", "aux": "running"})
    # The other has stopped its timer; it ends by the schedule, which nobody in it can reach. A real one takes a minute.
    session.cloud.move_limit(session.environments.update(record, expires_at=now() + timedelta(seconds=10)))
    _wait(lambda: states() == {"primary": "terminated", "aux": "terminated"})
    swept = provisioner(home, "sweep", "--cloud", "aws", "--json")
    assert swept.returncode == 0, swept.stderr
    assert [one["environment"] for one in json.loads(swept.stdout)["found"]] == [env]
    costs = json.loads(provisioner(home, "costs", "--json").stdout)
    assert costs["held_usd"] == 0
    assert 0 < costs["actual_usd"] < 1


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not until():
        assert time.monotonic() < deadline
        time.sleep(1)
