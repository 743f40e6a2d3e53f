"""Tests the command line's help, errors and JSON. tests/local tests what commands do in machines."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.main import get_command

from provisioner.base import errors
from provisioner.base.errors import ProvisionerError
from provisioner.cli.app import app
from provisioner.version import __version__
from tests.unit.conftest import CommandLine, nothing_was_created
from tests.waiting import BOUND_SECONDS

ROOT = Path(__file__).parents[3]
FAMILY = str(ROOT / "tests" / "contract" / "families" / "echo")
LAB = str(ROOT / "tests" / "local" / "families" / "lab")
COMMANDS = ["run", "up", "agent", "score", "test", "dev", "exec", "ssh", "cp", "list", "show", "logs",
            "destroy", "replay", "verify",
            "tasks", "check", "new", "doctor", "image build", "image list", "image prune", "aws check", "aws policy",
            "aws setup", "plan", "costs", "extend", "sweep", "freeze", "snapshot list",
            "snapshot remove", "batch run", "batch plan", "batch status", "batch resume", "batch cancel",
            "batch report", "batch worker", "batch export", "batch schema"]  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_explains_itself(provisioner: CommandLine, command: str) -> None:
    done = provisioner(*command.split(), "--help")
    assert done.code == 0
    assert done.stdout.startswith(f"Usage: provisioner {command}".rstrip())
    if command:
        assert {"--json", "--debug", "--help"} <= set(re.findall(r"--\w+", done.stdout))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_and_option_is_described(command: str) -> None:
    described: Any = get_command(app)
    for word in command.split():
        described = described.commands[word]
    assert [parameter.name for parameter in described.params if not parameter.help] == []


def test_the_reference_names_every_command(provisioner: CommandLine) -> None:
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text()
    listed = re.findall(r"^  (\w+)  ", provisioner("--help").stdout.split("Commands:")[1], re.MULTILINE)
    assert {command.split()[0] for command in COMMANDS} == set(listed)
    assert [command for command in COMMANDS if not re.search(rf"`{command}\b", reference)] == []


def test_the_list_shows_the_first_sentence_of_a_help(provisioner: CommandLine) -> None:
    assert "  plan      Show a task's machines and costs.\n" in provisioner("--help").stdout
    assert "  Show a task's machines and costs. Creates nothing.\n" in provisioner("plan", "--help").stdout


def test_exit_codes_are_documented_as_the_errors_have_them(provisioner: CommandLine) -> None:
    classes = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, ProvisionerError)]
    codes = {str(one.exit_code) for one in classes} | {"0"}
    reference = (ROOT / "docs" / "reference" / "commands.md").read_text()
    documented = reference.split("| exit code |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| (\d+) ", documented, re.MULTILINE)) == codes
    shown = " ".join(provisioner("--help").stdout.split())
    assert set(re.findall(r"(\d+) [a-z]", shown.split("Exit codes: ")[1].split(". ")[0])) == codes


MISTAKES = [
    (["runx"], "Did you mean 'run'"),
    (["run"], "Missing argument 'FAMILY'"),
    (["run", FAMILY], "Missing argument 'TASK'"),
    (["run", FAMILY, "main", "--bogus"], "No such option: --bogus"),
    (["run", FAMILY, "main"], "Use either --agent DIR --command CMD, --submission -, or --submission-file FILE"),
    (["run", FAMILY, "main", "--agent", FAMILY], "--agent and --command must be used together"),
    (["run", FAMILY, "main", "--command", "x"], "--agent and --command must be used together"),
    (["run", FAMILY, "main", "--agent", FAMILY, "--command", "x", "--submission", "-"], "either --agent"),
    (["run", FAMILY, "main", "--agent", "/nonexistent/a", "--command", "x"], "does not exist"),
    (["run", FAMILY, "main", "--agent", FAMILY, "--command", " "], "--command must not be empty"),
    (
        ["run", FAMILY, "main", "--submission", "1", "--submission-file", "x"],
        "either --submission or --submission-file",
    ),
    (["run", FAMILY, "main", "--submission-file", "/nonexistent/s"], "cannot be read: No such file"),
    (["score", "x", "--submission-file", ""], "a path must not be empty"),
    (["run", FAMILY, "main", "--submission", "\udcff"], "the text must be UTF-8"),
    (["score", "x", "--submission", "\udcff"], "the text must be UTF-8"),
    (["agent", "x", FAMILY, "\udcff"], "the text must be UTF-8"),
    (["run", FAMILY, "main", "--agent", "", "--command", "x"], "a path must not be empty"),
    (["up", "", "main"], "a path must not be empty"),
    (["up", FAMILY, "main", "--env-file", ""], "a path must not be empty"),
    (["agent", "x", "", "cmd"], "a path must not be empty"),
    (["agent", "x", FAMILY, ""], "COMMAND must not be empty"),
    (["run", "/nonexistent/family", "main", "--submission-file", "README.md"], "does not exist"),
    (["up", "README.md", "main"], "README.md"),
    (["up", FAMILY, "main", "--env-file", "/nonexistent/env"], "/nonexistent/env"),
    (["up", FAMILY, "main", "--cloud", "nimbus"], "nimbus"),
    (["up", FAMILY, "main", "--allow", "example.com"], "example.com"),
    (["up", FAMILY, "main", "--allow", "127.0.0.1:80"], "127.0.0.1"),
    (["up", FAMILY, "main", "--allow", "0.0.0.0/0:443"], "0.0.0.0/0"),
    (["up", FAMILY, "main", "--allow", "2001:db8::1:443"], "2001:db8"),
    (["up", FAMILY, "main", "--allow", "203.0.113.1:99999"], "99999"),
    (["up", FAMILY, "mainn"], "has no task 'mainn'"),
    (["run", FAMILY, "mainn", "--submission-file", "README.md"], "has no task 'mainn'"),
    (["test", FAMILY, "mainn"], "has no task 'mainn'"),
    (["up", LAB, "pair"], "variables are not set: LAB_TOKEN"),
    (["run", LAB, "pair", "--submission-file", "README.md"], "variables are not set: LAB_TOKEN"),
    (["test", LAB, "pair"], "variables are not set: LAB_TOKEN"),
    (["image", "build", LAB], "variables are not set: LAB_TOKEN"),
    (["check", "/nonexistent/family"], "does not exist"),
    (["check", "/" + "a" * 256], "is too long"),
    (["new", "Not-A-Name"], "is not a valid family name"),
    (["new", FAMILY], "exists already"),
    (["check", FAMILY, ""], "a task's name must not be empty"),
    (["check", FAMILY, "--env-file", "/nonexistent/env"], "/nonexistent/env"),
    (["score", "nothing"], "no environment 'nothing'"),
    (["score", "x", "--intermediate", "--submission-file", "README.md"], "cannot be used with a submission"),
    (["score", "x", "--submission", "1"], "cannot be an argument"),
    (["exec", "x"], "Missing argument 'CMD...'"),
    (["exec", "x", "ls", "-l"], "Write -- before what is to run: `provisioner exec ENV -- ls -l`"),
    (["--debug", "list"], "--debug comes after the command"),
    (["verify", "/nonexistent/results.jsonl"], "no file or directory '/nonexistent/results.jsonl'"),
    (["show", "a" * 5000], "no environment '" + "a" * 80 + "...'"),
    (["exec", "x", "--machine"], "Option '--machine' requires an argument."),
    (["exec", "../x", "--", "true"], "no environment '../x'"),
    (["exec", "x", "--machine", "third", "--", "true"], "no environment 'x'"),
    (["exec", "x", "--user", "mallory", "--", "true"], "'mallory' is not one of"),
    (["exec", "x", "--machine", "aux", "--user", "agent", "--", "true"], "no environment 'x'"),
    (["ssh", ""], "no environment ''"),
    (["cp", "a", "b"], "Exactly one of the two paths"),
    (["cp", "x:a", "y:b"], "Exactly one of the two paths"),
    (["cp", "x:a", "b"], "no environment 'x'"),
    (["cp", "", "x:b"], "must not be empty"),
    (["cp", "x:b", ""], "must not be empty"),
    (["cp", "x:", "b"], "must end with the name"),
    (["cp", "x:/tmp/..", "b"], "must end with the name"),
    (["cp", ":a", "b"], "no environment ''"),
    (["score", "-x"], "No such option: -x"),
    (["score", "--", "-x"], "no environment '-x'"),
    (["list", "extra"], "unexpected extra argument"),
    (["destroy", "x", "--all"], "Give either the ids of environments or --all"),
    (["doctor", "--cloud", "nimbus"], "nimbus"),
    (["show", "*"], "no environment '*'"),
    (["logs", "$(id)"], "no environment '$(id)'"),
    (["destroy"], "Give either the ids of environments or --all"),
    (["destroy", "nothing"], "no environment 'nothing'"),
    (["agent", "x", "/nonexistent/a", "cmd"], "no environment 'x'"),
    (["tasks", "/nonexistent/family"], "does not exist"),
    (["image", "build", "/nonexistent/family"], "does not exist"),
    (["image", "bild"], "No such command 'bild'"),
    (["sweep", "--older-than", ""], "is not a duration"),
    (["sweep", "--all-regions"], "--all-regions is for --cloud aws"),
    (["run", FAMILY, "main", "--submission", "1"], "cannot be an argument"),
    (["run", FAMILY, "", "--submission", "-"], "a task's name must not be empty"),
    (["run", FAMILY, "main", "--agent", "README.md", "--command", "x"], "README.md is not a directory"),
    (["exec", "x", "--user", "mallory", "--", "true"], "for '--user': 'mallory'"),
    (["check", f"{FAMILY}/nosuch"], f"Perhaps {FAMILY}?"),
    (["check", f"{FAMILY}s"], f"Perhaps {FAMILY}?"),
    (["check", str(Path(FAMILY).parent)], "There are families in it, such as "),
    (["new", "/nonexistent/dir/fam"], "Create '/nonexistent/dir' first"),
    (["up", FAMILY, "main", "--allow", "a.example:443,b.example:443"], "one destination at a time"),
    (["up", FAMILY, "main", "--allow", "https://a.example"], "one destination at a time"),
    (["up", FAMILY, "main", "--allow", "a.example:443/path"], "one destination at a time"),
    (["up", FAMILY, "main", "--cloud", "aws", "--region", "us-east-1,us-west-2"], "the name of one region"),
    (["up", FAMILY, "main", "--region", ""], "the name of one region"),
    (["aws", "check", "--region", ""], "the name of one region"),
    (["verify", "provisioner"], "The directory provisioner holds no sealed logs"),
]


IDS = [ascii(" ".join(arguments).replace(FAMILY, "FAMILY").replace(LAB, "LAB"))[1:60] for arguments, _ in MISTAKES]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=IDS)
def test_a_mistake_is_explained_ends_with_2_and_creates_nothing(
    provisioner: CommandLine, arguments: list[str], says: str
) -> None:
    done = provisioner(*arguments)
    assert (done.code, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 25
    assert nothing_was_created(provisioner.home)


@pytest.mark.parametrize("arguments", [mistake for mistake, _ in MISTAKES], ids=IDS)
def test_under_json_a_mistake_is_one_object(provisioner: CommandLine, arguments: list[str]) -> None:
    before = arguments.index("--") if "--" in arguments else len(arguments)
    done = provisioner(*arguments[:before], "--json", *arguments[before:])
    assert done.code == 2
    assert done.json.keys() == {"schema", "ok", "error"}
    assert done.json["error"].keys() == {"kind", "message", "details", "hint", "exit_code"}
    assert (done.json["schema"], done.json["ok"], done.json["error"]["exit_code"]) == (1, False, 2)
    assert done.json["error"]["message"] in done.stderr


def test_debug_shows_where_an_error_came_from(provisioner: CommandLine) -> None:
    assert "Traceback" in provisioner("show", "nothing", "--debug").stderr


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("qemu", 1), AssertionError("no"), EOFError()])
def test_an_unexpected_error_is_one_json_object_too(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(least: tuple[int, int]) -> NoReturn:
        raise error

    monkeypatch.setattr("provisioner.terraform.process.problems", fail)
    done = provisioner("doctor", "--json")
    assert (done.code, done.json["error"]["exit_code"]) == (1, 1)
    assert done.json["error"]["message"].startswith(f"Unexpected {type(error).__name__}")
    assert "Traceback" not in done.stderr


def test_an_error_names_only_options_that_the_command_has(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(least: tuple[int, int]) -> NoReturn:
        raise errors.BudgetError("It is too much.", hint="Take less.", settings=("ttl", "region"))

    monkeypatch.setattr("provisioner.terraform.process.problems", fail)
    assert provisioner("doctor", "--json").json["error"]["hint"] == "Take less. Options: --region."


def test_the_program_tells_its_version(provisioner: CommandLine) -> None:
    told = provisioner("--version")
    assert (told.code, told.stdout, told.stderr) == (0, f"provisioner {__version__}\n", "")
    assert nothing_was_created(provisioner.home)


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
    assert "Neither Terraform nor OpenTofu is installed." in done.stdout


def test_doctor_takes_opentofu_for_terraform_and_says_so(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tofu = tmp_path / "tofu"
    monkeypatch.setattr("os.environ", {**os.environ, "PATH": str(tmp_path)})
    for version, old in (("1.9.4", True), ("1.11.1", False)):
        tofu.write_text(f"#!/bin/sh\necho OpenTofu v{version}\n")
        tofu.chmod(0o755)
        done = provisioner("doctor", "--json").json
        problems = [entry["problem"] for entry in done["problems"]]
        assert (f"OpenTofu {version} is too old: 1.10.6 or newer is needed here." in problems) is old
        assert not any("Terraform" in problem for problem in problems)
        assert f"OpenTofu {version} runs in place of Terraform: {tofu}" in done["notes"]


@pytest.mark.parametrize(("available_gib", "fits"), [(7.9, 7), (0.5, 0)])
def test_doctor_and_plan_say_what_fits_into_memory(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, available_gib: float, fits: int
) -> None:
    monkeypatch.setattr("provisioner.clouds.local.sizing.available_memory_gib", lambda: available_gib)
    says = f"GiB of memory, of {available_gib} GiB available now: {fits} fit if each uses all"
    assert f"note: Memory: an environment of one small machine takes up to 1 {says}" in provisioner("doctor").stdout
    family = str(ROOT / "examples" / "number_guess")
    assert says in provisioner("plan", family, "easy").stdout
    assert says in provisioner("plan", family, "easy", "--json").stdout


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
    program = "from provisioner.cli.app import app; app(prog_name='provisioner')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=BOUND_SECONDS, check=False,
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


@pytest.mark.parametrize("command", ["run", "agent"])
def test_secrets_do_not_lie_in_an_agents_directory(provisioner: CommandLine, tmp_path: Path, command: str) -> None:
    agent, env_file = tmp_path / "agent", tmp_path / "agent" / "deep" / "secrets.env"
    env_file.parent.mkdir(parents=True)
    env_file.write_text("TOKEN=very-secret\n")
    run = ["run", str(ROOT / "examples" / "number_guess"), "easy", "--agent", str(agent), "--command", "true"]
    done = provisioner(
        *(run if command == "run" else ["agent", "echo-main-bcd234", str(agent), "true"]), "--env-file", str(env_file)
    )
    assert done.code == 2
    assert f"The env file {env_file} lies in the agent's directory {agent}" in " ".join(done.stderr.split())
    assert "very-secret" not in done.stderr


def test_after_ctrl_c_only_what_still_exists_is_hinted_at(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("provisioner.store.environments.EnvironmentStore.readable", interrupted)
    clean = provisioner("list")
    (provisioner.home / "environments" / "env").mkdir(parents=True)
    assert (clean.code, clean.stderr) == (130, "Interrupted.\n")
    assert "hint: `provisioner list` shows what still exists." in provisioner("list").stderr


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_while_an_error_is_shown_ends_the_command(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr("provisioner.cli.command._fail", interrupted)
    assert provisioner("show", "nothing").code == code
