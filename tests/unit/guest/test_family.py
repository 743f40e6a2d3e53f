"""Tests the helper's operations that call a family: setup, install, start, scoring, teardown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from provisioner.clouds.guest_files import GUEST
from provisioner.family import env_file
from tests.unit.guest.machine_directory import Machine

BARE: dict[str, Any] = {
    "permissions": [],
    "instructions": "",
    "required_environment_variables": [],
    "aux_vm_spec": None,
}


def test_setup_tells_everything_of_every_task(machine: Machine) -> None:
    value = machine.setup("""
        standard_version = "0.5.0"
        required_environment_variables = {"B", "A"}
        skip_chown_after_start = True
        get_tasks = staticmethod(lambda: {"one": {"n": 1}, "two": {"n": 2}})
        get_instructions = staticmethod(lambda t: f"Do {t['n']}")
        get_permissions = staticmethod(lambda t: ["full_internet"] if t["n"] == 1 else [])
        get_aux_vm_spec = staticmethod(lambda t: {"cpu_count_range": (2, 4)} if t["n"] == 2 else None)
        intermediate_score = aggregate_scores = teardown = staticmethod(lambda *a: None)
    """)

    required = {"required_environment_variables": ["A", "B"]}
    assert value == {
        "standard_version": "0.5.0",
        "tasks": {
            "one": {**BARE, **required, "permissions": ["full_internet"], "instructions": "Do 1"},
            "two": {**BARE, **required, "instructions": "Do 2", "aux_vm_spec": {"cpu_count_range": [2, 4]}},
        },
        "has_score": False,
        "has_intermediate_score": True,
        "has_aggregate_scores": True,
        "has_teardown": True,
        "skip_chown_after_start": True,
        "warnings": [],
    }


def test_setup_of_a_bare_family_has_defaults_and_a_warning(machine: Machine) -> None:
    value = machine.setup("score = intermediate_score = staticmethod(lambda *a: 1.0)")
    assert value["tasks"] == {"main": BARE}
    assert (value["standard_version"], value["has_score"], value["has_intermediate_score"]) == (None, True, True)
    [warning] = value["warnings"]
    assert "get_instructions" in warning


def test_two_ways_to_score_at_the_end_are_an_error(machine: Machine) -> None:
    machine.write_family("score = aggregate_scores = staticmethod(lambda *a: 1.0)")
    result = machine.run("setup", given={}).result
    assert result["kind"] == "invalid"
    assert "both score() and aggregate_scores()" in result["message"]


def test_setup_of_a_family_that_ends_the_process_is_an_error(machine: Machine) -> None:
    machine.write_family("", before="os._exit(7)\n")
    result = machine.run("setup", given={}).result
    assert (result["kind"], result["exit_code"]) == ("exit", 7)


def test_an_exception_in_the_setup_data_names_the_task(machine: Machine) -> None:
    machine.write_family("get_permissions = staticmethod(lambda t: 1 / 0)")
    result = machine.run("setup", given={}).result
    assert result["type"] == "ZeroDivisionError"
    assert "setup data of the task 'main'" in result["traceback"]


def test_setup_sets_only_the_required_variables(machine: Machine) -> None:
    machine.write_family("""
        required_environment_variables = ["KEY"]
        @staticmethod
        def get_tasks():
            names = [name for name in ("KEY", "OTHER") if name in os.environ]
            print(f"read with {names}")
            return {name: {} for name in names}
    """)

    answer = machine.run("setup", given={"KEY": "1", "OTHER": "2"})

    assert set(answer.value["tasks"]) == {"KEY"}
    assert answer.stdout == "read with ['KEY']\n" * 2


def test_setup_of_an_unreadable_family_gets_all_variables(machine: Machine) -> None:
    machine.write_family("get_instructions = staticmethod(lambda t: '')", before="os.environ['KEY']\n")
    assert machine.run("setup", given={"KEY": "1"}).value
    result = machine.run("setup", given={"ANOTHER": "1"}).result
    assert (result["type"], result["message"]) == ("KeyError", "'KEY'")


def test_setup_names_variables_that_get_tasks_needs(machine: Machine) -> None:
    machine.write_family("""
        ours = ("VM_SSH_USERNAME", "VM_SSH_PRIVATE_KEY", "VM_IP_ADDRESS")
        required_environment_variables = ("SECOND", "FIRST", "SET", *ours)
        get_tasks = staticmethod(lambda: {"main": {}} if "FIRST" in os.environ else {})
    """)

    result = machine.run("setup", given={"SET": "1"}).result

    assert result["kind"] == "invalid"
    assert result["message"].endswith("required variables are not set: FIRST, SECOND")


def test_both_sides_know_the_variables_of_an_aux_vm() -> None:
    names = ", ".join(f'"{name}"' for name in env_file.AUX_VM_VARIABLES)
    assert f"\nAUX_VM_VARIABLES = ({names})\n" in (GUEST / "provisioner_guest/family/operations.py").read_text()


def test_setup_warns_of_tasks_that_differ_when_read_again(machine: Machine) -> None:
    value = machine.setup("""
        @staticmethod
        def get_tasks():
            number = random.randrange(1 << 60)
            word = {"answer": number, "same": {"list": [1, 2]}}
            return {"word": word, "whole": number, "quiet": {"answer": 1}, f"task {number}": {"answer": 1}}
        get_instructions = staticmethod(lambda t: f"Find {t['answer']}" if isinstance(t, dict) else "")
    """)

    warnings = {name: task.get("warnings", []) for name, task in value["tasks"].items()}
    [number] = [name for name in warnings if name.startswith("task ")]
    assert all(len(warnings[name]) == 1 for name in ("word", "whole", number))
    assert warnings["word"][0].startswith(
        "The task 'word' was read twice, and differs in: the task's field 'answer'; get_instructions(). The agent may "
    )
    assert warnings["whole"][0].startswith("The task 'whole' was read twice, and differs in: the task's value. The ")
    assert f"the task {number!r} was there only once. The agent may" in warnings[number][0]
    assert warnings["quiet"] == []
    [other] = value["warnings"]
    assert "was there only once" in other
    assert number not in other


def test_setup_does_not_warn_of_another_order(machine: Machine) -> None:
    value = machine.setup("""
        @staticmethod
        def get_tasks():
            names = ["a", "b", "c"]
            random.shuffle(names)
            tasks = {n: {k: {"x", "y", "z", "long", "short"} for k in names} | {"o": object()} for n in names}
            return tasks | {"nan": {"value": float("nan"), "huge": "x" * 9_000_000}}
        get_instructions = staticmethod(lambda t: "")
    """)

    assert not any("warnings" in task for task in value["tasks"].values())
    assert value["warnings"] == []


# get_tasks() returns first() when it is called the first time, and then second().
TWICE = """
    @staticmethod
    def get_tasks():
        with open("count", "a") as file:
            file.write("x")
        return first() if os.path.getsize("count") == 1 else second()
    get_instructions = staticmethod(lambda t: "")
