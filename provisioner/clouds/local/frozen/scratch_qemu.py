"""Runs a QEMU that ends with the process that started it: its machine is to be frozen, and belongs to no environment.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from provisioner.base import child_environment
from provisioner.clouds.local.vm import disk_layers, qemu, shutdown
from provisioner.store.files import read_end

# The machine's memory: a file in its directory, from which other machines resume.
MEMORY = "memory"
CONTROL_SECONDS = 60
# setuid clears PR_SET_PDEATHSIG, so QEMU also runs in a PID namespace: when its init dies, the kernel kills the rest.
_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--")
# Not in preexec_fn: it would run Python between fork and exec, where another thread's locks stay locked for ever.
_WITHOUT_NETWORK = (sys.executable, "-m", "provisioner.clouds.local.vm.confinement")
_ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", "--")


def adapted(launch: qemu.Launch) -> qemu.Launch:
    """Returns how such a machine starts: its private link's sockets have the same names everywhere, and lead nowhere.

    Args:
        launch: how the machines start that will resume from it.
    """
    link = (("link.sock", "nowhere.sock"),) if launch.link else ()
    return replace(launch, memory=MEMORY, frozen=False, link=link, capture=False)


@contextlib.contextmanager
def running(
    launch: qemu.Launch, directory: Path, layer: str, seconds: float, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], qemu.QMP]]:
    """Runs a machine, and yields its process and its control connection. Ends it afterwards.

    Args:
        launch: how the machines start that will resume from it.
        directory: where it runs.
        layer: the name of its disk there.
        seconds: when it ends in any case.
        arguments: more of QEMU's.

    Raises:
        OSError, subprocess.SubprocessError: it could not be started.
        qemu.QMPError: it ended, or refused something; with what it said.
    """
    launch = adapted(launch)
    shutdown.prepare(directory)
    ours, theirs = socket.socketpair()
    with ours, theirs, disk_layers.opened(directory / layer) as disk_fds, (directory / "qemu.log").open("ab") as log:
        launch = replace(launch, disk_fds=disk_fds)
        if launch.internet_fd is not None:
            launch = replace(launch, internet_fd=theirs.fileno())
        namespace = _NAMESPACE if launch.user else ()
        ends_in_time = ("timeout", "--signal=KILL", f"{seconds:g}")
        command = [*qemu.command(launch), *arguments]
        process = subprocess.Popen(
            [*_ENDS_WITH_PARENT, *_WITHOUT_NETWORK, *namespace, *ends_in_time, *_ENDS_WITH_PARENT, *command],
            cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno(), *disk_fds],
            env=child_environment.for_python(os.environ),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + CONTROL_SECONDS
            with qemu.wait_for_qmp(lambda: process.poll() is None, deadline, directory) as qmp:
                yield process, qmp
        except qemu.QMPError as error:
            said = read_end(directory / "qemu.log", 500).decode(errors="replace").strip()
            raise qemu.QMPError(f"{error} {said}".strip()) from error
        finally:
            process.kill()
            process.wait()
