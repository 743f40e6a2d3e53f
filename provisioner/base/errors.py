"""Defines all errors of provisioner, each with the CLI's exit code.

The message tells the operator what failed, why, and what to do next.

ProvisionerError                 1
├── UsageError                   2   bad input; no environment was created
│   ├── TaskFamilyError              the family directory, its manifest or its build steps
│   ├── MissingVariablesError        required environment variables are not set
│   └── UnavailableError             a machine that this cloud cannot provide
│       └── ShortageError            machines that do not fit now, beside what runs
├── HostError                    3   this controller lacks a program, memory or disk
├── ImageBuildError              4   a build step or install() failed
├── InfrastructureError          5   provisioner's side failed: Terraform, QEMU, SSH, the cloud
│   ├── ThrottledError               the cloud asks for fewer requests
│   ├── TerraformError
│   ├── CapacityError                the cloud has no capacity
│   ├── MachineLostError             a machine does not answer, or ended on its own
│   ├── LivenessLostError            other workers consider this one dead
│   ├── DamagedRecordError           an environment's record cannot be read
│   └── StillThereError              some of an environment's resources outlived its destroy
├── IsolationError               6   a probe shows more, or less, than the permission promises
├── TaskError                    7   the family's own code failed, hung or returned an invalid result
│   ├── CommandTimeoutError          a command in a machine did not end in time
│   │   └── NotStartedError              the machine did not even start it in time
│   ├── SubmissionError              the agent's submission cannot be read
│   └── AgentError                   the agent ended its machine, or left it unreachable or unable to score
├── BudgetError                  8   a launch does not fit a budget; it was not made
└── Interrupted                  130 Ctrl-C (143 SIGTERM, 129 SIGHUP), after cleaning up
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

# What the operator chooses: the command line has options for it, other front ends keys and arguments.
Setting = Literal["budget", "cloud", "env_file", "region", "spot", "ttl"]


class ProvisionerError(Exception):
    """The base of all errors of provisioner.

    Args:
        message: what failed and why, for the operator.
        hint: what to do next, or None.
        details: output of the failed program, shown below the message, or None.
        settings: what of the operator's choices it is about. The front end says after the hint how each is given.

    Attributes:
        phase: the phase of an environment's life, or the part of a build, in which it was raised; empty outside.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        details: str | None = None,
        settings: tuple[Setting, ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details
        self.settings = settings
        self.phase = ""


@contextlib.contextmanager
def raised_in(phase: str) -> Iterator[None]:
    """Sets the phase of an error that the body raises. An error that has a phase keeps it: that is the narrower one."""
    try:
        yield
    except ProvisionerError as error:
        error.phase = error.phase or phase
        raise


class UsageError(ProvisionerError):
    """Bad input. Raised before an environment is created, though perhaps after its image is built."""

    exit_code = 2


class TaskFamilyError(UsageError):
    """The family directory, its manifest, its build steps or its setup data is not valid."""


class MissingVariablesError(UsageError):
    """Required environment variables are not set.

    Args:
        names: the missing names; all of them appear in the message, sorted.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = sorted(names)
        super().__init__(
            "The following required environment variables are not set: " + ", ".join(self.names),
            hint="Write them as NAME=value lines into a file, and name it. docs/authoring/secrets.md says more.",
            settings=("env_file",),
        )


class UnavailableError(UsageError):
    """This cloud cannot provide a machine that the task asks for."""


class ShortageError(UnavailableError):
    """This cloud has no room for the machines beside what runs now."""


class HostError(ProvisionerError):
    """The controller lacks a program, memory, disk space or a permission."""

    exit_code = 3


class ImageBuildError(ProvisionerError):
    """A build step or install() failed."""

    exit_code = 4


class InfrastructureError(ProvisionerError):
    """Provisioner's side failed, not the task: Terraform, QEMU, SSH or the cloud."""

    exit_code = 5


class ThrottledError(InfrastructureError):
    """The cloud asks for fewer requests. What was asked stays unknown."""


class TerraformError(InfrastructureError):
    """Terraform ended with an error.

    Args:
        environments: the ids of the environments that it failed on, as far as Terraform names them.
        said: all of Terraform's diagnostics.
        throttled: whether the cloud asked for fewer requests to the end.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        details: str | None = None,
        environments: frozenset[str] = frozenset(),
        said: str = "",
        throttled: bool = False,
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.environments = environments
        self.said = said
        self.throttled = throttled


class CapacityError(InfrastructureError):
    """The cloud has no capacity for a machine, in any zone and of any machine type that may be used.

    Attributes:
        environments: the ids of the environments without a machine, if they are known.
    """

    environments: frozenset[str] = frozenset()


class MachineLostError(InfrastructureError):
    """A machine does not answer, or ended on its own.

    Args:
        cloud_words: what the cloud or the host says of a machine that it ended itself; empty if it says nothing.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, details: str | None = None, cloud_words: str = ""
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.cloud_words = cloud_words


class LivenessLostError(InfrastructureError):
    """This worker can no longer show that it lives: other workers consider it dead and take over its work."""


class DamagedRecordError(InfrastructureError):
    """An environment's record cannot be read: it is damaged, was changed by hand, or is of another version.

    Args:
        environment: the environment's id.
    """

    def __init__(self, message: str, *, environment: str, hint: str, details: str) -> None:
        super().__init__(message, hint=hint, details=details)
        self.environment = environment


class StillThereError(InfrastructureError):
    """Some of an environment's resources still exist after its destroy."""


class IsolationError(ProvisionerError):
    """A probe shows more, or less, than the task's permission promises."""

    exit_code = 6


class TaskError(ProvisionerError):
    """The family's own code failed, hung or returned a result that the Task Standard forbids."""

    exit_code = 7


class CommandTimeoutError(TaskError, TimeoutError):
    """A command in a machine did not end in time. What ran there decides that, so it is no infrastructure's failure."""


class NotStartedError(CommandTimeoutError):
    """A machine did not start a command in time: it is frozen, or its exec server does not answer."""


class SubmissionError(TaskError):
    """The agent's submission cannot be read."""


class AgentError(TaskError):
    """After an agent had begun, its machine was switched off from within, cannot be reached, or cannot score."""


class BudgetError(ProvisionerError):
    """A launch does not fit a budget. Raised before anything of it is created.

    Args:
        may_fit_later: whether it would fit if others, which have reserved their worst case, turned out to cost nothing.
    """

    exit_code = 8

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        settings: tuple[Setting, ...] = (),
        may_fit_later: bool = True,
    ) -> None:
        super().__init__(message, hint=hint, settings=settings)
        self.may_fit_later = may_fit_later


class Interrupted(ProvisionerError):
    """The operator or the system stopped the command; everything created has been removed or is still listed."""

    exit_code = 130


# The libraries that only an extra of this package installs.
_EXTRAS = {"boto3": "aws", "botocore": "aws", "dbos": "batch", "psycopg": "batch", "sqlalchemy": "batch"}


@contextlib.contextmanager
def extras_named() -> Iterator[None]:
    """Names the extra that an import within this context lacks.

    Raises:
        HostError: a library of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").split(".")[0]
        if library not in _EXTRAS:
            raise
        raise HostError(
            f"This part of provisioner needs the library {library}, which is not installed.",
            hint=f"Install the extra: pip install 'provisioner[{_EXTRAS[library]}]'",
        ) from error


FAMILIES_PAGE = "docs/reference/task-families.md"
Section = Literal["files", "manifest", "methods", "build-steps", "vmspec"]


@contextlib.contextmanager
def explained(section: Section) -> Iterator[None]:
    """Adds a hint that names the section of FAMILIES_PAGE to each TaskFamilyError of the body that has no hint."""
    try:
        yield
    except TaskFamilyError as error:
        error.hint = error.hint or f"{FAMILIES_PAGE}#{section} says what is allowed."
        raise
