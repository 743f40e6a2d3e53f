"""Terraform works with the credentials that boto3 has found, as they are at each command."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from provisioner.clock import now
from provisioner.clouds.aws import credentials
from provisioner.clouds.aws.api import Api
from provisioner.errors import HostError
from provisioner.machines.create import create_machines
from provisioner.machines.destroy import destroy_machines
from tests.aws.account import NOTHING, Account, MakeEnvironment
from tests.aws.proxy import FaultyApi

# Each answer has another token, and ends so soon that boto3 asks anew each time.
PROGRAM = """
import json, pathlib, sys
told = pathlib.Path(sys.argv[1])
number = int(told.read_text()) + 1 if told.exists() else 1
told.write_text(str(number))
keys = {"AccessKeyId": "testing", "SecretAccessKey": "testing", "SessionToken": f"token-{number}"}
print(json.dumps({"Version": 1, **keys, "Expiration": sys.argv[2]}))
"""
SSO = """
[profile work]
sso_session = corporate
sso_account_id = 123456789012
sso_role_name = operator
[sso-session corporate]
sso_region = us-east-1
sso_start_url = https://corporate.example/start
"""
LOGIN = """
[profile work]
login_session = arn:aws:iam::123456789012:user/operator
"""


@pytest.fixture
def configured(account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns AWS's configuration file, from which alone credentials come."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws" / "config"


def test_terraform_gets_what_boto3_found_renewed_at_each_command_and_never_in_a_file(
    api: FaultyApi, account: Account, configured: Path, environment: MakeEnvironment, tmp_path: Path
) -> None:
    program, told = tmp_path / "process.py", tmp_path / "told"
    program.write_text(PROGRAM)
    ends = (now() + timedelta(minutes=5)).isoformat()
    configured.write_text(f"[profile work]\ncredential_process = {sys.executable} {program} {told} {ends}\n")
    session = account.session(profile="work")
    api.tokens.clear()
    [record] = create_machines(session, [environment(session, aux=False)])
    applied = _tokens_of_terraform(api)
    root = session.home.stacks / record.stack
    written = "".join(path.read_text(errors="replace") for path in root.rglob("*") if path.is_file())
    provider = json.loads((root / "provider.tf.json").read_text())["provider"]["aws"][0]
    api.tokens.clear()
    destroy_machines(session, record)
    destroyed = _tokens_of_terraform(api)
    assert applied
    assert destroyed
    assert not applied & destroyed
    assert "token-" not in written
    assert "profile" not in provider
    assert (
        "work" not in json.loads((root / "provider.tf.json").read_text())["provider"]["aws"][0].values()
        if root.exists()
        else True
    )
    assert account.everything() == NOTHING


def _tokens_of_terraform(api: FaultyApi) -> set[str]:
    return {token for agent, token in api.tokens if "Terraform" in agent or "HashiCorp" in agent}


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ("", "No AWS credentials were found"),
        ("[profile work]\naws_access_key_id = testing\n", "Partial credentials"),
        ("[profile work]\ncredential_process = false\n", "AWS credentials: Error when retrieving credentials"),
        (SSO, "AWS credentials: .*SSO"),
        (LOGIN, "AWS credentials: .*login"),
    ],
    ids=["none", "half", "process", "sso", "login"],
)
def test_credentials_that_only_a_person_can_renew_are_asked_for(
    configured: Path, configuration: str, message: str
) -> None:
    configured.write_text(configuration)
    api = Api("work" if configuration else None, "us-east-1")
    for ask in (api.credentials, lambda: credentials.terraform_variables(api, {})):
        with pytest.raises(HostError, match=message) as caught:
            ask()
        assert "aws login" in (caught.value.hint or "")


def test_terraform_looks_for_no_credentials_of_its_own(configured: Path) -> None:
    configured.write_text("[profile work]\naws_access_key_id = found\naws_secret_access_key = secret\n")
    ours = {
        "AWS_PROFILE": "other", "AWS_SESSION_TOKEN": "old", "AWS_ROLE_ARN": "arn", "AWS_CA_BUNDLE": "/ca",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1/", "AWS_ENDPOINT_URL": "http://x", "GITHUB_TOKEN": "x",
    }  # fmt: skip
    assert credentials.terraform_variables(Api("work", "us-east-1"), ours) == {
        "AWS_CA_BUNDLE": "/ca", "AWS_ENDPOINT_URL": "http://x",
        "AWS_ACCESS_KEY_ID": "found", "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip
