"""Refuses instances beyond the account's quotas of vCPUs, as EC2 does, and tells the quotas.

Amazon EC2 user guide, "Amazon EC2 instance type quotas": on demand and spot apart; all standard families together.
"""

from __future__ import annotations

from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models import EC2Backend
from moto.ec2.models.instance_types import INSTANCE_TYPES
from moto.servicequotas.models import ServiceQuotasBackend

# Of an account that has asked for more: a new one has 5 or 32.
DEFAULT = 4000
STANDARD = {"on-demand": "L-1216C47A", "spot": "L-34B43A08"}
# By region and code, where a test wants others.
quotas: dict[tuple[str, str], int] = {}


def quota(region: str, code: str) -> int:
    """An account's quota in vCPUs."""
    return quotas.get((region, code), DEFAULT)


def limit_vcpus() -> None:
    """Patches moto."""
    run: Any = EC2Backend.run_instances
    ask: Any = ServiceQuotasBackend.get_service_quota

    def run_within(self: Any, image_id: str, count: int, *arguments: Any, **named: Any) -> Any:
        market = "spot" if named.get("instance_market_options") else "on-demand"
        wanted = count * _vcpus(named.get("instance_type"))
        used = sum(_vcpus(one.instance_type) for one in _running(self) if _market(one) == market)
        if _is_standard(named.get("instance_type")) and used + wanted > quota(self.region_name, STANDARD[market]):
            if market == "spot":
                raise EC2ClientError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
            raise EC2ClientError("VcpuLimitExceeded", "You have requested more vCPU capacity than your current limit.")
        return run(self, image_id, count, *arguments, **named)

    def tell(self: Any, service_code: str, quota_code: str) -> Any:
        if service_code != "ec2":
            return ask(self, service_code, quota_code)
        return {"ServiceCode": "ec2", "QuotaCode": quota_code, "Value": float(quota(self.region_name, quota_code))}

    setattr(EC2Backend, "run_instances", run_within)  # noqa: B010
    setattr(ServiceQuotasBackend, "get_service_quota", tell)  # noqa: B010


def _running(backend: Any) -> list[Any]:
    rows = [one for row in backend.reservations.values() for one in row.instances]
    return [one for one in rows if one.state in ("pending", "running") and _is_standard(one.instance_type)]


def _market(instance: Any) -> str:
    return "spot" if instance.lifecycle == "spot" else "on-demand"


def _is_standard(name: Any) -> bool:
    return str(name)[:1] in "acdhimrtz"


def _vcpus(name: Any) -> int:
    return int(INSTANCE_TYPES.get(str(name), {}).get("VCpuInfo", {}).get("DefaultVCpus", 1))
