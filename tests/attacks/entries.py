"""Entries of the ledger for attacks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from provisioner.costs.ledger import Entry

AT = datetime(2026, 1, 2, tzinfo=UTC)


def entry(**changes: Any) -> Entry:
    """Returns an entry whose fields are all right, but for the changes."""
    fields = {
        "environment": "fam-main-1", "kind": "task", "cloud": "aws", "region": "r", "family": "fam", "task": "main",
        "batch": "", "project": "", "command": "c-1", "launched_at": AT, "expires_at": AT + timedelta(hours=1),
        "reserved_micro_usd": 5,
    }  # fmt: skip
    return Entry.model_validate({**fields, **changes})
