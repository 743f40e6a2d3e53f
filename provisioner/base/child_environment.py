"""Decides which environment variables each kind of child process gets: listed ones only. Pure; standard library only.

The controller's environment holds cloud credentials, a database's URL and perhaps secrets of tasks. Most child
processes parse what a hostile machine sends, or run for it. No program is started without one of these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Where programs and their libraries are, what language they speak, where they put temporary files.
COMMON = frozenset({"PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"})
COMMON_PREFIXES = ("LC_",)
# For downloads: the user's configuration, proxies as curl(1) and apt know them, and the certificates that are trusted.
DOWNLOADS = frozenset(
    {name for proxy in ("http_proxy", "https_proxy", "no_proxy", "all_proxy") for name in (proxy, proxy.upper())}
    | {"HOME", "SSL_CERT_FILE", "SSL_CERT_DIR", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "APT_CONFIG"}
)
# Terraform documentation, "Environment variables": not TF_VAR_*, TF_CLI_ARGS* and others that change our commands.
TERRAFORM = frozenset({"TF_CLI_CONFIG_FILE", "TF_PLUGIN_CACHE_DIR", "TF_PLUGIN_CACHE_MAY_BREAK_DEPENDENCY_LOCK_FILE"})
TERRAFORM_PREFIXES = ("TF_REGISTRY_",)
# How often Go collects garbage: a Terraform with a large provider is slow at the default.
GO = frozenset({"GOGC"})
# Files of other computers are no part of an eval, and there is no network for them. Nor is the user's Docker.
COMPOSE = {
    "COMPOSE_EXPERIMENTAL_GIT_REMOTE": "false",
    "COMPOSE_EXPERIMENTAL_OCI_REMOTE": "false",
    "DOCKER_CONFIG": "/nonexistent",
}
TERMINAL = frozenset({"HOME", "TERM", "COLORTERM", "USER", "LOGNAME", "SHELL"})


def for_program(ours: Mapping[str, str]) -> dict[str, str]:
    """Selects what a program gets that needs neither network nor credentials: QEMU, passt, qemu-img."""
    return _selected(ours, COMMON)


def for_python(ours: Mapping[str, str]) -> dict[str, str]:
    """Selects what our own programs get: what a program gets, and where the package is."""
    return _selected(ours, COMMON | {"PYTHONPATH"})


def for_download(ours: Mapping[str, str]) -> dict[str, str]:
    """Selects what programs get that fetch packages: proxies and certificates too."""
    return _selected(ours, COMMON | DOWNLOADS)


def for_terminal(ours: Mapping[str, str]) -> dict[str, str]:
    """Selects what OpenSSH's client gets, which speaks with a hostile machine: the terminal's kind, no agent."""
    return _selected(ours, COMMON | TERMINAL)


def for_compose(named: Mapping[str, str]) -> dict[str, str]:
    """Returns what Docker Compose gets: settings of its own, and the variables that a compose file names."""
    return {**named, **COMPOSE}


def for_terraform(ours: Mapping[str, str], clouds: Mapping[str, str]) -> dict[str, str]:
    """Selects what Terraform gets: settings of its own, what its provisioners need, and its cloud's variables.

    Args:
        ours: the controller's environment variables.
        clouds: what only this root's cloud's provider and state backend read.
    """
    named = COMMON | DOWNLOADS | TERRAFORM | GO | {"PYTHONPATH"}
    return _selected(ours, named, TERRAFORM_PREFIXES) | dict(clouds)


def _selected(ours: Mapping[str, str], names: frozenset[str], prefixes: Sequence[str] = ()) -> dict[str, str]:
    allowed = (*COMMON_PREFIXES, *prefixes)
    return {name: value for name, value in ours.items() if name in names or name.startswith(allowed)}
