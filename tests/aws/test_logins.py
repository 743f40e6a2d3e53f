"""Sessions of `aws login` and `aws sso login` are used, and renewed while they can be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from hashlib import sha1, sha256
from pathlib import Path
from typing import Any

import botocore.credentials
import botocore.tokens
import pytest

from provisioner.base.clock import now
from provisioner.base.errors import HostError
from provisioner.clouds.aws import stacks
from provisioner.clouds.aws.api import Api
from tests.aws.account import Account
from tests.aws.proxy import FaultyApi
from tests.aws.sign_in import ACCOUNT, LOGIN_CLIENT, ROLE, SSO_CLIENT, SSO_SECRET, SignIn, signing_in

SESSION = f"arn:aws:iam::{ACCOUNT}:user/operator"
START_URL = "https://corporate.example/start"
LOGIN = f"[profile work]\nlogin_session = {SESSION}\n"
SSO = f"""
[profile work]
sso_session = corporate
sso_account_id = {ACCOUNT}
sso_role_name = {ROLE}
[sso-session corporate]
sso_region = us-east-1
sso_start_url = {START_URL}
"""


class Logins:
    """What the AWS CLI leaves in an operator's home after a login.

    Args:
        directory: the home's `.aws`.
        service: where they have logged in.
    """

    def __init__(self, directory: Path, service: SignIn) -> None:
        self.directory, self.service = directory, service
        self.login_cache, self.sso_cache = directory / "login" / "cache", directory / "sso" / "cache"
        for cache in (self.login_cache, self.sso_cache):
            cache.mkdir(parents=True)

    def log_in(self, kind: str, ends: datetime) -> None:
        """Logs in by `login` or `sso`, with a session whose credentials or token end at a time."""
        (self.directory / "config").write_text({"login": LOGIN, "sso": SSO}[kind])
        path, token = {"login": self._login, "sso": self._sso}[kind](f"{ends:%Y-%m-%dT%H:%M:%SZ}")
        path.write_text(json.dumps(token))

    def _login(self, ends: str) -> tuple[Path, dict[str, Any]]:
        keys = {"accessKeyId": "ASIAcached", "secretAccessKey": "testing", "sessionToken": "login-cached"}
        return self.login_cache / f"{sha256(SESSION.encode()).hexdigest()}.json", {
            "accessToken": {**keys, "accountId": ACCOUNT, "expiresAt": ends},
            "tokenType": "aws_sigv4",
            "refreshToken": self.service.refresh_token("login"),
            "idToken": "unused",
            "clientId": LOGIN_CLIENT,
            "dpopKey": self.service.private_key,
        }

    def _sso(self, ends: str) -> tuple[Path, dict[str, Any]]:
        return self.sso_cache / f"{sha1(b'corporate').hexdigest()}.json", {
            "startUrl": START_URL,
            "region": "us-east-1",
            "accessToken": self.service.bearer_token(),
            "expiresAt": ends,
            "clientId": SSO_CLIENT,
            "clientSecret": SSO_SECRET,
            "registrationExpiresAt": f"{now() + timedelta(days=30):%Y-%m-%dT%H:%M:%SZ}",
            "refreshToken": self.service.refresh_token("sso"),
        }


@pytest.fixture
def logins(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Logins]:
    """Returns the logins of an operator who has no other credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with signing_in() as service:
        opened = Logins(tmp_path / ".aws", service)
        for name in ("SIGNIN", "SSO", "SSO_OIDC"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{name}", service.url)
        # botocore has looked up the home directory when it was imported.
        for provider in (botocore.credentials.SSOProvider, botocore.tokens.SSOTokenProvider):
            monkeypatch.setattr(provider, "_SSO_TOKEN_CACHE_DIR", str(opened.sso_cache))
        yield opened


def opened() -> Api:
    """Returns what a command that starts now works with."""
    return Api("work", "us-east-1")


def token_of(found: Api) -> str:
    """Returns the session token that Terraform gets."""
    variables = stacks.terraform_variables(found, {})
    assert variables["AWS_SECRET_ACCESS_KEY"] == "testing"
    return variables["AWS_SESSION_TOKEN"]


def test_a_session_of_aws_login_is_used_as_it_is(logins: Logins, api: FaultyApi) -> None:
    logins.log_in("login", now() + timedelta(hours=1))
    found = opened()
    assert token_of(found) == "login-cached"
    api.tokens.clear()
    found.client("sts").get_caller_identity()
    assert [token for _, token in api.tokens] == ["login-cached"]
    assert logins.service.renewed == 0


def test_an_aws_login_session_is_renewed_and_kept(logins: Logins) -> None:
    logins.log_in("login", now() - timedelta(hours=2))
    found = opened()
    assert token_of(found) == "login-session-1"
    # AWS's new credentials last for 15 minutes, and the controller runs for hours.
    ended = json.loads((path := next(logins.login_cache.iterdir())).read_text())
    assert ended["refreshToken"] == "login-refresh-1"
    assert token_of(opened()) == "login-session-1"
    ended["accessToken"]["expiresAt"] = f"{now():%Y-%m-%dT%H:%M:%SZ}"
    path.write_text(json.dumps(ended))
    assert token_of(opened()) == "login-session-2"
    assert logins.service.refusals == []


def test_a_running_controller_renews_its_aws_login_session(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.aws.sign_in.LOGIN_SECONDS", 300)  # boto3 renews what ends within ten minutes
    logins.log_in("login", now() - timedelta(hours=2))
    found = opened()
    assert [token_of(found) for _ in range(3)] == ["login-session-1", "login-session-2", "login-session-3"]
    assert logins.service.refusals == []


def test_a_session_of_aws_sso_login_is_used(logins: Logins, api: FaultyApi) -> None:
    logins.log_in("sso", now() + timedelta(hours=8))
    found = opened()
    assert token_of(found) == "sso-session-1"
    api.tokens.clear()
    found.client("sts").get_caller_identity()
    assert [token for _, token in api.tokens] == ["sso-session-1"]
    assert logins.service.refresh_token("sso") == "sso-refresh-0"


def test_a_session_of_aws_sso_login_that_ends_is_renewed(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.aws.sign_in.ROLE_SECONDS", 300)
    logins.log_in("sso", now() - timedelta(minutes=1))
    found = opened()
    # The token of the session is renewed once, and lasts; the role's credentials are fetched again.
    assert [token_of(found) for _ in range(3)] == ["sso-session-1", "sso-session-2", "sso-session-3"]
    assert json.loads(next(logins.sso_cache.iterdir()).read_text())["refreshToken"] == "sso-refresh-1"
    assert logins.service.refusals == []


@pytest.mark.parametrize("kind", ["login", "sso"])
def test_a_session_that_cannot_be_renewed_asks_for_a_login(logins: Logins, kind: str) -> None:
    logins.log_in(kind, now() - timedelta(hours=2))
    logins.service.ended = True
    with pytest.raises(HostError, match="AWS credentials: ") as caught:
        opened().credentials()
    assert "`aws login`" in (caught.value.hint or "")
    assert logins.service.refusals


def test_a_session_of_aws_login_needs_its_own_key(logins: Logins) -> None:
    with signing_in() as other:
        logins.service, own = other, logins.service
        logins.log_in("login", now() - timedelta(hours=2))
        logins.service = own
    with pytest.raises(Exception, match="DPoP"):
        opened().credentials()
    assert logins.service.renewed == 0


def test_a_missing_package_for_aws_login_is_reported(logins: Logins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(botocore.credentials, "EC", None)
    logins.log_in("login", now() + timedelta(hours=1))
    with pytest.raises(HostError, match="botocore\\[crt\\]") as caught:
        opened().credentials()
    # Another login would change nothing.
    assert "aws login" not in (caught.value.hint or "")
    assert "scripts/setup" in (caught.value.hint or "")
