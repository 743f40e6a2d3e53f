"""Defines the types of the value that TaskFamily.get_aux_vm_spec returns."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class FileBuildStep(TypedDict):
    """A step that copies a file or directory of the family into the aux VM; destinations are relative to its home."""

    type: Literal["file"]
    source: str
    destination: str


class ShellBuildStep(TypedDict):
    """A step that runs commands in the aux VM as its SSH user and stops at the first failure."""

    type: Literal["shell"]
    commands: list[str]


class GPUSpec(TypedDict):
    """The GPUs of the aux VM. count_range is inclusive."""

    count_range: tuple[int, int]
    model: str


class VMSpec(TypedDict):
    """The specification of an aux VM: inclusive ranges of virtual CPUs and GiB of memory, and its build steps."""

    cpu_count_range: tuple[float, float]
    ram_gib_range: tuple[float, float]
    cpu_architecture: NotRequired[Literal["x64", "arm64"] | None]
    gpu_spec: NotRequired[GPUSpec | None]
    base_image_type: NotRequired[Literal["debian-12", "ubuntu-20.04-cuda"] | None]
    build_steps: NotRequired[list[FileBuildStep | ShellBuildStep] | None]
