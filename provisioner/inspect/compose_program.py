"""Provides Docker Compose as a reader of compose files, confined: the operator's own, or the one of Debian 13.

It never speaks to an engine. It has no network, where the kernel allows that, no variables but those that it is given,
and bounded time, memory and output. Of root's rights it keeps the right to read.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from provisioner import child_environment
from provisioner.clouds.local.host import DEBIAN_13_KEYS
from provisioner.clouds.local.images import sources
from provisioner.errors import HostError, UsageError
from provisioner.printable import last_lines
from provisioner.store.files import write_atomically
from provisioner.store.home import Home
from provisioner.store.locks import locked

# As Inspect's docker sandbox wants.
LEAST_VERSION = (2, 21)
# Measured: 50 ms and 60 MiB for an eval's file.
MAXIMUM_SECONDS = 10
MAXIMUM_MEMORY_BYTES = 512 << 20
MAXIMUM_OUTPUT_BYTES = 1 << 20
_WAIT_SECONDS = 120.0
_FETCH_SECONDS = 600.0
# Where Docker's client looks for plugins (docker/cli, cli-plugins/manager), beside the user's own directory.
_PLUGINS = tuple(
    Path("/usr", *parts, "docker", "cli-plugins")
    for parts in (("local", "lib"), ("local", "libexec"), ("lib",), ("libexec",))
)
_NAME = "docker-compose"
# Files of other computers are no part of an eval, and there is no network for them.
_ENVIRONMENT = {
    "COMPOSE_EXPERIMENTAL_GIT_REMOTE": "false",
    "COMPOSE_EXPERIMENTAL_OCI_REMOTE": "false",
    "DOCKER_CONFIG": "/nonexistent",
}
# A thread of a process looks for it, or fetches it, while the others wait.
_lock = threading.Lock()


def program(home: Home) -> Path:
    """Returns Compose: the operator's own if it is new enough, else Debian 13's, which is fetched into the home once.

    Raises:
        HostError: there is none, and it cannot be fetched.
    """
    with _lock:
        return _installed(os.environ.get("PATH", "")) or fetched(home)


def run(
    compose: Path, arguments: Sequence[str], environment: Mapping[str, str], stdin: bytes = b""
) -> tuple[bytes, str]:
    """Runs Compose, and returns what it writes to stdout and to stderr.

    Args:
        environment: its variables.

    Raises:
        UsageError: it ends with an error, which is the message, or does not fit its limits.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            done = subprocess.run(
                [*_confined(), str(compose), *arguments], input=stdin, stdout=stdout, stderr=stderr,
                env={**environment, **_ENVIRONMENT}, timeout=_WAIT_SECONDS, check=False,
            )  # fmt: skip
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -1
        except (OSError, ValueError) as error:  # the variables are too long for a process, or hold what none can
            raise UsageError(f"Compose cannot be given the variables that it names: {error}.") from error
        for file in (stdout, stderr):
            file.seek(0)
        output, said = stdout.read(), stderr.read().decode(errors="replace")
    # A Go program that has no more memory ends with 2, and one that a limit ends by a signal.
    if code < 0 or code == 2 or code > 128 or said.rstrip().endswith("file too large"):
        raise UsageError(
            f"with its aliases and variables in their places, it is too large: Compose may take "
            f"{MAXIMUM_MEMORY_BYTES >> 20} MiB of memory and {MAXIMUM_SECONDS} s, and answer with "
            f"{MAXIMUM_OUTPUT_BYTES} bytes. Shorten it"
        )
    if code:
        errors = [line for line in said.splitlines() if line.strip() and "level=warning" not in line]
        raise UsageError(last_lines("\n".join(errors), 2000).removesuffix("."))
    return output, said


