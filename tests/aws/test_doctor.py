"""Tests what `doctor` reports about an account before anything is created in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import HostError
from provisioner.clouds.aws.schedules import ROLE
from provisioner.clouds.aws.setup import POLICY
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import destroy_machines
from provisioner.store.home import Home
from tests.aws import moto_gaps
from tests.aws.account import Account, MakeEnvironment
from tests.aws.proxy import Fault, FaultyApi
from tests.command_line import provisioner


def doctor(tmp_path: Path) -> tuple[int, Any]:
    """The exit code and what it says."""
    done = provisioner(Home(tmp_path / "home"), "doctor", "--cloud", "aws", "--region", "us-east-1", "--json")
    return done.returncode, json.loads(done.stdout)


def test_an_account_with_all_rights_is_ready(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISIONER_CONTROLLER_CIDRS", "203.0.113.10/32")
    code, said = doctor(tmp_path)
    assert (code, said["problems"]) == (0, [])
    assert "203.0.113.10/32" in said["notes"][0]
    assert "shipped snapshot" in said["notes"][1]


def test_the_quotas_of_vcpus_are_shown(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISIONER_CONTROLLER_CIDRS", "203.0.113.10/32")
    monkeypatch.setitem(moto_gaps.quotas, ("us-east-1", moto_gaps.STANDARD["on-demand"]), 48)
    monkeypatch.setitem(moto_gaps.quotas, ("us-east-1", moto_gaps.STANDARD["spot"]), 16)
    done = provisioner(Home(tmp_path / "home"), "doctor", "--cloud", "aws", "--region", "us-east-1")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "vCPUs" in line]
    assert line.startswith("note: Quota of vCPUs in us-east-1, standard instances: ")
    assert "48 on-demand, 0 in use" in line
    assert "16 spot, 0 in use" in line


def test_a_missing_right_is_named_with_the_policy(api: FaultyApi, account: Account, tmp_path: Path) -> None:
    api.inject(Fault("CreateVpc", "UnauthorizedOperation", status="403 Forbidden"))
    code, said = doctor(tmp_path)
    assert code == 3
    [problem] = said["problems"]
    assert "ec2:CreateVpc" in problem["problem"]
    assert "aws policy" in problem["remedy"]


def test_a_policy_of_the_organization_is_named_as_the_cause(api: FaultyApi, account: Account, tmp_path: Path) -> None:
    words = "not authorized to perform: ec2:CreateInternetGateway with an explicit deny in a service control policy"
    api.inject(Fault("CreateInternetGateway", "UnauthorizedOperation", status="403 Forbidden", message=words))
    [problem] = doctor(tmp_path)[1]["problems"]
    assert "ec2:CreateInternetGateway" in problem["problem"]
    assert "service control policy of the account's organization" in problem["remedy"]


@pytest.mark.parametrize("mode", ["block-ingress", "block-bidirectional"])
def test_blocked_public_addresses_are_a_problem(api: FaultyApi, account: Account, tmp_path: Path, mode: str) -> None:
    api.modes.public_access = mode
    code, said = doctor(tmp_path)
    [problem] = said["problems"]
    assert code == 3
    assert f"VPC Block Public Access is on in us-east-1 ({mode})" in problem["problem"]
    assert "administrator" in problem["remedy"]
    # So does a machine that does not answer.
    record = account.record(account.session(), "us-east-1")
    assert "VPC Block Public Access" in (account.session().cloud.unreachable_hint(record) or "")
    api.inject(Fault("DescribeVpcBlockPublicAccessOptions", "UnauthorizedOperation", status="403 Forbidden"))
    assert account.session().cloud.unreachable_hint(record) is None


def test_an_account_that_cannot_use_ec2_is_not_ready(api: FaultyApi, account: Account, tmp_path: Path) -> None:
    api.inject(Fault("CreateVpc", "OptInRequired", message="You are not subscribed to this service."))
    code, said = doctor(tmp_path)
    assert (code, "not subscribed" in said["problems"][0]["problem"]) == (3, True), said


def test_without_the_role_nothing_is_created(
    api: FaultyApi, account: Account, environment: MakeEnvironment, tmp_path: Path
) -> None:
    iam = account.client("iam")
    iam.delete_role_policy(RoleName=ROLE, PolicyName=POLICY)
    iam.delete_role(RoleName=ROLE)
    code, said = doctor(tmp_path)
    [problem] = said["problems"]
    assert (code, "provisioner aws setup" in problem["remedy"]) == (3, True)
    api.requests.clear()
    session = account.session()
    record = environment(session)
    with pytest.raises(HostError, match="is not set up") as caught:
        create_machines(session, [record])
    assert "provisioner aws setup" in (caught.value.hint or "")
    written = ("Run", "Create", "Import", "Put", "Attach", "Modify", "POST /schedule")
    assert [request["Action"] for request in api.requests if request["Action"].startswith(written)] == []
    destroy_machines(session, record)


def test_without_credentials_it_says_how_to_log_in(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        code, said = doctor(tmp_path)
    assert code == 3
    assert "No AWS credentials" in said["problems"][0]["problem"]
    assert "aws configure" in said["problems"][0]["remedy"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


def test_expired_credentials_stop_a_run_before_creation(api: FaultyApi, account: Account, tmp_path: Path) -> None:
    api.inject(Fault("GetCallerIdentity", "ExpiredToken", status="403 Forbidden"))
    family = Path(__file__).parents[1] / "contract" / "families" / "echo"
    home = Home(tmp_path / "home")
    done = provisioner(home, "run", str(family), "main", "--submission", "-", "--cloud", "aws", "--region", "us-east-1")
    assert (done.returncode, "ExpiredToken" in done.stderr, "aws sso login" in done.stderr) == (3, True, True)
    assert "Traceback" not in done.stderr
    assert not any(request["Action"] in ("RunInstances", "CreateVpc") for request in api.requests)
