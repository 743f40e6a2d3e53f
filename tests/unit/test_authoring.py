"""The pages for authors of families quote what the project has, and the tutorial's family has no mistakes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path, PurePosixPath

import pytest

from provisioner.base.models import Distribution
from provisioner.clouds.guest_files import BASE_IMAGE, GUEST
from provisioner.environment import agent, operations
from provisioner.family.check import check_family
from provisioner.family.env_file import AUX_VM_VARIABLES, load_env_file
from provisioner.family.manifest import parse_manifest
from provisioner.family.source import ATTRIBUTES, FUNCTIONS
from provisioner.images import provisioning
from provisioner.images.provisioning import ROOT as ROOT_ACCOUNT
from provisioner.machines.create import aux_user
from provisioner.store.home import Home
from tests.command_line import ROOT, variables
from tests.pages import AUTHORING, blocks
from tests.reader import Reader
from tests.waiting import BOUND_SECONDS

PAGES = sorted(AUTHORING.glob("*.md"))
TUTORIAL = AUTHORING / "tutorial.md"
REFERENCE = ROOT / "docs" / "reference" / "task-families.md"
# The languages of what the pages quote: from files of the examples, and from the tutorial.
QUOTED = ("python", "json", "ini")
# The languages of what other tests look at: what commands print, and code that no example has.
TESTED = ("text", "py", "jsonc", "dockerfile")
COMMANDS = ("provisioner ", "cat ", "mkdir ", "rm ", "echo ", "install ")


def stripped(text: str) -> str:
    """Lines without indentation: a quotation may leave out what surrounds it."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def sources() -> list[str]:
    """Whatever may be quoted."""
    files = [path for path in (ROOT / "examples").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return [stripped(text) for text in [*(path.read_text() for path in files), TUTORIAL.read_text()]]


def shell_text(page: Path) -> str:
    """All that a reader pastes into a shell."""
    return "\n".join(block.text for block in blocks(page) if block.for_a_shell)


@pytest.fixture
def tutorial(tmp_path: Path) -> Path:
    """The tutorial's files, written by the tutorial's own commands; those of provisioner do nothing here."""
    script = f"provisioner() {{ :; }}\n{shell_text(TUTORIAL)}"
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, check=True, timeout=BOUND_SECONDS)
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_quotes_is_what_the_examples_have(page: Path) -> None:
    quoted = [block.text for block in blocks(page) if block.language in QUOTED]
    own = [] if page == TUTORIAL else sources()
    assert [text for text in quoted if not any(stripped(text) in source for source in own)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_language_of_the_pages_is_tested(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= {"", *QUOTED, *TESTED}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_pages_commands_are_a_shells(page: Path) -> None:
    text = shell_text(page)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=BOUND_SECONDS)
    for block in blocks(page):
        if block.for_a_shell:
            assert block.text.startswith(COMMANDS), block.text


def test_pages_are_taken_apart_as_their_readers_see_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Do:\n\n    cat > a <<'END'\n    b:\n\n      c\n    END\n\n```text\nout\n  put\n```\n\n"
        "1. **First.** Like this:\n\n       echo 1\n\n   ```ini\n   [a]\n   ```\n\nThen:\n\n    provisioner logs ENV\n"
    )
    found = blocks(page)
    assert [(block.language, block.text) for block in found] == [
        ("", "cat > a <<'END'\nb:\n\n  c\nEND"), ("text", "out\n  put"), ("", "echo 1"), ("ini", "[a]"),
        ("", "provisioner logs ENV"),
    ]  # fmt: skip
    assert [block.for_a_shell for block in found] == [True, False, True, False, False]


def test_a_block_until_ctrl_c_gets_it_after_its_output(tmp_path: Path) -> None:
    program = (
        "import sys, time\ntry:\n    print('score: 1', flush=True)\n    while True: time.sleep(0.02)\n"
        "except KeyboardInterrupt:\n    print('destroyed')\n    sys.exit(130)\n"
    )
    (tmp_path / "program.py").write_text(program)
    page = tmp_path / "page.md"
    page.write_text(
        f"    provisioner() {{ {sys.executable} program.py; }}\n    provisioner dev sums small\n\n"
        "```text\nscore: 1\n```\n\n    echo next > after.txt\n"
    )
    reader = Reader(Home(tmp_path / "home"), tmp_path)
    reader.read(page)
    assert (tmp_path / "after.txt").read_text() == "next\n"
    assert (tmp_path / "printed.log").read_text() == "score: 1\ndestroyed\n"


