"""Tests which layers are built and reused, on a cloud that keeps layers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import ImageBuildError
from provisioner.base.models import VMSpec
from provisioner.family.loader import TaskFamily, load_family
from provisioner.family.setup_data import parse_vm_spec
from provisioner.images import build, layers
from provisioner.images.layers import aux_image_name, aux_layer_names, family_image_name, layer_names
from provisioner.session import Session
from provisioner.store.images import Image
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP, Fails
from tests.unit.fakes.world import MODULE, SIZE, family, told_of

SCORE = """
    @staticmethod
    def score(t, submission):
        return 1.0
"""
INPUTS = "tasks: {}\ninstall_inputs: [requirements.txt]\n"


@pytest.fixture
def cloud(cloud: FakeCloud) -> FakeCloud:
    cloud.keeps_layers = True
    return cloud


def spec(*commands: str) -> VMSpec:
    steps = [{"type": "shell", "commands": [command]} for command in commands]
    return parse_vm_spec({"cpu_count_range": [1, 2], "ram_gib_range": [1, 2], "build_steps": steps}, "spec")


def steps(*commands: str) -> dict[str, str]:
    return {"build_steps.json": json.dumps([{"type": "shell", "commands": [command]} for command in commands])}


def builders(cloud: FakeCloud) -> int:
    return len([run for run in cloud.runs() if run.startswith("apply build-")])


def ran(cloud: FakeCloud) -> list[str]:
    """Returns what was run in builders since this was last asked: commands of steps, and operations."""
    done: list[str] = []
    for machine in cloud.machines.values():
        for request in machine.guest.requests:
            done += request["commands"] if request["operation"] == "shell" else [request["operation"]]
        machine.guest.requests.clear()
    return done


def of_kind(session: Session, kind: str) -> list[Image]:
    return [image for image in session.images.all() if image.kind == kind]


def test_only_the_steps_after_a_change_run_again(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    first = build.aux_image(session, fam, spec("a", "b", "c"), SIZE)
    assert ran(cloud) == ["a", "b", "c"]
    second = build.aux_image(session, fam, spec("a", "b", "x"), SIZE)
    assert ran(cloud) == ["x"]
    assert build.aux_image(session, fam, spec("a", "b", "x"), SIZE) == second != first
    build.aux_image(session, fam, spec("a", "y", "c"), SIZE)
    assert ran(cloud) == ["y", "c"]
    build.aux_image(session, fam, spec("z", "b", "c"), SIZE)
    assert ran(cloud) == ["z", "b", "c"]
    assert (builders(cloud), cloud.existing()) == (4, [])


def test_a_step_that_is_added_begins_with_the_finished_image(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    fam = family(tmp_path)
    build.aux_image(session, fam, spec("a", "b"), SIZE)
    assert len(of_kind(session, "layer")) == 1
    ran(cloud)
    build.aux_image(session, fam, spec("a", "b", "c"), SIZE)
    assert ran(cloud) == ["c"]


def test_a_layer_is_recorded_over_its_base_image(session: Session, tmp_path: Path) -> None:
    name = build.aux_image(session, family(tmp_path), spec("a", "b"), SIZE)
    [layer] = of_kind(session, "layer")
    assert (layer.family, layer.base) == ("fam", "base-aux-0123456789abcdef")
    assert session.images.load(name).layers == (layer.name,)
    assert session.images.load(name).base == "base-aux-0123456789abcdef"


def test_what_is_built_and_what_is_reused_is_said(session: Session, tmp_path: Path) -> None:
    fam = family(tmp_path)
    names = [build.aux_image(session, fam, each, SIZE) for each in (spec("a", "b"), spec("a", "x"), spec("q"))]
    said = [note for note in told_of(session).notes if note.startswith("Building")]
    assert said == [
        f"Building the aux VM's image of fam ({names[0]}): the first build takes a minute or more",
        f"Building the aux VM's image of fam ({names[1]}): build step 1 is reused",
        f"Building the aux VM's image of fam ({names[2]}): the first build takes a minute or more",
    ]


def test_a_step_that_fails_leaves_the_layers_before_it(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path)
    fails = {"shell": None}

    def fail_at_the_second() -> None:
        guest = cloud.guest()
        if len(guest.operations) > 1:
            guest.values["shell"] = Fails("no such package")

    cloud.guest_defaults = {"values": fails, "during": {"shell": fail_at_the_second}}
    with pytest.raises(ImageBuildError, match="build step 2"):
        build.aux_image(session, fam, spec("a", "b"), SIZE)
    assert len(of_kind(session, "layer")) == 1
    assert of_kind(session, "aux") == []
    cloud.guest_defaults = {}
    cloud.machines.clear()
    build.aux_image(session, fam, spec("a", "c"), SIZE)
    assert ran(cloud) == ["c"]


@pytest.mark.parametrize("lack", ["room", "secret"])
def test_a_build_does_without_a_layer_that_cannot_be_kept(
    session: Session, cloud: FakeCloud, tmp_path: Path, lack: str
) -> None:
    fam = family(tmp_path)
    cloud.faults.no_room = lack == "room"
    if lack == "secret":

        def forget() -> None:  # the second step removes what the first one left
            guest = cloud.guest()
            guest.secrets_left = [] if len(guest.operations) > 1 else ["/home/admin/.netrc: TOKEN"]

        cloud.guest_defaults = {"during": {"shell": forget}}
    name = build.aux_image(session, fam, spec("a", "b", "c"), SIZE)
    assert session.images.finished(name)
    kept = {"room": 0, "secret": 1}[lack]
    assert len(of_kind(session, "layer")) == kept
    assert any("The layer of this step is not kept" in note for note in told_of(session).notes) == (lack == "room")


def test_a_disk_that_fills_during_a_layer_stops_no_build(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = session.images.finish

    def finish(image: Image, directory: Path) -> None:
        if image.kind == "layer":
            raise OSError(28, "No space left on device")
        really(image, directory)

    monkeypatch.setattr(session.images, "finish", finish)
    name = build.aux_image(session, family(tmp_path), spec("a", "b"), SIZE)
    assert session.images.finished(name)
    assert of_kind(session, "layer") == []


def test_of_many_steps_the_last_ones_have_layers(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MAXIMUM_LAYERS", 2)
    build.aux_image(session, family(tmp_path), spec(*"abcde"), SIZE)
    assert len(of_kind(session, "layer")) == 2


def test_a_change_of_the_family_reuses_its_build_steps(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    build.family_image(session, family(tmp_path, **steps("a", "b")))
    assert ran(cloud) == ["a", "b", "install", "setup"]
    changed = family(tmp_path, **steps("a", "b"), **{"fam.py": MODULE + SCORE})
    name, _ = build.family_image(session, changed)
    assert ran(cloud) == ["install", "setup"]
    assert f"Building the image of fam ({name}): build steps 1 to 2 are reused" in told_of(session).notes


def test_build_steps_run_before_the_familys_files_are_there(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    seen: list[dict[str, set[str]]] = []
    cloud.guest_defaults = {"during": {"shell": lambda: seen.append(dict(cloud.guest().trees))}}
    build.family_image(session, family(tmp_path, **steps("a")))
    assert seen == [{}]
    assert cloud.guest().trees == {"/root": {"fam.py", "build_steps.json"}}


def split(directory: Path, module: str = MODULE + SCORE, **files: str) -> TaskFamily:
    return family(directory, **{"fam.py": module, "manifest.yaml": INPUTS, "requirements.txt": "jq", **files})


def test_install_runs_again_only_for_its_inputs(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    seen: dict[str, set[str]] = {}

    def look(operation: str) -> None:
        seen[operation] = set(cloud.guest().trees["/root"])

    cloud.guest_defaults = {"during": {name: partial(look, name) for name in ("install", "setup")}}
    build.family_image(session, split(tmp_path, data="1"))
    # The fake machine tells what was copied last.
    assert seen == {"install": {"fam.py", "requirements.txt"}, "setup": {"manifest.yaml", "data"}}
    cloud.guest_defaults = {}
    assert ran(cloud) == ["install", "setup"]
    name, _ = build.family_image(session, split(tmp_path, data="2"))
    assert ran(cloud) == ["setup"]
    assert f"Building the image of fam ({name}): install() is reused" in told_of(session).notes
    for changed in ({"requirements.txt": "curl"}, {"module": (MODULE + SCORE).replace("1.0", "0.5")}):
        build.family_image(session, split(tmp_path, **changed))
        assert ran(cloud) == ["install", "setup"]
    assert (len(of_kind(session, "layer")), cloud.existing()) == (3, [])


def test_a_cloud_without_layers_builds_the_whole_image(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    cloud.keeps_layers = False
    seen: list[set[str]] = []
    cloud.guest_defaults = {"during": {"install": lambda: seen.append(set(cloud.guest().trees["/root"]))}}
    name, _ = build.family_image(session, split(tmp_path, data="1"))
    assert seen == [{"fam.py", "requirements.txt"}]
    assert cloud.guest().operations == ["install", "setup"]
    assert session.images.load(name).base == "base-primary-0123456789abcdef"
    assert [image.kind for image in session.images.all()] == ["base", "family"]


def test_files_that_change_while_they_are_read_make_no_image(
    session: Session, cloud: FakeCloud, tmp_path: Path
) -> None:
    fam = split(tmp_path, data="1")
    cloud.guest_defaults = {"during": {"install": lambda: (tmp_path / "fam" / "data").write_text("2")}}
    with pytest.raises(ImageBuildError, match="changed while they were read"):
        build.family_image(session, fam)
    assert of_kind(session, "family") == []


def test_records_of_another_version_harm_no_build(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    build.family_image(session, split(tmp_path))
    for kind in ("family", "layer"):
        other = session.images.path(f"{kind}-fam-{'0' * 16}")
        other.mkdir()
        (other / "image.json").write_text('{"kind": "of another version"}')
    ran(cloud)
    build.family_image(session, split(tmp_path, data="1"))
    assert ran(cloud) == ["setup"]


def test_prune_keeps_the_layers_of_what_it_keeps(session: Session, tmp_path: Path) -> None:
    aux = spec("a", "b").model_dump(mode="json", exclude_none=True)
    setup: dict[str, Any] = {**SETUP, "tasks": {"main": {"aux_vm_spec": aux}}}
    fakes = session.cloud
    assert isinstance(fakes, FakeCloud)
    fakes.guest_defaults = {"values": {"setup": setup}}
    for requirements in ("jq", "curl"):
        build.build_all(session, split(tmp_path, **steps("a"), **{"requirements.txt": requirements}))
    [older, newer] = of_kind(session, "family")
    removed = session.images.prune(set(), cloud="local", discard=lambda _: None)
    assert older.name in removed
    assert {image.kind for image in session.images.all()} == {"base", "layer", "family", "aux"}
    kept = {image.name for image in session.images.all()}
    assert {newer.name, *newer.layers} <= kept
    assert set(older.layers) - kept == {older.layers[-1]}
    session.images.prune({newer.name}, cloud="local", discard=lambda _: None, everything=True)
    assert of_kind(session, "layer") == []


def test_an_estimate_says_what_is_reused(session: Session, tmp_path: Path) -> None:
    fam = family(tmp_path, **steps("a"))
    assert build.outlook(session, fam) == "to be built first"
    build.family_image(session, fam)
    changed = family(tmp_path, **steps("a"), data="1")
    assert build.outlook(session, changed) == "to be built first: build step 1 is reused"
    build.family_image(session, split(tmp_path))
    assert build.outlook(session, split(tmp_path, data="2")).endswith("; install() is reused")


def test_two_env_files_variables_have_their_own_layers(session: Session, cloud: FakeCloud, tmp_path: Path) -> None:
    fam = family(tmp_path, **steps("a"))
    build.family_image(session, fam)
    ran(cloud)
    build.family_image(replace(session, variables={"TOKEN": "another-value"}), fam)
    assert ran(cloud) == ["a", "install", "setup"]


STEPS = [
    {"type": "shell", "commands": ["true"]},
    {"type": "file", "source": "data", "destination": "/data"},
    {"type": "shell", "commands": ["false"]},
]
SCORED = MODULE + SCORE
FILES = {
    "fam.py": SCORED, "data": "1", "requirements.txt": "jq", "notes.txt": "", "build_steps.json": json.dumps(STEPS),
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
        ({"fam.py": edited(SCORED, "return 1.0", "return 0.5")}, {"install", "family"}),
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


def test_layers_of_an_aux_vm_depend_on_the_steps_up_to_them(tmp_path: Path) -> None:
    some = fam(tmp_path)
    before = aux_layer_names(some, "base", spec("a", "b", "c"))
    after = aux_layer_names(some, "base", spec("a", "x", "c"))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False]
    # An author who adds a step begins with the image that was finished before.
    assert aux_image_name(some, "base", spec("a", "b")) == before[1].replace("layer-", "aux-")
    assert aux_layer_names(some, "other", spec("a"))[0] != before[0]


@pytest.mark.parametrize(
    "second",
    [{"type": "file", "source": "data", "destination": "/data"}, {"type": "shell", "commands": ["cp data /"]}],
    ids=["file", "shell"],
)
def test_a_file_that_changes_during_a_copy_makes_no_layer(
    session: Session, cloud: FakeCloud, tmp_path: Path, second: dict[str, Any]
) -> None:
    given = [{"type": "shell", "commands": ["a"]}, second]
    fam = family(tmp_path, **{"build_steps.json": json.dumps(given), "data": "1"})
    data = tmp_path / "fam" / "data"
    cloud.guest_defaults = {"during": {"shell": lambda: data.write_text("2")}}
    with pytest.raises(ImageBuildError, match="changed while they were read"):
        build.family_image(session, fam)
    assert len(of_kind(session, "layer")) == 1
    cloud.guest_defaults = {}
    build.family_image(session, family(tmp_path, **{"build_steps.json": json.dumps(given), "data": "1"}))
    assert len(of_kind(session, "layer")) == 2


@pytest.mark.parametrize("manifest", ["tasks: {}\n", INPUTS], ids=["whole", "split"])
@pytest.mark.parametrize("change", ["another", "gone"])
def test_a_file_that_changes_before_install_makes_no_image(
    session: Session, cloud: FakeCloud, tmp_path: Path, manifest: str, change: str
) -> None:
    changed = {"manifest.yaml": manifest, "requirements.txt": "jq", **steps("a")}
    fam = family(tmp_path, **changed)
    path = tmp_path / "fam" / "requirements.txt"
    during = path.unlink if change == "gone" else lambda: path.write_text("curl")
    cloud.guest_defaults = {"during": {"shell": during}}
    with pytest.raises(ImageBuildError, match=r"changed while they were read|cannot be read"):
        build.family_image(session, fam)
    assert {image.kind for image in session.images.all()} == {"base", "layer"}
    cloud.guest_defaults = {}
    assert build.family_image(session, family(tmp_path, **changed))
