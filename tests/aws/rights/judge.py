"""Refuses calls that the printed policy does not allow, in front of moto."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import boto3

from provisioner.clouds.aws.rights import policy
from provisioner.clouds.aws.setup import set_up
from tests.aws.errors import answer
from tests.aws.rights import calls
from tests.aws.rights.evaluator import allowed
from tests.aws.rights.requests import ACCOUNT, requests
from tests.aws.rights.world import MotoWorld

# The access key of tests that look around, or are somebody else. Its calls are not judged.
INSPECTOR = "inspector"
# Where the tests that keep Terraform's state in S3 keep it.
STATE = "s3://provisioner-tests-state/team"
_ANSWER = (
    b'<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error><Code>UnauthorizedOperation</Code>'
    b"<Message>The printed policy does not allow it.</Message></Error></Errors><RequestID>judge</RequestID></Response>"
)


def daily(state: str) -> dict[str, Any]:
    """Returns what a user may do who has both policies of daily work, as one."""
    both = [policy("launch", state), policy("manage", state)]
    return {**both[0], "Statement": [statement for document in both for statement in document["Statement"]]}


class Judge:
    """Judges calls.

    Attributes:
        refused: what the policy did not allow.
    """

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.keep_state_in(STATE)
        self._world = MotoWorld()

    def keep_state_in(self, state: str) -> None:
        """Judges from now on by the policy for another place of Terraform's state."""
        self._policy = daily(state)

    def refuses(self, environ: Mapping[str, Any], body: bytes) -> bool:
        """Returns whether the policy denies any of what IAM is asked about a call, and keeps what."""
        call = calls.read(environ, body)
        if call is None or call.key == INSPECTOR:
            return False
        if call.action == "DeleteKeyPair" and self._world.lacks_key_pair(
            call.region, call.parameters.get("KeyName", "")
        ):
            return False  # the SDK repeats a call whose answer was lost; what is gone has no tags to judge by
        denied = [request for request in requests(call, self._world) if not allowed(self._policy, request)]
        self.refused += [f"{call}: {request}" for request in denied]
        return bool(denied)


def refusal(start_response: Callable[..., Any], service: str) -> list[bytes]:
    """Answers as EC2 does to a call that it does not allow, or as CloudWatch does."""
    if service == "cloudwatch":
        return answer(start_response, "403 Forbidden", "AccessDeniedException", "Not allowed.", service)
    start_response("403 Forbidden", [("Content-Type", "text/xml"), ("Content-Length", str(len(_ANSWER)))])
    return [_ANSWER]


def inspector(url: str, service: str, region: str = "us-east-1") -> Any:
    """Returns a client whose calls are not judged."""
    return boto3.client(
        service, endpoint_url=url, region_name=region, aws_access_key_id=INSPECTOR, aws_secret_access_key="x"
    )


def administer(url: str) -> None:
    """Sets the account up, as an administrator does once."""
    set_up(inspector(url, "iam"), ACCOUNT)
