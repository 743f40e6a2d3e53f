"""Tests the sources of settings and their precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base import config
from provisioner.base.config import checked, configuration_file, data_directory, load_settings
from provisioner.base.errors import UsageError


def environment(tmp_path: Path, **variables: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(tmp_path), **variables}


def configure(tmp_path: Path, text: str) -> None:
    path = configuration_file({"XDG_CONFIG_HOME": str(tmp_path)})
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_extra_certificates_are_those_of_ssl_cert_file(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("certificates")
    inherited = environment(tmp_path, SSL_CERT_FILE=str(bundle))
    assert load_settings(inherited).ca_bundle_path == bundle
    assert load_settings(environment(tmp_path)).ca_bundle_path is None
    assert load_settings(environment(tmp_path, SSL_CERT_FILE=str(tmp_path / "missing"))).ca_bundle_path is None
    configure(tmp_path, 'ca_bundle = ""\n')
    assert load_settings(inherited).ca_bundle_path is None
    assert load_settings(inherited | {"PROVISIONER_CA_BUNDLE": str(bundle)}).ca_bundle_path == bundle


def test_a_bundle_that_is_set_and_missing_is_bad_input(tmp_path: Path) -> None:
    settings = load_settings(environment(tmp_path, PROVISIONER_CA_BUNDLE=str(tmp_path / "missing.pem")))
    with pytest.raises(UsageError, match=r"missing\.pem is not a file"):
        _ = settings.ca_bundle_path
    nobody = load_settings(environment(tmp_path, PROVISIONER_CA_BUNDLE="~no-such-user/x.pem"))
    with pytest.raises(UsageError, match=r"~no-such-user/x\.pem is not a file"):
        _ = nobody.ca_bundle_path


@pytest.mark.parametrize("text", ["ca_bundel = 'x'", "ca_bundle = 3", "ca_bundle", "\0", "[ca_bundle]\nx = 1"])
def test_a_configuration_file_that_is_not_valid_is_named(tmp_path: Path, text: str) -> None:
    configure(tmp_path, text)
    with pytest.raises(UsageError, match=r"config\.toml"):
        load_settings(environment(tmp_path))


def test_time_limits_are_durations(tmp_path: Path) -> None:
    assert load_settings(environment(tmp_path)).time_limits.start_seconds == 3600
    configure(tmp_path, '[time_limits]\nstart = "3h"\nteardown = "90s"\n')
    limits = load_settings(environment(tmp_path)).time_limits
    assert (limits.start_seconds, limits.teardown_seconds, limits.score_seconds) == (10800, 90, 3600)


@pytest.mark.parametrize("limit", ['start = "soon"', 'start = "8d"', "start = 5", 'begin = "1h"'])
def test_a_time_limit_that_is_not_valid_is_named(tmp_path: Path, limit: str) -> None:
    configure(tmp_path, f"[time_limits]\n{limit}\n")
    with pytest.raises(UsageError, match=r"config\.toml is not valid:\n  - time_limits"):
        load_settings(environment(tmp_path))


def test_all_mistakes_are_named_with_what_was_meant(tmp_path: Path) -> None:
    configure(tmp_path, 'regions = "us-east-1"\n[budget]\nweek = 3\n[time_limits]\nstart = "3"\nteardwon = "1h"\n')
    with pytest.raises(UsageError) as caught:
        load_settings(environment(tmp_path))
    for words in (
        "regions: unknown key; perhaps region?",
        "budget.week: unknown key",
        "start: '3' is not a duration. Say the unit: 3h for hours",
        "teardwon: unknown key",
    ):
        assert words in caught.value.message
    assert caught.value.hint == "docs/reference/settings.md lists every setting."


def test_the_base_image_is_debian_12_by_default(tmp_path: Path) -> None:
    assert load_settings(environment(tmp_path)).base_image == "debian-12"
    configure(tmp_path, 'base_image = "debian-13"\n')
    assert load_settings(environment(tmp_path)).base_image == "debian-13"
    assert load_settings(environment(tmp_path, PROVISIONER_BASE_IMAGE="")).base_image == "debian-13"
    assert load_settings(environment(tmp_path, PROVISIONER_BASE_IMAGE="debian-12")).base_image == "debian-12"


def test_an_unknown_base_image_is_named_with_the_known(tmp_path: Path) -> None:
    known = "be 'debian-12' or 'debian-13'"
    with pytest.raises(UsageError, match=f"^PROVISIONER_BASE_IMAGE is not valid: Input should {known}$"):
        load_settings(environment(tmp_path, PROVISIONER_BASE_IMAGE="ubuntu-20.04-cuda"))
    configure(tmp_path, 'base_image = "debian"\n')
    with pytest.raises(UsageError, match=rf"config\.toml is not valid:\n  - base_image: must {known}, not 'debian'$"):
        load_settings(environment(tmp_path))


def test_in_a_checkout_they_lie_beside_the_package() -> None:
    assert (data_directory("templates") / "stack.tf.j2").is_file()
    assert (data_directory("terraform") / "local" / "environment" / "main.tf").is_file()


def test_what_was_installed_with_the_package_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_PACKAGE", tmp_path / "provisioner")
    assert data_directory("templates") == tmp_path / "templates"
    (tmp_path / "provisioner" / "_data" / "templates").mkdir(parents=True)
    assert data_directory("templates") == tmp_path / "provisioner" / "_data" / "templates"
    assert data_directory("terraform") == tmp_path / "terraform"


@pytest.mark.parametrize(
    "network", ["0.0.0.0/0", "10.0.0.0/7", "127.0.0.0/8", "169.254.0.0/16", "10.1.2.3/8", "office"]
)
def test_what_is_no_private_network_opens_none(network: str) -> None:
    with pytest.raises(UsageError, match="private_networks"):
        checked(private_networks=[network])
