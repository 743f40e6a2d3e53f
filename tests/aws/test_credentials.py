"""Terraform works with the credentials that boto3 has found, as they are at each command."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from provisioner.base.clock import now
from provisioner.base.errors import HostError, InfrastructureError, StillThereError
from provisioner.clouds.aws import stacks
from provisioner.clouds.aws.api import Api
from provisioner.machines.create import create_machines, create_shared_network
from provisioner.machines.destroy import destroy_machines
from provisioner.session import Session
from tests.aws.account import NOTHING, REGION, Account, MakeEnvironment
from tests.aws.proxy import Fault, FaultyApi, Request
from tests.aws.rights.judge import STATE

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


def test_terraform_gets_boto3s_credentials_and_no_file(
    api: FaultyApi, account: Account, configured: Path, environment: MakeEnvironment, tmp_path: Path
) -> None:
    session = _session_of_a_program(account, configured, tmp_path)
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


def test_an_apply_continues_with_renewed_credentials(
    api: FaultyApi, account: Account, configured: Path, environment: MakeEnvironment, tmp_path: Path
) -> None:
    session = _session_of_a_program(account, configured, tmp_path)
    ended = _end_sessions_at(api, "RunInstances")
    [record] = create_machines(session, [environment(session, aux=False)])
    assert ended
    assert any("session of the credentials has ended; trying again" in note for note in account.progress.notes)
    assert len(account.everything()["instances"]) == 1
    destroy_machines(session, record)
    assert account.everything() == NOTHING


def test_an_apply_whose_session_ends_is_not_repeated(
    api: FaultyApi, account: Account, configured: Path, environment: MakeEnvironment, tmp_path: Path
) -> None:
    account.client("s3").create_bucket(Bucket="provisioner-tests-state")
    local = _session_of_a_program(account, configured, tmp_path)
    create_shared_network(local, account.record(local, REGION))
    session = account.session(profile="work", state=STATE)
    _end_sessions_at(api, "RunInstances")
    record = environment(session, aux=False)
    with pytest.raises(InfrastructureError, match="session of the AWS credentials ended while it ran") as caught:
        create_machines(session, [record])
    assert "Try again" in (caught.value.hint or "")
    assert len([request for request in api.requests if request["Action"] == "RunInstances"]) == 1
    destroy_machines(session, session.environments.find(record.id))
    assert account.everything() == NOTHING


def test_an_apply_whose_session_is_over_asks_for_a_login(
    api: FaultyApi, account: Account, environment: MakeEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the only one")
    session = account.session()
    _end_sessions_at(api, "RunInstances")
    record = environment(session, aux=False)
    with pytest.raises(HostError, match=r"AWS said RequestExpired|AWS said ExpiredToken") as caught:
        create_machines(session, [record])
    assert "aws login" in (caught.value.hint or "")
    with pytest.raises(StillThereError, match="did not say whether anything remains") as left:
        destroy_machines(session, session.environments.find(record.id))
    assert "provisioner destroy" in (left.value.hint or "")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    again = account.session()
    destroy_machines(again, again.environments.find(record.id))
    assert account.everything() == NOTHING


def _session_of_a_program(account: Account, configured: Path, tmp_path: Path) -> Session:
    """Returns a session with the credentials of a program that renews them."""
    program, told = tmp_path / "process.py", tmp_path / "told"
    program.write_text(PROGRAM)
    ends = (now() + timedelta(minutes=5)).isoformat()
    configured.write_text(f"[profile work]\ncredential_process = {sys.executable} {program} {told} {ends}\n")
    return account.session(profile="work")


def _end_sessions_at(api: FaultyApi, action: str) -> set[str]:
    """Ends the session of which Terraform has credentials when it first asks for an action. Returns what has ended."""
    ended: set[str] = set()
    first = len(api.tokens)

    def end(_: Request) -> bool:
        if not ended:
            ended.update(_tokens_of_terraform(api, first))
            api.ended |= ended
        return False

    api.inject(Fault(action, "none", when=end))
    return ended


def _tokens_of_terraform(api: FaultyApi, first: int = 0) -> set[str]:
    return {token for agent, token in api.tokens[first:] if "Terraform" in agent or "HashiCorp" in agent}


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ("", "No AWS credentials were found"),
        ("[profile work]\naws_access_key_id = testing\n", "Partial credentials"),
        ("[profile work]\ncredential_process = false\n", "AWS credentials: Error when retrieving credentials"),
        (SSO, "AWS credentials: .*SSO"),
        (LOGIN, "AWS credentials: .*Please reauthenticate with 'aws login'"),
    ],
    ids=["none", "half", "process", "sso", "login"],
)
def test_credentials_that_only_a_person_can_renew_are_asked_for(
    configured: Path, configuration: str, message: str
) -> None:
    configured.write_text(configuration)
    api = Api("work" if configuration else None, "us-east-1")
    for ask in (api.credentials, lambda: stacks.terraform_variables(api, {})):
        with pytest.raises(HostError, match=message) as caught:
            ask()
        assert "aws login" in (caught.value.hint or "")


def test_terraform_looks_for_no_credentials_of_its_own(configured: Path) -> None:
    configured.write_text("[profile work]\naws_access_key_id = found\naws_secret_access_key = secret\n")
    ours = {
        "AWS_PROFILE": "other", "AWS_SESSION_TOKEN": "old", "AWS_ROLE_ARN": "arn", "AWS_CA_BUNDLE": "/ca",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1/", "AWS_ENDPOINT_URL": "http://x", "GITHUB_TOKEN": "x",
    }  # fmt: skip
    assert stacks.terraform_variables(Api("work", "us-east-1"), ours) == {
        "AWS_CA_BUNDLE": "/ca", "AWS_ENDPOINT_URL": "http://x",
        "AWS_ACCESS_KEY_ID": "found", "AWS_SECRET_ACCESS_KEY": "secret",
    }  # fmt: skip
