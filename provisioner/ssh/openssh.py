"""Builds the command lines of OpenSSH's client, and lists the algorithms that are used with machines.

A command line has the key to log in with, the only host key to accept, and how to get to the machine.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from provisioner.ssh.keys import Login
from provisioner.ssh.namespaces import proxy_command

# Only what cannot be broken. curve25519 is the cheapest for an emulated CPU; the others are for hardened images.
# GCM needs no MAC besides: with it, copies take half of paramiko's CPU time, and no more of an emulated machine's.
KEY_EXCHANGES = ("curve25519-sha256@libssh.org", "ecdh-sha2-nistp256", "diffie-hellman-group16-sha512")
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
MACS = ("hmac-sha2-256", "hmac-sha2-512", "hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com")


def ssh_command(login: Login, known_hosts: Path, *more: str) -> list[str]:
    """Returns OpenSSH's arguments for a login, and writes the file with the only host key to accept.

    Args:
        known_hosts: the file, ENVIRONMENT/keys/known_hosts_ROLE.
        more: further arguments.
    """
    alias = f"{known_hosts.parent.parent.name}-{known_hosts.name.removeprefix('known_hosts_')}"
    _write(known_hosts, f"{alias} {login.host_key}\n")
    # OpenSSH expands % in the paths of files.
    key, hosts = (str(path).replace("%", "%%") for path in (login.private_key, known_hosts))
    argv = ["ssh", "-F", "none", "-i", key, "-p", str(login.endpoint.port)]
    options = [
        f"HostKeyAlias={alias}",
        f'UserKnownHostsFile="{hosts}"',
        "StrictHostKeyChecking=yes",
        # No other source of host keys, and no agent, whatever arguments follow.
        "GlobalKnownHostsFile=/dev/null",
        "KnownHostsCommand=none",
        "VerifyHostKeyDNS=no",
        "IdentityAgent=none",
        "IdentitiesOnly=yes",
        "LogLevel=ERROR",
    ]
    if login.via:
        through = ssh_command(login.via, known_hosts.with_name(f"{known_hosts.name}-jump"), "-W", "HOST:PORT")
        # OpenSSH expands % in the command, adds an "exec" and passes it to a shell.
        command = shlex.join(through).replace("%", "%%").replace("HOST:PORT", "%h:%p")
        options.append(f"ProxyCommand={command}")
    elif login.pidfile:
        connecting = proxy_command(login.pidfile, login.endpoint.host, login.endpoint.port)
        options += [f"ProxyCommand={shlex.join(connecting).replace('%', '%%')}", "ProxyUseFdpass=yes"]
    for option in options:
        argv += ["-o", option]
    return [*argv, *more, f"{login.user}@{login.endpoint.host}"]


def _write(path: Path, text: str) -> None:
    """Writes a file, unless another OpenSSH may be reading the same text from it now."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
