"""The aws cloud: EC2 in one region, put together from its parts."""

from __future__ import annotations

from provisioner.base.config import Settings
from provisioner.base.errors import ProvisionerError
from provisioner.base.models import Environment
from provisioner.clouds.aws import rights, schedules
from provisioner.clouds.aws.account import LOCKFILE_TERRAFORM, Account
from provisioner.clouds.aws.api import rights_hint
from provisioner.clouds.aws.cleanup import AwsCleanUp
from provisioner.clouds.aws.images import AwsImages
from provisioner.clouds.aws.isolation import AwsIsolation
from provisioner.clouds.aws.machines import AwsMachines
from provisioner.clouds.aws.network import BLOCKED_HINT, Networks, blocked_access
from provisioner.clouds.aws.placement import AwsPlacement
from provisioner.clouds.aws.stacks import AwsStacks, AwsVariables
from provisioner.clouds.aws.vcpu_quota import MARKETS, STANDARD
from provisioner.clouds.cloud import Cloud
from provisioner.store.home import Home
from provisioner.store.images import ImageStore


class AwsCloud(AwsPlacement, AwsImages, AwsStacks, AwsMachines, AwsIsolation, AwsCleanUp, Cloud):
    """EC2 in one region, with other regions to fall back to.

    Args:
        home: where records and images' descriptions live.
        settings: the operator's settings.
        regions: the first is used, the others where it lacks capacity; empty for the settings' or boto3's own.
        profile: of the AWS configuration.
        spot: whether to try spot instances first.
        state: `s3://bucket/prefix` for Terraform's state, or empty for local files.
    """

    name = "aws"
    module_variables = AwsVariables

    def __init__(
        self,
        home: Home,
        settings: Settings,
        regions: tuple[str, ...] = (),
        profile: str | None = None,
        *,
        spot: bool = False,
        state: str | None = None,
    ) -> None:
        self.account = Account(home, settings, regions[0] if regions else None, profile, state)
        self.region = self.account.region
        self.other_regions = regions[1:]
        self.spot = spot
        self.egress_gb = settings.egress_gb
        self.networks = Networks(self.account.api, self.account.home.identity)
        self.store = ImageStore(home)
        self.regions_with_schedules = set()
        self.assigned_subnets = set()
        self.repeated = set()
        if self.account.state:
            self.least_terraform = LOCKFILE_TERRAFORM

    def problems(self) -> list[tuple[str, str]]:
        """Lists missing credentials or rights, and what an administrator has not set up."""
        problems = []
        try:
            identity = self.account.identity
            if refused := rights.refused(self.account.api, self.region):
                hint = rights_hint(" ".join(refused.values()))
                problems.append((f"{identity.arn} lacks rights: {', '.join(refused)}", hint))
            if blocked := blocked_access(self.account.api, self.region):
                problems.append((blocked, BLOCKED_HINT))
            schedules.require_role(self.account.api, identity.account)
            self.sent_bytes(self.region, {})
        except ProvisionerError as error:
            problems.append((error.message, error.hint or ""))
        return problems

    def notes(self) -> list[str]:
        """Says where machines start, and how old the prices are."""
        try:
            controllers = ", ".join(sorted(self.account.controllers))
            prices = sorted({(price.as_of, price.source) for price in self.catalogue.prices.values()}, reverse=True)
            sources = "; ".join(f"{source} ({as_of})" for as_of, source in prices) or "none known for this region"
            rooms = {market: self.quotas.room(STANDARD, market) for market in MARKETS}
            known = [f"{room.quota} {market}, {room.used} in use" for market, room in rooms.items() if room]
            return [
                f"Account {self.account.identity.account}, region {self.region}; machines let in {controllers}.",
                f"Prices: {sources}.",
                *(["EC2 says that the account is on the free plan: only its types are chosen."] * self.is_on_free_plan),
                *([f"Quota of vCPUs in {self.region}, standard instances: {'; '.join(known)}."] if known else []),
            ]
        except ProvisionerError as error:
            return [error.message]

    def missing_rights(self, environment: Environment) -> list[str]:
        """Asks EC2 for dry runs."""
        return rights.refused_on(self.account.api, environment.placement["region"], environment.id)

    def fallback(self) -> AwsCloud | None:
        """Returns the same cloud in the next region."""
        if not self.other_regions:
            return None
        account = self.account
        return AwsCloud(
            account.home, account.settings, self.other_regions, account.profile, spot=self.spot, state=account.state
        )
