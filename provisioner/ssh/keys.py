"""Generates key pairs on the controller, says how to log in to a machine with them, and by which algorithms.

The cryptography library takes long to import and most commands generate no key, so functions import it when they
need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from provisioner.base.models import Endpoint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import PrivateFormat

# Only what cannot be broken. curve25519 is the cheapest for an emulated CPU; the others are for hardened images.
# GCM needs no MAC besides: with it, copies take half of paramiko's CPU time, and no more of an emulated machine's.
KEY_EXCHANGES = ("curve25519-sha256@libssh.org", "ecdh-sha2-nistp256", "diffie-hellman-group16-sha512")
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
MACS = ("hmac-sha2-256", "hmac-sha2-512", "hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com")


@dataclass(frozen=True)
class KeyPair:
    """Holds a key pair in OpenSSH's formats.

    Args:
        private: PEM text, newlines included.
        public: one line, `TYPE BASE64`.
    """

    private: str
    public: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def ed25519_key_pair() -> KeyPair:
    """Generates an Ed25519 pair, for a controller's key or a machine's host key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import PrivateFormat

    return _key_pair(Ed25519PrivateKey.generate(), PrivateFormat.OpenSSH)


def rsa_key_pair() -> KeyPair:
    """Generates an RSA pair in PEM, for the key that a task gets for its aux VM.

    Helper libraries of task families load that key with paramiko's RSAKey (Task Standard, VM_SSH_PRIVATE_KEY).
    """
    from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
    from cryptography.hazmat.primitives.serialization import PrivateFormat

    return _key_pair(generate_private_key(public_exponent=65537, key_size=3072), PrivateFormat.TraditionalOpenSSL)


def _key_pair(key: Ed25519PrivateKey | RSAPrivateKey, private_format: PrivateFormat) -> KeyPair:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PublicFormat

    private = key.private_bytes(Encoding.PEM, private_format, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return KeyPair(private.decode(), public.decode())


@dataclass(frozen=True)
class Login:
    """Names a user on a machine and the keys by which the two recognise each other.

    Args:
        endpoint: where sshd listens for the controller.
        user: the SSH user.
        private_key: path of an Ed25519 private key in OpenSSH form.
        host_key: the only host key that is accepted, `TYPE BASE64`.
        via: another machine, if the endpoint can be reached only from there.
        pidfile: locked by a process, if the endpoint can be reached only from that process's network.
    """

    endpoint: Endpoint
    user: str
    private_key: Path
    host_key: str
    via: Login | None = None
    pidfile: Path | None = None
