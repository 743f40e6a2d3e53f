"""Probes, inside a machine, what the controller asks for: one attempt for each probe, and one answer for each.

Never read from the machine's disk: the controller sends this text to `python3 -I -`, followed by a call of `main`.
Runs as root and uses only the standard library, from Python 3.8 on (Ubuntu 20.04). The request is an object:

    {"word": str,                       returned with the answers
     "cards": [address, ...],           root gets a default route through the card that leads to each address
     "probes": {user: [[name, card or null, method, *arguments], ...]}}   users: root, agent

`main` writes [word, [[user, name, outcome, detail], ...]] as JSON to stdout. An outcome is `reached`, `not reached`, or
`impossible` if the probe could not be sent. The controller judges them.
"""

import errno
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time

SECONDS = 2.0
DETAIL_CHARACTERS = 200
SIOCGIFADDR = 0x8915
QUERY = b"\x13\x37\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01"
# What the network answers, or this machine's own routes. Any other error means that no packet was sent: no device, no
# permission, no memory, a firewall of the machine's own.
NOT_REACHED = (
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE,
    errno.ETIMEDOUT, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EHOSTDOWN,
)  # fmt: skip


class NotReachedError(Exception):
    """The other side accepted, but gave no answer that counts."""


def _socket(family, kind, device=None, protocol=0):
    connection = socket.socket(family, kind, protocol)
    connection.settimeout(SECONDS)
    if device:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
    return connection


def _connect(address, port, device):
    connection = _socket(socket.AF_INET, socket.SOCK_STREAM, device)
    try:
        connection.connect((address, port))
    except BaseException:
        connection.close()
        raise
    return connection


def tcp(device, address, port):
    """Connects."""
    with _connect(address, port, device):
        return "connected"


def tcp6(device, address, port):
    """Connects by IPv6. A machine without IPv6 reaches nothing by it."""
    try:
        connection = _socket(socket.AF_INET6, socket.SOCK_STREAM, device)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            raise NotReachedError("no IPv6") from error
        raise
    with connection:
        connection.connect((address, port))
    return "connected"


def allowed(device, address, port):
    """Connects through a proxy, which may accept first and hang up when the destination refuses."""
    with _connect(address, port, device) as connection:
        try:
            if not connection.recv(1):
                raise NotReachedError("closed at once")
        except socket.timeout:  # noqa: UP041 - they are not the same before Python 3.10
            pass  # the server waits for the client's first bytes
        return "connected"


def metadata(device, address):
    """Asks without a token, whose answer may be lost merely by the hop limit. Even a 401 is an answer."""
    with _connect(address, 80, device) as connection:
        connection.sendall(b"GET /latest/meta-data/ HTTP/1.0\r\nHost: metadata\r\n\r\n")
        answer = connection.recv(64).decode("latin-1")
        if answer[8:13] == " 403 ":  # EC2's answer if the service is switched off
            raise NotReachedError("switched off")
        return answer


def udp(device, address, port):
    """Sends a DNS query and waits for any answer."""
    with _socket(socket.AF_INET, socket.SOCK_DGRAM, device) as connection:
        connection.sendto(QUERY, (address, port))
        return f"{len(connection.recv(512))} bytes"


def dns_tcp(device, address):
    """Sends a DNS query over TCP and waits for any answer."""
    with _connect(address, 53, device) as connection:
        connection.sendall(struct.pack("!H", len(QUERY)) + QUERY)
        if not connection.recv(2):
            raise NotReachedError("closed")
        return "answered"


