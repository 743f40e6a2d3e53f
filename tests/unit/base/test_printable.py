"""Text that is safe to show stays readable. What attackers try is in tests/attacks/test_terminal_words.py."""

from __future__ import annotations

import pytest

from provisioner.base.printable import (
    PrintableStream,
    beginning,
    first_and_last_lines,
    last_lines,
    printable,
    printable_lines,
    spreadsheet_cell,
)

ORDINARY = "naïve 日本語 🙂\tx = {}[]\\"


def test_ordinary_text_is_unchanged() -> None:
    assert printable(ORDINARY) == ORDINARY
    assert printable_lines(f"{ORDINARY}\n\n  {ORDINARY}\n") == f"{ORDINARY}\n\n  {ORDINARY}"


def test_colours_are_dropped_and_other_controls_are_marked() -> None:
    assert printable("\x1b[1;31mred\x1b[0m \x1b]0;x\x07") == "red \ufffd]0;x\ufffd"


def test_a_line_is_one_line() -> None:
    assert printable("a\r\nb\rc\u2028d") == "a b c d"


@pytest.mark.parametrize("piece", ["\r\n", "\x1b[1;31m", "x\u2028"], ids=["line-end", "colour", "separator"])
@pytest.mark.parametrize("shift", range(9))
def test_long_text_is_the_same_as_short_text(piece: str, shift: int) -> None:
    """It is taken apart in blocks, whose ends lie anywhere."""
    text = "." * shift + piece * 20_000
    shown = "." * shift + printable_lines(f"{piece}|").removesuffix("|") * 20_000
    assert printable_lines(text) == shown.removesuffix("\n")


def test_marking_takes_time_in_proportion_to_the_text() -> None:
    assert spreadsheet_cell("x" + "\n;" * 200_000) == "x" + "\n;" * 200_000


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_stream_in_pieces_is_the_same_as_in_one(size: int) -> None:
    text = f"{ORDINARY}\r\n\x1b[32mgreen\x1b[0m\rnext\n\n\x1b"
    stream, shown = PrintableStream(), ""
    for start in range(0, len(text.encode()), size):
        shown += stream.feed(text.encode()[start : start + size])
    assert shown + stream.flush() == f"{ORDINARY}\ngreen\nnext\n\n\ufffd"


def test_only_what_looks_like_a_formula_is_marked_in_a_cell() -> None:
    cells = [1.5, -2, None, True, "main", "a=b", "2024-01-01", "-1", "=x", "a; b, c = d", 'a;"=x', {"a": ["b;-1"]}]
    assert [spreadsheet_cell(value) for value in cells] == [
        1.5, -2, None, True, "main", "a=b", "2024-01-01", "'-1", "'=x", "a; b, c = d", "a;\"'=x",
        '{"a": ["b;\'-1"]}',
    ]  # fmt: skip


def test_a_text_that_is_cut_says_so() -> None:
    assert beginning("short", 20) == "short"
    assert beginning("x" * 30, 20) == "x" * 14 + " [...]"
    assert last_lines("one\ntwo\n", 20) == "one\ntwo"
    assert last_lines("the first line\nthe second\nthird\n", 20) == "[...]\nthe second\nthird"
    assert last_lines("x" * 30, 20) == "[...]\n" + "x" * 20
    assert first_and_last_lines("1\n2\n3\n4\n", 1, 3) == "1\n2\n3\n4"
    assert first_and_last_lines("1\n2\n3\n4\n5\n", 1, 3) == "1\n[...]\n3\n4\n5"
    huge = first_and_last_lines(f"first\n{'x' * 10**6}\n{'y' * 10**6}\nlast", 2, 2).splitlines()
    assert (huge[0], huge[2], huge[-1]) == ("first", "[...]", "last")
    assert max(map(len, huge)) == 400
