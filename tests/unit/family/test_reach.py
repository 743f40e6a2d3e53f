"""Tests that of a module what its functions can reach is hashed, and nothing that they cannot."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from provisioner.family.reach import INSTALL, SETUP, reached_digest

MODULE = """
import subprocess
WORDS = ["a"]

def fetch():
    return 1

def judge(text):
    return len(text)

class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def install():
        fetch()

    @staticmethod
    def start(t):
        print("begun")

    @staticmethod
    def score(t, submission):
        return judge(submission)
"""


@pytest.fixture
def fam(tmp_path: Path) -> Path:
    (tmp_path / "fam.py").write_text(MODULE)
    return tmp_path


def digests(fam: Path) -> dict[str, str]:
    files = [path.name for path in fam.iterdir()]
    return {
        "install": reached_digest(fam, "fam", files, INSTALL),
        "setup": reached_digest(fam, "fam", files, SETUP),
    }


def changed(fam: Path, old: str, new: str) -> set[str]:
    """Replaces text in the module, and returns whose digest is another one."""
    before = digests(fam)
    text = (fam / "fam.py").read_text()
    assert old in text
    (fam / "fam.py").write_text(text.replace(old, new))
    after = digests(fam)
    return {name for name in before if before[name] != after[name]}


@pytest.mark.parametrize(
    ("old", "new", "concerns"),
    [
        ("judge(submission)", "1.0", set()),
        ('print("begun")', "pass", set()),
        ("return len(text)", "return 0", set()),
        ("import subprocess", "# why\nimport subprocess", set()),
        ("return 1", "return 2", {"install"}),
        ("        fetch()", "        fetch(); print()", {"install"}),
        ('{"main": {}}', '{"other": {}}', {"setup"}),
        ('["a"]', '["b"]', {"install", "setup"}),
        ("0.5.0", "0.4.0", {"install", "setup"}),
        ("def score(t, submission)", "def score(t, submission=judge)", {"install", "setup"}),
        ("def score(t, submission)", "def aggregate_scores(t, score_log)", {"install", "setup"}),
        ("import subprocess", "import subprocess, os", {"install", "setup"}),
    ],
    ids=["score", "start", "helper of score", "comment", "helper of install", "install", "tasks", "constant",
         "attribute", "default value", "another function", "import"],
)  # fmt: skip
def test_a_change_counts_for_the_steps_that_can_reach_it(fam: Path, old: str, new: str, concerns: set[str]) -> None:
    assert changed(fam, old, new) == concerns


@pytest.mark.parametrize(
    "call",
    [
        "TaskFamily.score(None, '')",
        "getattr(TaskFamily, 'sco' + 're')(None, '')",
        "subprocess.run(['python3', '-c', 'import fam; fam.TaskFamily.score(0, 0)'])",
        "subprocess.run('python3', input=b'import fam; fam.TaskFamily.score(0, 0)')",
        "eval('1')",
        "fetch.__globals__['TaskFamily'].score",
        "fetch.__globals__['jud' + 'ge']('')",
        "object.__getattribute__(TaskFamily, 'sco' + 're')(None, '')",
        "[f(None, '') for f in map(TaskFamily.__dict__.get, ['x'])]",
    ],
    ids=[
        "by name",
        "by computed name",
        "by a program",
        "by bytes",
        "eval",
        "by globals",
        "by computed global",
        "by computed attribute",
        "by dict",
    ],
)
def test_what_install_may_call_counts_for_it(fam: Path, call: str) -> None:
    changed(fam, "        fetch()", f"        {call}")
    assert "install" in changed(fam, "judge(submission)", "1.0")


@pytest.mark.parametrize(
    "use",
    ["from fam import judge", "from . import (\n    other,\n    fam,\n)", "x = __import__('fam')",
     "import importlib\nx = importlib.import_module(\n    'fam'\n)", "import runpy\nrunpy.run_path('/root/fam.py')",
     "exec(open('fam.py').read())"],
    ids=["from", "lines", "import", "importlib", "runpy", "exec"],
)  # fmt: skip
def test_a_module_that_another_one_may_run_counts_as_a_whole(fam: Path, use: str) -> None:
    (fam / "other.py").write_text(f"{use}\n")
    assert changed(fam, "judge(submission)", "1.0") == {"install", "setup"}


def test_a_module_counts_as_a_whole_beside_what_cannot_be_read(fam: Path) -> None:
    (fam / "other.txt").write_text("from fam import judge\n")
    (fam / "other.py").symlink_to("other.txt")
    assert changed(fam, "judge(submission)", "1.0") == {"install", "setup"}
    (fam / "other.py").unlink()
    (fam / "other.pyc").touch()
    assert changed(fam, "1.0", "0.5") == {"install", "setup"}


def test_a_module_that_another_one_only_mentions_does_not(fam: Path) -> None:
    (fam / "other.py").write_text(f"import os\n{'# nothing' * 100}\nPATH = '/root/fam/data'\n")
    assert changed(fam, "judge(submission)", "1.0") == set()


@pytest.mark.parametrize(
    ("file", "text"),
    [("server.py", "import json, pathlib\nPINS = pathlib.Path('/srv/fam/pins.json')\n"),
     ("server.py", "import os\nPATH = f'/srv/fam/{os.getpid()}'\n"),
     ("prepare.sh", "python3 -c 'import json'; install -D pins.json /srv/fam/pins.json\n")],
    ids=["text", "formatted", "script"],
)  # fmt: skip
def test_a_directory_with_the_familys_name_does_not_count(fam: Path, file: str, text: str) -> None:
    (fam / file).write_text(text)
    assert changed(fam, "begun", "started") == set()


@pytest.mark.parametrize(
    "text",
    ["import uvicorn\nuvicorn.run('fam:app')\n", "import importlib\nimportlib.import_module('.fam', 'x')\n",
     "import os\nos.execlp('python3', 'python3', '-m', 'fam')\n", "import runpy\nrunpy.run_path('/root/fam')\n",
     "import glob\nx = glob.glob('/root/fam*')\n", "import os\nos.system('python3 -c \"import %s\"' % 'fam')\n",
     "import pkg\npkg.fam.TaskFamily()\n", "import runpy\nrunpy.run_path('/srv/fam/../fam.py')\n"],
    ids=["entry point", "relative", "words", "no ending", "glob", "put together", "attribute", "both"],
)  # fmt: skip
def test_a_program_that_may_run_the_module_counts(fam: Path, text: str) -> None:
    (fam / "server.py").write_text(text)
    assert changed(fam, "begun", "started") == {"install", "setup"}


@pytest.mark.parametrize("run", ["python3 -m fam", "python3 -um fam", 'python3 -m "fam"'])
def test_a_script_that_runs_the_module_by_its_name_counts(fam: Path, run: str) -> None:
    (fam / "prepare.sh").write_text(f"{run}\n")
    assert changed(fam, "begun", "started") == {"install", "setup"}


def test_a_module_that_another_one_uses_counts_as_a_whole(fam: Path) -> None:
    (fam / "other.py").write_text("from fam import judge\n")
    assert changed(fam, "judge(submission)", "1.0") == {"install", "setup"}
    (fam / "other.py").rename(fam / "test_fam.py")  # tests run after start()
    assert changed(fam, "1.0", "0.5") == set()


@pytest.mark.parametrize(
    "text",
    [
        "import os, \\\n    fam\n",
        "__import__('fam')",
        "import_module(\n    'fam'\n)",
        "run(['python3', '/root/fam.py'])",
    ],
    ids=["two lines", "built in", "call", "program"],
)
def test_each_way_to_use_the_module_counts(fam: Path, text: str) -> None:
    (fam / "other.py").write_text(text)
    assert changed(fam, "judge(submission)", "1.0") == {"install", "setup"}


def test_a_script_that_runs_the_module_counts(fam: Path) -> None:
    (fam / "prepare.sh").write_text("python3 -c 'from fam import judge'\n")
    assert changed(fam, "judge(submission)", "1.0") == {"install", "setup"}


@pytest.mark.parametrize("name", ["setup", "Makefile", "a.bash", "x.pth", "load_test.py", "conftest.py"])
def test_a_program_of_any_name_that_runs_the_module_counts(fam: Path, name: str) -> None:
    (fam / name).write_text("from fam import judge\n")
    use = f"fetch('python3 {name}')"
    (fam / "fam.py").write_text(MODULE.replace("        fetch()", f"        {use}"))
    assert changed(fam, "len(text)", "1") == {"install", "setup"}


def test_tests_and_texts_that_nothing_runs_do_not_count(fam: Path) -> None:
    for name in ("test_fam.py", "conftest.py", "README.md", "notes.txt"):
        (fam / name).write_text("from fam import judge\n")
    assert changed(fam, "len(text)", "1") == set()


def test_a_module_that_is_only_mentioned_does_not_count(fam: Path) -> None:
    (fam / "other.py").write_text("# Helpers of fam.\n\nimport os\n")
    assert changed(fam, "judge(submission)", "1.0") == set()


def test_a_hostile_module_takes_no_longer_to_search(fam: Path) -> None:
    (fam / "other.py").write_text("import " * 100_000)
    begin = time.process_time()
    assert changed(fam, "judge(submission)", "1.0") == set()
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("head", ["(Base)", "(helpers.Base)", "(metaclass=Meta)"], ids=["base", "attribute", "meta"])
def test_a_class_that_other_modules_complete_counts_as_a_whole(fam: Path, head: str) -> None:
    changed(fam, "import subprocess", "import subprocess, helpers\nfrom helpers import Base, Meta")
    changed(fam, "class TaskFamily:", f"class TaskFamily{head}:")
    assert changed(fam, "judge(submission)", "1.0") == {"install", "setup"}


def test_a_base_in_the_module_itself_is_looked_into(fam: Path) -> None:
    base = "class Base(object):\n    def install(self):\n        self.prepare()\n\nclass TaskFamily(Base):"
    changed(fam, "class TaskFamily:", base)
    changed(fam, "    def install():\n        fetch()", "    def prepare():\n        fetch()")
    assert changed(fam, "return 1", "return 2") == {"install", "setup"}
    assert changed(fam, "judge(submission)", "1.0") == set()


def test_a_module_too_deep_to_be_looked_at_counts_as_a_whole(fam: Path) -> None:
    branches = "".join(f"elif WORDS == {number}:\n    pass\n" for number in range(2000))
    (fam / "fam.py").write_text(f"{MODULE}\nif not WORDS:\n    pass\n{branches}")
    assert changed(fam, "judge(submission)", "1.0") == {"install", "setup"}
