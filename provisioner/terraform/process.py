"""Finds Terraform (or OpenTofu), starts it, reads its messages and ends it. The only importer of python_terraform.

Terraform runs in its own session, so that a Ctrl-C at the terminal reaches only the controller. It writes to a file
and not to a pipe, so that it can finish its work even if the controller is killed. It inherits the stack's lock and
passes it on to the programs that its provisioners start: the lock is released only after all of them have ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from python_terraform import IsFlagged, Terraform

from provisioner.base import child_environment, strict_json
from provisioner.base.errors import HostError, TerraformError
from provisioner.base.printable import beginning
from provisioner.base.progress import NOTE_OF_A_PROGRAM
from provisioner.base.signals import no_check
from provisioner.store.files import holders, is_locked

LOCK = "terraform.lock"
LOG = "terraform.log"
TERMINATE_SECONDS = 10.0
KILL_SECONDS = 30.0  # what is killed is soon gone, but on a busy host its lock may take a while to be free
POLL_SECONDS = 0.02

Message = dict[str, Any]
Take = Callable[[Message], None]
CloudVariables = Callable[[Mapping[str, str]], Mapping[str, str]]
Command = Literal[
    "init",  # of the configuration alone
    "init backend",  # installs nothing that the configuration does not name
    "apply",  # does not refresh
    "refresh and apply",  # refreshes first
    "remove",  # an apply that only removes; does not refresh
    "destroy",  # does not refresh
    "state push",  # writes errored.tfstate to the backend
    "state rm",  # forgets what the operands name
]

_SPOKEN: dict[str, object] = {"no_color": IsFlagged, "input": False, "json": IsFlagged}
_APPLY: dict[str, object] = {**_SPOKEN, "auto_approve": True}
# Of each command, the words for Terraform, and the options that python-terraform writes after them.
ARGUMENTS: dict[Command, tuple[str, dict[str, object]]] = {
    "init": ("init", {**_SPOKEN, "backend": False}),
    "init backend": ("init", {**_SPOKEN, "lockfile": "readonly"}),
    "apply": ("apply", {**_APPLY, "refresh": False}),
    "refresh and apply": ("apply", _APPLY),
    "remove": ("apply", {**_APPLY, "refresh": False}),
    "destroy": ("destroy", {**_SPOKEN, "auto_approve": IsFlagged, "refresh": False}),
    "state push": ("state push errored.tfstate", {}),
    "state rm": ("state rm", {}),
}


def no_variables(_ours: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables of a cloud whose provider reads none."""
    return {}


def run(
    directory: Path,
    command: Command,
    take: Take,
    patience_seconds: float,
    parallelism: int | None = None,
    check: Callable[[], None] = no_check,
    cloud_variables: CloudVariables = no_variables,
    operands: Sequence[str] = (),
) -> int:
    """Runs one Terraform command in a root and returns its exit code.

    Args:
        directory: the root. Terraform's output is appended to its terraform.log.
        command: a key of ARGUMENTS.
        take: receives each message of Terraform's -json stream; a line that is not JSON arrives as {"@message": line}.
        patience_seconds: how long Terraform may take to finish once this thread is interrupted.
        parallelism: how many resources an apply creates at once; None for Terraform's default.
        check: called regularly; an exception from it interrupts Terraform.
        cloud_variables: returns the environment variables that only this root's cloud needs, from ours.
        operands: what follows the command's options.

    Raises:
        KeyError: there is no such command.
        HostError: neither Terraform nor OpenTofu is installed, or the cloud's variables cannot be had.
        TerraformError: another process works on the root.
    """
    words, options = ARGUMENTS[command]
    program = terraform_program(os.environ)
    if program is None:
        [(problem, remedy)] = problems()
        raise HostError(problem, hint=remedy)
    options = {**options, "parallelism": parallelism}
    argv = _CommandLine(terraform_bin_path=program).generate_cmd_string(words, *operands, **options)
    environment = terraform_environment(os.environ, cloud_variables(os.environ))
    processes: list[subprocess.Popen[bytes]] = []
    with (directory / LOG).open("ab") as log, (directory / LOG).open("rb") as reader:
        reader.seek(0, os.SEEK_END)
        try:
            # Python handles signals in its main thread. So none comes between the start of Terraform's process and the
            # entry in this list: leaving the block waits for both.
            with ThreadPoolExecutor(1) as starter:
                starter.submit(lambda: processes.append(_start(argv, environment, directory, log))).result()
            return _follow(processes[0], reader, take, check)
        except BaseException:
            for process in processes:
                end(directory, patience_seconds, process)
            raise


