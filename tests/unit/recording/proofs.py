"""Proofs of isolation for tests."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from provisioner.recording.isolation import PROOF, Answer, Enclosure, Proof, Surface

BEGIN = datetime(2026, 1, 2, 3, tzinfo=UTC)
REFUSED = Answer(user="root", probe="tcp 1.1.1.1:443", expected=False, reached=False, detail="timed out")
NEIGHBOUR = Answer(user="agent", probe="neighbour 10.9.0.2", expected=True, reached=True)

ENCLOSED = Enclosure(
    uid=1000, seccomp=2, no_new_privileges=True, capabilities="0" * 16, namespaces=("ipc", "mnt", "net", "pid", "uts")
)
SURFACE = Surface(accelerator="KVM", qemu="7.2.22", devices=("00:01.0 virtio-blk",), qemu_process=ENCLOSED)
OPEN = SURFACE.model_copy(update={"qemu_process": ENCLOSED.model_copy(update={"namespaces": ("net",), "seccomp": 0})})


def proof(**changes: Any) -> Proof:
    """Returns a proof of an environment that is isolated as promised, with some fields changed."""
    values = {
        "environment": "env", "full_internet": False, "began_at": BEGIN, "ended_at": BEGIN + timedelta(seconds=3),
        "proven": True, "answers": {"primary": (REFUSED,)}, "canary": (), "differences": (), **changes,
    }  # fmt: skip
    return Proof.model_validate(values)


def write(logs: Path, **changes: Any) -> Proof:
    """Writes such a proof among logs, and returns it."""
    written = proof(**changes)
    (logs / PROOF).write_text(written.model_dump_json())
    return written


def forge(logs: Path, **changes: Any) -> None:
    """Changes what a proof among logs says, whatever sense that makes."""
    said = json.loads((logs / PROOF).read_text())
    (logs / PROOF).write_text(json.dumps(said | changes))
