"""The tags of what provisioner creates in AWS, by which it is found again and told from what others have created."""

from __future__ import annotations

from datetime import datetime

HOME_TAG = "provisioner:home"
OWNER_TAG = "provisioner:owner"
ENVIRONMENT_TAG = "provisioner:environment"
CREATED_TAG = "provisioner:created-at"
# Only on instances and volumes, where it can be changed later.
EXPIRY_TAG = "provisioner:expires-at"
LEASE_TAG = "provisioner:lease-until"


def timestamp(moment: datetime) -> str:
    """Formats a time as our tags hold it."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
