"""Connects to machines by SSH with a pinned host key, runs commands, sends files. The only importer of paramiko.

Knows nothing of tasks. Output is untrusted: its size is bounded here, its content checked elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import socket
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, ParamSpec, Self

import paramiko

from provisioner.errors import MachineLostError
from provisioner.models import Endpoint
from provisioner.remote.exchange import Completed, Deadline, Exchange, InputFeeder, OutputCollector
from provisioner.remote.login import Login
from provisioner.remote.output_buffer import OUTPUT_LIMIT_BYTES
from provisioner.signals import go_on

# A forwarded port accepts connections before the guest's sshd does, and a packet lost then is repeated only seconds
# later. So a new attempt starts after this time, beside the earlier ones.
ATTEMPT_SECONDS = 0.7
ATTEMPTS_AT_ONCE = 4
HANDSHAKE_SECONDS = 60
# curve25519 is the cheapest for an emulated CPU; the others are for hardened images.
KEY_EXCHANGES = ("curve25519-sha256@libssh.org", "ecdh-sha2-nistp256", "diffie-hellman-group16-sha512")

Arguments = ParamSpec("Arguments")


class Connection:
    """Keeps an open connection to one machine as one user. Use as a context manager.

    Args:
        login: the user, the machine and the keys.
        wait_seconds: how long to wait for the machine's sshd to answer.
        alive: called between attempts; False means that waiting is useless.
        check: called whenever the connection waits; an exception that it raises ends the wait.

    Raises:
        MachineLostError: sshd did not answer in time, showed another host key, or refused the login.
    """

    def __init__(
        self,
        login: Login,
        wait_seconds: float = 30,
        alive: Callable[[], bool] = lambda: True,
        check: Callable[[], None] = go_on,
    ) -> None:
        self.login = login
        self._check = check

        def worth_waiting() -> bool:
            check()
            return alive()

        where = f"{login.user}@{login.endpoint.host}:{login.endpoint.port}"
        deadline = time.monotonic() + wait_seconds
        self._via = Connection(login.via, wait_seconds, alive, check) if login.via else None
        try:
            stream = (
                self._via._channel_to(login.endpoint, deadline, worth_waiting, where)
                if self._via
                else _answering_socket(login.endpoint, deadline, worth_waiting, where)
            )
            self._transport = paramiko.Transport(stream)
            try:
                self._handshake(where)
            except BaseException:
                self._transport.close()
                stream.close()  # a transport that was never started leaves it open
                raise
        except BaseException:
            if self._via:
                self._via.close()
            raise

    def _channel_to(
        self, endpoint: Endpoint, deadline: float, alive: Callable[[], bool], where: str
    ) -> paramiko.Channel:
        """Waits for another machine's sshd, at its address as seen from this machine, and opens a channel to it."""
        while time.monotonic() < deadline and alive():
            try:
                return self._transport.open_channel(
                    "direct-tcpip", (endpoint.host, endpoint.port), ("127.0.0.1", 0), timeout=HANDSHAKE_SECONDS
                )
            except paramiko.SSHException:  # it does not listen yet
                if not self._transport.is_active():
                    raise self._lost() from None
            time.sleep(ATTEMPT_SECONDS)
        raise _no_ssh(where, alive)

    def _handshake(self, where: str) -> None:
        self._transport.banner_timeout = HANDSHAKE_SECONDS
        self._transport.auth_timeout = HANDSHAKE_SECONDS
        options = self._transport.get_security_options()
        options.kex = tuple(name for name in KEY_EXCHANGES if name in options.kex) or options.kex
        key_type = self.login.host_key.split()[0]
        try:
            options.key_types = (key_type,)
        except ValueError as error:
            raise MachineLostError(
                f"{where} answers, but SSH fails: host keys of type {key_type} are not supported."
            ) from error
        try:
            self._transport.start_client(timeout=HANDSHAKE_SECONDS)
            shown = self._transport.get_remote_server_key()
            if f"{shown.get_name()} {shown.get_base64()}" != self.login.host_key:
                raise MachineLostError(f"{where} shows a host key that is not the machine's: refusing to go on.")
            key = paramiko.Ed25519Key.from_private_key_file(str(self.login.private_key))
            self._transport.auth_publickey(self.login.user, key)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise MachineLostError(f"{where} answers, but SSH fails: {error}") from error
        self._transport.set_keepalive(15)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection. Safe to repeat."""
        self._transport.close()
        if self._via:
            self._via.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | IO[bytes] = b"",
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
        timeout_seconds: float | None = None,
        limit_bytes: int = OUTPUT_LIMIT_BYTES,
    ) -> Completed:
        """Runs a command and waits for its end, but not for processes that it left in the background.

        Args:
            argv: the command and its arguments; quoted here for the login shell.
            stdin: the command's whole input.
            on_stdout, on_stderr: called with each piece of output as it arrives.
            timeout_seconds: None waits for as long as it takes.
            limit_bytes: how much of each stream is kept; the middle of a longer one is cut out.

        Raises:
            MachineLostError: the connection broke.
            TimeoutError: the command did not end in time. The channel is closed, which ends its input and output.
            Exception: a listener or the connection's check raised it. The channel is closed as well.
        """
        deadline = Deadline(argv[0], timeout_seconds)
        source = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        callers = _CallersErrors()
        with self._channel(argv, callers) as channel:
            return Exchange(
                channel=channel,
                feeder=InputFeeder(channel, source),
                collector=OutputCollector(
                    channel,
                    limit_bytes,
                    on_stdout and callers.watched(on_stdout),
                    on_stderr and callers.watched(on_stderr),
                ),
                deadline=deadline,
                is_connected=self._transport.is_active,
                check=callers.watched(self._check),
            ).finish()

    @contextlib.contextmanager
    def _channel(self, argv: Sequence[str], callers: _CallersErrors) -> Iterator[paramiko.Channel]:
        try:
            channel = self._transport.open_session(timeout=HANDSHAKE_SECONDS)
            try:
                channel.exec_command(shlex.join(argv))
                yield channel
            finally:
                channel.close()
        except (paramiko.SSHException, EOFError, ConnectionError) as error:
            if error is callers.raised:
                raise
            raise self._lost() from error

    def _lost(self) -> MachineLostError:
        endpoint = self.login.endpoint
        return MachineLostError(f"The connection to the machine at {endpoint.host}:{endpoint.port} broke.")

    def send_tree(self, tar_argv: Sequence[str], members: Callable[[tarfile.TarFile], None]) -> Completed:
        """Streams a tar archive into a command of the machine.

        Args:
            tar_argv: the command that reads the archive, such as `tar -x -C DIRECTORY`.
            members: called with the open archive; adds the members.
        """
        with tempfile.TemporaryFile() as spool:
            with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as archive:
                members(archive)
            spool.seek(0)
            return self.run(tar_argv, stdin=spool)


class _CallersErrors:
    """Remembers exceptions from a caller's own functions, as some look like a broken connection: BrokenPipeError does.

    Attributes:
        raised: the last exception.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None

    def watched(self, function: Callable[Arguments, None]) -> Callable[Arguments, None]:
        """Returns the function with its exceptions recorded."""

        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            try:
                function(*args, **kwargs)
            except BaseException as error:
                self.raised = error
                raise

        return call


