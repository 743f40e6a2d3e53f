from __future__ import annotations

import base64
import json
import shlex
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from provisioner.base.redaction import LEFT_OUT, Redactor

SECRET = "p@ss 'w\"rd\\/é+?<&"
KEY = "-----BEGIN A KEY-----\nMIIEowIBAAKCAQEAx+/7\nshort\nKzq9fQ2aVb81LmN0pQ==\n-----END A KEY-----\n"

FORMS = {
    "itself": SECRET,
    "JSON": json.dumps(SECRET),
    "JSON in Unicode": json.dumps(SECRET, ensure_ascii=False),
    "Go's JSON": json.dumps(SECRET, ensure_ascii=False).replace("<", "\\u003c").replace("&", "\\u0026"),
    "repr": repr(SECRET),
    "shell": shlex.quote(SECRET),
    "URL": quote(SECRET, safe=""),
    "a URL's path": quote(SECRET),
    "a form": quote_plus(SECRET),
    "base64": base64.b64encode(SECRET.encode()).decode(),
    "URL-safe base64": base64.urlsafe_b64encode(SECRET.encode()).decode(),
    "base64 without padding": base64.b64encode(SECRET.encode()).decode().rstrip("="),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_secret_is_found_as(name: str) -> None:
    redacted = Redactor({"PASSWORD": SECRET}).redact(f"before {FORMS[name]} after")
    assert redacted.replace('"', "").replace("'", "") == "before [redacted:PASSWORD] after"


@pytest.mark.parametrize("before", ["", "u", "us", "user:"])
def test_a_secret_in_base64_is_found_at_every_offset(before: str) -> None:
    whole = base64.b64encode(f"{before}correct horse battery staple!!".encode()).decode()
    redacted = Redactor({"P": "correct horse battery staple"}).redact(whole)
    assert "[redacted:P]" in redacted
    # Of the 38 characters that encode bits of the secret, only those shared with neighbouring bytes may remain.
    assert len(redacted.replace("[redacted:P]", "")) <= len(whole) - 36


def test_a_key_is_found_whole_and_line_by_line() -> None:
    redactor = Redactor({"KEY": KEY})
    assert redactor.redact(f"a {KEY} b") == "a [redacted:KEY] b"
    assert redactor.redact("line 2: MIIEowIBAAKCAQEAx+/7\r\n") == "line 2: [redacted:KEY]\r\n"
    assert redactor.redact("a short line") == "a short line"


def test_values_of_under_four_characters_are_left_alone() -> None:
    assert Redactor({"A": "abc", "B": "", "C": "    "}).redact("abc    ") == "abc    "


def test_the_longest_secret_gives_the_name() -> None:
    assert Redactor({"SHORT": "token", "LONG": "token-and-more"}).redact("token-and-more token") == (
        "[redacted:LONG] [redacted:SHORT]"
    )
    assert Redactor({"A": "abcdef", "B": "defghijk"}).redact("abcdefghijk") == "[redacted:B]"


def test_a_secret_across_chunks_is_found() -> None:
    stream = Redactor({"A": "secret"}).stream()
    assert stream.feed("hello\n") == "hello\n"
    assert [stream.feed(chunk) for chunk in ("a se", "cr", "et b")] == ["a ", "", "[redacted:A] b"]
    assert stream.feed("secr") == ""
    assert stream.flush() == "secr"


def test_streams_of_one_redactor_do_not_mix() -> None:
    redactor = Redactor({"A": "secret"})
    first, other = redactor.stream(), redactor.stream()
    assert (first.feed("sec"), other.feed("ret"), first.flush()) == ("", "ret", "sec")


@given(
    st.lists(st.text("abc", min_size=4, max_size=7), min_size=1, max_size=3),
    st.lists(st.text("abcd", max_size=9), max_size=9),
)
@example(["aaaa"], ["aaa", "aaa", "baaa", "a"])
def test_a_stream_is_redacted_as_the_whole_text_is(values: list[str], chunks: list[str]) -> None:
    redactor = Redactor({f"N{number}": value for number, value in enumerate(values)})
    stream = redactor.stream()
    streamed = "".join([*(stream.feed(chunk) for chunk in chunks), stream.flush()])
    assert streamed == redactor.redact("".join(chunks))


@given(st.text(min_size=4, max_size=30).filter(lambda value: len(value.strip()) >= 4), st.text(), st.text())
def test_no_text_keeps_a_secret(value: str, before: str, after: str) -> None:
    redacted = Redactor({"N": value}).redact(f"{before}{value}{after}")
    assert value not in redacted.replace("[redacted:N]", "\0") or "\0" in value


def test_megabytes_of_a_repeated_secret_are_redacted() -> None:
    """Work that grew with the square of the length would never end."""
    redactor = Redactor({"KEY": KEY, "A": "aaaa"})
    assert redactor.redact("a" * (4 << 20)) == "[redacted:A]"
    stream = redactor.stream()
    streamed = [stream.feed("a" * 65536) for _ in range(64)]
    assert set("".join([*streamed, stream.flush()]).split("]")) == {"[redacted:A", ""}


def test_text_that_repeats_secrets_without_end_is_left_out() -> None:
    redacted = Redactor({"A": "s3cr"}).redact("begin " + "s3cr " * 1_000_000 + "end")
    assert redacted.startswith("begin [redacted:A] [redacted:A] ")
    assert redacted.endswith(f"[redacted:A] {LEFT_OUT}")
    assert len(redacted) < 2_000_000


@pytest.mark.parametrize("size", [60_000, 60_001, 60_003])
def test_a_piece_that_repeats_a_secret_is_left_out(size: int) -> None:
    stream = Redactor({"A": "s3cr", "B": "r-s3crs3"}).stream()
    text = "begin " + "s3cr" * 100_000
    pieces = [*(text[at : at + size] for at in range(0, len(text), size)), " end"]
    shown = "".join([*map(stream.feed, pieces), stream.flush()])
    assert LEFT_OUT in shown
    assert shown.replace(LEFT_OUT, "").replace("[redacted:A]", "") == "begin  end"
