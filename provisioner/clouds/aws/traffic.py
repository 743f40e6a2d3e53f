"""Asks CloudWatch how much instances have sent: the hypervisor's word, which root in a machine cannot change.

EC2 sends each instance's metrics every five minutes, and CloudWatch shows them some minutes later (EC2 user guide,
"CloudWatch metrics that are available for your instances", basic monitoring). NetworkOut counts all that leaves an
instance: also what goes to its neighbours and to the controller.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import datetime, timedelta

from provisioner.base.clock import now
from provisioner.clouds.aws.api import Api, asking

PERIOD_SECONDS = 300
# Shorter than the time between two rounds of leases: an environment's first question in a round is for all.
LOOK_SECONDS = 60.0
# An instance of which nobody has asked for so long is looked at no more.
FORGET_SECONDS = 600.0
# CloudWatch API reference, "GetMetricData": at most 500 queries in a request.
QUERIES = 500

_meters: dict[tuple[str, str], Meter] = {}


def meter(api: Api, region: str) -> Meter:
    """Returns the meter of a region for one set of credentials."""
    return _meters.setdefault((api.profile, region), Meter(region))


class Meter:
    """What CloudWatch last said of the instances of a region that somebody asks about.

    Args:
        region: the region.
    """

    def __init__(self, region: str) -> None:
        self._region = region
        self._looking = threading.Lock()
        self._looked_at = float("-inf")
        self._wanted: dict[str, tuple[datetime, float]] = {}
        self._sent: dict[str, int] = {}

    def sent(self, api: Api, launched: Mapping[str, datetime]) -> dict[str, int]:
        """Returns the bytes that instances have sent, as far as CloudWatch shows them. One look serves all threads.

        Args:
            launched: instance ids, and since when to count.

        Raises:
            HostError: the credentials lack cloudwatch:GetMetricData.
            InfrastructureError: CloudWatch does not answer.
        """
        with self._looking:
            moment = time.monotonic()
            self._wanted |= {name: (since, moment) for name, since in launched.items()}
            asked = {name: since for name, (since, _) in self._wanted.items() if name not in self._sent}
            if moment - self._looked_at >= LOOK_SECONDS:
                self._wanted = {name: told for name, told in self._wanted.items() if moment - told[1] < FORGET_SECONDS}
                asked = {name: since for name, (since, _) in self._wanted.items()}
                self._looked_at = moment
            self._sent |= network_out(api, self._region, asked)
            return {name: self._sent[name] for name in launched}


def network_out(api: Api, region: str, launched: Mapping[str, datetime]) -> dict[str, int]:
    """Asks CloudWatch for the bytes that instances have sent: 0 for one of which it shows nothing.

    Args:
        launched: instance ids, and since when to count.
    """
    sent = dict.fromkeys(launched, 0)
    names = sorted(launched)
    pages = api.client("cloudwatch", region).get_paginator("get_metric_data")
    for first in range(0, len(names), QUERIES):
        some = names[first : first + QUERIES]
        since = min(launched[name] for name in some).timestamp()
        queries = [
            {
                "Id": f"sent{number}",
                "MetricStat": {
                    "Metric": {
                        "Namespace": "AWS/EC2",
                        "MetricName": "NetworkOut",
                        "Dimensions": [{"Name": "InstanceId", "Value": name}],
                    },
                    "Period": PERIOD_SECONDS,
                    "Stat": "Sum",
                },
            }
            for number, name in enumerate(some)
        ]
        begin = datetime.fromtimestamp(since - since % PERIOD_SECONDS, tz=now().tzinfo)
        with asking("Asking CloudWatch what machines have sent"):
            for page in pages.paginate(
                MetricDataQueries=queries, StartTime=begin, EndTime=now() + timedelta(seconds=PERIOD_SECONDS)
            ):
                for row in page["MetricDataResults"]:
                    sent[some[int(row["Id"].removeprefix("sent"))]] += round(sum(row["Values"]))
    return sent
