"""Builds the command lines of OpenSSH's client, and makes calls over a connection that it keeps open.

A command line has the key to log in with, the only host key to accept, and how to get to the machine. A kept connection
is a process in the background, which listens on a Unix socket and asks the machine's sshd for a channel to the exec
server for each connection to it. Only that process parses what sshd sends, without secrets and within limits. It offers
the machine nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from provisioner.base import child_environment, unix_socket
from provisioner.base.errors import ProvisionerError
from provisioner.base.signals import no_check
from provisioner.recording.calls import CallLog
from provisioner.ssh.calls import Calls
from provisioner.ssh.keys import CIPHERS, KEY_EXCHANGES, MACS, Login
from provisioner.ssh.namespaces import is_held, proxy_command


def ssh_command(login: Login, known_hosts: Path, *more: str) -> list[str]:
    """Returns OpenSSH's arguments for a login, and writes the file with the only host key to accept.

    Args:
        known_hosts: the file, ENVIRONMENT/keys/known_hosts_ROLE.
        more: further arguments.
    """
    alias = f"{known_hosts.parent.parent.name}-{known_hosts.name.removeprefix('known_hosts_')}"
    line = f"{alias} {login.host_key}\n"
    if not known_hosts.exists() or known_hosts.read_text() != line:  # another OpenSSH may be reading it now
        known_hosts.write_text(line)
    # OpenSSH expands % in the paths of files.
    key, hosts = (str(path).replace("%", "%%") for path in (login.private_key, known_hosts))
    argv = ["ssh", "-F", "none", "-i", key, "-p", str(login.endpoint.port)]
    options = [
        f"HostKeyAlias={alias}",
        f'UserKnownHostsFile="{hosts}"',
        "StrictHostKeyChecking=yes",
        # No other source of host keys, and no agent, whatever arguments follow.
        "GlobalKnownHostsFile=/dev/null",
        "KnownHostsCommand=none",
        "VerifyHostKeyDNS=no",
        "IdentityAgent=none",
        "IdentitiesOnly=yes",
        "LogLevel=ERROR",
    ]
    if login.via:
        through = ssh_command(login.via, known_hosts.with_name(f"{known_hosts.name}-jump"), "-W", "HOST:PORT")
        # OpenSSH expands % in the command, adds an "exec" and passes it to a shell.
        command = shlex.join(through).replace("%", "%%").replace("HOST:PORT", "%h:%p")
        options.append(f"ProxyCommand={command}")
    elif login.pidfile:
        connecting = proxy_command(login.pidfile, login.endpoint.host, login.endpoint.port)
        options += [f"ProxyCommand={shlex.join(connecting).replace('%', '%%')}", "ProxyUseFdpass=yes"]
    for option in options:
        argv += ["-o", option]
    return [*argv, *more, f"{login.user}@{login.endpoint.host}"]


# How long a connection is kept that no command uses.
IDLE_SECONDS = 60
# How long OpenSSH may take to connect and log in; a command that has waited as long connects without it.
START_SECONDS = 30.0
LOOK_SECONDS = 0.02
# For what OpenSSH does by itself, and for the machine's answer whether it is still there.
LOCAL_SECONDS = 5.0
ANSWER_SECONDS = 15.0
# What the process may cost, whatever the machine sends. It needs 1 MiB, and 2 MiB for a call whose output is not taken;
# in so much processor time it moves tens of gigabytes.
MEMORY_BYTES = 64 << 20
CPU_SECONDS = 900


class KeptChannel:
    """Carries one call to the exec server. Implements exchange.Channel.

    Args:
        stream: a connection to OpenSSH's socket.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self.closed = False
        self.eof_received: int = False

    def fileno(self) -> int:
        """Returns a file descriptor that is readable when something has arrived."""
        return self._stream.fileno()

    def recv_ready(self) -> bool:
        """Returns whether something has arrived; the end counts until `recv` has returned it."""
        return not (self.closed or self.eof_received) and self._is_ready(select.POLLIN)

    def recv(self, limit_bytes: int, /) -> bytes:
        """Takes a piece of what has arrived; empty at the end."""
        data = self._stream.recv(limit_bytes)
        self.eof_received = not data
        return data

    def send_ready(self) -> bool:
        """Returns whether OpenSSH takes input now, or never will again."""
        return self._is_ready(select.POLLOUT)

    def send(self, data: bytes, /) -> int:
        """Sends as much of a piece as OpenSSH takes now, and returns how many bytes those were."""
        return self._stream.send(data, socket.MSG_DONTWAIT)

    def cut(self) -> None:
        """Ends it for the call that uses it, perhaps in another thread."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it, by which the machine ends the call."""
        self.closed = True
        self._stream.close()

    def _is_ready(self, event: int) -> bool:
        poll = select.poll()
        poll.register(self._stream, event)
        return bool(poll.poll(0))


