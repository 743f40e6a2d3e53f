"""Reads calls of AWS's API as they come over HTTP: service, action and parameters."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# SigV4: whose key, and for which region and service, is part of each request's signature.
_SCOPE = re.compile(r"Credential=([^/]+)/\d+/([a-z0-9-]+)/([a-z0-9-]+)/")
# Where IAM's prefix is not the name in a signature.
IAM_NAMES = {"monitoring": "cloudwatch"}
_SCHEDULES = {"POST": "CreateSchedule", "PUT": "UpdateSchedule", "GET": "GetSchedule", "DELETE": "DeleteSchedule"}
_GROUPS = {"POST": "CreateScheduleGroup", "GET": "GetScheduleGroup", "DELETE": "DeleteScheduleGroup"}
_OBJECTS = {"PUT": "PutObject", "GET": "GetObject", "HEAD": "GetObject", "DELETE": "DeleteObject"}
_BUCKETS = {"GET": "ListBucket", "HEAD": "ListBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}


@dataclass(frozen=True)
class Call:
    """One call.

    Args:
        service: IAM's prefix, such as `ec2`.
        action: such as `RunInstances`.
        parameters: as the query protocol names them, such as `SecurityGroupId.1`.
        region, key: from the signature; the key is the access key's id.
    """

    service: str
    action: str
    parameters: Mapping[str, str]
    region: str = "us-east-1"
    key: str = ""

    def __str__(self) -> str:
        return f"{self.service}:{self.action} {dict(self.parameters)}"


def read(environ: Mapping[str, Any], body: bytes) -> Call | None:
    """Reads a call; None if it is not signed."""
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    if scope is None:
        return None
    key, region, service = scope.groups()
    action, parameters = _read(service, environ["REQUEST_METHOD"], environ["PATH_INFO"], environ, body)
    return Call(IAM_NAMES.get(service, service), action, parameters, region, key)


def _read(
    service: str, method: str, path: str, environ: Mapping[str, Any], body: bytes
) -> tuple[str, Mapping[str, str]]:
    query = dict(urllib.parse.parse_qsl(environ.get("QUERY_STRING", "")))
    if service == "scheduler":
        return _schedule(method, path.strip("/").split("/"), query, body)
    if service == "s3":
        bucket, _, name = path.strip("/").partition("/")
        return (_OBJECTS if name else _BUCKETS)[method], {"Bucket": bucket, "Key": name}
    if target := environ.get("HTTP_X_AMZ_TARGET"):
        return target.rpartition(".")[2], {}
    form = dict(urllib.parse.parse_qsl(body.decode()))
    return form.pop("Action"), form


def _schedule(method: str, path: list[str], query: Mapping[str, str], body: bytes) -> tuple[str, Mapping[str, str]]:
    told = json.loads(body) if body else {}
    if path[0] == "schedule-groups":
        return (_GROUPS[method], {"Name": path[1]}) if len(path) > 1 else ("ListScheduleGroups", {})
    if path[0] == "tags":
        return "ListTagsForResource", {"ResourceArn": path[1]}
    if len(path) == 1:
        return "ListSchedules", {}
    group = told.get("GroupName") or query.get("groupName") or "default"
    role = told.get("Target", {}).get("RoleArn", "")
    return _SCHEDULES[method], {"Name": path[1], "GroupName": group, "RoleArn": role}
