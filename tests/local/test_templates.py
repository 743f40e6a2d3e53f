"""Machines that resume from a template: what they share, and what becomes of a template that does not serve."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.base.config import load_settings
from provisioner.base.errors import MachineLostError
from provisioner.base.models import BaseImage, Environment
from provisioner.base.progress import Silence
from provisioner.clouds.local import host
from provisioner.clouds.local.cloud import KVM_ANSWER, LocalCloud
from provisioner.clouds.local.frozen import templates
from provisioner.clouds.local.vm import qemu
from provisioner.machines.boot import BOOT_SECONDS, boot_machines
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.store.files import is_locked, remove_tree
from provisioner.store.home import TEMPLATES, UNFINISHED, Home
from tests.homes import new_home
from tests.local.clones import in_directory, planned, remove, running, started, starting
from tests.soak import moments
from tests.soak.template_kills import prune_beside_start
from tests.waiting import until

pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("templates")]
# The campaign soak has 20.
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
taskset -c 0 head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; echo
taskset -c 1 head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; echo
sha256sum < /etc/ssh/ssh_host_ed25519_key
ls /run/log/journal
systemctl list-timers provisioner-ttl.timer --output=json
systemctl show --property=ActiveEnterTimestamp --value --timestamp=unix '*.timer' | tr -s '@\n' ' '
"""


@pytest.fixture
def session(test_home: Home) -> Iterator[Session]:
    home = new_home(test_home.root / "templates")
    # None of these machines writes much, and the soak test has many.
    settings = load_settings().model_copy(update={"disk_overcommit": 1000})
    yield Session(home=home, cloud=LocalCloud(home, settings))
    assert not any(home.environments.iterdir())


@pytest.fixture
def image(session: Session, test_home: Home) -> str:
    """An image in a home of its own: of those that all tests share, others make templates meanwhile."""
    image = LocalCloud(test_home, load_settings()).base_image(BaseImage(role="primary"), Silence())
    if not session.images.path(image).exists():
        for earlier in session.home.images.iterdir():
            remove_tree(earlier)
        with contextlib.suppress(FileNotFoundError):
            shutil.copy(test_home.root / KVM_ANSWER, session.home.root)
        shutil.copytree(
            test_home.images / image, session.images.path(image), copy_function=os.link, ignore=lambda *_: [TEMPLATES]
        )
    return image


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


@contextlib.contextmanager
def doomed_maker(session: Session, image: str) -> Iterator[None]:
    """Starts a machine whose start is killed when the template that it makes has everything but its name."""
    environment = planned(session, image)
    try:
        with starting(session, environment, *moments.through(moments.TEMPLATE_MADE)) as process:
            until(lambda: made(session, image), lambda: process.poll() is None)
            yield
            _, said = process.communicate()
            assert process.returncode == moments.KILLED, said
    finally:
        remove(session, environment)


def test_machines_of_one_template_share_nothing_of_their_own(session: Session, image: str) -> None:
    for template in made(session, image):
        templates.discard(templates.Template(template))
    with doomed_maker(session, image), running(session, image, CLONES) as clones:
        assert {environment.endpoints["primary"].origin for environment, _ in clones} == {"template"}
        [template] = made(session, image)  # all asked at once for one that was not there, and waited for the doomed one
        assert not template.name.startswith(UNFINISHED)
        looks = [text(connection, "sh", "-c", LOOK).splitlines() for _, connection in clones]
        for (environment, _), (machine_id, boot_id, *_, journal, ttl, timers) in zip(clones, looks, strict=True):
            assert journal == machine_id != boot_id.replace("-", "")
            [timer] = json.loads(ttl)
            assert abs(timer["next"] / 1e6 - environment.expires_at.timestamp()) < TIMER_SECONDS
            # Each was set in this machine, after it knew the time.
            assert min(int(seconds) for seconds in timers.split()) >= int(environment.created_at.timestamp())
        for values in zip(*(look[:5] for look in looks), strict=True):
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


def test_a_machine_boots_if_its_template_does_not_work(session: Session, image: str, tmp_path: Path) -> None:
    first = planned(session, image)
    try:
        assert started(session, first).endpoints["primary"].origin == "template"
        [template] = made(session, image)
    finally:
        remove(session, first)
    saved = tmp_path / "saved"
    put_back(template, saved)
    for part in templates.CHECKED:
        put_back(saved, template)
        flip_a_bit(template / part)
        with thrown_away(session, image, planned(session, image)) as origin:
            assert origin.endswith(f": {part} is damaged: its contents have changed")
    put_back(saved, template)
    state = template / templates.STATE
    state.write_bytes(os.urandom(state.stat().st_size))
    templates.complete(template)  # as if it had been so from the beginning
    second = planned(session, image, disk_gib=17)
    with thrown_away(session, image, second):
        assert session.cloud.alive(second, "primary")


