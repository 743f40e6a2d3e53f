"""A stack: one Terraform root and its state in one directory. What exists is asked of the cloud, not of Terraform.

Terraform's exit code is taken for what it is, the report of one process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from provisioner.errors import TerraformError
from provisioner.signals import go_on
from provisioner.store.files import write_atomically
from provisioner.store.locks import is_locked
from provisioner.terraform import process
from provisioner.terraform.process import LOCK, LOG, Message
from provisioner.terraform.render import VALUES

# (what the error says, what it is): each passes by itself.
RETRYABLE = (
    ("requestlimitexceeded", "the cloud asks for fewer requests"),
    ("throttling", "the cloud asks for fewer requests"),
    ("invalidgroup.notfound", "the cloud does not show a new security group everywhere yet"),
    ("dependencyviolation", "something that is about to go still uses what shall be destroyed"),
    # The provider repeats what it got no answer to. The whole ACL is made anew then.
    ("networkaclentryalreadyexists", "an answer of the cloud was lost"),
    ("text file busy", "another process is just installing the provider"),
    ("timeout while waiting for plugin to start", "the host is too busy to start the provider in time"),
    ("connection reset by peer", "the network dropped a connection"),
)
# Pauses before the second and the third attempt; there is no fourth.
RETRY_SECONDS = (1.0, 5.0)
PATIENCE_SECONDS = 120.0
DETAIL_LINES = 20
LINE_CHARACTERS = 300
LOG_LIMIT_BYTES = 1 << 20
ROOT = "main.tf"
INITIALISED = ".terraform"
LOCK_FILE = ".terraform.lock.hcl"
# Files of `.terraform` that are worth copying are small.
LENT_BYTES = 1 << 20
# What Terraform could not write to its backend.
ERRORED_STATE = "errored.tfstate"
STATE_LOCKED = "error acquiring the state lock"
_ENVIRONMENT = re.compile(r'module\.environment\["([^"]+)"\]')

Tell = Callable[[str], None]


class Stack:
    """A Terraform root and its state.

    Any number of controllers may call its methods at once: they take turns.

    Args:
        directory: the stack's directory; made by `write`.
        patience_seconds: how long an interrupted Terraform may take to end what it is doing.
        check: asked again and again while Terraform runs; what it raises interrupts it.
    """

    def __init__(
        self, directory: Path, patience_seconds: float = PATIENCE_SECONDS, check: Callable[[], None] = go_on
    ) -> None:
        self._directory = directory
        self._patience_seconds = patience_seconds
        self._check = check

    @property
    def exists(self) -> bool:
        """Whether the stack was ever written, whole."""
        return (self._directory / ROOT).exists()

    @property
    def is_remote(self) -> bool:
        """Whether others may see its state."""
        return any(self._directory.glob("backend.tf*"))

    def log_text(self) -> str:
        """The end of all that Terraform said, run after run, at most 1 MiB. The log goes with the stack."""
        with contextlib.suppress(FileNotFoundError), (self._directory / LOG).open("rb") as log:
            log.seek(-min(LOG_LIMIT_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
            return log.read().decode(errors="replace")
        return ""

    def write(self, files: Mapping[str, str]) -> None:
        """Writes the root's files, each one atomically, main.tf last: with it the stack is whole."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in sorted(files.items(), key=lambda item: item[0] == ROOT):
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                write_atomically(path, text)

    def apply(self, tell: Tell, parallelism: int | None = None) -> dict[str, Any]:
        """Makes what the files say, and returns the outputs.

        Args:
            tell: told when it waits for another controller, and of each failure that is tried again.
            parallelism: how many things to make at once, if not as many as Terraform likes.

        Raises:
            TerraformError: with Terraform's own diagnostics.
            HostError: Terraform is not installed.
        """
        with self._turn(tell):
            self._init(tell)
            return self._run("apply", tell, parallelism).outputs

    def remove(self, environment_ids: Collection[str], tell: Tell) -> None:
        """Destroys environments of the stack; the stack goes with its last one. Safe to repeat.

        Raises:
            TerraformError: with Terraform's own diagnostics.
            HostError: Terraform is not installed.
        """
        with self._turn(tell):
            if not self.exists:
                self._delete()
            elif self._drop(environment_ids):
                self._init(tell)
                self._run("remove", tell)
            else:
                self._init(tell)
                self._run("destroy", tell)
                self._delete()

    def rest(self, tell: Tell) -> None:
        """Waits until nothing works here; a Terraform that outlived its controller, and may still create, is ended.

        Raises:
            TerraformError: it would not end.
        """
        with self._turn(tell):
            pass

    def forget(self, environment_ids: Collection[str]) -> None:
        """Drops environments that are gone from the stack, without Terraform; the stack goes with its last one."""
        with self._turn(lambda _: None):
            if not self._drop(environment_ids):
                self._delete()

    def discard(self) -> None:
        """Removes the directory, whatever its state says. Only once the cloud has confirmed that all is gone."""
        with self._turn(lambda _: None):
            self._delete()

    @contextlib.contextmanager
    def _turn(self, tell: Tell) -> Iterator[None]:
        """Waits for other controllers, then ends a Terraform that outlived its own. The lock is on the directory."""
        try:
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield  # there is nothing to take turns at
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(f"Another provisioner works on the stack {self._directory.name}; waiting for it")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            self._end_orphan()
            yield
        finally:
            os.close(descriptor)

    def _end_orphan(self) -> None:
        """Whoever has its turn knows that a Terraform at work here belongs to a controller that was killed."""
        orphan = is_locked(self._directory / LOCK)
        if orphan and not process.end(self._directory, self._patience_seconds):
            raise TerraformError(
                f"A Terraform that outlived its controller still works in {self._directory}.",
                hint="End the processes that keep its terraform.lock open, and try again.",
            )

    def _drop(self, environment_ids: Collection[str]) -> bool:
        """Takes environments out of the values; False, and the values as they were, if no other is left."""
        values = {name: value for name, value in self._values().items() if name not in environment_ids}
        if values:
            write_atomically(self._directory / VALUES, json.dumps({"environments": values}, indent=2))
        return bool(values)

    def _values(self) -> dict[str, Any]:
        try:
            return cast(dict[str, Any], json.loads((self._directory / VALUES).read_text())["environments"])
        except (OSError, ValueError, KeyError):
            return {}

    def _delete(self) -> None:
        if self._directory.exists():
            shutil.rmtree(self._directory)

    def _init(self, tell: Tell) -> None:
        """Initialises the root, unless that was done, to its end, for the same .tf files."""
        done = self._directory / INITIALISED / "provisioner-initialised"
        digest = self._digest()
        if not done.exists() or done.read_text() != digest:
            if not self._borrow(digest):
                self._run("init", tell)
            done.parent.mkdir(exist_ok=True)
            write_atomically(done, digest)
            self._lend(digest)
        errored = self._directory / ERRORED_STATE
        if errored.exists():
            tell("Handing in the state that Terraform could not write before")
            self._run("state push", tell)
            errored.unlink()

    def _borrow(self, digest: str) -> bool:
        """Takes over what init made of the same files in another stack: it reads the provider's 600 MB each time."""
        lent = self._lent / digest
        links = [path for path in lent.rglob("*") if path.is_symlink()]
        if not lent.is_dir() or not all(link.exists() for link in links):
            return False
        shutil.rmtree(self._directory / INITIALISED, ignore_errors=True)
        shutil.copytree(lent / INITIALISED, self._directory / INITIALISED, symlinks=True)
        if (lent / LOCK_FILE).exists():
            shutil.copyfile(lent / LOCK_FILE, self._directory / LOCK_FILE)
        return True

    def _lend(self, digest: str) -> None:
        lent = self._lent / digest
        # What names a backend is this stack's own. A provider that was copied, not linked, would be copied each time.
        copied = any(p.stat().st_size > LENT_BYTES for p in (self._directory / INITIALISED).rglob("*") if p.is_file())
        if lent.exists() or copied or list(self._directory.glob("backend.tf*")):
            return
        lent.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=lent.parent, prefix=".") as temporary:
            whole = Path(temporary) / "whole"
            shutil.copytree(self._directory / INITIALISED, whole / INITIALISED, symlinks=True)
            if (self._directory / LOCK_FILE).exists():
                shutil.copyfile(self._directory / LOCK_FILE, whole / LOCK_FILE)
            with contextlib.suppress(OSError):  # another controller was faster
                whole.rename(lent)

    @property
    def _lent(self) -> Path:
        return self._directory.parent / ".initialised"

    def _digest(self) -> str:
        files = sorted(self._directory.glob("*.tf")) + sorted(self._directory.glob("backend.tf.json"))
        files += sorted((self._directory / "modules").glob("*/*.tf"))
        hashes = [
            f"{path.relative_to(self._directory)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files
        ]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def _run(self, command: str, tell: Tell, parallelism: int | None = None) -> _Transcript:
        for pause_seconds in (*RETRY_SECONDS, None):
            transcript = _Transcript()
            code = process.run(
                self._directory, command, transcript.take, self._patience_seconds, parallelism, self._check
            )
            if code == 0:
                return transcript
            reason = transcript.passing
            if reason is None or pause_seconds is None:
                raise transcript.error(command, code)
            tell(f"terraform {command} failed: {reason}; trying again")
            time.sleep(pause_seconds)
        raise AssertionError("the last attempt returns or raises")


