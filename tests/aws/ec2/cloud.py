"""Starts EC2 with real machines behind it and tells tests how to reach it.

`with Ec2Cloud(cache) as cloud: cloud.client("ec2").run_instances(...)`
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from ipaddress import IPv4Address
from pathlib import Path
from typing import IO, Any, Self

from provisioner.clouds.local.vm import qemu
from tests.aws.ec2 import ami
from tests.aws.ec2.fabric import NARROW_PATH
from tests.aws.ec2.machine import AS_ON_EC2
from tests.aws.ec2.server import DEBIAN_AMI_ID, Settings
from tests.aws.rights.judge import inspector

CHECKOUT = Path(__file__).parents[3]
REGION = "us-east-1"
CLOSE_SECONDS = 60


class Ec2Cloud:
    """Runs the cloud until `close`.

    Args:
        cache: directory that keeps the AMI between test runs, and each run's files while it lasts.
        controller_address: the source address of this host's connections for security groups and network ACLs; by
            default one of TEST-NET-3. Rules for the controller must name `controller_cidr`.
        outside: (address, port) of an internet host -> port of the host's loopback that plays it.
        metadata_off: how a disabled metadata service behaves: `silent`, or `forbidden` (403) like EC2's.
    """

    debian_ami_id = DEBIAN_AMI_ID
    region = REGION

    def __init__(
        self,
        cache: Path,
        *,
        controller_address: str = "203.0.113.10",
        outside: Mapping[tuple[str, int], int] | None = None,
        metadata_off: str = "silent",
    ) -> None:
        bundle = Path(os.environ.get("SSL_CERT_FILE", ""))
        self.controller_cidr = f"{IPv4Address(controller_address)}/32"
        image = ami.ensure(cache, bundle if bundle.is_file() else None)
        self._lock, self.directory = _new_directory(cache / "runs")
        settings = Settings(
            directory=str(self.directory),
            ami=str(image),
            controller_address=controller_address,
            outside={f"{address}:{port}": ours for (address, port), ours in (outside or {}).items()},
            silent_when_off={"silent": True, "forbidden": False}[metadata_off],
        )
        self._log = (self.directory / "server.log").open("wb")
        # The server ends when our end of its stdin is closed, however this process ends.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.aws.ec2.server", json.dumps(asdict(settings))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, cwd=CHECKOUT, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = self.server_log()
            self.close()
            raise RuntimeError(f"the server did not start:\n{log}")
        self.endpoint_url = f"http://127.0.0.1:{json.loads(line)['port']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server and all machines, and removes their files."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        finally:
            self._process.kill()  # the machines end with it
            self._process.wait()
            self._process.stdout.close()
            self._log.close()
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory.with_suffix(".lock").unlink()
            self._lock.close()

    @property
    def variables(self) -> dict[str, str]:
        """Returns environment variables that make the AWS SDKs, CLI and Terraform's provider use this cloud.

        They have the rights of the printed policy.
        """
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
        }

    def client(self, service: str = "ec2") -> Any:
        """Returns a boto3 client of one of this cloud's services, with all rights."""
        return inspector(self.endpoint_url, service, self.region)

    @contextlib.contextmanager
    def booting_as_on_ec2(self) -> Iterator[None]:
        """Has machines that start meanwhile boot by DHCP, the metadata service and all stages of Debian's cloud-init.

        Others get cloud-init's data from SMBIOS, which takes less than half of the time under emulation.
        """
        with self._marked(AS_ON_EC2):
            yield

    @contextlib.contextmanager
    def narrow_path(self) -> Iterator[None]:
        """Loses meanwhile what machines send out of their VPC in packets of more than 1500 bytes, and does not say so.

        EC2's cards send up to 9001 bytes (EC2 user guide, "Network MTU"), and so may a controller's.
        """
        with self._marked(NARROW_PATH):
            yield

    @contextlib.contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        mark = self.directory / name
        mark.touch()
        try:
            yield
        finally:
            mark.unlink()

    def machines(self) -> dict[str, int]:
        """Returns the QEMU process id of each instance that has one."""
        pids = {path.parent.name: qemu.live_pid(path) for path in self.directory.glob("instances/*/qemu.pid")}
        return {name: pid for name, pid in pids.items() if pid is not None}

    def left(self) -> list[str]:
        """Returns the directories of all existing instances, running or stopped."""
        return sorted(path.name for path in self.directory.glob("instances/*"))

    def console(self, instance_id: str) -> str:
        """Returns an instance's serial console, for messages of failed tests."""
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / "instances" / instance_id / "serial.log").read_text(errors="replace")
        return ""

    def server_log(self) -> str:
        """Returns the server's output."""
        return (self.directory / "server.log").read_text(errors="replace")


def _new_directory(runs: Path) -> tuple[IO[str], Path]:
    """Creates a run's directory, which stays locked during the run, and removes those of killed runs."""
    runs.mkdir(parents=True, exist_ok=True)
    for lock_path in runs.glob("*.lock"):
        with lock_path.open("w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
            lock_path.unlink()
    directory = runs / secrets.token_hex(4)
    lock = directory.with_suffix(".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory.mkdir()
    return lock, directory