"""


def _read_twice(machine: Machine, first: str, second: str) -> Any:
    return machine.setup(TWICE, before=f"first = lambda: {first}\nsecond = lambda: {second}\n")


@pytest.mark.parametrize("second", ["1 / 0", "os._exit(7)"], ids=["raises", "ends"])
def test_setup_that_fails_the_second_time_warns_of_every_task(machine: Machine, second: str) -> None:
    value = _read_twice(machine, "{'main': {}, 'other': {}}", second)
    for name in ("main", "other"):
        [warning] = value["tasks"][name]["warnings"]
        assert warning.startswith(f"The task {name!r} was read twice, and the second time failed. The agent may ")
    assert value["warnings"] == []


@pytest.mark.parametrize(
    ("first", "second", "different"),
    [
        ("{'a': 1}", "{'a': 1, 'hint': 2}", "the task's field 'hint'"),
        ("{'a': 1, 'hint': 2}", "{'a': 1}", "the task's field 'hint'"),
        ("{'a': 1, 'b': 1}", "{'a': 2, 'b': 2}", "the task's fields 'a', 'b'"),
        ("{'x' * 99: 1, 'x' * 98: 1}", "{'x' * 99: 2, 'x' * 98: 1}", "a field with a long name"),
    ],
    ids=["added", "removed", "two", "long"],
)
def test_setup_names_each_field_that_differs(machine: Machine, first: str, second: str, different: str) -> None:
    task = _read_twice(machine, f"{{'m': {first}}}", f"{{'m': {second}}}")["tasks"]["m"]
    assert f"differs in: {different}. " in task["warnings"][0]


def test_setup_compares_every_task_of_a_large_family(machine: Machine) -> None:
    tasks = "{f't{n}': {f'f{m}': m for m in range(20)} for n in range(1500)}"
    value = _read_twice(machine, tasks, f"dict(reversed(({tasks} | {{'t1499': {{'f0': 9}}}}).items()))")
    assert {name for name, task in value["tasks"].items() if "warnings" in task} == {"t1499"}
    assert "differs in: the task or what is called with it. " in value["tasks"]["t1499"]["warnings"][0]


def test_a_large_family_is_compared_by_whole_tasks(machine: Machine) -> None:
    tasks = "{f't{n}': {f'f{m}': m for m in range(20)} for n in range(%d)}"
    value = _read_twice(machine, tasks % 10, tasks % 1500)
    assert not any("warnings" in task for task in value["tasks"].values())
    assert len(value["warnings"]) == 20


def test_fingerprints_of_many_long_names_fit_into_their_file(machine: Machine) -> None:
    tasks = "{str(t): {chr(0x1F600 + n) * 30: 0 for n in range(70)} for t in range(273)}"
    value = _read_twice(machine, tasks, f"{tasks} | {{'0': {{}}}}")
    assert "the task's fields " in value["tasks"]["0"]["warnings"][0]


def test_warnings_of_many_random_tasks_are_short(machine: Machine) -> None:
    value = _read_twice(machine, *["{os.urandom(8).hex(): {} for _ in range(10_000)}"] * 2)
    warnings = [warning for task in value["tasks"].values() for warning in task["warnings"]]
    assert len(warnings) == 10_000
    assert sum(map(len, warnings)) < 1_000_000
    assert value["warnings"][0] == "10000 tasks may differ at each call."
    assert len(value["warnings"]) == 21


def test_warnings_do_not_make_setup_data_too_large(machine: Machine) -> None:
    value = _read_twice(machine, *["{os.urandom(8).hex() + 'n' * 8260: {} for _ in range(1000)}"] * 2)
    warned = [task for task in value["tasks"].values() if "warnings" in task]
    assert 0 < len(warned) < 1000


def test_relative_paths_in_get_tasks_are_relative_to_the_family(machine: Machine) -> None:
    (machine.family / "tasks.json").write_text('{"from_file": {}}')
    value = machine.setup("get_tasks = staticmethod(lambda: json.load(open('tasks.json')))")
    assert set(value["tasks"]) == {"from_file"}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("x = 1\n", "fam.py has no class TaskFamily"),
        ("class TaskFamily:\n    get_tasks = staticmethod(lambda: [1])\n", "must return a dict of tasks, not a list"),
        ("class TaskFamily:\n    get_tasks = staticmethod(lambda: {})\n", "does not name the task 'main'"),
    ],
)
def test_a_family_that_is_none_says_why(machine: Machine, module: str, message: str) -> None:
    (machine.family / "fam.py").write_text(module)
    result = machine.run("start").result
    assert result["kind"] == "invalid"
    assert message in result["message"]


def test_install_and_start_are_optional_and_a_score_is_not(machine: Machine) -> None:
    machine.write_family("")
    assert [machine.run(name).value for name in ("install", "start")] == [None, None]
    assert machine.run("intermediate_score").result["message"] == "the task family has no intermediate_score()"


def test_score_gets_the_task_and_the_submission_unchanged(machine: Machine) -> None:
    submission = "-x \r\n ünï\n\n"
    assert machine.score("return [t['word'], submission]", submission=submission).value == ["abandon", submission]


def test_intermediate_score_comes_back_whole(machine: Machine) -> None:
    score = "{'score': 0.5, 'message': {'hint': t['word']}, 'details': {'secret': 1}}"
    machine.write_family(f"intermediate_score = staticmethod(lambda t: {score})")
    value = machine.run("intermediate_score").value
    assert value == {"score": 0.5, "message": {"hint": "abandon"}, "details": {"secret": 1}}


def test_aggregate_scores_gets_a_log_with_datetimes(machine: Machine) -> None:
    entry = {"score": 0.5, "message": {}, "details": {"a": 1}, "scored_at": "2025-01-01T02:00:00.5+02:00"}
    log = [{**entry, "elapsed_seconds": 1.5}, {**entry, "score": float("nan")}]
    (machine.root / "log.json").write_text(json.dumps(log))
    machine.write_family("""
        @staticmethod
        def aggregate_scores(t, score_log):
            first, second = score_log
            assert second["score"] != second["score"]
            assert first["scored_at"].utcoffset().total_seconds() == 0
            return [first["scored_at"].isoformat(), first["scoredAt"], first["createdAt"], first["elapsedTime"],
                    first["score"], first["details"]]
    """)

    value = machine.run("aggregate_scores", score_log=str(machine.root / "log.json")).value

    milliseconds = 1735689600500
    assert value == ["2025-01-01T00:00:00.500000+00:00", milliseconds, milliseconds, 1500, 0.5, {"a": 1}]


@pytest.mark.parametrize(
    ("teardown", "printed"),
    [
        ("teardown = staticmethod(lambda t: print(t['word']))", "abandon\n"),
        ("teardown = staticmethod(lambda: print('old'))", "old\n"),
        ("", ""),
    ],
)
def test_teardown_is_called_as_its_signature_asks(machine: Machine, teardown: str, printed: str) -> None:
    machine.write_family(teardown)
    answer = machine.run("teardown")
    assert (answer.value, answer.stdout) == (None, printed)
