"""The attacker may write the bucket that holds Terraform's states, and nothing else of a controller.

They put a resource of their own provider into a state. `terraform init` installs every provider that the *state* names,
and `apply` starts it, with the cloud's credentials in its environment. No program of theirs may ever start, whether the
state was changed before the controller's first step or between two. A file stands in for the bucket.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from provisioner.base.errors import TerraformError
from provisioner.terraform.stack import Stack
from tests.terraform.conftest import silent

ROOT = """resource "terraform_data" "ours" {}
output "said" { value = "done" }
"""
PROVIDER = "registry.terraform.io/attacker/evil"
RESOURCE = {
    "mode": "managed", "type": "evil_thing", "name": "theirs", "provider": f'provider["{PROVIDER}"]',
    "instances": [{"schema_version": 0, "attributes": {"id": "1"}}],
}  # fmt: skip


class Bucket:
    """A shared state, and a mirror from which Terraform could install the attacker's provider.

    Attributes:
        loot: what the provider writes if it is started.
    """

    def __init__(self, root: Path) -> None:
        self.loot = root / "loot"
        self._root = root
        self._state = root / "bucket.tfstate"
        package = root / "mirror" / PROVIDER / "1.0.0" / "linux_amd64"
        package.mkdir(parents=True)
        program = package / "terraform-provider-evil_v1.0.0"
        program.write_text(f"#!/bin/sh\nenv > {self.loot}\nexit 1\n")
        program.chmod(0o755)

    def configuration(self) -> Path:
        """Writes the Terraform CLI configuration that names the mirror."""
        path = self._root / "terraform.rc"
        path.write_text(f'provider_installation {{\n  filesystem_mirror {{ path = "{self._root}/mirror" }}\n}}\n')
        return path

    def stack(self, name: str) -> Stack:
        """Returns a controller's stack with its state in the bucket."""
        stack = Stack(self._root / name / "stack", cloud_variables=dict)
        backend = {"terraform": {"backend": {"local": {"path": str(self._state)}}}}
        stack.write({"main.tf": ROOT, "backend.tf.json": json.dumps(backend)})
        return stack

    def poison(self) -> None:
        """Does what the attacker does."""
        state = json.loads(self._state.read_text())
        state["resources"].append(RESOURCE)
        state["serial"] += 1
        self._state.write_text(json.dumps(state))


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(tmp_path)
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(bucket.configuration()))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return bucket


def refused(bucket: Bucket, stack: Stack) -> None:
    for attempt in (lambda: stack.apply(silent), lambda: stack.remove((), silent)):
        with pytest.raises(TerraformError, match="a provider that this stack does not use") as failure:
            attempt()
        assert "restore an earlier version" in (failure.value.hint or "")
        assert "lockfile" not in (failure.value.details or "")
        assert PROVIDER.partition("/")[2] in (failure.value.details or "")
    assert stack.exists
    assert not bucket.loot.exists()


def test_a_controller_installs_nothing_of_a_foreign_state(bucket: Bucket) -> None:
    assert bucket.stack("first").apply(silent) == {"said": "done"}
    bucket.poison()
    refused(bucket, bucket.stack("second"))


def test_a_state_that_changes_between_two_steps_starts_nothing(bucket: Bucket) -> None:
    stack = bucket.stack("first")
    stack.apply(silent)
    bucket.poison()
    refused(bucket, stack)


def test_a_changed_root_is_initialised_without_its_old_state(bucket: Bucket) -> None:
    stack = bucket.stack("first")
    stack.apply(silent)
    bucket.poison()
    stack.write({"main.tf": ROOT.replace("done", "again")})
    refused(bucket, stack)


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not-cached"])
def test_what_an_earlier_version_has_installed_is_not_used(bucket: Bucket, tmp_path: Path, cached: bool) -> None:
    """It ran init with the state: its lock file names the attacker's provider."""
    stack, directory = bucket.stack("first"), tmp_path / "first" / "stack"
    stack.apply(silent)
    bucket.poison()
    subprocess.run(["terraform", "init", "-input=false"], cwd=directory, check=True, capture_output=True)
    assert "attacker/evil" in (directory / ".terraform.lock.hcl").read_text()
    if not cached:
        shutil.rmtree(directory.parent / ".initialised")
    [mark] = (directory / ".terraform").glob("provisioner-*")
    mark.rename(mark.with_name("provisioner-initialised"))
    refused(bucket, stack)
