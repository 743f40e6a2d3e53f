"""Redacts secret values in text for people or files. No protection against code that disguises them."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import NamedTuple
from urllib.parse import quote, quote_plus

MINIMUM_VALUE_CHARACTERS = 4
MINIMUM_LINE_CHARACTERS = 8

# The most that a stream holds back: a secret that overlaps itself ("aaaa") could otherwise stall it for ever.
_MAXIMUM_HELD_CHARACTERS = 64 << 10

# How many secrets are replaced in one text, and in one piece of a stream. Beyond that, text is left out: each costs
# microseconds, and its replacement may be longer than it was.
_MAXIMUM_SPANS = 100_000
_MAXIMUM_SPANS_OF_PIECE = 2000
LEFT_OUT = "[redacted: text that repeats secrets]"

# Where the middle of long output was cut out, here (ssh/output_buffer.py) or in a machine. The cut may have gone
# through a secret, and through a character, which was then replaced.
_CUT = re.compile(r"\[\.\.\. \d+ bytes cut out \.\.\.\]\n")
_CUT_MAXIMUM_CHARACTERS = 60
# A stream has one cut, or two. Forged ones must not cost time without end.
_MAXIMUM_CUTS = 100
_CUT_BEGINNING = re.compile(r"\[(?:\.(?:\.(?:\.(?: [ \dbytescutou.]*\]?)?)?)?)?\Z")
_REPLACED = "\N{REPLACEMENT CHARACTER}"


class _Span(NamedTuple):
    """A span of text to redact; `length` is that of the longest single form of a secret in it."""

    start: int
    end: int
    length: int
    name: str


class Redactor:
    """Replaces secret values by `[redacted:NAME]`: verbatim, line by line, and as JSON, repr, shell, URL and base64.

    Where the middle of long output was cut out, halves of secrets are replaced as well. Text that repeats secrets
    without end is left out.

    Args:
        variables: secret values by name. Values under MINIMUM_VALUE_CHARACTERS are ignored, since any text has them.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        names: dict[str, str] = {}
        for name, value in sorted(variables.items()):
            for form in _forms_of(value):
                names.setdefault(form, name)
        # Longest first: where two forms cover the same text, the longest one gives the name.
        self._forms = sorted(names.items(), key=lambda item: (-len(item[0]), item[0]))
        self._longest = len(self._forms[0][0]) if self._forms else 0

    def redact(self, text: str) -> str:
        """Returns a whole text with its secrets redacted. If they are more than 100,000, the rest is left out."""
        spans = list(islice(self._spans(text), _MAXIMUM_SPANS + 1))
        if len(spans) > _MAXIMUM_SPANS:
            return self._replace(text[: spans.pop().start], spans) + LEFT_OUT
        return self._replace(text, spans)

    def stream(self) -> RedactingStream:
        """Returns a redactor for one stream of text that arrives in chunks. Each stream needs its own."""
        return RedactingStream(self)

    def _split(self, text: str) -> tuple[str, str]:
        """Splits an unfinished text: returns the redacted part to show now, and the rest, which may begin a secret."""
        cut = min(self._first_beginning(text), self._first_half(text))
        spans = list(islice(self._spans(text), _MAXIMUM_SPANS_OF_PIECE + 1))
        if len(spans) > _MAXIMUM_SPANS_OF_PIECE and spans[-1].start < cut:
            return self._replace(text[: spans.pop().start], spans) + LEFT_OUT, text[self._not_inside(text, cut) :]
        for span in spans:
            if span.start < cut < span.end:
                # A secret that was cut would show its tail, so all of it waits, up to a bound.
                cut = span.start if len(text) - span.start <= _MAXIMUM_HELD_CHARACTERS else span.end
        return self._replace(text[:cut], [span for span in spans if span.end <= cut]), text[cut:]

    def _not_inside(self, text: str, cut: int) -> int:
        """Returns `cut`, or the start of the secret that `cut` would split."""
        begin = max(0, cut - self._longest)
        spans = ((begin + span.start, begin + span.end) for span in self._spans(text[begin:]))
        return next((start for start, end in spans if start < cut < end), cut)

    def _first_beginning(self, text: str) -> int:
        """Returns where the first form begins that the text's end cuts off, or the text's length if none does."""
        begins = (max(0, len(text) - len(form) + 1) for form, _ in self._forms)
        return min(
            (at + _beginning(form, text[at:]) for (form, _), at in zip(self._forms, begins, strict=True)),
            default=len(text),
        )

    def _first_half(self, text: str) -> int:
        """Returns where to wait because of a cut at the text's end: the half before it, or the half after it."""
        first = len(text)
        tail = max(0, first - self._longest - _CUT_MAXIMUM_CHARACTERS)
        for cut in islice(_CUT.finditer(text, tail), _MAXIMUM_CUTS):
            if cut.end() + self._longest > len(text):
                first = min(first, cut.start(), *(half.start for half in self._halves(text, cut)))
        beginning = _CUT_BEGINNING.search(text, max(0, len(text) - _CUT_MAXIMUM_CHARACTERS))
        end = beginning.start() if beginning else len(text)
        return min(first, end, *(half.start for half in self._halves_before(text, end)))

    def _halves(self, text: str, cut: re.Match[str]) -> Iterator[_Span]:
        """Yields the halves of secrets on both sides of a cut. A few characters alone reveal nothing."""
        yield from self._halves_before(text, cut.start())
        begin = cut.end()
        while text.startswith(_REPLACED, begin):
            begin += 1
        for form, name in self._forms:
            seen = text[begin : begin + len(form) - 1]
            size = len(seen) - _beginning(form[::-1], seen[::-1])
            if size >= MINIMUM_VALUE_CHARACTERS:
                yield _Span(cut.end(), begin + size, size, name)

    def _halves_before(self, text: str, cut: int) -> Iterator[_Span]:
        newline = cut - text.endswith("\n", 0, cut)
        end = len(text[:newline].rstrip(_REPLACED))
        for form, name in self._forms:
            seen = text[max(0, end - len(form) + 1) : end]
            size = len(seen) - _beginning(form, seen)
            if size >= MINIMUM_VALUE_CHARACTERS:
                yield _Span(end - size, newline, size, name)

    def _spans(self, text: str) -> Iterator[_Span]:
        """Yields all spans to replace, in order, with overlapping ones merged. Holds few at a time."""
        cuts = islice(_CUT.finditer(text), _MAXIMUM_CUTS)
        halves = sorted((half for cut in cuts for half in self._halves(text, cut)), key=attrgetter("start"))
        occurrences = (_occurrences(text, form, name) for form, name in self._forms if form in text)
        last: _Span | None = None
        for span in merge(halves, *occurrences, key=attrgetter("start")):
            if last and span.start < last.end:
                longer = last if last.length >= span.length else span
                last = _Span(last.start, max(last.end, span.end), longer.length, longer.name)
            else:
                if last:
                    yield last
                last = span
        if last:
            yield last

    @staticmethod
    def _replace(text: str, spans: list[_Span]) -> str:
        pieces: list[str] = []
        shown_until = 0
        for span in spans:
            pieces += [text[shown_until : span.start], f"[redacted:{span.name}]"]
            shown_until = span.end
        return "".join([*pieces, text[shown_until:]])