def test_the_tutorials_family_has_no_mistakes(tutorial: Path) -> None:
    given = load_env_file(tutorial / "parcels.env")
    assert (tutorial / "parcels.env").stat().st_mode & 0o777 == 0o600
    checked = check_family(tutorial / "parcels", "street", given)
    assert (checked.findings, checked.tasks, checked.needs) == (
        (),
        ("street", "town"),
        ("PARCELS_KEY",),
    )


def test_the_page_on_secrets_says_what_commands_print(tutorial: Path) -> None:
    (tutorial / "examples").symlink_to(ROOT / "examples")
    command = f'{shlex.join([sys.executable, str(ROOT / "cli.py")])} "$@"'
    # `up` would bring a machine up. That it understands its options is tested for all commands of the documentation.
    script = f'provisioner() {{ [ "$1" = up ] || {command}; }}\n{shell_text(AUTHORING / "secrets.md")}'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tutorial, env=variables(Home(tutorial / "home")),
        capture_output=True, text=True, check=True, timeout=BOUND_SECONDS,
    )  # fmt: skip
    boxes = [block.text for block in blocks(AUTHORING / "secrets.md") if block.language == "text"]
    assert boxes
    assert [box for box in boxes if box not in done.stdout] == []


FAMILY = """
import os
from pathlib import Path
from typing import TypedDict

class Task(TypedDict):
    pass

class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks() -> dict[str, Task]:
        return {"main": {}}

    @staticmethod
    def get_instructions(t: Task) -> str:
        return "Do it."

    @staticmethod
    def score(t: Task, submission: str) -> float:
        return 1.0

"""


def only(page: str, language: str) -> str:
    """Returns the one block of a page that is in a language."""
    [text] = [block.text for block in blocks(AUTHORING / f"{page}.md") if block.language == language]
    return text


def test_the_page_on_secrets_writes_the_agents_file(tmp_path: Path) -> None:
    text = FAMILY + textwrap.indent(only("secrets", "py"), "    ")
    (tmp_path / "fam").mkdir()
    (tmp_path / "fam" / "fam.py").write_text(text)
    errors = [each.rule for each in check_family(tmp_path / "fam", "main", {}).findings if each.level == "error"]
    assert errors == ["missing-variable"]
    assert check_family(tmp_path / "fam", "main", {"PARCELS_KEY": "a-long-random-text"}).findings == ()
    program = f"{text.replace('/home/agent', str(tmp_path))}\n\nTaskFamily.start(TaskFamily.get_tasks()['main'])\n"
    subprocess.run(
        [sys.executable, "-S", "-c", program], env={"PARCELS_KEY": "a-long-random-text"}, check=True,
        timeout=BOUND_SECONDS,
    )  # fmt: skip
    assert (tmp_path / ".env").read_text() == "PARCELS_KEY=a-long-random-text\n"


def test_the_packages_build_step_allows_an_import_at_the_top(tmp_path: Path) -> None:
    (tmp_path / "fam").mkdir()
    (tmp_path / "fam" / "fam.py").write_text(f"from tabulate import tabulate\n{FAMILY}")
    assert [each.rule for each in check_family(tmp_path / "fam").findings] == ["import-before-install"]
    (tmp_path / "fam" / "build_steps.json").write_text(only("packages", "jsonc"))
    assert check_family(tmp_path / "fam").findings == ()


def test_the_tutorials_files_are_formatted_and_free_of_faults(tutorial: Path) -> None:
    rules = ["--isolated", "--line-length", "120"]
    select = ["--select", "E,F,W,I,UP,B,SIM,C4,PIE,RET"]
    for command in (["check", *rules, *select], ["format", "--check", *rules]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(tutorial)],
            capture_output=True,
            text=True,
            check=False,
            timeout=BOUND_SECONDS,
        )
        assert done.returncode == 0, done.stdout


