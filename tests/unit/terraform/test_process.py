"""One Terraform process: what it is started with, what is heard of it, how it is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import TerraformError
from provisioner.store.files import holders, is_locked
from provisioner.terraform import process
from provisioner.terraform.process import LOCK, terraform_environment
from tests.waiting import BOUND_SECONDS

Put = Callable[[str], None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts a shell script in Terraform's place."""

    def put(script: str) -> None:
        path = tmp_path / "terraform"
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PROVISIONER_TERRAFORM", str(path))

    return put


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    directory.mkdir()
    return directory


def test_each_line_is_heard_once_and_kept_in_the_log(put: Put, root: Path) -> None:
    put("echo '{\"type\": \"x\"}'; echo 'no json' >&2; echo '[1]'; printf 'no end'; exit 3")
    heard: list[dict[str, Any]] = []
    assert process.run(root, "apply", heard.append, 1) == 3
    assert heard == [{"type": "x"}, {"@message": "no json"}, {"@message": "[1]"}, {"@message": "no end"}]
    assert (root / "terraform.log").read_text().endswith("no json\n[1]\nno end")


SPOKEN = ["-no-color", "-input=false", "-json"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("init", ["init", *SPOKEN, "-backend=false"]),
        ("init backend", ["init", *SPOKEN, "-lockfile=readonly"]),
        ("apply", ["apply", *SPOKEN, "-auto-approve=true", "-refresh=false", "-parallelism=3"]),
        ("refresh and apply", ["apply", *SPOKEN, "-auto-approve=true", "-parallelism=3"]),
        ("remove", ["apply", *SPOKEN, "-auto-approve=true", "-refresh=false", "-parallelism=3"]),
        ("destroy", ["destroy", *SPOKEN, "-auto-approve", "-refresh=false", "-parallelism=3"]),
        ("state push", ["state", "push", "errored.tfstate"]),
        ("state rm", ["state", "rm", "one", "two words"]),
    ],
)
def test_each_command_has_its_arguments(put: Put, root: Path, command: process.Command, arguments: list[str]) -> None:
    put('printf "%s\\n" "$@"')
    heard: list[str] = []
    parallelism = 3 if "-parallelism=3" in arguments else None
    operands = [argument for argument in ("one", "two words") if argument in arguments]
    process.run(root, command, lambda message: heard.append(message["@message"]), 1, parallelism, operands=operands)
    assert heard == arguments


def test_what_an_earlier_run_said_is_not_heard_again(put: Put, root: Path) -> None:
    put("echo one")
    process.run(root, "apply", lambda _: None, 1)
    heard: list[dict[str, Any]] = []
    process.run(root, "apply", heard.append, 1)
    assert heard == [{"@message": "one"}]


def test_terraform_has_its_own_session_and_no_input(put: Put, root: Path) -> None:
    put("ps -o sid= -p $$ | tr -d ' '; echo $$; pwd; cat")
    heard: list[str] = []
    process.run(root, "apply", lambda message: heard.append(message["@message"]), 1)
    session, pid, directory = heard
    assert session == pid
    assert directory == str(root)


def test_a_second_terraform_in_one_root_is_refused(put: Put, root: Path) -> None:
    put("echo begun; until [ -e done ]; do sleep 0.01; done")

    def again(_: dict[str, Any]) -> None:
        with pytest.raises(TerraformError, match="Another Terraform works in"):
            process.run(root, "apply", lambda _: None, 1)
        (root / "done").touch()

    assert process.run(root, "apply", again, 1) == 0


def test_an_interruption_while_terraform_starts_ends_it(put: Put, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("exec sleep 1000")
    popen = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started = popen(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return started

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.run(root, "apply", lambda _: None, 30)
    assert not is_locked(root / LOCK)


@pytest.mark.parametrize(
    "script",
    ["echo begun; exec sleep 1000", "trap 'echo done; exit 1' INT; echo begun; while :; do sleep 0.01; done"],
    ids=["dies", "ends-in-good-order"],
)
def test_the_checks_exception_interrupts_terraform(put: Put, root: Path, script: str) -> None:
    put(script)
    begun = threading.Event()

    def check() -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run(root, "apply", lambda _: begun.set(), 30, check=check)
    assert not is_locked(root / LOCK)
    assert ("done" in (root / "terraform.log").read_text()) == ("done" in script)


def test_a_terraform_that_ignores_interrupts_is_killed(put: Put, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "TERMINATE_SECONDS", 0.05)
    put("trap '' INT TERM; sleep 1000 & echo begun; wait; wait; wait")
    begun = threading.Event()

    def check() -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process.run(root, "apply", lambda _: begun.set(), 0.05, check=check)
    assert holders(root / LOCK) == []


def test_where_nothing_works_there_is_nothing_to_end(root: Path) -> None:
    assert process.end(root, 0)


def test_a_terraform_that_outlived_its_controller_is_ended(put: Put, root: Path) -> None:
    put("echo begun; exec sleep 1000")
    begun = threading.Event()
    thread = threading.Thread(target=process.run, args=(root, "apply", lambda _: begun.set(), 30))
    thread.start()
    assert begun.wait(BOUND_SECONDS)
    assert process.end(root, 30)
    thread.join()
    assert not is_locked(root / LOCK)


def test_what_would_change_terraforms_commands_does_not_reach_it() -> None:
    ours = {"TF_CLI_ARGS_apply": "-lock=false", "TF_VAR_environments": "{}", "TF_LOG": "trace", "TF_WORKSPACE": "x"}
    ours |= {"TF_DATA_DIR": "/x", "AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin"}
    theirs = terraform_environment(ours, {"AWS_REGION": "eu-west-1"})
    assert set(theirs) == {
        *("AWS_REGION", "PATH", "PYTHONPATH"),
        *("TF_IN_AUTOMATION", "CHECKPOINT_DISABLE", "PROVISIONER_PYTHON", "GOGC"),
    }
    assert terraform_environment({"GOGC": "100"})["GOGC"] == "100"  # how often Go collects garbage is theirs to choose


def test_a_missing_configuration_file_is_not_given_to_terraform(tmp_path: Path) -> None:
    there = tmp_path / "terraformrc"
    there.touch()
    assert terraform_environment({"TF_CLI_CONFIG_FILE": str(there)})["TF_CLI_CONFIG_FILE"] == str(there)
    assert "TF_CLI_CONFIG_FILE" not in terraform_environment({"TF_CLI_CONFIG_FILE": str(tmp_path / "missing")})


def test_the_provisioners_find_this_python_and_this_package() -> None:
    theirs = terraform_environment({"PYTHONPATH": "/elsewhere"})
    package = Path(sys.modules["provisioner"].__file__ or "").parent.parent
    assert theirs["PYTHONPATH"] == f"{package}{os.pathsep}/elsewhere"
    assert theirs["PROVISIONER_PYTHON"] == sys.executable
