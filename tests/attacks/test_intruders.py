"""A machine takes over a program beside it, and looks for the user's files, other machines, processes and networks.

`intruder.py` runs in the program's place, enclosed as the program is: by a controller that is root, and by one of an
ordinary user. QEMU and passt also confine themselves, by filters of system calls; this attacker has got around those.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import provisioner
from tests.attacks import intruder
from tests.waiting import BOUND_SECONDS

ORDINARY, OTHER = 65533, 1_900_000_001
PYTHON = "/usr/bin/python3"
KEY = "provisioner-canary"

# Starts the intruder in a program's place, as the controller starts the program. It imports what it needs before it
# becomes the user, who may not be allowed to read the checkout.
STARTER = """
import ctypes, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from provisioner.clouds.local.network import egress
from provisioner.clouds.local.vm import bubblewrap, confinement, disk, qemu
place, directory, operator, text = *sys.argv[2:5], Path(sys.argv[5]).read_text()
libc = ctypes.CDLL(None)
if int(operator):
    os.setgroups([])
    os.setresgid(int(operator), int(operator), int(operator))
    os.setresuid(int(operator), int(operator), int(operator))
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: as if that user had started it
assert libc.syscall(248, b"user", b"provisioner-canary", b"secret", 6, -3) > 0  # add_key(2)
os.chdir(directory)
base = Path("../image/disk.raw")
python = [sys.executable, "-I", "-c"]
own = f"import sys; sys.path.insert(0, {sys.argv[1]!r})\\nfrom provisioner.clouds.local.vm import confinement\\n"
if place == "QEMU":
    link = qemu.link_sockets("primary", ["aux"])
    launch = qemu.Launch(1, 1, "../image/vmlinuz", "../image/initrd.img", False, link, None, None)
    prefix, argv = qemu.enclosed(launch, [Path(qemu.RUN), Path(qemu.LINKS)], disk.chain(base)), [*python, text]
    prepare = confinement.leave_network
elif place == "qemu-img":
    disk.create(Path("layer.qcow2"), base)
    sys.exit(print(Path("layer.qcow2").read_text()))
else:
    prepare = None
    own += "confinement.give_up_privileges()\\n"
    if place == "passt":
        own += "confinement.enter_namespace()\\n"
    prefix, argv = egress.enclosed(), [*python, f"{own}exec({text!r})"]
process, _ = bubblewrap.start(prefix, argv, [], preexec_fn=prepare)
sys.exit(process.wait())
"""


class Site:
    """A host with two machines, an image, and a user's files, sockets and processes."""

    def __init__(self, root: Path, operator: int, stack: ExitStack) -> None:
        self.root, self.operator = root, operator
        self.secrets = [
            root / name for name in ("home/.ssh/id_ed25519", "other/disk.qcow2", "ledger.sqlite", "primary/expires_at")
        ]
        self.own = [
            root / name for name in ("image/disk.raw", "image/vmlinuz", "image/initrd.img", ".link", "primary/run")
        ]
        for path in (*self.secrets, *self.own[:3]):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("a secret")
        for path in self.own[3:]:
            path.mkdir()
        self.package = shutil.copytree(Path(provisioner.__file__).parent, root / "package" / "provisioner").parent
        self.sockets = [root / "other" / "qmp.sock", root / "agent.sock"]
        self.abstract = f"provisioner-{root.name}"
        for address in (*map(str, self.sockets), f"\0{self.abstract}"):
            stack.enter_context(listener := socket.socket(socket.AF_UNIX)).bind(address)
            listener.listen()
        for path in (root, *root.rglob("*")):
            os.chown(path, operator, operator)
            path.chmod(0o777 if path.is_socket() or path.is_dir() else 0o644)
        own_user = (lambda: os.setresuid(operator, operator, operator)) if operator else None
        self.process = stack.enter_context(subprocess.Popen(["sleep", "1000"], preexec_fn=own_user))
        stack.callback(self.process.kill)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port: int = server.getsockname()[1]

    def reached(self, place: str) -> dict[str, Any]:
        """Returns what an intruder reaches from a program's place."""
        is_root = self.operator == 0
        secrets, own = self.secrets, [*self.own, self.package, self.root / "programs" / "qemu-img"]
        if place == "qemu-img":
            own.append(self.root / "primary" / "layer.qcow2")
        asked = {
            "files": list(map(str, secrets)), "sockets": list(map(str, self.sockets)), "abstract": self.abstract,
            "pid": self.process.pid, "port": self.port, "key": KEY, "own": list(map(str, own)),
            "user": OTHER if is_root and place == "QEMU" else 0,
        }  # fmt: skip
        programs = self.root / "programs"
        programs.mkdir()
        text, starter = programs / "qemu-img", programs / "starter.py"
        told = "" if place != "qemu-img" else "import sys\nsys.stdout = open('layer.qcow2', 'w')\n"
        text.write_text(f"#!{PYTHON} -I\n{Path(intruder.__file__).read_text()}\n{told}main({json.dumps(asked)!r})\n")
        text.chmod(0o755)
        starter.write_text(STARTER)
        done = subprocess.run(
            [PYTHON, "-I", str(starter), str(self.package), place, str(self.root / "primary"), str(self.operator),
             str(text)],
            env={"PATH": f"{programs}:/usr/bin:/bin:/usr/sbin:/sbin"}, stdout=subprocess.PIPE, check=True,
            timeout=BOUND_SECONDS,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(params=[0, ORDINARY], ids=["root", "user"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        yield Site(Path(name), request.param, stack)


NOTHING = {
    "files": [], "sockets": [], "seen": [], "abstract": False, "signal": False, "ptrace": False, "memory": False,
    "processes": [], "loopback": False, "cards": ["lo"], "key": False, "io_uring": False, "kernel": False,
    "setuid": False,
}  # fmt: skip
# What it still reaches in a user namespace of its own, which QEMU's own filter and passt's refuse.
MOUNTING = {
    "remounts": False, "mounts": False, "files, once more": [], "sockets, once more": [], "seen, once more": [],
}  # fmt: skip


def within(reached: dict[str, Any]) -> list[str]:
    """Takes out where it writes, and returns that relative to the site."""
    places: list[str] = reached.pop("writable")
    assert reached.pop("writable, once more", places) == places
    return [Path(place).name for place in places]


@pytest.mark.parametrize("place", ["QEMU", "qemu-img", "passt"])
def test_an_intruder_reaches_its_own_directory_and_nothing_else(site: Site, place: str) -> None:
    reached = site.reached(place)
    assert within(reached) == {"QEMU": [".link", "run"], "qemu-img": [], "passt": []}[place]
    assert reached.pop("devices") == ["null", *(["urandom"] if place == "QEMU" else [])]
    assert reached == {**NOTHING, **MOUNTING}


def test_what_carries_the_internet_has_the_hosts_network_and_nothing_else(site: Site) -> None:
    reached = site.reached("egress proxy")
    assert (within(reached), reached.pop("devices")) == ([], ["null"])
    found = {name: value for name, value in reached.items() if NOTHING.get(name, value) != value}
    assert found == {"abstract": True, "loopback": True, "cards": sorted(name for _, name in socket.if_nameindex())}
