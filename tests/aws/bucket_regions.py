"""Sends requests for a bucket of another region away, as S3 does, where moto answers them from anywhere.

Amazon S3 user guide, "Making requests to an S3 bucket: request redirection"; API reference, "Error responses".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moto.s3.models import s3_backends

from tests.aws.rights.calls import Call
from tests.aws.rights.requests import ACCOUNT

_BODY = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>PermanentRedirect</Code><Message>The bucket you are '
    b"attempting to access must be addressed using the specified endpoint.</Message></Error>"
)


def region_of(call: Call | None) -> str:
    """Returns the region to which S3 would send a call; empty where the call is right, or not about a bucket."""
    if call is None or call.service != "s3" or not call.parameters["Bucket"]:
        return ""
    bucket = s3_backends[ACCOUNT]["aws"].buckets.get(call.parameters["Bucket"])
    region = str(bucket.region_name) if bucket else call.region
    return "" if region == call.region else region


def redirect(start_response: Callable[..., Any], method: str, region: str) -> list[bytes]:
    """Answers a call that came to the wrong region."""
    body = b"" if method == "HEAD" else _BODY
    headers = [("x-amz-bucket-region", region), ("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    start_response("301 Moved Permanently", headers)
    return [body]