def ping(device, address):
    """Sends an ICMP echo, as root only, and waits for its reply."""
    with _socket(socket.AF_INET, socket.SOCK_RAW, device, socket.IPPROTO_ICMP) as connection:
        body = b"\x08\x00\x00\x00\x13\x37\x00\x01"
        total = sum(struct.unpack("!4H", body))
        connection.sendto(body[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + body[4:], (address, 0))
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            answer, sender = connection.recvfrom(256)
            if sender[0] == address and answer[20:21] == b"\0":
                return "echo"
        raise NotReachedError("no echo")


def knock(device, address, port, word):
    """Connects to the canary and says the word."""
    with _connect(address, port, device) as connection:
        connection.sendall(word.encode())
        return "connected"


def knock_udp(device, address, port, word):
    """Sends the word to the canary, which never answers: it knows whether the word arrived.

    Again and again, as somebody on the controller may flood the canary.
    """
    with _socket(socket.AF_INET, socket.SOCK_DGRAM, device) as connection:
        connection.settimeout(SECONDS / 20)
        deadline = time.monotonic() + SECONDS
        while True:
            connection.sendto(word.encode(), (address, port))
            try:
                return f"{len(connection.recv(64))} bytes"
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise


def resolve(_device, name):
    """Resolves a name as the machine's programs do."""
    return socket.getaddrinfo(name, 80, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]


def tcp_by_name(device, *targets):
    """Connects to the first of the names that answers. Takes pairs of name and port."""
    failures = []
    for name, port in targets:
        try:
            return f"{name}: {tcp(device, resolve(device, name), port)}"
        except OSError as error:
            failures.append(error)
    impossible = [error for error in failures if _outcome(error) == "impossible"]
    raise (impossible or failures)[0]


METHODS = {
    method.__name__: method
    for method in (
        tcp, tcp6, allowed, metadata, udp, dns_tcp, ping, knock, knock_udp, resolve, tcp_by_name,
    )
}  # fmt: skip


def _outcome(error):
    """Whether a probe's error shows that its target was not reached, or merely that it could not be tried."""
    expected = isinstance(error, (NotReachedError, socket.timeout, socket.gaierror))
    if expected or (isinstance(error, OSError) and error.errno in NOT_REACHED):
        return "not reached"
    return "impossible"


def _try_all(probes, devices, user):
    """Runs all probes at once, so that together they take no longer than one time-out."""
    results = {}

    def attempt(name, card, method, *arguments):
        try:
            if card and not devices.get(card):
                raise LookupError(f"no route through the card that leads to {card}")
            results[name] = ("reached", str(METHODS[method](devices.get(card), *arguments)))
        except Exception as error:
            results[name] = (_outcome(error), f"{error}" or type(error).__name__)

    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=attempt, args=probe, daemon=True) for probe in probes]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 4 * SECONDS
    for thread in threads:
        # The C library's resolver has its own, longer time-outs.
        thread.join(max(0, deadline - time.monotonic()))
    answered = dict(results)
    names = [probe[0] for probe in probes]
    outcomes = [(name, *answered.get(name, ("not reached", "no answer"))) for name in names]
    return [[user, name, outcome, detail[:DETAIL_CHARACTERS]] for name, outcome, detail in outcomes]


def _as_agent(probes):
    """Runs probes as user agent, in a child process that gives up root first."""
    import pwd

    entry = pwd.getpwnam("agent")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgroups([entry.pw_gid])
            os.setgid(entry.pw_gid)
            os.setuid(entry.pw_uid)
            with os.fdopen(writer, "w") as file:
                json.dump(_try_all(probes, {}, "agent"), file)
        finally:
            os._exit(0)
    os.close(writer)
    return child, os.fdopen(reader)


def _device_to(address):
    """Returns the device through which the machine's routes lead to an address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            query.connect((address, 9))
            source = socket.inet_aton(query.getsockname()[0])
        except OSError:
            return None
        for _, device in socket.if_nameindex():
            try:
                if fcntl.ioctl(query, SIOCGIFADDR, struct.pack("256s", device.encode()))[20:24] == source:
                    return device
            except OSError:  # it has no address
                continue
    return None


def _route(action, number, device, gateway):
    route = ["default", "via", gateway, "dev", device, "metric", str(4000 + number), "onlink"]
    null = subprocess.DEVNULL
    return subprocess.run(["ip", "route", action, *route], stdin=null, stdout=null, stderr=null).returncode == 0


def main(request):
    """Runs the probes and writes the answers."""
    found = [(number, _device_to(card), card) for number, card in enumerate(request["cards"])]
    routed = [route for route in found if route[1] and _route("replace", *route)]
    probes = request["probes"]
    try:
        agent = _as_agent(probes["agent"]) if "agent" in probes else None
        answers = _try_all(probes["root"], {card: device for _, device, card in routed}, "root")
        if agent:
            answers += json.load(agent[1])
            os.waitpid(agent[0], 0)
    finally:
        for route in routed:
            _route("delete", *route)
    json.dump([request["word"], answers], sys.stdout)
