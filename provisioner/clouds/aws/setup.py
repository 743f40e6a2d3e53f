"""What an administrator makes in an account, once: the role with which schedules end machines, and spot's own role.

Daily work needs no right to make roles or to give them rights: it only hands this role to EventBridge Scheduler.
"""

from __future__ import annotations

import json
from typing import Any

from botocore.exceptions import ClientError

from provisioner.clouds.aws.api import ENVIRONMENT_TAG, asking, code_of
from provisioner.clouds.aws.schedules import ROLE, role_arn

POLICY = "terminate-provisioner-instances"
SPOT_SERVICE = "spot.amazonaws.com"
SPOT_ROLE = f"arn:aws:iam::*:role/aws-service-role/{SPOT_SERVICE}/AWSServiceRoleForEC2Spot"
VERSION = "2012-10-17"
RIGHTS_HINT = "This takes an administrator: `provisioner aws policy setup` prints the rights that are needed."


def policy() -> dict[str, Any]:
    """Returns the IAM policy with exactly the rights that `set_up` needs. Its holder can grant rights to others."""
    role = (
        "iam:CreateRole", "iam:DeleteRolePolicy", "iam:DetachRolePolicy", "iam:GetRole", "iam:GetRolePolicy",
        "iam:ListAttachedRolePolicies", "iam:ListRolePolicies", "iam:PutRolePolicy", "iam:UpdateAssumeRolePolicy",
    )  # fmt: skip
    spot = {
        "Sid": "SpotRole",
        "Effect": "Allow",
        "Action": "iam:CreateServiceLinkedRole",
        "Resource": SPOT_ROLE,
        "Condition": {"StringEquals": {"iam:AWSServiceName": SPOT_SERVICE}},
    }
    own = {"Sid": "SchedulerRole", "Effect": "Allow", "Action": list(role), "Resource": role_arn("*")}
    return {"Version": VERSION, "Statement": [own, spot]}


def trust(account: str) -> dict[str, Any]:
    """Returns the principal that may assume the role: EventBridge Scheduler, for schedules of this account alone."""
    statement = {
        "Effect": "Allow",
        "Principal": {"Service": "scheduler.amazonaws.com"},
        "Action": "sts:AssumeRole",
        "Condition": {"StringEquals": {"aws:SourceAccount": account}},
    }
    return {"Version": VERSION, "Statement": [statement]}


def rights(account: str) -> dict[str, Any]:
    """Returns what the role may do: terminate instances that carry an environment's tag."""
    statement = {
        "Effect": "Allow",
        "Action": "ec2:TerminateInstances",
        "Resource": f"arn:aws:ec2:*:{account}:instance/*",
        "Condition": {"StringLike": {f"aws:ResourceTag/{ENVIRONMENT_TAG}": "?*"}},
    }
    return {"Version": VERSION, "Statement": [statement]}


def set_up(iam: Any, account: str) -> list[str]:
    """Makes the roles, or corrects them. Safe to repeat.

    Args:
        iam: a client of the account's IAM, with the rights of `policy`.
        account: the account's number.

    Returns:
        what it did, a line for each role.

    Raises:
        HostError: AWS refuses these credentials.
        InfrastructureError: any other failure.
    """
    with asking(f"Setting up the role {ROLE}", RIGHTS_HINT):
        return [_scheduler_role(iam, account), _spot_role(iam)]


def _scheduler_role(iam: Any, account: str) -> str:
    try:
        known = iam.get_role(RoleName=ROLE)["Role"]["AssumeRolePolicyDocument"]
    except iam.exceptions.NoSuchEntityException:
        description = "EventBridge Scheduler ends provisioner's machines with it."
        iam.create_role(RoleName=ROLE, Description=description, AssumeRolePolicyDocument=json.dumps(trust(account)))
        iam.put_role_policy(RoleName=ROLE, PolicyName=POLICY, PolicyDocument=json.dumps(rights(account)))
        return f"Created the role {ROLE}."
    others = _remove_others(iam)
    if known == trust(account) and _rights_of_role(iam) == rights(account):
        return f"Corrected the role {ROLE}: {others}." if others else f"The role {ROLE} is as it should be."
    iam.update_assume_role_policy(RoleName=ROLE, PolicyDocument=json.dumps(trust(account)))
    iam.put_role_policy(RoleName=ROLE, PolicyName=POLICY, PolicyDocument=json.dumps(rights(account)))
    return f"Corrected the role {ROLE}{': ' if others else ''}{others}."


def _remove_others(iam: Any) -> str:
    """Takes every policy but ours from the role: each gives it rights. Says which; empty if there was none."""
    pages = iam.get_paginator("list_role_policies").paginate(RoleName=ROLE)
    inline = [name for page in pages for name in page["PolicyNames"] if name != POLICY]
    pages = iam.get_paginator("list_attached_role_policies").paginate(RoleName=ROLE)
    attached = [policy["PolicyArn"] for page in pages for policy in page["AttachedPolicies"]]
    for name in inline:
        iam.delete_role_policy(RoleName=ROLE, PolicyName=name)
    for arn in attached:
        iam.detach_role_policy(RoleName=ROLE, PolicyArn=arn)
    return f"took away the policies {', '.join(inline + attached)}" if inline + attached else ""


def _rights_of_role(iam: Any) -> Any:
    try:
        return iam.get_role_policy(RoleName=ROLE, PolicyName=POLICY)["PolicyDocument"]
    except iam.exceptions.NoSuchEntityException:
        return None


def _spot_role(iam: Any) -> str:
    try:
        iam.create_service_linked_role(AWSServiceName=SPOT_SERVICE)
    except ClientError as error:
        # IAM API reference, CreateServiceLinkedRole: InvalidInput if the role exists.
        if code_of(error) != "InvalidInput" or "taken" not in str(error):
            raise
        return "EC2's own role for spot instances exists."
    return "Created EC2's own role for spot instances."
