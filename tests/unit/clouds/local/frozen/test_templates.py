"""Which machines may share a template, and what becomes of one that is damaged or cannot be made."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from provisioner.clouds.local.frozen import templates
from provisioner.clouds.local.frozen.memory_files import DamagedError
from provisioner.clouds.local.frozen.templates import Template, TemplateError
from provisioner.clouds.local.vm import disk, machine_logs, qemu
from provisioner.clouds.local.vm.processes import User
from provisioner.clouds.local.vm.qemu import Launch
from provisioner.store.files import locked, remove_tree
from provisioner.store.home import TEMPLATES, UNFINISHED
from tests.unit.fakes import qmp
from tests.waiting import BOUND_SECONDS

MIB = 1 << 20


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image's disk, with kernel and initrd beside it."""
    directory = tmp_path / "family-fam-1"
    directory.mkdir()
    for name in ("disk.qcow2", "vmlinuz", "initrd.img"):
        (directory / name).write_text(name)
    return directory / "disk.qcow2"


@pytest.fixture
def launch(image: Path) -> Launch:
    return Launch(
        cpus=1, memory_mib=2, kernel=str(image.with_name("vmlinuz")), initrd=str(image.with_name("initrd.img")),
        kvm=False, link=(), internet_fd=None, user=None,
    )  # fmt: skip


def programs(directory: Path, monkeypatch: pytest.MonkeyPatch, *, qemu: str = "exit 1", qemu_img: str) -> None:
    """Puts stand-ins for QEMU's programs first on the path."""
    directory.mkdir(exist_ok=True)
    for name, text in (("qemu-system-x86_64", qemu), ("qemu-img", qemu_img)):
        path = directory / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


@pytest.mark.parametrize(
    "change",
    [
        {"cpus": 2}, {"memory_mib": 4}, {"kvm": True}, {"internet_fd": 4},
        {"link": ("link.sock", "../aux/link.sock")},
    ],
    ids=["cpus", "memory", "accelerator", "internet", "link"],
)  # fmt: skip
def test_machines_that_differ_share_no_template(image: Path, launch: Launch, change: dict[str, object]) -> None:
    assert templates.key(image, replace(launch, **change)) != templates.key(image, launch)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["disk.qcow2", "vmlinuz", "initrd.img"])
def test_another_file_of_the_image_makes_another_template(image: Path, launch: Launch, name: str) -> None:
    before = templates.key(image, launch)
    image.with_name(name).write_text("something else")
    assert templates.key(image, launch) != before


def test_an_image_that_was_moved_makes_another_template(image: Path, launch: Launch, tmp_path: Path) -> None:
    """A template's disk names its image's by its path."""
    before = templates.key(image, launch)
    moved = image.parent.rename(tmp_path / "moved")
    there = replace(launch, kernel=str(moved / "vmlinuz"), initrd=str(moved / "initrd.img"))
    assert templates.key(moved / image.name, there) != before


