"""Runs the exec server: what the controller wants done in this machine, one process per call.

Usage: `python3 -I -S exec_server.py SOCKET` listens on a socket that only root can connect to, for as long as the
machine lives. Without an argument it serves the one call on stdin and stdout, for a machine that has no server yet.
docs/explanation/exec-server.md has the protocol. It reads nothing of the family's and must never block on a call.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
# With -I, Python's path does not include this directory.
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from provisioner_guest.exec.call import Call  # noqa: E402

# More than ever call at once: sshd does not wait for a place.
BACKLOG = 1024
# What programs of ours import: they run in forks of this process, and an import takes a tenth of a second without KVM.
PRELOADED = (
    "contextlib", "ctypes", "dataclasses", "datetime", "errno", "fcntl", "functools", "json", "pathlib",
    "provisioner_guest.family.parent", "pwd", "select", "shutil", "stat", "struct", "subprocess", "tempfile",
    "traceback", "typing", "unicodedata",
)  # fmt: skip


def listen(path: str) -> None:
    """Accepts calls for ever, each in a process of its own."""
    for name in PRELOADED:
        importlib.import_module(name)
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    os.umask(0o177)
    listener.bind(path)
    listener.listen(BACKLOG)
    os.umask(0o022)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets calls that are over
    gc.collect()
    gc.freeze()
    address = os.environ.pop("NOTIFY_SOCKET", "")
    if address:  # tell systemd that calls are accepted from now on (sd_notify)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notice:
            notice.sendto(b"READY=1", address.replace("@", "\0", 1))
    while True:
        channel, _ = listener.accept()
        with channel:
            try:
                pid = os.fork()
            except OSError:  # no memory or process left: the controller sees the channel closed
                continue
            if pid == 0:
                listener.close()
                serve(channel.fileno(), channel.fileno())


def serve(reader: int, writer: int) -> None:
    """Serves one call and ends this process."""
    try:
        Call(reader, writer).serve()
    finally:
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:]:
        listen(sys.argv[1])
    else:
        serve(0, 1)
