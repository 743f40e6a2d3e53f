"""Reads a family's manifest.yaml strictly and reports one line per problem. Reads no other file of the family."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from provisioner.base import strict_yaml
from provisioner.base.errors import TaskFamilyError, explained
from provisioner.base.models import MAXIMUM_VERSION_CHARACTERS, PrimaryDistribution
from provisioner.base.validation import lines_of, listed
from provisioner.family.files import MAXIMUM_GLOBS, check_glob

FILE_NAMES = ("manifest.yaml", "manifest.yml")
MAXIMUM_BYTES = 1 << 20
# For a manifest that has another shape. In one line, as `check` prints each finding.
EXAMPLE = "tasks: {main: {resources: {cpus: 2, memory_gb: 4}, scoring: {visible_to_agent: false}}, other: {}}"
_SHAPES = ("missing", "dict_type", "model_type")


class _Section(BaseModel):
    """A frozen part of the manifest that refuses unknown keys and coerces nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class GpuResources(_Section):
    """GPUs of the primary machine. count_range is inclusive."""

    count_range: list[int] = Field(min_length=2, max_length=2, description="how many, at least and at most")
    model: str = Field(min_length=1, max_length=64, description="the GPU's name, such as `a10` or `h100`")

    @field_validator("count_range")
    @classmethod
    def _low_to_high(cls, value: list[int]) -> list[int]:
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"must be [low, high] with 0 < low <= high, not {value}")
        return value


class Resources(_Section):
    """The minimum resources of the primary machine; None leaves the choice to us. Memory is in GiB, also fractions."""

    gpu: GpuResources | None = Field(None, description="GPUs; the local cloud has none")
    cpus: float | None = Field(None, description="vCPUs, rounded up to whole ones")
    memory_gb: float | None = Field(None, description="memory in GiB")
    storage_gb: float | None = Field(None, description="disk in GiB; at least 16 are given")
    require_kvm: bool = Field(
        False,
        description="whether the local cloud refuses to emulate the machines; builders follow the settings alone",
    )

    @field_validator("cpus", "memory_gb", "storage_gb")
    @classmethod
    def _is_positive(cls, value: float | None) -> float | None:
        if value is not None and not value > 0:
            raise ValueError(f"must be more than 0, not {value}")
        return value


class Scoring(_Section):
    """Whether the agent sees the scores of a task, and when intermediate scoring runs."""

    visible_to_agent: bool = Field(True, description="whether an intermediate score shows the agent its number")
    score_on_usage_limits: bool = Field(False, description="accepted, has no effect")
    instructions: str | None = Field(None, description="accepted, has no effect")


# Accepted but not kept: it may be any value, even a recursive one.
_Meta = Annotated[
    object,
    AfterValidator(lambda _: None),
    Field(exclude=True, repr=False, description="anything of yours; not kept"),
]


class ManifestTask(_Section):
    """The manifest's entry for one task."""

    version: str | None = Field(None, description="accepted, has no effect")
    resources: Resources = Field(Resources(), description="the least that the primary machine has")
    scoring: Scoring = Field(Scoring(), description="how the task is scored")
    meta: _Meta = None


class Manifest(_Section):
    """A whole manifest. Tasks that it does not name get the defaults.

    Args:
        base_image: the primary machine's base image, an extension of ours; None leaves it to the operator's settings.
        install_inputs: globs of the files that install() sees beside the module, an extension of ours; None for all.
    """

    tasks: dict[str, ManifestTask] = Field(description="an entry for each task that needs one")
    base_image: PrimaryDistribution | None = Field(
        None, description="the primary machine's [base image](#base-image); default: the operator's setting"
    )
    install_inputs: list[str] | None = Field(
        None,
        max_length=MAXIMUM_GLOBS,
        description="globs of the files that `install()` [sees](#what-install-sees); default: all files",
    )
    version: str | None = Field(
        None,
        description="the family's version, which results and [Inspect's logs](inspect.md) name; up to 200 printable "
        "characters",
    )
    meta: _Meta = None

    @field_validator("version")
    @classmethod
    def _is_printable(cls, value: str | None) -> str | None:
        if value is not None and not (value.isprintable() and len(value) <= MAXIMUM_VERSION_CHARACTERS):
            raise ValueError(f"it may have up to {MAXIMUM_VERSION_CHARACTERS} printable characters")
        return value

    @field_validator("install_inputs")
    @classmethod
    def _are_inside(cls, value: list[str] | None) -> list[str] | None:
        return None if value is None else [check_glob(glob) for glob in value]

    def resources(self, task: str) -> Resources:
        """Returns the resources of a task's primary machine."""
        return self.tasks.get(task, ManifestTask()).resources

    def scoring(self, task: str) -> Scoring:
        """Returns the scoring settings of a task."""
        return self.tasks.get(task, ManifestTask()).scoring


@explained("manifest")
def load_manifest(directory: Path) -> Manifest:
    """Reads manifest.yaml or manifest.yml of a family directory. Returns an empty manifest if neither exists.

    Raises:
        TaskFamilyError: both files exist, or the manifest is not valid.
    """
    present = [directory / name for name in FILE_NAMES if (directory / name).exists()]
    if len(present) > 1:
        raise TaskFamilyError(f"{directory} contains both {FILE_NAMES[0]} and {FILE_NAMES[1]}. Keep one of them.")
    if not present:
        return Manifest(tasks={})
    if not present[0].is_file():
        raise TaskFamilyError(f"{present[0]} is not a file.")
    with present[0].open("rb") as file:
        data = file.read(MAXIMUM_BYTES + 1)
    return parse_manifest(data, present[0].name)


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """Returns the keys that are allowed in the place of an unknown one, such as `tasks.NAME.resources.KEY`."""
    sections: dict[int, type[_Section]] = {1: Manifest, 3: ManifestTask, 5: GpuResources}
    section = sections.get(len(location), Scoring if location[-2:-1] == ("scoring",) else Resources)
    return list(section.model_fields)


@explained("manifest")
def parse_manifest(data: bytes, name: str = FILE_NAMES[0]) -> Manifest:
    """Parses a manifest.

    Args:
        data: YAML of at most MAXIMUM_BYTES.
        name: the name that messages use for it.

    Raises:
        TaskFamilyError: it is too large, not YAML, or not a valid manifest; the message has one line per problem.
    """
    if len(data) > MAXIMUM_BYTES:
        raise TaskFamilyError(f"{name} is larger than {MAXIMUM_BYTES} bytes.")
    value = strict_yaml.load(data, name, TaskFamilyError)
    if not isinstance(value, dict):
        raise TaskFamilyError(f"{name} must be a mapping with the key `tasks`, for example `{EXAMPLE}`.")
    try:
        return Manifest.model_validate(value)
    except ValidationError as error:
        lines = lines_of(error, _known_keys)
        not_text = {finding["loc"][-1] for finding in error.errors() if finding["type"] == "string_type"}
        hint = "A version is a string: write it in quotes." if "version" in not_text else None
        shape = any(finding["type"] in _SHAPES and "gpu" not in finding["loc"] for finding in error.errors())
        form = f"\nThe right form is, for example, `{EXAMPLE}`." if shape else ""
        raise TaskFamilyError(f"{name} is not valid:{listed(lines)}{form}", hint=hint) from None
