"""Lets what has just been created be unknown for some seconds, as on EC2, where moto knows it at once.

Amazon EC2 developer guide, "Eventual consistency in the Amazon EC2 API": the result of a request may not be visible to
those that follow at once. A Describe request by id then says that there is no such resource, and one by a filter omits
it; and so may TerminateInstances. It names no time but "a couple of seconds" for the first pause of those who ask
again. On EC2 some requests find nothing and others do; so that tests can rely on it, here none does until the time is
over. What takes part in other requests, such as a group in RunInstances, is known at once, which is kinder than EC2:
Terraform's provider does not wait before each of them.

Terraform's provider waits until EC2 shows what it has created, but not for key pairs, and in a refresh it waits for
nothing: what is not shown then is dropped from the state (terraform-provider-aws, "Retries and Waiters").

Images are in moto_gaps.py, which delays what they are made of, too. EventBridge Scheduler's API reference says nothing
of the kind about new schedules.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.etree import ElementTree

from tests.aws.rights.calls import Call
from tests.aws.rights.judge import INSPECTOR


@dataclass(frozen=True)
class Kind:
    """A kind of resource.

    Args:
        name: the XML element that names one.
        code: what EC2 says of one that does not exist (EC2 API reference, "Error codes").
        created_by: the actions that create one.
    """

    name: str
    code: str
    created_by: tuple[str, ...]


KEY_PAIRS, VPCS = "DescribeKeyPairs", "DescribeVpcs"
# The provider does not wait for key pairs, and makes them anew each time (its issue 44835). For VPCs it waits half a
# minute, which would be most of a test's time.
RARE = (KEY_PAIRS, VPCS)
# By the action that describes them.
KINDS = {
    "DescribeInstances": Kind("instanceId", "InvalidInstanceID.NotFound", ("RunInstances",)),
    "DescribeSecurityGroups": Kind("groupId", "InvalidGroup.NotFound", ("CreateSecurityGroup",)),
    "DescribeSecurityGroupRules": Kind(
        "securityGroupRuleId",
        "InvalidSecurityGroupRuleId.NotFound",
        ("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"),
    ),
    "DescribeSubnets": Kind("subnetId", "InvalidSubnetID.NotFound", ("CreateSubnet",)),
    "DescribeRouteTables": Kind("routeTableId", "InvalidRouteTableID.NotFound", ("CreateRouteTable",)),
    "DescribeNetworkAcls": Kind("networkAclId", "InvalidNetworkAclID.NotFound", ("CreateNetworkAcl",)),
    KEY_PAIRS: Kind("keyName", "InvalidKeyPair.NotFound", ("ImportKeyPair", "CreateKeyPair")),
    "DescribeVolumes": Kind("volumeId", "InvalidVolume.NotFound", ("CreateVolume",)),
    VPCS: Kind("vpcId", "InvalidVpcID.NotFound", ("CreateVpc",)),
    "DescribeInternetGateways": Kind(
        "internetGatewayId", "InvalidInternetGatewayID.NotFound", ("CreateInternetGateway",)
    ),
    "DescribeNetworkInterfaces": Kind(
        "networkInterfaceId", "InvalidNetworkInterfaceID.NotFound", ("CreateNetworkInterface", "RunInstances")
    ),
}
# An action that is answered as another is, where EC2 does not know an id yet.
SAME_IDS = {"TerminateInstances": "DescribeInstances"}
ElementTree.register_namespace("", "http://ec2.amazonaws.com/doc/2016-11-15/")
_NAMESPACE = re.compile(r"\{[^}]*\}")


# How long a new resource stays hidden by default.
SECONDS_VARIABLE = "PROVISIONER_TEST_UNSEEN_SECONDS"
_SECONDS = 2.0


def _seconds() -> float:
    return float(os.environ.get(SECONDS_VARIABLE, _SECONDS))


@dataclass
class NewResources:
    """What has just been created in an account.

    Args:
        seconds: how long it stays hidden.
        rare: how many of the next resources of a kind it happens to, for those to which it does not always happen.
    """

    seconds: float = field(default_factory=_seconds)
    rare: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(RARE, 0)))
    _until: dict[tuple[str, str, str], float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, call: Call | None, answer: bytes) -> None:
        """Notes what a request has created.

        Args:
            answer: moto's, to a request that succeeded.
        """
        if call is None or call.service != "ec2" or not self.seconds:
            return
        for action, kind in KINDS.items():
            if call.action in kind.created_by and self._happens(action):
                for name in set(re.findall(f"<{kind.name}>([^<]+)</{kind.name}>", answer.decode())):
                    with self._lock:
                        self._until[call.region, action, name] = time.monotonic() + self.seconds

    def missing(self, call: Call | None) -> tuple[str, str] | None:
        """Returns the error, code and text, with which EC2 answers a request by id; None if it knows all of them."""
        action = SAME_IDS.get(call.action, call.action) if call else ""
        if call is None or action not in KINDS or call.key == INSPECTOR:
            return None
        named = [value for key, value in call.parameters.items() if not key.startswith("Filter.")]
        unseen = [name for name in named if self._is_unseen(call.region, action, name)]
        return (KINDS[action].code, f"The ID '{unseen[0]}' does not exist") if unseen else None

    def without(self, call: Call | None, answer: bytes) -> bytes:
        """Returns moto's answer to a request by a filter, without what EC2 does not know yet."""
        if call is None or call.action not in KINDS or call.key == INSPECTOR:
            return answer
        with self._lock:
            named = [key[2] for key in self._until if key[:2] == (call.region, call.action)]
        if not any(name.encode() in answer for name in named):
            return answer
        root = ElementTree.fromstring(answer)
        own = KINDS[call.action].name
        dropped = [pair for pair in _items(root, own) if self._is_unseen(call.region, call.action, _text(pair[1], own))]
        for parent, item in dropped:
            parent.remove(item)
        for parent, item in list(_items(root, "reservationId")):  # one without instances is not shown
            if item.find("{*}instancesSet/{*}item") is None and dropped:
                parent.remove(item)
        return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) if dropped else answer

    def hide_again(self, seconds: float, *actions: str) -> None:
        """Hides what has been created since the last test, as if another of EC2's servers answered from now on.

        The developer guide has one wait "even if a Describe command returns an accurate response".

        Args:
            actions: that describe what is to be hidden.
        """
        with self._lock:
            for key in self._until:
                if key[1] in actions:
                    self._until[key] = time.monotonic() + seconds

    def reset(self) -> None:
        """Lets everything be known, as after a while."""
        self.seconds = _seconds()
        self.rare = Counter(dict.fromkeys(RARE, 0))
        self._until.clear()

    def _happens(self, action: str) -> bool:
        if action not in self.rare:
            return True
        self.rare[action] -= 1
        return self.rare[action] >= 0

    def _is_unseen(self, region: str, action: str, name: str) -> bool:
        with self._lock:
            return time.monotonic() < self._until.get((region, action, name), 0.0)


def _items(root: ElementTree.Element, own: str) -> Iterator[tuple[ElementTree.Element, ElementTree.Element]]:
    """Yields the outermost elements that are called by a name of their own, each with its parent."""
    for parent in root:
        for item in list(parent):
            if _text(item, own):
                yield parent, item
            elif own == "instanceId":  # inside of reservations
                for instances in item:
                    yield from ((instances, one) for one in list(instances) if _text(one, own))


def _text(item: ElementTree.Element, own: str) -> str:
    return next((child.text or "" for child in item if _NAMESPACE.sub("", child.tag) == own), "")
