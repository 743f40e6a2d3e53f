"""Tests that a base image gets only those of an operator's CA certificates that Debian lacks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from provisioner.clouds.guest_files import BASE_IMAGE

# Stands in for chroot, since the tree cannot run programs. Records its arguments.
CHROOT = """#!/bin/sh
tree=$1; shift
echo "$1" >> "$tree/called"
"""


def certificate(word: str, end: str = "\n") -> str:
    return end.join(["-----BEGIN CERTIFICATE-----", word, "-----END CERTIFICATE-----", ""])


@pytest.mark.parametrize(
    ("bundle", "extra"),
    [
        (certificate("known"), []),
        ("# a comment\n" + certificate("own") + certificate("known") + certificate("own"), [certificate("own")]),
        (certificate("known", "\r\n") + certificate("two"), [certificate("two")]),
    ],
)
def test_only_certificates_unknown_to_debian_are_added(tmp_path: Path, bundle: str, extra: list[str]) -> None:
    tree, guest, files = tmp_path / "tree", tmp_path / "guest", tmp_path / "files"
    for name in ("etc/ssl/certs", "etc/ssh", "etc/pam.d", "usr/lib"):
        (tree / name).mkdir(parents=True)
    for directory in (guest, files, tmp_path / "bin"):
        directory.mkdir(parents=True)
    (tree / "etc/ssl/certs/ca-certificates.crt").write_text(certificate("other") + certificate("known"))
    (tree / "etc/pam.d/sshd").touch()
    (guest / "metr_task_standard.py").touch()
    (tmp_path / "ca.pem").write_bytes(bundle.encode())
    (tmp_path / "bin/chroot").write_text(CHROOT)
    (tmp_path / "bin/chroot").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    script = [str(argument) for argument in (BASE_IMAGE / "common.sh", tree, files, guest, tmp_path / "ca.pem")]
    subprocess.run(["sh", *script], env={"PATH": path}, check=True)

    added = sorted((tree / "usr/local/share/ca-certificates/provisioner").iterdir())
    assert [path.read_text() for path in added] == extra
    called = tree / "called"
    assert ("update-ca-certificates" in (called.read_text() if called.exists() else "")) is bool(extra)
    assert "PIP_CERT=/etc/ssl/certs/ca-certificates.crt" in (tree / "etc/environment").read_text()
