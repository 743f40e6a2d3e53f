from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.errors import TaskFamilyError
from provisioner.family.manifest import Manifest, Resources, Scoring, load_manifest, parse_manifest

FULL = """
version: "1.2"
meta: {anything: [1, {goes: 2024-01-01}]}
tasks:
  main:
    version: "1"
    resources: {gpu: {count_range: [1, 2], model: h100}, cpus: 0.5, memory_gb: 3.5, storage_gb: 20}
    scoring: {visible_to_agent: false, score_on_usage_limits: true, instructions: be quick}
    meta: free
"""


def test_a_full_manifest_is_read() -> None:
    manifest = parse_manifest(FULL.encode())
    resources = manifest.resources("main")
    assert (resources.cpus, resources.memory_gb, resources.storage_gb) == (0.5, 3.5, 20)
    assert resources.gpu is not None
    assert (resources.gpu.count_range, resources.gpu.model) == ([1, 2], "h100")
    assert manifest.scoring("main") == Scoring(
        visible_to_agent=False, score_on_usage_limits=True, instructions="be quick"
    )


def test_a_task_that_is_not_named_gets_the_defaults() -> None:
    manifest = parse_manifest(b"tasks: {}")
    assert manifest.resources("any") == Resources()
    assert manifest.scoring("any") == Scoring(visible_to_agent=True, score_on_usage_limits=False, instructions=None)


@pytest.mark.parametrize("named", ["debian-12", "debian-13"])
def test_a_manifest_may_name_the_base_image(named: str) -> None:
    assert parse_manifest(f"base_image: {named}\ntasks: {{}}".encode()).base_image == named
    assert parse_manifest(b"tasks: {}").base_image is None


@pytest.mark.parametrize("named", ["debian-11", "ubuntu-20.04-cuda", "''"], ids=["older", "cuda", "empty"])
def test_an_unknown_base_image_is_refused_with_a_list(named: str) -> None:
    with pytest.raises(TaskFamilyError, match="- base_image: must be 'debian-12' or 'debian-13', not "):
        parse_manifest(f"base_image: {named}\ntasks: {{}}".encode())


def test_a_base_image_is_that_of_all_tasks() -> None:
    with pytest.raises(TaskFamilyError, match=r"- tasks\.main\.base_image: unknown key"):
        parse_manifest(b"tasks: {main: {base_image: debian-13}}")


@pytest.mark.parametrize(
    "text",
    ["tasks: [easy, hard, harder]", "tasks:", "version: '1'", "- tasks", "tasks: {main: [1]}",
     "tasks: {main: {resources: 2}}", "tasks: {main: {scoring: [no]}}"],
)  # fmt: skip
def test_a_manifest_of_another_shape_gets_an_example(text: str) -> None:
    with pytest.raises(TaskFamilyError) as caught:
        parse_manifest(text.encode())
    example = caught.value.message.rpartition(" `")[2].removesuffix("`.")
    assert list(parse_manifest(example.encode()).tasks) == ["main", "other"]


def test_a_manifest_with_another_mistake_is_told_no_shape() -> None:
    with pytest.raises(TaskFamilyError) as caught:
        parse_manifest(b"tasks: {main: {resources: {cpus: 0, gpu: {model: a10}}}}")
    assert "right form" not in caught.value.message


@pytest.mark.parametrize("version", ["1.0\\e[31m", "\\ud800", "1" * 201])
def test_a_version_is_printable_and_short(version: str) -> None:
    with pytest.raises(TaskFamilyError, match=r"- version: it may have up to 200 printable characters") as refused:
        parse_manifest(f'tasks: {{}}\nversion: "{version}"'.encode())
    assert refused.value.hint != "A version is a string: write it in quotes."
    assert parse_manifest(b'tasks: {}\nversion: "1.0 (\xc3\xa9)"').version == "1.0 (\u00e9)"


def test_a_family_without_a_manifest_has_an_empty_one(tmp_path: Path) -> None:
    assert load_manifest(tmp_path) == Manifest(tasks={})


def test_task_names_are_taken_as_they_are_written() -> None:
    assert list(parse_manifest(b"tasks: {1: {}, no: {}, 1.10: {}, '${x}': {}}").tasks) == ["1", "no", "1.10", "${x}"]


def test_anchors_and_merges_work_and_the_mappings_own_keys_win() -> None:
    text = b"tasks:\n  a: &a {version: '1', meta: x}\n  b: {<<: *a, version: '2'}\n  c: *a"
    tasks = parse_manifest(text).tasks
    assert [tasks[name].version for name in "abc"] == ["1", "2", "1"]


def test_every_problem_has_its_own_line() -> None:
    with pytest.raises(TaskFamilyError) as caught:
        parse_manifest(b"tasks: {a: {resources: {cpus: -1, gpu: {}}}}\nversion: 2")
    assert caught.value.message.splitlines() == [
        "manifest.yaml is not valid:",
        "  - tasks.a.resources.gpu.count_range: is required",
        "  - tasks.a.resources.gpu.model: is required",
        "  - tasks.a.resources.cpus: must be more than 0, not -1.0",
        "  - version: must be a string, not 2",
    ]
    assert caught.value.hint == "A version is a string: write it in quotes."


def test_a_thousand_problems_are_twenty_lines_and_a_count() -> None:
    with pytest.raises(TaskFamilyError) as caught:
        parse_manifest(b"tasks: {" + b", ".join(b"t%d: 1" % number for number in range(1000)) + b"}")
    lines = caught.value.message.splitlines()
    assert (len(lines), lines[21]) == (23, "  - and 980 more")


def test_merges_that_double_with_every_line_are_refused_at_once() -> None:
    lines = ["a0: &a0 {" + ", ".join(f"k{number}: 1" for number in range(9)) + "}"]
    for number in range(1, 30):
        previous = ", ".join([f"*a{number - 1}"] * 9)
        lines.append(f"a{number}: &a{number} {{<<: [{previous}]}}")
    with pytest.raises(TaskFamilyError, match="a merge has too many keys"):
        parse_manifest("\n".join(lines).encode())
