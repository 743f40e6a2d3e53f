"""What listens in a machine that is up to the point where it waits for its credentials: where templates are frozen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from provisioner.base.models import BaseImage
from provisioner.base.progress import Silence
from provisioner.clouds.local.vm import machine_logs
from provisioner.clouds.local.vm.credential_port import CREDENTIALS
from provisioner.machines.boot import BOOT_SECONDS, boot_machines
from provisioner.session import Session
from provisioner.ssh.calls import SOCKET
from tests.local.clones import running

pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("templates")]
LOOKS = 3
# The kernel's lists of sockets that packets can reach.
REACHABLE = ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6", "icmp", "icmp6", "packet")
# Prints those lists, all Unix sockets, the flags of all cards, and who may connect to the exec server.
LOOK = f"""
tail -v -n +2 {" ".join(f"/proc/net/{name}" for name in (*REACHABLE, "unix"))} 2> /dev/null
tail -v -n +1 /sys/class/net/*/flags
echo "==> modes <=="
stat -c %a {SOCKET} {Path(SOCKET).parent}
"""
# Looks while the machine waits, and tells the host by the console that it has.
RECORDER = f"""
n=0
until [ $n = {LOOKS} ]; do
    sleep 0.5
    if pgrep -f '[c]redentials[.]pl' > /dev/null; then
        n=$((n+1))
        ({LOOK}) > /run/held.$n
        echo "held: $n" > /dev/ttyS0
    fi
done
"""
UNIT = """
[Unit]
DefaultDependencies=no
[Service]
ExecStart=/bin/sh /usr/local/lib/held.sh
[Install]
WantedBy=sysinit.target
"""
# /proc/net/unix: a socket that accepts connections (__SO_ACCEPTCON).
ACCEPTS = 1 << 16


def parsed(text: str) -> dict[str, list[str]]:
    """The lines of each part of what LOOK prints, by the names of the files."""
    parts = (part.splitlines() for part in text.split("==> ")[1:])
    return {
        name.removesuffix(" <==").removeprefix("/proc/net/"): [line for line in lines if line] for name, *lines in parts
    }


def cards_up(look: dict[str, list[str]]) -> set[str]:
    """The network cards that are up (IFF_UP), but for the loopback's."""
    flags = {name.split("/")[4]: int(lines[0], 16) for name, lines in look.items() if name.startswith("/sys/")}
    assert len(flags) > 1
    return {name for name, each in flags.items() if each & 1} - {"lo"}


def accepting(lines: list[str]) -> set[str]:
    """The paths of Unix sockets that accept connections."""
    fields = [line.split() for line in lines]
    return {each[7] if len(each) > 7 else "" for each in fields if int(each[3], 16) & ACCEPTS}


def test_a_machine_without_credentials_cannot_be_reached(
    open_session: Callable[[Mapping[str, str]], Session],
) -> None:
    session = open_session({})
    image = session.cloud.base_image(BaseImage(role="primary"), Silence())
    with running(session, image, 1) as [(environment, connection)]:
        directory = session.home.environments / environment.id / "primary"
        connection.write_file("/usr/local/lib/held.sh", RECORDER.encode())
        connection.write_file("/etc/systemd/system/held.service", UNIT.encode())
        enabled = connection.run(["sh", "-c", "systemctl enable held.service && sync"])
        assert enabled.exit_code == 0, enabled.stderr
        credentials, withheld = directory / CREDENTIALS, directory / "withheld"
        credentials.rename(withheld)
        try:
            connection.run(["systemd-run", "--on-active=1", "systemctl", "reboot"])  # once this has been answered
            deadline = time.monotonic() + BOOT_SECONDS
            while f"held: {LOOKS}".encode() not in (directory / machine_logs.SERIAL).read_bytes():
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            withheld.rename(credentials)
        with boot_machines(session, environment)["primary"] as back:
            looks = [parsed(back.run(["cat", f"/run/held.{n}"]).stdout.decode()) for n in range(1, LOOKS + 1)]
            afterwards = parsed(back.run(["sh", "-c", LOOK]).stdout.decode())
    for look in looks:
        assert {"tcp", "udp", "raw", "packet", "unix"} <= look.keys()
        assert not any(look.get(name) for name in REACHABLE), look
        assert cards_up(look) == set()
        assert look["modes"] == ["600", "700"]
        listening = accepting(look["unix"])
        assert SOCKET in listening
        # systemd's, the journal's and udev's own.
        others = {path for path in listening - {SOCKET} if not path.startswith(("/run/systemd/", "/run/udev/"))}
        assert others == set()
    # What would be seen: sshd listens afterwards, and a card is up.
    assert any(line.split()[1].endswith(":0016") for line in afterwards["tcp"])
    assert cards_up(afterwards)
