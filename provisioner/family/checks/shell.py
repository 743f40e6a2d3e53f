"""Finds the shell commands of a family's build steps, and has the shell check their syntax without running them."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice

from provisioner import child_environment
from provisioner.errors import TaskFamilyError
from provisioner.family.build_steps import FILE_NAME
from provisioner.family.checks.finding import Finding
from provisioner.family.checks.literals import literal_aux_vm
from provisioner.family.checks.source import FamilySource, strings
from provisioner.family.loader import TaskFamily
from provisioner.models import ShellBuildStep

MAXIMUM_STEPS = 100
MAXIMUM_SCRIPT_CHARACTERS = 256 << 10
TIME_LIMIT_SECONDS = 10
MEMORY_LIMIT_BYTES = 256 << 20

# These commands change how the shell parses the rest of a script, or end the script early: then a reported syntax
# error may never occur.
_MAY_BE_RIGHT = re.compile(r"\b(alias|exec|exit|kill|shopt|posix)\b")
# `bash: line 2: syntax error ...`, `sh: 2: Syntax error: ...`, `bash: unexpected EOF ...`. Not what it says of memory.
_SYNTAX_ERROR = re.compile(r"\S+: (?:(?:line )?(\d{1,9}): )?(.*(?:syntax error|unexpected EOF).*)", re.IGNORECASE)
_NOBODY = 65534


@dataclass(frozen=True)
class Script:
    """The commands of one shell step.

    Args:
        file: the file that holds them.
        lines: the line of each command in a Python module; empty for build_steps.json.
        json_text: the text of build_steps.json.
        shell: the program that runs them.
        certain: whether the step is surely run.
    """

    file: str
    commands: tuple[str, ...]
    shell: str
    certain: bool
    lines: tuple[int, ...] = ()
    json_text: str = ""

    @property
    def text(self) -> str:
        """Returns the script as the machine gets it."""
        return "".join(f"{command}\n" for command in self.commands)

    def line_of(self, number: int | None) -> int | None:
        """Returns the line in the file of a line of the script; None stands for the last one."""
        index = len(self.commands) - 1
        if number is not None:
            ends = accumulate(command.count("\n") + 1 for command in self.commands)
            index = next((at for at, end in enumerate(ends) if number <= end), index)
        return self.place_of(index)

    def place_of(self, index: int) -> int | None:
        """Returns the line in the file of one of the commands; None if it is not known."""
        return self.lines[index] if self.lines else _line_in_json(self.json_text, self.commands[index])


def scripts(source: FamilySource | None, family: TaskFamily) -> list[Script]:
    """Returns the shell steps of build_steps.json, and those of aux VMs that the module writes as literals."""
    text = (family.directory / FILE_NAME).read_text(errors="replace") if family.build_steps else ""
    steps = [step for step in family.build_steps if isinstance(step, ShellBuildStep) and step.commands]
    found = [Script(FILE_NAME, step.commands, "bash", True, json_text=text) for step in steps]
    return [*found, *islice(_aux_scripts(source) if source else (), MAXIMUM_STEPS)]


def _line_in_json(text: str, command: str) -> int | None:
    """Returns the line of a string in a JSON file, if the file has it once and written plainly."""
    written = json.dumps(command, ensure_ascii=False)
    return text.partition(written)[0].count("\n") + 1 if text.count(written) == 1 else None


def _aux_scripts(source: FamilySource) -> Iterator[Script]:
    try:
        spec = literal_aux_vm(source)
    except TaskFamilyError:
        spec = None
    certain = {step.commands for step in spec.build_steps if isinstance(step, ShellBuildStep)} if spec else set()
    for node in source.nodes:
        commands = strings(_commands(node)) if isinstance(node, ast.Dict) else None
        if commands:
            texts = tuple(str(command.value) for command in commands)
            lines = tuple(command.lineno for command in commands)
            yield Script(source.file, texts, "sh", texts in certain, lines)


def _commands(step: ast.Dict) -> ast.expr | None:
    """Returns the commands of a dict that looks like a shell step."""
    items = {
        key.value: value
        for key, value in zip(step.keys, step.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }
    kind = items.get("type")
    return items.get("commands") if isinstance(kind, ast.Constant) and kind.value == "shell" else None


def shell_findings(found: list[Script]) -> Iterator[Finding]:
    """Yields what the shells say of the scripts' syntax."""
    deadline = time.monotonic() + TIME_LIMIT_SECONDS
    for count, script in enumerate(found):
        if count == MAXIMUM_STEPS or time.monotonic() > deadline:
            yield Finding(
                "warning", "not-checked", script.file, None,
                f"Of {len(found)} shell steps, {count} were checked.", "More would take too long.",
                "Put long scripts into files of the family, and run them from a step.",
            )  # fmt: skip
            return
        if problem := syntax_problem(script):
            number, said = problem
            certain = script.certain and not _MAY_BE_RIGHT.search(script.text)
            yield Finding(
                "error" if certain else "warning", "shell-syntax", script.file, script.line_of(number),
                f"{script.shell} cannot read a build step: {said}",
                "The step would fail." if certain else "The step may fail.",
                "Correct it. The commands of a step are the lines of one script.",
            )  # fmt: skip


def syntax_problem(script: Script) -> tuple[int | None, str] | None:
    """Asks the shell whether it can read a script, without running any of it.

    Returns:
        the line in the script, if the shell names it, and what it says; None if it can read the script, or if that
        cannot be found out.
    """
    program, limiter = shutil.which(script.shell), shutil.which("prlimit")
    if not program or not limiter or len(script.text) > MAXIMUM_SCRIPT_CHARACTERS:
        return None
    limits = [f"--as={MEMORY_LIMIT_BYTES}", "--fsize=0", "--core=0", f"--cpu={TIME_LIMIT_SECONDS}"]
    # Shells have had flaws in reading, too: this one gets no secrets and no rights.
    user = _NOBODY if os.geteuid() == 0 else None
    try:
        done = subprocess.run(
            [limiter, *limits, "--", program, "-n"], input=script.text.encode("utf-8", "replace"),
            env=child_environment.for_program(os.environ) | {"LC_ALL": "C"}, cwd="/", user=user, group=user,
            extra_groups=None if user is None else (), capture_output=True, timeout=TIME_LIMIT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    match = _SYNTAX_ERROR.match(done.stderr[:4096].decode(errors="replace")) if done.returncode in (1, 2) else None
    return (int(match[1]) if match[1] else None, match[2]) if match else None