class _Transcript:
    """What of one run is worth keeping: outputs, errors and the last lines. The log has all of it."""

    def __init__(self) -> None:
        self.outputs: dict[str, Any] = {}
        self._errors: list[dict[str, Any]] = []
        self._last: deque[str] = deque(maxlen=DETAIL_LINES)

    def take(self, message: Message) -> None:
        """Keeps what matters of a message."""
        self._last.append(str(message.get("@message", "")))
        if message.get("type") == "outputs":
            self.outputs = {name: output.get("value") for name, output in message["outputs"].items()}
        diagnostic = message.get("diagnostic") or {}
        if diagnostic.get("severity") == "error":
            self._errors.append(diagnostic)

    @property
    def passing(self) -> str | None:
        """Why it is worth another attempt, or None."""
        said = [f"{error.get('summary', '')} {error.get('detail', '')}" for error in self._errors] or list(self._last)
        text = "\n".join(said).lower()
        return next((reason for pattern, reason in RETRYABLE if pattern in text), None)

    @property
    def _environments(self) -> frozenset[str]:
        addresses = [str(error.get("address", "")) for error in self._errors]
        return frozenset(found[1] for address in addresses if (found := _ENVIRONMENT.match(address)))

    def error(self, command: str, code: int) -> TerraformError:
        """One screen: what Terraform calls it, and the last lines of what it, or a provisioner of it, printed."""
        whole = dict.fromkeys(str(error.get("summary", "")) for error in self._errors)
        summaries = dict.fromkeys(summary[:200] for summary in whole)
        lines = [line for error in self._errors for line in str(error.get("detail", "")).splitlines()]
        shown = (lines if self._errors else list(self._last))[-DETAIL_LINES:]
        said = "\n".join([*whole, *lines])
        if STATE_LOCKED in said.lower():
            return TerraformError(
                f"terraform {command} did nothing: another controller works on this stack.",
                hint="Try again when it is done. If it was killed, `terraform force-unlock` in the stack's directory.",
                details="\n".join(line[:LINE_CHARACTERS] for line in shown),
                said=said,
            )
        return TerraformError(
            f"terraform {command} failed: {'; '.join(summaries) or f'exit code {code}'}.",
            details="\n".join(line[:LINE_CHARACTERS] for line in shown),
            environments=self._environments,
            said=said,
        )
