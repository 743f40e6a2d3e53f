from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from provisioner.clouds.local.credentials import credentials, private_addresses
from provisioner.models import Destination, Environment, MachineRecord, MachineSize, TaskSetup

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MACHINE = MachineRecord(image="image", size=MachineSize(cpus=1, memory_gib=1, disk_gib=16), user="root")
LARGE = MachineRecord(image="image", size=MachineSize(cpus=1, memory_gib=1, disk_gib=17), user="root")


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
    addresses = private_addresses("env")
    values = credentials(known, "aux", "PRIVATE", {})
    assert values["private_address"] == str(addresses["aux"])
    assert f"{addresses['primary'].ip} primary\n{addresses['aux'].ip} aux\n" in values["hosts"]
    assert int(values["grow"]) == 17 << 21
    assert addresses["primary"].network == addresses["aux"].network


def test_an_allowlist_brings_an_address_and_host_names_but_no_resolver() -> None:
    allowed = (Destination(cidr="192.0.2.7/32", port=443, host_names=("api.example",)),)
    values = credentials(environment(allowed_destinations=allowed), "primary", "PRIVATE", {})
    assert "192.0.2.7 api.example\n" in values["hosts"]
    assert "internet" in values
    assert "resolver" not in values


def test_full_internet_brings_a_resolver() -> None:
    assert {"internet", "resolver"} <= credentials(environment(full_internet=True), "primary", "KEY", {}).keys()
