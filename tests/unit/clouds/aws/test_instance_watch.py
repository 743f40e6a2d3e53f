"""When a machine's metadata service counts as off."""

from __future__ import annotations

from typing import Any

import pytest

from provisioner.clouds.aws.instance_watch import metadata_is_off


def instance(name: str, endpoint: str = "disabled", state: str = "applied") -> dict[str, Any]:
    return {"InstanceId": name, "MetadataOptions": {"HttpEndpoint": endpoint, "State": state}}


@pytest.mark.parametrize(
    ("instances", "off"),
    [
        ([instance("i-1"), instance("i-2")], True),
        ([instance("i-1"), instance("i-2"), instance("i-3", "enabled")], True),  # another's
        ([], False),
        ([instance("i-1")], False),
        ([instance("i-1"), instance("i-2", state="pending")], False),
        ([instance("i-1"), instance("i-2", "enabled")], False),
        ([instance("i-1"), {"InstanceId": "i-2", "MetadataOptions": {}}], False),
    ],
    ids=["off", "others", "nothing", "one-missing", "pending", "on", "silent"],
)
def test_metadata_is_off_only_if_seen_so_on_every_machine(instances: list[dict[str, Any]], off: bool) -> None:
    assert metadata_is_off(instances, ["i-1", "i-2"]) is off


def test_no_machine_proves_nothing() -> None:
    assert not metadata_is_off([instance("i-1")], [])
