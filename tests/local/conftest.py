"""Provides one environment of the lab family, which several tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from provisioner.base.models import Destination, Environment, Role
from provisioner.clouds.local.machine import TEMPLATE
from provisioner.environment import lifecycle
from provisioner.family.loader import load_family
from provisioner.machines import claims
from provisioner.machines.connect import connect
from provisioner.machines.create import create_machines, record_environment
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.ssh.calls import SOCKET
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import Completed
from provisioner.store.environments import new_id
from tests.kept import keepers
from tests.waiting import until

FAMILIES = Path(__file__).parent / "families"
TOKEN = "tok-3f9a1c77e2-not-for-agents"
VARIABLES = {"LAB_TOKEN": TOKEN, "LAB_OTHER": "another-value-9d2b"}


# Takes the exec server's place for one call: starts, prints what /tmp/answer holds, and ends with exit code 0.
LIAR = f"""
import os, socket, struct
def frame(kind, data=b""):
    return struct.pack(">cI", kind, len(data)) + data
server = socket.socket(socket.AF_UNIX)
server.bind("{SOCKET}.new")
server.listen(9)
os.rename("{SOCKET}", "{SOCKET}.real.new")
os.rename("{SOCKET}.new", "{SOCKET}")
os.rename("{SOCKET}.real.new", "{SOCKET}.real")
call, _ = server.accept()
os.rename("{SOCKET}.real", "{SOCKET}")
call.recv(1 << 16)
answer = open("/tmp/answer", "rb").read()
pieces = [answer[begin : begin + 30000] for begin in range(0, len(answer), 30000)]
call.sendall(frame(b"s") + b"".join(frame(b"o", piece) for piece in pieces) + frame(b"x", b'{{"code": 0}}'))
while call.recv(1 << 16):
    pass
"""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes one worker of pytest-xdist run all tests that share the lab's environment, which are a story together."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("lab"))
            item.add_marker(pytest.mark.story)


@dataclass(frozen=True)
class Lab:
    """A running environment, with shortcuts for its machines. Keeps logins open, since each takes seconds."""

    session: Session
    environment: Environment
    logins: contextlib.ExitStack
    _open: dict[Role, Connection] = field(default_factory=dict)

    def run(self, script: str, role: Role = "primary", user: str = "root") -> Completed:
        """Runs a shell script in a machine."""
        return self._connection(role).run(["bash", "-c", script], user=user)

    def text(self, script: str, role: Role = "primary", user: str = "root") -> str:
        """Returns the output of a script that must succeed."""
        done = self.run(script, role, user)
        assert done.exit_code == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def lie(self, answer: bytes, role: Role = "primary") -> None:
        """Puts a program in the exec server's place that answers the next call so, whatever it asks for."""
        assert self._connection(role).run(["sh", "-c", "cat > /tmp/answer"], stdin=answer).exit_code == 0
        begin = ["sh", "-c", 'setsid python3 -c "$1" > /dev/null 2>&1 & until [ -e "$2.real" ]; do sleep 0.1; done']
        assert self._connection(role).run([*begin, "sh", LIAR, SOCKET]).exit_code == 0

    def _connection(self, role: Role) -> Connection:
        if role not in self._open:
            self._open[role] = self.logins.enter_context(connect(self.session, self.environment, role))
        return self._open[role]


def assert_from_templates(environment: Environment) -> None:
    """Whatever its machines' cards and kernel: one that could not use a template would boot, and say so."""
    assert environment.endpoints.keys() == environment.machines.keys()
    origins = {role: endpoint.origin for role, endpoint in environment.endpoints.items()}
    assert set(origins.values()) == {TEMPLATE}, origins


@contextlib.contextmanager
def environment_of(session: Session, family: str, task: str, allowed: tuple[Destination, ...] = ()) -> Iterator[Lab]:
    """Brings up an environment of one of the families here, from templates, and destroys it afterwards."""
    environment = lifecycle.up(session, load_family(FAMILIES / family), task, allowed)
    try:
        assert_from_templates(environment)
        with contextlib.ExitStack() as logins:
            yield Lab(session, environment, logins)
    finally:
        lifecycle.destroy(session, environment)
    until(lambda: not keepers(session.environments.directory(environment.id)))


@pytest.fixture(scope="session")
def lab_session(open_session: Callable[[Mapping[str, str]], Session]) -> Session:
    """Opens a session with the lab family's secrets."""
    return open_session(VARIABLES)


@pytest.fixture(scope="package")
def lab(lab_session: Session) -> Iterator[Lab]:
    """Brings up the lab's environment."""
    with environment_of(lab_session, "lab", "pair") as environment:
        yield environment


@pytest.fixture
def created(lab: Lab) -> Iterator[Environment]:
    """Creates machines like the lab's, without bringing up an environment in them."""
    identity = new_id("lab", None)
    changes = {"id": identity, "stack": identity, "status": "creating", "endpoints": {}}
    environment = claims.reserve(lab.session, lab.environment.model_copy(update=changes))
    record_environment(lab.session, environment)
    try:
        [environment] = create_machines(lab.session, [environment])
        assert_from_templates(environment)
        assert lab.session.cloud.alive(environment, "primary")
        yield environment
    finally:
        if lab.session.environments.directory(identity).exists():
            destroy_machines(lab.session, environment)
