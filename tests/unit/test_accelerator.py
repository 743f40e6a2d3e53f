"""The tests' own word on what their machines run under follows what was tried on this host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.clouds.local import host
from tests.accelerator import accelerator


@pytest.mark.parametrize("by", ["", "workers/gw1"], ids=["home", "worker"])
@pytest.mark.parametrize(("works", "name"), [(True, "kvm"), (False, "tcg")])
def test_the_accelerators_trial_is_reported_by_every_process(tmp_path: Path, by: str, works: bool, name: str) -> None:
    answer = tmp_path / by / "kvm.json"
    answer.parent.mkdir(parents=True, exist_ok=True)
    answer.write_text(json.dumps({"boot": host.BOOT_ID.read_text().strip(), "works": works}))
    assert accelerator(tmp_path).startswith(f"{name} (tried: ")


def test_another_boots_trial_is_repeated(
    tmp_path: Path,
) -> None:
    (tmp_path / "kvm.json").write_text('{"boot": "another", "works": true}')
    assert accelerator(tmp_path) == "not tried yet, since there is no base image"
    kernel = tmp_path / "images" / "base-primary-1" / "vmlinuz"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("no kernel")
    assert accelerator(tmp_path).startswith("tcg (tried: ")
