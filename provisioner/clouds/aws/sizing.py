"""Chooses instance types and estimates what they cost."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from pathlib import Path

from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.costs.pricing import Pricing
from provisioner.clouds.aws.images import vendor_ami
from provisioner.clouds.aws.instances import vcpu_quota
from provisioner.clouds.aws.instances.instance_types import choose_builder, choose_machines
from provisioner.clouds.aws.instances.vcpu_quota import Market, Quotas
from provisioner.clouds.aws.network.region import Networks
from provisioner.clouds.cloud import Scarcity
from provisioner.costs.prices import CostLine
from provisioner.errors import ImageBuildError, UnavailableError
from provisioner.family.manifest import Resources
from provisioner.models import BaseImage, Environment, MachineSize, Role, VMSpec

QUOTA_HINT = "Ask AWS for a larger quota (Service Quotas, Amazon EC2)."


class AwsSizing:
    """The cheapest instance types that fit, by the catalogue of the account's region."""

    account: Account
    networks: Networks
    spot: bool
    other_regions: tuple[str, ...]
    scarcity: Scarcity | None = Scarcity(
        room="The account's quotas of vCPUs have room",
        remedy="Ask AWS for larger ones (Service Quotas, Amazon EC2), or allow more regions.",
        each_controller=False,
    )
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
        sizes = choose_machines(resources, aux, self.pricing.catalogue)
        self._require_quota(sizes)
        return sizes

    @cached_property
    def quotas(self) -> Quotas:
        """The account's quotas of vCPUs in its region."""
        return Quotas(self.account.api, self.account.region, self._vcpus)

    @cached_property
    def _vcpus(self) -> dict[str, int]:
        return {each.name: each.vcpus for each in self.pricing.catalogue.types}

    @property
    def _markets(self) -> tuple[Market, ...]:
        return ("spot", "on-demand") if self.spot else ("on-demand",)

    def _needs(self, sizes: Mapping[Role, MachineSize]) -> dict[str, int]:
        return vcpu_quota.needs((size.types[0] for size in sizes.values()), self._vcpus)

    def _require_quota(self, sizes: Mapping[Role, MachineSize]) -> None:
        """Refuses machines that would not even fit an empty account, unless another region may be tried."""
        for group, need in self._needs(sizes).items():
            quotas = [self.quotas.quota(group, market) for market in self._markets]
            known = [quota for quota in quotas if quota is not None]
            if len(known) == len(quotas) and max(known) < need and not self.other_regions:
                raise UnavailableError(
                    f"The machines need {need} vCPUs of {group} instances, and the account's quota in "
                    f"{self.account.region} is {max(known)}.",
                    hint=f"{QUOTA_HINT} Or use another region.",
                    settings=("region",),
                )

    def room(self, sizes: Mapping[Role, MachineSize]) -> str:
        """Says how much of the account's quotas the machines take, and how many such environments fit now."""
        parts = []
        needs = self._needs(sizes)
        for market in self._markets:
            rooms = {group: room for group in needs if (room := self.quotas.room(group, market))}
            if not rooms or len(rooms) < len(needs):
                continue
            of = " and ".join(
                f"{needs[group]} of {room.quota} vCPUs ({group}, {room.used} in use)" for group, room in rooms.items()
            )
            fit = vcpu_quota.fitting((needs[group], room) for group, room in rooms.items())
            parts.append(f"{market}: {of}, room for {fit} such {'environment' if fit == 1 else 'environments'} now")
        return "; ".join(parts)

    def capacity(self, sizes: Mapping[Role, MachineSize]) -> int | None:
        """Returns how many such environments the account's quotas have room for now; None if AWS does not say."""
        needs, fit = self._needs(sizes), 0
        for market in self._markets:
            rooms = [(need, self.quotas.room(group, market)) for group, need in needs.items()]
            known = [(need, room) for need, room in rooms if room]
            if not known or len(known) < len(rooms):
                return None
            fit += vcpu_quota.fitting(known)
        return fit

    def shortage(self, sizes: Mapping[Role, MachineSize], count: int) -> str:
        """Says that the account's quotas have no room for so many more environments, if they have not."""
        fit = self.capacity(sizes)
        if fit is None or fit >= count:
            return ""
        return f"the account's quotas of vCPUs in {self.account.region} have room for {fit} of {count} environments"

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
