"""What one command may spend, and under which names its launches are counted. Reads and writes nothing."""

from __future__ import annotations

import secrets
from datetime import datetime
from decimal import Decimal

from pydantic import Field

from provisioner.config import Settings
from provisioner.costs.ledger import Limit
from provisioner.costs.prices import micro_usd
from provisioner.models import Record


def _new_command() -> str:
    return secrets.token_hex(8)


class Spending(Record):
    """The names and limits of a command's launches.

    Args:
        command: this command's own id.
        batch: empty for none.
        budget: US dollars for all launches of this command (--budget); None for no such limit.
        month, projects: the standing budgets, in US dollars.
    """

    command: str = Field(default_factory=_new_command)
    project: str = "default"
    batch: str = ""
    budget: Decimal | None = None
    month: Decimal | None = None
    projects: dict[str, Decimal] = Field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, budget: Decimal | None = None) -> Spending:
        """By the operator's settings."""
        standing = settings.budget
        return cls(project=settings.project, budget=budget, month=standing.month, projects=dict(standing.projects))

    def limits(self, launched_at: datetime) -> list[Limit]:
        """All that a launch at this time has to fit."""
        month = launched_at.strftime("%Y-%m")
        sums = [
            ("command", self.command, self.budget, "--budget"),
            ("project", self.project, self.projects.get(self.project), f"the budget of the project {self.project}"),
            ("month", month, self.month, f"the budget of {month}"),
        ]
        return [
            Limit.model_validate({"scope": scope, "of": of, "micro_usd": micro_usd(usd), "name": name})
            for scope, of, usd, name in sums
            if usd is not None
        ]
