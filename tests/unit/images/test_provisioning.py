"""Tests filling a builder: files, build steps, install(), setup data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from provisioner.base.errors import ImageBuildError, TaskError, TaskFamilyError
from provisioner.base.models import BaseImage, Endpoint, FileBuildStep, SetupData
from provisioner.driver.task_driver import TaskDriver
from provisioner.environment import operations
from provisioner.environment.outcomes import LOGS_OF_PHASES
from provisioner.family.loader import TaskFamily
from provisioner.images import provisioning
from provisioner.images.provisioning import (
    Account,
    install,
    preparation_digest,
    prepare_base,
    read_setup,
    run_steps,
    send_other_files,
)
from provisioner.machines.connect import connect
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.ssh.keys import Login, ed25519_key_pair
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import Fails, Guest
from tests.unit.fakes.sshd import Sshd
from tests.unit.fakes.world import environment, family, told_of, up

COMMANDS = ["apt-get update", "apt-get install -y jq"]
STEPS = [
    {"type": "shell", "commands": COMMANDS},
    {"type": "file", "source": "data", "destination": "data"},
    {"type": "file", "source": "assets", "destination": "/assets"},
]


def fill(session: Session, fam: TaskFamily, machine: tuple[TaskDriver, Connection]) -> SetupData:
    """Fills a builder as a whole."""
    run_steps(session, fam, fam.build_steps, *machine, provisioning.ROOT)
    install(session, fam, *machine, lambda: None)
    send_other_files(fam, machine[1], lambda: None)
    return read_setup(session, machine[0])


@pytest.fixture
def machine(session: Session) -> Iterator[tuple[TaskDriver, Connection]]:
    env = up(session, environment(kind="builder"))
    with connect(session, env, "primary") as connection:
        yield operations.driver(session, env, connection), connection


@pytest.fixture
def guest(machine: object, cloud: FakeCloud) -> Guest:
    return cloud.guest()


def test_a_family_is_installed_and_its_setup_data_read(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest, tmp_path: Path
) -> None:
    fam = family(tmp_path, **{"build_steps.json": json.dumps(STEPS[:2]), "data": "1"})
    setup = fill(session, fam, machine)
    assert list(setup.tasks) == ["main"]
    assert guest.operations == ["shell", "install", "setup"]
    assert guest.trees == {"/root": {"fam.py", "build_steps.json", "data"}}
    assert guest.files == {"/root/data": b"1"}
    step = guest.request("shell")
    assert (step["commands"], step["cwd"], step["user"]) == (COMMANDS, "/root", None)
    assert step["shell"] == ["bash", "-euo", "pipefail"]
    assert step["environment"] == guest.request("install")["environment"] == {"TOKEN": "s3cret-value"}
    assert told_of(session).notes == [
        "fam: build step 1 (shell)",
        "fam: build step 2 (file)",
        "fam: import and install()",
    ]


def test_a_shell_step_has_what_its_text_names_of_the_family_and_nothing_else(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest, tmp_path: Path
) -> None:
    given = [{"type": "shell", "commands": [text]} for text in ("true", "cp /root/assets/x /opt", "sh setup.sh")]
    files = {"build_steps.json": json.dumps(given), "setup.sh": "", "notes.txt": ""}
    (tmp_path / "fam" / "assets").mkdir(parents=True)
    fam = family(tmp_path, **files, **{"assets/x": "1"})
    there: list[set[str]] = []
    guest.during["shell"] = lambda: there.append(guest.trees.get("/root", set()))
    run_steps(session, fam, fam.build_steps, *machine, provisioning.ROOT)
    assert there == [set(), {"assets/x"}, {"setup.sh"}]


def test_the_contents_of_a_build_steps_directory_are_copied(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest, tmp_path: Path
) -> None:
    (tmp_path / "fam" / "assets" / "deep").mkdir(parents=True)
    (tmp_path / "fam" / "assets" / "deep" / "file").write_text("1")
    fam = family(tmp_path, **{"build_steps.json": json.dumps(STEPS[2:])})
    fill(session, fam, machine)
    assert guest.trees["/assets"] == {"deep/file"}


@pytest.mark.parametrize(
    ("destination", "file"),
    [
        ("dir/", "dir/a b.txt"),
        ("deep/dir/", "deep/dir/a b.txt"),
        ("dir/.", "dir/a b.txt"),
        ("there", "there/a b.txt"),
        ("there/", "there/a b.txt"),
        ("dir/file", "dir/file"),
        ("it's $HOME/", "it's $HOME/a b.txt"),
    ],
    ids=["slash", "deep", "dot", "directory", "directory-slash", "file", "quoted"],
)
@pytest.mark.parametrize("absolute", [False, True], ids=["relative", "absolute"])
def test_a_file_keeps_its_name_in_a_destination_directory(
    session: Session, machine: tuple[TaskDriver, Connection], tmp_path: Path, destination: str, file: str,
    absolute: bool,
) -> None:  # fmt: skip
    home = tmp_path / "root"
    (home / "there").mkdir(parents=True)
    fam = family(tmp_path, **{"a b.txt": "1"})
    step = FileBuildStep(
        type="file", source="a b.txt", destination=f"{home}/{destination}" if absolute else destination
    )
    account = Account(interpreter=("sh",), home=PurePosixPath(home), user=None)
    key = tmp_path / "key"
    pair = ed25519_key_pair()
    key.write_text(pair.private)
    with Sshd() as server:
        login = Login(Endpoint(host="127.0.0.1", port=server.port), "root", key, server.host_key)
        with Connection(login) as connection:
            run_steps(session, fam, (step,), machine[0], connection, account)
    assert [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()] == [file]
    assert (home / file).read_text() == "1"


@pytest.mark.parametrize(
    ("operation", "says"),
    [("shell", r"fam: build step 1 \(shell\) raised"), ("install", r"fam: importing the family or install\(\) raised")],
    ids=["step", "install"],
)
def test_a_failed_build_names_its_step_and_stops_there(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest, tmp_path: Path, operation: str, says: str
) -> None:
    fam = family(tmp_path, **{"build_steps.json": json.dumps(STEPS[:2]), "data": "1"})
    guest.values[operation] = Fails("no network")
    guest.says[operation] = "E: no s3cret-value\n"
    with pytest.raises(ImageBuildError, match=says) as caught:
        fill(session, fam, machine)
    assert caught.value.details == "E: no [redacted:TOKEN]"
    assert guest.operations[-1] == operation
    assert LOGS_OF_PHASES[caught.value.phase] == (operation,)


@pytest.mark.parametrize("manifest", ["tasks: {}", "install_inputs: []\ntasks: {}"], ids=["whole", "split"])
def test_a_build_that_lacks_a_module_names_the_step_to_add(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest, tmp_path: Path, manifest: str
) -> None:
    guest.values["install"] = Fails("No module named 'pydantic'", "ModuleNotFoundError")
    with pytest.raises(ImageBuildError, match="raised ModuleNotFoundError: No module named 'pydantic'") as caught:
        fill(session, family(tmp_path, **{"manifest.yaml": manifest}), machine)
    assert '{"type": "shell", "commands": ["pip install <PACKAGE>"]}' in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("value", "error"),
    [({"tasks": []}, TaskFamilyError), ("text", TaskFamilyError), (Fails(), TaskError)],
    ids=["list", "text", "exception"],
)
def test_setup_data_is_untrusted_and_checked(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest, value: object, error: type[Exception]
) -> None:
    guest.values["setup"] = value
    with pytest.raises(error):
        read_setup(session, machine[0])


@pytest.mark.parametrize("role", ["primary", "aux"])
def test_a_base_image_gets_provisioners_files_and_packages(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest, tmp_path: Path, role: str
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificate")
    base = BaseImage.model_validate({"role": role})
    prepare_base(replace(session, ca_bundle=bundle), base, machine[1])
    ours, guests = guest.trees[provisioning.PREPARATION], guest.trees[f"{provisioning.PREPARATION}/guest"]
    assert {"prepare.sh", "users.sh", "rootfs/etc/ssh/sshd_config.d/provisioner.conf"} <= ours
    assert not any(name.startswith("local/") for name in ours)
    assert {"helper.py", "agent.py"} <= guests
    assert guest.files == {f"{provisioning.PREPARATION}/ca.pem": b"certificate"}
    assert "".join(told_of(session).texts) == "Unpacking curl\n"


def test_the_error_for_a_failed_package_shows_the_output(
    session: Session, machine: tuple[TaskDriver, Connection], guest: Guest
) -> None:
    guest.package_exit_code = 100
    with pytest.raises(ImageBuildError, match="preparing the base image failed with exit code 100") as caught:
        prepare_base(session, BaseImage(role="aux"), machine[1])
    assert (caught.value.details or "").endswith("E: no curl")


def test_the_preparation_digest_depends_on_machine_and_ca(session: Session, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificate")
    with_bundle = replace(session, ca_bundle=bundle)
    bases = [BaseImage(role="primary"), BaseImage(role="aux"), BaseImage(role="aux", architecture="arm64")]
    names = {preparation_digest(each, base) for base in bases for each in (session, with_bundle)}
    assert len(names) == 6
    assert preparation_digest(session, bases[0]) in names
    bundle.write_text("another")
    assert preparation_digest(with_bundle, bases[0]) not in names
