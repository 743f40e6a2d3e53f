"""The command `batch schema`."""

from __future__ import annotations

import json

from provisioner.batch.suite import schema as suite_schema
from provisioner.cli.output import Result


def main() -> Result:
    """Returns the JSON Schema of suite files."""
    return Result(suite_schema(), json.dumps(suite_schema(), indent=2))
