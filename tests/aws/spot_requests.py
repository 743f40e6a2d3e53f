"""Gives moto's spot instances what EC2's have: a request, which is active until the instance ends.

EC2 user guide, "Spot Instance request status": RunInstances with a market of `spot` makes a one-time request without
tags. It is `active` while its instance runs, and `closed` once that has ended.
"""

from __future__ import annotations

from typing import Any, ClassVar

from moto.ec2.models import EC2Backend
from moto.ec2.utils import random_spot_request_id


class SpotRequest:
    """A request that RunInstances made, with the attributes of EC2's SpotInstanceRequest."""

    type = "one-time"
    status: ClassVar = {"Code": "fulfilled", "Message": "Your spot request is fulfilled."}
    tags: ClassVar[list[dict[str, str]]] = []

    def __init__(self, instance: Any) -> None:
        self.id = self.spot_instance_request_id = random_spot_request_id()
        self.instance_id = instance.id
        self.cancelled = False
        self._instance = instance

    @property
    def state(self) -> str:
        """What EC2 calls it now."""
        if self._instance.state == "terminated":
            return "closed"
        return "cancelled" if self.cancelled else "active"

    def get_filter_value(self, name: str, *_: Any) -> str:
        """Returns what a filter compares."""
        return {"state": self.state, "spot-instance-request-id": self.spot_instance_request_id}[name]


def add_spot_requests() -> None:
    """Patches moto."""
    run: Any = EC2Backend.run_instances
    cancel: Any = EC2Backend.cancel_spot_instance_requests

    def patched_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        reservation = run(self, *args, **kwargs)
        if kwargs.get("instance_market_options"):
            for instance in reservation.instances:
                request = SpotRequest(instance)
                instance.instance_lifecycle = "spot"
                instance.spot_instance_request_id = request.spot_instance_request_id
                self.spot_instance_requests[request.spot_instance_request_id] = request
        return reservation

    def patched_cancel(self: Any, request_ids: list[str]) -> Any:
        ours = [self.spot_instance_requests.get(name) for name in request_ids]
        if not all(isinstance(request, SpotRequest) for request in ours):
            return cancel(self, request_ids)
        for request in ours:
            request.cancelled = True
        return ours

    setattr(EC2Backend, "run_instances", patched_run)  # noqa: B010
    setattr(EC2Backend, "cancel_spot_instance_requests", patched_cancel)  # noqa: B010
