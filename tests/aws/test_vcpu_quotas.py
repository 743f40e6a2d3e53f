"""An account's quotas of vCPUs: asked beforehand, counted, and left for another region where they are used up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provisioner.base.errors import CapacityError, UnavailableError
from provisioner.base.models import MachineSize, Role
from provisioner.clouds.aws import vcpu_quota
from provisioner.family.manifest import Resources
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws import moto_gaps
from tests.aws.account import Account, MakeEnvironment
from tests.aws.proxy import Fault, FaultyApi

REGION = "us-west-2"
ON_DEMAND, SPOT = moto_gaps.STANDARD["on-demand"], moto_gaps.STANDARD["spot"]
# A machine of the tests has two vCPUs.
ONE: dict[Role, MachineSize] = {"primary": MachineSize(cpus=2, memory_gib=2, disk_gib=16, types=("t3.small",))}


@pytest.fixture(autouse=True)
def quotas(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], int]]:
    """Provides the quotas of the account's regions, for the test to change, and has each look count."""
    monkeypatch.setattr(vcpu_quota, "LOOK_SECONDS", -1.0)
    yield moto_gaps.quotas
    moto_gaps.quotas.clear()


def opened(account: Account, *, spot: bool = False, regions: tuple[str, ...] = (REGION,)) -> Session:
    return account.session(regions=regions, spot=spot)


def test_machines_beyond_every_quota_are_refused_first(account: Account, quotas: dict[tuple[str, str], int]) -> None:
    quotas[REGION, ON_DEMAND] = 1
    with pytest.raises(UnavailableError, match=r"need 2 vCPUs of Standard instances, and the account's quota .* is 1"):
        opened(account).cloud.choose(Resources(), None)
    # Elsewhere there may be more, and on the spot market.
    opened(account, regions=(REGION, "us-east-2")).cloud.choose(Resources(), None)
    opened(account, spot=True).cloud.choose(Resources(), None)


def test_what_runs_counts(account: Account, environment: MakeEnvironment, quotas: dict[tuple[str, str], int]) -> None:
    session = opened(account)
    quotas[REGION, ON_DEMAND] = 5
    assert session.cloud.capacity(ONE) == 2
    create_machines(session, [environment(session, aux=False)])
    assert session.cloud.capacity(ONE) == 1
    assert session.cloud.room(ONE) == "on-demand: 2 of 5 vCPUs (Standard, 2 in use), room for 1 such environment now"
    assert session.cloud.shortage(ONE, 1) == ""
    assert "have room for 1 of 2 environments" in session.cloud.shortage(ONE, 2)
    notes = [note for note in session.cloud.notes() if "Quota" in note]
    assert notes == [f"Quota of vCPUs in {REGION}, standard instances: 5 on-demand, 2 in use; 4000 spot, 0 in use."]
    # Another type counts under the same quota, so it is not tried.
    quotas[REGION, ON_DEMAND] = 2
    with pytest.raises(CapacityError, match="quota of vCPUs is used up") as raised:
        create_machines(session, [environment(session, aux=False)])
    assert "nothing else to try" in raised.value.message
    assert not [note for note in account.progress.notes if "trying t3.medium" in note]
    for record in session.environments.all():
        destroy_machines(session, record)
    assert session.cloud.capacity(ONE) == 2


def test_the_spot_market_has_a_quota_of_its_own(account: Account, quotas: dict[tuple[str, str], int]) -> None:
    quotas[REGION, ON_DEMAND], quotas[REGION, SPOT] = 4, 6
    assert opened(account).cloud.capacity(ONE) == 2
    assert opened(account, spot=True).cloud.capacity(ONE) == 2 + 3


@pytest.mark.parametrize("code", ["AccessDeniedException", "ServiceException"])
def test_an_unknown_quota_refuses_nothing(account: Account, api: FaultyApi, code: str) -> None:
    api.inject(Fault("POST /", code, "403 Forbidden", when=lambda form: not form))  # Service Quotas speaks JSON
    session = opened(account)
    session.cloud.choose(Resources(), None)
    assert (session.cloud.capacity(ONE), session.cloud.room(ONE), session.cloud.shortage(ONE, 1000)) == (None, "", "")
