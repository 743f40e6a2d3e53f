"""Runs Terraform: one stack, one directory. The only importer of python_terraform.

Terraform's exit code is taken for what it is, a report of one process; what exists is asked of the cloud.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from python_terraform import IsFlagged, Terraform

from provisioner.errors import HostError, TerraformError
from provisioner.paths import is_locked, write_atomically
from provisioner.render import VALUES

SESSION = Path(__file__).with_name("terraform_session.sh")
# pattern -> what it is; each was seen, and passes by itself.
RETRYABLE = {
    "text file busy": "another process is just installing the provider",
    "timeout while waiting for plugin to start": "the host is too busy to start the provider in time",
    "connection reset by peer": "the network dropped a connection",
}
ATTEMPTS = 3
PATIENCE_SECONDS = 120.0
LOG_LINES = 20
# These would change what we ask Terraform for.
FOREIGN = ("TF_CLI_ARGS", "TF_VAR_", "TF_WORKSPACE", "TF_LOG", "TF_DATA_DIR")

Tell = Callable[[str], None]


class Stack:
    """A Terraform root and its state.

    Args:
        directory: the stack's directory; made by `write`.
        patience_seconds: how long an interrupted Terraform may take to end what it is doing.
    """

    def __init__(self, directory: Path, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._directory = directory
        self._patience_seconds = patience_seconds

    @property
    def exists(self) -> bool:
        """Whether the stack was ever written."""
        return (self._directory / "main.tf").exists()

    def write(self, files: Mapping[str, str]) -> None:
        """Writes the root's files, each one atomically, the values first."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in sorted(files.items(), key=lambda item: item[0] != VALUES):
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                write_atomically(path, text)

    def apply(self, tell: Tell) -> dict[str, Any]:
        """Makes what the files say, and returns the outputs.

        Args:
            tell: told of each failure that is tried again.

        Raises:
            TerraformError: with Terraform's own diagnostics.
        """
        self._init()
        outputs: dict[str, Any] = {}

        def take(message: dict[str, Any]) -> None:
            if message.get("type") == "outputs":
                outputs.update({name: output.get("value") for name, output in message.get("outputs", {}).items()})

        self._run("apply", tell, take, skip_plan=True)
        return outputs

    def destroy(self, tell: Tell) -> None:
        """Destroys all that the state knows. Safe to repeat.

        Raises:
            TerraformError: with Terraform's own diagnostics.
        """
        self._init()
        self._run("destroy", tell, lambda _: None, force=None, auto_approve=IsFlagged)

    def remove(self, environment_id: str, tell: Tell) -> None:
        """Destroys one environment of the stack; the stack goes with its last one. Safe to repeat.

        Raises:
            TerraformError: with Terraform's own diagnostics.
        """
        if not self.exists:
            self._delete()
            return
        self._end_orphan()
        values = self._values()
        values.pop(environment_id, None)
        if values:
            self._write_values(values)
            self.apply(tell)
            return
        self.destroy(tell)
        self._delete()

    def forget(self, environment_id: str) -> None:
        """Drops an environment that is gone from the stack, without Terraform; the stack goes with its last one."""
        values = self._values()
        values.pop(environment_id, None)
        if values:
            self._write_values(values)
        else:
            self._delete()

    def _values(self) -> dict[str, Any]:
        try:
            return cast(dict[str, Any], json.loads((self._directory / VALUES).read_text())["environments"])
        except (OSError, ValueError, KeyError):
            return {}

    def _write_values(self, values: dict[str, Any]) -> None:
        write_atomically(self._directory / VALUES, json.dumps({"environments": values}, indent=2))

    def _delete(self) -> None:
        if self._directory.exists():
            shutil.rmtree(self._directory)

    def _end_orphan(self) -> None:
        """Ends a Terraform that outlived its controller: the lock says whether there is one, the pid file which."""
        if not is_locked(self._directory / "terraform.lock"):
            return
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self._directory / "terraform.pid").read_text()), signal.SIGINT)
        deadline = time.monotonic() + self._patience_seconds
        while is_locked(self._directory / "terraform.lock"):
            if time.monotonic() > deadline:
                raise TerraformError(
                    f"Another Terraform still works in {self._directory}.",
                    hint="Wait for it, or end the process named in its terraform.pid, and try again.",
                )
            time.sleep(0.1)

    def _init(self) -> None:
        if (self._directory / ".terraform" / "modules" / "modules.json").exists():
            return
        self._run("init", lambda _: None, lambda _: None, backend=None)

    def _run(self, command: str, tell: Tell, take: Callable[[dict[str, Any]], None], **options: Any) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            messages, code = self._attempt(command, take, options)
            if code == 0:
                return
            text = "\n".join(_line(message) for message in messages)
            reason = next((why for pattern, why in RETRYABLE.items() if pattern in text.lower()), None)
            if reason is None or attempt == ATTEMPTS:
                raise self._error(command, code, messages)
            tell(f"terraform {command} failed: {reason}; trying again")

    def _attempt(
        self, command: str, take: Callable[[dict[str, Any]], None], options: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], int]:
        process = self._start(command, options)
        messages: list[dict[str, Any]] = []

        def read(stream: IO[bytes]) -> None:
            with stream, (self._directory / "terraform.log").open("a") as log:
                for line in _lines(stream):
                    log.write(line + "\n")
                    message = _parse(line)
                    messages.append(message)
                    take(message)

        readers = [threading.Thread(target=read, args=(s,), daemon=True) for s in (process.stdout, process.stderr)]
        for reader in readers:
            reader.start()
        try:
            while process.poll() is None:
                time.sleep(0.02)
        except BaseException:
            _end(process, self._patience_seconds)
            raise
        finally:
            for reader in readers:
                reader.join(5)
        return messages, process.returncode

    def _start(self, command: str, options: dict[str, Any]) -> subprocess.Popen[bytes]:
        if not shutil.which("terraform"):
            raise HostError("Terraform is not installed.", hint="`provisioner doctor` says how to get it.")
        terraform = Terraform(
            working_dir=str(self._directory), terraform_bin_path=str(SESSION), is_env_vars_included=False
        )
        # synchronous=None and not False: both hand back the process, but False ends up on the command line.
        arguments = {"no_color": IsFlagged, "input": False, "json": IsFlagged, "synchronous": None, **options}
        # python-terraform passes either nothing or all of our environment: give it a clean one for the moment.
        with _environment():
            terraform.is_env_vars_included = True
            run = {"apply": terraform.apply, "destroy": terraform.destroy}.get(command)
            started = run(**arguments) if run else terraform.cmd(command, **arguments)
        return cast("subprocess.Popen[bytes]", started[0])

    def _error(self, command: str, code: int, messages: list[dict[str, Any]]) -> TerraformError:
        found = [m["diagnostic"] for m in messages if m.get("type") == "diagnostic"]
        errors = [one for one in found if one.get("severity") == "error"]
        summary = "; ".join(dict.fromkeys(str(one.get("summary", ""))[:200] for one in errors)) or f"exit code {code}"
        details = [line for one in errors for line in str(one.get("detail", "")).splitlines()]
        if not errors:
            details = [_line(message) for message in messages]
        return TerraformError(
            f"terraform {command} failed: {summary}.",
            details="\n".join(line[:300] for line in details[-LOG_LINES:]),
        )


