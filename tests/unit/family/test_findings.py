"""Findings are printable, bounded, and in an order that shows errors first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.base.errors import TaskFamilyError
from provisioner.family import findings
from provisioner.family.check import refuse_mistakes
from provisioner.family.findings import MAXIMUM_CHARACTERS, MAXIMUM_FINDINGS, Finding, Level, bounded
from provisioner.family.loader import load_family
from tests.unit.family.families import GOOD, TASKS, VARIABLES, changed, checked, found


def finding(level: Level, line: int, what: str = "x") -> Finding:
    return Finding(level, "no-score", "fam.py", line, what, "why", "fix")


def test_texts_are_printable_lines_and_bounded() -> None:
    each = finding("error", 1, "\x1b]52;c;AAAA\x07\u202e\n" + "x" * 2 * MAXIMUM_CHARACTERS)
    assert each.what.isprintable()
    assert len(each.what) <= MAXIMUM_CHARACTERS


def test_the_place_names_what_is_known() -> None:
    assert finding("error", 3).place == "fam.py:3"
    assert Finding("error", "no-score", "fam.py", None, "", "", "").place == "fam.py"
    assert Finding("error", "no-score", "", None, "", "", "").place == ""


def test_errors_come_first_and_each_finding_once() -> None:
    mixed = [finding("warning", 1), finding("error", 9), finding("error", 2), finding("error", 9)]
    assert [(each.level, each.line) for each in bounded(mixed)] == [("error", 2), ("error", 9), ("warning", 1)]


def test_too_many_are_counted() -> None:
    many = bounded([finding("warning", line) for line in range(MAXIMUM_FINDINGS + 7)])
    assert len(many) == MAXIMUM_FINDINGS + 1
    assert many[-1].what == "7 more findings are not shown."


@pytest.mark.parametrize(
    "line",
    ["import json, os.path", "import metr_task_standard", "import pytest", "import own", "import imp", "import deep",
     "from . import own", "from own.x import y", "from assets.deep import x", "import copied",
     "try:\n    import numpy\nexcept ImportError:\n    pass", "def f():\n    import numpy", "if 0:\n    import numpy"],
)  # fmt: skip
def test_nothing_is_said_of_imports_that_the_machine_can_satisfy(tmp_path: Path, line: str) -> None:
    copied = [{"type": "file", "source": "assets/deep.py", "destination": "lib/copied.py"}]
    files = {"own.py": "", "assets/deep.py": "", "build_steps.json": json.dumps(copied)}
    assert found(checked(tmp_path, f"{line}\n{GOOD}", files)) == []


@pytest.mark.parametrize("line", ["import numpy", "import numpy.linalg as la", "from numpy import array"])
def test_an_import_that_only_install_could_satisfy_is_found(tmp_path: Path, line: str) -> None:
    result = checked(tmp_path, f"import os\n{line}\n{GOOD}")
    assert found(result) == ["warning import-before-install fam.py:2"]
    assert "'numpy'" in result.findings[0].what


def test_the_finding_names_the_build_step_to_add(tmp_path: Path) -> None:
    [finding] = checked(tmp_path, f"import pydantic\n{GOOD}").findings
    assert '{"type": "shell", "commands": ["pip install <PACKAGE>"]}' in finding.fix


def test_any_command_of_a_build_step_may_have_brought_it(tmp_path: Path) -> None:
    steps = json.dumps([{"type": "shell", "commands": ["./setup"]}])
    assert found(checked(tmp_path, f"import numpy\n{GOOD}", {"build_steps.json": steps})) == []


def manifest(*globs: str) -> dict[str, str]:
    return {"manifest.yaml": f"tasks: {{}}\ninstall_inputs: {list(globs)}\n"}


def test_a_glob_that_matches_nothing_is_found(tmp_path: Path) -> None:
    result = checked(tmp_path, files={"requirements.txt": "", **manifest("requirements.txt", "asets/**")})
    assert found(result) == ["warning unmatched-glob manifest.yaml"]
    assert "'asets/**'" in result.findings[0].what


def test_a_module_that_install_would_not_find_is_refused(tmp_path: Path) -> None:
    result = checked(tmp_path, f"import words\n{GOOD}", {"words.py": "", **manifest()})
    assert found(result) == ["error import-before-install fam.py:1"]
    with pytest.raises(TaskFamilyError, match=r"leaves words\.py out"):
        refuse_mistakes(load_family(tmp_path / "fam"), None, {})


@pytest.mark.parametrize("globs", [("words.py",), ("*.py",)], ids=["by name", "by glob"])
def test_a_module_that_install_finds_is_left_alone(tmp_path: Path, globs: tuple[str, ...]) -> None:
    assert found(checked(tmp_path, f"import words\n{GOOD}", {"words.py": "", **manifest(*globs)})) == []


SCORE = "    @staticmethod\n    def score(t, submission):\n        return float(submission)\n"
AGGREGATE = "    @staticmethod\n    def aggregate_scores(t, score_log):\n        return 1.0\n"
INTERMEDIATE = "    @staticmethod\n    def intermediate_score(t):\n        return {}\n"


def with_function(definition: str) -> str:
    """A family with one more function."""
    return f"{GOOD}\n    {definition}\n        pass\n"


FINE = {
    "not static": changed("    @staticmethod\n    def start(t):", "    def start(t):"),
    "default": changed("def start(t):", "def start(t, more=1):"),
    "star": changed("def score(t, submission):", "def score(*args, **kwargs):"),
    "other names": changed("def score(t, submission):", "def score(_task, answer, /):"),
    "keyword with default": changed("def start(t):", "def start(t, *, more=1):"),
    "class method": changed("@staticmethod\n    def start(t):", "@classmethod\n    def start(cls, t):"),
    "assigned": changed(SCORE, "    score = staticmethod(print)\n"),
    "wrapped": changed("@staticmethod\n    def start(t):", "@staticmethod\n    @retried\n    def start():"),
    "teardown with a task": changed("def teardown():", "def teardown(t):"),
    "helper": with_function("def _get_instruction(self, x):"),
    "another name": with_function("def build_world(a):"),
    "all three": GOOD + INTERMEDIATE + AGGREGATE,
    "aggregate": changed(SCORE, INTERMEDIATE + AGGREGATE),
}
WRONG = {
    "self": (
        changed("def score(t, submission):", "def score(self, t, submission):"), "error wrong-parameters fam.py:22",
    ),
    "too few": (changed("def score(t, submission):", "def score(t):"), "error wrong-parameters fam.py:22"),
    "too many": (changed("def start(t):", "def start(t, x):"), "error wrong-parameters fam.py:18"),
    "class method without cls": (
        changed("@staticmethod\n    def start(t):", "@classmethod\n    def start(t):"),
        "error wrong-parameters fam.py:18",
    ),
    "keyword": (changed("def start(t):", "def start(t, *, more):"), "error wrong-parameters fam.py:18"),
    "install": (with_function("@staticmethod\n    def install(t):"), "error wrong-parameters fam.py:30"),
    "aux": (with_function("@staticmethod\n    def get_aux_vm_spec():"), "error wrong-parameters fam.py:30"),
    "teardown": (changed("def teardown():", "def teardown(a, b):"), "warning wrong-parameters fam.py:26"),
    "score that nothing calls": (
        changed("def score(t, submission):", "def score(t):") + INTERMEDIATE + AGGREGATE,
        "warning wrong-parameters fam.py:22",
    ),
    "async score": (changed("def score(t", "async def score(t"), "error async-method fam.py:22"),
    "async start": (changed("def start(t", "async def start(t"), "warning async-method fam.py:18"),
    "misspelt": (changed("def get_permissions(t):", "def get_permission(t):"), "warning misspelt-name fam.py:10"),
    "misspelt variables": (
        changed("required_environment_variables", "required_env_variables"), "warning misspelt-name fam.py:3",
    ),
    "no instructions": (
        changed('    @staticmethod\n    def get_instructions(t):\n        return "Submit 1."\n', ""),
        "warning missing-instructions fam.py:1",
    ),
    "no score": (changed(SCORE, ""), "warning no-score fam.py:1"),
    "intermediate alone": (changed(SCORE, INTERMEDIATE), "warning no-score fam.py:1"),
    "aggregate alone": (changed(SCORE, AGGREGATE), "warning no-score fam.py:1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said_of_what_works(tmp_path: Path, name: str) -> None:
    assert found(checked(tmp_path, FINE[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_is_found(tmp_path: Path, name: str) -> None:
    text, finding = WRONG[name]
    assert found(checked(tmp_path, text)) == [finding]


def test_a_finding_shows_the_parameters_and_says_what_to_write(tmp_path: Path) -> None:
    text = changed("def score(t, submission):", "def score(self, t, *rest, kind, **more):")
    finding = checked(tmp_path, text).findings[0]
    assert finding.what == "score(self, t, *rest, kind=, **more) cannot be called with the task and the submission."
    assert "def score(t, submission)" in finding.fix


AUX = """\
    @staticmethod
    def get_aux_vm_spec(t):
        return None
