"""Tests the seal of a directory: what it notices, and that nothing outside of the directory is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from provisioner.recording.manifest import MANIFEST, added, load, problems, seal
from provisioner.store.files import write_atomically

FACTS = {"family": "fam", "score": 1.0}


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    for name in ("agent.log", "calls.jsonl", "primary-link.pcap"):
        (directory / name).write_text(f"{name}\n")
    (directory / ".agent.log.temporary").touch()
    seal(directory, FACTS, write_atomically)
    return directory


def found(directory: Path) -> list[tuple[str, str]]:
    return problems(directory, load(directory))


def rewritten(directory: Path, **changes: Any) -> None:
    manifest = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps(manifest | changes))


def test_what_was_sealed_is_as_it_was(sealed: Path) -> None:
    manifest = load(sealed)
    assert [entry.name for entry in manifest.entries] == ["agent.log", "calls.jsonl", "primary-link.pcap"]
    assert manifest.facts == FACTS
    assert found(sealed) == []
    assert seal(sealed, FACTS, write_atomically) == manifest.head
    assert seal(sealed, {**FACTS, "score": 0.5}, write_atomically) != manifest.head


def test_every_altered_byte_of_every_file_is_noticed(sealed: Path) -> None:
    for path in sorted(sealed.glob("[a-z]*.[lp]*")):
        before = path.read_bytes()
        for at in range(len(before)):
            changed = bytearray(before)
            changed[at] ^= 1
            path.write_bytes(changed)
            assert found(sealed) == [(path.name, "its contents have changed")]
        path.write_bytes(before)


def test_every_altered_byte_of_the_manifest_is_noticed(sealed: Path) -> None:
    path, head = sealed / MANIFEST, load(sealed).head
    before = path.read_bytes()
    for at in range(len(before)):
        changed = bytearray(before)
        changed[at] ^= 1
        path.write_bytes(changed)
        try:
            manifest = load(sealed)
        except ValueError:
            continue
        # White space has no meaning: then all that it says is the same.
        assert problems(sealed, manifest) or manifest.head != head or before[at] in b" \n", at


def test_an_unnameable_file_does_not_prevent_the_seal(sealed: Path) -> None:
    (sealed / "agent.log~").touch()
    seal(sealed, FACTS, write_atomically)
    assert (found(sealed), "agent.log~" in added(sealed, load(sealed))) == ([], True)


def test_a_missing_and_a_longer_file_are_named(sealed: Path) -> None:
    (sealed / "agent.log").unlink()
    with (sealed / "calls.jsonl").open("a") as file:
        file.write("more")
    assert found(sealed) == [("agent.log", "it is missing"), ("calls.jsonl", "it has 16 bytes, not 12")]


def test_a_file_that_was_added_is_named(sealed: Path) -> None:
    (sealed / "more.log").touch()
    assert [name for name in added(sealed, load(sealed)) if not name.startswith(".")] == ["more.log"]


def test_entries_in_another_order_break_the_chain(sealed: Path) -> None:
    entries = json.loads((sealed / MANIFEST).read_text())["entries"]
    rewritten(sealed, entries=entries[::-1])
    assert (MANIFEST, "its chain of hashes is broken") in found(sealed)


def test_other_facts_break_the_chain(sealed: Path) -> None:
    rewritten(sealed, facts={**FACTS, "score": 0.0})
    assert found(sealed) == [(MANIFEST, "its chain of hashes is broken")]


def test_links_and_devices_in_a_files_place_are_not_read(sealed: Path) -> None:
    (sealed / "agent.log").unlink()
    (sealed / "agent.log").symlink_to("calls.jsonl")
    (sealed / "calls.jsonl").unlink()
    (sealed / "calls.jsonl").mkdir()
    assert [name for name, _ in found(sealed)] == ["agent.log", "calls.jsonl"]


def test_no_manifest_is_left_where_one_cannot_be_written(tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "agent.log").touch()
    with pytest.raises(OSError, match="No space"):
        seal(tmp_path, FACTS, fails)
    assert [path.name for path in tmp_path.iterdir()] == ["agent.log"]
