"""AWS's API: clients, and errors in the operator's words. The only importer of boto3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError, ProfileNotFound
from botocore.parsers import ResponseParserError

from provisioner.errors import HostError, InfrastructureError, UsageError

REFUSED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
NO_LOGIN = (
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
)
LOGIN_HINT = (
    "Log in as for the AWS CLI (`aws configure`, `aws sso login`, AWS_PROFILE), then `provisioner doctor --cloud aws`."
)
RIGHTS_HINT = "`provisioner aws policy` prints the IAM policy with the rights that are needed."
# Bounded: what EC2 asks to be repeated later is repeated by boto3 so often, with growing pauses.
CONFIG = Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=10, read_timeout=60)


class Api:
    """Clients of one set of credentials, found as boto3 finds them.

    Args:
        profile: of the AWS configuration; None for boto3's own choice.
        region: None for what the configuration says.

    Raises:
        UsageError: no such profile, or no region.
    """

    def __init__(self, profile: str | None, region: str | None) -> None:
        try:
            self._session = boto3.Session(profile_name=profile or None, region_name=region or None)
        except ProfileNotFound as error:
            raise UsageError(str(error), hint="`aws configure list-profiles` shows them.") from error
        if not self._session.region_name:
            raise UsageError("No AWS region is set.", hint="Give --region (in a suite: regions), or set AWS_REGION.")
        self.region: str = self._session.region_name
        self.client = cache(self._client)

    def _client(self, service: str, region: str | None = None) -> Any:
        try:
            return self._session.client(service, region_name=region or self.region, config=CONFIG)
        except (NoRegionError, ValueError) as error:
            raise UsageError(f"AWS has no service {service} in {region or self.region}: {error}") from error


@contextlib.contextmanager
def asking(what: str) -> Iterator[None]:
    """Turns AWS's errors into ours.

    Args:
        what: what is asked, as in "Listing instances".

    Raises:
        HostError: no credentials, or credentials that AWS does not accept or that lack a right.
        InfrastructureError: any other failure.
    """
    try:
        yield
    except NoCredentialsError as error:
        raise HostError("No AWS credentials were found.", hint=LOGIN_HINT) from error
    except ClientError as error:
        code = code_of(error)
        message = f"{what} failed: {code}: {str(error.response['Error'].get('Message', ''))[:300]}"
        if code in REFUSED:
            raise HostError(message, hint=RIGHTS_HINT) from error
        if code in NO_LOGIN:
            raise HostError(message, hint=LOGIN_HINT) from error
        raise InfrastructureError(message) from error
    except (BotoCoreError, ResponseParserError) as error:  # the second: a proxy answered, or a broken server
        said = str(error).splitlines()[0][:300]
        raise InfrastructureError(f"{what} failed: {said}", hint="Can this machine reach AWS?") from error


def code_of(error: ClientError) -> str:
    """AWS's code of an error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def tags_of(tags: dict[str, str]) -> list[dict[str, str]]:
    """Tags as the API takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag(resource: Any, key: str) -> str:
    """The value of a tag in an answer of the API; empty where there is none."""
    return next((str(one["Value"]) for one in resource.get("Tags", []) if one["Key"] == key), "")


def tagged(key: str, *values: str) -> list[dict[str, Any]]:
    """Filters for what carries a tag with one of these values."""
    return [{"Name": f"tag:{key}", "Values": list(values)}]
