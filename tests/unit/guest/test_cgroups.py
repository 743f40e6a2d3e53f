"""What ends with a cgroup or belongs to the agent's, as far as a host shows it. tests/attacks has the real machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import GUEST

sys.path.insert(0, str(GUEST))
from provisioner_guest import cgroup
from provisioner_guest.family.parent import is_agents, own_cgroup

from tests.waiting import until

NOBODY = 65534
# In a mount namespace in which no cgroup can be made. The login is a shell, which lives on if it is not ended.
LOGIN = """
mount -t tmpfs -o ro none /sys/fs/cgroup
PAM_TYPE=open_session sh -c 'sh "$0" login; sleep 1; echo lives on' "$0" 2> /dev/null
echo "$?"
"""


def test_the_exec_server_finds_the_program_of_the_agents_cgroup() -> None:
    assert Path(cgroup.AGENT_PROGRAM) == GUEST / "agent_cgroup.sh"


def test_a_login_that_cannot_be_put_into_the_agents_cgroup_ends() -> None:
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    argv = ["unshare", *user, "--mount", "sh", "-c", LOGIN, str(GUEST / "agent_cgroup.sh")]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split() == ["137"]


def test_the_agents_processes_are_found_in_user_namespaces() -> None:
    assert is_agents(os.getpid(), os.getuid())
    assert not is_agents(os.getpid(), NOBODY)
    with subprocess.Popen(["unshare", "--user", "sleep", "600"]) as other:
        try:
            until(lambda: is_agents(other.pid, NOBODY))
        finally:
            other.kill()
    with pytest.raises(OSError, match="No such"):
        is_agents(other.pid, NOBODY)


def test_outside_of_a_call_there_is_nothing_to_settle() -> None:
    assert own_cgroup() is None
