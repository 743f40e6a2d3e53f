"""Connects to machines by SSH with a pinned host key, runs commands, sends files.

Knows nothing of tasks. The machine is not trusted: whatever it does, each call here ends in time and in little memory.
The content of output is checked elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Self

import paramiko

from provisioner.errors import CommandTimeoutError, MachineLostError, NotStartedError, ProvisionerError, TaskError
from provisioner.models import Endpoint
from provisioner.recording.calls import Call, CallLog
from provisioner.remote import exec_frames
from provisioner.remote.answering_socket import ATTEMPT_SECONDS, answering_socket, no_ssh
from provisioner.remote.bounded_transport import BoundedTransport
from provisioner.remote.callers_errors import CallersErrors
from provisioner.remote.exchange import (
    Completed,
    Deadline,
    Exchange,
    InputFeeder,
    LiveInput,
    OutputCollector,
    size_bytes,
    transfer_seconds,
)
from provisioner.remote.exec_channel import NoServerError, close_call, open_call
from provisioner.remote.exec_frames import ExecViolation
from provisioner.remote.login import Login
from provisioner.remote.output_buffer import OUTPUT_LIMIT_BYTES
from provisioner.signals import go_on
from provisioner.validation import shown

# For each answer of sshd itself: the handshake, the login, the start of a command.
HANDSHAKE_SECONDS = 60
# What our own side does in a moment: copies of a few bytes, a result read, a file of some megabytes written.
SMALL_CALL_SECONDS = 120.0
# A command that has not ended although its time is over is cut off with its connection after this time.
CUT_OFF_SECONDS = 10.0


class Connection:
    """Keeps an open connection to one machine as one user. Use as a context manager.

    Args:
        login: the user, the machine and the keys.
        wait_seconds: how long to wait for the machine's sshd to answer.
        alive: called between attempts; False means that waiting is useless.
        check: called whenever the connection waits; an exception that it raises ends the wait.
        calls: records what the machine is told to do; None records nothing.

    Raises:
        MachineLostError: sshd did not answer in time, showed another host key, or refused the login.
    """

    def __init__(
        self,
        login: Login,
        wait_seconds: float = 30,
        alive: Callable[[], bool] = lambda: True,
        check: Callable[[], None] = go_on,
        calls: CallLog | None = None,
    ) -> None:
        self.login = login
        self._calls = calls or CallLog()
        self._check = check

        def worth_waiting() -> bool:
            check()
            return alive()

        where = f"{login.user}@{login.endpoint.host}:{login.endpoint.port}"
        deadline = time.monotonic() + wait_seconds
        self._via = Connection(login.via, wait_seconds, alive, check) if login.via else None
        stream: socket.socket | paramiko.Channel | None = None
        try:
            stream = (
                self._via._channel_to(login.endpoint, deadline, worth_waiting, where)
                if self._via
                else answering_socket(login, deadline, worth_waiting, where)
            )
            self._transport = _transport(stream, login, where)
            with self._cut_off_after(3 * HANDSHAKE_SECONDS):
                self._handshake(where)
        except BaseException:
            if self._via:
                self._via.close()
            if stream:
                stream.close()  # its transport's thread ends with it
            raise

    def _channel_to(
        self, endpoint: Endpoint, deadline: float, alive: Callable[[], bool], where: str
    ) -> paramiko.Channel:
        """Waits for another machine's sshd, at its address as seen from this machine, and opens a channel to it."""
        while time.monotonic() < deadline and alive():
            try:
                with self._cut_off_after(2 * HANDSHAKE_SECONDS):
                    return self._transport.open_channel(
                        "direct-tcpip", (endpoint.host, endpoint.port), ("127.0.0.1", 0), timeout=HANDSHAKE_SECONDS
                    )
            except Exception:  # it does not listen yet
                if not self._transport.is_active():
                    raise self._lost() from None
            time.sleep(ATTEMPT_SECONDS)
        raise no_ssh(where, alive)

    def _handshake(self, where: str) -> None:
        try:
            self._transport.start_client(timeout=HANDSHAKE_SECONDS)
            host_key = self._transport.get_remote_server_key()
            if f"{host_key.get_name()} {host_key.get_base64()}" != self.login.host_key:
                raise MachineLostError(f"{where} shows a host key that is not the machine's: refusing to go on.")
            key = paramiko.Ed25519Key.from_private_key_file(str(self.login.private_key))
            self._transport.auth_publickey(self.login.user, key)
        except ProvisionerError:
            raise
        except Exception as error:  # paramiko raises whatever the machine's bytes made it stumble over
            if violation := self._transport.violation:
                raise _refused(where, "sshd", violation) from error
            raise MachineLostError(f"{where} answers, but SSH fails: {shown(str(error))}") from error
        self._transport.set_keepalive(15)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_tcp(self, port: int) -> paramiko.Channel:
        """Opens a channel to a port on which a program in the machine listens, on the machine's loopback.

        Raises:
            ConnectionRefusedError: nothing listens there, or sshd does not say so in time.
            MachineLostError, TaskError: as for run.
        """
        try:
            return self._transport.open_port(port, HANDSHAKE_SECONDS)
        except Exception as error:  # paramiko raises whatever the machine's bytes made it stumble over
            self.require_active()
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"Port {port} of the machine is closed.") from error

    def require_active(self) -> None:
        """Checks that the connection has not broken, as far as is known here.

        Raises:
            MachineLostError, TaskError: it has.
        """
        if not self.active:
            raise self._lost()

    @property
    def active(self) -> bool:
        """Whether the connection has not broken, as far as is known here."""
        return self._transport.is_active()

    def close(self) -> None:
        """Ends the connection, and whatever waits for it. Safe to repeat, and never waits for the machine."""
        # The outermost socket goes first: a machine in between may take no more messages.
        if self._via:
            self._via.close()
        self._transport.close()

    @contextlib.contextmanager
    def _cut_off_after(self, seconds: float) -> Iterator[None]:
        """Cuts the connection off if the context has not ended after a time: a machine may keep any call waiting."""
        timer = threading.Timer(seconds, self.close)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        program: str | None = None,
        stdin: bytes | IO[bytes] | LiveInput = b"",
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_seconds: float | None = SMALL_CALL_SECONDS,
        limit_bytes: int = OUTPUT_LIMIT_BYTES,
        part: str = "",
    ) -> Completed:
        """Runs a command and waits for its end, but not for processes that it left in the background.

        Args:
            argv: the command and its arguments. No shell reads them.
            user: the user that runs it, with the environment of a login.
            cwd: the directory; None for the user's home.
            environment: further variables. No process list shows them.
            program: Python text, which runs in a process that the exec server forks, with `argv` as its sys.argv.
            stdin: the command's whole input.
            on_stdout, on_stderr: called with each piece of output as it arrives.
            timeout_seconds: when the command must have ended, at the latest. None waits for as long as it takes, which
                is for commands that an operator watches, or that may last until the machine's end.
            limit_bytes: how much of each stream is kept; the middle of a longer one is cut out.
            part: what it is for, in the record of calls.

        Raises:
            MachineLostError: the connection broke, or the machine's exec server ended or fell silent.
            CommandTimeoutError: the command did not end in time. The channel is closed, by which the machine ends all
                processes of the command; if the machine lets even that wait, the connection is cut off. A command that
                was not even started is a NotStartedError.
            TaskError: the machine's sshd or exec server sent what no honest one sends; the connection is closed.
            Exception: a listener or the connection's check raised it. The channel is closed as well.
        """
        operation, more = ("execute", {}) if program is None else ("interpret", {"program": program})
        request = exec_frames.request(
            operation, user=user, argv=argv, cwd=cwd, environment=environment, timeout_seconds=timeout_seconds, **more
        )
        call = Call(operation, user, argv, part)
        return self._call(call, argv[0], request, stdin, on_stdout, on_stderr, timeout_seconds, limit_bytes)

    def read_file(self, path: str, limit_bytes: int, *, user: str = "root", remove: bool = False) -> bytes:
        """Returns a regular file's contents.

        Args:
            remove: whether the file is removed afterwards.

        Raises:
            OSError: with the errno of the user's attempt in the machine: ENOENT, EACCES, EISDIR; EFBIG if the file has
                more than `limit_bytes`.
            MachineLostError, CommandTimeoutError, TaskError: as for run.
        """
        contents = bytearray()  # not the pieces: a machine could send one for every byte
        left = limit_bytes + exec_frames.DATA_LIMIT_BYTES

        def take(data: bytes) -> None:
            nonlocal left
            left -= len(data)
            if left < 0:
                raise TaskError(f"The machine sent more of {shown(path)} than it was asked for.")
            contents.extend(data)

        request = exec_frames.request("read", user=user, path=path, limit_bytes=limit_bytes, remove=remove)
        seconds = SMALL_CALL_SECONDS + transfer_seconds(limit_bytes)
        call = Call("read", user, [path])
        done = self._call(call, f"Reading {path}", request, b"", take, None, seconds, 0)
        _require_file(done, path)
        return bytes(contents)

    def write_file(self, path: str, data: bytes | IO[bytes], *, user: str = "root", mode: int = 0o644) -> None:
        """Writes a file, and makes its directories.

        Args:
            mode: its permissions if it is new.

        Raises:
            OSError: with the errno of the user's attempt in the machine.
            MachineLostError, CommandTimeoutError, TaskError: as for run.
        """
        request = exec_frames.request("write", user=user, path=path, mode=mode)
        seconds = SMALL_CALL_SECONDS + transfer_seconds(size_bytes(data))
        call = Call("write", user, [path])
        _require_file(self._call(call, f"Writing {path}", request, data, None, None, seconds, 0), path)

    def _call(
        self,
        call: Call,
        what: str,
        request: bytes,
        stdin: bytes | IO[bytes] | LiveInput,
        on_stdout: Callable[[bytes], None] | None,
        on_stderr: Callable[[bytes], None] | None,
        timeout_seconds: float | None,
        limit_bytes: int,
    ) -> Completed:
        """Has the machine's exec server carry out one call."""
        deadline = Deadline(what, timeout_seconds)
        source = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        callers = CallersErrors()
        in_time = (
            contextlib.nullcontext()
            if timeout_seconds is None
            else self._cut_off_after(timeout_seconds + CUT_OFF_SECONDS)
        )
        listeners = (on_stdout and callers.watched(on_stdout), on_stderr and callers.watched(on_stderr))
        recorded = self._calls.recorded(call)
        with recorded, in_time, self._channel(what, callers, deadline) as (channel, preamble):
            done = Exchange(
                channel=channel,
                feeder=InputFeeder(channel, preamble + request, source, call.bytes),
                collector=OutputCollector(limit_bytes, *listeners, call.bytes),
                deadline=deadline,
                is_connected=lambda: self.active,
                check=callers.watched(self._check),
            ).finish()
            call.exit_code = done.exit_code
            return done

    @contextlib.contextmanager
    def _channel(
        self, what: str, callers: CallersErrors, deadline: Deadline
    ) -> Iterator[tuple[paramiko.Channel, bytes]]:
        start = Deadline("The start", HANDSHAKE_SECONDS)
        check = callers.watched(self._check)

        def go_on() -> None:
            check()
            deadline.require()

        try:
            with self._cut_off_after(2 * HANDSHAKE_SECONDS):
                channel, preamble = open_call(self._transport, HANDSHAKE_SECONDS, go_on)
        except NoServerError as error:
            raise MachineLostError(f"The machine at {self._where}: {error}") from error
        except Exception as error:  # paramiko raises whatever the machine's bytes made it stumble over
            if error is callers.raised:
                raise
            if isinstance(error, CommandTimeoutError) or start.is_over:
                raise NotStartedError(
                    f"The machine at {self._where} does not answer: it did not start {what}."
                ) from error
            raise self._lost() from error
        try:
            yield channel, preamble
        except ExecViolation as error:
            self.close()
            raise _refused(self._where, "exec server", error) from error
        except (paramiko.SSHException, EOFError, ConnectionError) as error:
            if error is callers.raised:
                raise
            deadline.require()
            raise self._lost() from error
        finally:
            with self._cut_off_after(CUT_OFF_SECONDS), contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                close_call(channel)

    @property
    def _where(self) -> str:
        return f"{self.login.endpoint.host}:{self.login.endpoint.port}"

    def _lost(self) -> ProvisionerError:
        if violation := self._transport.violation:
            return _refused(self._where, "sshd", violation)
        return MachineLostError(f"The connection to the machine at {self._where} broke.")


def _transport(stream: socket.socket | paramiko.Channel, login: Login, where: str) -> BoundedTransport:
    """Returns a transport that is not connected yet."""
    key_type = login.host_key.split()[0]
    try:
        transport = BoundedTransport(stream, key_type)
    except ValueError as error:
        raise MachineLostError(
            f"{where} answers, but SSH fails: host keys of type {key_type} are not supported."
        ) from error
    transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = HANDSHAKE_SECONDS
    return transport


def _refused(where: str, program: str, violation: Exception) -> TaskError:
    rules = "SSH" if program == "sshd" else "its protocol"
    return TaskError(
        f"The {program} of the machine at {where} breaks the rules of {rules}: {violation}.",
        hint=f"No honest {program} does that; somebody has put another in its place.",
    )


def _require_file(done: Completed, path: str) -> None:
    """Raises what kept a machine from reading or writing a file: its errno is the exit code."""
    if number := done.errno or done.exit_code:
        raise OSError(number, os.strerror(number), path)
