"""Names what Inspect finds in this package: its entry-point group `inspect_ai` loads this module."""

from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.inspect.task_family import replay, task_family

__all__ = ["ProvisionerSandbox", "replay", "task_family"]
