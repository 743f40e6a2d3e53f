"""Finds and removes whatever carries an environment's tag, in any region."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from provisioner.clouds.aws import schedules, tagged_resources
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import asking, tag
from provisioner.clouds.cloud import CleanUp
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
        """Lists everything that carries our tags, region by region."""
        surveyed = self._all_regions() if regions is None else regions
        with ThreadPoolExecutor(max_workers=PARALLEL_SURVEYS) as pool:
            answers = pool.map(partial(tagged_resources.survey, self.account.api), surveyed)
            return [resources for answer in answers for resources in answer]

    def _all_regions(self) -> list[str]:
        with asking("Listing regions"):
            regions = self.account.api.client("ec2").describe_regions()["Regions"]
        return sorted(str(region["RegionName"]) for region in regions)

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

    def remaining(self, environment: Environment) -> list[str]:
        """Lists what EC2 still has with the environment's tag."""
        if "region" not in environment.placement:
            return []
        return tagged_resources.remaining(self.account.api, environment.placement["region"], environment.id)

    def remove(self, environment: Environment) -> None:
        """Removes everything that carries the environment's tag."""
        if "region" in environment.placement:
            tagged_resources.remove(self.account.api, environment.placement["region"], environment.id)
