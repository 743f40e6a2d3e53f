"""Tests the commands that show records of environments and images, without any machine."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from provisioner.base.errors import InfrastructureError
from provisioner.base.models import (
    Endpoint,
    Environment,
    MachineRecord,
    MachineSize,
    ScoreLogEntry,
    SetupData,
    TaskSetup,
    TimeLimits,
)
from provisioner.cli.commands.logs import MAXIMUM_LOGS_BYTES
from provisioner.clouds.local.cloud import LocalCloud
from provisioner.clouds.local.images import digest as base_image_digest
from provisioner.clouds.local.vm.processes import start_time
from provisioner.clouds.local.vm.qemu import PROCESS
from provisioner.family.loader import load_family
from provisioner.images.layers import family_image_name
from provisioner.store.environments import EnvironmentStore
from provisioner.store.files import locked
from provisioner.store.home import Home
from provisioner.store.images import Image, ImageStore
from tests.unit.conftest import CommandLine, nothing_was_created
from tests.waiting import until

FAMILY = Path(__file__).parent / "families" / "echo"  # what its text tells is refused before an image is asked
BEGIN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETUP = SetupData(
    tasks={
        "small": TaskSetup(permissions=("full_internet",)),
        "smart": TaskSetup(required_environment_variables=("TOKEN_B", "TOKEN_A", "GIVEN")),
    },
    has_score=True,
)


def environment(identity: str, scores: tuple[float, ...] = ()) -> Environment:
    return Environment(
        id=identity, cloud="local", stack=identity, family="echo", task="main", status="creating", created_at=BEGIN,
        expires_at=BEGIN + timedelta(hours=4),
        setup=TaskSetup(), full_internet=False,
        machines={"primary": MachineRecord(
            image="family-echo-1", size=MachineSize(cpus=1, memory_gib=1.0, disk_gib=16), user="root")},
        score_log=tuple(
            ScoreLogEntry(score=score, scored_at=BEGIN, elapsed_seconds=1.0, details={"loss": math.inf})
            for score in scores
        ),
    )  # fmt: skip


@pytest.fixture
def family_image(store: EnvironmentStore, provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes the records of the family's finished images, built with GIVEN=1, which --env-file repeats."""
    monkeypatch.setenv("PROVISIONER_CA_BUNDLE", "")
    images = ImageStore(Home(provisioner.home))
    digest = base_image_digest("debian-12", None)
    name = family_image_name(load_family(FAMILY), f"base-primary-{digest}", {"GIVEN": "1"})
    for image, kind in ((f"base-primary-{digest}", "base"), (f"base-aux-{digest}", "base"), (name, "family")):
        directory = provisioner.home / "images" / f".{image}"
        directory.mkdir()
        (directory / "setup-data.json").write_text(SETUP.model_dump_json())
        images.finish(Image.model_validate({"name": image, "kind": kind, "created_at": BEGIN}), directory)
    (provisioner.home.parent / "env").write_text("GIVEN=1\n")
    return name


def test_an_invalid_submission_is_null_in_json(provisioner: CommandLine, store: EnvironmentStore) -> None:
    store.save(environment("echo-main-bcd234", (math.nan, 0.5)))
    for shown in (provisioner("show", "echo", "--json").json, provisioner("list", "--json").json["environments"][0]):
        assert [entry["score"] for entry in shown["score_log"]] == [None, 0.5]
        assert [entry["details"] for entry in shown["score_log"]] == [{"loss": None}] * 2
    assert math.isnan(store.find("echo").score_log[0].score or 0)


def test_list_and_show_give_the_whole_record(provisioner: CommandLine, store: EnvironmentStore) -> None:
    saved = store.save(environment("echo-main-bcd234"))
    fields = {"environment" if name == "id" else name for name in saved.model_dump()}
    [listed] = provisioner("list", "--json").json["environments"]
    shown = provisioner("show", "234", "--json").json
    assert listed.keys() == fields
    assert shown.keys() == fields | {"schema", "ok", "exists", "orphan", "parts"}
    assert shown["exists"] is True


def test_show_names_the_accelerator(provisioner: CommandLine, store: EnvironmentStore) -> None:
    store.save(environment("up-1").model_copy(update={"versions": {"QEMU": "7.2.22", "accelerator": "TCG"}}))
    assert "\n  versions: QEMU 7.2.22, accelerator TCG\n" in provisioner("show", "up-1").stdout


