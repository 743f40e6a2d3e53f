"""Waits until an environment's machines have booted and accept the controller's login.

Machines that resume from a snapshot first get keys, random numbers and a time of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from provisioner.base.errors import MachineLostError, TaskError
from provisioner.base.models import Environment, Role
from provisioner.base.printable import last_lines
from provisioner.clouds.guest_files import GUEST
from provisioner.machines.connect import on_all_machines
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.ssh.keys import Login
from provisioner.store.snapshots import SnapshotStore

# A machine that has just resumed answers in a second or two, without KVM and on a busy host in some more.
RENEWAL_SECONDS = 120.0

# The first that happens is new random numbers, the second the time (credentials.pl). The argument is ttl.sh. As few
# programs are started as possible: each takes a tenth of a second and more in a machine that has just gone on.
_RENEW = """
import ctypes, os, pathlib, shutil, signal, subprocess, sys
given, keys, detach = pathlib.Path("/run/provisioner-renewal"), pathlib.Path("/etc/ssh"), 2
shutil.rmtree(given, ignore_errors=True)
# The boot id of the frozen machine lies there, in a file that is gone, over which nothing can be mounted.
ctypes.CDLL(None).umount2(b"/proc/sys/kernel/random/boot_id", detach)
subprocess.run(["perl", "/usr/lib/provisioner/credentials.pl", given], check=True, timeout=60)
timer = subprocess.Popen(["sh", "-c", sys.argv[1], "ttl", (given / "expires_at").read_text(), "move"])
def replace(name, path, mode):
    new = keys / (path + ".new")
    new.touch(mode)
    new.write_bytes((given / name).read_bytes())
    new.replace(keys / path)
replace("host_key", "ssh_host_ed25519_key", 0o600)
(keys / "ssh_host_ed25519_key.pub").unlink(missing_ok=True)
for path in given.glob("authorized_keys.*"):
    replace(path.name, "authorized_keys.d/" + path.suffix[1:], 0o644)
shutil.rmtree(given)
os.kill(int(pathlib.Path("/run/sshd.pid").read_text()), signal.SIGHUP)
sys.exit(timer.wait())
"""


def renew(session: Session, environment: Environment) -> None:
    """Renews all machines of an environment that resumed from a snapshot.

    Raises:
        MachineLostError: a machine cannot be reached.
        TaskError: a machine does not take what it is given.
    """
    ttl = (GUEST / "ttl.sh").read_text()

    def renew_one(role: Role, cancelled: threading.Event) -> None:
        def alive() -> bool:
            return not cancelled.is_set() and session.cloud.alive(environment, role)

        try:
            login, calls = _frozen_login(session, environment, role), session.calls(environment, role)
            with Connection(login, RENEWAL_SECONDS, alive, session.check, calls, boots=True) as frozen:
                done = frozen.run(["renew", ttl], program=_RENEW, timeout_seconds=RENEWAL_SECONDS)
        except MachineLostError as error:
            raise MachineLostError(
                f"The {role} machine does not run as it was frozen: {error.message}",
                hint="A process that was root in the frozen machine can cause this.",
            ) from error
        if done.exit_code != 0:
            raise TaskError(
                f"The {role} machine did not take its new keys.",
                hint="A process that was root in the frozen machine can cause this.",
                details=last_lines(done.stderr.decode(errors="replace"), 1000),
            )

    on_all_machines(environment.machines, renew_one)


def _frozen_login(session: Session, environment: Environment, role: Role) -> Login:
    store, endpoint = SnapshotStore(session.home), environment.endpoints[role]
    return Login(
        endpoint=endpoint,
        user="root",
        private_key=store.key_path(environment.snapshot, "controller"),
        host_key=store.key_path(environment.snapshot, f"host_{role}.pub").read_text().strip(),
        pidfile=session.environments.directory(environment.id) / role / endpoint.pidfile if endpoint.pidfile else None,
    )


# Two emulated machines on one busy core need about a minute, a first boot with GPU drivers on EC2 more than five. No
# healthy machine needs this long.
BOOT_SECONDS = 600
POLL_SECONDS = 1.0


def boot_machines(session: Session, environment: Environment) -> dict[Role, Connection]:
    """Waits for all machines at once until they accept a login as root.

    Raises:
        MachineLostError: a machine did not come up; the details hold the end of its console.
    """

    pinned = {role: threading.Event() for role in environment.machines}

    def reach(role: Role, cancelled: threading.Event) -> Connection:
        deadline = time.monotonic() + BOOT_SECONDS

        def alive() -> bool:
            return not cancelled.is_set() and session.cloud.alive(environment, role)

        try:
            session.environments.pin(environment, role, _host_key(session, environment, role, deadline, alive))
            pinned[role].set()
            if (jump := environment.endpoints[role].jump) and not pinned[jump].wait(BOOT_SECONDS):
                raise MachineLostError("The machine that it is reached through did not come up.")
            login = session.environments.login(environment, role, "root")
            calls = session.calls(environment, role)
            return Connection(login, deadline - time.monotonic(), alive, session.check, calls, boots=True)
        except MachineLostError as error:
            console = "\n".join(session.cloud.console(environment, role).splitlines()[-15:])
            hint = session.cloud.unreachable_hint(environment) if pinned[role].is_set() and alive() else None
            message = f"The {role} machine did not come up: {error.message}"
            raise MachineLostError(message, hint=hint, details=console) from error

    connections = on_all_machines(environment.machines, reach)
    try:
        session.cloud.harden(environment, connections)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return connections


def _host_key(
    session: Session, environment: Environment, role: Role, deadline: float, alive: Callable[[], bool]
) -> str:
    """Waits until the cloud reports the machine's host key, the only key that the controller will accept."""
    while (key := session.cloud.host_key(environment, role)) is None:
        session.check()
        if time.monotonic() > deadline or not alive():
            raise MachineLostError("The cloud did not report its host key.")
        time.sleep(POLL_SECONDS)
    return key
