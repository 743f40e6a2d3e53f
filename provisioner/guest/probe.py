"""Probes, inside a machine, everything that its task's permission forbids or promises.

Runs as root and uses only the standard library. Reads one JSON object from stdin:

    {"devices": [[device, gateway], ...],   routes to force, in addition to the machine's own routing table
     "canary_ports": [port, ...],           listeners on the controller's loopback
     "gateways": [address, ...],            addresses at which the controller's loopback might answer
     "peer": address or null,               the neighbour on the environment's own link
     "allowed": [[address, port], ...],     allowlisted destinations
     "agent": bool}                         whether to probe as user agent too

and writes one JSON array of {"user", "probe", "reached", "detail"} to stdout. The controller judges them.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time

SECONDS = 2.0
PUBLIC_TCP = (("1.1.1.1", 443), ("8.8.8.8", 53))
PUBLIC_DNS = ("1.1.1.1", "8.8.8.8")
PUBLIC_IPV6 = "2606:4700:4700::1111"
PUBLIC_NAMES = (("deb.debian.org", 80), ("pypi.org", 443))
# Amazon's page "Instance metadata", ECS task credentials, and the VPC resolver's link-local address.
METADATA = ("169.254.169.254", "169.254.170.2")
RESOLVERS = ("169.254.169.253", "10.0.2.3")
S3 = ("s3.amazonaws.com", "52.216.0.1")
QUERY = b"\x13\x37\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01"


def _socket(family, kind, device=None, protocol=0):
    connection = socket.socket(family, kind, protocol)
    connection.settimeout(SECONDS)
    if device:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode() + b"\0")
    return connection


def _tcp(address, port, device=None):
    with _socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        connection.connect((address, port))
    return "connected"


def _allowed(address, port):
    # A proxy on the way may accept first and hang up when the destination refuses.
    with _socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.connect((address, port))
        try:
            if not connection.recv(1):
                raise OSError("closed at once")
        except TimeoutError:
            pass  # the server waits for the client's first bytes
        return "connected"


def _metadata(address, device=None):
    # Without a token, whose answer may be lost merely by the hop limit. Even a 401 is an answer.
    with _socket(socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        connection.connect((address, 80))
        connection.sendall(b"GET /latest/meta-data/ HTTP/1.0\r\nHost: metadata\r\n\r\n")
        answer = connection.recv(64).decode("latin-1")
        if answer[8:13] == " 403 ":  # EC2's answer if the service is switched off
            raise OSError("switched off")
        return answer


def _udp(address, port, device=None):
    with _socket(socket.AF_INET, socket.SOCK_DGRAM, device) as connection:
        connection.sendto(QUERY, (address, port))
        return f"{len(connection.recv(512))} bytes"


def _dns_tcp(address, device=None):
    with _socket(socket.AF_INET, socket.SOCK_STREAM, device) as connection:
        connection.connect((address, 53))
        connection.sendall(struct.pack("!H", len(QUERY)) + QUERY)
        answer = connection.recv(2)
        if not answer:
            raise OSError("closed")
        return "answered"


def _ping(address, device=None):
    # A raw socket as root, otherwise unprivileged ICMP if the kernel allows it.
    raw = os.geteuid() == 0
    kind = socket.SOCK_RAW if raw else socket.SOCK_DGRAM
    with _socket(socket.AF_INET, kind, device, socket.IPPROTO_ICMP) as connection:
        body = b"\x08\x00\x00\x00\x13\x37\x00\x01"
        total = sum(struct.unpack("!4H", body))
        connection.sendto(body[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + body[4:], (address, 0))
        while True:
            answer, sender = connection.recvfrom(256)
            if sender[0] == address and (answer[20] if raw else answer[0]) == 0:
                return "echo"


def _resolve(name, port):
    addresses = socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)
    return addresses[0][4][0]


def _get_out(names):
    """Connects to the first of the public names that answers."""
    failures = []
    for name, port in names:
        try:
            return f"{name}: {_tcp(_resolve(name, port), port)}"
        except OSError as error:
            failures.append(f"{name}: {error}")
    raise OSError("; ".join(failures))


def _probes(request):
    yield "resolve a public name", lambda: _resolve("example.com", 80)
    yield "reach the internet by name", lambda: _get_out(PUBLIC_NAMES)
    yield "s3 by name", lambda: _tcp(_resolve(S3[0], 443), 443)
    yield "ipv6", lambda: _tcp(PUBLIC_IPV6, 443)
    for address in METADATA:
        yield f"metadata {address}", lambda a=address: _metadata(a)
    for address, port in request["allowed"]:
        yield f"allowed {address}:{port}", lambda a=address, p=port: _allowed(a, p)
    if request["peer"]:
        yield f"neighbour {request['peer']}", lambda: _tcp(request["peer"], 22)
    yield from _probes_via(None, request)
    if os.geteuid() == 0:
        for device, _ in request["devices"]:
            yield from _probes_via(device, request)


def _probes_via(device, request):
    """What is tried through each card; None for whatever the routes say."""
    via = f" via {device}" if device else ""
    for address, port in PUBLIC_TCP:
        yield f"tcp {address}:{port}{via}", lambda a=address, p=port: _tcp(a, p, device)
    yield f"s3 {S3[1]}{via}", lambda: _tcp(S3[1], 443, device)
    for address in PUBLIC_DNS + RESOLVERS + tuple(request["gateways"]):
        yield f"dns udp {address}{via}", lambda a=address: _udp(a, 53, device)
    for address in PUBLIC_DNS[:1] + RESOLVERS:
        yield f"dns tcp {address}{via}", lambda a=address: _dns_tcp(a, device)
    yield f"udp 1.1.1.1:443{via}", lambda: _udp("1.1.1.1", 443, device)
    yield f"ping 1.1.1.1{via}", lambda: _ping("1.1.1.1", device)
    if device:
        yield f"metadata 169.254.169.254{via}", lambda: _metadata("169.254.169.254", device)
    for address in request["gateways"]:
        for port in request["canary_ports"]:
            yield f"controller's loopback via {address}{via}", lambda a=address, p=port: _tcp(a, p, device)


def _try_all(request, user):
    """Runs all probes at once, so that together they take no longer than one time-out."""
    results = []

    def attempt(name, probe):
        try:
            reached, detail = True, str(probe())
        except (OSError, IndexError) as error:
            reached, detail = False, str(error)
        results.append({"user": user, "probe": name, "reached": reached, "detail": detail[:200]})

    threading.stack_size(256 << 10)
    probes = list(_probes(request))
    threads = [threading.Thread(target=attempt, args=probe, daemon=True) for probe in probes]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 4 * SECONDS
    for thread in threads:
        # The C library's resolver has its own, longer time-outs.
        thread.join(max(0, deadline - time.monotonic()))
    answered = list(results)
    named = {result["probe"] for result in answered}
    silent = [name for name, _ in probes if name not in named]
    return answered + [{"user": user, "probe": name, "reached": False, "detail": "no answer"} for name in silent]


def _as_agent(request):
    """Runs all probes as user agent, in a child process that gives up root first."""
    import pwd

    entry = pwd.getpwnam("agent")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setgroups([entry.pw_gid])
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
        with os.fdopen(writer, "w") as file:
            json.dump(_try_all(request, "agent"), file)
            file.flush()
            os._exit(0)
    os.close(writer)
    return child, os.fdopen(reader)


def _route(action, devices):
    for number, (device, gateway) in enumerate(devices):
        route = ["default", "via", gateway, "dev", device, "metric", str(4000 + number), "onlink"]
        command = ["ip", "route", action, *route]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main():
    """Reads the request, runs the probes and writes the results."""
    request = json.load(sys.stdin)
    present = [pair for pair in request["devices"] if os.path.exists("/sys/class/net/" + pair[0])]
    request["devices"] = present
    _route("add", present)
    try:
        agent = _as_agent(request) if request["agent"] else None
        results = _try_all(request, "root")
        if agent:
            results += json.load(agent[1])
            os.waitpid(agent[0], 0)
    finally:
        _route("delete", present)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