def test_other_devices_or_boots_make_another_template(
    image: Path, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = set()
    for version in ("", "other"):
        programs(tmp_path / f"bin{version}", monkeypatch, qemu=f"exit 1 # {version}", qemu_img="exit 1")
        keys.add(templates.key(image, launch))
    monkeypatch.setattr(templates, "BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another boot")
    keys.add(templates.key(image, launch))
    monkeypatch.setattr(qemu, "command", lambda launch, command=qemu.command: [*command(launch), "-device", "another"])
    keys.add(templates.key(image, launch))
    assert len(keys) == 4


def test_machines_of_one_kind_share_a_template(image: Path, launch: Launch) -> None:
    primary = replace(launch, link=(("link.sock", "../aux/link.sock"),), internet_fd=3, user=User(1, 2))
    other = replace(
        launch, link=(("link.sock", "../primary/link.sock"),), internet_fd=9, user=User(3, 4), disk_fds=(5, 6)
    )
    assert templates.key(image, primary) == templates.key(image, other)


def put(template: Template, launch: Launch) -> None:
    """Puts a finished template in its place, as far as can be seen from outside."""
    template.directory.mkdir(parents=True, mode=0o700)
    for name in (*templates.CHECKED, templates.CONSOLE):
        path = template.directory / name
        path.touch(mode=0o600)
        path.write_bytes(b"" if name == templates.MEMORY else b"x" * 100)
    os.truncate(template.memory, launch.memory_mib * MIB)
    templates.complete(template.directory)


@pytest.fixture
def template(image: Path, launch: Launch) -> Template:
    """A finished template."""
    made = Template(image.parent / TEMPLATES / templates.key(image, launch))
    put(made, launch)
    return made


def test_a_whole_template_of_our_own_is_used_as_it_is(image: Path, launch: Launch, template: Template) -> None:
    said: list[str] = []
    assert templates.obtain(image, launch, said.append) == template
    assert said == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda template: (template.directory / templates.STATE).write_bytes(b"x" * 99),
        lambda template: template.memory.write_bytes(b""),
        lambda template: (template.directory / templates.RECORD).write_text("{"),
        lambda template: template.memory.chmod(0o666),
    ],
    ids=["shorter", "no-memory", "no-record", "open-to-others"],
)
def test_a_damaged_template_is_not_used_and_removed(
    image: Path,
    launch: Launch,
    template: Template,
    damage: Callable[[Template], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(template)
    assert not templates.usable(template, launch)
    monkeypatch.setattr(templates, "key", lambda *_: template.directory.name)  # with the stand-ins, it is another
    programs(tmp_path / "bin", monkeypatch, qemu_img="exit 1")
    with pytest.raises(TemplateError):
        templates.obtain(image, launch, print)
    assert not template.directory.exists()


@pytest.mark.parametrize(
    ("qemu_img", "qemu"),
    [("exit 1", "exit 0"), ('for last; do :; done; touch "$last"', "echo no memory >&2; exit 1")],
    ids=["disk", "machine"],
)
def test_a_template_that_cannot_be_made_says_why(
    image: Path, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qemu_img: str, qemu: str
) -> None:
    programs(tmp_path / "bin", monkeypatch, qemu=qemu, qemu_img=qemu_img)
    said: list[str] = []
    with pytest.raises(TemplateError) as caught:
        templates.obtain(image, launch, said.append)
    what = "a template of family-fam-1 with 1 CPU and 0.00195312 GiB of memory"
    assert said == [f"Making {what} (once for each size of machine; takes as long as a boot)"]
    assert ("no memory" in str(caught.value)) == ("no memory" in qemu)
    assert [path.name for path in (image.parent / TEMPLATES).iterdir() if path.is_dir()] == []


# Answers as QEMU does. Its machine floods the console and asks for nothing; it ends once that was cut.
FLOODING = """
import os, socket, time
def listening(name):
    server = socket.socket(socket.AF_UNIX)
    server.bind(name)
    server.listen()
    return server
open("run/serial.log", "ab").write(b"x" * (8 << 20) + b"\\nA start job is\\x1b[2J running\\n")
monitor, port = listening("run/qmp.sock"), listening("{port}")
client, _ = monitor.accept(); stream = client.makefile("rwb", buffering=0)
stream.write(b'{{"QMP": {{}}}}\\n')
stream.readline()
stream.write(b'{{"return": {{}}}}\\n')
visitor, _ = port.accept()
while {endless} or os.stat("run/serial.log").st_size > {limit}:
    time.sleep(0.1)
"""


def test_a_machine_that_never_asks_for_credentials_is_given_up(
    image: Path, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "FAILURE_SECONDS", 0)
    made: list[Path] = []
    create = disk.create

    def creating(layer: Path, lower: Path) -> None:
        made.append(layer)
        create(layer, lower)

    monkeypatch.setattr(disk, "create", creating)

    def flood(endless: bool) -> None:
        fake = FLOODING.format(port=qemu.PORT, endless=endless, limit=machine_logs.LIMIT_BYTES)
        stand_in = f"exec /usr/bin/python3 - << 'END'\n{fake}\nEND"
        programs(tmp_path / "bin", monkeypatch, qemu=stand_in, qemu_img='touch "$9"')

    flood(endless=False)
    with pytest.raises(TemplateError, match="ended, or asked for something else"):
        templates.obtain(image, launch, print)
    flood(endless=True)
    monkeypatch.setattr(templates, "BOOT_SECONDS", 0)
    with pytest.raises(TemplateError, match=r"credentials in time; its console ends with: .*A start job is running"):
        templates.obtain(image, launch, print)
    assert len(made) == 1 + templates.BOOTS  # one that hangs is not the end of it
    monkeypatch.setattr("provisioner.clouds.local.vm.disk.nearly_full", lambda _: True)
    with pytest.raises(TemplateError, match="disk is nearly full"):
        templates.obtain(image, launch, print)


def test_a_new_template_removes_what_earlier_boots_left(
    image: Path, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path / "bin", monkeypatch, qemu_img="exit 1")
    home = image.parent / TEMPLATES
    key = templates.key(image, launch)
    of_another_size = f"{key.partition('-')[0]}-other"
    for name in ("00000000-old", f"{UNFINISHED}00000000-old", f"{UNFINISHED}{key}", of_another_size):
        (home / name).mkdir(parents=True)
    (home / "00000000-old.lock").touch()
    with pytest.raises(TemplateError):
        templates.obtain(image, launch, print)
    assert {path.name for path in home.iterdir()} == {of_another_size, f"{key}.lock", f"{key}.failed"}


def test_memory_and_state_are_of_one_template(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def locked_after_another_made_it_anew(*_: object, **__: object) -> Iterator[None]:
        for path in (template.directory / templates.STATE, template.memory):
            path.with_name("new").write_bytes(b"n" * path.stat().st_size)
            path.with_name("new").replace(path)
        templates.complete(template.directory)
        yield

    monkeypatch.setattr(templates, "locked", locked_after_another_made_it_anew)
    with templates.opened(template) as (memory, state):
        assert (os.pread(memory, 1, 0), os.read(state, 1)) == (b"n", b"n")  # QEMU reads the state from where it is


@pytest.mark.parametrize("part", templates.CHECKED)
@pytest.mark.parametrize("at", [0.0, 0.7, 1.0], ids=["first", "within", "last"])
def test_a_part_in_which_one_bit_has_changed_is_noticed(
    template: Template, launch: Launch, part: str, at: float
) -> None:
    flip(template.directory / part, at)
    assert templates.usable(template, launch)  # that looks at sizes alone
    with pytest.raises(DamagedError, match=f"{part} is damaged"), templates.opened(template):
        pytest.fail("it was opened")


def flip(path: Path, at: float) -> None:
    """Changes one bit of a file."""
    offset = int((path.stat().st_size - 1) * at)
    with path.open("r+b") as file:
        file.seek(offset)
        [value] = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1]))


