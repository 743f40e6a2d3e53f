"""Probes, inside a machine, what the controller asks for, and gives one answer for each probe.

Never read from the machine's disk: the controller sends this text to the exec server, followed by a call of `main`.
Runs as root and uses only the standard library, from Python 3.8 on (Ubuntu 20.04). The request is an object:

    {"word": str,                       returned with the answers
     "cards": (address, ...),           root gets a default route through the card that leads to each address
     "probes": {user: [[name, promised, card or None, method, *arguments], ...]}}   users: root, agent

`main` writes [word, [[user, name, outcome, detail], ...]] as JSON to stdout. An outcome is `reached`, `not reached`, or
`impossible` if the probe could not be sent. The controller judges them.

On an emulated processor imports are slow: the modules below `os`, `socket` and `json` are used.
"""

from __future__ import annotations

import _socket as socket
import _thread
import errno
import fcntl
import posix
import pwd
import select
import struct
import time

TYPE_CHECKING = False  # without an import of typing
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from typing import Any, Self, TypedDict

    Wait = tuple[int, int, float | None]
    Part = Generator[Wait, None, None]
    Attempt = Generator[Wait, None, str]
    # A name, whether it is promised, a card, a method and its arguments.
    Probe = Sequence[Any]
    Answer = tuple[str, str]

    class Request(TypedDict):
        """What the controller asks for."""

        word: str
        cards: Sequence[str]
        probes: Mapping[str, Sequence[Probe]]


# How long a probe waits for a sign of something that must not be reached, and after that for each further answer.
SECONDS = 1.0
# When most probes are sent again, as their packets may be lost. (The kernel repeats a SYN only after a second.)
REPEATED_AFTER_SECONDS = 0.3
PROMISED_SECONDS = 8.0  # what is promised ends the wait as soon as it is reached
RESOLVER_SECONDS = 8.0  # the C library's resolver asks again after five
HANG_UP_SECONDS = 2.0  # for a proxy whose destination refuses what it has accepted
NAMED_SECONDS = 2.0  # for an address found by its name, where only the kernel repeats the SYN
KNOCKS = 10
# A wait ends after this time, and no more than this is counted of the time between two ends: a machine that gets no
# processor for a while waits for longer.
SLICE_SECONDS, COUNTED_SECONDS = 0.1, 0.2
LONGEST_SECONDS = 40.0  # what has not ended then counts as impossible
NEVER, DETAIL_CHARACTERS = ("impossible", "no answer in time"), 200
SIOCGIFADDR = 0x8915
QUERY = b"\x13\x37\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01"
# What network, routes and resolvers answer. Any other error means that no packet was sent: no device, no memory ...
NOT_REACHED = (
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE,
    errno.ETIMEDOUT, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EHOSTDOWN,
    socket.EAI_NONAME, socket.EAI_AGAIN, socket.EAI_NODATA, socket.EAI_FAIL,
)  # fmt: skip


class NotReachedError(Exception):
    """The other side accepted, but gave no answer that counts."""


class Socket(socket.socket):
    """Never blocks. Sends through a device, or wherever the routes lead. Use as a context manager."""

    def __init__(self, family: int, kind: int, device: str | None = None, protocol: int = 0) -> None:
        super().__init__(family, kind, protocol)
        self.setblocking(False)
        if device:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connected(self, address: tuple[str, int], seconds: float | None = None) -> Part:
        """Connects; a part of an attempt."""
        number = self.connect_ex(address)
        if number == errno.EINPROGRESS:
            yield self.fileno(), select.POLLOUT, seconds
            number = self.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, posix.strerror(number))


# An attempt is a generator. Where it waits, it yields a descriptor, the events that it waits for, and for how many
# seconds at most (None for as long as its probe's answers may take). `socket.timeout` is raised there if nothing
# happens. Its return value says what was reached.


