from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from provisioner.base.models import Destination, Environment, MachineRecord, MachineSize, TaskSetup
from provisioner.clouds.local.credentials import credentials, link_mac, private_addresses

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MACHINE = MachineRecord(image="image", size=MachineSize(cpus=1, memory_gib=1, disk_gib=16), user="root")
LARGE = MACHINE.model_copy(update={"size": MachineSize(cpus=1, memory_gib=1, disk_gib=17)})


def environment(**changes: Any) -> Environment:
    known: dict[str, Any] = {
        "id": "env", "cloud": "local", "stack": "env", "family": "fam", "task": "main", "status": "creating",
        "attended": True, "created_at": NOW, "expires_at": NOW + timedelta(hours=1), "setup": TaskSetup(),
        "full_internet": False, "machines": {"primary": MACHINE},
    }  # fmt: skip
    return Environment(**{**known, **changes})


def test_an_offline_machine_alone_gets_no_address_at_all() -> None:
    values = credentials(environment(), "primary", "PRIVATE", {"agent": "ssh-ed25519 AAAA\n"})
    assert values == {
        "hostname": "primary",
        "hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 primary\n",
        "host_key": "PRIVATE",
        "expires_at": "1767229200",
        "authorized_keys.agent": "ssh-ed25519 AAAA\n",
    }


def test_two_machines_know_each_other_by_role() -> None:
    known = environment(machines={"primary": MACHINE, "aux": LARGE})
    addresses = private_addresses("env", ("primary", "aux"))
    values = credentials(known, "aux", "PRIVATE", {})
    assert values["private_address"] == str(addresses["aux"])
    assert values["link_mac"] == "52:54:" + ":".join(f"{byte:02x}" for byte in addresses["aux"].ip.packed)
    assert f"{addresses['primary'].ip} primary\n{addresses['aux'].ip} aux\n" in values["hosts"]
    assert int(values["grow"]) == 17 << 21
    assert addresses["primary"].network == addresses["aux"].network


@pytest.mark.parametrize(("count", "prefix"), [(2, 29), (5, 29), (6, 28), (13, 28), (20, 27)])
def test_any_number_of_machines_has_addresses_in_one_network(count: int, prefix: int) -> None:
    names = ["primary", *(f"m{number}" for number in range(1, count))]
    for identity in ("env", "other", "third"):
        addresses = list(private_addresses(identity, names).values())
        [network] = {address.network for address in addresses}
        assert network.prefixlen == prefix
        assert {address.ip for address in addresses} <= set(network.hosts())
        assert len({link_mac(address) for address in addresses}) == count


def test_machines_are_known_by_their_host_names() -> None:
    named = MACHINE.model_copy(update={"hostname": "box"})
    known = environment(machines={"web": MACHINE, "primary": named})
    values = credentials(known, "primary", "PRIVATE", {})
    addresses = private_addresses("env", ("primary", "web"))
    assert values["hostname"] == "box"
    assert f"{addresses['primary'].ip} box\n{addresses['web'].ip} web\n" in values["hosts"]


def test_an_allowlist_gives_addresses_and_no_resolver() -> None:
    allowed = (Destination(cidr="192.0.2.7/32", port=443, host_names=("api.example",)),)
    values = credentials(environment(allowed_destinations=allowed), "primary", "PRIVATE", {})
    assert "192.0.2.7 api.example\n" in values["hosts"]
    assert "internet" in values
    assert "resolver" not in values


def test_full_internet_brings_a_resolver() -> None:
    assert {"internet", "resolver"} <= credentials(environment(full_internet=True), "primary", "KEY", {}).keys()
