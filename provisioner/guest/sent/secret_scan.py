"""Prints the files on the root file system, newer than the base image, that contain a secret.

Reads {NAME: value} as JSON from stdin. Prints one "PATH holds NAME" line per finding. Uses only the standard library.
"""

from __future__ import annotations

import json
import os
import stat
import sys

SKIPPED = ("/proc", "/sys", "/dev", "/run")
# Larger files are read in pieces that overlap by the longest secret.
PIECE = 4 << 20


def _holds(path: str, secrets: dict[str, bytes], longest: int) -> set[str]:
    names: set[str] = set()
    with open(path, "rb", buffering=0) as file:
        rest = b""
        while piece := file.read(PIECE):
            text = rest + piece
            names |= {name for name, value in secrets.items() if value in text}
            rest = text[-longest:]
    return names


def main() -> None:
    """Reads the secrets and searches the disk."""
    secrets = {name: value.encode() for name, value in json.load(sys.stdin).items()}
    longest = max(len(value) for value in secrets.values())
    # boot.sh wrote this file when the builder started.
    born = os.stat("/etc/hostname").st_mtime
    for directory, names, files in os.walk("/"):
        names[:] = [name for name in names if os.path.join(directory, name) not in SKIPPED]
        for name in files:
            path = os.path.join(directory, name)
            try:
                status = os.lstat(path)
                # A copied file may have an old modification time, but not an old change time.
                if not stat.S_ISREG(status.st_mode) or max(status.st_mtime, status.st_ctime) < born - 5:
                    continue
                for secret in sorted(_holds(path, secrets, longest)):
                    print(path, "holds", secret)
            except OSError:
                continue


if __name__ == "__main__":
    main()