@contextlib.contextmanager
def thrown_away(session: Session, image: str, environment: Environment) -> Iterator[str]:
    """Starts a machine whose template does not serve, and yields what it says of its start."""
    try:
        origin = started(session, environment).endpoints["primary"].origin
        assert origin.startswith("boot: the template did not work and was deleted")
        assert made(session, image) == []
        yield origin
    finally:
        remove(session, environment)


def put_back(saved: Path, template: Path) -> None:
    remove_tree(template)
    subprocess.run(["cp", "-a", "--sparse=always", saved, template], check=True)


def flip_a_bit(path: Path) -> None:
    """Changes one bit in the first data of a file, as a disk that fails does: its times stay."""
    status = path.stat()
    with path.open("r+b") as file:
        offset = os.lseek(file.fileno(), 0, os.SEEK_DATA)
        [value] = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([value ^ 1]), offset)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_start_killed_at_any_moment_leaves_nothing(session: Session, image: str) -> None:
    def start(wanted: str) -> tuple[int, str]:
        environment = planned(session, image)
        try:
            with starting(session, environment, *moments.through(wanted)) as process:
                _, said = process.communicate()
        finally:
            remove(session, environment)
        nothing_works_in(session.home.environments / environment.id)
        return process.returncode, said

    code, said = start("-")
    assert code == 0, said
    if moments.TEMPLATE_MADE in moments.passed(said):  # what makes one passes other moments than what finds it
        code, said = start("-")
        assert code == 0, said
    [template] = made(session, image)
    inode = template.stat().st_ino
    for wanted in random.sample(moments.passed(said), 3):  # tests.soak.template_kills has all
        assert start(wanted)[0] == moments.KILLED, wanted
        assert not is_locked(templates.Template(template).lock), wanted
        assert [path.stat().st_ino for path in made(session, image)] == [inode], wanted
    assert start("-")[0] == 0
    assert [path.stat().st_ino for path in made(session, image)] == [inode]


def test_a_machine_of_a_template_is_larger_and_reboots(session: Session, image: str) -> None:
    with running(session, image, 1, disk_gib=19) as [(environment, connection)]:
        assert environment.endpoints["primary"].origin == "template"
        # 16 GiB is what the template's disk has. A file system takes some of its disk for itself.
        assert 18 << 30 < int(text(connection, "df", "--output=size", "--block-size=1", "/").split()[1]) <= 19 << 30
        pid = qemu.live_pid(session.home.environments / environment.id / "primary" / "run/qemu.pid")
        accelerator = "kvm" if host.known_answer(session.home.root / KVM_ANSWER) else "tcg"
        assert f"\0-accel\0{accelerator}" in Path(f"/proc/{pid}/cmdline").read_text()
        before = text(connection, "sh", "-c", LOOK).splitlines()
        connection.run(["systemd-run", "--on-active=1", "systemctl", "reboot"])  # once this command has been answered
        deadline = time.monotonic() + BOOT_SECONDS
        after = before
        while after[1] == before[1]:  # it takes a moment to go down
            assert time.monotonic() < deadline
            with contextlib.suppress(MachineLostError), boot_machines(session, environment)["primary"] as back:
                after = text(back, "sh", "-c", LOOK).splitlines()
                error = clock_error(back)
        assert error < CLOCK_SECONDS
        machine_id, _, *randoms, host_key, journal, ttl, _ = after
        assert (machine_id, host_key, journal) == (before[0], before[4], before[5])
        assert not set(randoms) & set(before)
        [timer] = json.loads(ttl)
        assert abs(timer["next"] / 1e6 - environment.expires_at.timestamp()) < TIMER_SECONDS


@pytest.mark.parametrize("delay_seconds", [-0.5, 1.5], ids=["recorded before", "recorded meanwhile"])
def test_a_start_during_a_prune_gets_a_whole_machine_or_none(
    session: Session, image: str, delay_seconds: float
) -> None:
    # tests.soak.template_kills has more moments, and kills the process that prunes.
    assert prune_beside_start(session, image, "-", delay_seconds) == []
    assert session.images.remove_unfinished() == []
    assert session.images.finished(image) or delay_seconds > 0


def nothing_works_in(path: Path) -> None:
    """Waits until no process has a directory, or a deleted one below it, as its own."""
    until(lambda: not in_directory(path))


def test_a_killed_template_maker_leaves_no_machine(session: Session, image: str) -> None:
    for template in made(session, image):
        templates.discard(templates.Template(template))
    environment = planned(session, image)
    try:
        with starting(session, environment) as process:
            until(
                lambda: any((path / "run/serial.log").exists() for path in made(session, image)),
                lambda: process.poll() is None,
            )
            [unfinished] = made(session, image)
            assert unfinished.name.startswith(UNFINISHED)
            assert in_directory(unfinished)
            process.send_signal(signal.SIGKILL)
        nothing_works_in(unfinished)
        assert session.images.remove_unfinished() == [f"{image}/{TEMPLATES}/{unfinished.name}"]
        assert made(session, image) == []
    finally:
        remove(session, environment)
