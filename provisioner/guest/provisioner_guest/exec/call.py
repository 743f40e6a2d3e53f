"""Serves one call of the exec server, from its request to its end: moves input and output, keeps the time limit.

Never holds more than a few pieces of data: what the controller does not take stays with the command. A frame of the
stream has a kind (1 byte), the payload's length (4 bytes, big-endian) and the payload; ssh/exec_frames.py is the
controller's side.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import struct
import time

from provisioner_guest.cgroup import Cgroup
from provisioner_guest.exec.container import Container
from provisioner_guest.exec.start import OPERATIONS, Child, StartError, account, exit_code

TYPE_CHECKING = False  # without an import of typing, which costs each call time
if TYPE_CHECKING:
    from typing import Any

    from provisioner_guest.exec.start import Request

HEADER = struct.Struct(">cI")
# From the controller: what to do (JSON, once, first), input, and the input's end (without a payload).
REQUEST, STDIN, STDIN_END = b"q", b"i", b"z"
# To the controller: it began, output, a sign of life, and how it ended (JSON, once, last).
STARTED, STDOUT, STDERR, ALIVE, EXIT = b"s", b"o", b"e", b"a", b"x"
REQUEST_BYTES = 16 << 20
DATA_BYTES = 64 << 10
LIMITS = {REQUEST: REQUEST_BYTES, STDIN: DATA_BYTES, STDIN_END: 0}
REQUEST_SECONDS = 60.0
ALIVE_SECONDS = 10.0
# How long output is awaited after the command's end: a process in the background may hold its pipes for ever.
LAST_OUTPUT_SECONDS = 0.1
# More than a pipe holds: what comes after it is another process's.
LAST_OUTPUT_PIECES = 16
INPUT_BYTES = 256 << 10
OUTPUT_BYTES = 64 << 10
# Of a container.
IDENTITY = re.compile("[0-9a-f]{12,64}")


class BadFrameError(Exception):
    """The controller sent something that is no frame."""


class ControllerGoneError(Exception):
    """The channel to the controller was closed, or brought no request in time."""


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Returns a frame."""
    return HEADER.pack(kind, len(payload)) + payload


def ended(**how: str | int) -> bytes:
    """Returns the frame that says how a call ended: `code`; `timed_out`; or `errno`, `what` and `text`."""
    return frame(EXIT, json.dumps(how).encode("ascii"))


def _name(user: str) -> str:
    """Returns the name of a user that may be given by number; the given text if there is no such user."""
    try:
        return account(user).pw_name
    except (KeyError, ValueError):  # a number without an account, or no name at all
        return user


