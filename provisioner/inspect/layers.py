"""Settings of a configuration that other files than the sample's own give: the operator's, and one beside the eval.

The operator's decide, as they bound money and isolation. Those beside the eval stand in for what is not said. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Where and at what price machines run, and what they reach. What they are is the sample's own file's to say.
SETTINGS = ("cloud", "region", "spot", "ttl", "budget", "internet", "allow", "registry", "fork")
# The variable that names the operator's file.
VARIABLE = "PROVISIONER_INSPECT"


@dataclass(frozen=True)
class Layer:
    """The settings of one file.

    Args:
        where: what messages call it; empty for a file that is not there.
        values: plain values by key, with absolute paths.
    """

    where: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)


def layered(own: Mapping[str, Any], beside: Layer, operators: Layer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns a sample's configuration with the settings of other files, and a line for each file that gave some.

    Args:
        own: what the sample's own file says.
        beside: the settings for what `own` does not say.
        operators: the settings that count whatever `own` says. With `internet: none`, `allow` is theirs, too.
    """
    decided = dict(operators.values)
    if decided.get("internet") == "none":
        decided.setdefault("allow", [])
    useless = {"internet", "registry"} if own.get("family") else set() if own.get("compose") else {"registry"}
    given = {key: value for key, value in decided.items() if key not in useless}
    defaults = {key: value for key, value in beside.values.items() if key not in {*useless, *own, *given}}
    parts = [(beside.where, defaults), (operators.where, given)]
    lines = tuple(f"{where} gives {', '.join(sorted(values))}." for where, values in parts if values)
    return {**defaults, **own, **given}, lines
