"""The family of `provisioner aws check`: its score is 1.0 if the aux VM, where there is one, answers the primary VM."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

AUX_SSH = ("aux", 22)
STARTED = Path("/home/agent/started.txt")


class TaskFamily:
    """Four tasks: with and without internet, with and without an aux VM."""

    standard_version = "0.5.0"

    @staticmethod
    def get_tasks() -> dict[str, dict[str, bool]]:
        """Returns what each task is given."""
        return {
            f"{internet}{aux}": {"online": internet == "online", "aux": bool(aux)}
            for internet in ("offline", "online")
            for aux in ("", "-aux")
        }

    @staticmethod
    def get_instructions(_task: dict[str, bool]) -> str:
        """Returns what an agent would be told."""
        return "Nothing is to be done."

    @staticmethod
    def get_permissions(task: dict[str, bool]) -> list[str]:
        """Returns the task's permission."""
        return ["full_internet"] if task["online"] else []

    @staticmethod
    def get_aux_vm_spec(task: dict[str, bool]) -> dict[str, Any] | None:
        """Returns the smallest aux VM, for the tasks that have one."""
        if not task["aux"]:
            return None
        return {
            "cpu_count_range": [1, 2],
            "ram_gib_range": [0.75, 2],
            "cpu_architecture": "x64",  # one base image less
            "base_image_type": "debian-12",
            "build_steps": [],
        }

    @staticmethod
    def start(_task: dict[str, bool]) -> None:
        """Leaves a mark."""
        STARTED.write_text("yes")

    @staticmethod
    def score(task: dict[str, bool], _submission: str) -> float:
        """Looks for the mark, and for the aux VM's SSH server."""
        if STARTED.read_text() != "yes":
            return 0.0
        if task["aux"]:
            with socket.create_connection(AUX_SSH, 20) as connection:
                return float(connection.recv(4) == b"SSH-")
        return 1.0
