"""Makes clients of AWS's API, and turns its errors into the operator's language. The only importer of boto3."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    LoginError,
    MissingDependencyException,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from provisioner.base.errors import HostError, InfrastructureError, ThrottledError, UsageError
from provisioner.base.printable import beginning

REFUSED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
SESSION_ENDED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired")
NO_LOGIN = (
    *SESSION_ENDED, "AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException",
)  # fmt: skip
# What a region says of credentials that other regions accept.
CLOSED_REGION = ("AuthFailure", "InvalidClientTokenId", "OptInRequired", "UnrecognizedClientException")
# What boto3 finds is incomplete, has ended, or cannot be renewed without the operator.
LOGIN_ERRORS = (
    CredentialRetrievalError, LoginError, NoCredentialsError, PartialCredentialsError, SSOError, TokenRetrievalError,
)  # fmt: skip
LOGIN_HINT = (
    "Log in as for the AWS CLI (`aws login`, `aws sso login`, `aws configure`, AWS_PROFILE), then "
    "`provisioner doctor --cloud aws`."
)
INSTALL_HINT = "This installation is incomplete: install provisioner with all its dependencies again (`scripts/setup`)."
# EC2 shows new resources after some seconds, as a rule (EC2 API reference, "Eventual consistency").
SHOWN_SECONDS = 5.0
# EC2's, and those of the other services (EC2 API reference, "Error codes"; AWS SDKs and Tools, "Retry behavior").
THROTTLED = ("RequestLimitExceeded", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequestsException")
BUCKET_REGION = "x-amz-bucket-region"
ORGANIZATIONS = re.compile("(?:service|resource) control policy")
RIGHTS_HINT = "`provisioner aws policy launch` and `... manage` print the IAM policies with the rights that are needed."
# When EC2 asks for a request to be repeated later, boto3 repeats it this often, with growing pauses.
CONFIG = Config(retries={"mode": "standard", "max_attempts": 5}, connect_timeout=10, read_timeout=60)


class Api:
    """Clients for one set of credentials, which boto3 finds in its usual way.

    Args:
        profile: of the AWS configuration; None or empty for boto3's own choice.
        region: None or empty for AWS_REGION, or else the one in the configuration.

    Raises:
        UsageError: there is no such profile, or no region is set.
    """

    def __init__(self, profile: str | None, region: str | None) -> None:
        try:
            # Terraform and the other SDKs read AWS_REGION, boto3 does not (AWS SDKs and Tools, "AWS Region").
            known = region or os.environ.get("AWS_REGION") or None
            self._session = boto3.Session(profile_name=profile or None, region_name=known)
        except ProfileNotFound as error:
            raise UsageError(str(error), hint="`aws configure list-profiles` shows them.") from error
        if not self._session.region_name:
            raise UsageError(
                "No AWS region is set.", hint="Give one (in a suite: regions), or set AWS_REGION.", settings=("region",)
            )
        self._making = threading.Lock()
        self.profile = profile or ""
        self.region: str = self._session.region_name
        self.client = cache(self._client)

    def credentials(self) -> ReadOnlyCredentials:
        """Returns the credentials as they are now. boto3 renews those that end soon, if no user has to log in for it.

        Raises:
            HostError: there are none, or the operator has to log in again.
            InfrastructureError: they could not be renewed.
        """
        with asking("Looking for AWS credentials"):
            found = self._session.get_credentials()
            if found is None:
                raise NoCredentialsError
            return found.get_frozen_credentials()

    @property
    def renews(self) -> bool:
        """Whether boto3 renews the credentials by itself when their session ends."""
        return isinstance(self._session.get_credentials(), RefreshableCredentials)

    def _client(self, service: str, region: str | None = None) -> Any:
        try:
            with self._making:  # clients may be shared by threads, but not a session that makes them (boto3's guide)
                return self._session.client(service, region_name=region or self.region, config=CONFIG)
        except (NoRegionError, ValueError) as error:
            raise UsageError(f"AWS has no service {service} in {region or self.region}: {error}") from error


@contextlib.contextmanager
def asking(what: str, hint: str = RIGHTS_HINT) -> Iterator[None]:
    """Turns AWS's errors into ours while the block runs.

    Args:
        what: what the request does, as in "Listing instances".
        hint: what to do where the credentials lack a right.

    Raises:
        HostError: there are no credentials, or they have ended, AWS does not accept them, or they lack a right; or a
            package for them is missing.
        ThrottledError: AWS asks for fewer requests, even after boto3's repetitions.
        InfrastructureError: any other failure.
    """
    try:
        yield
    except NoCredentialsError as error:
        raise HostError("No AWS credentials were found.", hint=LOGIN_HINT) from error
    except (*LOGIN_ERRORS, MissingDependencyException) as error:
        text = beginning(" ".join(str(error).split()), 300)
        hint = INSTALL_HINT if isinstance(error, MissingDependencyException) else LOGIN_HINT
        raise HostError(f"{what} failed: AWS credentials: {text}", hint=hint) from error
    except ClientError as error:
        code = code_of(error)
        message = f"{what} failed: {code}: {beginning(str(error.response['Error'].get('Message', '')), 300)}"
        if code in REFUSED:
            raise HostError(message, hint=rights_hint(message, hint)) from error
        if code in NO_LOGIN:
            raise HostError(message, hint=LOGIN_HINT) from error
        if code in THROTTLED:
            raise ThrottledError(message) from error
        raise InfrastructureError(message) from error
    except (BotoCoreError, ResponseParserError) as error:  # the latter: a proxy or a broken server answered
        text = beginning(str(error).splitlines()[0], 300)
        raise InfrastructureError(f"{what} failed: {text}", hint="Can this machine reach AWS?") from error


def rights_hint(said: str, hint: str = RIGHTS_HINT) -> str:
    """Returns what to do where AWS refuses credentials, with the cause if that is a policy of the organization.

    Args:
        said: AWS's words (IAM user guide, "Troubleshoot access denied error messages").
        hint: what to do otherwise.
    """
    if found := ORGANIZATIONS.search(said):
        return f"A {found[0]} of the account's organization forbids it, which only its administrators can change."
    return hint


def code_of(error: ClientError) -> str:
    """Returns AWS's code of an error, such as `UnauthorizedOperation`."""
    return str(error.response.get("Error", {}).get("Code", ""))


