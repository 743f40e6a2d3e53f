"""One instance's QEMU machine: its disk, its SMBIOS strings for cloud-init, its processes. Knows nothing of moto.

A machine's directory: disk.qcow2 (a layer over its image), smbios/ (cloud-init's input), serial.log (the console
of all its boots), qemu.pid (locked while it runs), qemu.log and passt.log.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from provisioner.clouds.local import host
from provisioner.clouds.local.vm import qemu
from tests.aws.ec2.packets import ROUTER_MAC

KILL_SECONDS = 10
# While a file of this name is in the directory of a run, machines that start boot as on EC2.
AS_ON_EC2 = "as-on-ec2"
# EC2 keeps the last 64 KiB of a console.
CONSOLE_BYTES = 1 << 16
# A quick first boot needs neither the network nor the names of its cards, and only two of cloud-init's four stages.
_QUICK = (
    "quick_first_boot ci.ds=NoCloud net.ifnames=0 systemd.mask=cloud-init.service systemd.mask=cloud-config.service "
    "systemd.mask=systemd-networkd-wait-online.service systemd.mask=systemd-resolved.service "
    "systemd.mask=systemd-logind.service systemd.mask=dbus.service systemd.mask=dbus.socket"
)
# A child must not outlive us; passt, which changes its user, ends with its socket.
_WITH_US = ("setpriv", "--pdeathsig", "KILL", "--")


@dataclass(frozen=True)
class Hardware:
    """Describes the hardware of a machine.

    Args:
        kernel, initrd, image: absolute paths; the disk is a layer over `image`.
        address, network: the card's private address and its subnet.
        public_address: the address whose port 22 is forwarded, or None.
        instance_type: EC2's name of it, which SMBIOS tells.
        seed: cloud-init's NoCloud files by name (`meta-data`, `user-data`, `network-config`); empty: the machine boots
            as on EC2, by DHCP and the metadata service.
    """

    kernel: Path
    initrd: Path
    image: Path
    disk_gib: int
    cpus: int
    memory_mib: int
    mac: str
    address: IPv4Address
    network: IPv4Network
    public_address: IPv4Address | None
    instance_type: str
    seed: dict[str, bytes]


@dataclass
class Machine:
    """Starts and ends one machine, and keeps its disk."""

    directory: Path
    hardware: Hardware
    _process: subprocess.Popen[bytes] | None = None
    _passt: subprocess.Popen[bytes] | None = None
    _power: socket.socket | None = field(default=None)

    def make_disk(self) -> None:
        """Creates the disk: a layer over the image, or over the raw disk of Debian's AMI."""
        image = self.hardware.image
        kind = "raw" if image.suffix == ".raw" else "qcow2"
        self.directory.mkdir(mode=0o700, parents=True)
        size = f"{self.hardware.disk_gib}G"
        create = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(image), "-F", kind, "disk.qcow2", size]
        subprocess.run(create, cwd=self.directory, check=True, stdin=subprocess.DEVNULL, timeout=60)

    def start(self) -> tuple[socket.socket, socket.socket]:
        """Starts QEMU and passt. The calling thread must live as long as they do.

        Returns:
            the other ends of the card and of passt, for the fabric.
        """
        card, our_card = socket.socketpair()
        link, our_link = socket.socketpair()
        power, self._power = socket.socketpair()
        with card, link, power:
            strings = self._smbios_strings()
            with (self.directory / "passt.log").open("ab") as log:
                self._passt = subprocess.Popen(
                    self._passt_command(link.fileno()), pass_fds=[link.fileno()], stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, cwd="/",
                )  # fmt: skip
            with (self.directory / "qemu.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [*_WITH_US, *self._qemu_command(strings, card.fileno(), power.fileno())], stdin=subprocess.DEVNULL,
                    pass_fds=[card.fileno(), power.fileno()], stdout=log, stderr=log, cwd=self.directory,
                )  # fmt: skip
        return our_card, our_link

    @property
    def started(self) -> bool:
        """Returns whether it was started and not killed since."""
        return self._process is not None

    def alive(self) -> bool:
        """Returns whether QEMU runs."""
        return self._process is not None and self._process.poll() is None

    def failed(self) -> bool:
        """Returns whether QEMU ended for another reason than the guest's power-off."""
        return self._process is not None and self._process.poll() not in (None, 0)

    def press(self, word: str) -> None:
        """Sends `poweroff` or `reboot` to the guest's service for the power button."""
        if self._power:
            with contextlib.suppress(OSError):
                self._power.sendall(word.encode() + b"\n")

    def kill(self) -> None:
        """Ends its processes and keeps the disk."""
        for process in (self._process, self._passt):
            if process:
                process.kill()
                process.wait(KILL_SECONDS)
        if self._power:
            self._power.close()
        self._process = self._passt = self._power = None

    def remove(self) -> None:
        """Ends it and removes its directory."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def console(self) -> bytes:
        """Returns the end of the serial console's output."""
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / "serial.log").read_bytes()[-CONSOLE_BYTES:]
        return b""

    def _smbios_strings(self) -> list[str]:
        """Writes cloud-init's files as SMBIOS strings, which systemd turns into credentials, and names them."""
        (self.directory / "smbios").mkdir(mode=0o700, exist_ok=True)
        for name, content in self.hardware.seed.items():
            text = f"io.systemd.credential.binary:{name}={base64.b64encode(content).decode()}"
            (self.directory / "smbios" / name).write_text(text)
        return [f"smbios/{name}" for name in self.hardware.seed]

    def _qemu_command(self, strings: list[str], card: int, power: int) -> list[str]:
        hardware = self.hardware
        accelerated = host.kvm_works(hardware.kernel, hardware.kernel.with_name("kvm.json"))
        machine_id = self.directory.name.removeprefix("i-").rjust(32, "0")
        boot = f"root=/dev/vda rw console=ttyS0 systemd.machine_id={machine_id}"
        boot += f" {_QUICK}" if hardware.seed else ""
        argv = [
            *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none"),
            *("-machine", "pc,accel=" + ("kvm" if accelerated else "tcg")),
            *("-cpu", "host" if accelerated else qemu.EMULATED_CPU),
            *("-smp", str(hardware.cpus), "-m", f"{hardware.memory_mib}M"),
            *("-kernel", str(hardware.kernel), "-initrd", str(hardware.initrd)),
            *("-append", boot if accelerated else boot + f"{qemu.EMULATED_BOOT} init_on_alloc=0"),
            *("-drive", "file=disk.qcow2,format=qcow2,if=none,id=disk,cache=unsafe,discard=unmap"),
            *("-device", "virtio-blk-pci,drive=disk"),
            *("-object", "rng-random,filename=/dev/urandom,id=rng", "-device", "virtio-rng-pci,rng=rng"),
            *("-chardev", "file,id=console,path=serial.log,append=on", "-serial", "chardev:console"),
            *("-chardev", f"socket,id=power,fd={power}", "-serial", "chardev:power"),
            *("-netdev", f"stream,id=card,server=off,addr.type=fd,addr.str={card}"),
            # As on EC2, where the chipset is the same: ens5.
            *("-device", f"virtio-net-pci,addr=5,netdev=card,mac={hardware.mac},romfile="),
            *("-smbios", _identity(self.directory.name, hardware.instance_type)),
            *("-pidfile", "qemu.pid"),
            *qemu.confined(None),
        ]
        for name in strings:
            argv += ["-smbios", f"type=11,path={name}"]
        return argv

    def _passt_command(self, link: int) -> list[str]:
        hardware = self.hardware
        # passt that root starts changes to user nobody, who could not listen on port 22.
        user = ["--runas", "0"] if os.geteuid() == 0 else []
        forward = f"{hardware.public_address}/22" if hardware.public_address else "none"
        return [
            *("passt", "--foreground", "--quiet", "--ipv4-only", "--fd", str(link), *user),
            *("--tcp-ports", forward, "--udp-ports", "none", "--dns-forward", "198.51.100.53"),
            # What a VPC's DHCP says (Amazon VPC user guide, "DHCP option sets"; EC2 user guide, "Network MTU"). The
            # fabric puts in the resolver.
            *("--search", "ec2.internal", "--mtu", "9001"),
            *("--address", str(hardware.address), "--netmask", str(hardware.network.prefixlen)),
            *("--gateway", str(hardware.network.network_address + 1), "--mac-addr", ROUTER_MAC.hex(":")),
        ]


def _identity(instance_id: str, instance_type: str) -> str:
    """Returns the SMBIOS identity by which programs know EC2: uuid and serial begin with ec2 and are the same."""
    identity = "ec2" + hashlib.sha256(instance_id.encode()).hexdigest()[:29]
    uuid = "-".join((identity[:8], identity[8:12], identity[12:16], identity[16:20], identity[20:]))
    return f"type=1,manufacturer=Amazon EC2,product={instance_type},uuid={uuid},serial={uuid}"