def test_list_and_show_tell_orphans(provisioner: CommandLine, store: EnvironmentStore) -> None:
    killed = store.save(environment("killed-1").model_copy(update={"status": "creating"}))
    managed = store.save(environment("managed-1").model_copy(update={"status": "creating"}))
    store.save(environment("up-1").model_copy(update={"status": "ready"}))
    with locked(store.lease(managed.id)):
        listed = provisioner("list")
        assert provisioner("list", "--json").json["orphans"] == [killed.id]
        orphans = [provisioner("show", name, "--json").json["orphan"] for name in (killed.id, managed.id, "up-1")]
        assert orphans == [True, False, False]
    assert re.search(r"^killed-1 +task +creating, orphan ", listed.stdout, re.MULTILINE)
    assert (listed.stdout.count("orphan,"), listed.stdout.count(", orphan")) == (0, 1)
    assert listed.stdout.endswith("`provisioner destroy ENV` removes one, `provisioner sweep` all of a cloud.\n")
    shown = provisioner("show", "killed-1").stdout
    assert shown.startswith("killed-1  creating, orphan\n")
    assert "the command that managed it has ended: `provisioner destroy killed-1` removes it\n" in shown
    assert "destroy" not in provisioner("show", "up-1").stdout


def test_list_tells_which_machines_of_this_host_have_ended(provisioner: CommandLine, store: EnvironmentStore) -> None:
    given = environment("echo-main-bcd234")
    web = given.machines["primary"].model_copy(update={"hostname": "web"})
    machines = {**given.machines, "web": web}
    saved = store.save(given.model_copy(update={"status": "ready", "machines": machines}))
    running = store.directory(saved.id) / "primary"
    running.mkdir()
    (running / PROCESS).write_text(f"{os.getpid()} {start_time(os.getpid())}")
    assert "  ready, web has ended  " in provisioner("list").stdout
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        (running / PROCESS).write_text(f"{process.pid} {start_time(process.pid)}")
        process.send_signal(signal.SIGSTOP)
        until(lambda: "  ready, primary is stopped, web has ended  " in provisioner("list").stdout)
        process.kill()
    store.save(saved.model_copy(update={"cloud": "aws"}))
    assert "  ready  " in provisioner("list").stdout


PRIMARY = environment("shown").machines["primary"]
SHOWN = {
    "booted": ({"endpoints": {"primary": Endpoint(host="127.0.0.1", port=2200, origin="boot: no template: x")}},
               "ssh 127.0.0.1:2200, started by boot: no template: x\n"),
    "warning": ({"setup": TaskSetup(warnings=("It\x9b differs.",))}, "  warning: It\ufffd differs.\n"),
    "builder": ({"kind": "builder", "task": None}, "  family echo, builds an image, cloud local\n"),
    "no probes": ({}, "  isolation: not proven\n"),
    "time limits": ({"time_limits": TimeLimits(start_seconds=5400)}, "  time limits: start 1h30m, "),
    "recorded": ({"recorded": True}, "  recorded: nothing so far\n"),
    "not recorded": ({"recorded": False}, "  not recorded\n"),
    "no distribution": ({}, "GiB disk, family-echo-1\n"),
    "distribution": ({"machines": {"primary": PRIMARY.model_copy(update={"distribution": "debian-13"})}},
                     "GiB disk, debian-13, family-echo-1\n"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "line"), SHOWN.values(), ids=SHOWN)
def test_show_says_what_is_known_of_an_environment(
    provisioner: CommandLine, store: EnvironmentStore, changes: dict[str, object], line: str
) -> None:
    store.save(environment("shown").model_copy(update=changes))
    assert line in provisioner("show", "shown").stdout


def test_plan_names_the_accelerator(provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCloud, "accelerator", lambda _: "KVM")
    assert "\n  accelerator: KVM\n" in provisioner("plan", str(FAMILY), "main").stdout
    assert provisioner("plan", str(FAMILY), "main", "--json").json["accelerator"] == "KVM"


