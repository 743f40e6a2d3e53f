"""`cp --user root` copies into and out of directories of the agent, which swaps them for links meanwhile.

Whatever the agent does, root writes nothing outside the agent's directory, removes nothing there, and reads nothing of
what the agent may not read.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import UsageError
from provisioner.copying import copy_program, transfer
from provisioner.copying.copy_program import TreeSender
from tests.unit.fakes.copies import ThisHost

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be led where others may not go")

AGENT = 54321
# How often root copies while the agent swaps.
ROUNDS = 25
SWAPPING = f"""
import os
os.setgroups([]); os.setgid({AGENT}); os.setuid({AGENT})
while True:
    for swap in (
        lambda: os.rename("work", "real"), lambda: os.symlink("../precious", "work"),
        lambda: os.unlink("work"), lambda: os.rename("real", "work"),
    ):
        try:
            swap()
        except OSError:
            pass
"""


class Place:
    """A home of the agent's with a directory `work`, beside a directory of root's with the same names in it."""

    def __init__(self, top: Path) -> None:
        self.home, self.precious, self.mine = top / "home", top / "precious", top / "mine"
        for directory in (self.home / "work" / "deep", self.precious / "deep", self.mine):
            directory.mkdir(parents=True)
        for directory, text in ((self.home / "work", "the agent's"), (self.precious, "root's")):
            for name in ("file", "deep/file"):
                (directory / name).write_text(text)
        (self.mine / "new").write_text("new")
        self.precious.chmod(0o755)
        self.before = self.listing(self.precious)
        for path in (self.home, *self.home.rglob("*")):
            os.chown(path, AGENT, AGENT)

    @staticmethod
    def listing(directory: Path) -> dict[str, str]:
        paths = directory.rglob("*")
        return {str(path.relative_to(directory)): path.read_text() if path.is_file() else "" for path in paths}

    def swap(self) -> None:
        """Swaps the agent's directory for a link to root's."""
        if not (self.home / "work").is_symlink():
            (self.home / "work").rename(self.home / "real")
            (self.home / "work").symlink_to(self.precious)
            os.chown(self.home / "work", AGENT, AGENT, follow_symlinks=False)

    def require_untouched(self) -> None:
        assert self.listing(self.precious) == self.before


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as top:  # not below pytest's, which others cannot enter
        Path(top).chmod(0o755)
        yield Place(Path(top))


@contextlib.contextmanager
def swapping(place: Place) -> Iterator[None]:
    """Swaps directory and link in a process of the agent's, as fast as it can."""
    with subprocess.Popen([sys.executable, "-I", "-c", SWAPPING], cwd=place.home) as agent:
        try:
            yield
        finally:
            agent.kill()


def test_what_root_writes_stays_in_the_agents_home(place: Place) -> None:
    destinations = cycle(["work/file", "work/deep", "work/deep/file", "work/new/", "work/"])
    with swapping(place):
        for _, to in zip(range(ROUNDS), destinations, strict=False):
            with contextlib.suppress(UsageError):
                transfer.upload(ThisHost().connection, place.mine / "new", f"{place.home}/{to}")
            place.require_untouched()


def test_what_root_reads_is_the_agents(place: Place) -> None:
    with swapping(place):
        for number, wanted in zip(range(ROUNDS), cycle(["work", "work/file", "work/deep"]), strict=False):
            copy = place.mine / str(number)
            with contextlib.suppress(UsageError):
                transfer.download(ThisHost().connection, f"{place.home}/{wanted}", copy)
            assert "root's" not in place.listing(place.mine).values()
            assert not copy.is_file() or copy.read_text() == "the agent's"


CALLS = ("open", "stat", "mkdir", "rename", "rmdir", "unlink", "listdir", "readlink", "utime", "fchmod")


def swapped_before_each_call(monkeypatch: pytest.MonkeyPatch, act: Callable[[Place], object]) -> int:
    """Acts anew for each call of the operating system in it, with a swap right before that call. Returns how many."""
    for number in count():
        calls = count()
        with tempfile.TemporaryDirectory() as top, monkeypatch.context() as patch:
            place = Place(Path(top))

            def swapping_before(
                call: Callable[..., Any], place: Place = place, calls: Iterator[int] = calls, number: int = number
            ) -> Callable[..., Any]:
                def wrapper(*arguments: Any, **options: Any) -> Any:
                    if next(calls) == number:
                        place.swap()
                    return call(*arguments, **options)

                return wrapper

            for name in CALLS:
                patch.setattr(os, name, swapping_before(getattr(os, name)))
            with contextlib.suppress(OSError):
                act(place)
            patch.undo()
            place.require_untouched()
            if not (place.home / "real").exists():
                return number
    raise AssertionError


def test_no_moment_of_an_upload_is_a_good_one_for_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("payload"), io.BytesIO())

    def receive(place: Place, to: str) -> None:
        copy_program.receive(io.BytesIO(spool.getvalue()), f"{place.home}/{to}", "n")

    for to in ("work/file", "work/deep/file", "work/new/"):
        assert swapped_before_each_call(monkeypatch, functools.partial(receive, to=to)) > 10


def test_no_moment_of_a_download_is_a_good_one_for_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(place: Place) -> None:
        out = io.BytesIO()
        try:
            TreeSender(out).send(str(place.home / "work" / "deep"))
        finally:
            assert b"root's" not in out.getvalue()

    assert swapped_before_each_call(monkeypatch, send) > 5


def test_root_does_not_follow_an_agents_link(place: Place) -> None:
    place.swap()
    with pytest.raises(UsageError) as raised:
        transfer.upload(ThisHost().connection, place.mine / "new", str(place.home / "work" / "new"))
    assert raised.value.details == "work: is a symbolic link that others could have placed"
    with pytest.raises(UsageError) as raised:
        transfer.download(ThisHost().connection, str(place.home / "work" / "file"), place.mine)
    assert "work: is a symbolic link that others could have placed" in str(raised.value.details)
    place.require_untouched()
