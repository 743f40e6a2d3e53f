"""A user who can write to the queue's database forges jobs: they name other files and hosts of the worker.

A worker works only on families, agents, env files and destinations that it was told to offer, with all links followed;
the controller of a batch works only on the jobs of its own record.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import UsageError
from provisioner.batch.records import Batch, Job, jobs_of
from provisioner.batch.suite import Run, Suite
from provisioner.batch.worker import Offer, Worker, only_of
from tests.homes import new_home
from tests.waiting import until


class Site:
    """A worker's disk: what it offers, and what it does not."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("families/fam", "agents/one", "families-private/fam", "secret", "suites"):
            (root / name).mkdir(parents=True)
        (root / "families" / "out").symlink_to(root / "families-private")
        (root / "agents" / "out").symlink_to(root / "secret")
        (root / "agents" / "circle").symlink_to("circle")
        (root / "tasks.env").write_text("TOKEN=x\n")
        (root / "other.env").write_text("KEY=y\n")
        self.offer = Offer((root / "families",), (root / "agents",), (root / "tasks.env",), ("10.0.0.1:443",))

    def job(self, **changes: Any) -> Job:
        """A job that is all right, but for the changes."""
        family = changes.pop("family", str(self.root / "families" / "fam"))
        agent = changes.pop("agent", "../agents/one")
        batch, directory = changes.pop("batch", "s-1"), changes.pop("directory", str(self.root / "suites"))
        key = changes.pop("key", f"{Path(family).name}/main/one/1")
        suite = Suite.model_validate(
            {
                "name": "s", "families": [{"path": "../families/fam"}],
                "agents": [{"name": "one", "directory": agent, "command": "true"}], **changes,
            }
        )  # fmt: skip
        run = Run(key=key, family=family, task="main", agent="one", repetition=1)
        return Job(batch=batch, suite=suite, directory=directory, run=run)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_job_that_names_what_is_offered_is_accepted(site: Site) -> None:
    site.offer.check(site.job())
    site.offer.check(site.job(env_file="../tasks.env", allow=["10.0.0.1:443"]))
    site.offer.check(site.job(agent=str(site.root / "agents" / "one")))


FORGERIES: dict[str, dict[str, Any]] = {
    "system": {"family": "/etc"},
    "root": {"family": "/"},
    "relative": {"family": "families/fam"},
    "upwards": {"family": "{root}/families/../families-private/fam"},
    "prefix": {"family": "{root}/families-private/fam"},
    "link": {"family": "{root}/families/out/fam"},
    "zero": {"family": "{root}/families/fam\0"},
    "agent": {"agent": "/root/.ssh"},
    "agent-upwards": {"agent": "../agents/../secret"},
    "agent-link": {"agent": "../agents/out"},
    "agent-circle": {"agent": "../agents/circle/../../secret"},
    "directory": {"directory": "/", "agent": "etc"},
    "secrets": {"env_file": "../other.env"},
    "passwords": {"env_file": "/etc/shadow"},
    "destination": {"allow": ["10.0.0.2:443"]},
    "port": {"allow": ["10.0.0.1:22"]},
    "network": {"allow": ["10.0.0.0/24:443"]},
    "key": {"key": "fam/main/two/1"},
    "key-path": {"key": "../../main/one/1"},
    "batch": {"batch": "../../etc"},
    "batch-lines": {"batch": "a\nb"},
}


@pytest.mark.parametrize("changes", FORGERIES.values(), ids=FORGERIES)
def test_a_job_that_names_anything_else_is_refused(site: Site, changes: dict[str, Any]) -> None:
    filled = {key: text.format(root=site.root) if isinstance(text, str) else text for key, text in changes.items()}
    with pytest.raises(UsageError, match=r"offer|followed|agree|changed"):
        site.offer.check(site.job(**filled))


def test_a_worker_without_agents_offers_none(site: Site) -> None:
    with pytest.raises(UsageError, match="--agents"):
        Offer((site.root / "families",)).check(site.job())


def test_a_batch_works_only_on_the_jobs_of_its_own_record(site: Site) -> None:
    genuine = site.job()
    batch = Batch(
        id="s-1", suite=genuine.suite, suite_file=str(site.root / "suites" / "s.yaml"), shared=True,
        created_at=datetime(2026, 1, 2, tzinfo=UTC), version="1", runs=(genuine.run,),
    )  # fmt: skip
    check = only_of(batch)
    check(jobs_of(batch)[genuine.run.key])
    for forged in (
        site.job(agent="/root/.ssh"), site.job(budget=10_000), site.job(batch="other"), site.job(key="fam/other/one/1"),
        site.job(limits={"ttl": "7d"}), site.job(directory="/"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="another user of the database changed it"):
            check(forged)


def test_a_forged_job_is_a_failed_run_and_the_worker_lives(site: Site) -> None:
    home = new_home(site.root / "home")
    home.batches.mkdir(parents=True, exist_ok=True)
    forged = {name: site.job(**FORGERIES[name]) for name in ("system", "agent", "passwords")}
    with contextlib.closing(Worker(home, Settings(), site.offer.check)) as worker:
        worker.client.add("s-1", 3, {name: job.model_dump(mode="json") for name, job in forged.items()})
        until(lambda: {state.state for state in worker.client.states("s-1").values()} == {"done"})
        outputs = worker.client.outputs("s-1", list(forged))
    for output in outputs.values():
        assert isinstance(output, dict)
        assert output["outcome"] == "infrastructure_failed"
        assert "offer" in output["message"]
        assert output["attempts"] == 0
