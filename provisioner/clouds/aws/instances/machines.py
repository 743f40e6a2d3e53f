"""EC2 instances from their user data to their end. What exists is asked of EC2 by tag, never of a record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from provisioner.clock import now
from provisioner.clouds.aws.account import Account
from provisioner.clouds.aws.api import EXPIRY_TAG, LEASE_TAG, asking, timestamp
from provisioner.clouds.aws.cleanup import clean_up, schedules
from provisioner.clouds.aws.instance_watch import watch
from provisioner.clouds.aws.instances import hardening, user_data
from provisioner.clouds.aws.network import admission
from provisioner.clouds.cloud import TerminationReason
from provisioner.errors import HostError, InfrastructureError
from provisioner.models import Environment, Role
from provisioner.ssh.connection import Connection
from provisioner.store.locks import LEASE, locked

# EC2 API reference, StateReason: the machine was shut down from within.
SWITCHED_OFF = "Client.InstanceInitiatedShutdown"


class AwsMachines:
    """EC2 instances of one account."""

    account: Account
    gateways: Mapping[bool, tuple[str, ...]] = {
        True: ("10.214.0.1", "10.214.0.2"),
        False: ("10.215.0.1", "10.215.0.2"),
    }
    """The subnet's router and the VPC's resolver: in a VPC, neither leads to the controller."""

    def prepare(self, environment: Environment, authorized_keys: Mapping[Role, Mapping[str, str]]) -> None:
        """Writes each machine's user data to the environment's directory."""
        for role in environment.machines:
            path, name = user_data.path(self.account.home, environment, role), environment.hostname(role)
            path.write_text(user_data.cloud_config(name, authorized_keys.get(role, {}), environment.expires_at))

    def host_key(self, environment: Environment, role: Role) -> str | None:
        """Returns the key that cloud-init printed on the console at the first boot.

        None if it has not, or if so many consoles were read just now that EC2 would refuse.
        """
        if not watch(self.account.api, environment.placement["region"]).may_read_console():
            return None
        return hardening.host_key(self.console(environment, role))

    def harden(self, environment: Environment, connections: Mapping[Role, Connection]) -> None:
        """Writes the hosts files, prepares later boots, and switches the metadata service off.

        Raises:
            InfrastructureError: a machine could not be prepared, or AWS did not confirm in time.
        """
        hardening.harden(self.account.api, environment, connections)

    def alive(self, environment: Environment, role: Role) -> bool:
        """Whether EC2 calls the machine anything but stopped or terminated, or does not say."""
        name, region = _instance_id(environment, role), environment.placement.get("region")
        if name is None or region is None:  # nothing was created
            return False
        return watch(self.account.api, region).state(self.account.api, name) not in ("stopped", "terminated")

    def termination_reason(self, environment: Environment, role: Role) -> TerminationReason:
        """Returns EC2's state reason, such as `Server.SpotInstanceTermination: ...`."""
        name = _instance_id(environment, role)
        for instance in self._instances(environment):
            if instance["InstanceId"] == name:
                reason = instance.get("StateReason") or {}
                code = str(reason.get("Code") or "")
                return TerminationReason(str(reason.get("Message") or code), from_within=code == SWITCHED_OFF)
        return TerminationReason()

    def impairment(self, environment: Environment, role: Role) -> str:
        """Returns what EC2 says of the instance's host. The instance's own status check does not count."""
        name = _instance_id(environment, role)
        if name is None:
            return ""
        with contextlib.suppress(InfrastructureError), asking("Reading the status"):
            ec2 = self.account.api.client("ec2", environment.placement["region"])
            for status in ec2.describe_instance_status(InstanceIds=[name])["InstanceStatuses"]:
                if status["SystemStatus"]["Status"] == "impaired":
                    return "EC2's system status check says impaired"
        return ""

    def _instances(self, environment: Environment) -> list[dict[str, Any]]:
        if "region" not in environment.placement:  # nothing was placed yet, so nothing was created
            return []
        return clean_up.instances(self.account.api, environment.placement["region"], environment.id)

    def console(self, environment: Environment, role: Role) -> str:
        """Returns the end of the serial console, as EC2 keeps it."""
        instance = _instance_id(environment, role)
        if instance is None:
            return ""
        try:
            with asking("Reading the console"):
                ec2 = self.account.api.client("ec2", environment.placement["region"])
                return str(ec2.get_console_output(InstanceId=instance, Latest=True).get("Output", ""))
        except InfrastructureError:  # an instance that is gone, or has only just been created, has none
            return ""

    def unreachable_hint(self, environment: Environment) -> str | None:
        """Names the addresses that are let in: SSH may leave this host by another than its requests to checkip."""
        if self.account.settings.controller_cidrs:
            return None
        let_in = environment.placement.get(admission.CONTROLLERS, "")
        return (
            f"Only {let_in} is let in. If SSH leaves this host by another address, as with several or behind an HTTP "
            "proxy, name its networks: controller_cidrs in the configuration file, PROVISIONER_CONTROLLER_CIDRS."
        )

    def move_ttl(self, environment: Environment) -> None:
        """Moves the schedule, and what the tags say of it."""
        api, region = self.account.api, environment.placement["region"]
        schedules.move(api, region, environment.id, environment.expires_at)
        expiry = {EXPIRY_TAG: timestamp(environment.expires_at)}
        clean_up.retag(api, region, environment.id, expiry)

    def authorize(self, environment: Environment, open_network: Callable[[], None]) -> None:
        """Opens the group and the environment's own subnet. The region's network is Terraform's."""
        try:
            is_locked_out = admission.is_locked_out(environment.placement, self.account.controllers)
        except HostError:  # its address cannot be determined now
            return
        if is_locked_out:
            with locked(self.account.home.locks / f"admission-{environment.id}"):
                open_network()
                admission.admit(self.account.api, environment, self.account.controllers)

    def renew_lease(self, environment: Environment) -> None:
        """Records in a tag until when other controllers should assume that this one is alive."""
        until = {LEASE_TAG: timestamp(now() + LEASE)}
        clean_up.retag(self.account.api, environment.placement["region"], environment.id, until)


def _instance_id(environment: Environment, role: Role) -> str | None:
    endpoint = environment.endpoints.get(role)
    return endpoint.instance_id if endpoint else None
