"""Tests a command that keeps an environment as a family's files are, while an author writes them."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.base.errors import ProvisionerError, StillThereError, TaskFamilyError
from provisioner.base.models import Environment
from provisioner.environment import development, lifecycle
from provisioner.environment.development import Development, state_of
from provisioner.family.env_file import load_env_file
from provisioner.family.loader import TaskFamily, load_family
from provisioner.session import Session
from provisioner.store.files import write_atomically
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import Fails
from tests.unit.fakes.world import MODULE, told_of
from tests.waiting import BOUND_SECONDS, until


class Writer:
    """A command in a thread, and what it has told."""

    def __init__(self, session: Session, directory: Path) -> None:
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self.session = replace(session, label="dev 1", keep_failed=True, check=self._check)
        self._directory = directory
        self.env_file = directory.parent / "secrets.env"
        self.env_file.write_text("WORD=first\n")
        self.worked: list[str] = []
        self.words_at_work: list[str] = []
        self.words_by_id: dict[str, set[str]] = defaultdict(set)  # of the sessions of those that are destroyed
        self.told: list[ProvisionerError] = []
        self._development = Development(
            session=self.session,
            session_of=self._session_of,
            directory=directory,
            env_file=self.env_file,
            load=self._load,
            up=lambda session, fam: lifecycle.up(session, fam, "main"),
            work=self._work,
            tell=self.told.append,
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _check(self) -> None:
        if self._stop.is_set() and threading.current_thread() is self._thread:
            self._stop.clear()  # the shield lets no second one through
            raise KeyboardInterrupt

    def _session_of(self, environment: Environment, session: Session) -> Session:
        self.words_by_id[environment.id].add(session.variables["WORD"])
        return session

    def _work(self, session: Session, environment: Environment) -> None:
        self.worked.append(environment.id)
        self.words_at_work.append(session.variables["WORD"])

    def _load(self) -> tuple[Session, TaskFamily]:
        return replace(self.session, variables=load_env_file(self.env_file)), load_family(self._directory)

    def _run(self) -> None:
        try:
            self._development.run()
        except BaseException as error:
            self.error = error

    def alive(self) -> list[str]:
        """The ids of those that came up."""
        return [each.id for each in self.session.environments.readable() if each.status == "ready"]

    def end(self) -> None:
        """Ends it as Ctrl-C does."""
        if self._thread.is_alive():
            self._stop.set()
        self.join()

    def join(self) -> None:
        self._thread.join(BOUND_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def directory(fam: TaskFamily) -> Path:
    return fam.directory


@pytest.fixture
def writing(session: Session, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Writer]]:
    """Starts commands and ends them."""
    monkeypatch.setattr(development, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(development, "SETTLING_SECONDS", 0.05)
    writers: list[Writer] = []

    def start() -> Writer:
        writers.append(Writer(session, directory))
        return writers[-1]

    yield start
    for writer in writers:
        writer.end()


@pytest.mark.parametrize("module", [MODULE, f"{MODULE}\n# changed"], ids=["same image", "new image"])
def test_a_change_destroys_the_old_environment_first(
    session: Session, cloud: FakeCloud, directory: Path, writing: Callable[[], Writer], module: str
) -> None:
    writer = writing()
    until(lambda: writer.worked)
    [first] = writer.alive()
    at_start: list[bool] = []
    cloud.guest_defaults = {
        "during": {"start": lambda: at_start.append(session.environments.exists(first))},
    }
    (directory / "fam.py").write_text(module)
    until(lambda: len(writer.worked) == 2)
    assert at_start == [False]
    assert writer.alive() == writer.worked[1:] != [first]
    assert len(cloud.existing()) == 1
    writer.end()
    assert isinstance(writer.error, KeyboardInterrupt)
    assert cloud.existing() == []
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []


def test_dev_destroys_an_environment_after_the_next_change(
    directory: Path, writing: Callable[[], Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object) -> None:
        raise StillThereError("It is not gone.")

    writer = writing()
    until(lambda: writer.worked)
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "destroy", stuck)
        (directory / "fam.py").touch()
        until(lambda: len(writer.worked) == 2)
    assert sorted(writer.alive()) == sorted(writer.worked)
    (directory / "fam.py").touch()
    until(lambda: len(writer.worked) == 3)
    assert writer.alive() == writer.worked[2:]


def test_a_changed_env_file_needs_a_new_environment(
    writing: Callable[[], Writer],
) -> None:
    writer = writing()
    until(lambda: writer.worked)
    write_atomically(writer.env_file, "WORD=second\n")
    until(lambda: len(writer.worked) == 2)
    until(lambda: writer.alive() == writer.worked[1:])
    writer.end()
    assert writer.words_at_work == ["first", "second"]
    assert [writer.words_by_id[name] for name in writer.worked] == [{"first"}, {"second"}]


def test_a_mistake_is_reported_and_the_next_change_tried(directory: Path, writing: Callable[[], Writer]) -> None:
    writer = writing()
    until(lambda: writer.worked)
    (directory / "manifest.yaml").write_text("tasks: 7")
    until(lambda: writer.told)
    assert isinstance(writer.told[0], TaskFamilyError)
    assert writer.alive() == writer.worked
    until(lambda: any("Waiting for a change" in note for note in told_of(writer.session).notes))
    (directory / "manifest.yaml").unlink()
    until(lambda: len(writer.worked) == 2)


def test_a_file_that_goes_while_it_is_read_is_told(directory: Path, writing: Callable[[], Writer]) -> None:
    writer = writing()
    until(lambda: writer.worked)

    def gone() -> tuple[Session, TaskFamily]:
        raise FileNotFoundError(2, "No such file or directory", "fam.py")

    really, writer._development.load = writer._development.load, gone
    (directory / "fam.py").touch()
    until(lambda: writer.told)
    assert "No such file" in writer.told[0].message
    writer._development.load = really
    (directory / "fam.py").touch()
    until(lambda: len(writer.worked) == 2)


def test_dev_keeps_a_failed_environment_until_the_next_change(
    session: Session, cloud: FakeCloud, directory: Path, writing: Callable[[], Writer]
) -> None:
    cloud.guest_defaults = {"values": {"start": Fails("no start")}}
    writer = writing()
    until(lambda: writer.told)
    [kept] = writer.alive()
    breakdown = session.environments.find(kept).breakdown
    assert breakdown is not None
    cloud.guest_defaults = {}
    (directory / "fam.py").touch()
    until(lambda: writer.worked)
    until(lambda: writer.alive() == writer.worked)
    assert kept not in writer.alive()


def test_what_could_not_be_destroyed_at_the_end_is_an_error(
    writing: Callable[[], Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object) -> None:
        raise StillThereError("It is not gone.")

    writer = writing()
    until(lambda: writer.worked)
    monkeypatch.setattr(lifecycle, "destroy", stuck)
    writer.end()
    assert isinstance(writer.error, StillThereError)
    assert writer.error.hint == f"`provisioner destroy {writer.worked[0]}` tries again."


def test_a_family_that_is_wrong_at_the_beginning_is_refused(
    cloud: FakeCloud, directory: Path, writing: Callable[[], Writer]
) -> None:
    (directory / "manifest.yaml").write_text("tasks: 7")
    writer = writing()
    writer.join()
    assert isinstance(writer.error, TaskFamilyError)
    assert cloud.existing() == []


def test_each_change_of_a_file_is_seen(directory: Path) -> None:
    states = [state_of(directory)]
    (directory / "more.py").write_text("1")
    states.append(state_of(directory))
    (directory / "more.py").chmod(0o755)
    states.append(state_of(directory))
    (directory / "link").symlink_to("/etc/passwd")  # leads out of the family
    states.append(state_of(directory))
    (directory / "link").unlink()
    (directory / "more.py").unlink()
    assert state_of(directory) == states[0]
    assert all(earlier != later for earlier, later in itertools.pairwise(states))
