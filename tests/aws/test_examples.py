"""The acceptance test of the aws cloud: container_escape from the command line, on EC2 with real machines behind it."""

from __future__ import annotations

import json

import boto3
import pytest

from provisioner.paths import Home
from tests.aws.account import NOTHING
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
    up = provisioner(ec2_home, "up", EXAMPLE, "escape", "--cloud", "aws", "--json")
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
    finally:
        gone = provisioner(ec2_home, "destroy", env)
    assert gone.returncode == 0, gone.stderr