def _answering_socket(endpoint: Endpoint, deadline: float, alive: Callable[[], bool], where: str) -> socket.socket:
    """Opens staggered connections and returns the first on which sshd sends something."""
    address = (endpoint.host, endpoint.port)
    attempts: list[tuple[socket.socket, float]] = []
    try:
        while time.monotonic() < deadline and alive():
            now = time.monotonic()
            if not attempts or (now - attempts[-1][1] > ATTEMPT_SECONDS and len(attempts) < ATTEMPTS_AT_ONCE):
                with contextlib.suppress(OSError):
                    attempts.append((socket.create_connection(address, timeout=10), now))
            for attempt in list(attempts):
                answer = _first_bytes(attempt[0])
                if answer:
                    attempts.remove(attempt)
                    attempt[0].settimeout(None)
                    return attempt[0]
                if answer is not None or now - attempt[1] > ATTEMPT_SECONDS * ATTEMPTS_AT_ONCE:
                    attempt[0].close()
                    attempts.remove(attempt)
            time.sleep(0.05)
    finally:
        for stream, _ in attempts:
            stream.close()
    raise _no_ssh(where, alive)


def _no_ssh(where: str, alive: Callable[[], bool]) -> MachineLostError:
    why = "it did not answer in time" if alive() else "it ended by itself"
    return MachineLostError(f"No SSH at {where}: {why}.")


def _first_bytes(stream: socket.socket) -> bytes | None:
    """Peeks at the first bytes from sshd: None if there are none yet, empty if the connection was closed."""
    try:
        return stream.recv(4, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""
