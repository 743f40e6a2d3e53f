"""Tests key pairs, and that commands which generate none do not import the library."""

from __future__ import annotations

import io
import subprocess
import sys

import paramiko

from provisioner.ssh.keys import KeyPair, ed25519_key_pair, rsa_key_pair

SLOW_LIBRARIES = ("cryptography", "paramiko")


def test_the_controllers_key_is_ed25519_in_openssh_form() -> None:
    pair = ed25519_key_pair()
    assert pair.private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    assert_belongs_together(pair, paramiko.Ed25519Key.from_private_key(io.StringIO(pair.private)))


def test_a_tasks_key_is_rsa_in_pem() -> None:
    pair = rsa_key_pair()
    assert pair.private.startswith("-----BEGIN RSA PRIVATE KEY-----\n")
    assert_belongs_together(pair, paramiko.RSAKey.from_private_key(io.StringIO(pair.private)))


def assert_belongs_together(pair: KeyPair, key: paramiko.PKey) -> None:
    assert pair.public == f"{key.get_name()} {key.get_base64()}"


def test_the_repr_of_a_pair_hides_its_private_key() -> None:
    assert repr(KeyPair("the private half", "ssh-ed25519 AAAA")) == "KeyPair(public='ssh-ed25519 AAAA')"


def test_the_record_store_imports_no_cryptography() -> None:
    program = f"import sys, provisioner.store.environments; print([m for m in {SLOW_LIBRARIES} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