def test_plan_names_the_base_image(provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\n  base image: debian-12\n" in provisioner("plan", str(FAMILY), "main").stdout
    monkeypatch.setenv("PROVISIONER_BASE_IMAGE", "debian-13")
    assert provisioner("plan", str(FAMILY), "main", "--json").json["base_image"] == "debian-13"
    assert list(provisioner.home.glob("images/*")) == []


@pytest.mark.parametrize("command", ["up", "run", "plan"])
def test_an_unknown_base_image_is_refused_before_anything_exists(
    provisioner: CommandLine, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    more = ["--submission-file", str(FAMILY / "echo.py")] if command == "run" else []
    monkeypatch.setenv("PROVISIONER_BASE_IMAGE", "debian-11")
    done = provisioner(command, str(FAMILY), "main", *more)
    assert done.code == 2
    assert "PROVISIONER_BASE_IMAGE is not valid: Input should be 'debian-12' or 'debian-13'" in done.stderr
    assert not provisioner.home.exists() or list(provisioner.home.glob("environments/*")) == []


def test_what_is_gone_is_shown_and_gone_twice_is_no_mistake(provisioner: CommandLine, store: EnvironmentStore) -> None:
    saved = store.save(environment("echo-main-bcd234").model_copy(update={"status": "destroying"}))
    (store.logs(saved.id) / "start.log").write_bytes(b"hello \xff\x1b[2J\n")
    store.archive(saved)
    shown = provisioner("show", saved.id, "--json").json
    assert (shown["exists"], shown["orphan"]) == (False, False)
    assert provisioner("show", saved.id).stdout.startswith(f"{saved.id}  gone\n")
    assert provisioner("logs", saved.id, "--json").json["logs"] == {"start": "hello \ufffd\x1b[2J\n"}
    destroyed = provisioner("destroy", saved.id, "--json").json
    assert (destroyed["destroyed"], destroyed["already_gone"]) == ([], [saved.id])
    assert provisioner("score", saved.id).code == 2


def test_long_logs_are_shown_by_their_ends(provisioner: CommandLine, store: EnvironmentStore) -> None:
    saved = store.save(environment("echo-main-bcd234"))
    for name, text in (("start", "short\n"), ("agent", "ab\n" * 4_000_000), ("score", "cd\n" * 4_000_000)):
        (store.logs(saved.id) / f"{name}.log").write_text(text + f"end of {name}\n")
    store.archive(saved)
    told = provisioner("logs", saved.id, "--json").json
    logs = told["logs"]
    assert told["cut"] == dict.fromkeys(("agent", "score"), 12_000_013)
    assert logs["start"] == "short\nend of start\n"
    assert logs["agent"].endswith("ab\nend of agent\n")
    assert logs["score"].endswith("cd\nend of score\n")
    assert (6 << 20) < sum(map(len, logs.values())) <= MAXIMUM_LOGS_BYTES
    shown = provisioner("logs", saved.id).stdout
    assert shown.endswith("==> start <==\nshort\nend of start\n")
    assert f"==> agent: its end; all of it is in {store.logs(saved.id) / 'agent.log'} <==\n" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["exec", "echo", "--", "true"], "is not up: its status is creating"),
        (["exec", "echo", "--machine", "aux", "--", "true"], "has no machine aux"),
        (["exec", "echo", "--user", "admin", "--", "true"], "The primary machine has no user admin"),
        (["exec", "cuda", "--machine", "aux", "--user", "admin", "--", "true"], "The aux machine has no user admin"),
        (["exec", "cuda", "--machine", "aux", "--user", "ubuntu", "--", "true"], "cuda is not up"),
        (["ssh", "echo"], "is not up"),
        (["cp", "echo:/etc/hostname", "."], "is not up"),
        (["agent", "echo", str(FAMILY), "true"], "is not up"),
        (["agent", "echo", "/nonexistent/agent", "true"], "does not exist"),
        (["score", "echo"], "is not up"),
        (["score", "echo", "--intermediate"], "is not up"),
        (["show", "e"], "is ambiguous: it matches echo-main-bcd234, evil"),
        (["destroy", "evil", "nothing"], "no environment 'nothing'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else value[0],
)
def test_an_environment_that_cannot_do_it_is_left_alone(
    provisioner: CommandLine, store: EnvironmentStore, arguments: list[str], says: str
) -> None:
    cuda = environment("cuda")
    aux = cuda.machines["primary"].model_copy(update={"distribution": "ubuntu-20.04-cuda"})
    cuda = cuda.model_copy(update={"machines": {**cuda.machines, "aux": aux}})
    before = [store.save(each) for each in (cuda, environment("echo-main-bcd234"), environment("evil"))]
    done = provisioner(*arguments)
    assert (done.code, says in done.stderr, done.stdout) == (2, True, ""), done.stderr
    assert store.all() == before


def test_tasks_come_from_the_image(provisioner: CommandLine, family_image: str) -> None:
    env_file = str(provisioner.home.parent / "env")
    tasks = provisioner("tasks", str(FAMILY), "--env-file", env_file, "--json").json
    assert (tasks["family"], tasks["image"], list(tasks["tasks"])) == ("echo", family_image, ["small", "smart"])
    text = provisioner("tasks", str(FAMILY), "--env-file", env_file).stdout
    assert "TOKEN_B, TOKEN_A, GIVEN" in text
    built = provisioner("image", "build", str(FAMILY), "--env-file", env_file, "--json").json
    assert (built["image"], built["aux_images"]) == (family_image, [])


@pytest.mark.parametrize("command", ["run", "up", "test"])
@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("smal", ["has no task 'smal'", "'small'", "'smart'"]),
        ("", ["a task's name must not be empty"]),
        ("$(id)", ["has no task '$(id)'"]),
        ("smart", ["not set: TOKEN_A, TOKEN_B", "Options: --env-file"]),
    ],
)
def test_a_task_that_cannot_start_is_refused_first(
    provisioner: CommandLine, family_image: str, command: str, task: str, says: list[str]
) -> None:
    more = ["--submission-file", str(FAMILY / "echo.py")] if command == "run" else []
    done = provisioner(command, str(FAMILY), task, *more, "--env-file", str(provisioner.home.parent / "env"))
    assert done.code == 2
    assert [part for part in says if part not in done.stderr] == []
    assert [path.name for path in provisioner.home.glob("*/*") if path.parent.name not in ("images", "locks")] == []


