"""Finds the files that an interpreter reads at its start, and tells whether they have changed.

Where this cannot tell, the answer is that they have: then an interpreter is started.
"""

from __future__ import annotations

import os
import site
import sys

# How far the time of a change may lie before the moment of the change.
TICK_SECONDS = 0.02
# Code at a start that does the same each time: setuptools' file, and the lines of Debian's sitecustomize.
# What other code does may depend on the moment.
KNOWN_PATH_FILES = frozenset({"distutils-precedence.pth"})
KNOWN_LINES = frozenset({
    "try:", "import apport_python_hook", "except ImportError:", "pass", "else:", "apport_python_hook.install()",
})  # fmt: skip
Signature = tuple[int, ...] | None


class Files:
    """What an interpreter reads at its start, as it was when this one started.

    Args:
        signatures: by path; None for what does not exist.
    """

    def __init__(self, signatures: dict[str, Signature]) -> None:
        self._signatures = signatures

    @classmethod
    def read(cls, began: float) -> Files | None:
        """Return them, or None if this interpreter may have read something else than what is there.

        Args:
            began: the time before this interpreter was started.
        """
        try:
            for name in ("sitecustomize", "usercustomize"):
                _require_known_code(sys.modules.get(name))
            signatures = {path: _signature(path) for path in _paths()}
        except (OSError, ValueError):
            return None
        oldest_change = int((began - TICK_SECONDS) * 1e9)
        if any(signature and max(signature[-2:]) > oldest_change for signature in signatures.values()):
            return None
        return cls(signatures)

    def are_unchanged(self) -> bool:
        """Return whether all of them are as they were."""
        try:
            return all(_signature(path) == signature for path, signature in self._signatures.items())
        except OSError:
            return False


def _require_known_code(module: object) -> None:
    """Refuse a module that may do anything.

    Raises:
        ValueError: it is one.
    """
    if module is None:
        return
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not {line for line in _lines(file) if line[:1] != "#"} <= KNOWN_LINES:
        raise ValueError("code runs at the start")


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return [line for text in file if (line := text.strip())]


def _signature(path: str) -> Signature:
    """Return what changes with a file, or with a directory's list of names. The times are the last two."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:  # no path at all, such as one with a null byte
        return None
    return (
        status.st_dev, status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns,
        status.st_ctime_ns,
    )  # fmt: skip


def _paths() -> set[str]:
    modules = _modules()
    programs = {sys.orig_argv[0], sys.executable}
    paths = {*programs, *modules, *map(os.path.dirname, modules), *_mapped(), *sys.path, *_system()}
    for directory in {*sys.path, *site.getsitepackages(), *([site.USER_SITE] if site.USER_SITE else [])}:
        paths.add(directory)
        paths.update(_path_files(directory))
    for directory in (os.path.dirname(sys.executable), os.path.dirname(os.path.dirname(sys.executable))):
        paths.add(os.path.join(directory, "pyvenv.cfg"))
    return {path for path in paths if path}


def _modules() -> set[str]:
    """Return the files of all modules that are imported."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {file for file in files if isinstance(file, str)}


def _mapped() -> set[str]:
    """Return the files in this process's memory: the interpreter, its libraries, the locale.

    Raises:
        ValueError: one has been removed since it was opened.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {fields[5] for line in file if len(fields := line.rstrip("\n").split(None, 5)) > 5}
    paths = {path for path in paths if path.startswith("/")}
    if any(path.endswith(" (deleted)") for path in paths):
        raise ValueError("a file has been replaced")
    return paths


def _system() -> set[str]:
    """Return what the C library reads."""
    paths = {
        "/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/localtime", "/usr/lib/locale", "/usr/lib/locale/locale-archive",
        "/usr/share/locale/locale.alias",
    }  # fmt: skip
    zone = os.environ.get("TZ", "").lstrip(":")
    return paths | ({os.path.join("/usr/share/zoneinfo", zone)} if zone else set())


def _path_files(directory: str) -> set[str]:
    """Return the files *.pth in a directory, and the directories that they name, which may come to exist.

    Raises:
        ValueError: one of them has code that may do anything.
    """
    try:
        names = [name for name in os.listdir(directory) if name.endswith(".pth")]
    except OSError:
        return set()
    found = set()
    for name in names:
        found.add(os.path.join(directory, name))
        lines = [line for line in _lines(os.path.join(directory, name)) if not line.startswith("#")]
        code = {line for line in lines if line.startswith(("import ", "import\t"))}
        if code and name not in KNOWN_PATH_FILES:
            raise ValueError("code runs at the start")
        found.update(os.path.join(directory, line) for line in lines if line not in code)
    return found
