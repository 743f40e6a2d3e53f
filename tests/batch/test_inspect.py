"""Runs evals of Inspect on the account of many: what samples share, what refuses them, and where they are listed."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import EvalLog, read_eval_log

from provisioner.store.home import Home
from tests.aws.loopback import FAMILY, AccountOfMany
from tests.batch import many
from tests.command_line import CLI
from tests.inspect.evals import FLAG
from tests.inspect.running import HERE, command

pytestmark = [
    pytest.mark.xdist_group("workers"),
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("default"),  # Inspect's own deprecations
]


class Eval:
    """An eval in a directory of its own, with a home that knows the account's images, but not the family's.

    Args:
        task: of account_evals.py.
        family: the family's module. The account has an image of the one that all tests share.
    """

    def __init__(
        self, account: AccountOfMany, prepared: Home, directory: Path, task: str, *options: str, family: str = FAMILY
    ) -> None:
        self.directory, self.home = directory, many.knowing(prepared, directory / "home")
        (directory / "many").mkdir()
        (directory / "many" / "many.py").write_text(family)
        variables = many.variables(account.url, self.home.root, directory)
        self.variables = {**variables, FLAG: str(directory), "INSPECT_DISPLAY": "none"}
        settings = ("--model", "mockllm/model", "--log-dir", str(directory / "logs"))
        self._process = subprocess.Popen(
            command("eval", f"{HERE}/account_evals.py@{task}", *settings, *options),
            cwd=directory, env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def ready(self, count: int) -> list[dict[str, Any]]:
        """Waits until so many samples work, and returns their records."""
        deadline = time.monotonic() + 300
        while len(found := [one for one in many.records(self.home.root) if one["status"] == "ready"]) < count:
            assert time.monotonic() < deadline
            assert self._process.poll() is None, self._process.communicate()[0]
            time.sleep(0.2)
        return found

    def asked(self, *arguments: str) -> str:
        """Returns what a command of the operator says."""
        done = subprocess.run([*CLI, *arguments], env=self.variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def log(self) -> EvalLog:
        """Waits for the end, and returns the log."""
        output, _ = self._process.communicate(timeout=600)
        written = list((self.directory / "logs").glob("*.eval"))
        assert len(written) == 1, output
        log = read_eval_log(str(written[0]))
        assert log.status == "success", output
        return log


def test_samples_share_a_stack_and_an_image(account: AccountOfMany, prepared: Home, tmp_path: Path) -> None:
    running = Eval(account, prepared, tmp_path, "three_at_once", family=f"{FAMILY}# without an image\n")
    records = running.ready(3)
    assert len({record["stack"] for record in records}) == 1
    assert len({record["machines"]["primary"]["image"] for record in records}) == 1
    [batch] = {record["batch"] for record in records}
    listed = running.asked("list").splitlines()
    for record in records:
        [line] = [line for line in listed if record["id"] in line]
        assert line.rstrip().endswith(f"{batch} {record['label']}")
    assert {record["label"] for record in records} == {f"three_at_once {name} (epoch 1)" for name in "abc"}
    (tmp_path / "seen").touch()
    log = running.log()
    assert batch == f"inspect-{log.eval.eval_id}"
    [shown] = [line for line in running.asked("costs", "--by", "batch").splitlines() if line.startswith(batch)]
    assert shown.split()[1] == "3"
    kinds = [entry["kind"] for entry in json.loads(running.asked("costs", "--json"))["entries"]]
    assert sorted(kinds) == ["builder", *["task"] * 3]
    assert many.records(running.home.root) == []


def test_a_sample_that_was_refused_leaves_nothing(account: AccountOfMany, prepared: Home, tmp_path: Path) -> None:
    account.happen("no-quota", "us-east-1")
    try:
        running = Eval(account, prepared, tmp_path, "refused", "--retry-on-error", "1", "--no-fail-on-error")
        samples = {str(sample.id): sample for sample in running.log().samples or []}
    finally:
        account.happen("quota", "us-east-1")
    said = {"budget": "budget", "account": "vCPU"}
    assert set(samples) == set(said)
    for name, sample in samples.items():
        errors = [str(error) for error in (sample.error, *(sample.error_retries or []))]
        assert len(errors) == 2, (name, errors)
        assert all(said[name] in error for error in errors), (name, errors)
    assert many.records(running.home.root) == []
    assert json.loads(running.asked("costs", "--json"))["reserved_usd"] == 0
