"""Tests Terraform's state in S3: shared, locked, and written again after a failure."""

from __future__ import annotations

import json
import shutil

import pytest

from provisioner.base.errors import InfrastructureError, TerraformError
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.terraform.process import OPENTOFU, TERRAFORM, product_that_runs
from provisioner.terraform.stack import ERRORED_STATE, Stack
from tests.aws.account import NOTHING, Account, MakeEnvironment
from tests.aws.proxy import Fault, FaultyApi

BUCKET = "provisioner-tests-state"


@pytest.fixture
def session(account: Account) -> Session:
    """A session with its state in S3, on an account whose network exists."""
    account.client("s3").create_bucket(Bucket=BUCKET)
    local = account.session()
    create_shared_network(local, account.record(local, "us-east-1"))
    return account.session(state=f"s3://{BUCKET}/team")


def objects(account: Account, stack: str) -> list[str]:
    listed = account.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"team/{stack}/")
    return sorted(item["Key"] for item in listed.get("Contents", []))


def test_the_state_may_be_in_another_region_than_the_machines(
    api: FaultyApi, account: Account, environment: MakeEnvironment
) -> None:
    bucket, region = "provisioner-tests-abroad", "eu-west-1"
    api.judge.keep_state_in(f"s3://{bucket}/team")
    where = {"LocationConstraint": region}
    account.client("s3", region).create_bucket(Bucket=bucket, CreateBucketConfiguration=where)
    local = account.session()
    create_shared_network(local, account.record(local, "us-east-1"))
    session = account.session(state=f"s3://{bucket}/team")
    first, second = environment(session, aux=False), environment(session, aux=False)
    [first] = create_machines(session, [first])
    backend = json.loads((session.home.stacks / first.stack / "backend.tf.json").read_text())
    assert backend["terraform"]["required_version"] == ">= 1.10"
    assert session.cloud.least_terraform == (1, 10)
    assert account.session("local").cloud.least_terraform == (1, 9)
    [listed] = account.client("s3", region).list_objects_v2(Bucket=bucket)["Contents"]
    assert listed["Key"] == f"team/{first.stack}/terraform.tfstate"
    api.requests.clear()
    [second] = create_machines(session, [second])
    destroy_machines(session, first)
    destroy_machines(session, second)
    # The region was asked once.
    assert f"HEAD /{bucket}" not in [request["Action"] for request in api.requests]
    assert account.everything() == NOTHING


def test_a_bucket_that_does_not_exist_is_named(api: FaultyApi, account: Account) -> None:
    api.judge.keep_state_in(f"s3://{BUCKET}-missing/team")
    session = account.session(state=f"s3://{BUCKET}-missing/team")
    assert isinstance(session.cloud, AwsCloud)
    with pytest.raises(InfrastructureError, match=f"the bucket {BUCKET}-missing"):
        session.cloud.account.root_files("us-east-1", "env")


def test_two_controllers_on_one_stack_do_not_harm_each_other(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    [record] = create_machines(session, [environment(session, aux=False)])
    state = f"team/{record.stack}/terraform.tfstate"
    assert objects(account, record.stack) == [state]
    assert not (session.home.stacks / record.stack / "terraform.tfstate").exists()

    other = session.home.stacks / "other-controller"
    shutil.copytree(session.home.stacks / record.stack, other, symlinks=True)
    lock = (
        '{"ID":"11111111-2222-3333-4444-555555555555","Operation":"OperationTypeApply","Info":"","Who":"first@host",'
        f'"Version":"1.11.0","Created":"2026-01-01T00:00:00Z","Path":"{BUCKET}/{state}"}}'
    )
    account.client("s3").put_object(Bucket=BUCKET, Key=f"{state}.tflock", Body=lock)
    before = account.client("s3").get_object(Bucket=BUCKET, Key=state)["Body"].read()
    with pytest.raises(TerraformError, match="another controller is working on this stack") as caught:
        Stack(other, cloud_variables=session.cloud.terraform_variables).apply(session.progress.note)
    assert "first@host" in (caught.value.details or "")
    assert account.client("s3").get_object(Bucket=BUCKET, Key=state)["Body"].read() == before
    account.client("s3").delete_object(Bucket=BUCKET, Key=f"{state}.tflock")

    destroy_machines(session, record)
    assert account.everything() == NOTHING


@pytest.mark.skipif(product_that_runs() is OPENTOFU, reason="OpenTofu reads what Terraform writes")
def test_terraform_does_nothing_to_a_state_of_opentofu(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    [record] = create_machines(session, [environment(session, aux=False)])
    state = {"Bucket": BUCKET, "Key": f"team/{record.stack}/terraform.tfstate"}
    written = account.client("s3").get_object(**state)["Body"].read().decode()
    assert f"{TERRAFORM.registry}/hashicorp/aws" in written
    account.client("s3").put_object(**state, Body=written.replace(TERRAFORM.registry, OPENTOFU.registry))
    before = account.everything()
    stack = Stack(session.home.stacks / record.stack, cloud_variables=session.cloud.terraform_variables)
    with pytest.raises(TerraformError) as failure:
        stack.remove({record.id}, session.progress.note)
    assert "If OpenTofu wrote it, set PROVISIONER_TERRAFORM=tofu" in (failure.value.hint or "")
    assert account.everything() == before
    destroy_machines(session, record)  # the cloud removes what Terraform does not
    assert account.everything() == NOTHING


def test_an_unwritten_state_is_handed_in_before_the_next_step(
    api: FaultyApi, account: Account, session: Session, environment: MakeEnvironment
) -> None:
    record = environment(session, aux=False)
    fault = api.inject(Fault("PUT .tfstate", "InternalError", status="500 Error"))
    with pytest.raises(TerraformError):
        create_machines(session, [record])
    assert fault.hits
    errored = session.home.stacks / record.stack / ERRORED_STATE
    assert errored.exists()
    api.faults.clear()
    # Releasing the lock failed in the same way as writing the state.
    for key in objects(account, record.stack):
        if key.endswith(".tflock"):
            account.client("s3").delete_object(Bucket=BUCKET, Key=key)
    create_machines(session, [record])
    assert not errored.exists()
    assert len(account.everything()["instances"]) == 1
    destroy_machines(session, session.environments.find(record.id))
    assert account.everything() == NOTHING
