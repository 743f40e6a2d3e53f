"""A machine's host key is read from a console that the kernel writes to as well."""

from __future__ import annotations

import pytest

from provisioner.clouds.aws.machines import host_key_in
from provisioner.ssh.keys import ed25519_key_pair

KEY = ed25519_key_pair().public
ECDSA = "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTY= root@host\r\n"
KERNEL = "[   12.345678] cloud-init[432]: a line of the kernel\r\n"


def console(printed: str) -> str:
    return f"boot\r\n-----BEGIN SSH HOST KEY KEYS-----\r\n{ECDSA}{printed}-----END SSH HOST KEY KEYS-----\r\nlogin: "


@pytest.mark.parametrize(
    ("printed", "key"),
    [
        (f"{KEY} root@host\r\n", KEY),
        (f"{KEY}\r\n", KEY),
        (f"{KERNEL}{KEY} root@host\r\n{KERNEL}", KEY),
        (f"{KEY[:40]}{KERNEL}{KEY[40:]} root@host\r\n", KEY),
        (f"{KEY[:40]}<6>a line of the kernel without its time\r\n{KEY[40:]} root@host\r\n", None),
        (f"{KEY[:-4]}\r\n", None),
        (f"{KEY}AAAA root@host\r\n", None),
        ("", None),
    ],
    ids=["whole", "without-comment", "between-kernel-lines", "cut-by-the-kernel", "cut-by-another", "short", "long",
         "missing"],
)  # fmt: skip
def test_only_a_whole_host_key_counts(printed: str, key: str | None) -> None:
    assert host_key_in(console(printed)) == key


def test_a_console_without_the_end_of_the_keys_is_read_again() -> None:
    assert host_key_in(console(f"{KEY} root@host\r\n").partition("-----END")[0]) is None
