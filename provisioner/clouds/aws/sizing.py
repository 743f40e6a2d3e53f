"""Chooses instance types and estimates what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from pathlib import Path

from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.images import vendor_ami
from provisioner.clouds.aws.instance_types import choose_builder, choose_machines
from provisioner.clouds.aws.network import Networks
from provisioner.clouds.aws.pricing import Pricing
from provisioner.clouds.cloud import Sizing
from provisioner.costs.prices import CostLine
from provisioner.errors import ImageBuildError
from provisioner.family.manifest import Resources
from provisioner.models import BaseImage, Environment, MachineSize, Role, VMSpec


class AwsSizing(Sizing):
    """The cheapest instance types that fit, by the catalogue of the account's region."""

    account: Account
    networks: Networks
    spot: bool
    root_sizes: dict[BaseImage, int]
    """The sizes of the root volumes of distributions' AMIs, as far as they are known."""

    @cached_property
    def pricing(self) -> Pricing:
        """The prices of the account's region."""
        home, settings = self.account.home, self.account.settings
        own = Path(settings.prices).expanduser() if settings.prices else None
        directory = home.root / "market"
        return Pricing(self.account.api, self.account.region, self.account.identity.account, directory, own)

    def choose(self, resources: Resources, aux: VMSpec | None) -> dict[Role, MachineSize]:
        """Chooses the cheapest machines that fit.

        Raises:
            UnavailableError: EC2 sells none that fit, or none with a known price.
        """
        return choose_machines(resources, aux, self.pricing.catalogue)

    def builder_size(self, base: BaseImage, disk_gib: int) -> MachineSize:
        """Chooses the cheapest builder of the base image's architecture, with room for the distribution's AMI."""
        return choose_builder(base.architecture, max(disk_gib, self._root_gib(base)), self.pricing.catalogue)

    def _root_gib(self, base: BaseImage) -> int:
        """The size of the root volume of a distribution's AMI; 0 where the region has none, which its build says."""
        if base not in self.root_sizes:
            with contextlib.suppress(ImageBuildError):
                self.root_sizes[base] = vendor_ami(self.account.api, self.account.region, base).root_gib
        return self.root_sizes.get(base, 0)

    def costs(self, sizes: Mapping[Role, MachineSize], *, has_way_out: bool, spot: bool) -> tuple[CostLine, ...]:
        """Estimates the hourly costs of instances, volumes and public addresses.

        Raises:
            UnavailableError: a price is not known.
        """
        zone = min(self.networks.zones(self.account.region)) if spot and self.spot else None
        return self.pricing.costs(sizes, has_way_out=has_way_out, spot_zone=zone)

    def usd_per_hour(self, environment: Environment) -> Decimal:
        """Returns the cost of the types and the market that the environment got.

        A price that is not known counts as the worst case.
        """
        return self.pricing.usd_per_hour(environment)
