"""What `provisioner dev` refuses before it begins, and what it prints of each environment."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from provisioner.base.errors import TaskError
from provisioner.environment import lifecycle, operations
from provisioner.environment.development import Development
from provisioner.family.scores import ScoreResult
from tests.unit.conftest import CommandLine, nothing_was_created
from tests.unit.fakes.world import environment, family


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["main", "--json"], "cannot be used with --json"),
        (["missing"], "no task 'missing'"),
        (["main", "--submission", "42"], "cannot be an argument"),
        (["main", "--ttl", "10y"], "not a duration"),
    ],
)
def test_what_cannot_be_is_refused_and_creates_nothing(
    provisioner: CommandLine, tmp_path: Path, arguments: list[str], said: str
) -> None:
    ended = provisioner("dev", str(family(tmp_path).directory), *arguments)
    assert (ended.code, said in ended.stderr) == (2, True), ended.stderr
    assert nothing_was_created(provisioner.home)


def test_each_environment_is_scored_and_failures_are_told(
    provisioner: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = environment("fam-main-1")
    (tmp_path / "answer").write_text("42")
    env_file = tmp_path / "secrets.env"
    env_file.write_text("WORD=first\n")
    scored: list[str] = []

    def score(*arguments: object, readmit_agent: bool) -> object:
        scored.append(str(arguments[2]))
        return ready, ScoreResult(kind="scored", score=0.5)

    def run(development: Development) -> NoReturn:
        env_file.write_text("WORD=second\n")
        session, loaded = development.load()
        assert dict(session.variables) == {"WORD": "second"}  # as it is now, not as it was when the command began
        assert development.load()[0] is session
        assert development.up(session, loaded) is ready
        development.work(session, ready)
        development.tell(TaskError("start() failed.", details="\x1b[31mTraceback", hint="Mend it."))
        raise KeyboardInterrupt

    monkeypatch.setattr(lifecycle, "bring_up", lambda *_: ready)  # which is this command's until it ends, unlike up's
    monkeypatch.setattr(lifecycle, "score", score)
    monkeypatch.setattr(lifecycle, "open_driver", lambda *_: pytest.MonkeyPatch.context())
    monkeypatch.setattr(operations, "run_tests", lambda *_: 1)
    monkeypatch.setattr(Development, "run", run)
    directory = str(family(tmp_path).directory)
    options = ("--submission-file", str(tmp_path / "answer"), "--test", "--env-file", str(env_file))
    ended = provisioner("dev", directory, "main", *options)
    assert ended.code == 130
    assert scored == ["42"]
    assert ended.stdout.splitlines() == ["score: 0.5", "pytest ended with exit code 1"]
    for said in (
        "done score",
        "done tests",
        "provisioner ssh fam-main-1",
        "error: start() failed.",
        "Traceback",
        "hint: Mend it.",
    ):
        assert said in ended.stderr
    assert "\x1b[31m" not in ended.stderr
