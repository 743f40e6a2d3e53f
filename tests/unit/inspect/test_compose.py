"""Tests what is read of an eval's compose file, and how its variables are replaced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from inspect_ai.util import ComposeConfig

from provisioner.errors import UsageError
from provisioner.inspect.compose import is_compose, read
from provisioner.inspect.compose_project import translated
from provisioner.inspect.configuration import Configuration, configuration_of
from provisioner.inspect.engine import project_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$SET/${SET}", "here/here"),
        ("${MISSING-a b}", "a b"),
        ("${EMPTY-a}", ""),
        ("${EMPTY:-a}", "a"),
        ("${SET:+yes}${MISSING+no}", "yes"),
        ("$$SET", "$$SET"),
        ("level ${SAMPLE_METADATA_LEVEL}", "level 3"),
        ("${SAMPLE_METADATA_OTHER:-none}", "none"),
        ("${MISSING:-${SAMPLE_METADATA_LEVEL}}", "3"),
        ("${SAMPLE_METADATA_PRICE}", "5$$"),
    ],
)
def test_variables_come_from_file_process_and_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setenv("SET", "here")
    (tmp_path / ".env").write_text("EMPTY=\nSET=file\n")
    document = {"services": {"web": {"image": "x", "command": [text]}}}
    (tmp_path / "compose.yaml").write_text(json.dumps(document))
    project = translated(read(str(tmp_path / "compose.yaml")), {"LEVEL": "3", "PRICE": "5$"})
    assert json.loads(project.run)["services"]["web"]["command"] == [expected]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${EMPTY:?is not set}", "required variable EMPTY is missing a value: is not set"),
        ("${SAMPLE_METADATA_MY_FLAG}", "needs the sample's metadata 'my_flag', which it lacks"),
        ("costs ${", "invalid interpolation format"),
    ],
    ids=["required", "metadata", "dollar"],
)
def test_a_variable_that_cannot_be_replaced_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "compose.yaml").write_text(json.dumps({"services": {"web": {"image": "x", "command": [text]}}}))
    with pytest.raises(UsageError, match=re.escape(said)):
        translated(read(str(tmp_path / "compose.yaml")), {})


def test_metadata_of_a_file_is_known_before_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("services: {web: {image: 'x:${SAMPLE_METADATA_TAG:-1}', command: [$SAMPLE_METADATA_FLAG]}}")
    assert read(str(path)).metadata_names == {"TAG", "FLAG"}


def test_a_dockerfile_alone_is_inspects_default_service(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12")
    file = read(str(tmp_path / "Dockerfile"))
    assert file.document["services"]["default"]["build"] == {"context": str(tmp_path), "dockerfile": "Dockerfile"}
    assert file.document["services"]["default"]["network_mode"] == "none"
    assert file.directory == tmp_path


def test_a_dockerfile_alone_has_a_network_where_the_machine_has_internet(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12")
    for settings, mode in (({}, "none"), ({"internet": "full"}, None), ({"allow": ("10.0.0.1:80",)}, None)):
        configuration = Configuration.model_validate({"compose": str(tmp_path / "Dockerfile"), **settings})
        project = project_of(configuration, {})
        assert project
        assert json.loads(project.run)["services"]["default"].get("network_mode") == mode


def test_a_model_of_inspects_survives_its_log(tmp_path: Path) -> None:
    model = ComposeConfig.model_validate({"services": {"a": {"image": "x"}, "b": {"image": "y", "x-default": True}}})
    logged = ComposeConfig.model_validate(model.model_dump(exclude_none=True))
    for given in (model, logged, Configuration(compose=model), Configuration(compose=logged)):
        project = project_of(configuration_of(given), {})
        assert project
        assert project.services == ("b", "a")


def test_a_model_of_inspects_has_the_paths_of_the_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ComposeConfig.model_validate({"services": {"a": {"image": "x", "x-default": True, "x-local": True}}})
    file = read(model)
    assert file.document["services"]["a"] == {"image": "x", "x-default": True, "x-local": True}
    assert file.directory == tmp_path


@pytest.mark.parametrize("text", ["services: {}", "services: [a]", "- a", "machines: []"])
def test_a_file_without_services_is_no_compose_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "compose.yaml").write_text(text)
    with pytest.raises(UsageError, match="is no compose file"):
        read(str(tmp_path / "compose.yaml"))


def test_aliases_that_stand_for_very_much_are_refused(tmp_path: Path) -> None:
    levels = "\n".join(f"  - &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 7))
    (tmp_path / "compose.yaml").write_text(f"services: {{a: {{image: x}}}}\nx-a:\n  - &a0 [x]\n{levels}")
    with pytest.raises(UsageError, match="says more than 100000 values"):
        read(str(tmp_path / "compose.yaml"))


@pytest.mark.parametrize("name", ["compose.yaml", "web-compose.yaml", "Dockerfile", "x.Dockerfile"])
def test_compose_files_are_known_by_their_names(name: str) -> None:
    assert is_compose(f"/somewhere/{name}")
    assert not is_compose("/somewhere/provisioner.yaml")
