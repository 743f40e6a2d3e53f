"""The contract's lifecycle with every permission, with and without an aux VM, on the tests' EC2.

Six environments, one after the other, which take an hour of emulated machines: the campaign soak. They take turns with
the market, which changes nothing in a machine: tests/aws/test_combinations.py has every permission in both markets
without machines, and the whole of `aws check` (tests/aws/test_selftest.py) has it with machines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from provisioner.base.config import load_settings
from provisioner.base.models import Environment
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.environment import lifecycle
from provisioner.family.loader import load_family
from provisioner.machines.connect import connect
from provisioner.selftest.checks import ALL_COMBINATIONS, Combination
from provisioner.session import Session
from provisioner.store.home import Home
from tests.aws.ec2.cloud import Ec2Cloud
from tests.aws.ec2.fixture import OUTSIDE
from tests.contract.lifecycle import live_and_end

pytestmark = [pytest.mark.vm, pytest.mark.timeout(3600)]
FAMILY = Path(__file__).parent / "families" / "permissions"
# Whether machines of each permission reach the host that plays the internet, and how they try.
REACHES_OUTSIDE = {"offline": False, "allowlist": True, "online": True}
ADDRESS = ip_network(OUTSIDE.cidr)[0]
# More than a connection may have under way before it is answered, several times.
LARGE_BYTES = 1_000_000
# Each permission, with and without an aux VM, in one of both markets.
COMBINATIONS = [each for each in ALL_COMBINATIONS if each.spot == (each.aux != (each.internet == "online"))]
REACH = ["timeout", "10", "bash", "-c", f"head -c 5 < /dev/tcp/{ADDRESS}/{OUTSIDE.port} | grep -q hello"]


@pytest.fixture(params=COMBINATIONS, ids=lambda combination: combination.name)
def combination(request: pytest.FixtureRequest) -> Combination:
    """Returns each combination in turn."""
    chosen: Combination = request.param
    return chosen


@pytest.fixture
def session(ec2_cloud: Ec2Cloud | None, ec2_home: Home, combination: Combination) -> Iterator[Session]:
    """Opens a session that asks the combination's market, on machines that boot as on EC2."""
    settings = load_settings()
    with ec2_cloud.booting_as_on_ec2() if ec2_cloud else contextlib.nullcontext():
        cloud = AwsCloud(ec2_home, settings, spot=combination.spot)
        yield Session(home=ec2_home, cloud=cloud, ca_bundle=settings.ca_bundle_path)


def test_each_combination_lives_and_leaves_nothing(
    session: Session, combination: Combination, ec2_cloud: Ec2Cloud | None
) -> None:
    allowed = (OUTSIDE,) if combination.internet == "allowlist" else ()
    environment = lifecycle.up(session, load_family(FAMILY), combination.task, allowed)

    def is_as_asked(session: Session, environment: Environment) -> None:
        assert environment.placement["market"] == ("spot" if combination.spot else "on-demand")
        assert set(environment.machines) == ({"primary", "aux"} if combination.aux else {"primary"})
        assert session.cloud.isolation_differences(environment) == []
        for role in environment.machines:
            with connect(session, environment, role) as connection:
                tried = connection.run(REACH)
            assert (tried.exit_code == 0) == REACHES_OUTSIDE[combination.internet], role
        with ec2_cloud.narrow_path() if ec2_cloud else contextlib.nullcontext():
            for role in environment.machines:
                with connect(session, environment, role) as connection:
                    sent = connection.run(["head", "--bytes", str(LARGE_BYTES), "/dev/zero"], timeout_seconds=120)
                assert len(sent.stdout) == LARGE_BYTES, role

    live_and_end(session, environment, is_as_asked)
