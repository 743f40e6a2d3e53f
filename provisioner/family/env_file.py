"""Reads and checks the env file, and selects the variables that a task requires.

Values are secrets: no message of this module may show a value or a line of the file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dotenv.parser import Binding, parse_stream

from provisioner.base.errors import MissingVariablesError, UsageError
from provisioner.base.models import TaskSetup

# Supplied by us to a task that lists them and has an aux VM (Task Standard, "Auxiliary virtual machines").
AUX_VM_VARIABLES = ("VM_SSH_USERNAME", "VM_SSH_PRIVATE_KEY", "VM_IP_ADDRESS")

MAXIMUM_FILE_BYTES = 1 << 20
MAXIMUM_VALUE_BYTES = 128 << 10  # the longest string that Linux accepts in an environment (MAX_ARG_STRLEN)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


def is_variable_name(name: str) -> bool:
    """Returns whether a shell accepts a variable of this name."""
    return _NAME.fullmatch(name) is not None


def load_env_file(path: Path) -> dict[str, str]:
    """Reads NAME=value lines by dotenv's rules: comments, quotes and `export ` are understood.

    The first `=` ends the name. If a name appears twice, the last value counts. `${NAME}` is not expanded: that would
    pass the controller's own environment to the task.

    Raises:
        UsageError: the file cannot be read, or a line is not a variable with a value.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAXIMUM_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"The env file {path} cannot be read: {error.strerror}.") from error
    if len(data) > MAXIMUM_FILE_BYTES:
        raise UsageError(f"The env file {path} is larger than {MAXIMUM_FILE_BYTES} bytes.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"The env file {path} is not UTF-8 text: see byte {error.start}.") from None
    bindings = (binding for binding in parse_stream(io.StringIO(text)) if binding.key is not None or binding.error)
    return dict(_variable(binding, path) for binding in bindings)


def _variable(binding: Binding, path: Path) -> tuple[str, str]:
    # The parser counts from the end of the last line, so it includes blank lines.
    blank = binding.original.string[: -len(binding.original.string.lstrip()) or None].count("\n")
    where = f"The env file {path}, line {binding.original.line + blank}"
    if binding.error or binding.key is None:
        quote = " (is a quote left open?)" if set("\"'") & set(binding.original.string) else ""
        raise UsageError(f"{where}: not a line of the form NAME=value{quote}.")
    # The "name" may be a piece of a secret that was pasted without one: it is not shown, unless it has a value.
    if not is_variable_name(binding.key):
        raise UsageError(f"{where}: a variable's name must be a letter or _, followed by letters, digits and _.")
    if binding.value is None:
        raise UsageError(f"{where}: the variable has no value. Write NAME= for an empty one.")
    if "\0" in binding.value:
        raise UsageError(f"{where}: the value of {binding.key} contains a NUL character.")
    if len(binding.value.encode()) >= MAXIMUM_VALUE_BYTES:
        raise UsageError(f"{where}: the value of {binding.key} must be shorter than {MAXIMUM_VALUE_BYTES} bytes.")
    return binding.key, binding.value


def select_required(
    variables: Mapping[str, str], required: Iterable[str], supplied: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Selects the variables that the task's own functions get: the required ones and no others.

    Args:
        variables: the env file's variables.
        required: the names that the task lists.
        supplied: our own variables, which override the env file's; see AUX_VM_VARIABLES.

    Raises:
        MissingVariablesError: variables are missing; the message names all of them.
    """
    available = {**variables, **(supplied or {})}
    names = list(dict.fromkeys(required))
    if missing := [name for name in names if name not in available]:
        raise MissingVariablesError(missing)
    return {name: available[name] for name in names}


def required_of_env_file(setup: TaskSetup) -> list[str]:
    """Returns the variables that a task requires, without those that provisioner supplies."""
    ours = AUX_VM_VARIABLES if setup.aux_vm_spec else ()
    return [name for name in dict.fromkeys(setup.required_environment_variables) if name not in ours]


def check_required(variables: Mapping[str, str], setup: TaskSetup) -> None:
    """Checks, before anything is created, that each required variable is set or will be supplied by us.

    Raises:
        MissingVariablesError: variables are missing; the message names all of them.
    """
    select_required(variables, required_of_env_file(setup))


def refuse_env_file_of_agent(directory: Path, env_file: Path) -> None:
    """Checks that the env file does not lie where an agent is copied from: agents get none of the tasks' secrets.

    Raises:
        UsageError: the env file lies in the agent's directory.
    """
    if env_file.resolve().is_relative_to(directory.resolve()):
        raise UsageError(
            f"The env file {env_file} lies in the agent's directory {directory}, and would be copied into its machine.",
            hint="Move it out of there: agents get none of the tasks' secrets.",
        )
