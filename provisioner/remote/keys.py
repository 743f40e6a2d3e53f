"""Generates key pairs on the controller with the cryptography library."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


@dataclass(frozen=True)
class KeyPair:
    """A key pair in OpenSSH's formats.

    Args:
        private: PEM text, newlines included.
        public: one line, `TYPE BASE64`.
    """

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def ed25519_key_pair() -> KeyPair:
    """Generates an Ed25519 pair, for the controller's keys and the machines' host keys."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return KeyPair(private.decode(), _public_line(key))


def rsa_key_pair() -> KeyPair:
    """Generates an RSA pair in PEM, for the key that a task gets for its aux VM.

    Helper libraries of task families load that key with paramiko's RSAKey (Task Standard, VM_SSH_PRIVATE_KEY).
    """
    key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return KeyPair(private.decode(), _public_line(key))


def _public_line(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