def test_a_slow_disk_is_compared_by_its_size_only(
    template: Template, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "DISK_HASH_BYTES", 99)
    templates.complete(template.directory)
    flip(template.disk, 0)
    with templates.opened(template):
        template.disk.write_bytes(b"x" * 101)
    assert not templates.usable(template, launch)


@pytest.mark.parametrize("text", ["{", "[]", '{"memory": 1}', '{"memory": {"bytes": 2097152}}'])
def test_a_template_without_hashes_is_damaged(template: Template, launch: Launch, text: str) -> None:
    (template.directory / templates.RECORD).write_text(text)
    assert not templates.usable(template, launch)
    with pytest.raises(DamagedError, match=r"template\.json is damaged"), templates.opened(template):
        pytest.fail("it was opened")


def test_a_start_does_not_wait_while_a_template_is_remade(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "COPY_SECONDS", 0.2)
    with template.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        adding = threading.Thread(target=templates.add_holder, args=(template, os.getpid(), 0), daemon=True)
        adding.start()
        adding.join(BOUND_SECONDS)
        assert not adding.is_alive()
    assert not template.holders.exists()


def test_a_start_that_fails_keeps_what_another_is_making(template: Template) -> None:
    with template.lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        templates.discard(template)
        assert template.directory.exists()
    templates.discard(template)
    assert not template.directory.exists()


class GrowingState(dict[str, object]):
    """The answers of a QEMU that was taken over: its migration never ends, and its state grows."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def get(self, command: str, _default: object = None) -> object:
        """Answers a command."""
        if command == "query-migrate":
            os.truncate(self._state, templates.STATE_LIMIT_BYTES + 1)  # what is written need not take room
            return {"status": "active"}
        return {}


def test_a_qemu_that_writes_without_end_is_not_waited_for(tmp_path: Path) -> None:
    directory = tmp_path / "machine"
    directory.mkdir()
    too_large = pytest.raises(qemu.QMPError, match="takes more than 64 MiB")
    answers = GrowingState(directory / templates.STATE)
    with qmp.serving(directory, answers), qemu.QMP(directory) as connection, too_large:
        templates.write_state(connection, directory)


def test_a_remade_template_is_not_discarded_for_the_old_one(template: Template, image: Path, launch: Launch) -> None:
    old = templates.obtain(image, launch, pytest.fail)
    remove_tree(template.directory)
    put(template, launch)
    templates.discard(old)
    assert template.directory.exists()
    templates.discard(templates.obtain(image, launch, pytest.fail))
    assert not template.directory.exists()


def test_discarding_a_template_makes_no_directory(template: Template, image: Path) -> None:
    remove_tree(image.parent)
    templates.discard(template)
    assert not image.parent.exists()


def test_a_start_of_a_pruned_image_makes_no_directory(
    template: Template, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked_once_the_image_is_gone(*arguments: Any, **named: Any) -> contextlib.AbstractContextManager[None]:
        remove_tree(image.parent)
        return locked(*arguments, **named)

    monkeypatch.setattr(templates, "locked", locked_once_the_image_is_gone)
    with pytest.raises(FileNotFoundError), templates.opened(template):
        pytest.fail("it was opened")
    assert not image.parent.exists()


def test_a_failed_template_is_not_tried_again_at_once(
    image: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def make(*_: object) -> None:
        tries.append(1)
        raise qemu.QMPError("State blocked by a device")

    monkeypatch.setattr(templates, "_make", make)
    for _ in range(3):
        with pytest.raises(TemplateError, match="State blocked by a device"):
            templates.obtain(image, launch, lambda _: None)
    assert len(tries) == 1
    monkeypatch.setattr(templates, "FAILURE_SECONDS", 0)
    with pytest.raises(TemplateError):
        templates.obtain(image, launch, lambda _: None)
    assert len(tries) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("part", templates.PARTS)
def test_a_template_of_another_user_is_not_used(template: Template, launch: Launch, part: str) -> None:
    assert templates.usable(template, launch)
    os.chown(template.directory / part, 65534, 65534)
    assert not templates.usable(template, launch)
