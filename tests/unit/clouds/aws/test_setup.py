"""The roles that an administrator makes once, and the command for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from provisioner.clouds.aws import setup
from provisioner.clouds.aws.schedules import ROLE
from tests.aws.moto_gaps import close_gaps
from tests.aws.rights.requests import ACCOUNT
from tests.unit.conftest import CommandLine


@pytest.fixture
def iam(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    close_gaps()
    with mock_aws():
        yield boto3.client("iam", "us-east-1")


def test_it_makes_the_role_once_and_corrects_what_was_changed(iam: Any) -> None:
    assert setup.set_up(iam, ACCOUNT)[0] == f"Created the role {ROLE}."
    assert setup.set_up(iam, ACCOUNT) == [
        f"The role {ROLE} is as it should be.",
        "EC2's own role for spot instances exists.",
    ]
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    iam.put_role_policy(RoleName=ROLE, PolicyName=setup.POLICY, PolicyDocument=json.dumps(everything))
    assert setup.set_up(iam, ACCOUNT)[0] == f"Corrected the role {ROLE}."
    # As after a command that was killed between the two requests.
    iam.delete_role_policy(RoleName=ROLE, PolicyName=setup.POLICY)
    assert setup.set_up(iam, ACCOUNT)[0] == f"Corrected the role {ROLE}."
    role = iam.get_role(RoleName=ROLE)["Role"]
    assert role["AssumeRolePolicyDocument"] == setup.trust(ACCOUNT)
    assert iam.get_role_policy(RoleName=ROLE, PolicyName=setup.POLICY)["PolicyDocument"] == setup.rights(ACCOUNT)


def test_other_policies_are_taken_from_the_role(iam: Any) -> None:
    setup.set_up(iam, ACCOUNT)
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    iam.put_role_policy(RoleName=ROLE, PolicyName="more", PolicyDocument=json.dumps(everything))
    attached = iam.create_policy(PolicyName="administrator", PolicyDocument=json.dumps(everything))["Policy"]["Arn"]
    iam.attach_role_policy(RoleName=ROLE, PolicyArn=attached)
    assert setup.set_up(iam, ACCOUNT)[0] == f"Corrected the role {ROLE}: took away the policies more, {attached}."
    assert iam.list_role_policies(RoleName=ROLE)["PolicyNames"] == [setup.POLICY]
    assert iam.list_attached_role_policies(RoleName=ROLE)["AttachedPolicies"] == []
    assert setup.set_up(iam, ACCOUNT)[0] == f"The role {ROLE} is as it should be."


def test_the_command_says_what_it_did(iam: Any, provisioner: CommandLine) -> None:
    done = provisioner("aws", "setup")
    assert (done.code, done.stdout.splitlines()[0]) == (0, f"Created the role {ROLE}.")
    again = provisioner("aws", "setup", "--json").json
    assert (again["account"], again["done"][0]) == (ACCOUNT, f"The role {ROLE} is as it should be.")


def test_the_administrators_policy_is_another_one(provisioner: CommandLine) -> None:
    shown = json.loads(provisioner("aws", "policy", "setup").stdout)
    assert shown == setup.policy()
    assert {"iam:CreateRole", "iam:PutRolePolicy"} <= set(shown["Statement"][0]["Action"])
