"""Says how to log in to a machine: where, as whom, with which keys. Opens no connection; connection.py does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from provisioner.models import Endpoint


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
