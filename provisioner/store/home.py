"""Defines the layout of the provisioner home: the path of each directory. Reads no file but the home's id."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from provisioner.store.files import locked, write_atomically

# How the name of a directory begins that is still being built: of an image, of a template in an image's directory, or
# of a snapshot.
UNFINISHED = ".building-"
# In an image's directory: machines of it, frozen with their memory. Each has a lock beside it.
TEMPLATES = "templates"


@dataclass(frozen=True)
class Home:
    """Locates the files of the provisioner home: PROVISIONER_HOME, by default `provisioner` in the XDG state directory.

    Args:
        root: the directory; created with mode 0700 when the first file is written, and closed to others if it exists.
    """

    root: Path

    @classmethod
    def default(cls) -> Home:
        """Returns the home that the process's environment names (XDG Base Directory Specification 0.8)."""
        named = os.environ.get("PROVISIONER_HOME")
        if named:
            return cls(Path(named).expanduser().absolute())
        state = Path(os.environ.get("XDG_STATE_HOME") or "")
        # The XDG specification says to ignore relative paths.
        return cls((state if state.is_absolute() else Path.home() / ".local" / "state") / "provisioner")

    @property
    def images(self) -> Path:
        """Returns images/NAME/: one directory per finished image."""
        return self.root / "images"

    @property
    def locks(self) -> Path:
        """Returns locks/: files that are locked and never read."""
        return self.root / "locks"

    @property
    def environments(self) -> Path:
        """Returns environments/ID/: record, keys and, on the local cloud, machines of each live environment."""
        return self.root / "environments"

    @property
    def stacks(self) -> Path:
        """Returns stacks/ID/: one Terraform root and its state."""
        return self.root / "stacks"

    @property
    def archive(self) -> Path:
        """Returns archive/ID/: record and logs of each destroyed environment, without keys and disks."""
        return self.root / "archive"

    @property
    def batches(self) -> Path:
        """Returns batches/ID/: record, engine and results of a batch."""
        return self.root / "batches"

    @property
    def snapshots(self) -> Path:
        """Returns snapshots/NAME/: environments of the local cloud that were frozen while they ran."""
        return self.root / "snapshots"

    @property
    def ledger(self) -> Path:
        """Returns ledger.sqlite: reserved and actual costs of all launches."""
        return self.root / "ledger.sqlite"

    @property
    def identity(self) -> str:
        """Returns a permanent random id of this home. Cloud resources that it creates are tagged with the id."""
        path = self.root / "id"
        with contextlib.suppress(FileNotFoundError):
            return path.read_text().strip()
        self._make_root()
        with locked(self.locks / "home-id"):
            if not path.exists():
                write_atomically(path, secrets.token_hex(8))
        return path.read_text().strip()

    def make(self) -> bool:
        """Creates the home's directories.

        Returns:
            whether it existed, and other users could enter it until now.

        Raises:
            PermissionError: it belongs to another user, which could read and replace everything in it.
        """
        was_open = self._make_root()
        for directory in (self.images, self.locks, self.environments, self.stacks, self.archive, self.batches):
            directory.mkdir(mode=0o700, exist_ok=True)
        return was_open

    def _make_root(self) -> bool:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.root.stat()
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to the user with the id {status.st_uid}", str(self.root))
        was_open = bool(status.st_mode & 0o077)
        if was_open:
            self.root.chmod(0o700)
        return was_open
