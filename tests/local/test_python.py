"""Tests the two Pythons of a machine: the family's, and the one that runs our programs whatever the family does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.copying import transfer
from provisioner.environment import lifecycle
from provisioner.isolation.proof import prove_isolation
from provisioner.machines.connect import connect
from provisioner.session import Session
from tests.local.conftest import Lab, environment_of

pytestmark = [pytest.mark.vm, pytest.mark.xdist_group("python")]


@pytest.fixture(scope="module")
def machine(lab_session: Session) -> Iterator[Lab]:
    """Brings up a family that has removed Debian's Python and set traps for ours."""
    with environment_of(lab_session, "own_python", "main") as environment:
        yield environment


def test_a_familys_python_is_that_of_the_python_image(machine: Lab) -> None:
    found = json.loads(machine.text("cat /opt/python.json"))
    assert found["python"] == ["/usr/local/bin/python3", "/usr/local", "/usr/local", 3, 11]
    assert found["site-packages"] == "/usr/local/lib/python3.11/site-packages"
    assert not any("dist-packages" in path for path in found["path"])
    assert not found["marked"]
    assert found["programs"] == [
        f"/usr/local/bin/{name}" for name in ("python", "pip", "pip3", "pytest", "python3-config")
    ]
    assert found["debian"] == "/usr"


def test_pip_compiles_a_project_elsewhere(machine: Lab) -> None:
    script = "import extension, importlib.metadata as m; print(extension.__file__, m.version('py'))"
    where, version = machine.text(f'python -c "{script}"', user="agent").split()
    assert where.startswith("/usr/local/lib/python3.11/site-packages/")
    assert version == "1.0"


def test_a_virtual_environment_has_packages_of_its_own(machine: Lab) -> None:
    script = "env -u PYTHONHOME -u PYTHONPATH /opt/venv/bin/python -c 'import sys; print(sys.path[-1])'"
    assert machine.text(script) == "/opt/venv/lib/python3.11/site-packages"
    assert machine.text("python3 -m ensurepip --version").startswith("pip ")


def test_the_agent_may_run_it(machine: Lab) -> None:
    assert machine.text("cat /root/agent-python") == "Python 3.11.2"
    assert machine.text("python --version; python3 --version", user="agent").split() == ["Python", "3.11.2"] * 2
    assert machine.run("cat /usr/lib/provisioner/guest/helper.py", user="agent").exit_code != 0


def test_a_family_without_debians_python_is_scored(machine: Lab) -> None:
    _, outcome = lifecycle.score(machine.session, machine.environment, "0.5", readmit_agent=True)
    assert (outcome.kind, outcome.score) == ("scored", 0.5)


def test_our_programs_need_no_python_of_the_familys(machine: Lab, tmp_path: Path) -> None:
    machine.text("echo 'raise SystemExit(68)' > /usr/local/lib/python3.11/json/__init__.py")
    (tmp_path / "there").write_text("and back")
    with connect(machine.session, machine.environment, "primary") as connection:
        transfer.upload(connection, tmp_path / "there", "/home/agent/there", "agent")
        transfer.download(connection, "/home/agent/there", tmp_path / "back", "agent")
        assert (tmp_path / "back").read_text() == "and back"
        prove_isolation(machine.session, machine.environment, {"primary": connection})


def test_a_machine_without_any_python_says_so(machine: Lab) -> None:
    machine.text("rm /usr/local/bin/python3")
    _, outcome = lifecycle.score(machine.session, machine.environment, "1", readmit_agent=True)
    assert outcome.failed
    assert "no `python3`" in (outcome.message or "")