def _occurrences(text: str, form: str, name: str) -> Iterator[_Span]:
    """Yields where a form of a secret stands, in order."""
    size = len(form)
    at = text.find(form)
    while at >= 0:
        end = at + size
        # Merge overlapping occurrences at once, so that "aaaa" costs little in a megabyte of "a".
        while (overlapping := text.rfind(form, end - size + 1, end + size - 1)) >= 0:
            end = overlapping + size
        yield _Span(at, end, size, name)
        at = text.find(form, end)


def _beginning(form: str, text: str) -> int:
    """Returns where a form begins that the text's end cuts off, or the text's length if it does not."""
    at = text.find(form[0])
    while at >= 0 and not form.startswith(text[at:]):
        at = text.find(form[0], at + 1)
    return at if at >= 0 else len(text)


class RedactingStream:
    """Redacts one stream, including secrets that span its chunks. Created by Redactor.stream()."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._held = ""

    def feed(self, chunk: str) -> str:
        """Returns the text that may be shown now. Holds back an end that could begin a secret."""
        shown, self._held = self._redactor._split(self._held + chunk)
        return shown

    def flush(self) -> str:
        """Returns the text that was held back. To be called at the end of the stream."""
        held, self._held = self._held, ""
        return self._redactor.redact(held)


def _forms_of(value: str) -> Iterator[str]:
    for whole in (value, value.strip()):
        if len(whole.strip()) >= MINIMUM_VALUE_CHARACTERS:
            yield from _quoted_forms(whole)
            yield from _base64_forms(whole.encode("utf-8", "surrogatepass"))
    if len(lines := value.splitlines()) > 1:
        for line in lines:
            if len(line.strip()) >= MINIMUM_LINE_CHARACTERS:
                yield from _quoted_forms(line.strip())


def _quoted_forms(text: str) -> Iterator[str]:
    data = text.encode("utf-8", "surrogatepass")
    yield from (text, repr(text)[1:-1], shlex.quote(text).removeprefix("'").removesuffix("'"))
    yield from (json.dumps(text)[1:-1], plain := json.dumps(text, ensure_ascii=False)[1:-1])
    # Go's encoding/json, and so Terraform, escapes these, too.
    yield re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", plain)
    # They differ in what they leave unencoded: nothing, the slashes of paths, or as in form data.
    yield from (quote(data, safe=""), quote(data), quote_plus(data))


def _base64_forms(data: bytes) -> Iterator[str]:
    """Yields the value's own base64, and the text that the base64 of any longer value containing it must contain."""
    for altchars in (b"+/", b"-_"):
        padded = base64.b64encode(data, altchars).decode()
        yield from (padded, padded.rstrip("="))
        for offset in range(3):
            encoded = base64.b64encode(bytes(offset) + data, altchars).decode().rstrip("=")
            # The first and last characters also encode bits of the neighbouring bytes.
            inner = encoded[(0, 2, 3)[offset] : len(encoded) - (1 if (offset + len(data)) % 3 else 0)]
            if len(inner) >= MINIMUM_LINE_CHARACTERS:
                yield inner
