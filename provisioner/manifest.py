"""Reads a family's manifest.yaml: strictly, bounded, with one line per problem. Knows no other file of the family."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from provisioner.errors import TaskFamilyError
from provisioner.problems import lines_of, listed, shown

FILE_NAMES = ("manifest.yaml", "manifest.yml")
MAXIMUM_BYTES = 1 << 20

# YAML's `<<` can double a mapping with every line of the file, so what it may pull together is bounded.
_MAXIMUM_MERGED_KEYS = 1000
_MAXIMUM_MERGED_MAPPINGS = 20


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError(f"must be more than 0, not {value}")
    return value


class _Section(BaseModel):
    """A part of the manifest: frozen, unknown keys refused, nothing coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class GpuResources(_Section):
    """GPUs of the primary machine. count_range is inclusive."""

    count_range: list[int] = Field(min_length=2, max_length=2)
    model: str = Field(min_length=1, max_length=64)

    @field_validator("count_range")
    @classmethod
    def _low_to_high(cls, value: list[int]) -> list[int]:
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"must be [low, high] with 0 < low <= high, not {value}")
        return value


class Resources(_Section):
    """What the primary machine needs at least; None: ours to choose. Fractions are allowed, memory is read as GiB."""

    gpu: GpuResources | None = None
    cpus: float | None = None
    memory_gb: float | None = None
    storage_gb: float | None = None

    @field_validator("cpus", "memory_gb", "storage_gb")
    @classmethod
    def _is_positive(cls, value: float | None) -> float | None:
        return None if value is None else _positive(value)


class Scoring(_Section):
    """How scores of one task are shown and when they are asked for."""

    visible_to_agent: bool = True
    score_on_usage_limits: bool = False
    instructions: str | None = None


class ManifestTask(_Section):
    """What the manifest says of one task. meta is accepted and not kept: it may be anything, even contain itself."""

    version: str | None = None
    resources: Resources = Resources()
    scoring: Scoring = Scoring()
    meta: Annotated[object, Field(exclude=True, repr=False)] = None

    @field_validator("meta")
    @classmethod
    def _drop(cls, value: object) -> None:
        return None


class Manifest(_Section):
    """A whole manifest. A task that it does not name gets the defaults."""

    tasks: dict[str, ManifestTask]
    version: str | None = None
    meta: Annotated[object, Field(exclude=True, repr=False)] = None

    @field_validator("meta")
    @classmethod
    def _drop(cls, value: object) -> None:
        return None

    def resources(self, task: str) -> Resources:
        """What the task's primary machine needs."""
        return self.tasks.get(task, ManifestTask()).resources

    def scoring(self, task: str) -> Scoring:
        """How the task's scores are shown and when they are asked for."""
        return self.tasks.get(task, ManifestTask()).scoring


def load_manifest(directory: Path) -> Manifest:
    """Reads manifest.yaml or manifest.yml of a family directory; an empty manifest where there is neither.

    Raises:
        TaskFamilyError: both exist, or the one is not a valid manifest.
    """
    present = [directory / name for name in FILE_NAMES if (directory / name).exists()]
    if len(present) > 1:
        raise TaskFamilyError(f"There are both {FILE_NAMES[0]} and {FILE_NAMES[1]} in {directory}. Keep one.")
    if not present:
        return Manifest(tasks={})
    if not present[0].is_file():
        raise TaskFamilyError(f"{present[0]} is not a file.")
    with present[0].open("rb") as file:
        data = file.read(MAXIMUM_BYTES + 1)
    return parse_manifest(data, present[0].name)


def parse_manifest(data: bytes, name: str = FILE_NAMES[0]) -> Manifest:
    """Parses a manifest.

    Args:
        data: YAML, at most MAXIMUM_BYTES.
        name: what messages call it.

    Raises:
        TaskFamilyError: it is too large, not YAML, or says what a manifest cannot; one line per problem.
    """
    if len(data) > MAXIMUM_BYTES:
        raise TaskFamilyError(f"{name} is larger than {MAXIMUM_BYTES} bytes.")
    value = _load_yaml(data, name)
    if not isinstance(value, dict):
        raise TaskFamilyError(f"{name} must be a mapping with the key `tasks`.")
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        lines = lines_of(error)
        numbers = any(line.partition(":")[0].endswith("version") for line in lines)
        hint = "A version is a string: write it in quotes." if numbers else None
        raise TaskFamilyError(f"{name} is not valid:{listed(lines)}", hint=hint) from None


def _load_yaml(data: bytes, name: str) -> object:
    try:
        return yaml.load(data, _Loader)  # noqa: S506 -- a SafeLoader
    except yaml.MarkedYAMLError as error:
        at = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = (error.problem or error.context or "no reason given")[:200]
        raise TaskFamilyError(f"{name} is not valid YAML{at}: {reason}.") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise TaskFamilyError(f"{name} cannot be read as YAML: {shown(str(error))}.") from None
    except RecursionError:
        raise TaskFamilyError(f"{name} is nested too deeply.") from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with keys as they are written (`1:` and `no:` are names), and each only once."""

    # types-PyYAML calls the anchor a dict; it is the anchor's name or None.
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain name", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key {shown(key.value)} is there twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        # Deep, so that a mapping that contains itself is refused instead of built.
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        merges = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        for value in merges:
            if isinstance(value, yaml.SequenceNode) and len(value.value) > _MAXIMUM_MERGED_MAPPINGS:
                raise yaml.MarkedYAMLError(problem="too many mappings in one merge", problem_mark=value.start_mark)
        super().flatten_mapping(node)
        if merges and len(node.value) > _MAXIMUM_MERGED_KEYS:
            raise yaml.MarkedYAMLError(problem="a merge of too many keys", problem_mark=node.start_mark)
