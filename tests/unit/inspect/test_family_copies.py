"""Tests that the files of a configuration are copied once for all samples, and that no copy outlives its use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.errors import UsageError
from provisioner.inspect import plain_family
from provisioner.inspect.configuration import Machine
from provisioner.inspect.plain_family import PREFIX, SOURCES, family_of_machine, remove_abandoned


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(plain_family, "_families", {})
    plain_family._directory.cache_clear()
    yield directory
    plain_family._directory.cache_clear()


def _machine(tmp_path: Path) -> Machine:
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "one").write_text("1")
    return Machine(files=(("/srv/data", str(tmp_path / "data")),))


def test_samples_share_one_copy_of_each_distinct_machine(tmp_path: Path, temporary: Path) -> None:
    machine = _machine(tmp_path)
    first = family_of_machine(machine, "none")
    assert (first.directory / SOURCES / "0" / "one").read_text() == "1"
    assert family_of_machine(machine.model_copy(), "none") is first
    assert family_of_machine(machine, "full") is not first
    [directory] = temporary.iterdir()
    assert len(list(directory.iterdir())) == 2


def test_changed_files_are_copied_again(tmp_path: Path) -> None:
    machine = _machine(tmp_path)
    family_of_machine(machine, "none")
    (tmp_path / "data" / "one").write_text("another text")
    again = family_of_machine(machine, "none")
    assert (again.directory / SOURCES / "0" / "one").read_text() == "another text"


def test_a_log_that_grows_in_a_packed_directory_changes_no_copy(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "run.eval").write_text("1")
    packed = (("/opt/context0.tar", str(tmp_path / "eval")),)
    first = family_of_machine(Machine(), "none", packed=packed)
    (tmp_path / "eval" / "run.eval").write_text("1, 2")
    assert family_of_machine(Machine(), "none", packed=packed) is first
    (tmp_path / "eval" / "Dockerfile").write_text("FROM x")
    assert family_of_machine(Machine(), "none", packed=packed) is not first


def test_a_changed_target_of_a_link_is_copied_again(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    machine = Machine(files=(("/srv/text", str(tmp_path / "link")),))
    first = family_of_machine(machine, "none")
    assert family_of_machine(machine, "none") is first
    (tmp_path / "text").write_text("another text")
    again = family_of_machine(machine, "none")
    assert (again.directory / SOURCES / "0").read_text() == "another text"


def test_a_link_that_cannot_be_copied_is_named_and_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    machine = _machine(tmp_path)
    family_of_machine(machine, "none")
    before = sorted(temporary.rglob("*"))
    (tmp_path / "data" / "deep").mkdir()
    (tmp_path / "data" / "deep" / "link").symlink_to("/usr/bin/python3")
    with pytest.raises(UsageError, match=r"/data cannot be copied for .*: The link 'deep/link' is") as caught:
        family_of_machine(machine, "none")
    assert "family" not in caught.value.message
    assert sorted(temporary.rglob("*")) == before


def test_a_killed_process_leaves_nothing_that_others_use(temporary: Path) -> None:
    program = (
        "import tempfile, sys, time\n"
        f"tempfile.tempdir = {str(temporary)!r}\n"
        "from provisioner.inspect import plain_family\n"
        "print(plain_family._directory(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        directory = Path(process.stdout.readline().strip())
        assert directory.name.startswith(PREFIX)
        long_ago = time.time() - 2 * plain_family.YOUNG_SECONDS
        os.utime(directory, (long_ago, long_ago))
        remove_abandoned()
        assert directory.exists()
        process.send_signal(signal.SIGKILL)
    (temporary / f"{PREFIX}young").mkdir()
    remove_abandoned()
    assert [path.name for path in temporary.iterdir()] == [f"{PREFIX}young"]
