"""Packages are read from dpkg's record; what a hostile machine puts there is left out or cut."""

from __future__ import annotations

from provisioner.store.images import MAXIMUM_PACKAGES, installed_packages

CURL = (
    b"Package: curl\nStatus: install ok installed\nArchitecture: amd64\nVersion: 7.88.1-10+deb12u8\n"
    b"Description: x\n y: z\n"
)


def test_installed_packages_are_listed_with_their_versions() -> None:
    removed = b"Package: wget\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    other = b"Version: 2:1.0~rc1\nPackage: libc6\nArchitecture: i386\nStatus: hold ok installed\n"
    assert installed_packages(CURL + b"\n" + removed + b"\n" + other) == (
        "curl:amd64=7.88.1-10+deb12u8", "libc6:i386=2:1.0~rc1",
    )  # fmt: skip


def test_what_is_no_package_is_left_out() -> None:
    for old, new in (
        (b"curl", b"\x1b]0;x\x07"),
        (b"curl", b"=1+1"),
        (b"7.88", b"<script>"),
        (b"amd64", b""),
        (b"curl", b"a" * 999),
    ):
        assert installed_packages(CURL.replace(old, new)) == ()
    assert installed_packages(b"\xff" * 1000) == ()
    assert installed_packages(b"") == ()


def test_a_list_without_end_is_cut() -> None:
    many = b"\n".join(CURL.replace(b"curl", b"p%d" % number) for number in range(200_000))
    assert len(installed_packages(many)) == MAXIMUM_PACKAGES
