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


class Recent:
    """Answers of a moment ago. A thread that asks while another is asking waits for that answer.

    Args:
        seconds: how long an answer counts.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._asking: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._answers: dict[Hashable, tuple[float, Any]] = {}

    def answer(self, question: Hashable, ask: Callable[[], T]) -> T:
        """Returns an answer; what is false, such as that there is none, is never kept.

        Args:
            question: by which it is found again.
            ask: gets the answer; what it raises is raised, and nothing is kept.
        """
        with self._lock:
            asking = self._asking[question]
        with asking:
            at, kept = self._answers.get(question, (-self._seconds, None))
            if kept and time.monotonic() - at < self._seconds:
                value: T = kept
                return value
            answer = ask()
            if answer:
                self._answers[question] = (time.monotonic(), answer)
            return answer
