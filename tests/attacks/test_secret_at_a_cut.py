"""A secret that straddles the place where long output was cut shows none of its halves.

The attacker is a task's code that prints much, with a secret at the right distance from the beginning or the end, so
that the bound on output, in the machine or on the controller, cuts through the secret.
"""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from provisioner.base.redaction import Redactor
from provisioner.driver.output_tee import OutputTee
from provisioner.ssh.exchange import BoundedBuffer

SECRETS = {
    "plain": "hunter2-0123456789abcdef",
    "umlauts": "schlüssel-äöü-äöü-äöü",
    "key": "-----BEGIN KEY-----\nMIIEpAIBAAKCAQEAx\nsecond-line-of-it\n-----END KEY-----",
}
FORMS = {"verbatim": str.encode, "base64": lambda secret: base64.b64encode(secret.encode())}


def cut(secret: bytes, inside: int) -> tuple[bytes, bytes]:
    """Returns output that was cut `inside` bytes after the secret's beginning, and as many before its end."""
    before, after = BoundedBuffer(200), BoundedBuffer(200)
    before.write(b"." * (100 - inside) + secret + b"." * 500)
    after.write(b"." * 500 + secret + b"." * (100 - inside))
    return before.value(), after.value()


def shows(text: str, secret: str) -> bool:
    """Returns whether a text holds six or more characters of the secret in a row."""
    return any(secret[at : at + 6] in text for at in range(len(secret) - 5))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SECRETS)
def test_neither_half_of_a_secret_is_shown(name: str, form: str) -> None:
    printed = FORMS[form](SECRETS[name])
    for inside in range(1, len(printed)):
        for output in cut(printed, inside):
            assert b"bytes cut out" in output
            text = Redactor({"TOKEN": SECRETS[name]}).redact(output.decode(errors="replace"))
            assert not shows(text, printed.decode()), (inside, text)


@pytest.mark.parametrize("piece", [1, 7, 90, 1000], ids=["byte", "few", "part", "whole"])
@pytest.mark.parametrize("name", SECRETS)
def test_neither_half_of_a_secret_is_shown_or_logged(tmp_path: Path, name: str, piece: int) -> None:
    """The machine's helper cuts output as well, and what it sends is shown as it arrives."""
    printed = SECRETS[name].encode()
    for inside in range(1, len(printed), 3):
        for number, output in enumerate(cut(printed, inside)):
            seen: list[str] = []
            log = tmp_path / f"{inside}-{number}.log"
            with OutputTee(Redactor({"TOKEN": SECRETS[name]}), seen.append, log) as tee:
                take = tee.stream()
                for at in range(0, len(output), piece):
                    take(output[at : at + piece])
            assert not shows("".join(seen), SECRETS[name]), (inside, seen)
            assert not shows(log.read_text(), SECRETS[name])
            assert "bytes cut out" in log.read_text()