def bucket_region(api: Api, bucket: str) -> str:
    """Returns the region of an S3 bucket.

    S3 names it even in its refusals (Amazon S3 API reference, "HeadBucket": x-amz-bucket-region).

    Raises:
        HostError: AWS does not accept the credentials.
        InfrastructureError: there is no such bucket, or S3 does not answer.
    """
    with asking(f"Looking for the bucket {bucket}"):
        try:
            answer = api.client("s3").head_bucket(Bucket=bucket)
        except ClientError as error:
            answer = error.response
            if BUCKET_REGION not in answer["ResponseMetadata"]["HTTPHeaders"]:
                raise
    return str(answer["ResponseMetadata"]["HTTPHeaders"][BUCKET_REGION])


def tags_of(tags: dict[str, str]) -> list[dict[str, str]]:
    """Returns tags in the form in which the API takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tag(resource: Any, key: str) -> str:
    """Returns the value of a resource's tag; empty if it has no such tag."""
    return next((str(pair["Value"]) for pair in resource.get("Tags", []) if pair["Key"] == key), "")


def tagged(key: str, *values: str) -> list[dict[str, Any]]:
    """Returns filters for resources that carry a tag with one of these values."""
    return [{"Name": f"tag:{key}", "Values": list(values)}]


# EC2 itself may take longer than this until it shows a change (EC2 developer guide, "Eventual consistency").
SECONDS = 10.0

T = TypeVar("T")


class AnswerCache:
    """Caches AWS's answers for some seconds. Threads with the same question wait for one request.

    Args:
        seconds: how long an answer counts.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._asking: defaultdict[Hashable, threading.Lock] = defaultdict(threading.Lock)
        self._answers: dict[Hashable, tuple[float, Any]] = {}

    def get(self, key: Hashable, ask: Callable[[], T]) -> T:
        """Returns the cached answer, or asks. A false answer, such as None, is not cached.

        Args:
            key: the question.
            ask: gets the answer; what it raises is raised, and nothing is kept.
        """
        with self._lock:
            asking = self._asking[key]
        with asking:
            at, kept = self._answers.get(key, (-self._seconds, None))
            if kept and time.monotonic() - at < self._seconds:
                value: T = kept
                return value
            answer = ask()
            if answer:
                self._answers[key] = (time.monotonic(), answer)
            return answer


HOME_TAG = "provisioner:home"
OWNER_TAG = "provisioner:owner"
ENVIRONMENT_TAG = "provisioner:environment"
CREATED_TAG = "provisioner:created-at"
# Only on instances and volumes, where it can be changed later.
EXPIRY_TAG = "provisioner:expires-at"
LEASE_TAG = "provisioner:lease-until"


def moment_of(text: str) -> datetime | None:
    """Reads a time that a tag holds; None if it is none, as anybody may write tags."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def timestamp(moment: datetime) -> str:
    """Formats a time as our tags hold it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
