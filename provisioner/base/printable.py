"""Makes text of machines, families, records and clouds safe to show to people: on a terminal and in a spreadsheet.

Nothing that this module returns has an escape sequence, a control character other than the newline and the tab, or a
bidirectional or invisible character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

# Stands where the rest of a text was cut off.
CUT = " [...]"
# How much of one line first_and_last_lines() shows.
LINE_CHARACTERS = 400
# Control Sequence Introducer and what follows it (ECMA-48, 5.4): colours and the like, dropped whole for readability.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# The end of a piece that may continue as a sequence or as CR LF. The rest of a longer one is shown as text.
_UNFINISHED = re.compile(r"(?:\r|\x1b(?:\[[0-?]{0,32}[ -/]{0,8})?)\Z")
# What ends a line beside the newline, as str.splitlines() has it.
_LINE_ENDS = str.maketrans(dict.fromkeys("\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", "\n"))
# Text is taken apart in blocks: a string for each line of a whole log would cost twenty times the log.
_BLOCK_CHARACTERS = 64 << 10
_UNFINISHED_CHARACTERS = 64
_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# What ends a cell, in one spreadsheet or another: in many countries a comma is part of a number, and lists have `;`.
_SEPARATORS = ",;|\t\n"
# All that stands before a formula in the middle of a text and might begin a cell. Each character is looked at once.
_BEFORE_FORMULA = re.compile(rf'(?<![\s"{_SEPARATORS}])[\s"{_SEPARATORS}]++(?=[{re.escape("".join(_FORMULA))}])')


def printable(text: str) -> str:
    """Returns untrusted text as one line: its lines are joined by spaces, unprintable characters replaced."""
    return printable_lines(text).replace("\n", " ")


def printable_lines(text: str) -> str:
    """Returns untrusted text with its lines, each made printable."""
    return "".join(_clean_block(block) for block in _blocks(text)).removesuffix("\n")


def beginning(text: str, limit_characters: int) -> str:
    """Returns a text that is too long up to its limit, with a mark that says so."""
    return text if len(text) <= limit_characters else f"{text[: limit_characters - len(CUT)]}{CUT}"


def encodable(text: str) -> str:
    """Returns text with "?" in place of lone surrogates, which a model may write and UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def last_lines(text: str, limit_characters: int) -> str:
    """Returns the last whole lines of a text that is too long, below a mark that says so; the end of a longer line."""
    text = text.strip()
    if len(text) <= limit_characters:
        return text
    end = text[-limit_characters:]
    _, newline, lines = end.partition("\n")
    return f"{CUT.strip()}\n{lines if newline else end}"


def first_and_last_lines(text: str, first: int, last: int) -> str:
    """Returns the first and the last lines of a text that has more, with a mark between them; cuts long lines."""
    if len(text) > _BLOCK_CHARACTERS:
        half = _BLOCK_CHARACTERS // 2
        text = f"{text[:half]}\n{CUT.strip()}\n{text[-half:]}"
    lines = [beginning(line, LINE_CHARACTERS) for line in text.splitlines()]
    if len(lines) > first + last:
        lines[first:-last] = [CUT.strip()]
    return "\n".join(lines)


class PrintableStream:
    """Makes one stream of bytes printable while it arrives, in pieces of any size. Keeps its lines."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes) -> str:
        """Returns the text that may be shown now; holds back the beginning of a sequence or of a line's end."""
        text = self._held + self._decoder.decode(data)
        match = _UNFINISHED.search(text)
        self._held = match.group() if match else ""
        return _clean_block(text.removesuffix(self._held))

    def flush(self) -> str:
        """Returns what was held back. To be called at the end of the stream."""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return _clean_block(text)


def spreadsheet_cell(value: object) -> object:
    """Returns a value for a cell of a CSV file, in which no spreadsheet finds a formula, whatever separates its cells.

    Args:
        value: numbers and None are returned as they are. Text that begins like a formula, or with white space, which
            some spreadsheets skip, gets an apostrophe in front; so does what looks like a formula after a comma, a
            semicolon, a bar, a tab or a new line. Lists and mappings become JSON of such text.
    """
    if isinstance(value, dict | list):
        return json.dumps(_without_formulas(value))
    return _without_formulas(value)


def _without_formulas(value: object) -> object:
    if isinstance(value, list):
        return [_without_formulas(item) for item in value]
    if isinstance(value, dict):
        return {_without_formulas(key): _without_formulas(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    text = _BEFORE_FORMULA.sub(_marked, printable_lines(value))
    return f"'{text}" if text[:1].isspace() or text.startswith(_FORMULA) else text


def _blocks(text: str) -> Iterator[str]:
    """Splits a text where neither a sequence nor a line's end is cut in two."""
    begin = 0
    while begin < len(text):
        end = begin + _BLOCK_CHARACTERS
        if end < len(text) and (match := _UNFINISHED.search(text, end - _UNFINISHED_CHARACTERS, end)):
            end = match.start()
        yield text[begin:end]
        begin = end


def _marked(match: re.Match[str]) -> str:
    before = match.group()
    return f"{before}'" if any(separator in before for separator in _SEPARATORS) else before


def _clean_block(text: str) -> str:
    unified = text.replace("\r\n", "\n").translate(_LINE_ENDS)
    return "\n".join(_clean(line) for line in unified.split("\n"))


def _clean(line: str) -> str:
    """Replaces each character that is not printable by Unicode: categories C (control, format, surrogate) and Z."""
    if line.isprintable():
        return line
    plain = _SEQUENCE.sub("", line)
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in plain)
