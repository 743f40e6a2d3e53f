"""Keeps the family's interpreter ready, and forks a process of it for each later operation, as if it had just started.

The interpreter that was started for an operation leaves a copy of itself behind before it imports anything of the
family's: the warm interpreter. It waits on a socket that only root can reach, never runs code of the family, and ends
itself once an interpreter that starts now might be another one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import provisioner_warm_files

SOCKET = "socket"
# How long the other side of a new connection has for what it must say.
TALK_SECONDS = 20.0
# How often the warm interpreter looks whether another has taken its place.
LOOK_SECONDS = 60.0
BACKLOG = 16
# The most that is read of what an operation's surroundings are.
FACTS_BYTES = 64 << 20
# What a fresh interpreter has not imported.
OWN_MODULES = ("provisioner_warm", "provisioner_warm_files", "_socket")
# Draws random numbers when it is imported, and unlike the standard library not again in a fork.
SEEDED_MODULES = frozenset({"numpy"})


def stay(*, directory: str, cgroup: str | None, facts: str, cwd: str, began: float) -> bool:
    """Leave a warm interpreter behind if this one is fit for it. Must be called before anything of the family's runs.

    Args:
        directory: where its socket shall be; only root can enter it.
        cgroup: where it shall live, so that it does not end with its call; None if calls have no cgroups.
        facts: what an operation's surroundings must be so that a fork of this interpreter is like a fresh one.
        cwd: where the family's code runs.
        began: the time before this interpreter was started.

    Returns:
        False in this process; True in the process of each later operation, whose request is on stdin again.
    """
    try:
        files = provisioner_warm_files.Files.read(began) if _is_fit(facts) else None
        return files is not None and _Server(directory, facts, cwd, files).leave_behind(cgroup)
    finally:
        for name in OWN_MODULES:
            sys.modules.pop(name, None)


def _is_fit(facts: str) -> bool:
    """Return whether this process is nothing but an interpreter: a fork would lack its threads and its children."""
    import json

    command = json.loads(facts)["command"]
    return (
        # Nothing stands between the program's name and this interpreter, such as a script.
        sys.orig_argv == command
        and os.path.realpath(command[0]) == os.readlink("/proc/self/exe")
        and len(os.listdir("/proc/self/task")) == 1
        and not _has_children()
        and not _open_files()
        # It may have said why it is not as it should be, and would have to say it each time.
        and all(os.fstat(output).st_size == 0 for output in (1, 2))
        and SEEDED_MODULES.isdisjoint(sys.modules)
    )


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _open_files() -> list[int]:
    """Return the open files other than stdin, stdout and stderr."""
    open_files = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError:  # it was that of the list
            continue
        if number > 2:
            open_files.append(number)
    return open_files


class _Server:
    """The warm interpreter.

    Args:
        directory, facts, cwd: as of stay().
        files: those that an interpreter reads at its start.
    """

    def __init__(self, directory: str, facts: str, cwd: str, files: provisioner_warm_files.Files) -> None:
        self._path = os.path.join(directory, SOCKET)
        self._directory = directory
        self._facts = facts.encode("ascii")
        self._cwd = cwd
        self._files = files
        self._inode = 0
        self._pid = 0

    def leave_behind(self, cgroup: str | None) -> bool:
        """Start the warm interpreter: not as this process's child, which the family's code would find.

        Returns:
            whether this is the process of a later operation.
        """
        try:
            pid = os.fork()
        except OSError:  # no memory or process left
            return False
        if pid:
            os.waitpid(pid, 0)
            return False
        try:
            os.setsid()
            if cgroup is not None:
                os.makedirs(cgroup, exist_ok=True)
                _join(os.open(f"{cgroup}/cgroup.procs", os.O_WRONLY))
            _become_idle()
            listens, tell = os.pipe()
            if os.fork():
                os.close(tell)
                os.read(listens, 1)
                os._exit(0)
            os.close(listens)
            listener = self._listen()
            os.close(tell)
            self._carry_out(self._call(listener))
        except BaseException:
            os._exit(1)
        return True

    def _listen(self) -> Any:
        """Take the socket's place, if need be from another warm interpreter, which then ends."""
        import _socket

        directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        new = f"{os.getpid()}.new"
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        os.umask(0o177)
        # The path may be longer than a socket's address.
        listener.bind(f"/proc/self/fd/{directory}/{new}")
        os.umask(0o022)
        listener.listen(BACKLOG)
        os.rename(new, SOCKET, src_dir_fd=directory, dst_dir_fd=directory)
        os.close(directory)
        self._inode = os.lstat(self._path).st_ino
        return listener

    def _call(self, listener: Any) -> Any:
        """Wait for calls. Return the connection of one, in a process of its own."""
        import _socket

        self._pid = os.getpid()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets calls that are over
        listener.settimeout(LOOK_SECONDS)
        while True:
            try:
                descriptor, _ = listener._accept()
            except TimeoutError:
                if not self._is_in_place():
                    os._exit(0)
                continue
            try:
                pid = os.fork()
            except OSError:  # no memory or process left: the caller sees the connection closed
                pid = -1
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return _socket.socket(fileno=descriptor)
            os.close(descriptor)

    def _is_in_place(self) -> bool:
        try:
            return os.lstat(self._path).st_ino == self._inode
        except OSError:
            return False

    def _carry_out(self, connection: Any) -> None:
        """Fork a process for an operation, and tell the caller how it ends. Returns in that process only.

        It begins when the caller says so, which knows it by then. So nothing runs for a caller that waits no more.
        """
        connection.settimeout(TALK_SECONDS)
        facts, stdin, stdout, stderr, *cgroup = _files_of(connection)
        fits = os.pread(facts, FACTS_BYTES, 0) == self._facts and self._files.are_unchanged()
        os.close(facts)
        if not fits:
            connection.send(b"unfit")
            if self._is_in_place():
                os.unlink(self._path)
            if os.getppid() == self._pid:
                os.kill(self._pid, signal.SIGKILL)
            os._exit(0)
        if cgroup:
            _join(cgroup[0])
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if connection.recv(16) != b"go":
                os._exit(0)
            connection.close()
            _become_fresh(stdin, stdout, stderr)
            os.chdir(self._cwd)
            return
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        connection.send(b"process %d" % pid)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        connection.send(b"ended %d" % status)
        connection.settimeout(None)
        connection.recv(1)  # the process keeps its number until the caller has no more use for it
        os._exit(0)


def _become_idle() -> None:
    """Let go of what belongs to the operation for which this interpreter was started."""
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


def _join(processes: int) -> None:
    """Move this process into a cgroup, given its open file cgroup.procs."""
    os.write(processes, b"0")
    os.close(processes)


def _files_of(connection: Any) -> list[int]:
    """Receive a call: a message that consists of open files. They are facts, stdin, stdout, stderr and cgroup.procs.

    Raises:
        PermissionError: it comes from another user. The socket's directory should have kept it away.
    """
    import _socket

    size = 4
    peer = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 3 * size)
    if int.from_bytes(peer[size : 2 * size], sys.byteorder) != os.geteuid():
        raise PermissionError
    _, messages, _, _ = connection.recvmsg(16, _socket.CMSG_SPACE(5 * size))
    return [
        int.from_bytes(data[begin : begin + size], sys.byteorder)
        for level, kind, data in messages
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
        for begin in range(0, len(data), size)
    ]


def _become_fresh(stdin: int, stdout: int, stderr: int) -> None:
    """Give this process its streams, and forget what an interpreter that has just started does not know."""
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for finder in list(sys.path_importer_cache.values()):
        if hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()  # a directory may change twice within one tick of the clock
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()  # it still has the number of the process from which this one was forked
