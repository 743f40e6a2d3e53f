"""What `image build` says of a family that fails, and what it leaves: step 1 of docs/authoring/debug-install.md."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from provisioner.clouds.registry import CLOUDS, CloudEntry
from tests.pages import AUTHORING, blocks
from tests.unit.conftest import CommandLine
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import Fails
from tests.unit.fakes.world import family

LOGS, BUILD_AND_KEEP = (
    shlex.split(block.text)[1:]
    for block in blocks(AUTHORING / "debug-install.md")
    if block.text.startswith("provisioner ") and not block.for_a_shell
)


def completed(command: list[str], **names: str) -> list[str]:
    """Returns a command of the page with the names that its reader has to put in."""
    return [names.get(word, word) for word in command]


def environments(provisioner: CommandLine) -> list[str]:
    return [each["environment"] for each in provisioner("list", "--json").json["environments"]]


def test_a_failed_build_can_be_examined_as_the_page_says(
    provisioner: CommandLine, cloud: FakeCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLOUDS, "local", CloudEntry(lambda *_: cloud, has_places=True, is_billed=False))
    cloud.guest_defaults = {"values": {"install": Fails("no network")}, "says": {"install": "E: no route\n"}}
    directory = str(family(tmp_path).directory)

    failed = provisioner("image", "build", directory)
    assert failed.code == 4
    assert "fam: importing the family or install() raised ValueError: no network" in failed.stderr
    [builder] = re.findall(r"provisioner logs (build-fam-\w+) shows its full output", failed.stderr)
    assert "docs/authoring/debug-install.md" in failed.stderr
    assert (environments(provisioner), cloud.existing()) == ([], [])
    read = provisioner(*completed(LOGS, BUILDER=builder))
    assert (read.code, "E: no route" in read.stdout) == (0, True)

    failed = provisioner(*completed(BUILD_AND_KEEP, FAMILY=directory))
    assert failed.code == 4
    [kept] = re.findall(r"Kept (build-fam-\w+): ", failed.stderr)
    assert f"`provisioner ssh {kept} --user root` logs in, `provisioner destroy {kept}` removes it" in failed.stderr
    assert re.search(r"it ends on its own at \d\d:\d\d:\d\d UTC", failed.stderr)
    assert (environments(provisioner), cloud.existing()) == ([kept], [f"{kept}/primary"])
    assert provisioner("destroy", kept).code == 0
    assert (environments(provisioner), cloud.existing()) == ([], [])
