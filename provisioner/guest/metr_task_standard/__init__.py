"""The interface of METR's Task Standard that task families import: types, and fixtures for their tests."""

from metr_task_standard.types import FileBuildStep, GPUSpec, ShellBuildStep, VMSpec

__all__ = ["FileBuildStep", "GPUSpec", "ShellBuildStep", "VMSpec"]
