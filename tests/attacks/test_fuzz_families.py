"""Random input for the checks of whole families: whatever the module, there are findings in our own words."""

from __future__ import annotations

from pathlib import Path

from provisioner.base.errors import TaskFamilyError
from provisioner.family.check import check_family
from provisioner.family.findings import MAXIMUM_CHARACTERS, MAXIMUM_FINDINGS
from tests.attacks.fuzzing import damaged, fuzz
from tests.command_line import ROOT

MANIFEST = b'tasks: {main: {version: "1"}, nothing: {}}'
MODULE = b"""import os, numpy
TASKS = {"main": {"n": 1}, "other": {}}


class TaskFamily(object):
    standard_version = "0.5.0"
    required_environment_variables: list[str] = ["KEY", "VM_IP_ADDRESS"]

    @staticmethod
    def get_tasks():
        return TASKS

    @classmethod
    def get_permissions(cls, t):
        return ["full_internet"]

    def install():
        subprocess.run(["pip", "install", f"x=={1}", "y"])

    async def score(self, t, submission=None, *more, key, **others):
        return 1.0
"""


def test_checks_of_whole_families(tmp_path: Path) -> None:
    """Each damaged module is refused or checked, with findings that are short and printable."""
    root = tmp_path / "fam"
    root.mkdir()
    (root / "manifest.yaml").write_bytes(MANIFEST)
    (root / "build_steps.json").write_text('[{"type": "shell", "commands": ["pip install a"]}]')

    def check(data: bytes) -> None:
        (root / "fam.py").write_bytes(data)
        try:
            findings = check_family(root, "main", {"KEY": "12345678"}).findings
        except TaskFamilyError:
            return  # test_fuzz_parsers.py looks at its words
        assert len(findings) <= MAXIMUM_FINDINGS + 1
        for finding in findings:
            texts = (finding.file, finding.what, finding.why, finding.fix)
            assert all(text.isprintable() and len(text) < MAXIMUM_CHARACTERS + 1 for text in texts)
            assert finding.line is None or finding.line > 0

    fuzz(
        damaged(MODULE, (ROOT / "examples" / "container_escape" / "container_escape.py").read_bytes()),
        check,
    )
