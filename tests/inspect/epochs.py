"""Helps with epochs that run at the same time."""

from __future__ import annotations

from typing import Any

import anyio
from inspect_ai.event import InfoEvent
from inspect_ai.log import EvalSample


class Meeting:
    """Lets epochs continue once all of them have come."""

    def __init__(self, epochs: int) -> None:
        self._epochs, self._come, self._all = epochs, 0, anyio.Event()

    async def wait(self) -> None:
        self._come += 1
        if self._come == self._epochs:
            self._all.set()
        await self._all.wait()


def beginning(sample: EvalSample) -> dict[str, Any]:
    """Returns the first event of the sample's machines."""
    infos = [event for event in sample.events if isinstance(event, InfoEvent) and event.source == "provisioner"]
    assert isinstance(infos[0].data, dict)
    return infos[0].data
