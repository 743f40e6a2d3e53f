"""What becomes of a machine when others fill its host's disk, and free it again. Runs in a mount namespace of its own.

Starts the real QEMU, with a disk on a tmpfs that is soon full, and its real watchdog; then makes the tmpfs larger.
Prints as JSON what QEMU said.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from provisioner.clouds.local import watchdog
from provisioner.clouds.local.vm import confinement, disk, qemu, shutdown
from tests.waiting import BOUND_SECONDS

MIB = 1 << 20
SMALL_MIB, LARGE_MIB = 8, 3 << 10  # the larger one has more than the controller's reserve, and stays nearly empty
# A boot sector that writes to the disk, 64 sectors at a time, until its end (BIOS, INT 13h, function 43h).
WRITER = bytes.fromhex(
    "31c08ed88ed0bc007c"  # segments and stack
    "be207cb80043b280cd13"  # write what the packet at 7c20 names
    "668106287c40000000"  # the packet's sector += 64
    "ebeb"  # again
    "0000"
    "10004000000000100000000000000000"  # the packet: 64 sectors, from 1000:0000, to sector 0 ...
)
CONFINED = (sys.executable, "-m", confinement.__name__)
SECTOR = WRITER.ljust(510, b"\0") + b"\x55\xaa"
LAUNCH = qemu.Launch(
    cpus=1, memory_mib=32, kernel="", initrd="", kvm=False, link=(), internet_fd=None, user=None,
)  # fmt: skip


def qemu_command(disk_fds: tuple[int, ...], card: int) -> list[str]:
    """QEMU's command line as for any machine, but for the kernel: this one boots from its disk."""
    argv = qemu.command(replace(LAUNCH, disk_fds=disk_fds, management_fd=card))
    for option in ("-kernel", "-initrd", "-append"):
        del argv[argv.index(option) : argv.index(option) + 2]
    return [*CONFINED, str(card), *argv]


@contextlib.contextmanager
def running(*argv: str, pass_fds: tuple[int, ...] = ()) -> Iterator[None]:
    """Starts a process, and ends it at the end."""
    process = subprocess.Popen(argv, pass_fds=pass_fds)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def wait_for_status(*statuses: str) -> str:
    """Waits until QEMU has one of some statuses, and returns it; or what it has in the end."""
    deadline, status = time.monotonic() + BOUND_SECONDS, ""
    while status not in statuses and time.monotonic() < deadline:
        time.sleep(0.2)
        with contextlib.suppress(OSError, qemu.QMPError), qemu.QMP() as qmp:
            status = qmp.execute("query-status")["status"]
    return status


def used_mib() -> float:
    """What the machine's disk takes of the host's."""
    return Path(disk.OVERLAY).stat().st_blocks * 512 / MIB


def wait_for_growth() -> float:
    """Waits until the machine's disk is larger than the whole tmpfs was."""
    deadline = time.monotonic() + BOUND_SECONDS
    while used_mib() <= SMALL_MIB + 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    return used_mib()


def main() -> None:
    """Lets a machine run into a full disk, and then gives it room."""
    with tempfile.TemporaryDirectory() as environments:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_MIB}m", "tmpfs", environments], check=True)
        directory = Path(environments, "env", "primary")
        directory.mkdir(parents=True)
        os.chdir(directory)
        shutdown.prepare(directory)
        Path(disk.SHARE).write_text(str(disk.GIB))
        Path(watchdog.EXPIRY).write_text(str(time.time() + 3600))
        Path("base.raw").write_bytes(SECTOR.ljust(MIB, b"\0"))
        base = ["-b", str(directory / "base.raw"), "-F", "raw"]
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *base, disk.OVERLAY, "64M"], check=True)
        with (
            disk.opened(Path(disk.OVERLAY)) as opened,
            confinement.place_for_card() as card,
            running(sys.executable, "-m", "provisioner.clouds.local.watchdog"),
            running(*qemu_command(opened, card.fileno()), pass_fds=(card.fileno(), *opened)),
        ):
            seen = {"full": wait_for_status("io-error"), "used_mib_when_full": used_mib()}
            time.sleep(watchdog.RESUME_SECONDS + 2)
            seen["still_full"] = wait_for_status("io-error")
            subprocess.run(["mount", "-o", f"remount,size={LARGE_MIB}m", environments], check=True)
            seen |= {"with_room": wait_for_status("running"), "used_mib_with_room": wait_for_growth()}
        os.chdir("/")
        subprocess.run(["umount", environments], check=True)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
