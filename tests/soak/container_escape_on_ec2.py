"""The acceptance test of the aws cloud: container_escape from the command line, on EC2 with real machines behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import boto3
import pytest

from provisioner.store.home import Home
from tests.aws.account import NOTHING
from tests.command_line import ROOT, answer, provisioner, started

# It builds four images and boots six machines, one after the other.
pytestmark = [pytest.mark.vm, pytest.mark.ec2, pytest.mark.timeout(2400)]
EXAMPLE = str(ROOT / "examples" / "container_escape")
SOLVER = str(ROOT / "examples" / "container_escape_agents" / "solver")
# It solves the task, and waits until the test has looked around.
AGENT = "bash solve.sh && until [ -e /tmp/looked-at ]; do sleep 1; done"


def test_container_escape_is_built_solved_and_destroyed_on_ec2(ec2_home: Home) -> None:
    # What could cost more than the budget is not created.
    arguments = ("run", EXAMPLE, "escape", "--cloud", "aws", "--json", "--agent", SOLVER, "--command", AGENT)
    refused = provisioner(ec2_home, *arguments, "--budget", "0.01")
    assert (refused.returncode, "more than 0.0100 USD" in refused.stderr) == (8, True), refused.stderr
    with started(ec2_home, *arguments, "--budget", "20") as run:
        try:
            _wait(lambda: run.poll() is not None or _solved(ec2_home), 1800)
            if run.poll() is None:
                _go_every_way_in(ec2_home)
            output, errors = run.communicate(timeout=300)
        finally:
            run.terminate()
            run.wait(300)
    assert run.returncode == 0, errors
    result = json.loads(output)
    assert (result["status"], result["score"]) == ("scored", 1.0)
    shown = answer(ec2_home, "show", result["environment"])
    # An offline aux VM has no way in but through the primary machine; its metadata service is off, by packets.
    assert shown["endpoints"]["aux"]["jump"] == "primary"
    metadata = [probe for probe in shown["probes"] if probe["probe"].startswith("metadata")]
    assert {probe["machine"] for probe in metadata} == {"primary", "aux"}
    assert not any(probe["reached"] for probe in metadata)
    assert answer(ec2_home, "list")["environments"] == []

    ec2 = boto3.client("ec2")
    ours = [{"Name": "tag-key", "Values": ["provisioner:environment"]}]
    reservations = ec2.describe_instances(Filters=ours)["Reservations"]
    states = {instance["State"]["Name"] for reservation in reservations for instance in reservation["Instances"]}
    assert states == {"terminated"}
    left = {
        "volumes": ec2.describe_volumes(Filters=ours)["Volumes"],
        "groups": ec2.describe_security_groups(Filters=ours)["SecurityGroups"],
        "keys": ec2.describe_key_pairs(Filters=ours)["KeyPairs"],
    }
    assert left == {kind: NOTHING[kind] for kind in left}


def _solved(home: Home) -> bool:
    return any("bytes from the other machine" in log.read_text() for log in home.environments.glob("*/logs/agent.log"))


def _go_every_way_in(home: Home) -> None:
    """While the agent works; in the end it is told to end. No option says which cloud: the record does."""
    [env] = [listed["environment"] for listed in answer(home, "list")["environments"]]
    # Another host key than the console's is refused, by our client and by OpenSSH: before any connection is kept.
    keys = home.environments / env / "keys"
    pinned = (keys / "host_aux.pub").read_text()
    (keys / "host_aux.pub").write_text((keys / "host_primary.pub").read_text())
    refused = provisioner(home, "exec", env, "--machine", "aux", "--", "true")
    assert (refused.returncode, "host key" in refused.stderr) == (5, True), refused.stderr
    assert provisioner(home, "ssh", env, "--machine", "aux", stdin="true\n").returncode == 255
    (keys / "host_aux.pub").write_text(pinned)
    for machine, user in (("primary", "agent"), ("aux", "admin"), ("aux", "root")):
        login = (env, "--machine", machine, "--user", user)
        done = provisioner(home, "exec", *login, "--", "sh", "-c", "id -un; hostname")
        assert done.stdout == f"{user}\n{machine}\n", done.stderr
        shell = provisioner(home, "ssh", *login, stdin="id -un\n")
        assert (shell.returncode, shell.stdout.strip().splitlines()[-1:]) == (0, [user]), shell.stderr
    for machine in ("primary", "aux"):  # one without the server would be sent one for each call
        as_root = (env, "--machine", machine, "--user", "root")
        service = provisioner(home, "exec", *as_root, "--", "systemctl", "is-active", "provisioner-exec.service")
        assert service.stdout == "active\n", service.stderr
    # The aux VM's name leads to it; the internet's names lead nowhere.
    lookup = provisioner(home, "exec", env, "--user", "root", "--", "getent", "hosts", "aux")
    assert lookup.stdout.startswith("10.215."), lookup.stderr
    touched = provisioner(home, "exec", env, "--user", "agent", "--", "touch", "/tmp/looked-at")
    assert touched.returncode == 0, touched.stderr


def _wait(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(1)
