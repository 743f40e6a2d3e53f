"""Provides the interface of METR's Task Standard for task families: types, and fixtures for their tests."""

from metr_task_standard.types import FileBuildStep, GPUSpec, ShellBuildStep, VMSpec

__all__ = ["FileBuildStep", "GPUSpec", "ShellBuildStep", "VMSpec"]
