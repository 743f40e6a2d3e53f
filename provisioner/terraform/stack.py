"""Manages a stack: one Terraform root and its state in one directory.

Terraform's exit code reports only how its process ended. Callers ask the cloud what exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from provisioner.base import strict_json
from provisioner.base.errors import HostError, TerraformError
from provisioner.base.signals import no_check
from provisioner.store.files import is_locked, read_end, write_atomically
from provisioner.terraform import process
from provisioner.terraform.process import LOCK, LOG, OPENTOFU, TERRAFORM, THROTTLED, Tell, Transcript, product_that_runs
from provisioner.terraform.render import VALUES

# Pauses before the second and the third attempt; there is no fourth.
RETRY_SECONDS = (1.0, 5.0)
# What a cloud throttles, it takes later. Its rate is shared with all other users of the account.
THROTTLED_SECONDS = (1.0, 5.0, 10.0, 20.0, 40.0)
CHECK_SECONDS = 0.5
PATIENCE_SECONDS = 120.0
LOG_LIMIT_BYTES = 1 << 20
ROOT = "main.tf"
INITIALISED = ".terraform"
# In it: the mark of a whole init, and what Terraform remembers of the backend. That waits aside during installations.
INSTALLED = "provisioner-installed"
BACKEND = "terraform.tfstate"
BACKEND_ASIDE = ".backend.tfstate"
LOCK_FILE = ".terraform.lock.hcl"
# Beside the stacks: what init has made for files that others of them have, too.
CACHE = ".initialised"
# In it, for each provider.
PROVIDER = re.compile(r'^provider "([^"/]+/[^"]{1,100})" \{\n\s+version\s+= "([^"]{1,50})"', re.MULTILINE)
# Files of `.terraform` that are worth copying are at most this large.
COPIED_BYTES = 1 << 20
# What Terraform says when it shall forget what is not in its state.
NOTHING_TO_FORGET = "no matching objects found"
# The state that Terraform could not write to its backend.
ERRORED_STATE = "errored.tfstate"


class Stack:
    """A Terraform root and its state.

    Any number of controllers may call its methods at once: each waits for its turn.

    Args:
        directory: the stack's directory; created by `write`.
        patience_seconds: how long an interrupted Terraform may take to finish its current step.
        check: called regularly while Terraform runs; an exception from it interrupts Terraform.
        cloud_variables: returns the environment variables that the cloud's provider and state backend read, from ours;
            asked before each command.
    """

    def __init__(
        self,
        directory: Path,
        patience_seconds: float = PATIENCE_SECONDS,
        check: Callable[[], None] = no_check,
        cloud_variables: process.CloudVariables = process.no_variables,
    ) -> None:
        self._directory = directory
        self._patience_seconds = patience_seconds
        self._check = check
        self._cloud_variables = cloud_variables
        self._version = ""

    @property
    def exists(self) -> bool:
        """Whether the stack's files have been written completely."""
        return (self._directory / ROOT).exists()

    @property
    def is_remote(self) -> bool:
        """Whether its state is in a backend that other controllers can read."""
        return any(self._directory.glob("backend.tf*"))

    def log_text(self) -> str:
        """Returns the last 1 MiB of Terraform's output in all runs. The log is removed with the stack."""
        return read_end(self._directory / LOG, LOG_LIMIT_BYTES).decode(errors="replace")

    def versions(self) -> dict[str, str]:
        """Returns the versions of the program that applied the stack last here, and of its providers."""
        found = {product_that_runs().name: self._version} if self._version else {}
        return found | {f"provider {name.partition('/')[2]}": version for name, version in self._providers()}

    def write(self, files: Mapping[str, str]) -> None:
        """Writes the root's files, each atomically, and main.tf last, which marks the stack as complete."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in sorted(files.items(), key=lambda item: item[0] == ROOT):
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.read_text() != text:
                write_atomically(path, text)

    def apply(self, tell: Tell, parallelism: int | None = None, *, refresh: bool = False) -> dict[str, Any]:
        """Creates the resources that the files describe and returns the outputs.

        Without a refresh, Terraform believes its state. A cloud may not show what the last apply has created seconds
        ago: a refresh would forget that, and it would be created twice. For the same reason, a repetition after a
        passing failure never refreshes.

        Args:
            tell: receives a line when it waits for another controller or repeats a failed attempt, and the notes of
                the programs that Terraform runs.
            parallelism: how many resources to create at once; None for Terraform's default.
            refresh: whether to ask the cloud first for what the state names, as another program may have removed some
                of it.

        Raises:
            TerraformError: with Terraform's own diagnostics.
            HostError: neither Terraform nor OpenTofu is installed.
        """
        with self._turn(tell):
            self._init(tell)
            transcript = self._run("refresh and apply" if refresh else "apply", tell, parallelism)
            self._version = transcript.version
            return transcript.outputs

    def release(self, environment_id: str, tell: Tell) -> None:
        """Removes an environment from Terraform's state. The next apply creates it anew.

        To be called once the cloud has removed it. Its values stay.

        Raises:
            TerraformError: with Terraform's own diagnostics.
            HostError: neither Terraform nor OpenTofu is installed.
        """
        with self._turn(tell):
            self._init(tell)
            try:
                self._run("state rm", tell, operands=[f'module.environment["{environment_id}"]'])
            except TerraformError as error:
                if NOTHING_TO_FORGET not in (error.details or "").lower():
                    raise

    def remove(self, environment_ids: Collection[str], tell: Tell) -> None:
        """Destroys environments of the stack. Removes the stack with its last environment. Safe to repeat.

        Raises:
            TerraformError: with Terraform's own diagnostics.
            HostError: neither Terraform nor OpenTofu is installed.
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

    def await_idle(self, tell: Tell) -> None:
        """Waits for other controllers and ends a Terraform that outlived its own, since it may still create resources.

        Raises:
            TerraformError: that Terraform did not end.
        """
        with self._turn(tell):
            pass

    def forget(self, environment_ids: Collection[str]) -> None:
        """Drops destroyed environments from the stack without Terraform. Removes the stack with its last one."""
        with self._turn(lambda _: None):
            if not self._drop(environment_ids):
                self._delete()

    def discard(self) -> None:
        """Removes the directory, whatever its state says. To be called once the cloud has confirmed the end."""
        with self._turn(lambda _: None):
            self._delete()

    @contextlib.contextmanager
    def _turn(self, tell: Tell) -> Iterator[None]:
        """Locks the directory, after other controllers, and ends a Terraform that outlived its own controller."""
        try:
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield  # without a directory there is nothing to lock
            return
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell(f"Waiting for another provisioner that works on the stack {self._directory.name}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Under the lock, the controller of a running Terraform can only have been killed.
            is_orphaned = is_locked(self._directory / LOCK)
            if is_orphaned and not process.end(self._directory, self._patience_seconds):
                raise TerraformError(
                    f"A process of Terraform or OpenTofu that outlived its controller still works in "
                    f"{self._directory}.",
                    hint="End the processes that have its terraform.lock open, and try again.",
                )
            yield
        finally:
            os.close(descriptor)

    def _drop(self, environment_ids: Collection[str]) -> bool:
        """Removes environments from the values. If none would remain, changes nothing and returns False.

        Raises:
            TerraformError: the file is damaged. As an empty one, it would have the whole stack destroyed.
        """
        path = self._directory / VALUES
        try:
            values = strict_json.load_file(dict[str, Any], path)["environments"]
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError) as error:
            raise TerraformError(
                f"{path} cannot be read: {type(error).__name__}.",
                hint="It is damaged or was changed by hand. `provisioner destroy` removes the machines without it.",
            ) from error
        kept = {name: value for name, value in values.items() if name not in environment_ids}
        if kept:
            write_atomically(path, json.dumps({"environments": kept}, indent=2))
        return bool(kept)

    def _delete(self) -> None:
        if self._directory.exists():
            shutil.rmtree(self._directory)

    def _init(self, tell: Tell) -> None:
        """Runs `terraform init`, unless it has succeeded before for the same .tf files.

        Raises:
            HostError: the stack belongs to the other program.
        """
        self._require_its_program()
        done = self._directory / INITIALISED / INSTALLED
        digest = self._digest()
        if not done.exists() or done.read_text() != digest:
            self._install(tell)
            if self.is_remote:
                self._run("init backend", tell)
            write_atomically(done, digest)
        errored = self._directory / ERRORED_STATE
        if errored.exists():
            tell("Writing the state that Terraform could not write to its backend before")
            self._run("state push", tell)
            errored.unlink()

    def _require_its_program(self) -> None:
        """Refuses a stack whose provider the other program has installed: its state names another registry."""
        ours = product_that_runs()
        [other] = {TERRAFORM, OPENTOFU} - {ours}
        if any(name.startswith(other.registry) for name, _ in self._providers()):
            raise HostError(
                f"{other.name} made the stack {self._directory.name}, and {ours.name} would run now: nothing was done.",
                hint=f"Have the same program run: PROVISIONER_TERRAFORM={other.command}.",
            )

    def _providers(self) -> list[tuple[str, str]]:
        """Returns the address of each installed provider, with its registry, and the version."""
        try:
            return PROVIDER.findall((self._directory / LOCK_FILE).read_text(errors="replace"))
        except OSError:  # a stack without providers has none
            return []

    def _install(self, tell: Tell) -> None:
        """Installs the providers that the configuration names, and no others.

        A state in a bucket is written by others. `init` installs every provider that a state names, and each of them
        is started with our credentials. So the backend, and with it the state, comes afterwards.
        """
        # With this file, init reads the state even if it is told to leave the backend alone.
        backend, aside = self._directory / INITIALISED / BACKEND, self._directory / BACKEND_ASIDE
        if backend.exists():
            backend.replace(aside)
        digest = self._digest(with_backend=False)
        if not self._copy_cached(digest):
            self._run("init", tell)
            backend.parent.mkdir(exist_ok=True)
            self._cache(digest)
        if aside.exists():  # by it, Terraform notices that a stack's state is elsewhere now
            aside.replace(backend)

    def _copy_cached(self, digest: str) -> bool:
        """Copies the result of init from a stack with the same files: init reads the provider's 600 MB each time."""
        cached = self._directory.parent / CACHE / digest
        links = [path for path in cached.rglob("*") if path.is_symlink()]
        if not cached.is_dir() or not all(link.exists() for link in links):
            return False
        shutil.rmtree(self._directory / INITIALISED, ignore_errors=True)
        shutil.copytree(cached / INITIALISED, self._directory / INITIALISED, symlinks=True)
        (self._directory / LOCK_FILE).unlink(missing_ok=True)
        if (cached / LOCK_FILE).exists():
            shutil.copyfile(cached / LOCK_FILE, self._directory / LOCK_FILE)
        return True

    def _cache(self, digest: str) -> None:
        cached = self._directory.parent / CACHE / digest
        # A provider that is copied, not linked, is too large to copy.
        copied = any(p.stat().st_size > COPIED_BYTES for p in (self._directory / INITIALISED).rglob("*") if p.is_file())
        if cached.exists() or copied:
            return
        cached.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".") as temporary:
            whole = Path(temporary) / "whole"
            shutil.copytree(self._directory / INITIALISED, whole / INITIALISED, symlinks=True)
            if (self._directory / LOCK_FILE).exists():
                shutil.copyfile(self._directory / LOCK_FILE, whole / LOCK_FILE)
            with contextlib.suppress(OSError):  # another controller was faster
                whole.rename(cached)

    def _digest(self, with_backend: bool = True) -> str:
        files = sorted(self._directory.glob("*.tf"))
        files += sorted(self._directory.glob("backend.tf.json")) if with_backend else []
        files += sorted((self._directory / "modules").glob("*/*.tf"))
        hashes = [
            f"{path.relative_to(self._directory)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files
        ]
        if product_that_runs() is OPENTOFU:  # which installs what Terraform does not find, from its own registry
            hashes.append(OPENTOFU.name)
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def _run(
        self, command: process.Command, tell: Tell, parallelism: int | None = None, operands: Sequence[str] = ()
    ) -> Transcript:
        product = product_that_runs()
        errored = self._directory / ERRORED_STATE
        was_written = not errored.exists()
        for attempt in itertools.count():
            transcript = Transcript(tell, product.command)
            code = process.run(
                self._directory,
                command,
                transcript.add,
                self._patience_seconds,
                parallelism,
                self._check,
                self._cloud_variables,
                operands,
            )
            if code == 0:
                return transcript
            if command == "refresh and apply":  # what it has created by now may not be shown yet
                command = "apply"
            reason = transcript.passing
            pauses = THROTTLED_SECONDS if reason == THROTTLED else RETRY_SECONDS
            # What the state does not name, another attempt would make a second time.
            is_behind = was_written and errored.exists()
            if reason is None or is_behind or attempt >= len(pauses):
                raise transcript.error(command, code)
            tell(f"{product.command} {command} failed: {reason}; trying again in {pauses[attempt]:.0f} s")
            end = time.monotonic() + pauses[attempt]
            while (left := end - time.monotonic()) > 0:
                self._check()
                time.sleep(min(left, CHECK_SECONDS))
        raise AssertionError("the last attempt returns or raises")
