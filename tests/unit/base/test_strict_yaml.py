"""YAML that people write: what it says, and what is refused, by line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from provisioner.base.errors import TaskFamilyError, UsageError
from provisioner.base.strict_yaml import load, read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: 1", {"a": 1}),
        ("1: a\nno: b\n2024-01-01: c", {"1": "a", "no": "b", "2024-01-01": "c"}),
        ("a: {b: {1: c}}", {"a": {"b": {"1": "c"}}}),
        ("a: yes", {"a": True}),
        ("- &x [1]\n- *x", [[1], [1]]),
        ("base: &b {x: 1, y: 1}\nmine: {<<: *b, y: 2}", {"base": {"x": 1, "y": 1}, "mine": {"x": 1, "y": 2}}),
        ("a: &a {x: 1}\nb: &b {y: 2}\nc: {<<: [*a, *b]}", {"a": {"x": 1}, "b": {"y": 2}, "c": {"x": 1, "y": 2}}),
    ],
    ids=["empty", "mapping", "names", "deep", "flag", "alias", "merge", "merges"],
)
def test_a_document_says(text: str, value: object) -> None:
    assert load(text.encode(), "it") == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: 2\na: 3", r"in line 3: the key 'a' appears twice"),
        ("a:\n  1: x\n  1: y", r"in line 3: the key '1' appears twice"),
        ("? [a]\n: b", "a key must be a plain name"),
        ("? {a: b}\n: c", "a key must be a plain name"),
        ("a: [", "is not valid YAML in line"),
        ("a: *b", "is not valid YAML in line 1: found undefined alias"),
        ("a: !!python/name:os.system x", "could not determine a constructor"),
        ("a: !own x", "could not determine a constructor"),
        ("a: &a {b: *a}", "in line 1: found unconstructable recursive node"),
        ("a: &a [*a]", "in line 1: found unconstructable recursive node"),
        ("&a {b: *a}", "in line 1: found unconstructable recursive node"),
        ("&a [*a]", "in line 1: found unconstructable recursive node"),
        ("- 1\n- &a [[*a]]", "in line 2: found unconstructable recursive node"),
        ("- &a {b: [*a]}", "in line 1: found unconstructable recursive node"),
        ("!!set {a: &a [*a]}", "in line 1: found unconstructable recursive node"),
        ("a: 1\n---\nb: 2", "found another document"),
        ("a: 2024-99-99", "cannot be read as YAML"),
        ("[" * 5000, "is nested too deeply"),
        ("a: &a {x: 1}\nb: {<<: [" + "*a, " * 21 + "]}", "a merge has too many mappings"),
        ("ä: \x07", "has a character that YAML forbids: see character 3"),
    ],
    ids=["twice", "twice-deep", "list-key", "mapping-key", "open", "alias", "python", "tag", "circle", "list-circle",
         "root-circle", "root-list-circle", "deep-list-circle", "mapping-list-circle", "set-circle",
         "documents", "date", "deep", "merge", "control"],
)  # fmt: skip
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"^the file .*{says}") as caught:
        load(text.encode(), "the file")
    assert len(caught.value.message) < 400
    assert caught.value.message.isprintable()


def test_plain_text_is_no_truth_value_number_of_base_60_or_date() -> None:
    text = b"a: [yes, off, 22:22, 1:2.5, 2026-01-02, true, False, 12, 0.5]"
    assert load(text, "it", plain=True) == {"a": ["yes", "off", "22:22", "1:2.5", "2026-01-02", True, False, 12, 0.5]}
    assert load(text, "it") != load(text, "it", plain=True)


def test_a_file_is_read_up_to_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("suite.yaml")
    file.write_text("a: 1")
    assert read(file, "The file", 1 << 20) == {"a": 1}
    file.write_text("a: [")
    with pytest.raises(UsageError, match=f"^The file {tmp_path}/suite.yaml is not valid YAML in line 1"):
        read(file, "The file", 1 << 20)
    os.truncate(file, (1 << 20) + 1)
    with pytest.raises(UsageError, match=f"^The file {tmp_path}/suite.yaml is larger than 1 MiB"):
        read(file, "The file", 1 << 20)
    with pytest.raises(UsageError, match=f"^The file {tmp_path} cannot be read: Is a directory"):
        read(tmp_path, "The file", 1 << 20)


def test_a_merge_of_many_keys_is_refused() -> None:
    base = ", ".join(f"k{number}: 1" for number in range(1001))
    with pytest.raises(UsageError, match="a merge has too many keys"):
        load(f"a: &a {{{base}}}\nb: {{<<: *a}}".encode(), "it")


def test_bytes_that_are_no_text_are_told_with_what_to_do() -> None:
    with pytest.raises(UsageError) as caught:
        load(b"a: \xff", "it")
    assert caught.value.hint == "Save it as UTF-8."


def test_text_that_looks_like_an_alias_is_told_with_what_to_do() -> None:
    with pytest.raises(UsageError) as caught:
        load(b"a: **", "it")
    assert caught.value.hint == "Text that begins with * or & needs quotes."


def test_the_error_is_of_the_kind_that_was_asked_for() -> None:
    with pytest.raises(TaskFamilyError):
        load(b"[", "it", TaskFamilyError)