@cache
def _confined() -> tuple[str, ...]:
    """Returns the command prefix that confines Compose.

    Where the kernel gives this user no network namespace, as in some containers, Compose keeps this computer's network.
    It has no reason to use it: files of other computers, its only one, are switched off.
    """
    limits = {
        "data": MAXIMUM_MEMORY_BYTES,
        "cpu": MAXIMUM_SECONDS,
        "fsize": MAXIMUM_OUTPUT_BYTES,
        "nofile": 256,
        "core": 0,
    }
    root = ("--bounding-set", "-all,+dac_read_search") if os.geteuid() == 0 else ()
    rest = (
        *("prlimit", *(f"--{name}={limit}" for name, limit in limits.items()), "--"),
        *("setpriv", "--pdeathsig", "KILL", "--no-new-privs", *root, "--"),
    )
    for own in (("--net",), ("--map-current-user", "--net")):
        namespace = ("unshare", *own, "--")
        argv = [*namespace, *rest, "true"]
        if subprocess.run(argv, capture_output=True, env={}, check=False).returncode == 0:
            return (*namespace, *rest)
    return rest


@cache
def _installed(path: str) -> Path | None:
    """Returns the operator's own Compose: a plugin of Docker's client, or a program of its own."""
    own = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "cli-plugins"
    plugins = [directory / _NAME for directory in (own, *_PLUGINS)] if shutil.which("docker", path=path) else []
    for each in (*plugins, Path(shutil.which(_NAME, path=path) or "/nonexistent")):
        if os.access(each, os.X_OK) and (version(each) or (0,)) >= LEAST_VERSION:
            return each
    return None


def version(compose: Path) -> tuple[int, ...] | None:
    """Returns the version of a Compose; None if it does not say it."""
    try:
        output, _ = run(compose, ["version", "--short"], {})
    except UsageError:
        return None
    found = re.match(rb"v?(\d+)\.(\d+)\.(\d+)", output)
    return tuple(map(int, found.groups())) if found else None


def fetched(home: Home) -> Path:
    """Returns Debian 13's Compose, which is fetched into the home once, and kept by its hash.

    Raises:
        HostError: it cannot be fetched.
    """
    directory = home.root / "compose"
    with locked(home.locks / "compose"):
        for kept in directory.glob("[0-9a-f]" * 64):
            if kept.name == _digest(kept):
                return kept
        home.make()
        directory.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".fetching-") as scratch:
            new = _fetch(Path(scratch))
            kept = directory / _digest(new)
            write_atomically(kept, new.read_bytes(), mode=0o700)
        return kept


@cache
def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(directory: Path) -> Path:
    """Fetches Debian's package, which apt checks by the archive's signatures, and returns the program in it."""
    keys = ",".join(sorted(map(str, DEBIAN_13_KEYS.parent.glob("debian-archive-trixie-*.gpg"))))
    if not keys:
        raise _missing(f"the keys of Debian 13's archive are missing ({DEBIAN_13_KEYS})")
    lines = [line.replace("deb ", f"deb [signed-by={keys}] ", 1) for line in sources("debian-13")]
    (directory / "sources.list").write_text("\n".join(lines) + "\n")
    for name in ("lists", "archives", "tree"):
        (directory / name / "partial").mkdir(parents=True)
    options = {
        "Dir::State::Lists": f"{directory}/lists",
        "Dir::State::Status": "/dev/null",
        "Dir::Cache": str(directory),
        "Dir::Etc::SourceList": f"{directory}/sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Acquire::Languages": "none",
        "APT::Architecture": "amd64",
        "APT::Architectures": "amd64",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "--quiet", *(f"--option={name}={value}" for name, value in options.items())]
    _run([*apt, "--error-on=any", "update"], directory)
    _run([*apt, "download", _NAME], directory)
    _run(["dpkg-deb", "--extract", *map(str, directory.glob("*.deb")), f"{directory}/tree"], directory)
    return directory / "tree/usr/libexec/docker/cli-plugins" / _NAME


def _run(argv: list[str], directory: Path) -> None:
    try:
        subprocess.run(
            argv, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=child_environment.for_download(os.environ) | {"LC_ALL": "C"}, timeout=_FETCH_SECONDS, check=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise _missing(f"{argv[0]} is not installed") from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise _missing(f"{argv[0]} failed", (error.output or b"").decode(errors="replace")) from error


def _missing(why: str, details: str = "") -> HostError:
    return HostError(
        f"Compose files are read by Docker Compose. There is none of {'.'.join(map(str, LEAST_VERSION))} or later on "
        f"PATH, and Debian 13's could not be fetched: {why}.",
        hint="Install Docker's plugin docker-compose-plugin, or Debian's packages apt and debian-archive-keyring.",
        details=last_lines(details, 4000) if details else None,
    )