def _lines(stream: IO[bytes]) -> Iterator[str]:
    for line in stream:
        yield line.decode(errors="replace").rstrip("\n")


def _parse(line: str) -> dict[str, Any]:
    """One line of the -json stream; a line that is not JSON becomes a message all the same."""
    with contextlib.suppress(ValueError):
        parsed = json.loads(line)
        if isinstance(parsed, dict):
            return parsed
    return {"@message": line}


def _line(message: dict[str, Any]) -> str:
    diagnostic = message.get("diagnostic") or {}
    return f"{message.get('@message', '')} {diagnostic.get('detail', '')}"


def _end(process: subprocess.Popen[bytes], patience_seconds: float) -> None:
    """The interrupt ladder: SIGINT lets Terraform write its state; SIGKILL, last, forgets what it was creating."""
    for target, sent, seconds in (
        (os.kill, signal.SIGINT, patience_seconds),
        (os.killpg, signal.SIGTERM, 10.0),
        (os.killpg, signal.SIGKILL, 10.0),
    ):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            target(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return


_environment_lock = threading.Lock()


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Terraform's environment, for the moment of its start: what python-terraform can pass on is all of ours."""
    with _environment_lock:
        before = dict(os.environ)
        os.environ.clear()
        os.environ.update(terraform_environment(before))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def terraform_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What Terraform's processes see of our environment. Pure.

    Args:
        ours: the controller's environment.
    """
    theirs = {name: value for name, value in ours.items() if not name.startswith(FOREIGN)}
    if "TF_CLI_CONFIG_FILE" in theirs and not Path(theirs["TF_CLI_CONFIG_FILE"]).exists():
        del theirs["TF_CLI_CONFIG_FILE"]
    package = str(Path(__file__).parent.parent)
    theirs["PYTHONPATH"] = os.pathsep.join(filter(None, [package, ours.get("PYTHONPATH")]))
    return theirs | {
        "TF_IN_AUTOMATION": "1",
        "CHECKPOINT_DISABLE": "1",
        "PROVISIONER_PYTHON": sys.executable,
    }
