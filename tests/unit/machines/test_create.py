"""What is recorded before anything exists, and what one apply makes of it."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from provisioner.clouds.cloud import UNFINISHED, SharedNetwork
from provisioner.errors import CapacityError, TerraformError
from provisioner.machines.create import AUX_USER, create_machines, create_shared_network, record_environment
from provisioner.models import Destination, Environment
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of

NETWORK = SharedNetwork(
    stack="network-crater",
    values={"region": "crater", "availability_zones": ["a"], "controller_cidrs": [], "tags": {}},
    root_files={"provider.tf": "# a provider"},
    new=True,
)


def values_of(session: Session, stack: str) -> dict[str, dict[str, object]]:
    text = (session.home.stacks / stack / "environments.auto.tfvars.json").read_text()
    return dict(json.loads(text)["environments"])


def test_record_and_keys_are_there_before_anything_exists(session: Session, cloud: FakeCloud) -> None:
    new = environment()
    record_environment(session, new)
    assert session.environments.find("env") == new
    assert session.environments.key_path("env", "controller").stat().st_mode & 0o777 == 0o600
    controller = session.environments.key("env", "controller").public
    assert cloud.machine(new).authorized_keys == {"agent": controller + "\n"}
    assert (cloud.existing(), cloud.runs()) == ([], [])


def test_an_aux_vm_lets_the_tasks_own_key_in(session: Session, cloud: FakeCloud) -> None:
    new = environment(roles=("primary", "aux"))
    record_environment(session, new)
    keys = {name: session.environments.key("env", name).public for name in ("controller", "task")}
    assert cloud.machine(new, "aux").authorized_keys == {AUX_USER: f"{keys['controller']}\n{keys['task']}\n"}
    assert keys["task"].startswith("ssh-rsa ")
    assert keys["task"] not in cloud.machine(new, "primary").authorized_keys["agent"]


def test_one_apply_makes_all_environments_of_a_stack(session: Session, cloud: FakeCloud) -> None:
    one, two = created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert cloud.runs() == ["apply many"]
    assert cloud.existing() == ["one/primary", "two/primary"]
    assert one.endpoints["primary"].port == cloud.machine("one").sshd.port
    assert two.endpoints["primary"].port == cloud.machine("two").sshd.port
    assert one == session.environments.find("one")
    assert one.placement == {"region": "crater", "zone": "a"}


def test_terraform_is_told_what_the_record_says(session: Session) -> None:
    allowed = (Destination(cidr="192.0.2.7/32", port=443, host_names=("example.com",)),)
    created(session, environment(allowed_destinations=allowed))
    public_key = session.environments.key("env", "controller").public
    assert values_of(session, "env")["env"] == {
        "environment_id": "env",
        "full_internet": False,
        "allowed_destinations": [{"cidr": "192.0.2.7/32", "port": 443}],
        "directory": "",
        "machines": {
            "primary": {"image": "base", "cpus": 1, "memory_gib": 1.0, "disk_gib": 16, "public_key": public_key}
        },
    }


def test_an_environment_that_was_placed_stays_where_it_is(session: Session) -> None:
    [one] = created(session, environment(placement={"region": "crater", "zone": "z"}))
    assert one.placement["zone"] == "z"


def test_an_environment_without_room_is_created_at_the_next_place(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.places = [("zone a is full", {"region": "crater", "zone": "b"})]
    cloud.terraform_fails(environment="two")
    one, two = created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert (one.placement["zone"], two.placement["zone"]) == ("a", "b")
    assert cloud.runs() == ["apply many"] * 2
    assert told_of(session).notes == ["two: zone a is full"]
    assert session.environments.find("two").placement["zone"] == "b"


def test_all_environments_go_to_the_next_place_where_terraform_names_none(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.places = [("full", {"zone": "b"}), ("full", {"zone": "c"})]
    cloud.terraform_fails()
    placed = created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert {one.placement["zone"] for one in placed} == {"b", "c"}


def test_where_no_place_is_left_the_error_names_who_has_none(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.places = []
    cloud.terraform_fails(environment="two")
    with pytest.raises(CapacityError) as caught:
        created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert caught.value.environments == {"two"}
    assert isinstance(caught.value.__cause__, TerraformError)


def test_an_error_that_is_not_the_places_fault_is_raised_as_it_is(session: Session, cloud: FakeCloud) -> None:
    cloud.terraform_fails(summary="Invalid value")
    with pytest.raises(TerraformError, match="Invalid value"):
        created(session, environment())
    assert cloud.runs() == ["apply env"]
    assert session.environments.find("env").placement, "what may exist is recorded with its place"


def test_the_price_where_it_was_created_is_recorded(session: Session, cloud: FakeCloud) -> None:
    [free] = created(session, environment("free"))
    cloud.usd = cloud.usd + 2
    [dear] = created(session, environment("dear"))
    assert (free.usd_per_hour, dear.usd_per_hour) == (Decimal(0), Decimal(2))


def test_a_shared_network_is_made_once(session: Session, cloud: FakeCloud) -> None:
    cloud.network = NETWORK
    created(session, environment("one"))
    created(session, environment("two"))
    assert cloud.runs() == ["apply network-crater", "apply one", "apply two"]
    directory = session.home.stacks / "network-crater"
    assert json.loads((directory / "network.auto.tfvars.json").read_text()) == {"network": NETWORK.values}
    assert (directory / "provider.tf").read_text() == "# a provider"
    assert not (directory / UNFINISHED).exists()
    assert cloud.removed_networks == []


def placed(session: Session) -> Environment:
    return session.environments.save(environment(placement={"region": "crater"}))


def test_a_shared_network_whose_making_was_cut_short_is_made_anew(session: Session, cloud: FakeCloud) -> None:
    cloud.network = NETWORK
    cloud.terraform_fails(summary="Killed")
    one = placed(session)
    with pytest.raises(TerraformError, match="Killed"):
        create_shared_network(session, one)
    marker = session.home.stacks / NETWORK.stack / UNFINISHED
    assert marker.exists()
    # The fake Terraform had written the network; a real one may have made any part of it.
    (cloud.directory / "networks" / NETWORK.stack).unlink()
    create_shared_network(session, one)
    assert cloud.removed_networks == ["env"]
    assert not marker.exists()


def test_a_network_that_is_in_use_is_never_taken_for_unfinished(session: Session, cloud: FakeCloud) -> None:
    cloud.network = SharedNetwork(NETWORK.stack, NETWORK.values, NETWORK.root_files, new=False)
    cloud.terraform_fails(summary="Killed")
    with pytest.raises(TerraformError):
        create_shared_network(session, placed(session))
    assert not (session.home.stacks / NETWORK.stack / UNFINISHED).exists()


def test_what_terraform_gave_no_endpoints_for_is_told(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    new = environment()
    record_environment(session, new)
    program = tmp_path / "moon" / "terraform"
    program.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(Exception, match="Terraform gave no endpoints for env") as caught:
        create_machines(session, [new])
    assert getattr(caught.value, "exit_code", None) == 5
