"""Tests in real machines that a change builds only what depends on it, and that machines are as from whole images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from provisioner.base.errors import ImageBuildError
from provisioner.base.models import Environment, Role
from provisioner.base.progress import Silence
from provisioner.environment import lifecycle
from provisioner.family.loader import TaskFamily, load_family
from provisioner.images import build
from provisioner.machines.connect import connect
from provisioner.session import Session
from tests.local.host_processes import backends

# Each removes the images of its family, which has the same name in all.
pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("layers")]

MODULE = """
import os, pathlib, shutil
class TaskFamily:
    standard_version = "0.5.0"
    @staticmethod
    def get_tasks(): return {"main": {}}
    @staticmethod
    def get_instructions(t): return pathlib.Path("/root/instructions.txt").read_text()
    @staticmethod
    def get_aux_vm_spec(t):
        steps = pathlib.Path("/root/steps.txt").read_text().splitlines()
        return {
            "cpu_count_range": [1, 1], "ram_gib_range": [1, 1], "cpu_architecture": "x64",
            "build_steps": [{"type": "shell", "commands": [step]} for step in steps],
        }
    @staticmethod
    def install():
        seen = sorted(str(path.relative_to("/root")) for path in pathlib.Path("/root/").rglob("*.txt"))
        pathlib.Path("/opt/seen").write_text("\\n".join(seen))
        shutil.copy("/root/requirements.txt", "/opt/requirements.txt")
    @staticmethod
    def start(t):
        pathlib.Path("/opt/started").write_text(pathlib.Path("/root/answers/one.txt").read_text())
    @staticmethod
    def score(t, submission): return 0.25
"""
FILES = {
    "layered.py": MODULE, "requirements.txt": "jq", "instructions.txt": "Do it.", "answers/one.txt": "42",
    "run.sh": "#!/bin/sh\n", "steps.txt": "echo 1 > first\necho 1 > second\n",
    "manifest.yaml": "tasks: {}\ninstall_inputs: [requirements.txt]\n",
    "build_steps.json": json.dumps(
        [{"type": "shell", "commands": ["ls /root > /opt/before", "~/run.sh", "date +%N > /opt/step"]}]
    ),
}  # fmt: skip
# What lies in root's home.
LISTING = (
    "cd /root && find . -path ./.ssh -prune -o -path ./.cache -prune "
    "-o -not -name manifest.yaml -not -name . -printf '%p %y %u:%g %m %s %l\\n' | sort"
)


@dataclass
class Notes(Silence):
    """Keeps what is said."""

    said: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keeps a note."""
        self.said.append(text)


@dataclass(frozen=True)
class Layered:
    """A family whose files change.

    Args:
        directory: the family's.
        session: which says what it builds to `notes`.
    """

    directory: Path
    session: Session
    notes: Notes

    def write(self, **changed: str) -> TaskFamily:
        """Writes some of its files."""
        for name, text in changed.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (self.directory / "run.sh").chmod(0o755)
        return load_family(self.directory)

    def built(self, family: TaskFamily) -> tuple[str, list[str]]:
        """Builds what is missing; returns the family's image, and what was said."""
        self.notes.said.clear()
        name, _ = build.build_all(self.session, family)
        print(self.notes.said)
        return name, [note for note in self.notes.said if "Terraform" not in note]

    def text(self, environment: Environment, script: str, role: Role = "primary") -> str:
        """Returns what a script prints in a machine."""
        with connect(self.session, environment, role) as connection:
            done = connection.run(["sh", "-c", script])
        assert done.exit_code == 0, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture
def layered(open_session: Callable[[Mapping[str, str]], Session], tmp_path: Path) -> Iterator[Layered]:
    notes = Notes()
    session = replace(open_session({}), progress=notes)
    yield Layered(tmp_path / "layered", session, notes)
    for image in session.images.all():
        if image.family == "layered":
            shutil.rmtree(session.images.path(image.name))


@pytest.mark.timeout(1800)
def test_a_change_builds_only_what_depends_on_it(layered: Layered) -> None:
    family = layered.write(**FILES)
    _, said = layered.built(family)
    built = [note.split(" (")[0] for note in said if note.startswith("Building")]
    assert [note for note in built if "base image" not in note] == [  # those may be built already
        "Building the image of layered",
        "Building the aux VM's image of layered",
    ]
    # What install() does not see: it does not run again. The last step of the aux VM: those before it are reused.
    changed = layered.write(**{"steps.txt": "echo 1 > first\necho 2 > second\n"})
    name, said = layered.built(changed)
    assert any("build step 1 is reused; install() is reused" in note for note in said)
    assert any(note.endswith("): build step 1 is reused") for note in said)
    assert [note for note in said if "build step" in note and note.startswith("layered")] == [
        "layered: build step 2 (shell)"
    ]
    assert not any("import and install()" in note for note in said)
    environment = lifecycle.up(layered.session, changed, "main")
    try:
        assert environment.machines["primary"].image == name
        assert layered.text(environment, "cat /home/admin/first /home/admin/second", "aux").split() == ["1", "2"]
        assert layered.text(environment, "cat /opt/seen /opt/requirements.txt").split() == ["requirements.txtjq"]
        assert layered.text(environment, "cat /opt/started") == "42"
        assert layered.text(environment, "cat /opt/before") == "run.sh\n"
        environment, result = lifecycle.score(layered.session, environment, "x")
        assert result.score == 0.25
    finally:
        lifecycle.destroy(layered.session, environment)


@pytest.mark.timeout(1800)
def test_the_familys_files_are_as_in_a_whole_image(layered: Layered) -> None:
    module = MODULE.replace("def get_aux_vm_spec", "def unused")
    listings = []
    for manifest in (FILES["manifest.yaml"], "tasks: {}\n"):
        family = layered.write(**FILES | {"layered.py": module, "manifest.yaml": manifest})
        layered.built(family)
        environment = lifecycle.up(layered.session, family, "main")
        try:
            listings.append(layered.text(environment, LISTING))
            assert layered.text(environment, "cat /opt/started") == "42"
        finally:
            lifecycle.destroy(layered.session, environment)
    assert "./answers/one.txt f root:root 644 2" in listings[0]
    assert "./run.sh f root:root 755" in listings[0]
    assert listings[0] == listings[1]


@pytest.mark.timeout(900)
def test_a_failed_builder_can_be_kept_at_the_last_layer(layered: Layered) -> None:
    module = MODULE.replace("def get_aux_vm_spec", "def unused")
    failing = {
        **FILES,
        "layered.py": module.replace("seen = sorted(", "raise RuntimeError('no network')\n        seen = ("),
    }
    layered = replace(layered, session=replace(layered.session, keep_builder=True))
    with pytest.raises(ImageBuildError, match="no network"):
        layered.built(layered.write(**failing))
    [kept] = [each for each in layered.session.environments.all() if each.family == "layered"]
    try:
        assert backends(layered.session, kept) == {"tap", "stream"}
        assert layered.text(kept, "cat /root/requirements.txt") == "jq"
    finally:
        lifecycle.destroy(layered.session, kept)
    name, said = layered.built(layered.write(**FILES | {"layered.py": module}))
    assert layered.session.images.finished(name)
    assert any("build step 1 is reused" in note for note in said)