SCORES = """
import json, parcels
task = parcels.TaskFamily.get_tasks()["street"]
codes = [f"{number} {parcel['code']}" for number, parcel in parcels._parcels(task).items()]
answers = ["", codes[0], "\\n".join(codes), "\\n".join(codes[:2] + codes[:2] + ["x"])]
print(json.dumps([parcels.TaskFamily.score(task, answer) for answer in answers]))
"""


def test_the_tutorials_scores_depend_on_the_key(tutorial: Path) -> None:
    def run(key: str, program: str) -> str:
        guest = f"{tutorial / 'parcels'}:{ROOT / 'provisioner' / 'guest'}"
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": guest, "PARCELS_KEY": key}
        command = [sys.executable, "-B", "-c", program]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=BOUND_SECONDS
        )
        return done.stdout

    assert json.loads(run("one", SCORES)) == [0.0, 0.25, 1.0, 0.5]
    codes = "import parcels; print(parcels._parcels({'parcels': 1}))"
    assert run("one", codes) != run("two", codes)


def test_the_tables_of_the_reference_are_todays() -> None:
    drawn = subprocess.run(
        [sys.executable, "scripts/family_reference.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert drawn.stdout == REFERENCE.read_text(), "scripts/family_reference.py --write brings it up to date"


def test_the_reference_has_every_method_attribute_and_variable() -> None:
    text = REFERENCE.read_text()
    parameters = {0: "", 1: "t", 2: "t, submission"}
    for name, count in FUNCTIONS.items():
        given = "t, score_log" if name == "aggregate_scores" else parameters[count]
        assert f"### {name}\n\n`{name}({given})`" in text
    assert [name for name in (*ATTRIBUTES, *AUX_VM_VARIABLES) if f"| `{name}` |" not in text] == []


def test_the_reference_has_the_users_and_paths_of_the_code() -> None:
    section = REFERENCE.read_text().partition("\n## Users and paths\n")[2].partition("\n## ")[0]
    users, paths = (
        set(re.findall("`([^`]+)`", " ".join(re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE))))
        for table in section.split("\n| path |")
    )
    other: Distribution = "ubuntu-20.04-cuda"
    script = (BASE_IMAGE / "users.sh").read_text()
    [user] = re.findall(r"--uid 1000 (\w+)$", script, re.MULTILINE)
    assert users == {ROOT_ACCOUNT.name, user, aux_user(None), aux_user(other), other}
    assert f"| `{user}` | primary | the agent; uid 1000" in section
    assert 'mkdir "$tree/protected"' in script
    assert 'place(home, "instructions.txt"' in (GUEST / "provisioner_guest/family/files.py").read_text()
    assert "\nd /tmp " in (BASE_IMAGE / "rootfs" / "etc" / "tmpfiles.d" / "tmp.conf").read_text()
    assert paths == {
        str(ROOT_ACCOUNT.home), agent.HOME, f"{agent.HOME}/instructions.txt", operations.SUBMISSION, agent.SCAFFOLDING,
        "/protected", "/tmp", *(f"/home/{aux_user(each)}" for each in (None, other)),
    }  # fmt: skip
    assert ROOT_ACCOUNT.home == PurePosixPath(provisioning.HOME)


def test_the_manifest_that_the_reference_shows_is_valid() -> None:
    [text] = [block.text for block in blocks(REFERENCE) if 'version: "1.0.0"' in block.text]
    assert parse_manifest(text.encode()).resources("small").cpus == 2


def test_the_page_on_docker_loses_no_line_of_its_dockerfile() -> None:
    page = AUTHORING / "from-docker.md"
    [dockerfile] = [block.text for block in blocks(page) if block.language == "dockerfile"]
    table = page.read_text().partition("## Line by line")[2]
    commands = {line.split()[0] for line in dockerfile.splitlines() if not line.startswith(" ")}
    assert [command for command in commands if f"| `{command}" not in table] == []
