"""Tests that a builder is filled, searched for secrets, powered off and captured, and always destroyed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import BudgetError, ImageBuildError, MachineLostError, TerraformError
from provisioner.base.models import BaseImage
from provisioner.images import builder
from provisioner.images.builder import DEBUGGING, Builder, build, look_into
from provisioner.machines.connect import connect
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from provisioner.store.files import is_locked
from tests.unit.fakes.clock import WaitingClock
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.world import told_of

BUILDER = Builder(label="fam", base=BaseImage(role="primary"), image="base", disk_gib=16)


def nothing(*_: object) -> None:
    """Adds nothing to the builder."""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "image"
    path.mkdir()
    return path


def assert_nothing_is_left(session: Session, cloud: FakeCloud) -> None:
    assert cloud.existing() == []
    assert session.environments.all() == []
    assert session.ledger.entries(unsettled=True) == []


def test_a_builder_has_full_internet_and_is_recorded_as_one(session: Session, cloud: FakeCloud, image: Path) -> None:
    seen = []

    def fill(*_: object) -> str:
        seen.extend(session.environments.all())
        return "filled"

    assert build(session, BUILDER, "family-1", image, fill) == "filled"
    [record] = seen
    assert (record.kind, record.full_internet, record.task) == ("builder", True, None)
    assert record.machines["primary"].image == "base"
    assert (record.attended, record.expires_at - record.created_at) == (True, session.builder_ttl)
    assert (image / "disk.qcow2").read_text() == f"disk of {record.id} as family-1"
    assert_nothing_is_left(session, cloud)


def test_a_ctrl_c_as_its_destruction_begins_leaves_no_builder(session: Session, cloud: FakeCloud, image: Path) -> None:
    begun: list[int] = []

    @contextlib.contextmanager
    def shield() -> Iterator[None]:
        begun.append(1)
        if len(begun) == 1:
            raise KeyboardInterrupt("SIGINT")
        yield

    with pytest.raises(KeyboardInterrupt):
        build(replace(session, shield=shield), BUILDER, "family-1", image, nothing)
    assert_nothing_is_left(session, cloud)


def test_the_disk_is_not_captured_before_the_machine_is_off(
    session: Session, cloud: FakeCloud, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "POWER_OFF_SECONDS", -1.0)

    def fill(*_: object) -> None:
        cloud.guest().power_off = lambda: None  # it hangs

    with pytest.raises(MachineLostError, match="did not power off") as caught:
        build(session, BUILDER, "family-1", image, fill)
    assert "console line 19" in (caught.value.details or "")
    assert list(image.iterdir()) == []
    assert_nothing_is_left(session, cloud)


def test_a_builder_may_take_minutes_to_stop(
    session: Session, cloud: FakeCloud, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EC2 sometimes takes several minutes to stop an instance (EC2 user guide, "Troubleshoot stopping")."""

    def fill(*_: object) -> None:
        guest, off = cloud.guest(), cloud.guest().power_off
        guest.power_off = lambda: None
        monkeypatch.setattr(builder, "time", WaitingClock(lambda waited: off() if waited > 400 else None))

    build(session, BUILDER, "family-1", image, fill)
    assert (image / "disk.qcow2").exists()
    assert_nothing_is_left(session, cloud)


def test_a_secret_left_in_the_builder_prevents_the_image(session: Session, cloud: FakeCloud, image: Path) -> None:
    cloud.guest_defaults = {"secrets_left": ["/root/.netrc: TOKEN s3cret-value"]}
    expected = r"left secrets in the image: /root/\.netrc: TOKEN \[redacted:TOKEN\]"
    with pytest.raises(ImageBuildError, match=expected) as caught:
        build(session, BUILDER, "family-1", image, nothing)
    assert "Leave the file out of the family" in (caught.value.hint or "")
    assert "write the file in start()" in (caught.value.hint or "")
    assert list(image.iterdir()) == []
    assert_nothing_is_left(session, cloud)


def test_the_builders_key_is_removed_before_the_disk_is_captured(
    session: Session, cloud: FakeCloud, image: Path
) -> None:
    keys = []

    def fill(*_: object) -> None:
        [record] = session.environments.all()
        keys.append((cloud.guest(), session.environments.key(record.id, "controller").public))

    build(session, BUILDER, "family-1", image, fill)
    [(guest, key)] = keys
    assert guest.sealed_with == key


@pytest.mark.parametrize(
    ("guest", "says"),
    [({"seal_exit_code": 1}, "could not be removed from the image"), ({"cloud_init": (True, False)}, "cloud-init")],
    ids=["builder's key", "no cloud-init"],
)
def test_an_image_that_could_not_be_used_is_none(
    session: Session, cloud: FakeCloud, image: Path, guest: dict[str, Any], says: str
) -> None:
    cloud.guest_defaults = guest
    with pytest.raises(ImageBuildError, match=says):
        build(session, BUILDER, "family-1", image, nothing)
    assert list(image.iterdir()) == []
    assert_nothing_is_left(session, cloud)


