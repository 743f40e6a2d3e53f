"""Throttles EC2's API as AWS does, by a bucket of tokens for each action of a region.

Amazon EC2 developer guide, "Request throttling for the Amazon EC2 API": requests that change nothing have buckets of
100 that get 20 tokens a second, those that change something 50 and 5, and some have their own.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from tests.aws.rights.calls import Call

READING = (100, 20.0)
CHANGING = (50, 5.0)
BUCKETS = {"CreateTags": (100, 10.0), "RunInstances": (5, 2.0), "TerminateInstances": (100, 5.0)}


@dataclass
class Throttle:
    """The buckets of one account.

    Args:
        enabled: tests of one account share the API; those that have other subjects are not slowed down.
    """

    enabled: bool = False
    refused: list[str] = field(default_factory=list)
    _buckets: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def refuses(self, call: Call | None) -> bool:
        """Takes a token for a call, or returns that there is none."""
        if not self.enabled or call is None or call.service != "ec2":
            return False
        reads = call.action.startswith(("Describe", "Get"))
        size, refill = BUCKETS.get(call.action) or (READING if reads else CHANGING)
        with self._lock:
            now = time.monotonic()
            tokens, at = self._buckets.get((call.region, call.action), (size, now))
            tokens = min(size, tokens + (now - at) * refill)
            self._buckets[call.region, call.action] = (max(0.0, tokens - 1) if tokens >= 1 else tokens, now)
            if tokens < 1:
                self.refused.append(call.action)
        return tokens < 1

    def reset(self) -> None:
        """Fills all buckets, and throttles nothing from now on."""
        self.enabled = False
        self.refused.clear()
        self._buckets.clear()
