"""Tests creating machines: the records made beforehand, the apply, and the stacks, which go with their environments."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from provisioner.base.errors import CapacityError, TerraformError
from provisioner.base.models import Destination, Distribution, Environment
from provisioner.clouds.cloud import UNFINISHED, SharedNetwork
from provisioner.machines.create import (
    create_machines,
    create_shared_network,
    discard_unused_stacks,
    record_environment,
    stack_of,
)
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment, told_of, with_aux

NETWORK = SharedNetwork(
    stack="network-crater",
    values={"region": "crater", "availability_zones": ["a"], "controller_cidrs": [], "tags": {}},
    root_files={"provider.tf": "# a provider"},
    new=True,
    remove=lambda: pytest.fail("nothing was interrupted"),
)


def values_of(session: Session, stack: str) -> dict[str, dict[str, object]]:
    text = (session.home.stacks / stack / "environments.auto.tfvars.json").read_text()
    return dict(json.loads(text)["environments"])


def test_record_and_keys_are_written_before_anything_is_created(session: Session, cloud: FakeCloud) -> None:
    new = environment()
    record_environment(session, new)
    assert session.environments.find("env") == new
    assert session.environments.key_path("env", "controller").stat().st_mode & 0o777 == 0o600
    controller = session.environments.key("env", "controller").public
    assert cloud.machine(new).authorized_keys == {"agent": controller + "\n"}
    assert (cloud.existing(), cloud.runs()) == ([], [])


@pytest.mark.parametrize(("distribution", "user"), [("debian-12", "admin"), ("ubuntu-20.04-cuda", "ubuntu")])
def test_an_aux_vm_accepts_the_tasks_own_key(
    session: Session, cloud: FakeCloud, distribution: Distribution, user: str
) -> None:
    new = with_aux(distribution)
    record_environment(session, new)
    keys = {name: session.environments.key("env", name).public for name in ("controller", "task")}
    assert cloud.machine(new, "aux").authorized_keys == {user: f"{keys['controller']}\n{keys['task']}\n"}
    assert keys["task"].startswith("ssh-rsa ")
    assert keys["task"] not in cloud.machine(new, "primary").authorized_keys["agent"]


def test_one_apply_creates_all_environments_of_a_stack(session: Session, cloud: FakeCloud) -> None:
    first, second = created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert cloud.runs() == ["apply many"]
    assert cloud.existing() == ["one/primary", "two/primary"]
    assert first.endpoints["primary"].port == cloud.machine("one").sshd.port
    assert second.endpoints["primary"].port == cloud.machine("two").sshd.port
    assert first == session.environments.find("one")
    assert first.placement == {"region": "crater", "zone": "a"}


def test_terraform_gets_the_values_of_the_record(session: Session) -> None:
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


@pytest.mark.parametrize(
    ("origin", "notes"),
    [
        ("", []),
        ("template", []),
        ("boot", []),
        (
            "boot: the template did not serve",
            ["env: the primary machine boots, not started from a template: the template did not serve"],
        ),
    ],
    ids=["one way", "template", "boot", "instead"],
)
def test_a_machine_that_could_not_start_as_planned_runs_anyway(
    session: Session, cloud: FakeCloud, origin: str, notes: list[str]
) -> None:
    cloud.origin = origin
    [env] = created(session, environment())
    assert env.endpoints["primary"].origin == origin
    assert told_of(session).notes == notes


def test_an_environment_keeps_its_recorded_place(session: Session) -> None:
    [env] = created(session, environment(placement={"region": "crater", "zone": "z"}))
    assert env.placement["zone"] == "z"


def test_an_environment_goes_to_the_next_place_if_one_is_full(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.places = [("zone a is full", {"region": "crater", "zone": "b"})]
    cloud.terraform_fails(environment="two")
    first, second = created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert (first.placement["zone"], second.placement["zone"]) == ("a", "b")
    assert cloud.runs() == ["apply many"] * 2
    assert told_of(session).notes == ["two: zone a is full"]
    assert session.environments.find("two").placement["zone"] == "b"


def test_terraform_forgets_what_the_cloud_has_removed(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.places = [("an answer was lost", {"region": "crater", "zone": "a"})]
    cloud.terraform_fails(environment="two")
    created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert cloud.runs() == ["apply many", "state many", "apply many"]


def test_all_environments_go_to_the_next_place(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.places = [("full", {"zone": "b"}), ("full", {"zone": "c"})]
    cloud.terraform_fails()
    environments = created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert {env.placement["zone"] for env in environments} == {"b", "c"}


def test_the_error_names_environments_without_a_place(session: Session, cloud: FakeCloud) -> None:
    cloud.faults.places = []
    cloud.terraform_fails(environment="two")
    with pytest.raises(CapacityError) as caught:
        created(session, environment("one", stack="many"), environment("two", stack="many"))
    assert caught.value.environments == {"two"}
    assert isinstance(caught.value.__cause__, TerraformError)


def test_an_error_that_is_not_about_capacity_is_raised_unchanged(session: Session, cloud: FakeCloud) -> None:
    cloud.terraform_fails(summary="Invalid value")
    with pytest.raises(TerraformError, match="Invalid value"):
        created(session, environment())
    assert cloud.runs() == ["apply env"]
    assert session.environments.find("env").placement, "the record names the place, as the machines may exist"


def test_the_price_at_the_place_of_creation_is_recorded(session: Session, cloud: FakeCloud) -> None:
    [free] = created(session, environment("free"))
    cloud.usd = cloud.usd + 2
    [dear] = created(session, environment("dear"))
    assert (free.usd_per_hour, dear.usd_per_hour) == (Decimal(0), Decimal(2))


def test_a_shared_network_is_created_once(session: Session, cloud: FakeCloud) -> None:
    cloud.network = NETWORK
    created(session, environment("one"))
    created(session, environment("two"))
    assert cloud.runs() == ["apply network-crater", "apply one", "apply two"]
    directory = session.home.stacks / "network-crater"
    assert json.loads((directory / "network.auto.tfvars.json").read_text()) == {"network": NETWORK.values}
    assert (directory / "provider.tf").read_text() == "# a provider"
    assert not (directory / UNFINISHED).exists()


def saved_with_place(session: Session) -> Environment:
    return session.environments.save(environment(placement={"region": "crater"}))


def test_an_interrupted_shared_network_is_created_again(session: Session, cloud: FakeCloud) -> None:
    removed = []
    cloud.network = replace(NETWORK, remove=lambda: removed.append("network"))
    cloud.terraform_fails(summary="Killed")
    env = saved_with_place(session)
    with pytest.raises(TerraformError, match="Killed"):
        create_shared_network(session, env)
    marker = session.home.stacks / NETWORK.stack / UNFINISHED
    assert marker.exists()
    # The fake Terraform wrote the network; a real one may have created any part of it.
    (cloud.directory / "networks" / NETWORK.stack).unlink()
    create_shared_network(session, env)
    assert removed == ["network"]
    assert not marker.exists()


def test_a_network_created_by_another_controller_is_used(session: Session, cloud: FakeCloud) -> None:
    network = cloud.directory / "networks" / NETWORK.stack
    cloud.network = replace(NETWORK, remove=network.touch)
    cloud.terraform_fails(summary="Killed")
    env = saved_with_place(session)
    with pytest.raises(TerraformError, match="Killed"):
        create_shared_network(session, env)
    runs = cloud.runs()
    network.unlink()
    create_shared_network(session, env)
    assert cloud.runs() == runs
    assert not (session.home.stacks / NETWORK.stack / UNFINISHED).exists()


def test_a_network_in_use_is_never_marked_as_unfinished(session: Session, cloud: FakeCloud) -> None:
    cloud.network = replace(NETWORK, new=False)
    cloud.terraform_fails(summary="Killed")
    with pytest.raises(TerraformError):
        create_shared_network(session, saved_with_place(session))
    assert not (session.home.stacks / NETWORK.stack / UNFINISHED).exists()


def test_an_environment_without_endpoints_is_an_error(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    new = environment()
    record_environment(session, new)
    program = tmp_path / "moon" / "terraform"
    program.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(Exception, match="Terraform gave no endpoints for env") as caught:
        create_machines(session, [new])
    assert getattr(caught.value, "exit_code", None) == 5


def stacks(session: Session) -> set[str]:
    return {path.name for path in session.home.stacks.glob("[!.]*")}


def test_environments_of_one_stack_share_their_root(session: Session) -> None:
    stack_of(session, environment("one", stack="many")).write({"main.tf": "here"})
    assert stack_of(session, environment("two", stack="many")).exists
    assert not stack_of(session, environment("three")).exists


def test_stacks_without_environments_are_removed(session: Session, cloud: FakeCloud) -> None:
    created(session, environment())
    for name in ("unused", "network-crater"):
        (session.home.stacks / name).mkdir()
    discard_unused_stacks(session)
    assert stacks(session) == {"env", "network-crater"}
    assert (session.home.stacks / ".initialised").is_dir()
    assert cloud.existing() == ["env/primary"]


def test_no_stack_is_removed_while_a_record_cannot_be_read(session: Session) -> None:
    session.environments.save(environment())
    (session.environments.directory("env") / "environment.json").write_text("{")
    (session.home.stacks / "env").mkdir()
    discard_unused_stacks(session)
    assert stacks(session) == {"env"}