class Call:
    """Serves one call.

    Args:
        reader, writer: descriptors of the channel to the controller; the same for a socket.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._received = bytearray()
        self._out = bytearray()
        self._input = bytearray()
        self._input_ended = False
        self._child: Child | None = None
        self._streams: dict[int, bytes] = {}
        self._report = bytearray()
        self._alive_at = time.monotonic()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._woken, wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Carries out the call, from its request to the frame that says how it ended, or why it could not start.

        If the command ends by itself, its processes in the background stay. All processes of the call are ended if the
        time is over, or if the system lacks something; also, and without a frame, if the controller goes or breaks the
        protocol.
        """
        cgroup = None
        try:
            request = self._request()
            try:
                container = None
                if request["container"]:
                    container = Container(request["container"], request["container_pid"])
                inside = container.cgroup if container else None
                cgroup = Cgroup(f"{os.getpid()}-{time.monotonic_ns()}", _name(request["user"]), inside)
                self._out += self._carry_out(request, cgroup, container)
            except StartError as error:
                self._out += ended(**error.report)
            except OSError as error:  # no cgroup can be made, or no memory, process or descriptor is left
                self._end_all(cgroup)
                self._out += ended(**StartError("process", error.errno or errno.EIO, str(error)).report)
            self._flush()
        except (ControllerGoneError, BadFrameError):
            self._end_all(cgroup)
            return
        if cgroup:
            cgroup.leave()

    def _end_all(self, cgroup: Cgroup | None) -> None:
        """Ends the call's processes: those of its cgroup, and of its process group, as root's may leave the cgroup."""
        if self._child:
            self._child.kill()
        if cgroup:
            cgroup.end()

    def _request(self) -> Request:
        """Waits for the first frame, and returns the request in it.

        Raises:
            ControllerGoneError: the controller closed the channel, or sent no whole frame within REQUEST_SECONDS.
            BadFrameError: it sent something else.
        """
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            first = self._next_frame()
            if first:
                break
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise ControllerGoneError
            self._poll({self._reader: select.POLLIN}, seconds_left)
            self._receive()
        kind, payload = first
        if kind != REQUEST:
            raise BadFrameError("the first frame is no request")
        return parse_request(payload)

    def _carry_out(self, request: Request, cgroup: Cgroup, container: Container | None) -> bytes:
        """Runs the call's process to its end and returns the frame that says how it ended."""
        limit = request["timeout_seconds"]
        deadline = None if limit is None else time.monotonic() + limit
        child = self._child = Child(request, cgroup, container)
        self._streams = {child.stdout: STDOUT, child.stderr: STDERR}
        status = None
        while status is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                self._end_all(cgroup)
                child.wait(0)
                self._drain()
                return ended(timed_out=True)
            ready = self._poll(self._interests(child), left)
            if child.status in ready:
                self._hear_report(child)
            self._move(child, ready)
            status = child.wait(os.WNOHANG)
        while child.status is not None:
            self._hear_report(child)
        if self._report:
            return ended(**json.loads(bytes(self._report)))
        self._drain()
        return ended(code=exit_code(status))

    def _hear_report(self, child: Child) -> None:
        """Takes a piece of what the process says of its start. If it closes the pipe without a word, it has started."""
        assert child.status is not None
        data = os.read(child.status, 4096)
        self._report += data
        if data:
            return
        os.close(child.status)
        child.status = None
        if not self._report:
            self._out += frame(STARTED)

    def _interests(self, child: Child) -> dict[int, int]:
        """Returns what to wait for. Output is read only while little of it waits for the controller."""
        wanted = {self._woken: select.POLLIN, self._reader: 0}
        if len(self._input) < INPUT_BYTES:
            wanted[self._reader] = select.POLLIN
        if self._out:
            wanted[self._writer] = wanted.get(self._writer, 0) | select.POLLOUT
        if child.status is not None:
            wanted[child.status] = select.POLLIN
        elif not self._report and len(self._out) < OUTPUT_BYTES:  # runc's words are no output
            wanted.update(dict.fromkeys(self._streams, select.POLLIN))
        if child.stdin is not None and (self._input or self._input_ended):
            wanted[child.stdin] = select.POLLOUT
        return wanted

    def _poll(self, wanted: dict[int, int], seconds: float | None) -> dict[int, int]:
        """Waits for events, half of ALIVE_SECONDS at most. Returns them by descriptor: none if none came in time.

        Adds a sign of life to the output if the last one is ALIVE_SECONDS old and no output waits to be sent.

        Args:
            wanted: the events to wait for, by descriptor.
            seconds: the most to wait, if that is less.

        Raises:
            ControllerGoneError: the controller has closed the channel; if its input is wanted, all of it was read.
        """
        poll = select.poll()
        for descriptor, events in wanted.items():
            poll.register(descriptor, events)
        pause = ALIVE_SECONDS / 2 if seconds is None else min(seconds, ALIVE_SECONDS / 2)
        ready = dict(poll.poll(pause * 1000))
        if self._woken in ready:
            os.read(self._woken, 4096)
        if time.monotonic() - self._alive_at > ALIVE_SECONDS and not self._out:
            self._out += frame(ALIVE)
            self._alive_at = time.monotonic()
        if ready.get(self._reader, 0) & (select.POLLHUP | select.POLLERR) and not ready[self._reader] & select.POLLIN:
            raise ControllerGoneError
        return ready

    def _move(self, child: Child, ready: dict[int, int]) -> None:
        """Moves what can be moved without waiting."""
        if ready.get(self._reader, 0) & select.POLLIN:
            self._receive()
        self._take_input()
        if child.stdin in ready:
            self._give(child, child.stdin)
        for stream in [stream for stream in self._streams if stream in ready]:
            self._collect(stream)
        self._send()

    def _receive(self) -> None:
        try:
            data = os.read(self._reader, DATA_BYTES)
        except BlockingIOError:
            return
        except OSError:
            raise ControllerGoneError from None
        if not data:
            raise ControllerGoneError
        self._received += data

    def _next_frame(self) -> tuple[bytes, bytes] | None:
        """Returns the next frame, its kind and payload; None if it is not complete."""
        if len(self._received) < HEADER.size:
            return None
        kind, length = HEADER.unpack_from(self._received)
        if length > LIMITS.get(kind, -1):
            raise BadFrameError("a frame is of no known kind or too long")
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        payload = bytes(self._received[HEADER.size : end])
        del self._received[:end]
        return kind, payload

    def _take_input(self) -> None:
        while len(self._input) < INPUT_BYTES:
            found = self._next_frame()
            if not found:
                return
            kind, payload = found
            if kind == REQUEST or self._input_ended:
                raise BadFrameError("a frame comes out of order")
            if kind == STDIN:
                self._input += payload
            else:
                self._input_ended = True

    def _give(self, child: Child, stdin: int) -> None:
        """Gives the command its input. One that does not want it any more loses it."""
        try:
            if self._input:
                del self._input[: os.write(stdin, self._input[:DATA_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            child.close_stdin()
        if self._input_ended and not self._input:
            child.close_stdin()
        if child.stdin is None:
            self._input.clear()

    def _collect(self, stream: int) -> bool:
        """Takes a piece of output and returns whether there may be more at once."""
        try:
            data = os.read(stream, DATA_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._out += frame(self._streams[stream], data)
        else:
            del self._streams[stream]
            os.close(stream)
        return bool(data)

    def _drain(self) -> None:
        """Takes the last output: what the pipes hold, and what comes a moment later."""
        deadline = time.monotonic() + LAST_OUTPUT_SECONDS
        pieces = dict.fromkeys(self._streams, LAST_OUTPUT_PIECES)
        while self._streams:
            for stream in list(self._streams):
                while stream in self._streams and pieces[stream] > 0 and self._collect(stream):
                    pieces[stream] -= 1
                    self._flush()
            left = deadline - time.monotonic()
            waiting = {stream: select.POLLIN for stream in self._streams if pieces[stream] > 0}
            if left <= 0 or not waiting or not self._poll({**waiting, self._reader: 0}, left):
                return

    def _send(self) -> None:
        if self._out:
            try:
                del self._out[: os.write(self._writer, self._out)]
            except BlockingIOError:
                pass
            except OSError:
                raise ControllerGoneError from None

    def _flush(self) -> None:
        """Sends all that waits, as long as the controller is there."""
        self._send()
        while self._out:
            self._poll({self._reader: 0, self._writer: select.POLLOUT}, None)
            self._send()


KEYS: dict[str, type | tuple[type, ...]] = {
    "operation": str, "user": str, "cwd": (str, type(None)), "environment": dict, "argv": list, "program": str,
    "timeout_seconds": (int, float, type(None)), "path": str, "limit_bytes": int, "remove": bool, "mode": int,
    "container": str, "container_pid": int,
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "user": "root", "cwd": None, "environment": {}, "argv": [""], "program": "", "timeout_seconds": None, "path": "",
    "limit_bytes": 0, "remove": False, "mode": 0o644, "container": "", "container_pid": 0,
}  # fmt: skip


def parse_request(payload: bytes) -> Request:
    """Checks the controller's request and adds what it left out.

    Raises:
        BadFrameError: it is no request.
    """
    try:
        request: Any = {**DEFAULTS, **json.loads(payload)}
    except (ValueError, TypeError):
        raise BadFrameError("the request is no JSON object") from None
    if not all(isinstance(request.get(key), kind) for key, kind in KEYS.items()):
        raise BadFrameError("the request lacks something")
    texts = [*request["argv"], *request["environment"], *request["environment"].values()]
    if not request["argv"] or not all(isinstance(text, str) and "\0" not in text for text in texts):
        raise BadFrameError("the request has no command")
    if request["operation"] not in OPERATIONS:
        raise BadFrameError("there is no such operation")
    if request["container"] and not (request["operation"] == "execute" and IDENTITY.fullmatch(request["container"])):
        raise BadFrameError("that is not possible in a container")
    checked: Request = request
    return checked
