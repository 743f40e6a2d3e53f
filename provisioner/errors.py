"""Every error of provisioner, each with the exit code that the CLI ends with.

The message is written for the operator: what failed, why, and what to do next.

ProvisionerError                 1
├── UsageError                   2   bad input; nothing was created
│   ├── TaskFamilyError              the family directory, its manifest or its build steps
│   ├── MissingVariablesError        required environment variables are not set
│   └── UnavailableError             a machine that this cloud cannot give
├── HostError                    3   this controller lacks a program, memory or disk
├── ImageBuildError              4   a build step or install() failed
├── InfrastructureError          5   ours broke: Terraform, QEMU, SSH, the cloud
│   ├── TerraformError
│   ├── CapacityError                the cloud has no machine to give
│   ├── MachineLostError             a machine does not answer or ended by itself
│   ├── PresenceLostError            other workers take this one for dead
│   └── StillThereError              something of an environment outlived its destroy
├── IsolationError               6   a probe shows more, or less, than the permission promises
├── TaskError                    7   the family's own code failed, hung or answered nonsense
│   └── SubmissionError              what the agent left cannot be read
├── BudgetError                  8   a launch does not fit a budget; it was not made
└── Interrupted                  130 Ctrl-C or SIGTERM, after cleaning up
"""

from __future__ import annotations


class ProvisionerError(Exception):
    """Base of all errors of ours.

    Args:
        message: what failed and why, in the operator's words.
        hint: what to do next, or None.
        details: output of the thing that failed, shown below the message, or None.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None, details: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details


class UsageError(ProvisionerError):
    """Bad input. Raised before anything is created."""

    exit_code = 2


class TaskFamilyError(UsageError):
    """The family directory, its manifest, its build steps or its setup data are not valid."""


class MissingVariablesError(UsageError):
    """Required environment variables are not set.

    Args:
        names: the missing names; all of them appear in the message, sorted.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = sorted(names)
        super().__init__(
            "The following required environment variables are not set: " + ", ".join(self.names),
            hint="Put them into a file of NAME=value lines and pass it as --env-file FILE.",
        )


class UnavailableError(UsageError):
    """A machine that the spec asks for and that this cloud cannot give."""


class HostError(ProvisionerError):
    """The controller lacks a program, memory, disk or right."""

    exit_code = 3


class ImageBuildError(ProvisionerError):
    """A build step or install() failed."""

    exit_code = 4


class InfrastructureError(ProvisionerError):
    """Ours broke, not the task: Terraform, QEMU, SSH or the cloud."""

    exit_code = 5


class TerraformError(InfrastructureError):
    """Terraform ended with an error.

    Args:
        environments: the ids of those that it failed on, where Terraform says so.
        said: all its diagnostics.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        details: str | None = None,
        environments: frozenset[str] = frozenset(),
        said: str = "",
    ) -> None:
        super().__init__(message, hint=hint, details=details)
        self.environments = environments
        self.said = said


class CapacityError(InfrastructureError):
    """The cloud has no machine that fits to give, in any zone and of any type that we may use.

    Attributes:
        environments: the ids of those that it has none for, where that is known.
    """

    environments: frozenset[str] = frozenset()


class MachineLostError(InfrastructureError):
    """A machine does not answer, or ended by itself."""


class PresenceLostError(InfrastructureError):
    """This worker's sign of life is lost: others take it for dead, and what it had begun over."""


class StillThereError(InfrastructureError):
    """Something of an environment is still there after its destroy."""


class IsolationError(ProvisionerError):
    """A probe shows more, or less, than the task's permission promises."""

    exit_code = 6


class TaskError(ProvisionerError):
    """The family's own code failed, hung or answered something that the Task Standard forbids."""

    exit_code = 7


class SubmissionError(TaskError):
    """What the agent left as its submission cannot be read."""


class BudgetError(ProvisionerError):
    """A launch does not fit a budget. Raised before anything of it is created."""

    exit_code = 8


class Interrupted(ProvisionerError):
    """The operator or the system asked us to stop; what was made has been removed or is listed."""

    exit_code = 130
