"""Starts what a call of the exec server asks for, in a process of its own: a program, Python text, or work on a file.

The process becomes the user before it touches anything of the user's. What cannot start is reported with its errno.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import signal
import stat
import sys
import traceback

from provisioner_guest.login import ROOT_PATH, USER_PATH, become, login_environment, protect, restore_signals

TYPE_CHECKING = False  # without an import of typing, which costs each call time
if TYPE_CHECKING:
    from typing import NoReturn, TypedDict

    from provisioner_guest.cgroup import Cgroup
    from provisioner_guest.exec.container import Container

    class Request(TypedDict):
        """What the controller asks for."""

        operation: str
        user: str
        cwd: str | None
        environment: dict[str, str]
        argv: list[str]
        program: str
        timeout_seconds: float | None
        path: str
        limit_bytes: int
        remove: bool
        mode: int
        container: str
        container_pid: int


MOST_DESCRIPTORS = 4096
CHUNK_BYTES = 64 << 10
PR_SET_DUMPABLE = 4
HIGHEST_USER = (1 << 32) - 2
# In the new process: the pipe on which it reports to the server why it cannot start.
REPORT = 3


class StartError(Exception):
    """A process cannot be started.

    Args:
        what: what is wrong: user, directory, program, file, process or container.
        number: the errno.
        text: an explanation.
    """

    def __init__(self, what: str, number: int, text: str) -> None:
        super().__init__(what, number, text)
        self.report: dict[str, str | int] = {"what": what, "errno": number, "text": text[:1000]}


class Child:
    """Runs a call's process.

    Args:
        request: what to do.
        cgroup: where.
        container: in which container; None for the machine.

    Attributes:
        pid: the process, which leads a session and a process group; None after its end.
        stdin, stdout, stderr: our ends of its pipes, which never block.
        status: the pipe on which it reports why it cannot start. It closes it without a report when it starts.
    """

    def __init__(self, request: Request, cgroup: Cgroup, container: Container | None = None) -> None:
        self.stdin: int | None
        self.status: int | None
        self.pid: int | None
        theirs, stdin = os.pipe()
        self.stdin = stdin
        self.stdout, out = os.pipe()
        self.stderr, err = os.pipe()
        self.status, report = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _child(request, cgroup, container, (theirs, out, err, report))
        for descriptor in (theirs, out, err, report):
            os.close(descriptor)
        for descriptor in (stdin, self.stdout, self.stderr):
            os.set_blocking(descriptor, False)

    def wait(self, options: int) -> int | None:
        """Returns the status of the process if it has ended, otherwise None. Options are those of os.waitpid."""
        assert self.pid is not None
        pid, status = os.waitpid(self.pid, options)
        if not pid:
            return None
        self.pid = None
        return status

    def kill(self) -> None:
        """Kills the process group, unless the process has ended: another process may then have its number."""
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            if self.pid:
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)

    def close_stdin(self) -> None:
        """Ends the process's input."""
        if self.stdin is not None:
            os.close(self.stdin)
            self.stdin = None


def _child(request: Request, cgroup: Cgroup, container: Container | None, descriptors: tuple[int, ...]) -> NoReturn:
    """Carries out the request and ends the process, whatever happens."""
    code = 255
    try:
        # The pipes become this process's streams and REPORT; the server's other descriptors are closed.
        for number, high in enumerate([fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 16) for each in descriptors]):
            os.dup2(high, number, inheritable=number != REPORT)
        os.closerange(REPORT + 1, MOST_DESCRIPTORS)
        code = _run(request, cgroup, container)
    except StartError as error:
        _tell(error.report)
    except OSError as error:
        _tell(StartError("process", error.errno or errno.EIO, str(error)).report)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _tell(what: dict[str, str | int]) -> None:
    try:
        os.write(REPORT, json.dumps(what).encode("ascii"))
    except OSError:  # it had begun
        os.write(2, json.dumps(what).encode("ascii"))


def _run(request: Request, cgroup: Cgroup, container: Container | None) -> int:
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(0o022)
    protect("0")
    if container:
        restore_signals()
        return container.execute(request, cgroup, REPORT)
    cgroup.join()
    try:
        user = account(request["user"])
    except KeyError:
        raise StartError("user", errno.ENOENT, "there is no user " + request["user"]) from None
    become(user)
    try:
        os.chdir(request["cwd"] or user.pw_dir)
    except OSError as error:
        if request["cwd"]:
            raise StartError("directory", error.errno or errno.EIO, str(error)) from None
        os.chdir("/")
    path = ROOT_PATH if user.pw_uid == 0 else USER_PATH
    environment = login_environment("/etc", user.pw_name, user.pw_dir, user.pw_shell or "/bin/sh", path)
    environment.update(request["environment"])
    return OPERATIONS[request["operation"]](request, environment)


def exit_code(status: int) -> int:
    """Returns a process's exit code, 128+n if signal n ended it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def account(user: str) -> pwd.struct_passwd:
    """Returns the account of a user, by name or number. A number without an account gets root's group and home /.

    So does Docker. Names go first: a name may be a number.

    Raises:
        KeyError: there is no such user.
    """
    try:
        return pwd.getpwnam(user)
    except KeyError:
        # The number above the highest would mean "no change", and so root.
        if not (user.isascii() and user.isdigit() and len(user) <= 10 and int(user) <= HIGHEST_USER):
            raise
    try:
        return pwd.getpwuid(int(user))
    except KeyError:
        return pwd.struct_passwd((user, "x", int(user), 0, "", "/", "/bin/sh"))


def _execute(request: Request, environment: dict[str, str]) -> int:
    restore_signals()
    argv = request["argv"]
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        number = error.errno or errno.EIO
        raise StartError("program", number, argv[0] + ": " + os.strerror(number)) from None


def _interpret(request: Request, environment: dict[str, str]) -> int:
    """Runs Python text in this process: as if by `python3 -I -S -`, but without an interpreter's start."""
    os.close(REPORT)
    _be_readable()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = request["argv"]
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(request["program"], request["argv"][0], "exec", dont_inherit=True), main.__dict__)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 120  # as Python itself ends then
    return code


def _be_readable() -> None:
    """Lets the user read this process's entries in /proc again: a change of user forbids that."""
    if os.access("/proc/self/fd", os.R_OK):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 255
    sys.stderr.write(str(value) + "\n")
    return 1


def _read(request: Request, _environment: dict[str, str]) -> int:
    """Writes a file's contents to stdout; returns an errno, 0 if all is well."""
    path, limit = request["path"], request["limit_bytes"]
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        _require_file(os.fstat(file).st_mode)
        left = limit + 1
        os.close(REPORT)
        while left > 0:
            data = os.read(file, min(CHUNK_BYTES, left))
            if not data:
                break
            _write_all(1, data)
            left -= len(data)
        if left <= 0:
            return errno.EFBIG
        if request["remove"]:
            os.unlink(path)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _write(request: Request, _environment: dict[str, str]) -> int:
    """Writes stdin to a file, whose directories are made; returns an errno, 0 if all is well."""
    path = request["path"]
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, request["mode"])
        _require_file(os.fstat(file).st_mode)
        os.close(REPORT)
        while True:
            data = os.read(0, CHUNK_BYTES)
            if not data:
                break
            _write_all(file, data)
        os.close(file)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _require_file(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


OPERATIONS = {"execute": _execute, "interpret": _interpret, "read": _read, "write": _write}