"""


def variables(value: str) -> str:
    return changed(VARIABLES, f"required_environment_variables = {value}")


def test_a_task_is_compared_with_those_that_are_literals(tmp_path: Path) -> None:
    assert found(checked(tmp_path, task="easy")) == []
    result = checked(tmp_path, task="easyy")
    assert found(result) == ["error unknown-task fam.py:6"]
    assert "'easy'" in result.findings[0].fix
    assert found(checked(tmp_path, changed(TASKS, "return {x: 1 for x in y}"), task="easyy")) == []


def test_the_manifests_tasks_are_compared(tmp_path: Path) -> None:
    manifest = {"manifest.yaml": "tasks:\n  hard: {}\n  'esay':\n    version: '1'\n"}
    assert found(checked(tmp_path, files=manifest)) == ["warning unknown-manifest-task manifest.yaml:3"]
    assert found(checked(tmp_path, changed(TASKS, "return tasks()"), manifest)) == []


def test_variables_are_compared_with_the_env_file(tmp_path: Path) -> None:
    text = variables('["B", "A", "B", "VM_IP_ADDRESS"]')
    result = checked(tmp_path, text + AUX, variables={"A": "1"})
    assert found(result) == ["error missing-variable fam.py:3"]
    assert result.findings[0].what.endswith("not set: B.")
    assert found(checked(tmp_path, text + AUX, variables={"A": "1", "B": "2"})) == []
    # provisioner supplies the third only where there is an aux VM.
    assert found(checked(tmp_path, text, variables={"A": "1", "B": "2"})) == ["error missing-variable fam.py:3"]
    without_file = checked(tmp_path, text + AUX)
    assert (found(without_file), without_file.needs) == ([], ("B", "A"))


@pytest.mark.parametrize(
    ("value", "needs"),
    [('("A",)', ("A",)), ('{"A"}', ("A",)), ("[f(x)]", ()), ('["A"] + MORE', ()), ('"A"', ())],
    ids=["tuple", "set", "call", "sum", "string"],
)
def test_variables_are_known_if_they_are_literals(tmp_path: Path, value: str, needs: tuple[str, ...]) -> None:
    result = checked(tmp_path, variables(value))
    assert (result.needs, found(result)) == (needs, [])


def test_a_required_variable_that_is_empty_is_warned_of(tmp_path: Path) -> None:
    result = checked(tmp_path, variables('["A", "B"]'), variables={"A": "1", "B": "", "C": ""})
    assert found(result) == ["warning empty-variable fam.py:3"]
    assert result.findings[0].what.endswith("empty: B.")
    # provisioner sets this one, whatever the env file says.
    address = {"VM_IP_ADDRESS": ""}
    assert found(checked(tmp_path, variables('["VM_IP_ADDRESS"]') + AUX, variables=address)) == []


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAA\n"
VALUES = {"TOKEN": "s3cret-value", "SHORT": "abc"}


def test_a_value_of_the_env_file_is_found_by_its_name(tmp_path: Path) -> None:
    result = checked(tmp_path, files={"data/notes.txt": "abc\n\nx s3cret-value\n"}, variables=VALUES)
    assert found(result) == ["warning secret-in-file data/notes.txt:3"]
    assert "TOKEN" in result.findings[0].what
    assert "s3cret" not in repr(result)
    assert found(checked(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"x\n{KEY}", "a private key"),
        ("id = AKIA" + "Q" * 16, "an AWS access key"),
        ("ghp_" + "a1" * 18, "a GitHub token"),
        ("sk-ant-" + "a1" * 20, "an OpenAI or Anthropic key"),
        ("xoxb-" + "1-" * 20, "a Slack token"),
    ],
    ids=["key", "aws", "github", "anthropic", "slack"],
)
def test_what_looks_like_a_secret_is_found(tmp_path: Path, text: str, what: str) -> None:
    result = checked(tmp_path, files={"secret": text})
    assert [finding.rule for finding in result.findings] == ["secret-in-file"]
    assert what in result.findings[0].what


@pytest.mark.parametrize(
    "text", ["-----BEGIN PUBLIC KEY-----\nAAAA", "grep 'BEGIN PRIVATE KEY'", "task-ghp_x", "sk-learn", "AKIAXX"]
)
def test_what_only_speaks_of_secrets_is_not(tmp_path: Path, text: str) -> None:
    assert found(checked(tmp_path, files={"words": text})) == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    checked(tmp_path, files={"secret": KEY})
    (tmp_path / "fam" / "link").symlink_to("secret")
    assert len(checked(tmp_path).findings) == 1


def test_a_family_that_is_too_large_is_searched_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "MAXIMUM_TOTAL_BYTES", 100)
    assert [finding.rule for finding in checked(tmp_path, files={"a": "x" * 100}).findings] == ["not-checked"]
    monkeypatch.undo()
    monkeypatch.setattr(findings, "MAXIMUM_FILES", 1)
    assert [finding.rule for finding in checked(tmp_path).findings] == ["not-checked"]
