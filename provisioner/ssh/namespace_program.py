"""Opens sockets in the network namespace of the process that locks a pidfile, and passes them to the caller.

A program of its own, with the standard library only: a process may enter a user namespace only while it has a single
thread, so each call is a process, which should start quickly.

Usage: python -I -S namespace_program.py PIDFILE COUNT       unconnected TCP sockets
       python -I -S namespace_program.py PIDFILE HOST PORT   one socket, connected: OpenSSH's ProxyCommand, with
                                                             ProxyUseFdpass

Standard output is a Unix socket, over which the sockets go with one byte.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

CONNECT_SECONDS = 60.0
# linux/nsfs.h
NS_GET_USERNS = 0xB701


def main() -> int:
    """Passes the sockets on; says on stderr what went wrong."""
    pidfile, *wanted = sys.argv[1:]
    try:
        enter(holder(pidfile))
        if len(wanted) == 2:
            opened = [socket.create_connection((wanted[0], int(wanted[1])), CONNECT_SECONDS)]
            opened[0].setblocking(True)
        else:
            opened = [socket.socket() for _ in range(int(wanted[0]))]
        for each in opened:  # small messages do not wait: see namespaces.py
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with socket.socket(fileno=1) as caller:
            socket.send_fds(caller, [b"\0"], [each.fileno() for each in opened])
    except (OSError, ValueError) as error:
        print(f"the machine's network cannot be entered: {error}", file=sys.stderr)
        return 1
    return 0


def holder(pidfile: str) -> int:
    """Asks the kernel which process locks a pidfile. What is written in it may be out of date, or a lie.

    Raises:
        OSError: no process does, or the file does not exist.
    """
    # A pipe in its place would never open.
    with open(os.open(pidfile, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        # struct flock: type, whence, start, len, pid
        query = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, query))
    if kind == fcntl.F_UNLCK:
        raise ProcessLookupError("its process has ended")
    return int(pid)


def enter(pid: int) -> None:
    """Enters the network namespace of a process. Root stays in its own user namespace, others enter the process's.

    Raises:
        OSError: the process has ended, belongs to another user, or has no network namespace of its own.
    """
    own, theirs = "/proc/self/ns", f"/proc/{pid}/ns"
    if os.readlink(f"{own}/net") == os.readlink(f"{theirs}/net"):
        raise PermissionError("its process is in the network of the host")
    libc = ctypes.CDLL(None, use_errno=True)
    # All are opened first: within the user namespace, /proc/PID may be closed.
    network = os.open(f"{theirs}/net", os.O_RDONLY)
    # That of the network, in which the process may have made another for itself.
    owners = [fcntl.ioctl(network, NS_GET_USERNS)] if os.geteuid() else []
    for namespace in (*owners, network):
        if libc.setns(namespace, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.close(namespace)


if __name__ == "__main__":
    sys.exit(main())
