"""Says what IAM is asked before AWS obeys a call: an action on each resource, with the values of condition keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tests.aws.rights.calls import Call
from tests.aws.rights.evaluator import Request, Values

EC2_ACTIONS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("ec2_actions.json").read_text())
ACCOUNT = "123456789012"
KINDS = {
    "ami": "image", "i": "instance", "vol": "volume", "snap": "snapshot", "subnet": "subnet", "vpc": "vpc",
    "sg": "security-group", "sgr": "security-group-rule", "rtb": "route-table", "acl": "network-acl",
    "igw": "internet-gateway", "eni": "network-interface", "sir": "spot-instances-request", "lt": "launch-template",
    "key": "key-pair",
}  # fmt: skip
_ID = re.compile(r"([a-z]+)-[0-9a-z]+")
# Condition keys of a launch, and the parameters that set them.
_LAUNCH_KEYS = {
    "ec2:AssociatePublicIpAddress": r"NetworkInterface\.\d+\.AssociatePublicIpAddress",
    "ec2:InstanceType": r"InstanceType",
    "ec2:InstanceProfile": r"IamInstanceProfile\.(Arn|Name)",
    "ec2:MetadataHttpTokens": r"MetadataOptions\.HttpTokens",
}
_ASSOCIATIONS = ("rtbassoc", "aclassoc")
_CARD = re.compile(r"NetworkInterface\.(\d+)\..*")
_GROUP_NAME = re.compile(r"GroupName|SecurityGroup\.\d+")


class World(Protocol):
    """Knows the resources that exist."""

    def tags(self, region: str, resource: str) -> Mapping[str, str]:
        """Returns the tags of a resource, by its id, or a key pair's name."""

    def owner(self, region: str, resource: str) -> str:
        """Returns who owns an image or a snapshot: an account's number, or `amazon`."""

    def associated(self, region: str, association: str) -> list[str]:
        """Returns the ids of what an association joins."""


def requests(call: Call, world: World) -> Iterator[Request]:
    """Yields everything that IAM is asked about a call; all must be allowed."""
    name = f"{call.service}:{call.action}"
    if call.service == "ec2":
        yield from _ec2(call, world)
    elif call.service == "scheduler":
        yield from _scheduler(call)
    elif call.service == "iam":
        arn = f"arn:aws:iam::{ACCOUNT}:role/{call.parameters.get('RoleName', 'none')}"
        yield Request(name, arn)
    elif call.service == "s3":
        path = "/".join(part for part in (call.parameters["Bucket"], call.parameters["Key"]) if part)
        yield Request(name, f"arn:aws:s3:::{path}")
    elif name != "sts:GetCallerIdentity":  # which needs no right
        yield Request(name, "*")


def _scheduler(call: Call) -> Iterator[Request]:
    name, arn = f"scheduler:{call.action}", f"arn:aws:scheduler:{call.region}:{ACCOUNT}"
    parameters = call.parameters
    if call.action.startswith("List"):
        yield Request(name, "*")
    elif call.action.endswith("Group"):
        yield Request(name, f"{arn}:schedule-group/{parameters['Name']}")
    else:
        yield Request(name, f"{arn}:schedule/{parameters['GroupName']}/{parameters['Name']}")
    if call.action in ("CreateSchedule", "UpdateSchedule"):
        yield _pass_role(parameters["RoleArn"], "scheduler.amazonaws.com")


def _pass_role(role: str, service: str) -> Request:
    return Request("iam:PassRole", role, {"iam:PassedToService": (service,)})


def _ec2(call: Call, world: World) -> Iterator[Request]:
    name, types = f"ec2:{call.action}", EC2_ACTIONS.get(call.action, {})
    if not types:
        yield Request(name, "*")
        return
    asked = [*_existing_asked(call, world, types), *_created_asked(call, world, types)]
    yield from asked
    about = {request.resource.split(":", 5)[5].partition("/")[0] for request in asked if request.action == name}
    # What AWS would choose itself, such as the default subnet, or find by a parameter that is unknown here: not ours.
    missing = [kind for kind, told in types.items() if told["required"] and kind not in about]
    yield from (Request(name, _arn(call, kind, "*")) for kind in missing)
    if not asked and not missing:
        yield Request(name, "*")
    if any(key.startswith("IamInstanceProfile.") for key in call.parameters):
        yield _pass_role(f"arn:aws:iam::{ACCOUNT}:role/of-a-profile", "ec2.amazonaws.com")


def _existing_asked(call: Call, world: World, types: Mapping[str, Any]) -> Iterator[Request]:
    name = f"ec2:{call.action}"
    for kind, identity in _existing(call, world, types):
        if call.action == "RunInstances" and kind == "network-interface":
            continue  # each card has condition keys of its own
        context = _context(types[kind]["keys"], call, _tags_of(world, call.region, kind, identity))
        if "ec2:Owner" in types[kind]["keys"]:
            context["ec2:Owner"] = (world.owner(call.region, identity),)
        yield Request(name, _arn(call, kind, identity), context)


def _created_asked(call: Call, world: World, types: Mapping[str, Any]) -> Iterator[Request]:
    name = f"ec2:{call.action}"
    if call.action == "RunInstances":
        yield from _cards(call, world, types["network-interface"]["keys"])
    for kind in _created(call, types, {kind for kind, _ in _existing(call, world, types)}):
        tags = _given_tags(call, kind)
        yield Request(name, _arn(call, kind, "*"), _context(types[kind]["keys"], call, given=tags))
        yield from _tagged(call, kind, tags)


