"""Ends all parts of the agent's cgroup and lets nothing more in, so that scoring is alone with what start() left.

Never read from the machine's disk: the controller sends this text to the exec server, followed by a call of `main`.
`agent_cgroup.sh reopen` lets the agent in again.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time

ROOT = "/sys/fs/cgroup"
# Files without contents, which keep inodes for scoring; the file system keeps blocks for root by itself.
INODES = "/usr/lib/provisioner/inodes"
INODES_FOR_SCORING = 1000
SEGMENTS = "/proc/sysvipc/shm"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS, PAUSE_SECONDS = 20.0, 0.02


def main(root: str = ROOT, inodes: str = INODES, segments: str = SEGMENTS) -> None:
    """Ends the agent's processes. Exits with 1 and a message if they do not end.

    Args:
        root: where the cgroups are.
        inodes: the directory of the files that keep inodes.
        segments: the kernel's list of System V segments.
    """
    try:
        _end(os.path.join(root, "agent"))
        _free_inodes(inodes)
        _remove_segments(segments)
    except OSError as error:
        sys.exit(f"{error}")


def _end(cgroup: str) -> None:
    # A login finds the part `logins`, and so does not set the limits, among them that of processes, anew.
    _write(os.path.join(os.path.dirname(cgroup), "cgroup.subtree_control"), "+cpu +memory +pids")
    os.makedirs(cgroup, exist_ok=True)
    _write(os.path.join(cgroup, "pids.max"), "0")
    os.makedirs(os.path.join(cgroup, "logins"), exist_ok=True)
    _write(os.path.join(cgroup, "cgroup.kill"), "1")
    deadline = time.monotonic() + SECONDS
    while "populated 1" in _read(os.path.join(cgroup, "cgroup.events")):
        if time.monotonic() > deadline:
            sys.exit("processes of the agent do not end")
        time.sleep(PAUSE_SECONDS)


def _free_inodes(directory: str) -> None:
    """Removes the files that keep inodes if scoring may need them; that takes a while without KVM."""
    if os.path.isdir(directory) and os.statvfs(directory).f_favail < INODES_FOR_SCORING:
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)


def _remove_segments(segments: str) -> None:
    """Removes the agent's System V segments that no process uses: they outlive the processes that made them."""
    for line in _read(segments).splitlines()[1:]:
        _, segment, _, _, _, _, attached, user, *_ = line.split()
        if attached == "0" and int(user) == pwd.getpwnam("agent").pw_uid:
            subprocess.run(["ipcrm", "-m", segment], env={"PATH": PATH}, check=False)


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)
