"""Tests the steps of the self-test on a cloud that does, or does not, what it must."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest

from provisioner.base.errors import ProvisionerError, ShortageError
from provisioner.base.models import Destination, MachineSize, Role
from provisioner.clouds.cloud import EnvironmentResources
from provisioner.family.loader import TaskFamily, load_family
from provisioner.selftest import checks
from provisioner.selftest.steps import FAMILY
from provisioner.session import Session
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud, assert_nothing_is_left
from tests.unit.fakes.guest import SETUP
from tests.unit.fakes.world import store_image

DESTINATION = Destination(cidr="198.51.100.7/32", port=443)
OFFLINE = checks.Combination("offline", aux=False, spot=False)


@pytest.fixture
def fam(session: Session, cloud: FakeCloud) -> TaskFamily:
    """Provides the self-test's family, with an image, on a cloud that scores 1.0."""
    fam = load_family(FAMILY)
    store_image(session, fam, {**SETUP, "tasks": {name: {"instructions": ""} for name in ("offline", "offline-aux")}})
    cloud.guest_defaults = {"values": {"start": None, "settle_home": None, "score": 1.0}}
    return fam


def test_a_combination_lives_and_dies(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    assert "came up, was scored and is gone" in checks.live(session, fam, OFFLINE, DESTINATION)
    assert_nothing_is_left(session, cloud)


def test_an_allowlist_is_that_of_the_combination(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    allowlist = replace(OFFLINE, internet="allowlist")
    checks.live(session, fam, allowlist, DESTINATION)
    assert [request["probes"]["root"] for request in cloud.guest().probe_requests if "198.51.100.7" in str(request)]


def test_another_score_is_a_failure_and_leaves_nothing(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    cloud.guest_defaults["values"]["score"] = 0.5
    with pytest.raises(ProvisionerError, match=r"scored 0\.5"):
        checks.live(session, fam, OFFLINE, DESTINATION)
    assert_nothing_is_left(session, cloud)


def test_what_outlives_its_destruction_is_a_failure(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "remaining", lambda _: ["a volume"])
    with pytest.raises(ProvisionerError, match="a volume"):
        checks.live(session, fam, OFFLINE, DESTINATION)


def test_rights_that_lack_are_listed(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud, "missing_rights", lambda _: ["run_instances: no", "create_image: no"])
    with pytest.raises(ProvisionerError, match="lack 2 rights") as raised:
        checks.rights(session, fam)
    assert raised.value.details == "run_instances: no\ncreate_image: no"
    assert_nothing_is_left(session, cloud)


def test_a_machine_that_outlives_its_time_is_a_failure(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = WaitingClock()
    monkeypatch.setattr(checks, "time", clock)
    monkeypatch.setattr(checks, "wait", lambda seconds, _: clock.sleep(seconds))
    with pytest.raises(ProvisionerError, match="still runs"):
        checks.expiry(session, fam)
    assert_nothing_is_left(session, cloud)


def test_a_machine_that_ends_at_its_time_is_not(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "EXPIRY", timedelta(0))
    monkeypatch.setattr(cloud, "move_ttl", cloud.end_machine)
    assert checks.expiry(session, fam).startswith("ended ")
    assert_nothing_is_left(session, cloud)


def test_a_crowd_comes_up_and_goes(session: Session, cloud: FakeCloud, fam: TaskFamily) -> None:
    assert checks.crowd(session, fam, 3).startswith("3 were ready after ")
    assert_nothing_is_left(session, cloud)


def test_machines_beyond_the_accounts_room_do_not_start(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shortage(sizes: Mapping[Role, MachineSize], count: int) -> str:
        return f"the quota has room for 2 of {count} environments with {len(sizes)} machine"

    monkeypatch.setattr(cloud, "shortage", shortage)
    with pytest.raises(ShortageError, match="room for 2 of 3 environments with 1 machine") as raised:
        checks.crowd(session, fam, 3)
    assert "fewer machines" in (raised.value.hint or "")
    assert session.ledger.entries() == []


def test_what_is_left_of_the_self_test_is_a_failure(
    session: Session, cloud: FakeCloud, fam: TaskFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [EnvironmentResources(environment=name, resources=("machine",)) for name in ("other-1", "selftest-2")]
    monkeypatch.setattr(cloud, "list_resources", lambda _: found)
    with pytest.raises(ProvisionerError, match=r"left of selftest-2\.$"):
        checks.nothing_left(session, fam)
    monkeypatch.setattr(cloud, "list_resources", lambda _: found[:1])
    checks.nothing_left(session, fam)
    assert [image.name for image in session.images.all() if image.family == "selftest"] == []
