"""Tests a running environment from inside its two real machines."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from provisioner.base.errors import TaskError
from provisioner.base.models import Environment
from provisioner.environment import lifecycle, operations
from provisioner.family.loader import load_family
from provisioner.images import build
from provisioner.machines.connect import connect
from provisioner.machines.destroy import destroy_machines
from tests.local.conftest import FAMILIES, TOKEN, VARIABLES, Lab

pytestmark = pytest.mark.vm
SSH_WITH_TASKS_KEY = "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o BatchMode=yes -i ~/.ssh/aux"


def test_build_steps_ran_as_root_with_the_variables(lab: Lab) -> None:
    assert lab.text("cat /opt/built-by") == "root"
    assert lab.text("stat -c '%U %a' /root/lab_assets.py") == "root 644"


def test_install_got_every_variable_and_left_no_value(lab: Lab) -> None:
    assert json.loads(lab.text("cat /opt/install-names.json")) == sorted(VARIABLES)
    disk = lab.session.images.disk(lab.environment.machines["primary"].image)
    assert TOKEN.encode() not in disk.read_bytes()


def test_start_got_the_required_variables_and_no_others(lab: Lab) -> None:
    received = json.loads(lab.text("cat /root/start.json"))
    assert set(received) == {"LAB_TOKEN", "VM_SSH_USERNAME", "VM_SSH_PRIVATE_KEY", "VM_IP_ADDRESS"}
    assert received["LAB_TOKEN"] == TOKEN
    assert received["VM_SSH_USERNAME"] == "admin"
    assert received["VM_SSH_PRIVATE_KEY"].startswith("-----BEGIN RSA PRIVATE KEY-----\n")


def test_what_start_left_in_the_background_lives(lab: Lab) -> None:
    assert lab.text("pgrep -f 'sleep 86400'")


def test_both_machines_started_from_a_template(lab: Lab) -> None:
    assert {role: endpoint.origin for role, endpoint in lab.environment.endpoints.items()} == {
        "primary": "template", "aux": "template",
    }  # fmt: skip


def test_the_instructions_are_placed_as_they_are(lab: Lab) -> None:
    assert lab.text("stat -c '%U' /home/agent/instructions.txt") == "agent"
    assert lab.text("cat /home/agent/instructions.txt", user="agent") == (
        "Hello ${HOME} %{if} {{ 7 * 7 }} `id` ' \" end"
    )


def test_the_agent_owns_its_home_and_its_key_is_private(lab: Lab) -> None:
    assert lab.text("stat -c '%U %a' /home/agent/.ssh/aux /home/agent/.hidden").splitlines() == [
        "agent 600",
        "agent 644",
    ]


def test_the_agent_is_not_root_and_cannot_become_it(lab: Lab) -> None:
    assert lab.text("id -u", user="agent") == "1000"
    assert lab.run("sudo -n true", user="agent").exit_code != 0
    assert lab.run("su -c true root < /dev/null", user="agent").exit_code != 0


@pytest.mark.parametrize(
    "path",
    ["/root", "/root/lab.py", "/protected", "/usr/lib/provisioner/guest/helper.py", "/run/provisioner",
     "/etc/ssh/ssh_host_ed25519_key", "/run/provisioner-credentials", "/etc/shadow",
     "/dev/vda", "/proc/1/environ"],
)  # fmt: skip
def test_the_agent_cannot_read(lab: Lab, path: str) -> None:
    assert lab.run(f"if [ -d {path} ]; then ls {path}; else head -c1 {path}; fi", user="agent").exit_code != 0


def test_no_secret_is_where_the_agent_can_look(lab: Lab) -> None:
    # A pattern that does not match the processes that search for it.
    pattern = f"{TOKEN[:10]}[{TOKEN[10]}]"
    leaks = lab.run(f"grep -als '{pattern}' /proc/[0-9]*/environ /proc/[0-9]*/cmdline", user="agent")
    assert leaks.stdout == b""
    seen = lab.text("env", user="agent")
    assert "LAB_" not in seen
    assert "VM_" not in seen
    assert lab.run(f"grep -rs --exclude-dir=proc {TOKEN} /home /tmp /var/tmp /etc /opt", user="agent").exit_code != 0


def test_the_controllers_key_lies_in_no_machine(lab: Lab) -> None:
    key = lab.session.environments.key(lab.environment.id, "controller").private.splitlines()[2]
    for role in ("primary", "aux"):
        search = f"grep -rlsF -e '{key}' /root /home /etc /run /var /tmp /opt /usr/lib/provisioner"
        assert lab.run(search, role).stdout == b""


def test_the_tasks_key_opens_the_aux_vm(lab: Lab) -> None:
    aux = lab.environment.endpoints["aux"].private_address
    assert lab.text(f"{SSH_WITH_TASKS_KEY} admin@{aux} sudo id -u", user="agent") == "0"


@pytest.mark.campaign
def test_the_tasks_key_opens_nothing_else(lab: Lab) -> None:
    aux = lab.environment.endpoints["aux"].private_address
    assert lab.run(f"{SSH_WITH_TASKS_KEY} admin@{aux} true", user="agent").exit_code == 0
    for login in ("root@127.0.0.1", "agent@127.0.0.1", f"root@{aux}"):
        assert lab.run(f"{SSH_WITH_TASKS_KEY} {login} true", user="agent").exit_code != 0


def test_the_aux_vm_has_what_its_build_steps_made(lab: Lab) -> None:
    assert lab.text("cat ~/notes/note.txt ~/where.txt", "aux", "admin").splitlines() == ["a note", "/home/admin"]
    assert lab.text("stat -c %U /built-as-root", "aux", "admin") == "root"


@pytest.mark.campaign
def test_an_aux_vms_user_agent_has_none_of_the_agents_limits(lab: Lab) -> None:
    keys = "install -D -m 644 /etc/ssh/authorized_keys.d/admin /home/agent/.ssh/authorized_keys"
    lab.text(f"useradd --create-home --shell /bin/bash agent && {keys}", "aux")
    aux = lab.environment.endpoints["aux"].private_address
    cgroups = [
        lab.text(f"{SSH_WITH_TASKS_KEY} agent@{aux} cat /proc/self/cgroup", user="agent"),
        lab.text("cat /proc/self/cgroup", "aux", "agent"),
    ]
    assert [cgroup for cgroup in cgroups if "::/agent/" in cgroup] == []
    assert lab.run("test -e /sys/fs/cgroup/agent", "aux").exit_code == 1
    assert "::/agent/" in lab.text("cat /proc/self/cgroup", user="agent")


# Listens on all ports, then answers once on each by TCP and by UDP.
LISTENER = """
import socket, sys
socket.setdefaulttimeout(300)
streams = [socket.create_server(("", port)) for port in map(int, sys.argv[1:])]
datagrams = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in streams]
for stream, datagram in zip(streams, datagrams):
    datagram.bind(stream.getsockname())
