"""Tests the lifecycle that every cloud must pass. The fixture `session` opens a session on each cloud."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from provisioner.base.errors import UsageError
from provisioner.base.models import Environment
from provisioner.clouds.aws import machines
from provisioner.environment import lifecycle
from provisioner.family.loader import load_family
from provisioner.machines.connect import connect
from provisioner.session import Session
from tests.aws.ec2.cloud import Ec2Cloud
from tests.aws.ec2.fixture import ec2_session
from tests.contract.lifecycle import live_and_end

pytestmark = pytest.mark.vm
HERE = Path(__file__).parent


# Not for each test: `nothing_left_behind` would find EC2's processes, which stay for the tests of other modules.
@pytest.fixture(
    scope="module", params=["local", pytest.param("aws", marks=[pytest.mark.ec2, pytest.mark.timeout(2400)])]
)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Opens a session on each cloud in turn."""
    if request.param == "aws":
        cloud: Ec2Cloud | None = request.getfixturevalue("ec2_cloud")
        with cloud.booting_as_on_ec2() if cloud else contextlib.nullcontext():
            yield ec2_session(request.getfixturevalue("ec2_home"))
    else:
        open_session: Callable[[Mapping[str, str]], Session] = request.getfixturevalue("open_session")
        yield open_session({})


def test_an_environment_lives_is_scored_and_leaves_nothing(session: Session) -> None:
    environment = lifecycle.up(session, load_family(HERE / "families" / "echo"), "main")
    live_and_end(session, environment, _assert_booting_told_nothing_that_matters)


def test_an_unknown_task_creates_nothing(session: Session) -> None:
    before = session.environments.all()
    with pytest.raises(UsageError, match="main"):
        lifecycle.up(session, load_family(HERE / "families" / "echo"), "mainn")
    assert session.environments.all() == before


def _assert_booting_told_nothing_that_matters(session: Session, environment: Environment) -> None:
    """Reads what a unit of the image found in the metadata service before it was switched off."""
    with connect(session, environment, "primary") as connection:
        found = connection.run(["cat", "/root/metadata.json"]).stdout
    if session.cloud.name == "local":  # which has no such service
        assert found == b""
        return
    told = json.loads(found)
    # What we told it: see tests/attacks/test_machine_metadata.py.
    assert told.pop("user-data") == machines.user_data_path(session.home, environment, "primary").read_text()
    controller = session.environments.key(environment.id, "controller").public
    assert {value.strip() for path, value in told.items() if "public-keys" in path} == {controller.strip()}
    # The rest describes the machine. There are no tags, and no credentials but those of AWS's role without rights.
    path = "meta-data/identity-credentials/ec2/security-credentials/ec2-instance"
    assert json.loads(told.pop(path))["Token"]
    del told["meta-data/identity-credentials/ec2/info"]
    assert not [path for path in told if re.search("credential|iam|tags", path)]
    assert "PRIVATE" not in found.decode()
