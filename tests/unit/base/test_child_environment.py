"""Which of the controller's environment variables reach which kind of child process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from provisioner.base import child_environment

SECRET_NAMES = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PROVISIONER_DATABASE", "PROVISIONER_HOME", "PGPASSWORD"),
    *("GITHUB_TOKEN", "ANTHROPIC_API_KEY", "SSH_AUTH_SOCK", "TF_VAR_environments", "LD_PRELOAD", "PYTHONSTARTUP"),
)
SECRETS = dict.fromkeys(SECRET_NAMES, "secret")
HARMLESS = {
    "PATH": "/bin",
    "LANG": "C.UTF-8",
    "LC_TIME": "C",
    "TMPDIR": "/var/tmp",
    "HOME": "/h",
    "TERM": "xterm",
    "https_proxy": "http://proxy:3128",
    "HTTPS_PROXY": "http://proxy:3128",
    "PYTHONPATH": "/p",
    "GOGC": "100",
    "SSL_CERT_FILE": "/ca.pem",
    "TF_CLI_CONFIG_FILE": "/rc",
    "TF_PLUGIN_CACHE_DIR": "/cache",
}
EVERYWHERE = {"PATH", "LANG", "LC_TIME", "TMPDIR"}
DOWNLOAD = EVERYWHERE | {"HOME", "https_proxy", "HTTPS_PROXY", "SSL_CERT_FILE"}


@pytest.mark.parametrize(
    ("select", "names"),
    [
        (child_environment.for_program, EVERYWHERE),
        (child_environment.for_python, EVERYWHERE | {"PYTHONPATH"}),
        (child_environment.for_download, DOWNLOAD),
        (child_environment.for_terminal, EVERYWHERE | {"HOME", "TERM"}),
    ],
    ids=["program", "python", "download", "terminal"],
)
def test_each_kind_gets_what_it_needs_and_no_secret(
    select: Callable[[Mapping[str, str]], dict[str, str]], names: set[str]
) -> None:
    selected = select(SECRETS | HARMLESS)
    assert set(selected) == names
    assert selected["PATH"] == "/bin"


def test_terraform_gets_its_own_clouds_variables_and_no_others() -> None:
    local = child_environment.for_terraform(SECRETS | HARMLESS, {})
    assert set(local) == DOWNLOAD | {"PYTHONPATH", "GOGC", "TF_CLI_CONFIG_FILE", "TF_PLUGIN_CACHE_DIR"}
    assert child_environment.for_terraform(SECRETS | HARMLESS, {"AWS_REGION": "x"}) == local | {"AWS_REGION": "x"}