def _cards(call: Call, world: World, keys: list[str]) -> Iterator[Request]:
    """What a launch asks about each network interface, by the parameters of this one alone."""
    numbers = sorted({match[1] for key in call.parameters if (match := _CARD.fullmatch(key))})
    for number in numbers or ["0"]:
        own = f"NetworkInterface.{number}."
        narrow = replace(
            call,
            parameters={
                key: value for key, value in call.parameters.items() if key.startswith(own) or not _CARD.fullmatch(key)
            },
        )
        card = call.parameters.get(f"{own}NetworkInterfaceId")
        tags, given = (world.tags(call.region, card), {}) if card else ({}, _given_tags(call, "network-interface"))
        yield Request(
            f"ec2:{call.action}",
            _arn(call, "network-interface", card or "*"),
            _context(keys, narrow, tags, given),
        )
        yield from _tagged(call, "network-interface", given)


def _tagged(call: Call, kind: str, tags: Mapping[str, str]) -> Iterator[Request]:
    if tags:
        region = {"aws:RequestedRegion": (call.region,)}
        with_action = {**_tag_context(tags), **region, "ec2:CreateAction": (call.action,)}
        yield Request("ec2:CreateTags", _arn(call, kind, "*"), with_action)


def _existing(call: Call, world: World, types: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The resources that a call names, of the types that its action asks about."""
    named: dict[tuple[str, str], None] = {}
    for key, value in call.parameters.items():
        if key.startswith(("TagSpecification.", "Tag.", "Filter.")):
            continue
        prefix = match[1] if (match := _ID.fullmatch(value)) else ""
        for identity in world.associated(call.region, value) if prefix in _ASSOCIATIONS else [value]:
            if kind := KINDS.get(identity.partition("-")[0] if "-" in identity else ""):
                named[kind, identity] = None
        if key == "KeyName":
            named["key-pair", value] = None
        # A group's name is found in the default VPC, which is not ours.
        if _GROUP_NAME.fullmatch(key) and call.action != "CreateSecurityGroup":
            named["security-group", value] = None
    if call.action == "ImportKeyPair":  # the name is that of a new one
        named.clear()
    yield from ((kind, identity) for kind, identity in named if kind in types)


def _created(call: Call, types: Mapping[str, Any], named: set[str]) -> Iterator[str]:
    """The types of what a call makes: those that it does not name, but whose tags it gives or could give."""
    for kind, told in types.items():
        if call.action == "RunInstances" and kind == "network-interface":
            continue
        launched = call.action == "RunInstances" and kind == "volume"
        spot = kind == "spot-instances-request" and call.parameters.get("InstanceMarketOptions.MarketType") == "spot"
        new = "aws:RequestTag" in told["keys"] and (told["required"] or _given_tags(call, kind))
        if kind not in named and (launched or spot or new):
            yield kind


def _context(
    keys: list[str], call: Call, tags: Mapping[str, str] | None = None, given: Mapping[str, str] | None = None
) -> dict[str, Values]:
    """The condition keys that a type of resource has in this action, with this call's values."""
    context: dict[str, Values] = {"aws:RequestedRegion": (call.region,)}
    if "aws:ResourceTag" in keys:
        context |= {f"aws:ResourceTag/{key}": (value,) for key, value in (tags or {}).items()}
    given = _plain_tags(call) if given is None else given
    if "aws:RequestTag" in keys and given:
        context |= _tag_context(given)
    for key, parameter in _LAUNCH_KEYS.items():
        values = tuple(value for name, value in call.parameters.items() if re.fullmatch(parameter, name))
        if key in keys and values:
            context[key] = values
    return context


def _tag_context(tags: Mapping[str, str]) -> dict[str, Values]:
    return {**{f"aws:RequestTag/{key}": (value,) for key, value in tags.items()}, "aws:TagKeys": tuple(tags)}


def _plain_tags(call: Call) -> dict[str, str]:
    """The tags of CreateTags and DeleteTags."""
    return _numbered_tags(call, "")


def _given_tags(call: Call, kind: str) -> dict[str, str]:
    """The tags that a call gives to what it creates of a type."""
    tags: dict[str, str] = {}
    for key, value in call.parameters.items():
        if (match := re.fullmatch(r"(TagSpecification\.\d+\.)ResourceType", key)) and value == kind:
            tags |= _numbered_tags(call, match[1])
    return tags


def _numbered_tags(call: Call, prefix: str) -> dict[str, str]:
    pattern = re.compile(re.escape(prefix) + r"Tag\.(\d+)\.Key")
    return {
        value: call.parameters.get(f"{prefix}Tag.{match[1]}.Value", "")
        for key, value in call.parameters.items()
        if (match := pattern.fullmatch(key))
    }


def _tags_of(world: World, region: str, kind: str, identity: str) -> Mapping[str, str]:
    # A rule has no tags of its own that a policy could ask about while it is made.
    return {} if kind == "security-group-rule" else world.tags(region, identity)


def _arn(call: Call, kind: str, identity: str) -> str:
    account = "" if kind in ("image", "snapshot") else ACCOUNT
    return f"arn:aws:ec2:{call.region}:{account}:{kind}/{identity}"
