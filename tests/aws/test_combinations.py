"""Every permission, with and without an aux VM, in both markets: created by one apply, isolated as promised, gone."""

from __future__ import annotations

import itertools

import pytest

from provisioner.base.models import Destination, Environment
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import destroy_machines
from tests.aws.account import NOTHING, Account, MakeEnvironment
from tests.aws.proxy import FaultyApi

ALLOWED = (Destination(cidr="198.51.100.7/32", port=443), Destination(cidr="198.51.100.8/32", port=8443))
PERMISSIONS = {"offline": (False, ()), "allowlist": (False, ALLOWED), "online": (True, ())}


def switch_metadata_off(account: Account, environment: Environment) -> None:
    """Does what the controller does once a machine has booted."""
    for endpoint in environment.endpoints.values():
        account.client().modify_instance_metadata_options(InstanceId=endpoint.instance_id, HttpEndpoint="disabled")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("market", ["on-demand", "spot"])
def test_every_permission_is_isolated_as_promised(
    api: FaultyApi, account: Account, environment: MakeEnvironment, market: str
) -> None:
    session = account.session(spot=market == "spot")
    wanted = [
        environment(session, aux=aux, full_internet=full_internet, allowed=allowed, stack=f"all-{market}")
        for (full_internet, allowed), aux in itertools.product(PERMISSIONS.values(), (False, True))
    ]
    created = create_machines(session, wanted)
    try:
        for record in created:
            assert record.placement["market"] == market
            assert set(record.endpoints) == set(record.machines)
            switch_metadata_off(account, record)
            assert session.cloud.isolation_differences(record) == []
            filters = [{"Name": "tag:provisioner:environment", "Values": [record.id]}]
            reservations = account.client().describe_instances(Filters=filters)["Reservations"]
            [*instances] = [instance for row in reservations for instance in row["Instances"]]
            assert len(instances) == len(record.machines)
            assert {instance.get("InstanceLifecycle", "on-demand") for instance in instances} == {market}
        launches = [request for request in api.requests if request["Action"] == "RunInstances"]
        assert len(launches) == 9  # none was repeated
    finally:
        destroy_machines(session, *created)
    assert account.everything() == NOTHING
