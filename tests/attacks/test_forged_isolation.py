"""An attacker publishes logs with a forged proof of isolation: `verify` refuses them, also under a new seal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioner.machines.recordings import facts_of
from provisioner.recording.isolation import LIMIT_BYTES, PROOF, Surface
from provisioner.recording.manifest import MANIFEST, load, seal
from provisioner.store.files import write_atomically
from tests.unit.conftest import CommandLine
from tests.unit.fakes.world import environment
from tests.unit.recording.proofs import OPEN, REFUSED, SURFACE, forge, write


def surface(seen: Surface) -> dict[str, Any]:
    return {"primary": seen.model_dump(mode="json")}


REACHED = REFUSED.model_copy(update={"reached": True}).model_dump()
OTHER = REFUSED.model_copy(update={"probe": "tcp 8.8.8.8:53"}).model_dump()


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Sealed logs with a proof, as published."""
    logs = tmp_path / "published"
    logs.mkdir()
    proof = write(logs, surface={"primary": SURFACE})
    seal(logs, facts_of(environment("env"), proof), write_atomically)
    return logs


def seal_anew(logs: Path) -> None:
    seal(logs, load(logs).facts, write_atomically)


def test_an_honest_proof_is_told(provisioner: CommandLine, published: Path) -> None:
    done = provisioner("verify", str(published))
    assert done.code == 0
    assert "isolation proven: 1 probes, nothing reached" in done.stdout
    [checked] = provisioner("verify", str(published), "--json").json["checked"]
    assert checked["isolation"] == "isolation proven: 1 probes, nothing reached, under KVM"


def test_an_honest_proof_of_an_earlier_version_is_told(provisioner: CommandLine, published: Path) -> None:
    proof = write(published)
    said = json.loads((published / PROOF).read_text())
    del said["surface"]
    (published / PROOF).write_text(json.dumps(said))
    seal(published, facts_of(environment("env"), proof), write_atomically)
    assert provisioner("verify", str(published)).code == 0


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "reached": (lambda logs: forge(logs, answers={"primary": [REACHED]}), "what was seen says otherwise"),
    "admitted": (
        lambda logs: forge(logs, answers={"primary": [REACHED]}, proven=False), "does not say what the sealed facts say"
    ),
    "fewer": (lambda logs: forge(logs, answers={}), "what was seen says otherwise"),
    "more": (
        lambda logs: forge(logs, answers={"primary": [OTHER, REFUSED.model_dump()]}),
        "does not say what the sealed facts say",
    ),
    "open": (lambda logs: forge(logs, surface=surface(OPEN)), "what was seen says otherwise"),
    "emulated": (
        lambda logs: forge(logs, surface=surface(SURFACE.model_copy(update={"accelerator": "TCG"}))),
        "does not say what the sealed facts say",
    ),
    "hidden": (lambda logs: forge(logs, surface={}), "does not say what the sealed facts say"),
    "steering": (
        lambda logs: forge(logs, surface=surface(SURFACE.model_copy(update={"qemu": "\x1b[2J"}))),
        "should match pattern",
    ),
    "another": (lambda logs: forge(logs, environment="env\x1b[2J"), "it is of the environment 'env\\x1b[2J'"),
    "keys": (lambda logs: forge(logs, **{"\x1b]0;title\x07": 1}), "unknown key"),
    "text": (lambda logs: write_atomically(logs / PROOF, "proven"), "it is not JSON"),
    "deep": (lambda logs: write_atomically(logs / PROOF, "[" * 1_000_000), "nested more than 100 deep"),
    "oversized": (lambda logs: os.truncate(logs / PROOF, LIMIT_BYTES + 1), f"more than {LIMIT_BYTES} bytes"),
    "removed": (lambda logs: (logs / PROOF).unlink(), "not among the files"),
}  # fmt: skip


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_proof_is_refused_although_it_is_sealed_anew(
    provisioner: CommandLine, published: Path, forgery: str
) -> None:
    change, message = FORGERIES[forgery]
    change(published)
    seal_anew(published)
    done = provisioner("verify", str(published))
    assert done.code == 1
    assert f": {PROOF}: " in done.stdout
    assert message in done.stdout
    assert "isolation proven" not in done.stdout
    assert all(character.isprintable() or character == "\n" for character in done.stdout)


def test_a_proof_that_was_altered_under_its_seal_is_refused(provisioner: CommandLine, published: Path) -> None:
    forge(published, full_internet=True)
    done = provisioner("verify", str(published))
    assert done.code == 1
    assert f"{PROOF}: it has " in done.stdout


def test_a_proof_that_is_a_link_is_not_read(provisioner: CommandLine, published: Path) -> None:
    (published / PROOF).rename(published.parent / "elsewhere")
    (published / PROOF).symlink_to(published.parent / "elsewhere")
    assert (published / MANIFEST).is_file()
    done = provisioner("verify", str(published))
    assert (done.code, f"{PROOF}: it cannot be read" in done.stdout) == (1, True)
