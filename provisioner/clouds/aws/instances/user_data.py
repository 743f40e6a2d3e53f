"""Writes what cloud-init gets at a machine's first boot. Pure. Nothing in it is secret: the machine can read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from provisioner.clouds.guest_files import GUEST
from provisioner.models import Environment, Role
from provisioner.store.home import Home


def cloud_config(hostname: str, authorized_keys: Mapping[str, str], expires_at: datetime) -> str:
    """Returns user data for cloud-init, which also gives root the key pair's public key and creates new host keys.

    Args:
        hostname: the machine's name.
        authorized_keys: user -> lines of authorized_keys.
        expires_at: when the machine powers itself off, set at each boot before anything else.
    """
    program = (GUEST / "ttl.sh").read_text()
    files = [
        {"path": f"/etc/ssh/authorized_keys.d/{user}", "content": lines, "owner": "root:root", "permissions": "0644"}
        for user, lines in sorted(authorized_keys.items())
    ]
    settings = {
        "users": [],  # no vendor's user: our own scripts decide what users there are
        "disable_root": False,
        "ssh_pwauth": False,
        "ssh_deletekeys": True,
        "manage_etc_hosts": False,
        "hostname": hostname,
        "write_files": files,
        "bootcmd": [["sh", "-c", program, "ttl", str(int(expires_at.timestamp()))]],
    }
    # JSON is valid YAML.
    return "#cloud-config\n" + json.dumps(settings, indent=1) + "\n"


def path(home: Home, environment: Environment, role: Role) -> Path:
    """Returns where a machine's user data lies, in the environment's directory."""
    return home.environments / environment.id / f"user-data-{role}"