@pytest.mark.parametrize(
    "guest",
    [{"cloud_init": (False,)}, {"secrets_left": ["/etc/passwd: A"]}],
    ids=["never had cloud-init", "a short value"],
)
def test_what_harms_no_image_ends_no_build(
    session: Session, cloud: FakeCloud, image: Path, guest: dict[str, Any]
) -> None:
    cloud.guest_defaults = guest
    build(replace(session, variables={"A": "short"}), BUILDER, "family-1", image, nothing)
    assert (image / "disk.qcow2").exists()


@pytest.mark.parametrize(
    "error", [ImageBuildError("No."), KeyboardInterrupt(), ValueError("ours")], ids=["build", "ctrl-c", "bug"]
)
def test_a_builder_is_destroyed_after_any_error(
    session: Session, cloud: FakeCloud, image: Path, error: BaseException
) -> None:
    def fill(*_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        build(session, BUILDER, "family-1", image, fill)
    assert list(image.iterdir()) == []
    assert_nothing_is_left(session, cloud)
    [logs] = session.home.archive.glob("build-fam-*/logs/console-primary.log")
    if isinstance(error, ImageBuildError):
        assert error.hint == f"provisioner logs {logs.parents[1].name} shows its full output. {DEBUGGING}"


def test_a_builder_that_does_not_come_up_is_destroyed(session: Session, cloud: FakeCloud, image: Path) -> None:
    cloud.faults.refuses_to_harden = True
    with pytest.raises(MachineLostError):
        build(session, BUILDER, "family-1", image, nothing)
    assert_nothing_is_left(session, cloud)


def test_a_builder_beyond_the_budget_is_not_launched(session: Session, cloud: FakeCloud, image: Path) -> None:
    cloud.usd = cloud.usd + 3
    poor = replace(session, spending=session.spending.model_copy(update={"budget": cloud.usd}))
    with pytest.raises(BudgetError):
        build(poor, BUILDER, "family-1", image, nothing)
    assert cloud.runs() == []


def test_looking_into_an_image_has_a_short_time_to_live(session: Session, cloud: FakeCloud) -> None:
    lives: list[timedelta] = []

    def read(*_: object) -> str:
        lives.extend(record.expires_at - record.created_at for record in session.environments.all())
        return "read"

    assert look_into(session, BUILDER, read) == "read"
    assert look_into(replace(session, builder_ttl=timedelta(minutes=5)), BUILDER, read) == "read"
    assert lives == [timedelta(minutes=20), timedelta(minutes=5)]
    assert_nothing_is_left(session, cloud)
    assert told_of(session).texts == []


def fails(*_: object) -> None:
    raise ImageBuildError("fam: install() raised ValueError", hint="Why.")


def test_a_failed_builder_is_kept_with_its_login_and_end(session: Session, cloud: FakeCloud, image: Path) -> None:
    with pytest.raises(ImageBuildError, match="install") as caught:
        build(replace(session, keep_builder=True), BUILDER, "family-1", image, fails)
    [record] = session.environments.all()
    assert (record.kind, record.status, record.attended) == ("builder", "ready", False)
    assert cloud.existing() == [f"{record.id}/primary"]
    assert not is_locked(session.environments.lease(record.id))
    [note] = [each for each in told_of(session).notes if each.startswith("Kept")]
    assert f"`provisioner ssh {record.id} --user root`" in note
    assert f"ends on its own at {record.expires_at:%H:%M:%S} UTC" in note
    assert (caught.value.hint or "").startswith(f"Why. provisioner logs {record.id}")
    assert list(image.iterdir()) == []
    with connect(session, record, "primary") as connection:
        assert connection.run(["sh", "-c", "sync"]).exit_code == 0
    destroy_machines(session, record)
    assert_nothing_is_left(session, cloud)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MachineLostError("The connection broke.")])
def test_a_builder_that_did_not_fail_in_the_family_is_destroyed(
    session: Session, cloud: FakeCloud, image: Path, error: BaseException
) -> None:
    def end(*_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        build(replace(session, keep_builder=True), BUILDER, "family-1", image, end)
    assert_nothing_is_left(session, cloud)


def test_a_builder_that_does_not_boot_is_not_kept(session: Session, cloud: FakeCloud, image: Path) -> None:
    cloud.terraform_fails()
    with pytest.raises(TerraformError):
        build(replace(session, keep_builder=True), BUILDER, "family-1", image, nothing)
    assert_nothing_is_left(session, cloud)


def test_a_build_that_succeeds_keeps_no_builder(session: Session, cloud: FakeCloud, image: Path) -> None:
    build(replace(session, keep_builder=True), BUILDER, "family-1", image, nothing)
    assert_nothing_is_left(session, cloud)
