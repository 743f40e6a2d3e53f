"""The environment variables for Terraform's AWS provider and state: with the credentials that boto3 has found."""

from __future__ import annotations

from collections.abc import Mapping

from provisioner.clouds.aws.api import Api

# By these, programs find credentials of their own (AWS SDKs and Tools reference guide, "Environment variables").
OWN_SEARCH = (
    "AWS_ACCESS_KEY", "AWS_CONTAINER_", "AWS_CREDENTIAL_", "AWS_DEFAULT_PROFILE", "AWS_PROFILE", "AWS_ROLE_",
    "AWS_SECRET_", "AWS_SECURITY_TOKEN", "AWS_SESSION_TOKEN", "AWS_WEB_IDENTITY_",
)  # fmt: skip


def terraform_variables(api: Api, ours: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables for one Terraform command. They reach it by its environment alone: no file, no state.

    Terraform's provider does not know every kind of profile that boto3 does, such as those of `aws login`, and could
    take another account's credentials. What boto3 returns lasts for ten minutes or more where it can be renewed.

    Args:
        ours: the controller's environment variables.

    Raises:
        HostError: there are no credentials, or they have ended and the operator has to log in.
        InfrastructureError: they could not be renewed now.
    """
    kept = {name: value for name, value in ours.items() if name.startswith("AWS_") and not name.startswith(OWN_SEARCH)}
    found = api.credentials()
    kept["AWS_ACCESS_KEY_ID"] = found.access_key
    kept["AWS_SECRET_ACCESS_KEY"] = found.secret_key
    if found.token:
        kept["AWS_SESSION_TOKEN"] = found.token
    return kept
