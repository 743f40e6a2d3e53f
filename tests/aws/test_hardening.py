"""Every machine of an environment is prepared for later boots, and only then its metadata service is switched off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from provisioner.base.errors import InfrastructureError
from provisioner.base.models import Endpoint, Environment, Role
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.clouds.guest_files import GUEST
from provisioner.session import Session
from provisioner.ssh.connection import Connection
from provisioner.ssh.exchange import Completed
from tests.aws.account import AMI, REGION, Account
from tests.aws.proxy import FaultyApi

ROLES: tuple[Role, ...] = ("primary", "aux")


class Recorder:
    """A connection that keeps what it is asked for, and how many metadata services were off by then.

    Args:
        api: the account's.
        prepares: whether preparing later boots works.
    """

    def __init__(self, api: FaultyApi, prepares: bool = True) -> None:
        self._api, self._prepares = api, prepares
        self.files: dict[str, bytes] = {}
        self.scripts: list[tuple[str, list[str], bytes, int]] = []

    def run(self, argv: list[str], *, stdin: bytes = b"", **_: Any) -> Completed:
        off = len([request for request in self._api.requests if request["Action"] == "ModifyInstanceMetadataOptions"])
        self.scripts.append((argv[2], argv[3:], stdin, off))
        works = self._prepares or "cloud-init.disabled" not in argv[2]
        return Completed(0 if works else 1, b"", b"" if works else b"No space left on device")

    def write_file(self, path: str, data: bytes) -> None:
        self.files[path] = data


@pytest.fixture
def environment(account: Account) -> Iterator[tuple[Session, Environment]]:
    """Returns a session and the record of an environment whose two machines run."""
    session, ec2 = account.session(), account.client()
    started = ec2.run_instances(ImageId=AMI, MinCount=2, MaxCount=2)["Instances"]
    ids = [instance["InstanceId"] for instance in started]
    record = account.record(session, REGION)
    endpoints = {
        role: Endpoint(host="h", port=22, instance_id=name, private_address=f"10.215.0.{number}")
        for number, (role, name) in enumerate(zip(ROLES, ids, strict=True), 4)
    }
    machines = dict.fromkeys(ROLES, record.machines["primary"])
    tags = [{"Key": "provisioner:environment", "Value": record.id}, {"Key": "provisioner:owner", "Value": "me"}]
    ec2.create_tags(Resources=ids, Tags=tags)
    yield session, record.model_copy(update={"machines": machines, "endpoints": endpoints})
    ec2.terminate_instances(InstanceIds=ids)


def harden(session: Session, record: Environment, recorders: dict[Role, Recorder]) -> None:
    assert isinstance(session.cloud, AwsCloud)
    session.cloud.harden(record, cast("dict[Role, Connection]", recorders))


def test_every_machine_is_prepared_before_metadata_is_off(
    api: FaultyApi, account: Account, environment: tuple[Session, Environment]
) -> None:
    session, record = environment
    recorders = {role: Recorder(api) for role in ROLES}
    harden(session, record, recorders)
    expiry = str(int(record.expires_at.timestamp()))
    for recorder in recorders.values():
        [waits, (script, arguments, program, _)] = recorder.scripts
        assert "cloud-init/result.json" in waits[0]
        assert "touch /etc/cloud/cloud-init.disabled" in script
        assert (arguments, program) == (["sh", expiry], (GUEST / "ttl.sh").read_bytes())
        assert b"10.215.0.5 " in recorder.files["/etc/hosts"]
    # A machine whose service is off, and that is not prepared, would be another one after its next boot.
    assert {off for recorder in recorders.values() for *_, off in recorder.scripts} == {0}
    ids = [endpoint.instance_id for endpoint in record.endpoints.values()]
    reservations = account.client().describe_instances(InstanceIds=ids)["Reservations"]
    options = [instance["MetadataOptions"] for row in reservations for instance in row["Instances"]]
    assert [option["HttpEndpoint"] for option in options] == ["disabled", "disabled"]


def test_an_aux_vm_that_cannot_be_prepared_is_an_error(
    api: FaultyApi, environment: tuple[Session, Environment]
) -> None:
    session, record = environment
    with pytest.raises(InfrastructureError, match="The aux machine could not be prepared for a reboot") as raised:
        harden(session, record, {"primary": Recorder(api), "aux": Recorder(api, prepares=False)})
    assert "No space left" in (raised.value.details or "")
    assert [request for request in api.requests if request["Action"] == "ModifyInstanceMetadataOptions"] == []
