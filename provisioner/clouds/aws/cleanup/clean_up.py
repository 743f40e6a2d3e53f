"""Finds and removes whatever carries an environment's tag, in any region."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from botocore.exceptions import BotoCoreError, ClientError

from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import CLOSED_REGION, REFUSED, asking, code_of, tag
from provisioner.clouds.aws.cleanup import schedules, tagged_resources
from provisioner.clouds.defaults import CleanUp
from provisioner.clouds.findings import EnvironmentResources
from provisioner.errors import StillThereError
from provisioner.models import Environment

ROLE_TAG = "provisioner:role"
# Regions surveyed at once.
PARALLEL_SURVEYS = 8


class AwsCleanUp(CleanUp):
    """The tagged resources of one account."""

    account: Account

    def survey(self, regions: Sequence[str] | None) -> list[EnvironmentResources]:
        """Lists everything that carries our tags, region by region, or wherever these credentials may look."""
        surveyed = self.open_regions(lambda _: None) if regions is None else regions
        with ThreadPoolExecutor(max_workers=PARALLEL_SURVEYS) as pool:
            answers = pool.map(partial(tagged_resources.survey, self.account.api), surveyed)
            return [resources for answer in answers for resources in answer]

    def open_regions(self, tell: Callable[[str], None]) -> list[str]:
        """Lists the account's regions, without those that a policy of its organization has closed.

        Nor those in which these credentials do not count, such as regions that the account has switched on itself: a
        session of the global STS endpoint has no access there (IAM user guide, "Manage AWS STS in an AWS Region").
        """
        with asking("Listing regions"):
            regions = self.account.api.client("ec2").describe_regions()["Regions"]
        names = sorted(str(region["RegionName"]) for region in regions)
        with ThreadPoolExecutor(max_workers=PARALLEL_SURVEYS) as pool:
            is_closed = dict(zip(names, pool.map(self._is_closed, names), strict=True))
        if closed := [name for name in names if is_closed[name]]:
            tell(f"Skipped, because these credentials may not list resources there: {', '.join(closed)}")
        return [name for name in names if not is_closed[name]]

    def _is_closed(self, region: str) -> bool:
        """Whether EC2 refuses even to list instances there. The own region counts as open: its refusal is told."""
        if region == self.account.region:
            return False
        try:
            self.account.api.client("ec2", region).describe_instances(MaxResults=5)
        except ClientError as error:
            return code_of(error) in (*REFUSED, *CLOSED_REGION)
        except BotoCoreError:  # the survey tells
            return False
        return False

    def clear(self, resources: EnvironmentResources) -> bool:
        """Removes everything that carries the environment's tag.

        Returns:
            whether each of its machines had its schedule: they are created last, after all instances.

        Raises:
            StillThereError: a resource could not be removed.
        """
        api, region = self.account.api, resources.region
        name = resources.environment
        scheduled = set(schedules.names(api, region, name))
        roles = {tag(instance, ROLE_TAG) for instance in tagged_resources.instances(api, region, name)}
        complete = bool(scheduled) and scheduled >= {schedules.name_of(name, role) for role in roles}
        tagged_resources.remove(api, region, name)
        if remaining := tagged_resources.remaining(api, region, name):
            raise StillThereError(f"{name} is not gone: {', '.join(remaining)}")
        return complete

    def end_machines(self, environments: Collection[Environment]) -> None:
        """Terminates instances: Terraform deletes a schedule before the machine that it would end."""
        by_region: dict[str, list[str]] = {}
        for environment in environments:
            if "region" in environment.placement:
                self.account.require_own(environment.id, environment.placement.get("account", ""))
                by_region.setdefault(environment.placement["region"], []).append(environment.id)
        for region, ids in by_region.items():
            tagged_resources.terminate(self.account.api, region, ids)

    def remaining(self, environment: Environment) -> list[str]:
        """Lists what EC2 still has with the environment's tag, or as a machine of its record."""
        if "region" not in environment.placement:
            return []
        self.account.require_own(environment.id, environment.placement.get("account", ""))
        region = environment.placement["region"]
        return tagged_resources.remaining(self.account.api, region, environment.id, environment.instance_ids)

    def remove(self, environment: Environment) -> None:
        """Removes everything that carries the environment's tag, and the machines of its record."""
        if "region" in environment.placement:
            self.account.require_own(environment.id, environment.placement.get("account", ""))
            region = environment.placement["region"]
            tagged_resources.remove(self.account.api, region, environment.id, environment.instance_ids)
