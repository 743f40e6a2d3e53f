"""Keeps what AWS has just answered, so that many runs that begin at once do not all ask the same."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

# EC2 itself may take longer than this until it shows a change (EC2 developer guide, "Eventual consistency").
SECONDS = 10.0

T = TypeVar("T")


class AnswerCache:
    """Caches AWS's answers for some seconds. Threads with the same question wait for one request.

    Args:
        seconds: how long an answer counts.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._asking: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._answers: dict[Hashable, tuple[float, Any]] = {}

    def get(self, key: Hashable, ask: Callable[[], T]) -> T:
        """Returns the cached answer, or asks. A false answer, such as None, is not cached.

        Args:
            key: the question.
            ask: gets the answer; what it raises is raised, and nothing is kept.
        """
        with self._lock:
            asking = self._asking[key]
        with asking:
            at, kept = self._answers.get(key, (-self._seconds, None))
            if kept and time.monotonic() - at < self._seconds:
                value: T = kept
                return value
            answer = ask()
            if answer:
                self._answers[key] = (time.monotonic(), answer)
            return answer
