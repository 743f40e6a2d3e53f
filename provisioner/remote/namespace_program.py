"""Opens sockets in the network namespace of another process, and passes them to the caller. A program of its own.

Standard library only, and without any import of this package: a process may enter a user namespace only while it has a
single thread, so each call is a process, which should start quickly.

Usage: python -I -S namespace_program.py PIDFILE COUNT       unconnected TCP sockets
       python -I -S namespace_program.py PIDFILE HOST PORT   one socket, connected: OpenSSH's ProxyCommand, with
                                                             ProxyUseFdpass

Standard output is a Unix socket, over which the sockets go with one byte.
"""

import ctypes
import os
import socket
import sys

CONNECT_SECONDS = 60.0
# The longest pid and a line end.
PIDFILE_CHARACTERS = 12


def main() -> int:
    """Passes the sockets on; says on stderr what went wrong."""
    pidfile, *wanted = sys.argv[1:]
    try:
        with open(pidfile, encoding="ascii") as file:
            enter(int(file.read(PIDFILE_CHARACTERS)))
        if len(wanted) == 2:
            opened = [socket.create_connection((wanted[0], int(wanted[1])), CONNECT_SECONDS)]
            opened[0].setblocking(True)
        else:
            opened = [socket.socket() for _ in range(int(wanted[0]))]
        with socket.socket(fileno=1) as caller:
            socket.send_fds(caller, [b"\0"], [each.fileno() for each in opened])
    except (OSError, ValueError) as error:
        print(f"the machine's network cannot be entered: {error}", file=sys.stderr)
        return 1
    return 0


def enter(pid: int) -> None:
    """Enters the network namespace of a process, after its user namespace where that is another one.

    Raises:
        OSError: the process has ended, or belongs to somebody else.
    """
    own, theirs = "/proc/self/ns", f"/proc/{pid}/ns"
    is_same_user = os.readlink(f"{own}/user") == os.readlink(f"{theirs}/user")
    libc = ctypes.CDLL(None, use_errno=True)
    # All are opened first: within the user namespace, /proc/PID may be closed.
    namespaces = [os.open(f"{theirs}/{kind}", os.O_RDONLY) for kind in (["net"] if is_same_user else ["user", "net"])]
    for namespace in namespaces:
        if libc.setns(namespace, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.close(namespace)


if __name__ == "__main__":
    sys.exit(main())
