"""Suite files: what they may say, and what runs they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from provisioner.batch.suite import expand, family_directories, load_suite, schema
from provisioner.errors import UsageError

GOOD: dict[str, Any] = {
    "name": "nightly",
    "families": [{"path": "families/*", "tasks": ["easy", "hard-*"]}],
    "agents": [{"name": "solver", "directory": "agents/solver", "command": "bash solve.sh"}],
    "submissions": [{"name": "right", "text": "42"}],
    "repetitions": 2,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("families/guess", "families/count", "agents/solver"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def written(directory: Path, **changes: Any) -> Path:
    path = directory / "suite.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


def test_a_suite_means_every_task_with_every_agent_as_often_as_it_says(directory: Path) -> None:
    path = written(directory)
    suite = load_suite(path)
    wanted = family_directories(suite, path.parent)
    assert [Path(family).name for family in wanted] == ["count", "guess"]
    runs = expand(suite, {family: ["easy", "hard-1", "hard-2", "other"] for family in wanted}, wanted)
    assert len(runs) == 2 * 3 * 2 * 2
    assert runs[0].key == "count/easy/solver/1"
    assert {run.task for run in runs} == {"easy", "hard-1", "hard-2"}
    assert runs == expand(suite, {family: ["easy", "hard-1", "hard-2", "other"] for family in wanted}, wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"agents": [], "submissions": []}, "neither agents nor submissions"),
        ({"families": []}, "families"),
        ({"repetitions": 0}, "repetitions"),
        ({"nonsense": 1}, "nonsense"),
        ({"name": "../x"}, "name"),
        ({"limits": {"ttl": "never"}}, "limits.ttl"),
        ({"limits": {"agent": "30d"}}, "limits.agent"),
        ({"budget": -1}, "budget"),
        ({"allow": ["0.0.0.0/0:443"]}, "allow"),
        ({"submissions": [{"name": "solver", "text": ""}]}, "called solver"),
        ({"agents": [{"name": "a", "directory": "missing", "command": "x"}]}, "does not exist"),
        ({"env_file": "missing.env"}, "does not exist"),
    ],
)
def test_what_is_wrong_in_a_suite_is_named(directory: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        load_suite(written(directory, **changes))
    assert said in error.value.message


@pytest.mark.parametrize("text", ["", "- a", "name: [", "\x00", "!!python/object/apply:os.system [id]"])
def test_what_is_no_suite_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(UsageError):
        load_suite(tmp_path / "suite.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_suite(tmp_path / "missing.yaml")


def test_globs_that_find_nothing_are_named(directory: Path) -> None:
    path = written(directory, families=[{"path": "nowhere/*"}])
    with pytest.raises(UsageError, match="finds no directory"):
        family_directories(load_suite(path), path.parent)
    suite = load_suite(written(directory))
    with pytest.raises(UsageError, match="no task 'hard-\\*'"):
        expand(suite, {"/f": ["easy"]}, {"/f": ["easy", "hard-*"]})


def test_the_schema_describes_the_file() -> None:
    known = schema()
    assert set(known["required"]) == {"name", "families"}
    assert known["additionalProperties"] is False