print("listening", flush=True)
for stream, datagram in zip(streams, datagrams):
    stream.accept()[0].sendall(b"tcp")
    data, sender = datagram.recvfrom(9)
    datagram.sendto(data, sender)
"""
TALKER = """
import socket, sys
socket.setdefaulttimeout(300)
for port in map(int, sys.argv[2:]):
    stream = socket.create_connection((sys.argv[1], port))
    print(stream.recv(9).decode())
    datagram = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagram.sendto(b"udp", (sys.argv[1], port))
    print(datagram.recv(9).decode())
"""


@pytest.mark.parametrize(
    ("source", "target"), [("primary", "aux"), pytest.param("aux", "primary", marks=pytest.mark.campaign)]
)
def test_the_machines_reach_each_other_on_any_port(lab: Lab, source: str, target: str) -> None:
    ports = "23 8443 61234"
    # `read` ends once all ports are listened on.
    lab.run(
        f"mkfifo /tmp/said && (setsid python3 -c {shlex.quote(LISTENER)} {ports} < /dev/null > /tmp/said 2>&1 &)"
        " && read -r said < /tmp/said && rm /tmp/said",
        target,
    )
    address = lab.environment.endpoints[target].private_address
    talk = f"python3 -c {shlex.quote(TALKER)} {address} {ports}"
    assert lab.text(talk, source).split() == ["tcp", "udp"] * 3


def test_the_familys_own_tests_run_with_all_variables(lab: Lab) -> None:
    with connect(lab.session, lab.environment, "primary") as connection:
        driver = operations.driver(lab.session, lab.environment, connection)
        assert operations.run_tests(lab.session, lab.environment, driver, ["-q"]) == 0
    log = (lab.session.environments.logs(lab.environment.id) / "pytest.log").read_text()
    assert re.search(r"2 passed, 1 skipped", log)


@pytest.mark.parametrize(
    ("submission", "kind", "score"),
    [
        ("0.5", "scored", 0.5),
        ("null", "manual_scoring_required", None),
        ("not json", "exception", None),
        pytest.param("-3", "scored", -3.0, marks=pytest.mark.campaign),
        pytest.param("NaN", "nan", None, marks=pytest.mark.campaign),
        pytest.param("true", "not_a_number", None, marks=pytest.mark.campaign),
        pytest.param('"1"', "not_a_number", None, marks=pytest.mark.campaign),
    ],
)
def test_scores_are_told_apart(lab: Lab, submission: str, kind: str, score: float | None) -> None:
    _, outcome = lifecycle.score(lab.session, lab.environment, submission, readmit_agent=True)
    assert (outcome.kind, outcome.score) == (kind, score)


def test_a_given_submission_is_scored_after_a_reboot_too(lab: Lab) -> None:
    lab.text("rm -rf /run/provisioner")  # what of it a reboot ends
    assert lifecycle.score(lab.session, lab.environment, "0.75", readmit_agent=True)[1].score == 0.75


def test_the_submission_file_is_scored_and_no_link_followed(lab: Lab) -> None:
    lab.text("printf ' 0.25\n' > /home/agent/submission.txt", user="agent")
    assert lifecycle.score(lab.session, lab.environment, readmit_agent=True)[1].score == 0.25
    lab.text("echo 1 > /root/one; ln -sf /root/one /home/agent/submission.txt")
    with pytest.raises(TaskError, match="submission"):
        lifecycle.score(lab.session, lab.environment, readmit_agent=True)
    lab.text("rm /home/agent/submission.txt")


def test_no_secret_reaches_a_record_or_a_log(lab: Lab) -> None:
    directory = lab.session.environments.directory(lab.environment.id)
    texts = [path.read_bytes() for path in [directory / "environment.json", *directory.glob("logs/*")]]
    assert not any(value.encode() in text for value in VARIABLES.values() for text in texts)


@pytest.mark.campaign
def test_a_second_environment_builds_nothing(lab: Lab) -> None:
    def images_of_lab() -> list[str]:
        return [image.name for image in lab.session.images.all() if image.family in ("lab", None)]

    before = images_of_lab()
    family = load_family(FAMILIES / "lab")
    name, _ = build.family_image(lab.session, family)
    assert name == lab.environment.machines["primary"].image
    other = lifecycle.up(lab.session, family, "pair")
    try:
        assert images_of_lab() == before
        assert other.machines == lab.environment.machines
        neighbour = other.endpoints["aux"].private_address
        assert neighbour != lab.environment.endpoints["aux"].private_address
        assert lab.run(f"timeout 3 bash -c '</dev/tcp/{neighbour}/22'").exit_code != 0
    finally:
        lifecycle.destroy(lab.session, other)
    archived = lab.session.environments.logs(other.id) / "teardown.log"
    assert (
        "torn down with ['LAB_TOKEN', 'VM_IP_ADDRESS', 'VM_SSH_PRIVATE_KEY', 'VM_SSH_USERNAME']" in archived.read_text()
    )


def test_machines_go_even_when_terraform_has_gone(
    lab: Lab, created: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVISIONER_TERRAFORM", "no-such-terraform")
    destroy_machines(lab.session, created)
    assert lab.session.cloud.remaining(created) == []
    assert not (lab.session.home.stacks / created.stack).exists()