def tcp(device: str | None, address: str, port: int, seconds: float | None = None) -> Attempt:
    """Connects."""
    with Socket(socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        yield from connection.connected((address, port), seconds)
        return "connected"


def tcp6(device: str | None, address: str, port: int) -> Attempt:
    """Connects by IPv6. A machine without IPv6 reaches nothing by it."""
    try:
        connection = Socket(socket.AF_INET6, socket.SOCK_STREAM, device)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            raise NotReachedError("no IPv6") from error
        raise
    with connection:
        yield from connection.connected((address, port))
    return "connected"


def answer(device: str | None, address: str, port: int) -> Attempt:
    """Connects, where only the target itself would refuse."""
    try:
        return (yield from tcp(device, address, port))
    except ConnectionRefusedError:
        return "refused"


def allowed(device: str | None, address: str, port: int) -> Attempt:
    """Connects through a proxy, which may accept first and hang up when the destination refuses."""
    with Socket(socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        yield from connection.connected((address, port))
        try:
            yield connection.fileno(), select.POLLIN, HANG_UP_SECONDS
        except socket.timeout:  # the server waits for the client's first bytes
            return "connected"
        if not connection.recv(1):
            raise NotReachedError("closed at once")
        return "connected"


def metadata(device: str | None, address: str) -> Attempt:
    """Asks without a token, whose answer may be lost merely by the hop limit. Even a 401 is an answer."""
    with Socket(socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        yield from connection.connected((address, 80))
        connection.send(b"GET /latest/meta-data/ HTTP/1.0\r\nHost: metadata\r\n\r\n")
        yield connection.fileno(), select.POLLIN, None
        answer = connection.recv(64).decode("latin-1")
        if answer[8:13] == " 403 " or not answer:  # EC2's answer if the service is switched off
            raise NotReachedError("switched off")
        return answer


def udp(device: str | None, address: str, port: int) -> Attempt:
    """Sends a DNS query and waits for any answer."""
    with Socket(socket.AF_INET, socket.SOCK_DGRAM, device) as connection:
        connection.sendto(QUERY, (address, port))
        yield connection.fileno(), select.POLLIN, None
        return f"{len(connection.recv(512))} bytes"


def dns_tcp(device: str | None, address: str) -> Attempt:
    """Sends a DNS query over TCP and waits for any answer."""
    with Socket(socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        yield from connection.connected((address, 53))
        connection.send(struct.pack("!H", len(QUERY)) + QUERY)
        yield connection.fileno(), select.POLLIN, None
        if not connection.recv(2):
            raise NotReachedError("closed")
        return "answered"


def ping(device: str | None, address: str) -> Attempt:
    """Sends an ICMP echo, as root only, and waits for its reply."""
    with Socket(socket.AF_INET, socket.SOCK_RAW, device, socket.IPPROTO_ICMP) as connection:
        body = b"\x08\x00\x00\x00\x13\x37\x00\x01"
        total = sum(struct.unpack("!4H", body))
        connection.sendto(body[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + body[4:], (address, 0))
        while True:
            yield connection.fileno(), select.POLLIN, None
            answer, sender = connection.recvfrom(256)
            if sender[0] == address and answer[20:21] == b"\0":
                return "echo"


def knock(device: str | None, address: str, port: int, word: str) -> Attempt:
    """Connects to the canary and says the word."""
    with Socket(socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        yield from connection.connected((address, port))
        connection.send(word.encode())
        return "connected"


def knock_udp(device: str | None, address: str, port: int, word: str) -> Attempt:
    """Sends the word to the canary, which never answers: several times, since a flood may drown one datagram."""
    with Socket(socket.AF_INET, socket.SOCK_DGRAM, device) as connection:
        for _ in range(KNOCKS):
            connection.sendto(word.encode(), (address, port))
            try:
                yield connection.fileno(), select.POLLIN, SECONDS / KNOCKS
            except socket.timeout:
                continue
            return f"{len(connection.recv(64))} bytes"
        raise socket.timeout("timed out")


def resolve(_device: str | None, name: str) -> Attempt:
    """Resolves a name as the machine's programs do, in a thread, since the C library waits by itself."""
    reader, writer = posix.pipe()
    found: list[str | Exception] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, 80, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]))
        except Exception as error:
            found.append(error)
        finally:
            posix.close(writer)

    try:
        _thread.start_new_thread(ask, ())
        yield reader, select.POLLIN, RESOLVER_SECONDS
    except socket.timeout as error:
        raise NotReachedError("no resolver answered") from error
    finally:
        posix.close(reader)
    [answer] = found
    if isinstance(answer, Exception):
        raise answer
    return answer


def tcp_by_name(device: str | None, *targets: tuple[str, int]) -> Attempt:
    """Connects to the first of the names (with ports) that answers. A silent resolver is asked once."""
    failures: list[OSError] = []
    for name, port in targets:
        try:
            address = yield from resolve(device, name)
            yield from tcp(device, address, port, NAMED_SECONDS)
            return f"{name}: connected"
        except OSError as error:
            failures.append(error)
    raise ([error for error in failures if _outcome(error) == "impossible"] or failures)[0]


REPEATED: dict[str, Callable[..., Attempt]] = {
    method.__name__: method for method in (tcp, tcp6, answer, metadata, udp, dns_tcp, ping, knock)
}
METHODS: dict[str, Callable[..., Attempt]] = {
    **REPEATED,
    **{method.__name__: method for method in (allowed, knock_udp, resolve, tcp_by_name)},
}


def _outcome(error: Exception) -> str:
    """Whether a probe's error shows that its target was not reached, or merely that it could not be tried."""
    answers = isinstance(error, OSError) and error.errno in NOT_REACHED
    if answers or isinstance(error, (NotReachedError, socket.timeout)):
        return "not reached"
    return "impossible"


class Probes:
    """Tries all probes of one user side by side. `devices` are those that lead to the request's cards."""

    def __init__(self, devices: Mapping[str, str]) -> None:
        self._devices = devices
        self._poll = select.poll()
        # By descriptor: name, attempt, the moment when it has waited enough, and its patience.
        self._waiting: dict[int, tuple[str, Attempt, float, float]] = {}
        self._silent: dict[str, Answer] = {}
        self._answers: dict[str, Answer] = {}
        self._looked = time.monotonic()
        self._waited = 0.0  # seconds, of which few are counted if the machine got no processor

    def try_all(self, probes: Sequence[Probe]) -> list[tuple[str, str, str]]:
        """Returns name, outcome and detail of each probe."""
        for probe in probes:
            self._begin(0.0, probe)
        again = [probe for probe in probes if probe[3] in REPEATED]
        self._looked = time.monotonic()
        end = self._looked + LONGEST_SECONDS
        while (again or self._waiting) and self._looked < end:
            self._wait()
            if self._waited >= REPEATED_AFTER_SECONDS:
                for probe in again:
                    self._begin(REPEATED_AFTER_SECONDS, probe)
                again = []
        unfinished = {name for name, *_ in self._waiting.values()} | {probe[0] for probe in again}
        silent = {name: silence for name, silence in self._silent.items() if name not in unfinished}
        return [(probe[0], *self._answers.get(probe[0], silent.get(probe[0], NEVER))) for probe in probes]

    def _begin(self, after: float, probe: Probe) -> None:
        name, promised, card, method, *arguments = probe
        if self._answers.get(name, NEVER)[0] == "reached":
            return
        patience = PROMISED_SECONDS if promised else SECONDS
        try:
            if card and not self._devices.get(card):
                raise LookupError(f"no route through the card that leads to {card}")
            attempt = METHODS[method](self._devices.get(card), *arguments)
        except Exception as error:
            self._answers[name] = (_outcome(error), f"{error}" or type(error).__name__)
            return
        self._go_on(name, attempt, lambda: attempt.send(None), patience - after, patience)

    def _go_on(self, name: str, attempt: Attempt, resume: Callable[[], Wait], seconds: float, patience: float) -> None:
        try:
            descriptor, events, limit = resume()
        except StopIteration as done:
            self._answers[name] = ("reached", f"{done.value}")
        except socket.timeout as error:
            self._silent[name] = ("not reached", f"{error}")
        except Exception as error:
            self._answers.setdefault(name, (_outcome(error), f"{error}" or type(error).__name__))
        else:
            self._poll.register(descriptor, events)
            self._waiting[descriptor] = (name, attempt, self._waited + (limit or seconds), patience)

    def _wait(self) -> None:
        ready = self._poll.poll(SLICE_SECONDS * 1000)
        before, self._looked = self._looked, time.monotonic()
        self._waited += min(self._looked - before, COUNTED_SECONDS)
        # What has arrived comes first: the machine may have had no processor for longer than the wait.
        for descriptor, _ in ready:
            name, attempt, _, patience = self._forget(descriptor)
            self._go_on(name, attempt, lambda: attempt.send(None), patience, patience)  # noqa: B023 - called at once
        for descriptor, (name, attempt, until, patience) in list(self._waiting.items()):
            if self._answers.get(name, NEVER)[0] == "reached":
                self._forget(descriptor)
                attempt.close()
            elif until <= self._waited:
                self._forget(descriptor)
                late = socket.timeout("timed out")
                self._go_on(name, attempt, lambda: attempt.throw(late), patience, patience)  # noqa: B023

    def _forget(self, descriptor: int) -> tuple[str, Attempt, float, float]:
        self._poll.unregister(descriptor)
        return self._waiting.pop(descriptor)


def _text(text: str) -> str:
    """Returns a JSON string."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(f"\\u{min(ord(character), 0xFFFD):04x}" for character in text) + '"'


def _answers(probes: Sequence[Probe], devices: Mapping[str, str], user: str) -> str:
    """Runs a user's probes and returns the answers as rows of JSON."""
    rows = [
        (user, name, outcome, detail[:DETAIL_CHARACTERS]) for name, outcome, detail in Probes(devices).try_all(probes)
    ]
    return ",".join(f"[{','.join(map(_text, row))}]" for row in rows)


def _as_agent(probes: Sequence[Probe]) -> tuple[int, int]:
    """Runs probes as user agent, in a child process that gives up root first. Returns it, and where its rows come."""
    entry = pwd.getpwnam("agent")
    reader, writer = posix.pipe()
    child = posix.fork()
    if child == 0:
        try:
            posix.close(reader)
            posix.setgroups([entry.pw_gid])
            posix.setgid(entry.pw_gid)
            posix.setuid(entry.pw_uid)
            with open(writer, "w") as file:
                file.write(_answers(probes, {}, "agent"))
        finally:
            posix._exit(0)
    posix.close(writer)
    return child, reader


def _device_to(address: str) -> str | None:
    """Returns the device through which the machine's routes lead to an address; None if there is none."""
    with Socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            query.connect((address, 9))
            source = socket.inet_aton(query.getsockname()[0])
        except OSError:
            return None
        for _, device in socket.if_nameindex():
            try:
                if fcntl.ioctl(query.fileno(), SIOCGIFADDR, struct.pack("256s", device.encode()))[20:24] == source:
                    return device
            except OSError:  # it has no address
                continue
    return None


# Of rtnetlink(7). A route that exists already is replaced, and its gateway may lie in no network of the device.
REPLACE_ROUTE, DELETE_ROUTE = (24, 0x505), (25, 0x5)
MAIN_TABLE, ONLINK = 254, 4


def _route(action: tuple[int, int], number: int, device: str, gateway: str) -> bool:
    """Adds or deletes a default route; returns whether that was possible."""
    kind, flags = action
    route = struct.pack("=8BI", socket.AF_INET, 0, 0, 0, MAIN_TABLE, 3, 0, 1, ONLINK)
    for attribute, value in (
        (4, struct.pack("=I", socket.if_nametoindex(device))),
        (5, socket.inet_aton(gateway)),
        (6, struct.pack("=I", 4000 + number)),
    ):
        route += struct.pack("=HH", 8, attribute) + value
    with Socket(socket.AF_NETLINK, socket.SOCK_RAW) as kernel:
        try:  # the kernel has answered when the message is sent
            kernel.sendto(struct.pack("=IHHII", 16 + len(route), kind, flags, 0, 0) + route, (0, 0))
            answer = kernel.recv(4096)
        except OSError:
            return False
    return answer[4:6] == struct.pack("=H", 2) and answer[16:20] == bytes(4)


def main(request: Request) -> None:
    """Runs the probes and writes the answers."""
    found = [(number, _device_to(card), card) for number, card in enumerate(request["cards"])]
    routes = [(number, device, card) for number, device, card in found if device]
    routed = [route for route in routes if _route(REPLACE_ROUTE, *route)]
    probes = request["probes"]
    try:
        agent = _as_agent(probes["agent"]) if "agent" in probes else None
        rows = [_answers(probes["root"], {card: device for _, device, card in routed}, "root")]
        if agent:
            with open(agent[1]) as file:
                rows.append(file.read())
            posix.waitpid(agent[0], 0)
    finally:
        for route in routed:
            _route(DELETE_ROUTE, *route)
    print(f"[{_text(request['word'])},[{','.join(rows)}]]")
