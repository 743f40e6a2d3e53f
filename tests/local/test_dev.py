"""Writes a family while `provisioner dev` runs: each change meets a machine that is as new as the first."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from provisioner.store.home import Home
from tests.command_line import answer, started
from tests.homes import borrow_images

pytestmark = [pytest.mark.vm, pytest.mark.timeout(1500)]
MODULE = """
from pathlib import Path

class TaskFamily:
    standard_version = "0.5.0"

    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def get_instructions(t):
        return "Do it."

    @staticmethod
    def install():
        Path("/opt/seen").write_text(" ".join(sorted(path.name for path in Path("/root").iterdir())))

    @staticmethod
    def start(t):
        assert not Path("/opt/started").exists(), "this machine is not new"
        Path("/opt/started").touch()
        assert "word.txt" not in Path("/opt/seen").read_text(), "install() saw it"

    @staticmethod
    def score(t, submission):
        return float(Path("/root/word.txt").read_text())
"""


class Shown:
    """What a command says, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()
        self._changed = threading.Condition()
        for stream in (process.stdout, process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def until(self, pattern: str, times: int = 1, seconds: float = 900) -> list[str]:
        """Waits until so many lines match a pattern, and returns what its group matched in each."""
        with self._changed:

            def found() -> list[str]:
                return [match[1] for line in self.lines if (match := re.search(pattern, line))]

            assert self._changed.wait_for(lambda: len(found()) >= times, seconds), "".join(self.lines)
            return found()


def test_each_change_is_met_by_a_new_machine_and_nothing_is_left(test_home: Home, tmp_path: Path) -> None:
    home = borrow_images(test_home, tmp_path / "home")
    for image in home.images.glob("*-changing-*"):  # of an earlier run: this one counts what is built
        shutil.rmtree(image)
    family = tmp_path / "changing"
    family.mkdir()
    (family / "changing.py").write_text(MODULE)
    (family / "manifest.yaml").write_text("tasks: {}\ninstall_inputs: []\n")
    (family / "word.txt").write_text("0.25")
    (tmp_path / "answer").write_text("42")
    arguments = ("dev", str(family), "main", "--submission-file", str(tmp_path / "answer"))
    with started(home, *arguments) as process:
        shown = Shown(process)
        try:
            assert shown.until(r"^score: (.*)") == ["0.25"]
            (family / "word.txt").write_text("0.5")
            assert shown.until(r"^score: (.*)", 2) == ["0.25", "0.5"]
            # start() fails: the machine is kept for a look, and the next change replaces it.
            (family / "changing.py").write_text(MODULE.replace('"/opt/started").touch', '"/opt/none/started").touch'))
            shown.until(r"(No such file or directory: '/opt/none/started')")
            [kept] = shown.until(r"Kept (\S+):")
            (family / "changing.py").write_text(MODULE)
            assert shown.until(r"^score: (.*)", 3) == ["0.25", "0.5", "0.5"]
            ids = shown.until(r"(\S+) is ready after", 3)
            assert len({*ids, kept}) == 4
            # A line that says that a build still runs repeats its name.
            assert len(set(shown.until(r"Building the image of changing \((\S+)\)"))) == 3
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 130
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0)
            process.kill()
            print("".join(shown.lines))
            answer(home, "destroy", "--all")
    assert answer(home, "list")["environments"] == []
    assert answer(home, "costs")["reserved_usd"] == 0
