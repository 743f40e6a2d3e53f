"""Suite files: what they may say, and what runs they mean."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from provisioner.base.errors import UsageError
from provisioner.batch.suite import expand, family_directories, load_suite

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
    for name in ("guess", "count"):
        (tmp_path / "families" / name / f"{name}.py").touch()
    return tmp_path


def written(directory: Path, **changes: Any) -> Path:
    path = directory / "suite.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}))
    return path


def test_a_suite_means_every_task_with_every_agent(directory: Path) -> None:
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
        ({"concurrency": 0}, "concurrency"),
        ({"allow": ["nobody"]}, "nobody"),
        ({"limits": {"ttl": "10000h"}}, "Write it as 30m, 4h"),
        ({"limits": {"ttl": "8d"}}, "between 1m and 7d"),
        ({"repetition": 3}, "unknown key; perhaps repetitions?"),
        ({"agents": [{"name": "a", "dir": ".", "command": "x"}]}, "agents.0.dir: unknown key; perhaps directory?"),
        ({"name": "", "foo": 1, "retries": -1}, "foo: unknown key"),
        ({"families": [{"path": "x", "tasks": []}]}, "families.0.tasks: must have at least 1"),
        ({"families": "../x"}, "families: must be a list"),
        ({"repetitions": True}, "repetitions: must be a whole number"),
        ({"spot": "yes"}, "spot: must be true or false"),
        ({"regions": ["r", "r"]}, "a region twice"),
        ({"env_file": ""}, "env_file: it must not be empty"),
        ({"agents": [{"name": "a", "directory": ".", "command": " "}]}, "agents.0.command: it must not be empty"),
        ({"submissions": [{"name": "b", "text": "\ud800"}]}, "submissions.0.text: it is not UTF-8 text"),
        ({"limits": {"ttl": 20}}, "limits.ttl: '20' is not a duration. Say the unit: 20h for hours, 20m for minutes."),
        ({"submissions": [{"name": "b", "text": 42}]}, "submissions.0.text: must be a string"),
        ({"budget": "1e400"}, "budget"),
        ({"limits": {"agent": "4h", "ttl": "4h"}}, "no time for scoring"),
        ({"budget": -1}, "budget"),
        ({"allow": ["0.0.0.0/0:443"]}, "allow"),
        ({"submissions": [{"name": "solver", "text": ""}]}, "called solver"),
        ({"agents": [{"name": "a", "directory": "missing", "command": "x"}]}, "does not exist"),
        ({"env_file": "missing.env"}, "does not exist"),
        ({"env_file": "\x85\x1b]0;\u202e"}, "does not exist"),
        ({"repetitions": -1}, "repetitions: must be greater than or equal to 1, not -1"),
        ({"budget": "twenty"}, "budget: must be a number, not 'twenty'"),
        ({"cloud": "azure"}, "cloud: there is no cloud 'azure'; known: aws, local"),
        ({"regions": ["us-east-1"]}, "regions: only for cloud: aws"),
        ({"spot": True}, "spot: only for cloud: aws"),
    ],
)
def test_what_is_wrong_in_a_suite_is_named(directory: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        load_suite(written(directory, **changes))
    assert said in error.value.message
    assert error.value.message.replace("\n", "").isprintable()


def test_one_mistake_does_not_hide_another(directory: Path) -> None:
    twice = {"name": "solver", "directory": "agents/solver", "command": "x"}
    changes: dict[str, Any] = {
        "agents": [twice, twice], "cloud": "azure", "limits": {"ttl": "8d", "agent": "0s"}, "regions": ["r", "r"],
    }  # fmt: skip
    with pytest.raises(UsageError) as error:
        load_suite(written(directory, **changes))
    for said in ("agents: two", "cloud: there is no", "limits.ttl: ", "limits.agent: ", "regions: it names"):
        assert f"\n  - {said}" in error.value.message
    missing = {"name": "a", "directory": "missing", "command": "x"}
    families = [{"path": "nowhere"}, {"path": "else*"}, GOOD["families"][0]]
    with pytest.raises(UsageError) as error:
        load_suite(written(directory, agents=[missing], families=families, env_file="missing.env"))
    for said in ("families.0.path: nowhere finds", "families.1.path: else", "agents.0.directory: ", "env_file: "):
        assert f"\n  - {said}" in error.value.message
    assert "families.2" not in error.value.message


@pytest.mark.parametrize(("limits", "minutes"), [({}, 60), ({"ttl": "1h"}, 30), ({"ttl": "30m", "agent": "29m"}, 29)])
def test_an_agent_has_an_hour_or_half_of_the_time(directory: Path, limits: dict[str, str], minutes: int) -> None:
    assert load_suite(written(directory, limits=limits)).limits.agent_limit == timedelta(minutes=minutes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "name: [",
        "\x00",
        "!!python/object/apply:os.system [id]",
        pytest.param("a: " + "[" * 3000, id="deep"),
        "name: a\nname: b",
    ],
)
def test_what_is_no_suite_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "suite.yaml").write_text(text)
    with pytest.raises(UsageError):
        load_suite(tmp_path / "suite.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        load_suite(tmp_path / "missing.yaml")


def test_secrets_do_not_lie_where_an_agent_is_copied_from(directory: Path) -> None:
    (directory / "agent" / "secrets").mkdir(parents=True)
    (directory / "agent" / "secrets" / "keys.env").write_text("A=b")
    path = written(
        directory, env_file="agent/secrets/keys.env", agents=[{"name": "a", "directory": "agent", "command": "x"}]
    )
    with pytest.raises(UsageError, match="would be copied into its machine"):
        load_suite(path)


def test_families_are_told_apart_by_name(directory: Path) -> None:
    (directory / "families" / "notes").mkdir()
    path = written(directory)
    assert [Path(family).name for family in family_directories(load_suite(path), directory)] == ["count", "guess"]
    other = directory / "others" / "guess"
    other.mkdir(parents=True)
    path = written(directory, families=[{"path": "families/*"}, {"path": "others/guess"}])
    with pytest.raises(UsageError, match="called guess"):
        family_directories(load_suite(path), directory)


def test_globs_that_find_nothing_are_named(directory: Path) -> None:
    with pytest.raises(UsageError, match="finds no directory"):
        load_suite(written(directory, families=[{"path": "nowhere/*"}]))
    suite = load_suite(written(directory))
    with pytest.raises(UsageError, match="finds no directory"):
        family_directories(suite, directory / "agents")  # as where the suite's families went since
    with pytest.raises(UsageError, match="no task 'hard-\\*'"):
        expand(suite, {"/f": ["easy"]}, {"/f": ["easy", "hard-*"]})


def test_a_path_that_is_too_long_is_bad_input(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "examples" / "batch" / "suite.yaml").read_text()
    path = tmp_path / "suite.yaml"
    path.write_text(text.replace("agents/counting", "a" * 5000))
    with pytest.raises(UsageError, match="cannot be looked at: File name too long") as raised:
        load_suite(path)
    assert len(raised.value.message) < 500
