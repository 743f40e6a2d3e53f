"""Brings a family's environment up anew whenever the family's files change: each start() runs in a new machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from provisioner.base.errors import Interrupted, LivenessLostError, ProvisionerError, StillThereError
from provisioner.base.models import Environment
from provisioner.base.progress import best_effort
from provisioner.base.signals import wait
from provisioner.environment import lifecycle
from provisioner.family.files import list_files
from provisioner.family.loader import TaskFamily
from provisioner.session import Session

# Between looks at the files.
POLL_SECONDS = 0.5
# An editor may write several files, one after the other, and each in several pieces.
SETTLING_SECONDS = 0.3

Files = dict[str, tuple[int, ...]]


def state_of(directory: Path, *others: Path) -> Files:
    """Returns what tells whether a family's files have changed: of each, the times, the size and the inode.

    A file that cannot be looked at, as one that is about to be replaced, counts as another state.

    Args:
        directory: the family's.
        others: files elsewhere that it depends on.
    """
    state: Files = {}
    try:
        names = list_files(directory)
    except ProvisionerError:  # a file that no family may have; loading the family says which
        names = ()
        state[""] = (time.monotonic_ns(),)
    for path in (*(directory / name for name in names), *others):
        try:
            found = path.stat()
            state[str(path)] = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
        except OSError:
            state[str(path)] = ()
    return state


@dataclass
class Development:
    """A family that is being written, and the environment of its newest state.

    Args:
        session: the command's session. Its label marks the environments to clear away. If it has keep_failed set, an
            environment whose start() fails is kept until the next change.
        session_of: opens a session on the cloud that an environment's record names, like another session.
        directory: the family's.
        env_file: the file of the secrets, which is followed as the family's files are.
        load: reads and checks the family, and returns with it the session with the secrets as they are now.
        up: brings its environment up.
        work: does what is to be done in each environment that has come up, such as scoring, and says so.
        tell: shows an error that the next change may mend.
    """

    session: Session
    session_of: Callable[[Environment, Session], Session]
    directory: Path
    env_file: Path | None
    load: Callable[[], tuple[Session, TaskFamily]]
    up: Callable[[Session, TaskFamily], Environment]
    work: Callable[[Session, Environment], None]
    tell: Callable[[ProvisionerError], None]
    _sessions: dict[str, Session] = field(default_factory=dict)  # by environment: each with the secrets that it got
    _seen: Files = field(default_factory=dict)

    def run(self) -> NoReturn:
        """Works until it is interrupted, and then destroys what it brought up.

        Raises:
            KeyboardInterrupt: it was interrupted.
            UsageError: the family is not valid at the beginning.
            StillThereError: something could not be destroyed.
        """
        self._seen = self._state()
        session, family = self.load()
        try:
            self._bring_up(session, family)
            while True:
                wait(POLL_SECONDS, self.session.check)
                self._follow()
        finally:
            with self.session.shield():
                self._clear_away()
                self._require_all_gone()

    def _follow(self) -> None:
        """Brings up the environment of what has changed, once the files stay as they are."""
        state = self._state()
        if state == self._seen:
            return
        while state != self._seen:
            self._seen = state
            wait(SETTLING_SECONDS, self.session.check)
            state = self._state()
        with self._told():
            self._bring_up(*self.load())

    def _state(self) -> Files:
        return state_of(self.directory, *([self.env_file] if self.env_file else []))

    def _bring_up(self, session: Session, family: TaskFamily) -> None:
        """Replaces the last change's environment by a new one, and does the work in it. Tells what fails."""
        self._clear_away()
        begin = time.monotonic()
        self.session = session
        with self._told():
            try:
                environment = self.up(session, family)
            finally:
                self._sessions |= {each.id: session for each in self._own() if each.id not in self._sessions}
            self._note(f"{environment.id} is ready after {time.monotonic() - begin:.1f} s")
            self.work(session, environment)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Reports an error in the body instead of raising it: the next change may mend it."""
        try:
            yield
        except (Interrupted, LivenessLostError):
            raise
        except ProvisionerError as error:
            self._tell(error)
        except OSError as error:  # a file that an editor replaced while it was read, or a full disk
            self._tell(ProvisionerError(f"{type(error).__name__}: {error}", hint="Save the file again."))

    def _own(self) -> list[Environment]:
        """Returns the environments of this command that came up, or were kept for a look at what went wrong."""
        label = self.session.label
        return [
            each
            for each in self.session.environments.readable()
            if each.label == label and each.kind == "task" and each.status != "creating"
        ]

    def _clear_away(self) -> None:
        for each in self._own():
            with best_effort(self.session.progress, f"Destroying {each.id}"):
                lifecycle.destroy(self.session_of(each, self._sessions.get(each.id, self.session)), each)

    def _require_all_gone(self) -> None:
        label = self.session.label
        if left := [each.id for each in self.session.environments.readable() if each.label == label]:
            raise StillThereError(
                f"Not destroyed: {', '.join(left)}.", hint=f"`provisioner destroy {' '.join(left)}` tries again."
            )

    def _tell(self, error: ProvisionerError) -> None:
        self.tell(error)
        self._note("Waiting for a change of the family's files; Ctrl-C ends")

    def _note(self, text: str) -> None:
        self.session.steady().progress.note(text)