class KeptConnection(Calls):
    """Makes calls over a connection that OpenSSH keeps. Use as a context manager, which does not end that connection.

    That OpenSSH listens at `path` says nothing of the machine: see `answers`.

    Args:
        path: OpenSSH's socket.
        where: the machine's address, for messages.
        check: called whenever a call waits; an exception that it raises ends the call.
        calls: records what the machine is told to do; None records nothing.
        pidfile: as in the machine's Login.
    """

    def __init__(
        self,
        path: Path,
        where: str,
        check: Callable[[], None] = no_check,
        calls: CallLog | None = None,
        pidfile: Path | None = None,
    ) -> None:
        super().__init__(where, calls, check)
        self._pidfile = pidfile
        self._path = path
        self._is_closed = False
        self._channels = weakref.WeakSet[KeptChannel]()

    def listens(self) -> bool:
        """Returns whether OpenSSH runs, whatever has become of the machine."""
        try:
            _connected(control_path(self._path)).close()
        except OSError:
            return False
        return True

    def answers(self) -> bool:
        """Returns whether the machine's exec server answers a small call, within a few seconds.

        OpenSSH accepts every connection, even if the machine is gone. So the machine is asked before a command is sent.
        """
        try:
            self.read_file("/", 0, timeout_seconds=ANSWER_SECONDS)
        except ProvisionerError:
            return False
        except OSError:  # it is a directory, says the machine
            pass
        return True

    @property
    def active(self) -> bool:
        """Whether this side has not closed it, and the machine is there. If it breaks, each channel ends."""
        return not self._is_closed and (self._pidfile is None or is_held(self._pidfile))

    def close(self) -> None:
        """Ends the calls that were made here. Safe to repeat."""
        self._is_closed = True
        for channel in list(self._channels):
            channel.cut()

    @property
    def _answer_seconds(self) -> float:
        return LOCAL_SECONDS  # it is OpenSSH's answer

    def _open_call(self, check_in_time: Callable[[], None]) -> tuple[KeptChannel, bytes]:
        check_in_time()
        channel = KeptChannel(_connected(self._path))
        self._channels.add(channel)
        return channel, b""


def keep_connection(login: Login, known_hosts: Path, path: Path, server: str, check: Callable[[], None]) -> None:
    """Starts an OpenSSH process that keeps a connection until it is unused for a minute, or the machine is gone.

    OpenSSH's process inherits no terminal, output or session from this process, and no environment variables that
    could hold secrets. It works in the directory of its sockets, since OpenSSH takes no long paths.

    Args:
        login: the user, the machine and the keys.
        known_hosts: the file for the machine's host key, ENVIRONMENT/keys/known_hosts_ROLE.
        path: where it listens. A socket that is there is removed: no process may be listening on it.
        server: the exec server's socket in the machine.
        check: called repeatedly; an exception that it raises ends the attempt.

    Raises:
        OSError: a program is missing, or the machine did not let OpenSSH log in, or not in time.
    """
    for stale in (path, control_path(path)):
        stale.unlink(missing_ok=True)
    more = ["-N", "-L", f"./{path.name}:{server}"]
    for option in _options(login, path):
        more += ["-o", option]
    limits = [f"--data={MEMORY_BYTES}", f"--cpu={CPU_SECONDS}", "--core=0"]
    process = _started(["prlimit", *limits, "--", *ssh_command(login, known_hosts, *more)], path)
    deadline = time.monotonic() + START_SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:  # it goes into the background once it listens
            check()
            time.sleep(LOOK_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise ConnectionError("OpenSSH could not open a connection to the machine")


def end_connection(path: Path) -> None:
    """Ends the connection that OpenSSH keeps for `path`, if there is one.

    Raises:
        OSError: it does not answer, or the program is missing.
    """
    if not control_path(path).exists():
        return
    process = _started(["ssh", "-F", "none", "-S", control_path(path).name, "-O", "exit", "machine"], path)
    try:
        process.wait(LOCAL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError("OpenSSH does not answer") from error
    finally:
        process.kill()
        process.wait()


def control_path(path: Path) -> Path:
    """Returns the socket by which OpenSSH itself finds the process that listens on `path`."""
    return path.with_name(f"{path.name}.control")


def _connected(path: Path) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX)
    try:
        stream.settimeout(LOCAL_SECONDS)
        unix_socket.connect(stream, path)
        stream.settimeout(None)
    except BaseException:
        stream.close()
        raise
    return stream


def _started(argv: list[str], path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        cwd=path.parent,
        env=child_environment.for_program(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _options(login: Login, path: Path) -> list[str]:
    """Returns what keeps a connection (ssh_config(5)), and leaves the machine nothing that it could ask us for."""
    return [
        "ControlMaster=yes",
        f"ControlPath={control_path(path).name}",
        f"ControlPersist={IDLE_SECONDS}",
        "ExitOnForwardFailure=yes",
        "ServerAliveInterval=10",
        "ServerAliveCountMax=30",
        f"ConnectTimeout={START_SECONDS:.0f}",
        "BatchMode=yes",
        "PreferredAuthentications=publickey",
        f"HostKeyAlgorithms={login.host_key.split()[0]}",
        f"KexAlgorithms={','.join(KEY_EXCHANGES)}",
        f"Ciphers={','.join(CIPHERS)}",
        f"MACs={','.join(MACS)}",
        "Compression=no",
        "GlobalKnownHostsFile=none",
        "UpdateHostKeys=no",  # or the machine could have the file of its key changed
        "ForwardAgent=no",
        "ForwardX11=no",
        "Tunnel=no",
        "PermitLocalCommand=no",
        "PermitRemoteOpen=none",
    ]
