"""Tests the kept proof of an environment's isolation: what it says, and that it never contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from provisioner.base.redaction import Redactor
from provisioner.recording import isolation
from provisioner.recording.isolation import Answer, clean, load
from tests.unit.recording.proofs import ENCLOSED, NEIGHBOUR, OPEN, REFUSED, SURFACE, proof, write


def test_a_proof_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = write(tmp_path, answers={"primary": (REFUSED, NEIGHBOUR), "aux": (REFUSED,)})
    assert load(tmp_path) == written


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "isolation proven: 1 probes, nothing reached"),
        (
            {"answers": {"primary": (REFUSED, NEIGHBOUR)}},
            "isolation proven: 2 probes, 1 reached as promised, nothing else",
        ),
        ({"proven": False, "problem": "It leaks."}, "isolation NOT proven: It leaks."),
        ({"proven": False, "answers": {}}, "isolation NOT proven: no machine was asked"),
        (
            {"proven": False, "canary": ("aux",)},
            "isolation NOT proven: aux machine: its word reached the controller's loopback",
        ),
    ],
    ids=["nothing", "neighbour", "problem", "unasked", "canary"],
)
def test_a_line_says_what_came_of_it(changes: dict[str, Any], line: str) -> None:
    assert proof(**changes).line() == line


@pytest.mark.parametrize(
    "seen",
    [
        {"problem": "It leaks."},
        {"answers": {}},
        {"answers": {"primary": ()}},
        {"answers": {"primary": (REFUSED.model_copy(update={"reached": True}),)}},
        {"answers": {"primary": (NEIGHBOUR.model_copy(update={"reached": False}),)}},
        {"answers": {"primary": (REFUSED.model_copy(update={"reached": None}),)}},
        {"canary": ("primary",)},
        {"canary": None},
        {"differences": ("a route more",)},
        {"differences": None},
        {"surface": {"primary": OPEN}},
        {"surface": {"aux": SURFACE.model_copy(update={"proxy_process": OPEN.qemu_process})}},
    ],
    ids=[
        "problem",
        "no-machine",
        "no-probe",
        "reached",
        "cut-off",
        "silent",
        "canary",
        "no-canary",
        "outside",
        "blind",
        "open",
        "open-proxy",
    ],
)
def test_nothing_counts_as_proven_that_was_not_seen_as_promised(seen: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it says proven true, and what was seen says otherwise"):
        proof(**seen)
    assert not proof(**seen, proven=False).proven


def test_what_machines_meet_is_among_the_sealed_facts_if_the_cloud_shows_it(tmp_path: Path) -> None:
    assert "surface" not in proof().facts()
    seen = {"primary": SURFACE.model_copy(update={"proxy_process": ENCLOSED, "passt": "2023"}), "aux": SURFACE}
    assert write(tmp_path, surface=seen) == load(tmp_path)
    assert load(tmp_path).facts()["surface"]["primary"]["proxy_process"]["uid"] == 1000


@pytest.mark.parametrize(
    ("name", "of_its_process"),
    [
        ("mount namespace", {"namespaces": ("pid",)}),
        ("PID namespace", {"namespaces": ("mnt",)}),
        ("seccomp", {"seccomp": 1}),
        ("privileges", {"no_new_privileges": False}),
        ("capabilities", {"capabilities": "00000000000000c0"}),
    ],
    ids=["mount", "pid", "seccomp", "privileges", "capabilities"],
)
def test_each_way_in_which_qemu_is_not_enclosed_is_named(name: str, of_its_process: dict[str, Any]) -> None:
    open_to = SURFACE.model_copy(update={"qemu_process": ENCLOSED.model_copy(update=of_its_process)})
    [difference] = isolation.differences_of({"primary": SURFACE, "aux": open_to})
    assert difference.startswith("aux machine: QEMU does not run ")
    assert name in difference


def test_two_answers_to_one_probe_are_refused() -> None:
    with pytest.raises(ValueError, match="two answers to one probe"):
        proof(answers={"primary": (REFUSED, REFUSED)})


def test_the_compact_form_is_complete_and_bounded() -> None:
    many = tuple(REFUSED.model_copy(update={"probe": f"tcp {number}", "reached": True}) for number in range(500))
    compact = proof(proven=False, answers={"primary": (*many, NEIGHBOUR)}, differences=None).compact()
    assert (compact["proven"], compact["probes_of"], compact["contradictions"]) == (False, {"primary": 501}, 500)
    assert compact["must_reach"] == ["neighbour 10.9.0.2"]
    assert compact["must_not_reach"][-2:] == [
        f"tcp {isolation.MOST_NAMES - 1}",
        f"and {500 - isolation.MOST_NAMES} more",
    ]
    assert compact["not_as_promised"][0] == "primary machine, as root: tcp 0: reached"
    assert len(compact["not_as_promised"]) == isolation.MOST_CONTRADICTIONS
    assert (compact["reached_canary"], compact["seen_from_outside"]) == ([], None)


def test_texts_have_no_secret_no_control_characters_and_an_end() -> None:
    text = clean("\x1b[31mit is s3cret-value\n" + "x" * 5000, Redactor({"TOKEN": "s3cret-value"}))
    assert text.startswith("it is [redacted:TOKEN] xxx")
    assert len(text) == isolation.TEXT_CHARACTERS


def test_the_longest_proof_can_be_read_back(tmp_path: Path) -> None:
    """Twenty machines with the longest allowlist, whose details cost the most bytes."""
    answers = tuple(
        Answer(
            user=user, probe=f"allowed {number} {'n' * 60}", expected=False, reached=False, detail="\U0001f600" * 100
        )
        for user in ("root", "agent")
        for number in range(290)
    )
    write(tmp_path, answers={f"m{number}": answers for number in range(isolation.MOST_MACHINES)})
    assert load(tmp_path).probes == 11_600