def test_image_list_and_prune_say_what_is_there(provisioner: CommandLine, family_image: str) -> None:
    images = provisioner("image", "list", "--json").json["images"]
    record = {"name", "kind", "created_at", "cloud", "base", "family", "needs", "packages", "layers"}
    assert images[0].keys() == record | {"bytes", "in_use"}
    assert [image["in_use"] for image in images] == [False] * 3
    assert len(provisioner("image", "prune", "--all", "--json").json["removed"]) == 3
    assert nothing_was_created(provisioner.home)


def test_an_image_of_another_version_hides_no_other(provisioner: CommandLine, family_image: str) -> None:
    directory = provisioner.home / "images" / family_image
    record = directory / "image.json"
    record.write_text(record.read_text().replace("{", '{"of_another_version": 1,', 1))
    done = provisioner("image", "list", "--json")
    assert (done.code, len(done.json["images"])) == (0, 2)
    [unreadable] = done.json["unreadable"]
    assert (unreadable["name"], unreadable["directory"]) == (family_image, str(directory))
    assert f"remove the directory {directory}" in provisioner("image", "list").stdout
    pruned = provisioner("image", "prune", "--all")
    assert pruned.code == InfrastructureError.exit_code
    assert f"remove the directory {directory}" in pruned.stderr
    assert len(list((provisioner.home / "images").glob("*/image.json"))) == 3


def test_a_line_break_in_an_unreadable_images_name_is_hidden(provisioner: CommandLine) -> None:
    directory = provisioner.home / "images" / "a\nb"
    directory.mkdir(parents=True)
    (directory / "image.json").write_text("{")
    [_, line] = provisioner("image", "list").stdout.splitlines()
    assert line.startswith("a b: ")


def test_an_unreadable_environment_does_not_hide_images(provisioner: CommandLine, family_image: str) -> None:
    directory = provisioner.home / "environments" / "damaged-bcd234"
    directory.mkdir(parents=True)
    (directory / "environment.json").write_text("{")
    done = provisioner("image", "list", "--json")
    assert (done.code, [image["in_use"] for image in done.json["images"]]) == (0, [None] * 3)
    assert "It is not known which images are in use." in done.stderr
    assert provisioner("image", "prune", "--all").code != 0


def test_a_batch_is_planned_without_readable_setup_data(provisioner: CommandLine, family_image: str) -> None:
    data = {
        "name": "s",
        "families": [{"path": str(FAMILY)}],
        "submissions": [{"name": "one", "text": "1"}],
        "env_file": "env",
    }
    suite = provisioner.home.parent / "suite.yaml"
    suite.write_text(yaml.safe_dump(data))
    arguments = ("batch", "plan", str(suite), "--json")
    directory = provisioner.home / "images" / family_image
    (directory / "setup-data.json").write_text('{"of": "another version"}')
    planned = provisioner(*arguments)
    assert planned.code == 0, planned.stderr
    assert (planned.code, planned.json["images_to_build"]) == (0, ["echo"])
    assert f"remove the directory {directory}" in planned.stderr


def test_a_record_that_cannot_be_read_hides_no_other(provisioner: CommandLine) -> None:
    directory = provisioner.home / "environments" / "damaged-bcd234"
    directory.mkdir(parents=True)
    (directory / "environment.json").write_text("{")
    listed = provisioner("list", "--json")
    assert (listed.code, listed.json["environments"], listed.json["unreadable"]) == (5, [], ["damaged-bcd234"])
    assert "damaged-bcd234" in listed.stderr
    assert provisioner("image", "prune").code == 5  # the images that it runs from are unknown
    destroyed = provisioner("destroy", "--all", "--json")
    assert (destroyed.code, destroyed.json["destroyed"]) == (0, ["damaged-bcd234"])
    assert not directory.exists()
    assert provisioner("image", "prune").code == 0


def test_an_interruption_ends_a_destroy_of_several(
    provisioner: CommandLine, store: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def interrupted(_: object, found: Environment) -> NoReturn:
        tried.append(found.id)
        raise KeyboardInterrupt("SIGTERM")

    monkeypatch.setattr("provisioner.environment.lifecycle.destroy", interrupted)
    for name in ("one-main-aaa222", "two-main-bbb333"):
        store.save(environment(name))
    assert (provisioner("destroy", "--all").code, len(tried)) == (143, 1)
