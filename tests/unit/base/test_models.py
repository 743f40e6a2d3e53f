"""Records: frozen, strict about keys and names, and the same after they were written and read."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from provisioner.base.models import (
    BuildStep,
    Destination,
    Endpoint,
    Environment,
    FileBuildStep,
    ScoreLogEntry,
    ShellBuildStep,
    TaskSetup,
    VMSpec,
)
from tests.unit.fakes.world import environment

AT = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_record_cannot_be_changed_and_has_no_unknown_keys() -> None:
    endpoint = Endpoint(host="h", port=1)
    with pytest.raises(ValidationError, match="frozen"):
        endpoint.port = 2  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Endpoint.model_validate({"host": "h", "port": 1, "user": "root"})


@pytest.mark.parametrize("score", [math.nan, None, 0.5], ids=["nan", "none", "number"])
def test_a_score_is_the_same_after_it_was_written(score: float | None) -> None:
    entry = ScoreLogEntry(score=score, scored_at=AT, elapsed_seconds=1, message={"a": [None]})
    read = ScoreLogEntry.model_validate_json(entry.model_dump_json())
    assert read.message == {"a": [None]}
    assert read.score == score or (score is not None and read.score is not None and math.isnan(read.score))


def test_an_environment_is_the_same_after_it_was_written() -> None:
    known = environment(
        roles=("primary", "aux"),
        endpoints={"aux": {"host": "h", "port": 22, "jump": "primary"}},
        allowed_destinations=[{"cidr": "192.0.2.7/32", "port": 443, "host_names": ["a"]}],
        usd_per_hour="0.10",
    )
    assert Environment.model_validate_json(known.model_dump_json()) == known


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", "${x}", "ä", "a\n"], ids=ascii)
@pytest.mark.parametrize("field", ["id", "stack"])
def test_a_name_that_is_no_file_name_is_refused(field: str, name: str) -> None:
    with pytest.raises(ValidationError, match="a name must consist of ASCII letters, digits, - and _"):
        Environment.model_validate({**environment().model_dump(), field: name})


@pytest.mark.parametrize(
    ("permissions", "online"), [((), False), (("full_internet",), True)], ids=["offline", "online"]
)
def test_only_the_permission_gives_the_internet(permissions: tuple[Any, ...], online: bool) -> None:
    assert TaskSetup(permissions=permissions).full_internet is online


@pytest.mark.parametrize("port", [0, 65536])
def test_a_destination_has_a_tcp_port(port: int) -> None:
    with pytest.raises(ValidationError):
        Destination(cidr="192.0.2.7/32", port=port)


def test_build_steps_are_told_apart_by_their_type() -> None:
    steps: tuple[BuildStep, ...] = (
        ShellBuildStep(type="shell", commands=("ls",)),
        FileBuildStep(type="file", source="a", destination="b"),
    )
    spec = VMSpec(cpu_count_range=(1, 1), ram_gib_range=(1, 1), build_steps=steps)
    assert VMSpec.model_validate_json(spec.model_dump_json()).build_steps == steps
    with pytest.raises(ValidationError):
        VMSpec.model_validate({**spec.model_dump(), "build_steps": [{"type": "ansible"}]})
