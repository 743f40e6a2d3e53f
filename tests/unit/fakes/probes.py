"""Answers the isolation probes' request as a machine would whose isolation is as promised. No probe is sent."""

from __future__ import annotations

import json
from typing import Any

PROMISED = ("neighbour ", "allowed ")


def request_in(program: str) -> dict[str, Any]:
    """Returns the request in the text that is sent to the machine's Python."""
    call = program.splitlines()[-1]
    # Not by ast: a thread of the product may parse a family at the same time (provisioner/family/loader.py, _PARSING).
    request: dict[str, Any] = eval(call.removeprefix("main(").removesuffix(")"), {"__builtins__": {}})
    return request


def answers(request: dict[str, Any]) -> list[list[str]]:
    """Returns the answers to all questions of a request."""
    online = not any(name == "s3 by name" for name, *_ in request["probes"]["root"])
    promised = (*PROMISED, "reach the internet") if online else PROMISED
    return [
        [user, name, "reached" if name.startswith(promised) else "not reached", "said by a fake"]
        for user, probes in request["probes"].items()
        for name, *_ in probes
    ]


def honest_answers(request: dict[str, Any]) -> bytes:
    """Returns what the machine sends."""
    return json.dumps([request["word"], answers(request)]).encode()
