"""Machines that boot, that do not, and that show another key than the cloud told."""

from __future__ import annotations

import pytest

from provisioner.errors import MachineLostError
from provisioner.machines.boot import boot_machines
from provisioner.remote.keys import ed25519_key_pair
from provisioner.session import Session
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import created, environment


def test_all_machines_let_the_controller_in_and_are_hardened(session: Session, cloud: FakeCloud) -> None:
    [one] = created(session, environment(roles=("primary", "aux")))
    connections = boot_machines(session, one)
    assert {role: connection.login.user for role, connection in connections.items()} == {
        "primary": "root",
        "aux": "root",
    }
    for role, connection in connections.items():
        cloud.machine(one, role).guest.journal = role
        assert connection.run(["journalctl"]).stdout == role.encode()
        connection.close()
    assert cloud.hardened == ["env"]


def test_the_host_key_that_the_cloud_told_is_the_only_one_that_is_accepted(session: Session, cloud: FakeCloud) -> None:
    [one] = created(session, environment())
    cloud.machine(one).sshd.shown_key_pair = ed25519_key_pair()
    with pytest.raises(MachineLostError, match="shows a host key that is not the machine's"):
        boot_machines(session, one)
    assert cloud.hardened == []


def test_a_machine_that_ended_is_told_with_the_end_of_its_console(session: Session, cloud: FakeCloud) -> None:
    [one] = created(session, environment())
    cloud.end_machine(one)
    with pytest.raises(MachineLostError, match="The primary machine did not come up") as caught:
        boot_machines(session, one)
    assert (caught.value.details or "").splitlines() == [f"console line {number} of primary" for number in range(5, 20)]


def test_one_machine_that_ended_ends_the_waiting_for_the_others(session: Session, cloud: FakeCloud) -> None:
    [one] = created(session, environment(roles=("primary", "aux")))
    cloud.machine(one, "aux").sshd.is_up = lambda: False
    cloud.end_machine(one, "primary")
    with pytest.raises(MachineLostError, match="The primary machine did not come up"):
        boot_machines(session, one)


def test_no_connection_is_left_where_the_last_change_fails(session: Session, cloud: FakeCloud) -> None:
    [one] = created(session, environment())
    cloud.faults.refuses_to_harden = True
    with pytest.raises(MachineLostError, match="could not be hardened"):
        boot_machines(session, one)
    assert cloud.machine(one).sshd.connections() == 0
