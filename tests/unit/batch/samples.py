"""Suites, runs, batches and reservations for tests of batches."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from provisioner.batch.queue import RunState
from provisioner.batch.records import Batch
from provisioner.batch.suite import Run, Suite
from provisioner.costs.ledger import Entry

AT = datetime(2026, 1, 2, tzinfo=UTC)


def suite(**changes: Any) -> Suite:
    data = {"name": "s", "families": [{"path": "fam"}], "submissions": [{"name": "one", "text": ""}]}
    return Suite.model_validate({**data, **changes})


def run(agent: str = "one", repetition: int = 1, family: str = "/fam") -> Run:
    key = f"fam/main/{agent}/{repetition}"
    return Run(key=key, family=family, task="main", agent=agent, repetition=repetition)


def batch(*runs: Run, **changes: Any) -> Batch:
    values = {
        "id": "b-1", "suite": suite(), "suite_file": "/s.yaml", "shared": False, "created_at": AT, "version": "1",
        "runs": runs or (run(),), **changes,
    }  # fmt: skip
    return Batch(**values)


def entry(environment: str, launched_at: datetime = AT, **changes: Any) -> Entry:
    """A reservation of a batch's environment, for an hour."""
    values = {
        "environment": environment, "kind": "task", "cloud": "moon", "region": "crater", "family": "fam",
        "task": "main", "batch": "b-1", "project": "", "command": "b-1", "launched_at": launched_at,
        "expires_at": launched_at + timedelta(hours=1), "reserved_micro_usd": 1000, **changes,
    }  # fmt: skip
    return Entry(**values)


def states(**by_key: str) -> dict[str, RunState]:
    """States by key, from texts like `running` and `running by WORKER`."""
    parts = {key: text.partition(" by ") for key, text in by_key.items()}
    return {key: RunState.model_validate({"key": key, "state": s, "executor": e}) for key, (s, _, e) in parts.items()}
