"""Machines that go on from a template: what they share, and what becomes of a template that does not serve."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from provisioner.clouds.local import templates
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.config import load_settings
from provisioner.models import BaseImage
from provisioner.progress import Silence
from provisioner.remote.ssh import Connection
from provisioner.session import Session
from provisioner.store.home import TEMPLATES, UNFINISHED
from tests.local.clones import planned, remove, running, started, starting

pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("templates")]
# scripts/soak has 20.
CLONES = int(os.environ.get("PROVISIONER_TEST_CLONES", "3"))
CLOCK_SECONDS = 0.1
# A timer counts from the moment when systemd sets it, some seconds after the rest was computed, more on a busy host.
TIMER_SECONDS = 60
# Two clocks' readings around a connection lie no closer than this.
READING_SECONDS = 0.05

# Prints the source port that the kernel chooses for each of three destinations, and, for two connections between the
# same two ports in every machine, the initial sequence number with the time at which it was chosen.
CONNECTIONS = r"""
use Socket;
socket(my $sniffer, 17, SOCK_RAW, 0x0300) or die $!;
sub first_packet {
    my ($to, $from_port) = @_;
    socket(my $s, PF_INET, SOCK_STREAM, 0) or die $!;
    setsockopt $s, SOL_SOCKET, SO_REUSEADDR, 1;
    bind $s, pack_sockaddr_in($from_port, inet_aton('127.0.0.1')) or die $! if $from_port;
    my $time = pack 'q2', 0, 0;
    syscall 228, 0, $time;
    connect $s, pack_sockaddr_in(9, inet_aton($to));
    while (defined recv $sniffer, my $packet, 2000, 0) {
        my ($protocol, $port, $target, $sequence, $flags) = unpack 'x14 x9 C x10 n n N x4 x C', $packet;
        next unless $protocol == 6 && $target == 9 && $flags == 2;
        my ($seconds, $nanoseconds) = unpack 'q2', $time;
        return ($port, $sequence, $seconds * 1_000_000_000 + $nanoseconds);
    }
}
print join(' ', map { (first_packet("127.0.0.$_"))[0] } 2 .. 4), "\n";
print join(' ', map { (first_packet('127.0.0.1', $_))[1, 2] } 40001, 40002), "\n";
"""
LOOK = r"""
cat /etc/machine-id
cat /proc/sys/kernel/random/boot_id
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; echo
sha256sum < /etc/ssh/ssh_host_ed25519_key
ls /run/log/journal
systemctl list-timers provisioner-ttl.timer --output=json
systemctl show --property=ActiveEnterTimestamp --value --timestamp=unix '*.timer' | tr -s '@\n' ' '
"""


@pytest.fixture
def session(open_session: Callable[[Mapping[str, str]], Session]) -> Session:
    opened = open_session({})
    # None of these machines writes much, and the soak test has many.
    settings = load_settings().model_copy(update={"disk_overcommit": 1000})
    return replace(opened, cloud=LocalCloud(opened.home, settings))


@pytest.fixture
def image(session: Session) -> str:
    return session.cloud.base_image(BaseImage(role="primary"), Silence())


def text(connection: Connection, *argv: str) -> str:
    done = connection.run(list(argv))
    assert done.exit_code == 0, done.stderr
    return done.stdout.decode().strip()


def clock_error(connection: Connection) -> float:
    """Seconds by which a machine's clock is certainly wrong: how far it lies outside the time that asking took."""
    errors = []
    for _ in range(3):
        before = time.time()
        said = int(text(connection, "date", "+%s%N")) / 1e9
        errors.append(max(before - said, said - time.time(), 0.0))
    return min(errors)


def made(session: Session, image: str) -> list[Path]:
    """The templates of an image, finished or not."""
    return [path for path in (session.images.path(image) / TEMPLATES).glob("*") if path.is_dir()]


def test_machines_of_one_template_share_nothing_that_makes_a_machine_itself(session: Session, image: str) -> None:
    for template in made(session, image):
        templates.discard(templates.Template(template))
    with running(session, image, CLONES) as clones:
        assert {environment.endpoints["primary"].origin for environment, _ in clones} == {"template"}
        assert len(made(session, image)) == 1  # all asked at once for one that was not there
        looks = [text(connection, "sh", "-c", LOOK).splitlines() for _, connection in clones]
        for (environment, _), (machine_id, boot_id, _, _, journal, ttl, timers) in zip(clones, looks, strict=True):
            assert journal == machine_id != boot_id.replace("-", "")
            [timer] = json.loads(ttl)
            assert abs(timer["next"] / 1e6 - environment.expires_at.timestamp()) < TIMER_SECONDS
            # Each was set in this machine, after it knew the time.
            assert min(int(seconds) for seconds in timers.split()) >= int(environment.created_at.timestamp())
        for values in zip(*(look[:4] for look in looks), strict=True):
            assert len(set(values)) == CLONES, values
        errors = [clock_error(connection) for _, connection in clones]
        assert max(errors) < CLOCK_SECONDS, errors
        ports, numbers = [], []
        for _, connection in clones:
            first, second = text(connection, "perl", "-e", CONNECTIONS).splitlines()
            ports.append(first)
            numbers.append([int(number) for number in second.split()])
        assert len(set(ports)) == CLONES, ports
        for one, other in itertools.combinations(numbers, 2):
            assert not (same_secret(one[0:2], other[0:2]) and same_secret(one[2:4], other[2:4])), (one, other)


def same_secret(one: list[int], other: list[int]) -> bool:
    """Whether two initial sequence numbers differ by no more than the kernel's clock: 1 for each 64 ns (RFC 6528)."""
    (number, chosen_at), (other_number, other_chosen_at) = one, other
    difference = (number - other_number - (chosen_at - other_chosen_at) // 64) % (1 << 32)
    return min(difference, (1 << 32) - difference) < READING_SECONDS * 1e9 / 64


def test_a_damaged_template_goes_and_the_machine_boots_as_before_with_its_larger_disk(
    session: Session, image: str
) -> None:
    first = planned(session, image)
    try:
        assert started(session, first).endpoints["primary"].origin == "template"
        [template] = made(session, image)
        state = template / templates.STATE
        state.write_bytes(os.urandom(state.stat().st_size))
    finally:
        remove(session, first)
    second = planned(session, image, disk_gib=17)
    try:
        origin = started(session, second).endpoints["primary"].origin
        assert origin.startswith("boot: the template did not serve and was thrown away")
        assert made(session, image) == []
        assert session.cloud.alive(second, "primary")
    finally:
        remove(session, second)


def in_directory(path: Path) -> list[int]:
    """The processes whose working directory it is, or was."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str((process / "cwd").readlink()).startswith(str(path.resolve())):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_a_process_killed_while_it_makes_a_template_leaves_no_machine_and_what_it_leaves_is_removed(
    session: Session, image: str
) -> None:
    for template in made(session, image):
        templates.discard(templates.Template(template))
    environment = planned(session, image)
    try:
        with starting(session, environment) as process:
            deadline = time.monotonic() + 30
            while not any((path / "serial.log").exists() for path in made(session, image)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            [unfinished] = made(session, image)
            assert unfinished.name.startswith(UNFINISHED)
            assert in_directory(unfinished)
            process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while in_directory(unfinished):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert session.images.remove_unfinished() == [f"{image}/{TEMPLATES}/{unfinished.name}"]
        assert made(session, image) == []
    finally:
        remove(session, environment)
