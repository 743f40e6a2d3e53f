"""Tests the metadata service alone, over HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.aws.ec2.metadata import MetadataService, Options

pytestmark = pytest.mark.story

VALUES = {
    "meta-data/instance-id": b"i-1",
    "meta-data/public-keys/0=mine/openssh-key": b"ssh-ed25519 A",
    "meta-data/placement/region": b"eu-west-1",
    "user-data": b"\x00raw",
}


class Service:
    """A service whose options a test changes."""

    def __init__(self) -> None:
        self.options = Options(enabled=True, tokens_required=True)
        self.service = MetadataService(VALUES, lambda: self.options)

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.service.port}{path}", method=method)
        for name, value in headers.items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def token(self) -> str:
        status, body = self.ask("/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
        assert status == 200
        return body.decode()


@pytest.fixture
def service() -> Iterator[Service]:
    served = Service()
    yield served
    served.service.close()


def test_version_2_returns_values_and_listings_for_a_token(service: Service) -> None:
    token = service.token()
    ask = {
        path: service.ask(path, X_aws_ec2_metadata_token=token)
        for path in (
            "/latest/meta-data/instance-id",
            "/latest/meta-data/",
            "/latest/user-data",
            "/latest/meta-data/iam/",
        )
    }
    assert ask["/latest/meta-data/instance-id"] == (200, b"i-1")
    assert ask["/latest/meta-data/"] == (200, b"instance-id\nplacement/\npublic-keys/")
    assert ask["/latest/user-data"] == (200, b"\x00raw")
    assert ask["/latest/meta-data/iam/"][0] == 404


def test_a_request_without_a_token_fails_if_tokens_are_required(service: Service) -> None:
    assert service.ask("/latest/meta-data/instance-id") == (401, b"")
    assert service.ask("/latest/meta-data/instance-id", X_aws_ec2_metadata_token="made-up") == (401, b"")
    service.options = Options(enabled=True, tokens_required=False)
    assert service.ask("/latest/meta-data/instance-id") == (200, b"i-1")


def test_a_token_needs_a_lifetime_and_no_proxy(service: Service) -> None:
    assert service.ask("/latest/api/token", "PUT")[0] == 400
    headers = {"X_aws_ec2_metadata_token_ttl_seconds": "60", "X_Forwarded_For": "10.0.0.1"}
    assert service.ask("/latest/api/token", "PUT", **headers)[0] == 403


def test_a_disabled_service_forbids_everything(service: Service) -> None:
    token = service.token()
    service.options = Options(enabled=False, tokens_required=True)
    assert service.ask("/latest/meta-data/instance-id", X_aws_ec2_metadata_token=token) == (403, b"")
    assert service.ask("/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="60") == (403, b"")


def test_cloud_inits_metadata_versions_and_keys_are_served(
    service: Service,
) -> None:
    token = service.token()

    def ask(path: str) -> tuple[int, bytes]:
        return service.ask(path, X_aws_ec2_metadata_token=token)

    assert ask("/2021-03-23/meta-data/instance-id") == (200, b"i-1")
    assert ask("/2020-01-01/meta-data/instance-id")[0] == 404
    assert ask("/latest/meta-data/public-keys/") == (200, b"0=mine")
    assert ask("/latest/meta-data/public-keys/0/") == (200, b"openssh-key")
    assert ask("/2009-04-04/meta-data/public-keys/0/openssh-key") == (200, b"ssh-ed25519 A")
