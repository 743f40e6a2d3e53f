"""Which machines an account gets: those that its markets have."""

from __future__ import annotations

import pytest
from moto.ec2.models.instance_types import InstanceTypeOfferingBackend

from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.clouds.aws.instance_types import Catalogue
from provisioner.family.manifest import Resources
from provisioner.session import Session
from tests.aws.account import Account, MakeEnvironment


def selling(session: Session, without_spot: set[str], only: set[str] | None = None) -> Catalogue:
    """Has a session's cloud sell some types on demand alone."""
    cloud = session.cloud
    assert isinstance(cloud, AwsCloud)
    types = [
        one.model_copy(update={"has_spot": one.name not in without_spot})
        for one in cloud.catalogue.types
        if not only or one.name in only
    ]
    vars(cloud)["catalogue"] = cloud.catalogue.model_copy(update={"types": tuple(types)})
    return cloud.catalogue


def test_spot_takes_the_cheapest_that_the_spot_market_has(account: Account) -> None:
    session = account.session(spot=True)
    [first, second, *_] = account.session().cloud.choose(Resources(), None)["primary"].types
    selling(session, {first})
    assert first not in session.cloud.choose(Resources(), None)["primary"].types
    assert second == session.cloud.choose(Resources(), None)["primary"].types[0]


def test_what_the_spot_market_lacks_starts_on_demand(account: Account, environment: MakeEnvironment) -> None:
    session = account.session(spot=True)
    record = environment(session, aux=False, types=("t3.small",))
    selling(session, set(), only={"t3.small"})
    assert session.cloud.place(record)["market"] == "spot"
    selling(session, {"t3.small"}, only={"t3.small"})
    assert session.cloud.choose(Resources(), None)["primary"].types == ("t3.small",)
    assert session.cloud.place(record)["market"] == "on-demand"
    session.ledger.settle(record.id, record.created_at, 0)


def test_a_machine_begins_in_a_zone_that_offers_its_type(
    account: Account, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = account.session()
    zones = [zone["ZoneName"] for zone in account.client().describe_availability_zones()["AvailabilityZones"]]
    rows = [{"InstanceType": "t3.small", "LocationType": "availability-zone", "Location": zones[-1]}]
    monkeypatch.setattr(InstanceTypeOfferingBackend, "describe_instance_type_offerings", lambda *_, **__: rows)
    for _ in range(4):  # zones take turns otherwise
        record = environment(session, aux=False)
        assert session.cloud.place(record)["zone"] == zones[-1]
        session.ledger.settle(record.id, record.created_at, 0)
