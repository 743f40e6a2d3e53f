"""A reader of the documentation, who works through a page in a shell. Needs machines where the page does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from provisioner.store.home import Home
from tests.command_line import ROOT, provisioner, variables
from tests.pages import Block, blocks
from tests.waiting import BOUND_SECONDS, until

# What runs until Ctrl-C.
_ENDLESS = "provisioner dev "
_INTERRUPTED = 130


class Reader:
    """A reader who pastes a page's blocks into a shell, and looks whether the boxes after them are right.

    Args:
        home: the provisioner home.
        directory: where the shell works; it has the checkout's examples.
    """

    def __init__(self, home: Home, directory: Path) -> None:
        (directory / "examples").symlink_to(ROOT / "examples")
        self._directory = directory
        self._variables = variables(home) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def paste(self, text: str) -> str:
        """Runs a block, and returns what it prints."""
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=self._directory, env=self._variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=1500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        return done.stdout

    def paste_until(self, text: str, lines: list[str]) -> str:
        """Runs a block until it has printed lines, presses Ctrl-C, and returns what it prints to its end."""
        assert lines, f"{text}\nends with Ctrl-C alone: the page must show in a box when that is"
        log = self._directory / "printed.log"
        with log.open("w") as output, subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text], cwd=self._directory, env=self._variables,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                until(lambda: _lacking(lines, log.read_text()) == [], lambda: process.poll() is None)
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
                assert process.wait(BOUND_SECONDS) == _INTERRUPTED, log.read_text()
            finally:
                print(log.read_text())
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return log.read_text()

    def read(self, page: Path, *, leave_out: tuple[str, ...] = ()) -> None:
        """Works through a page, but for lines that begin with one of these words."""
        printed = ""
        pages_blocks = blocks(page)
        for block, following in zip(pages_blocks, [*pages_blocks[1:], Block("text", "")], strict=True):
            if block.for_a_shell:
                lines = [line for line in block.text.splitlines() if not line.startswith(leave_out)]
                endless = bool(lines) and lines[-1].startswith(_ENDLESS)
                box = following.text.splitlines() if following.language == "text" else []
                printed = self.paste_until("\n".join(lines), box) if endless else self.paste("\n".join(lines))
            elif block.language == "text":
                assert _lacking(block.text.splitlines(), printed) == [], printed


def _lacking(lines: list[str], printed: str) -> list[str]:
    return [line for line in lines if line not in printed]


@contextmanager
def reading(home: Home, directory: Path) -> Iterator[Reader]:
    """Yields a reader whose environments end with the body, even where a page is left in its middle."""
    before = set(home.environments.iterdir())
    try:
        yield Reader(home, directory)
    finally:
        left = [path.name for path in set(home.environments.iterdir()) - before]
        if left:
            provisioner(home, "destroy", *left)
    assert left == [], "a page left environments behind"
