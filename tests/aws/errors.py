"""Answers with errors in the form of each of AWS's services."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_EC2 = (
    '<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error><Code>{code}</Code>'
    "<Message>{message}</Message></Error></Errors><RequestID>fault</RequestID></Response>"
)
_S3 = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
_QUERY = (
    "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"
)


def answer(
    start_response: Callable[..., Any], status: str, code: str, message: str, service: str = "ec2"
) -> list[bytes]:
    """Answers with an error, as a service does.

    Args:
        service: IAM's prefix.
    """
    headers = [("Content-Type", "text/xml")]
    if service == "ec2":
        body = _EC2.format(code=code, message=message)
    elif service in ("iam", "sts"):
        body = _QUERY.format(code=code, message=message)
    elif service == "s3":
        body = _S3.format(code=code, message=message)
    else:
        body = json.dumps({"__type": code, "message": message})
        headers = [("Content-Type", "application/json"), ("x-amzn-ErrorType", code)]
    start_response(status, [*headers, ("Content-Length", str(len(body.encode())))])
    return [body.encode()]


def session_ended(start_response: Callable[..., Any], service: str) -> list[bytes]:
    """Answers a request that was signed with the credentials of a session that has ended.

    EC2 API reference, "Error codes"; IAM and STS, "Common errors"; Amazon S3 API reference, "Error responses";
    EventBridge Scheduler API reference, "Common error types".
    """
    code = {"ec2": "RequestExpired", "scheduler": "ExpiredTokenException"}.get(service, "ExpiredToken")
    return answer(start_response, "400 Bad Request", code, "Request has expired.", service)
