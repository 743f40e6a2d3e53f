"""Refuses requests that AWS's own description of its API does not allow, where moto answers what it makes of them.

The description is botocore's: members, which of them are required, types, enumerations, lengths and patterns. From the
same description AWS generates its SDKs, that of Terraform's provider too. Codes of errors: Amazon EC2 API reference,
"Error codes"; API references of EventBridge Scheduler, IAM and Service Quotas, "Common Errors". What only the server
knows, such as which parameters go together, is in the modules beside this one.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ListShape, MapShape, OperationModel, ServiceModel, Shape, StructureShape

from tests.aws.rights.calls import Call

# IAM's prefix -> botocore's name. S3's requests are documents, which moto reads strictly enough.
SERVICES = {
    "ec2": "ec2", "iam": "iam", "sts": "sts", "scheduler": "scheduler", "servicequotas": "service-quotas",
    "cloudwatch": "cloudwatch",
}  # fmt: skip
_NUMBERS = re.compile(r"-?\d+")
_BOOLEANS = ("true", "false")
# Patterns of Java's regular expressions that Python's do not know stay unchecked.
_FOREIGN = re.compile(r"\\p\{|\[\[:")


@dataclass(frozen=True)
class Defect:
    """What is wrong with a request.

    Args:
        kind: `unknown`, `missing` or `value`.
        parameter: as AWS names it on the wire, such as `NetworkInterface.1.SubnetId`.
        value: the one that is not allowed.
    """

    kind: str
    parameter: str
    value: str = ""

    @property
    def text(self) -> str:
        """How AWS says it."""
        return {
            "unknown": f"The parameter {self.parameter} is not recognized",
            "missing": f"The request must contain the parameter {self.parameter}",
            "value": f"Value ({self.value}) for parameter {self.parameter} is invalid.",
            "action": f"The action {self.value} is not valid for this web service.",
        }[self.kind]

    def code(self, service: str) -> str:
        """Returns the code of AWS's error."""
        if self.kind == "action":
            return "InvalidAction"
        if service != "ec2":
            return "ValidationError" if service in ("iam", "sts") else "ValidationException"
        return {"unknown": "UnknownParameter", "missing": "MissingParameter", "value": "InvalidParameterValue"}[
            self.kind
        ]


def defect(call: Call, environ: Mapping[str, Any], body: bytes) -> Defect | None:
    """Returns the first thing that AWS would refuse a request for; None if there is none, or no model describes it."""
    if call.service not in SERVICES:
        return None
    operation = _operation(call.service, call.action)
    if operation is None:
        return Defect("action", "Action", call.action)
    protocol = operation.service_model.metadata["protocol"]
    if operation.input_shape is None:
        return None
    if protocol in ("ec2", "query"):
        given: Any = _nested(call.parameters)
    else:
        given = json.loads(body) if body else {}
    if protocol == "rest-json":
        given = _with_url(operation, environ, given)
    return next(_defects(operation.input_shape, given, "", protocol), None)


def _operation(service: str, action: str) -> OperationModel | None:
    model = _model(service)
    return model.operation_model(action) if action in model.operation_names else None


@cache
def _model(service: str) -> ServiceModel:
    """Reads a service's model, which takes long for EC2's: four megabytes of JSON."""
    return botocore.session.get_session().get_service_model(SERVICES[service])


def _nested(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Turns `A.1.B=x` into {"A": {"1": {"B": "x"}}}."""
    tree: dict[str, Any] = {}
    for key, value in parameters.items():
        if key == "Version":
            continue
        *path, last = key.split(".")
        node = tree
        for part in path:
            inner = node.setdefault(part, {})
            node = inner if isinstance(inner, dict) else {}
        node[last] = value
    return tree


def _with_url(operation: OperationModel, environ: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Adds to a document what a request of this kind says in its path and its query."""
    assert isinstance(operation.input_shape, StructureShape)
    query = {
        name: values if len(values) > 1 else values[0]
        for name, values in urllib.parse.parse_qs(environ.get("QUERY_STRING", "")).items()
    }
    names = re.findall(r"\{([^}+]+)\+?\}", operation.http["requestUri"])
    pattern = re.sub(r"\{[^}]+\}", "([^/]+)", operation.http["requestUri"].partition("?")[0])
    path = re.fullmatch(pattern, environ["PATH_INFO"])
    values = dict(zip(names, path.groups() if path else (), strict=False))
    return {**body, **query, **values}


def _wire_name(name: str, shape: Shape, protocol: str) -> str:
    """Returns the name of a member on the wire."""
    location = shape.serialization.get("name")
    if protocol == "ec2":
        query_name = shape.serialization.get("queryName")
        return str(query_name or (location[0].upper() + location[1:] if location else name))
    return str(location or name)


def _defects(shape: Shape, value: Any, path: str, protocol: str) -> Iterator[Defect]:
    if isinstance(shape, StructureShape):
        yield from _of_structure(shape, value, path, protocol)
    elif isinstance(shape, ListShape):
        yield from _of_list(shape, value, path, protocol)
    elif not isinstance(shape, MapShape) and not _is_scalar(shape, value):
        yield Defect("value", path, str(value))


def _of_structure(shape: StructureShape, value: Any, path: str, protocol: str) -> Iterator[Defect]:
    if not isinstance(value, dict):
        yield Defect("value", path, str(value))
        return
    members = {_wire_name(name, member, protocol): (name, member) for name, member in shape.members.items()}
    prefix = f"{path}." if path else ""
    for name in value:
        if name not in members:
            yield Defect("unknown", f"{prefix}{name}")
    for wire, (name, member) in members.items():
        if wire in value:
            yield from _defects(member, value[wire], f"{prefix}{wire}", protocol)
        # Clients make up a token where none is given, and the server takes a request without one.
        elif name in shape.required_members and not member.metadata.get("idempotencyToken"):
            yield Defect("missing", f"{prefix}{wire}")


def _of_list(shape: ListShape, value: Any, path: str, protocol: str) -> Iterator[Defect]:
    if protocol == "query" and isinstance(value, dict) and set(value) == {"member"}:
        value, path = value["member"], f"{path}.member"
    if protocol in ("ec2", "query"):
        if not isinstance(value, dict):
            if value != "":
                yield Defect("value", path, str(value))
            return
        items = value
    else:  # one value of a query may be a list
        items = {str(index): one for index, one in enumerate(value if isinstance(value, list) else [value])}
    if not _is_within(shape, len(items)):
        yield Defect("value", path, f"{len(items)} items")
    for number, item in items.items():
        if not number.isdigit():
            yield Defect("unknown", f"{path}.{number}")
            continue
        yield from _defects(shape.member, item, f"{path}.{number}", protocol)


def _is_scalar(shape: Shape, value: Any) -> bool:
    kind = shape.type_name
    if kind in ("integer", "long"):
        return bool(_NUMBERS.fullmatch(str(value))) and _is_within(shape, int(value))
    if kind == "boolean":
        return isinstance(value, bool) or value in _BOOLEANS
    if kind == "string":
        return isinstance(value, str) and _is_text(shape, value)
    return not isinstance(value, dict)


def _is_text(shape: Shape, value: str) -> bool:
    enumeration = getattr(shape, "enum", None)
    if enumeration:
        return value in enumeration
    pattern = shape.metadata.get("pattern")
    if pattern and not _FOREIGN.search(pattern) and not re.fullmatch(pattern, value):
        return False
    return _is_within(shape, len(value))


def _is_within(shape: Shape, size: int) -> bool:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    return (least is None or size >= least) and (most is None or size <= most)
