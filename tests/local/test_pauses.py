"""A machine's clock after QEMU paused the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import pytest

from provisioner.base.models import BaseImage
from provisioner.base.progress import Silence
from provisioner.clouds.local.vm import qemu
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from tests.local.clones import running
from tests.waiting import until

PAUSE_SECONDS = 20  # more than a call takes on a busy host
CLOCK_SECONDS = 0.5
RECORD = "/run/provisioner-clock"  # the service writes it once it has set the clock
pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("templates")]


def behind(connection: Connection) -> float:
    """Seconds by which a machine's clock is surely behind the host's, negative if it is ahead."""
    before = time.time()
    done = connection.run(["date", "+%s.%N"])
    after, said = time.time(), float(done.stdout)
    return before - said if said < before else min(after - said, 0.0)


def test_the_clock_is_right_again_after_a_pause(
    open_session: Callable[[Mapping[str, str]], Session],
) -> None:
    session = open_session({})
    image = session.cloud.base_image(BaseImage(role="primary"), Silence())
    with running(session, image, 1) as [(environment, connection)]:
        directory = session.home.environments / environment.id / "primary"

        until(lambda: connection.run(["test", "-e", RECORD]).exit_code == 0)
        # Stopped, the service cannot set the clock before the test has seen that it is behind.
        assert connection.run(["systemctl", "kill", "--signal=STOP", "provisioner-clock"]).exit_code == 0
        for command, seconds in (("stop", PAUSE_SECONDS), ("cont", 0)):
            with qemu.QMP(directory) as qmp:
                qmp.execute(command)
            time.sleep(seconds)
        assert behind(connection) > CLOCK_SECONDS
        assert connection.run(["systemctl", "kill", "--signal=CONT", "provisioner-clock"]).exit_code == 0
        until(lambda: abs(behind(connection)) < CLOCK_SECONDS)
