"""Attack: a unit that install() left in an image reads the metadata service while a machine boots.

The service is open until cloud-init is done, since user data comes from nowhere else on EC2. So it may carry nothing
that the machine's own root may not have: no private key, no secret of the task, no rights in the account. What a unit
really reads in a booting machine is compared with this in tests/contract/test_lifecycle.py.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

from provisioner.base.config import Settings
from provisioner.base.models import Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.clouds.guest_files import GUEST
from provisioner.ssh.keys import ed25519_key_pair, rsa_key_pair
from tests.homes import new_home

ENVIRONMENT_MODULE = Path(__file__).parents[2] / "terraform" / "aws" / "environment" / "main.tf"
SIZE = MachineSize(cpus=2, memory_gib=2, disk_gib=16, types=("t3.small",))
PUBLIC_KEY = re.compile(r"(ssh-ed25519|ssh-rsa) [A-Za-z0-9+/=]+( [\w@.-]+)?")


def test_user_data_is_public(tmp_path: Path) -> None:
    home = new_home(tmp_path / "home")
    cloud = AwsCloud(home, Settings(region="eu-west-1"))
    expires_at = datetime(2030, 1, 1, tzinfo=UTC)
    environment = Environment(
        id="tests-main-000000", cloud="aws", stack="s", family="tests", task="main", status="creating",
        created_at=expires_at, expires_at=expires_at, setup=TaskSetup(), full_internet=False,
        machines={role: MachineRecord(image="i", size=SIZE, user="root") for role in ("primary", "aux")},
    )  # fmt: skip
    controller, task = ed25519_key_pair(), rsa_key_pair()
    (home.environments / environment.id).mkdir(parents=True)
    cloud.prepare(
        environment, {"primary": {"agent": controller.public}, "aux": {"admin": controller.public + "\n" + task.public}}
    )

    for role in environment.machines:
        text = (home.environments / environment.id / f"user-data-{role}").read_text()
        assert "PRIVATE" not in text
        told = json.loads(text.partition("\n")[2])
        # Every field, so that a new one has to be thought about here.
        keys = [line for file in told.pop("write_files") for line in file["content"].splitlines()]
        assert keys
        assert all(PUBLIC_KEY.fullmatch(line) for line in keys)
        [command] = told.pop("bootcmd")
        assert command == ["sh", "-c", (GUEST / "ttl.sh").read_text(), "ttl", str(int(expires_at.timestamp()))]
        assert told == {
            "users": [], "disable_root": False, "ssh_pwauth": False, "ssh_deletekeys": True,
            "manage_etc_hosts": False, "hostname": role,
        }  # fmt: skip


def test_a_machines_role_has_no_rights_to_give_away() -> None:
    # The policy denies an instance profile and tokens that are not required: test_aws_rights.py, launch-with-profile.
    module = ENVIRONMENT_MODULE.read_text()
    assert "iam_instance_profile" not in module
    options = re.search(r"metadata_options \{(.*?)\}", module, re.DOTALL)
    assert options
    settings = dict(re.findall(r"(\w+)\s*= (\S+)", options[1]))
    assert settings["http_tokens"] == '"required"'
    assert settings["http_put_response_hop_limit"] == "1"
    assert settings["instance_metadata_tags"] == '"disabled"'
