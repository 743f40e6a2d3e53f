"""Says how to log in to a machine: where, as whom, with which keys. Opens no connection; ssh.py does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from provisioner.models import Endpoint


@dataclass(frozen=True)
class Login:
    """A user on a machine, and how to prove who both are.

    Args:
        endpoint: where sshd listens for the controller.
        user: the SSH user.
        private_key: path of an Ed25519 private key in OpenSSH form.
        host_key: the only host key that is accepted, `TYPE BASE64`.
        via: another machine, from which alone the endpoint can be reached.
    """

    endpoint: Endpoint
    user: str
    private_key: Path
    host_key: str
    via: Login | None = None
