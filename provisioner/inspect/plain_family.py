"""Writes a machine's configuration as a task family of one task, so that it is built, cached and isolated as one."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from provisioner.errors import TaskFamilyError, UsageError
from provisioner.family.build_steps import load_build_steps
from provisioner.family.files import list_files
from provisioner.family.loader import TaskFamily, load_family
from provisioner.images.provisioning import part
from provisioner.inspect.configuration import Machine

FAMILY = "sandbox"
TASK = "machine"
WORKDIR = "/workspace"
# The family's directory with what its build steps copy.
SOURCES = "sources"

# The Python of families, which hides Debian's.
_REMOVE_FAMILY_PYTHON = (
    "find /usr/local/bin /usr/local/include /usr/local/lib/python3* -mindepth 1 -maxdepth 1 ! -name dist-packages "
    "-exec rm -rf {} +"
)

_MODULE = '''"""A machine of an Inspect eval, without a task of its own."""


class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {{"{task}": {{}}}}

    @staticmethod
    def get_instructions(t):
        return ""

    @staticmethod
    def get_permissions(t):
        return {permissions!r}
'''
_UNIT = """[Unit]
Description={name}, of the eval's configuration
After=network.target
StartLimitIntervalSec=0

[Service]
ExecStart=/bin/sh -c {command}
Restart=always
RestartSec=1
# The kernel ends it before the machine does nothing else any more than wait for memory.
MemoryMax=90%

[Install]
WantedBy=multi-user.target
"""


def workdir(machine: Machine) -> str:
    """Returns the directory of a machine's relative paths."""
    return machine.workdir or WORKDIR


def plain_family(machine: Machine, internet: str, directory: Path, base_image: str = "") -> TaskFamily:
    """Writes a family that makes a configuration's machine, and loads it.

    Args:
        internet: as the configuration says.
        directory: a directory for it, in which no other is.
        base_image: the base image that it needs; empty for what the operator's settings say.

    Raises:
        UsageError: a file that the configuration names does not exist or cannot be copied.
    """
    family = directory / FAMILY
    (family / SOURCES).mkdir(parents=True)
    permissions = ["full_internet"] if internet == "full" else []
    (family / f"{FAMILY}.py").write_text(_MODULE.format(task=TASK, permissions=permissions))
    asked = {"cpus": machine.cpus, "memory_gb": machine.memory_gb, "storage_gb": machine.storage_gb}
    resources = {name: value for name, value in asked.items() if value is not None}
    needs = {"base_image": base_image} if base_image else {}
    (family / "manifest.yaml").write_text(json.dumps({**needs, "tasks": {TASK: {"resources": resources}}}))
    steps = [_packages(machine), *_files(machine, family), _users(machine), *map(_shell, machine.run)]
    steps += _services(machine, family)
    (family / "build_steps.json").write_text(json.dumps(steps))
    loaded = load_family(family)
    # What steps copy goes where they say, and nowhere else. Nothing here is what the text of `run` may name.
    return replace(loaded, files=(loaded.module.name,), build_steps=load_build_steps(family))


def _shell(*commands: str) -> dict[str, object]:
    return {"type": "shell", "commands": commands}


def _packages(machine: Machine) -> dict[str, object]:
    names = " ".join(machine.packages)
    if not names:
        return _shell(part("Debian's Python"), _REMOVE_FAMILY_PYTHON)
    install = f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {names}"
    return _shell(part(f"packages {names}"), _REMOVE_FAMILY_PYTHON, "apt-get update", install)


def _users(machine: Machine) -> dict[str, object]:
    user = machine.user
    return _shell(
        part(f"user {user}, {workdir(machine)}"),
        f"id -u {user} > /dev/null 2>&1 || useradd --create-home --shell /bin/bash {user}",
        f"install -d -o {user} -g $(id -g {user}) -- {shlex.quote(workdir(machine))}",
    )


def _files(machine: Machine, family: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    for number, (target, source) in enumerate(machine.files):
        name = f"{SOURCES}/{number}"
        copy = family / name
        try:
            if Path(source).is_dir():
                shutil.copytree(source, copy, symlinks=True)
                list_files(family, copy, called="the directory")
            else:
                shutil.copy(source, copy)
        except OSError as error:
            raise UsageError(f"{source} cannot be copied for {target}: {error.strerror or error}.") from error
        except TaskFamilyError as error:
            problem = error.message.replace(f"{name}/", "")
            raise UsageError(f"{source} cannot be copied for {target}: {problem}") from error
        steps.append({"type": "file", "source": name, "destination": target})
    return steps


def _services(machine: Machine, family: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    for name, command in machine.services:
        # systemd replaces % and $ itself, and knows of JSON only the escapes (systemd.service, "Command lines").
        argument = json.dumps(command, ensure_ascii=False).replace("%", "%%").replace("$", "$$")
        unit = f"{name}.service"
        (family / SOURCES / unit).write_text(_UNIT.format(name=name, command=argument))
        steps.append({"type": "file", "source": f"{SOURCES}/{unit}", "destination": f"/etc/systemd/system/{unit}"})
        steps.append(_shell(part(f"service {name}"), f"systemctl enable {unit}"))
    return steps
