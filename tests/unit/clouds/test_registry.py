from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.config import Settings
from provisioner.base.errors import UsageError
from provisioner.clouds.registry import CLOUDS, DEFAULT_CLOUD, Where, open_cloud
from provisioner.store.home import Home


def test_the_default_cloud_needs_no_place(tmp_path: Path) -> None:
    assert open_cloud(Home(tmp_path), Settings(), Where()).name == DEFAULT_CLOUD


@pytest.mark.parametrize("name", CLOUDS)
def test_a_cloud_is_registered_under_its_own_name(name: str, tmp_path: Path) -> None:
    where = Where(name, regions=("eu-west-1",) if CLOUDS[name].has_places else ())
    assert open_cloud(Home(tmp_path), Settings(), where).name == name


def test_an_unknown_cloud_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no cloud 'moon'") as caught:
        open_cloud(Home(tmp_path), Settings(), Where("moon"))
    assert caught.value.hint == "Known: aws, local."


@pytest.mark.parametrize(
    "where",
    [Where(regions=("eu-west-1",)), Where(spot=True)],
    ids=["region", "spot"],
)
def test_a_cloud_without_places_takes_none(where: Where, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="are for the cloud aws"):
        open_cloud(Home(tmp_path), Settings(), where)


def test_an_environments_record_says_where_it_is() -> None:
    placement = {"region": "eu-west-1", "zone": "eu-west-1a", "profile": "work", "state": ""}
    assert Where.of("aws", placement) == Where("aws", ("eu-west-1",), "work", state="")
    assert Where.of("local", {}) == Where("local")


def test_a_record_without_profile_and_state_is_a_place(tmp_path: Path) -> None:
    where = Where.of("aws", {"region": "eu-west-1", "profile": "", "state": ""})
    assert open_cloud(Home(tmp_path), Settings(), where).region == "eu-west-1"
