"""The command `verify`: whether logs and results are still what was sealed."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from provisioner.base.errors import ProvisionerError, UsageError
from provisioner.base.validation import shown
from provisioner.cli.command import default_home
from provisioner.cli.output import Result
from provisioner.machines.recordings import record_hash
from provisioner.recording import published
from provisioner.recording.manifest import MANIFEST
from provisioner.store.environments import EnvironmentStore


def main(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="An environment that was destroyed, a file of results, or a directory of sealed logs."
        ),
    ],
) -> Result:
    """Compares logs with what was sealed, and results with the logs; says which file is not as it was."""
    checked, directory = _checked(what)
    is_sealed = (directory / MANIFEST).is_file()
    wrong = [(each, problem) for each in checked for problem in each.problems]
    lines = [f"{each.name}: {problem.file}: {problem.message}" for each, problem in wrong]
    for each in (each for each in checked if not each.problems):
        lines.append(f"{each.name}: {each.files} files as sealed, hash {each.head}")
        lines += [f"{each.name}: {each.isolation}"] if each.isolation else []
    if not is_sealed and Path(what).is_file():
        lines.append(
            f"{what}: no seal beside it, so that missing rows, and outcomes, agents, repetitions and costs, were not "
            "checked"
        )
    data = {"verified": bool(checked) and not wrong, "sealed": is_sealed, "checked": [asdict(each) for each in checked]}
    if not checked:
        lines.append("Nothing to check: no run has a score or a recording.")
    return Result(data, "\n".join(lines), 0 if data["verified"] else ProvisionerError.exit_code)


def _checked(what: str) -> tuple[list[published.Checked], Path]:
    """Returns what came of the check, and the directory in which the manifest should be."""
    store = EnvironmentStore(default_home())
    path = Path(what)
    if what and path.is_file():
        try:
            return published.check_results(path, partial(_logs_of, store, path.parent)), path.parent
        except (OSError, ValueError) as error:
            raise UsageError(f"{what} cannot be checked: {error}.") from error
    if what and (path / MANIFEST).is_file():
        return [published.check_directory(what, path)], path
    try:
        environment = store.find(what, archived=True)
    except UsageError as error:
        if not path.exists() and os.sep in what:
            raise UsageError(
                f"There is no file or directory {shown(what)}.",
                hint=f"The results of batches are in {default_home().batches}, in a directory for each.",
            ) from error
        if not what or not path.is_dir():
            raise
        raise UsageError(
            f"The directory {what} holds no sealed logs: it has no {MANIFEST}.",
            hint="Give a directory of an environment's logs, a results.jsonl, or an environment's id.",
        ) from error
    if store.exists(environment.id):
        raise UsageError(f"{environment.id} is sealed once it is destroyed.")
    said = {"record": record_hash(environment)}
    logs = store.archived_logs(environment.id)
    return [published.check_directory(environment.id, logs, environment.recording, said, "environment.json")], logs


def _logs_of(store: EnvironmentStore, beside: Path, name: str) -> list[Path]:
    """Returns where the logs of an environment may be: beside the results, or in this home's archive."""
    roots = {beside / name / "logs": beside, beside / name: beside, store.archived_logs(name): None}
    return [path for path, root in roots.items() if root is None or _real(path).is_relative_to(_real(root))]


def _real(path: Path) -> Path:
    """Returns where a path leads; one that leads in a circle is no error, as it is for Path.resolve()."""
    return Path(os.path.realpath(path))
