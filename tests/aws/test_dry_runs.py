"""Dry runs on an environment in the account: what is allowed, what is refused, and that nothing of it is done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provisioner.base.models import Environment
from provisioner.clouds.aws import images
from provisioner.clouds.aws.api import Api
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws.account import REGION, Account, MakeEnvironment
from tests.aws.proxy import Fault, FaultyApi

IMAGE_NAME = "family-dry-runs"


@pytest.fixture
def session(account: Account) -> Session:
    return account.session()


@pytest.fixture
def created(session: Session, environment: MakeEnvironment) -> Iterator[Environment]:
    [created] = create_machines(session, [environment(session, aux=False)])
    api, machine = Api(None, REGION), created.endpoints["primary"].instance_id or ""
    tags = {"provisioner:owner": "tests"}
    image = images.create(api, REGION, machine, IMAGE_NAME, tags)
    yield created
    images.remove(api, image, IMAGE_NAME)
    destroy_machines(session, created)


def test_the_printed_policy_allows_all_that_is_tried(session: Session, created: Environment, account: Account) -> None:
    before = account.everything()
    assert session.cloud.missing_rights(created) == []
    assert account.everything() == before


# EC2 has dry runs of all of these (botocore's model of EC2: `DryRun`).
CHANGES = {
    "CreateRoute", "DeleteRoute", "AssociateRouteTable", "DisassociateRouteTable", "AttachInternetGateway",
    "DetachInternetGateway", "DeleteInternetGateway", "ReplaceNetworkAclAssociation", "DeleteVolume",
    "DeleteSnapshot", "DeregisterImage", "CancelSpotInstanceRequests", "RunInstances",
}  # fmt: skip


def test_all_that_changes_the_account_is_tried(session: Session, created: Environment, api: FaultyApi) -> None:
    api.requests.clear()
    session.cloud.missing_rights(created)
    tried = {request["Action"] for request in api.requests if request.get("DryRun") == "true"}
    assert tried >= CHANGES
    done = {request["Action"] for request in api.requests if request.get("DryRun") != "true"}
    assert [action for action in done if not action.startswith("Describe")] == []


def test_each_right_that_is_refused_is_named(session: Session, created: Environment, api: FaultyApi) -> None:
    def is_dry(request: dict[str, str]) -> bool:
        return request.get("DryRun") == "true"

    for action in ("CreateImage", "RunInstances"):
        api.inject(Fault(action, "UnauthorizedOperation", "403 Forbidden", when=is_dry, message="You may not."))
    assert session.cloud.missing_rights(created) == [
        "run_instances on demand: You may not.",
        "run_instances spot: You may not.",
        "create_image: You may not.",
    ]
