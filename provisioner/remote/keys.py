"""Key pairs, made on the controller with the cryptography library."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


@dataclass(frozen=True)
class KeyPair:
    """A key pair as OpenSSH writes it.

    Args:
        private: PEM text with its newlines.
        public: one line, `TYPE BASE64`.
    """

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def ed25519_key_pair() -> KeyPair:
    """A new Ed25519 pair: the controller's keys and the machines' host keys."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return KeyPair(private.decode(), _public_line(key))


def rsa_key_pair() -> KeyPair:
    """A new RSA pair in PEM: the key that a task gets for its aux VM.

    RSA, as helper libraries of task families load it with paramiko's RSAKey (Task Standard, VM_SSH_PRIVATE_KEY).
    """
    key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return KeyPair(private.decode(), _public_line(key))


def _public_line(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> str:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
