"""Tests what changes which layer of a family's images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from provisioner.family.loader import TaskFamily, load_family
from provisioner.family.setup_data import parse_vm_spec
from provisioner.images.layers import (
    aux_image_name,
    aux_layer_names,
    changes,
    family_image_name,
    inputs,
    layer_names,
)
from provisioner.models import VMSpec
from provisioner.store.images import Inputs
from tests.unit.fakes.world import family

MODULE = """
class TaskFamily:
    @staticmethod
    def get_tasks():
        return {"main": {}}

    @staticmethod
    def install():
        print("installing")

    @staticmethod
    def score(t, submission):
        return 1.0
"""
STEPS = [
    {"type": "shell", "commands": ["true"]},
    {"type": "file", "source": "data", "destination": "/data"},
    {"type": "shell", "commands": ["false"]},
]
FILES = {
    "fam.py": MODULE, "data": "1", "requirements.txt": "jq", "notes.txt": "", "build_steps.json": json.dumps(STEPS),
    "manifest.yaml": "tasks: {}\ninstall_inputs: [requirements.txt]\n",
}  # fmt: skip


def fam(directory: Path, **changed: str) -> TaskFamily:
    return family(directory, **FILES | changed)


def keys(family: TaskFamily, base: str = "base-1", token: str = "1") -> dict[str, str]:
    variables = {"TOKEN": token}
    names = ("step 1", "step 2", "step 3", "install")
    layers = dict(zip(names, layer_names(family, base, variables), strict=True))
    return {**layers, "family": family_image_name(family, base, variables)}


ALL = {"step 1", "step 2", "step 3", "install", "family"}


def edited(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("change", "concerns"),
    [
        ({"fam.py": edited(MODULE, "return 1.0", "return 0.5")}, {"install", "family"}),
        ({"notes.txt": "new"}, {"family"}),
        ({"requirements.txt": "curl"}, {"install", "family"}),
        ({"data": "2"}, ALL - {"step 1"}),
        (
            {"build_steps.json": edited(FILES["build_steps.json"], "false", "exit 1")},
            ALL - {"step 1", "step 2"},
        ),
        ({"build_steps.json": edited(FILES["build_steps.json"], "true", "exit 0")}, ALL),
        ({"manifest.yaml": f"{FILES['manifest.yaml']}# a comment\n"}, {"family"}),
        ({"manifest.yaml": edited(FILES["manifest.yaml"], "{}", "{main: {resources: {storage_gb: 20}}}")}, ALL),
    ],
    ids=["module", "unseen file", "seen file", "copied file", "last step", "first step",
         "manifest's text", "disk"],
)  # fmt: skip
def test_a_change_concerns_the_layers_above_it(tmp_path: Path, change: dict[str, str], concerns: set[str]) -> None:
    before, after = keys(fam(tmp_path)), keys(fam(tmp_path, **change))
    assert {name for name in ALL if before[name] != after[name]} == concerns


@pytest.mark.parametrize("source", ["link", "links", "links/data"])
def test_what_a_step_copies_through_a_link_counts(tmp_path: Path, source: str) -> None:
    directory = fam(tmp_path).directory
    (directory / "real").mkdir()
    (directory / "link").symlink_to("real/data")
    (directory / "links").symlink_to("real")
    (directory / "real" / "data").write_text("1")
    steps = {"build_steps.json": json.dumps([{"type": "file", "source": source, "destination": "/data"}])}
    steps["manifest.yaml"] = "tasks: {}\n"
    [before] = layer_names(fam(tmp_path, **steps), "base-1", {})
    (directory / "real" / "data").write_text("2")
    [changed] = layer_names(fam(tmp_path, **steps), "base-1", {})
    (directory / "real" / "data").chmod(0o755)
    [executable] = layer_names(fam(tmp_path, **steps), "base-1", {})
    assert len({before, changed, executable}) == 3


@pytest.mark.parametrize(
    "command",
    ["cp /root/data /opt", "cp ~/data /opt", "cp ~root/data /opt", 'cp "$HOME/data" /opt', 'cp "${HOME}"/data /opt',
     "cp -r /root/./data/. /opt", "cp data /opt", "./data --all", "cat<data", "pip install --find-links=data x",
     "gcc -I/root/data x.c", "curl -F f=@data x", "cp /root/{data,x} /opt", "pip install file:///root/data/x.whl",
     "(cd /root/data; make)", "make\ndata", "pip install $PWD/data"],
)  # fmt: skip
def test_what_a_steps_text_names_of_the_family_counts(tmp_path: Path, command: str) -> None:
    step = {"build_steps.json": json.dumps([{"type": "shell", "commands": [command]}])}
    before = layer_names(fam(tmp_path, **step), "base-1", {})
    assert layer_names(fam(tmp_path, **step, data="2"), "base-1", {}) != before
    assert layer_names(fam(tmp_path, **step, **{"notes.txt": "2"}), "base-1", {}) == layer_names(
        fam(tmp_path, **step), "base-1", {}
    )


@pytest.mark.parametrize(
    "command",
    ["ls /data", "ls /opt/root/data", "ls x/data", "mydata", "data.txt", "data-x", "$data", "cp -r /root/* x"],
)
def test_what_a_steps_text_does_not_name_counts_for_nothing(tmp_path: Path, command: str) -> None:
    step = {"build_steps.json": json.dumps([{"type": "shell", "commands": [command]}])}
    before = layer_names(fam(tmp_path, **step), "base-1", {})
    assert layer_names(fam(tmp_path, **step, data="2"), "base-1", {}) == before


def test_a_name_with_spaces_and_what_a_link_leads_to_count(tmp_path: Path) -> None:
    commands = (['cp "/root/my file" link/x /opt'], ["ls data"])
    given = [{"type": "shell", "commands": each} for each in commands]
    some = fam(tmp_path, **{"build_steps.json": json.dumps(given), "my file": "1"})
    (some.directory / "link").symlink_to("other/inner")
    (some.directory / "other").mkdir()
    (some.directory / "other" / "inner").symlink_to("../data")
    first, second = load_family(some.directory).build_steps
    assert load_family(some.directory).files_of(first) == ("data", "link", "my file", "other/inner")
    assert load_family(some.directory).files_of(second) == ()  # the first step has had it


def test_an_aux_vms_steps_read_nothing_of_the_family(tmp_path: Path) -> None:
    before = aux_layer_names(fam(tmp_path), "base", spec("cat data"))
    assert aux_layer_names(fam(tmp_path, data="2"), "base", spec("cat data")) == before


def test_base_image_and_variables_concern_all_primary_layers(tmp_path: Path) -> None:
    before = keys(fam(tmp_path))
    for other in (keys(fam(tmp_path), base="base-2"), keys(fam(tmp_path), token="2")):
        assert {name for name in ALL if before[name] != other[name]} == ALL
    assert not any("TOKEN" in name for name in before.values())


def test_install_sees_what_the_manifest_names_and_the_module(tmp_path: Path) -> None:
    some = fam(tmp_path)
    assert some.install_files == ("fam.py", "requirements.txt")
    everything = fam(tmp_path, **{"manifest.yaml": "tasks: {}\n"})
    assert everything.install_files == everything.files
    assert len(layer_names(everything, "base", {})) == len(STEPS)


def spec(*commands: str) -> VMSpec:
    steps = [{"type": "shell", "commands": [command]} for command in commands]
    return parse_vm_spec({"cpu_count_range": [1, 2], "ram_gib_range": [1, 2], "build_steps": steps}, "spec")


def test_layers_of_an_aux_vm_depend_on_the_steps_up_to_them(tmp_path: Path) -> None:
    some = fam(tmp_path)
    before = aux_layer_names(some, "base", spec("a", "b", "c"))
    after = aux_layer_names(some, "base", spec("a", "x", "c"))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False]
    # An author who adds a step begins with the image that was finished before.
    assert aux_image_name(some, "base", spec("a", "b")) == before[1].replace("layer-", "aux-")
    assert aux_layer_names(some, "other", spec("a"))[0] != before[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"fam.py": "# another\n" + MODULE}, ["fam.py changed"]),
        ({"more.txt": ""}, ["more.txt is new"]),
        ({"data": "2"}, ["build step 2 changed", "data changed"]),
        ({"build_steps.json": json.dumps(STEPS[:2])}, ["build step 3 is gone", "build_steps.json changed"]),
        ({"build_steps.json": json.dumps([*STEPS, STEPS[0]])}, ["build step 4 is new", "build_steps.json changed"]),
        (dict.fromkeys("abcde", "x"), ["a is new", "b is new", "c is new", "2 more files changed"]),
    ],
    ids=["nothing", "module", "new file", "copied file", "step gone", "new step", "many"],
)
def test_what_changed_is_said_in_words(tmp_path: Path, change: dict[str, str], words: list[str]) -> None:
    before = inputs(fam(tmp_path), "base", {})
    assert changes(before, inputs(fam(tmp_path, **change), "base", {})) == words


def test_base_image_and_variables_are_named_without_values(tmp_path: Path) -> None:
    some = fam(tmp_path)
    before, after = inputs(some, "base-1", {"TOKEN": "s3cret-1"}), inputs(some, "base-2", {"TOKEN": "s3cret-2"})
    assert changes(before, after) == ["the base image changed", "the env file's variables changed"]
    assert "s3cret" not in after.model_dump_json()


def test_a_files_name_adds_no_line_to_what_changed() -> None:
    [words] = changes(Inputs(base="b"), Inputs(base="b", files={"a\nb\x1b]0;t\x07" + "c" * 1000: "1"}))
    assert words.isprintable()
    assert len(words) < 300


def test_a_file_that_is_gone_is_named() -> None:
    assert changes(Inputs(base="b", files={"a": "1"}), Inputs(base="b")) == ["a is gone"]
