"""The AWS account that a controller works in: its credentials, its identity, and the marks on what it creates."""

from __future__ import annotations

import getpass
import ipaddress
import json
import time
import urllib.request
from dataclasses import dataclass
from functools import cached_property

from provisioner.base.config import Settings
from provisioner.base.errors import HostError
from provisioner.base.models import Environment
from provisioner.clouds.aws.api import (
    CREATED_TAG,
    HOME_TAG,
    LEASE_TAG,
    OWNER_TAG,
    AnswerCache,
    Api,
    asking,
    bucket_region,
    timestamp,
)
from provisioner.store.home import Home

# The provider's own retries: by default it waits many minutes for capacity; what to try next is ours to decide.
PROVIDER_RETRIES = 2

# Between two questions for the own public address.
LOOK_UP_SECONDS = 60.0
# The first version that locks a state in S3 by a file beside it (Terraform's documentation, backend "s3").
LOCKFILE_TERRAFORM = (1, 10)
# In the root of a stack: where its state is.
BACKEND = "backend.tf.json"
# AWS's "Check IP" returns the caller's public address.
CHECK_IP = "https://checkip.amazonaws.com"


@dataclass(frozen=True)
class Identity:
    """Whose the credentials are.

    Args:
        account: the account's number.
        arn: of the user or role.
    """

    account: str
    arn: str


class Account:
    """One set of credentials in one region.

    Args:
        home: the provisioner home.
        settings: the operator's settings.
        region: None for the settings' or boto3's own.
        profile: of the AWS configuration; None for the settings' or boto3's own.
        state: `s3://bucket/prefix` for Terraform's state, empty for local files; None for what the settings say.

    Raises:
        UsageError: no such profile, or no region.
    """

    def __init__(
        self, home: Home, settings: Settings, region: str | None, profile: str | None, state: str | None
    ) -> None:
        self.home = home
        self.settings = settings
        self.profile = profile or settings.profile or ""
        self.state = settings.state if state is None else state
        self.api = Api(self.profile, region or settings.region)
        self.region = self.api.region
        self.answers = AnswerCache()
        self._own_networks: frozenset[str] = frozenset()
        self._look_up_at = 0.0

    @cached_property
    def identity(self) -> Identity:
        """The account and the user or role, as AWS says."""
        with asking("Asking AWS for the account of these credentials"):
            answer = self.api.client("sts").get_caller_identity()
        return Identity(account=str(answer["Account"]), arn=str(answer["Arn"]))

    @property
    def controllers(self) -> frozenset[str]:
        """The networks from which this controller reaches machines.

        Its own address may change while a command runs, so it is looked up again from time to time. If it cannot be,
        the last one counts.
        """
        if time.monotonic() >= self._look_up_at:
            try:
                self._own_networks = controller_networks(self.settings.controller_cidrs)
            except HostError:
                if not self._own_networks:
                    raise
            self._look_up_at = time.monotonic() + LOOK_UP_SECONDS
        return self._own_networks

    @cached_property
    def owner(self) -> str:
        """The operator's user name, for tags."""
        try:
            return getpass.getuser()
        except (KeyError, OSError):
            return "unknown"

    @cached_property
    def _state_region(self) -> str:
        """The region of the state's bucket, which need not be that of the machines. S3 sends others away."""
        return bucket_region(self.api, self.state.removeprefix("s3://").partition("/")[0])

    def require_own(self, what: str, account: str) -> None:
        """Refuses credentials of another account than the one in which something was made.

        Args:
            what: what was made.
            account: where; empty if that was not recorded.

        Raises:
            HostError: these credentials are of another account, or do not count.
        """
        if account and account != self.identity.account:
            raise HostError(
                f"{what} is in the AWS account {account}, and these credentials are of {self.identity.account}.",
                hint="Use credentials of that account: AWS_PROFILE, or `profile` in the configuration file.",
            )

    def tags(self, environment: Environment) -> dict[str, str]:
        """Returns the tags of everything that an environment consists of, besides its id."""
        return {
            OWNER_TAG: self.owner,
            HOME_TAG: self.home.identity,
            "provisioner:stack": environment.stack,
            "provisioner:batch": environment.batch or "none",
            CREATED_TAG: timestamp(environment.created_at),
        }

    def root_files(self, region: str, stack: str) -> dict[str, str]:
        """Returns the files of a Terraform root that configure the provider and, unless it is local, the state.

        Credentials come with each command (stacks.py).
        """
        # Leases are renewed without Terraform.
        ignored = {"keys": [LEASE_TAG]}
        aws = {"region": region, "max_retries": PROVIDER_RETRIES, "ignore_tags": [ignored]}
        provider = {"provider": {"aws": [aws]}}
        files = {"provider.tf.json": json.dumps(provider, indent=2)}
        if self.state:
            bucket, _, prefix = self.state.removeprefix("s3://").partition("/")
            key = "/".join(part for part in (prefix.strip("/"), stack, "terraform.tfstate") if part)
            where = {"bucket": bucket, "key": key, "region": self._state_region}
            backend = {**where, "use_lockfile": True, "encrypt": True}
            # An older Terraform then says what it lacks, and not that `use_lockfile` is no argument.
            needed = ">= {}.{}".format(*LOCKFILE_TERRAFORM)
            terraform = {"required_version": needed, "backend": {"s3": backend}}
            files[BACKEND] = json.dumps({"terraform": terraform}, indent=2)
        return files


def controller_networks(given: tuple[str, ...]) -> frozenset[str]:
    """Returns the networks from which this controller reaches machines: as set, or its own public address.

    Raises:
        HostError: nothing is set, and the address cannot be determined.
    """
    if given:
        return frozenset(given)
    try:
        with urllib.request.urlopen(CHECK_IP, timeout=10) as answer:
            return frozenset([f"{ipaddress.IPv4Address(answer.read(64).decode().strip())}/32"])
    except (OSError, ValueError) as error:
        raise HostError(
            f"This machine's public address could not be determined: {error}",
            hint='Set controller_cidrs = ["192.0.2.1/32"] in the configuration, or PROVISIONER_CONTROLLER_CIDRS.',
        ) from error
