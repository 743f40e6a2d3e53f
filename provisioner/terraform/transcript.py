"""Reads what a run of Terraform says: its outputs, whether a failure passes by itself, and the error to raise."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

from provisioner.errors import TerraformError
from provisioner.printable import beginning
from provisioner.progress import NOTE_OF_A_PROGRAM
from provisioner.terraform.process import OPENTOFU, TERRAFORM, Message

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
