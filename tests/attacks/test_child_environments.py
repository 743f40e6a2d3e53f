"""The attacker takes over a process that parses a machine's bytes, and reads that process's environment.

It must hold neither cloud credentials nor a database's URL nor any other secret of the controller's environment.
tests/local/host_processes.py reads the environments of a real machine's processes.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest

import provisioner
from provisioner.clouds.aws import stacks
from provisioner.clouds.aws.api import Api
from provisioner.terraform import process

PACKAGE = Path(provisioner.__file__ or "").parent
# What runs in machines starts programs there, where the environment is the machine's own.
IN_MACHINES = {"guest", "base_image"}
SOURCES = [path for path in PACKAGE.rglob("*.py") if not IN_MACHINES & set(path.parts)]
SUBPROCESS = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
WITHOUT_ENVIRONMENT = {
    *("system", "popen", "execv", "execvp", "execl", "execlp", "spawnv", "spawnvp", "spawnl", "spawnlp"),
    *("create_subprocess_exec", "create_subprocess_shell", "fork_exec"),
}


def starts_without_environment(source: str) -> list[int]:
    """The lines of a module on which a program starts and inherits the whole environment."""
    lines = []
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        module = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        inherits = module == "subprocess" and call.func.attr in SUBPROCESS and not _has_environment(call)
        if inherits or (module in ("os", "asyncio") and call.func.attr in WITHOUT_ENVIRONMENT):
            lines.append(call.lineno)
    return lines


def _has_environment(call: ast.Call) -> bool:
    return any(keyword.arg == "env" for keyword in call.keywords)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("subprocess.run(['x'])", [1]),
        ("\nos.execvp('ssh', argv)", [2]),
        ("subprocess.Popen(['x'], env=for_program(os.environ))\nos.execvpe('ssh', argv, {})", []),
    ],
    ids=["run", "exec", "given"],
)
def test_a_start_that_inherits_is_found(source: str, lines: list[int]) -> None:
    assert starts_without_environment(source) == lines


def test_no_program_inherits_the_controllers_environment() -> None:
    found = {str(path.relative_to(PACKAGE)): starts_without_environment(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_environment_that_is_given_is_a_whitelist() -> None:
    for path in SOURCES:
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _has_environment(call):
                if ast.unparse(call.func) == "super().exec":  # a sandbox of Inspect, whose programs run in machines
                    continue
                given = next(ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "env")
                # terraform/process.py gives its function one; the next test looks at what reaches Terraform.
                allowed = given == "environment" and path.name == "process.py"
                assert allowed or "child_environment.for_" in given, f"{path}: {given}"


def test_a_terraform_of_local_machines_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "terraform"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o755)
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(program))
    for name in ("AWS_SECRET_ACCESS_KEY", "PROVISIONER_DATABASE", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "the-controllers-secret")
    heard: list[str] = []
    process.run(tmp_path, "apply", lambda message: heard.append(message["@message"]), 1)
    assert "the-controllers-secret" not in "\n".join(heard)
    api = Api(None, "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    process.run(
        tmp_path, "apply", lambda message: heard.append(message["@message"]), 1,
        cloud_variables=partial(stacks.terraform_variables, api),
    )  # fmt: skip
    assert [line for line in heard if "the-controllers-secret" in line] == [
        "AWS_SECRET_ACCESS_KEY=the-controllers-secret"
    ]