def end(directory: Path, patience_seconds: float, child: subprocess.Popen[bytes] | None = None) -> bool:
    """Ends the Terraform that works in a root, whichever controller started it, and the processes that it started.

    SIGINT comes first and lets Terraform finish its current step and write its state. SIGKILL, the last resort, loses
    track of the resources that it was creating.

    Args:
        directory: the root.
        patience_seconds: how long Terraform may take after SIGINT.
        child: the process, if this process started it.

    Returns:
        whether all of them have ended.
    """

    def ended() -> bool:
        return (child is None or child.poll() is not None) and not is_locked(directory / LOCK)

    for number, seconds in (
        (signal.SIGINT, patience_seconds),
        (signal.SIGTERM, TERMINATE_SECONDS),
        (signal.SIGKILL, KILL_SECONDS),
    ):
        for pid in holders(directory / LOCK):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # Only Terraform leads a session. It interrupts the processes that it started.
                if number != signal.SIGINT or os.getsid(pid) == pid:
                    os.kill(pid, number)
        deadline = time.monotonic() + seconds
        while not ended():
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        else:
            return True
    return False


def terraform_environment(ours: Mapping[str, str], clouds: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment variables for Terraform's processes. Reads no file, but checks whether one exists.

    Args:
        ours: the controller's environment variables.
        clouds: those that only this root's cloud needs.
    """
    theirs = child_environment.for_terraform(ours, clouds or {})
    if not os.access(theirs.get("TF_CLI_CONFIG_FILE", os.devnull), os.R_OK):
        del theirs["TF_CLI_CONFIG_FILE"]
    package = str(Path(__file__).parents[2])
    theirs["PYTHONPATH"] = os.pathsep.join(filter(None, [package, ours.get("PYTHONPATH")]))
    # Less frequent garbage collection: reading the provider's schema takes a third less CPU and a tenth more memory.
    theirs.setdefault("GOGC", "400")
    return theirs | {
        "TF_IN_AUTOMATION": "1",
        "CHECKPOINT_DISABLE": "1",
        "PROVISIONER_PYTHON": sys.executable,
    }


class _CommandLine(Terraform):  # type: ignore[misc]  # python-terraform is untyped
    """Uses python-terraform for the command line only: it cannot start a process with a session, lock and log."""

    def read_state_file(self, file_path: str | None = None) -> None:
        """Does nothing: only Terraform reads its state."""


def _start(
    argv: Sequence[str], environment: Mapping[str, str], directory: Path, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    # Close our copy of the lock at once, so that only Terraform and its children keep it.
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TerraformError(
                f"Another {product_that_runs().name} works in {directory}.", hint="Try again when it is done."
            ) from None
        return subprocess.Popen(
            argv,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock.fileno()],
        )


def _follow(process: subprocess.Popen[bytes], reader: IO[bytes], take: Take, check: Callable[[], None]) -> int:
    rest = b""
    while True:
        check()
        code = process.poll()
        *lines, rest = (rest + reader.read()).split(b"\n")
        for line in lines:
            take(_parse(line))
        if code is not None:
            if rest:
                take(_parse(rest))
            return code
        time.sleep(POLL_SECONDS)


def _parse(line: bytes) -> Message:
    with contextlib.suppress(ValueError):
        parsed = strict_json.parse(line)
        if isinstance(parsed, dict):
            return parsed
    return {"@message": line.decode(errors="replace")}


VERSION_SECONDS = 30.0
LEAST = (1, 9)
# 1.10 knows `use_lockfile` and the lock file of Terraform; in 1.10.6, a variable whose validation refers to another one
# no longer disturbs `destroy` (OpenTofu's changelogs of 1.10 and 1.11, #3131).
LEAST_OPENTOFU = (1, 10, 6)
TERRAFORM_HINT = "scripts/install-terraform, or https://developer.hashicorp.com/terraform/install"


class Product(NamedTuple):
    """One of the two programs that can run a stack.

    Args:
        name: what it is called.
        command: how it is started.
        registry: the host of the providers that a configuration names without one.
        hint: where to get it.
    """

    name: str
    command: str
    registry: str
    hint: str


TERRAFORM = Product("Terraform", "terraform", "registry.terraform.io", TERRAFORM_HINT)
OPENTOFU = Product("OpenTofu", "tofu", "registry.opentofu.org", "https://opentofu.org/docs/intro/install/")


def problems(least: tuple[int, int] = LEAST) -> list[tuple[str, str]]:
    """Returns the missing programs as (problem, remedy) pairs.

    Args:
        least: the oldest version of Terraform with which the cloud works.
    """
    if program := terraform_program(os.environ):
        product, version = _version(program)
        needed = LEAST_OPENTOFU if product is OPENTOFU else least
        if version and tuple(map(int, re.findall(r"\d+", version)))[: len(needed)] < needed:
            oldest = ".".join(map(str, needed))
            return [(f"{product.name} {version} is too old: {oldest} or newer is needed here.", product.hint)]
        return []
    if named := os.environ.get("PROVISIONER_TERRAFORM"):
        return [(f"PROVISIONER_TERRAFORM names {named}, which is not a program.", "Correct it, or unset it.")]
    return [("Neither Terraform nor OpenTofu is installed.", TERRAFORM_HINT)]


def notes() -> list[str]:
    """Returns what the operator should know: that OpenTofu runs, if it does."""
    program = terraform_program(os.environ)
    if program is None or product_of(program) is not OPENTOFU:
        return []
    return [f"OpenTofu {_version(program)[1]}".rstrip() + f" runs in place of Terraform: {program}"]


def terraform_program(ours: Mapping[str, str]) -> str | None:
    """Returns the program's path: PROVISIONER_TERRAFORM, or else `terraform`, or else `tofu` on PATH; None without one.

    Args:
        ours: the controller's environment variables.
    """
    named = ours.get("PROVISIONER_TERRAFORM")
    names = [named] if named else [TERRAFORM.command, OPENTOFU.command]
    found = (shutil.which(name, path=ours.get("PATH")) for name in names)
    return next(filter(None, found), None)


def product_of(program: str) -> Product:
    """Returns what a program is, judged by its name and, if it is a link, by that of its target. Starts nothing."""
    path = Path(program)
    return OPENTOFU if any("tofu" in name for name in (path.name, path.resolve().name)) else TERRAFORM


def product_that_runs() -> Product:
    """Returns what the next run starts. Starts nothing."""
    return product_of(terraform_program(os.environ) or TERRAFORM.command)


def _version(program: str) -> tuple[Product, str]:
    """Asks a program what it is and for its version, which is empty if it does not say."""
    try:
        said = subprocess.run(
            [program, "version"],
            env=child_environment.for_terraform(os.environ, {}) | {"CHECKPOINT_DISABLE": "1"},
            capture_output=True,
            timeout=VERSION_SECONDS,
            check=True,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        said = ""
    match = re.match(r"(Terraform|OpenTofu) v(\d[\w.+-]*)", said)
    if match is None:
        return product_of(program), ""
    return OPENTOFU if match[1] == OPENTOFU.name else TERRAFORM, match[2]


THROTTLED = "the cloud throttles requests"
SESSION_ENDED = "the session of the credentials has ended"
REFUSED = "the cloud refuses it: a right is missing, or the cloud does not show everywhere yet what is new or gone"
# Temporary errors: (text in Terraform's message, explanation for the operator).
RETRYABLE = (
    ("requestlimitexceeded", THROTTLED),
    ("throttling", THROTTLED),
    # Each attempt gets the credentials of that moment (EC2's code, and that of the other services).
    ("requestexpired", SESSION_ENDED),
    ("expiredtoken", SESSION_ENDED),
    ("invalidgroup.notfound", "the cloud does not show a new security group everywhere yet"),
    # The provider reads what it has created, and does not wait for all kinds (terraform-provider-aws, issue 44835).
    ("couldn't find resource", "the cloud does not show a new resource everywhere yet"),
    # Rights that depend on a tag are refused where EC2 does not show the new resource yet, as in InvalidGroup.NotFound.
    ("unauthorizedoperation", REFUSED),
    ("dependencyviolation", "a resource that is still being removed depends on one to be destroyed"),
    # The provider repeats a request that got no answer. The next attempt creates the whole ACL again.
    ("networkaclentryalreadyexists", "a reply from the cloud was lost"),
    ("text file busy", "another process is installing the provider"),
    ("timeout while waiting for plugin to start", "the host is too busy to start the provider in time"),
    ("connection reset by peer", "the network dropped a connection"),
)
DETAIL_LINES = 20
LINE_CHARACTERS = 300
VERSION_CHARACTERS = 50
STATE_LOCKED = "error acquiring the state lock"
# Terraform's words for a provider that is in the state alone: of init, and of the other commands after it.
FOREIGN_PROVIDER = ("provider dependency changes detected", "unavailable provider")
# What the provider's AWS client was doing, as in `operation error EC2: RunInstances, https response error …`.
_OPERATION = re.compile(r"operation error ([A-Za-z0-9]{1,40}): ([A-Za-z]{1,60}), ")
_ENVIRONMENT = re.compile(r'module\.environment\["([^"]+)"\]')

Tell = Callable[[str], None]


class Transcript:
    """Keeps a run's outputs, errors and last lines. The log has everything.

    Args:
        tell: receives the notes of the programs that Terraform runs, each once.
        tool: the command that runs, `terraform` or `tofu`.

    Attributes:
        outputs: the stack's, after an apply.
        version: of the program; empty until it has said it.
    """

    def __init__(self, tell: Tell, tool: str) -> None:
        self._tell = tell
        self._tool = tool
        self._told: set[str] = set()
        self.outputs: dict[str, Any] = {}
        self.version = ""
        self._errors: list[dict[str, Any]] = []
        self._last: deque[str] = deque(maxlen=DETAIL_LINES)

    def add(self, message: Message) -> None:
        """Stores the outputs, the version or the error of a message, and its text."""
        self._last.append(str(message.get("@message", "")))
        if message.get("type") == "version":
            self.version = str(message.get("terraform") or message.get("tofu") or "")[:VERSION_CHARACTERS]
        if message.get("type") == "outputs":
            self.outputs = {name: output.get("value") for name, output in message["outputs"].items()}
        if message.get("type") == "provision_progress":
            line = str(message["hook"].get("output", ""))
            note = beginning(line.removeprefix(NOTE_OF_A_PROGRAM), LINE_CHARACTERS)
            if note != line and note not in self._told:
                self._told.add(note)
                self._tell(note)
        diagnostic = message.get("diagnostic") or {}
        if diagnostic.get("severity") == "error":
            self._errors.append(diagnostic)

    @property
    def passing(self) -> str | None:
        """The explanation of a temporary error, or None if another attempt is pointless."""
        said = [f"{error.get('summary', '')} {error.get('detail', '')}" for error in self._errors] or list(self._last)
        text = "\n".join(said)
        reason = next((reason for pattern, reason in RETRYABLE if pattern in text.lower()), None)
        if reason == REFUSED and (refused := _OPERATION.search(text)):
            return reason.replace("it", f"{refused[1].lower()}:{refused[2]}", 1)
        return reason

    def error(self, command: str, code: int) -> TerraformError:
        """Returns the error to raise: Terraform's summaries, and as details at most one screen of its last lines."""
        whole = dict.fromkeys(str(error.get("summary", "")) for error in self._errors)
        summaries = dict.fromkeys(summary[:200] for summary in whole)
        lines = [line for error in self._errors for line in str(error.get("detail", "")).splitlines()]
        shown = lines if self._errors else list(self._last)
        said = "\n".join([*whole, *lines])
        if STATE_LOCKED in said.lower():
            return TerraformError(
                f"{self._tool} {command} did nothing: another controller is working on this stack.",
                hint="Try again later. If it was killed, or its credentials ended, run "
                f"`{self._tool} force-unlock` in the stack's directory.",
                details=_screen(shown),
                said=said,
            )
        if any(words in said.lower() for words in FOREIGN_PROVIDER):
            # Terraform's advice would install it.
            names = [line for line in (*self._last, *lines) if "lockfile" not in line]
            by_opentofu = self._tool == TERRAFORM.command and OPENTOFU.registry in _screen(names)
            switch = f"If OpenTofu wrote it, set PROVISIONER_TERRAFORM={OPENTOFU.command}. " if by_opentofu else ""
            return TerraformError(
                "The state names a provider that this stack does not use. It was not started, and nothing was changed.",
                hint=f"{switch}Find out who changed this terraform state, and restore an earlier version of it. Do not "
                f"run `{self._tool} init` by hand: it would install that provider.",
                details=_screen(names),
                said=said,
            )
        addresses = [str(error.get("address", "")) for error in self._errors]
        return TerraformError(
            f"{self._tool} {command} failed: {'; '.join(summaries) or f'exit code {code}'}.",
            details=_screen(shown),
            environments=frozenset(match[1] for address in addresses if (match := _ENVIRONMENT.match(address))),
            said=said,
            throttled=self.passing == THROTTLED,
        )


def _screen(lines: list[str]) -> str:
    return "\n".join(beginning(line, LINE_CHARACTERS) for line in lines[-DETAIL_LINES:])
