"""Defines the budgets that a command's launches must fit, and the names that they count under. Pure."""

from __future__ import annotations

import secrets
from datetime import datetime
from decimal import Decimal

from pydantic import Field

from provisioner.config import Settings
from provisioner.costs.ledger import Budget
from provisioner.costs.prices import micro_usd
from provisioner.models import Record


def _new_command() -> str:
    return secrets.token_hex(8)


class Spending(Record):
    """The names and budgets of a command's launches.

    Args:
        command: the command's own id.
        project: the project that the launches count under.
        batch: the batch that they belong to; empty for none.
        budget: US dollars for all launches of this command (--budget); None for no such budget.
        month: US dollars for all launches of a calendar month (UTC); None for no such budget.
        projects: US dollars for all launches of a project, by its name.
    """

    command: str = Field(default_factory=_new_command)
    project: str = "default"
    batch: str = ""
    budget: Decimal | None = None
    month: Decimal | None = None
    projects: dict[str, Decimal] = Field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, budget: Decimal | None = None) -> Spending:
        """Returns the names and budgets that the operator's settings give."""
        standing = settings.budget
        return cls(project=settings.project, budget=budget, month=standing.month, projects=dict(standing.projects))

    def budgets(self, launched_at: datetime) -> list[Budget]:
        """Returns all budgets that a launch at this time must fit."""
        month = launched_at.strftime("%Y-%m")
        sums = [
            ("command", self.command, self.budget, "--budget"),
            ("project", self.project, self.projects.get(self.project), f"the budget of the project {self.project}"),
            ("month", month, self.month, f"the budget of {month}"),
        ]
        return [
            Budget.model_validate({"scope": scope, "of": of, "micro_usd": micro_usd(usd), "name": name})
            for scope, of, usd, name in sums
            if usd is not None
        ]
