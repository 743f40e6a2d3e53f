"""A stranger's compose file has Compose read what it names. None of it may be a file or a secret of the operator's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from provisioner.base.errors import UsageError
from provisioner.inspect import compose
from provisioner.inspect.compose import read
from provisioner.inspect.compose_project import translated
from tests import homes

SECRET = "sk-of-the-operator"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package's directory, beside a file and a variable of the operator's."""
    monkeypatch.setattr(compose, "program", lambda _home: homes.compose())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OPERATORS_KEY", SECRET)
    (tmp_path / "credentials").write_text(f"KEY={SECRET}\n")
    (tmp_path / "more.yaml").write_text(f"services: {{web: {{image: x, environment: {{KEY: {SECRET}}}}}}}")
    package = tmp_path / "package"
    package.mkdir()
    (package / "link").symlink_to(tmp_path / "credentials")
    (package / "environ").symlink_to("/proc/self/environ")
    (package / "extended.yaml").write_text("services: {a: {image: x, env_file: '${SAMPLE_METADATA_X}'}}")
    return package


def _run(package: Path, text: str, given: str = "") -> str:
    (package / "compose.yaml").write_text(text)
    return translated(read(str(package / "compose.yaml")), {"X": given} if given else {}).run


ENV = "services: {web: {image: x, env_file: %s}}"


@pytest.mark.parametrize(
    "text",
    [
        ENV % "HOME/credentials",
        ENV % "'${HOME}/credentials'",
        ENV % "'~/credentials'",
        ENV % "[{path: HOME/credentials, required: false}]",
        ENV % "link",
        ENV % "environ",
        ENV % "/proc/self/environ",
        ENV % "../../../../../../../../../../proc/self/environ",
        ENV % "'${SAMPLE_METADATA_X}'",
        ENV % "'${FROM_ENV}'",
        "services: {web: {image: x, label_file: '${SAMPLE_METADATA_X}'}}",
        "services: {web: {image: x, label_file: link}}",
        "services: {web: {extends: {file: extended.yaml, service: a}}}",
        "include: [extended.yaml]\nservices: {web: {image: x}}",
        "include: [{path: extended.yaml, env_file: HOME/credentials}]",
        "include: [{path: compose.yaml, project_directory: HOME}]",
        "include: ['${SAMPLE_METADATA_X}']",
        "include: [HOME/more.yaml]",
        "x-a: &a {env_file: HOME/credentials}\nservices: {web: {<<: *a, image: x}}",
    ],
)
def test_compose_reads_no_file_of_the_operator(package: Path, text: str) -> None:
    (package / ".env").write_text(f"FROM_ENV={package.parent}/credentials\n")
    for given in (str(package.parent / "credentials"), "../credentials"):
        with pytest.raises(UsageError) as raised:
            _run(package, text.replace("HOME/", f"{package.parent}/").replace("HOME}", f"{package.parent}}}"), given)
        assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "services: {web: {image: x, volumes: ['./link:/x']}}",
        "services: {web: {image: x, volumes: ['./above/credentials:/x']}}",
        "services: {web: {image: x, secrets: [s]}}\nsecrets: {s: {file: link}}",
        "services: {web: {image: x, configs: [s]}}\nconfigs: {s: {file: above/credentials}}",
        "services: {web: {build: above}}",
        "services: {web: {build: {context: app, dockerfile: ../link}}}",
        "services: {web: {build: {context: ., additional_contexts: {a: above}}}}",
        "services: {web: {image: x, volumes: ['./$SAMPLE_METADATA_X:/x']}}",
    ],
)
def test_no_link_brings_a_file_of_the_operator_into_a_machine(package: Path, text: str) -> None:
    (package / "above").symlink_to("..")
    (package / "Dockerfile").write_text("FROM debian:12\n")
    (package / "app").mkdir()
    (package.parent / "Dockerfile").write_text("FROM debian:12\n")
    with pytest.raises(UsageError, match="link that leads out of the file's directory"):
        _run(package, text, "link")


def test_links_within_the_package_are_followed(package: Path) -> None:
    (package / "data").mkdir()
    (package / "current").symlink_to("data")
    (package.parent / "elsewhere").symlink_to(package)
    for directory in (package, package.parent / "elsewhere"):
        assert _run(directory, "services: {web: {image: x, volumes: ['./current:/x', '../more.yaml:/y']}}")


def test_the_eval_s_own_env_is_no_link_to_another(package: Path) -> None:
    (package / ".env").symlink_to(package.parent / "credentials")
    with pytest.raises(UsageError, match="is a link that leads out of"):
        _run(package, "services: {web: {image: x, environment: [KEY]}}")


def test_a_file_of_variables_takes_none_of_this_computer(package: Path) -> None:
    (package / "own.env").write_text("OPERATORS_KEY\nCOPY=$OPERATORS_KEY\n")
    assert SECRET not in _run(package, ENV % "own.env")


def test_files_that_never_end_keep_nothing_waiting(package: Path) -> None:
    os.mkfifo(package / "fifo")
    with pytest.raises(UsageError, match="fifo is neither a file nor a directory"):
        _run(package, ENV % "fifo")
    os.mkfifo(package / ".env")
    with pytest.raises(UsageError, match="env is neither a file nor a directory"):
        _run(package, "services: {web: {image: x}}")


def test_files_of_the_package_are_read(package: Path) -> None:
    (package / "own.env").write_text("A=1\n")
    (package / "alias.env").symlink_to("own.env")
    assert '"A": "1"' in _run(package, ENV % "alias.env")
