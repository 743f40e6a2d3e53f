"""The command line as its users meet it: help, mistakes, JSON. What commands do in machines is shown in tests/local."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from provisioner import cli, errors
from provisioner.errors import ProvisionerError
from provisioner.interrupts import SIGNALS

ROOT = Path(__file__).parents[2]
FAMILY = str(ROOT / "tests" / "contract" / "families" / "echo")
COMMANDS = ["run", "up", "agent", "score", "test", "exec", "ssh", "cp", "list", "show", "logs", "destroy", "tasks",
            "doctor", "image build", "image list", "image prune"]  # fmt: skip


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout, parse_constant=refuse)


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


class CommandLine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: Path) -> None:
        self._monkeypatch, self._capsys, self.home = monkeypatch, capsys, home

    def __call__(self, *arguments: str) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["provisioner", *arguments])
        code = cli.main()
        captured = self._capsys.readouterr()
        return Ended(code, captured.out, captured.err)


@pytest.fixture
def provisioner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[CommandLine]:
    """The command line in this process, on an empty home."""
    monkeypatch.setenv("PROVISIONER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield CommandLine(monkeypatch, capsys, tmp_path / "home")
    for number, handler in before.items():
        signal.signal(number, handler)


def nothing_was_created(home: Path) -> bool:
    return not [path for path in home.glob("*/*") if path.parent.name != "locks"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_explains_itself(provisioner: CommandLine, command: str) -> None:
    done = provisioner(*command.split(), "--help")
    assert done.code == 0
    assert done.stdout.startswith(f"Usage: provisioner {command}".rstrip())
    if command:
        assert {"--json", "--debug", "--help"} <= set(re.findall(r"--\w+", done.stdout))


def test_the_readme_names_every_command(provisioner: CommandLine) -> None:
    readme = (ROOT / "README.md").read_text()
    listed = re.findall(r"^  (\w+)  ", provisioner("--help").stdout.split("Commands:")[1], re.MULTILINE)
    assert {command.split()[0] for command in COMMANDS} == set(listed)
    assert [command for command in COMMANDS if not re.search(rf"`{command}\b", readme)] == []


def test_exit_codes_are_documented_as_the_errors_have_them(provisioner: CommandLine) -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, ProvisionerError)]
    codes = {str(one.exit_code) for one in classes} | {"0"}
    readme = (ROOT / "README.md").read_text().split("| exit code |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| (\d+) ", readme, re.MULTILINE)) == codes
    shown = " ".join(provisioner("--help").stdout.split())
    assert set(re.findall(r"(\d+) [a-z]", shown.split("Exit codes: ")[1].split(". ")[0])) == codes


MISTAKES = [
    (["runn"], "Did you mean 'run'"),
    (["run"], "Missing argument 'FAMILY'"),
    (["run", FAMILY], "Missing argument 'TASK'"),
    (["run", FAMILY, "main", "--bogus"], "No such option: --bogus"),
    (["run", FAMILY, "main"], "Give either --agent DIR --command CMD or --submission TEXT"),
    (["run", FAMILY, "main", "--agent", FAMILY], "--agent and --command go together"),
    (["run", FAMILY, "main", "--command", "x"], "--agent and --command go together"),
    (["run", FAMILY, "main", "--agent", FAMILY, "--command", "x", "--submission", "1"], "either --agent"),
    (["run", FAMILY, "main", "--agent", "/nonexistent/a", "--command", "x"], "does not exist"),
    (["run", "/nonexistent/family", "main", "--submission", "1"], "does not exist"),
    (["up", "README.md", "main"], "README.md"),
    (["up", FAMILY, "main", "--env-file", "/nonexistent/env"], "/nonexistent/env"),
    (["up", FAMILY, "main", "--cloud", "nimbus"], "nimbus"),
    (["up", FAMILY, "main", "--allow", "example.com"], "example.com"),
    (["up", FAMILY, "main", "--allow", "127.0.0.1:80"], "127.0.0.1"),
    (["up", FAMILY, "main", "--allow", "0.0.0.0/0:443"], "0.0.0.0/0"),
    (["up", FAMILY, "main", "--allow", "2001:db8::1:443"], "2001:db8"),
    (["up", FAMILY, "main", "--allow", "203.0.113.1:99999"], "99999"),
    (["score", "nothing"], "no environment 'nothing'"),
    (["score", "x", "--intermediate", "--submission", "1"], "takes no --submission"),
    (["exec", "x"], "Missing argument 'CMD...'"),
    (["exec", "../x", "--", "true"], "no environment '../x'"),
    (["exec", "x", "--machine", "third", "--", "true"], "'third' is not one of"),
    (["exec", "x", "--user", "mallory", "--", "true"], "'mallory' is not one of"),
    (["exec", "x", "--machine", "aux", "--user", "agent", "--", "true"], "no environment 'x'"),
    (["ssh", ""], "no environment ''"),
    (["cp", "a", "b"], "Exactly one of the two paths"),
    (["cp", "x:a", "y:b"], "Exactly one of the two paths"),
    (["cp", "x:a", "b"], "no environment 'x'"),
    (["show", "*"], "no environment '*'"),
    (["logs", "$(id)"], "no environment '$(id)'"),
    (["destroy"], "Name environments, or use --all"),
    (["destroy", "nothing"], "no environment 'nothing'"),
    (["agent", "x", "/nonexistent/a", "cmd"], "no environment 'x'"),
    (["tasks", "/nonexistent/family"], "does not exist"),
    (["image", "build", "/nonexistent/family"], "does not exist"),
    (["image", "bild"], "No such command 'bild'"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=lambda value: " ".join(value)[:60])
def test_a_mistake_is_explained_ends_with_2_and_creates_nothing(
    provisioner: CommandLine, arguments: list[str], says: str
) -> None:
    done = provisioner(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 25
    assert nothing_was_created(provisioner.home)


@pytest.mark.parametrize("arguments", [mistake for mistake, _ in MISTAKES], ids=lambda value: " ".join(value)[:60])
def test_under_json_a_mistake_is_one_object(provisioner: CommandLine, arguments: list[str]) -> None:
    before = arguments.index("--") if "--" in arguments else len(arguments)
    done = provisioner(*arguments[:before], "--json", *arguments[before:])
    assert done.code == 2
    assert (done.json["schema"], done.json["ok"], done.json["error"]["exit_code"]) == (1, False, 2)
    assert done.json["error"]["message"] in done.stderr.replace("\n", " ") or done.json["error"]["message"]


def test_debug_shows_where_an_error_came_from(provisioner: CommandLine) -> None:
    assert "Traceback" in provisioner("show", "nothing", "--debug").stderr


def test_an_empty_home_lists_nothing(provisioner: CommandLine) -> None:
    assert provisioner("list", "--json").json["environments"] == []
    assert provisioner("image", "list", "--json").json["images"] == []
    assert provisioner("destroy", "--all").code == 0
    assert provisioner("image", "prune", "--all").code == 0


def test_doctor_says_what_is_missing_and_how_to_get_it(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.environ", {**os.environ, "PATH": str(tmp_path)})
    done = provisioner("doctor", "--json")
    assert done.code == 3
    assert "Terraform is not installed." in done.stdout


def test_a_home_that_cannot_be_used_is_the_hosts_fault(provisioner: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    done = provisioner("list")
    assert done.code == 3
    assert "cannot be used" in done.stderr


def complete(home: Path, words: str) -> list[str]:
    variables = {
        "_PROVISIONER_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    program = "from provisioner.cli import app; app(prog_name='provisioner')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, **variables, "PROVISIONER_HOME": str(home)},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_commands_and_environments(tmp_path: Path) -> None:
    (tmp_path / "environments" / "echo-main-bcd234").mkdir(parents=True)
    (tmp_path / "environments" / "other-bcd234").mkdir()
    assert complete(tmp_path, "provisioner sc") == ["score"]
    assert complete(tmp_path, "provisioner score echo") == ["echo-main-bcd234"]
    assert complete(tmp_path, "provisioner destroy ") == ["echo-main-bcd234", "other-bcd234"]
    assert complete(tmp_path / "nowhere", "provisioner ssh e") == []
