"""EC2 for tests: real machines behind moto's API, or a real account.

With PROVISIONER_TEST_AWS=1 the tests use the account and region that boto3 finds, and pay for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from ipaddress import ip_network

import boto3
import pytest

from provisioner.base.config import load_settings
from provisioner.base.models import Destination
from provisioner.clouds.aws.cloud import AwsCloud
from provisioner.session import Session
from provisioner.store.home import Home
from tests.aws.ec2.cloud import Ec2Cloud
from tests.aws.rights.judge import administer
from tests.homes import cache, new_home

REAL = bool(os.environ.get("PROVISIONER_TEST_AWS"))


# A host of the internet that answers (RFC 5737: an address that no host has).
OUTSIDE = Destination(cidr="198.51.100.80/32", port=4433)


@contextlib.contextmanager
def _greeting() -> Iterator[int]:
    """Plays that host on a port of the loopback, and yields the port."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        server.settimeout(0.2)

        def greet() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(b"hello\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        try:
            yield server.getsockname()[1]
        finally:
            ended.set()
            greeter.join()


@pytest.fixture(scope="session")
def ec2_cloud() -> Iterator[Ec2Cloud | None]:
    """Provides EC2, and points this process's environment to it; None for a real account."""
    if REAL:
        yield None
        return
    outside = (str(ip_network(OUTSIDE.cidr)[0]), OUTSIDE.port)
    with (
        pytest.MonkeyPatch.context() as patch,
        _greeting() as port,
        Ec2Cloud(cache() / "ec2", metadata_off="forbidden", outside={outside: port}) as cloud,
    ):
        for name, value in cloud.variables.items():
            patch.setenv(name, value)
        patch.setenv("PROVISIONER_CONTROLLER_CIDRS", cloud.controller_cidr)
        administer(cloud.endpoint_url)
        yield cloud


@pytest.fixture(scope="session")
def ec2_home(ec2_cloud: Ec2Cloud | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Provides a home, and checks that nothing is left on EC2 at the end."""
    home = new_home(tmp_path_factory.mktemp("ec2") / "home")
    yield home
    _prune(home)
    if ec2_cloud:
        assert ec2_cloud.left() == [], "tests left instances behind"


def _prune(home: Home) -> None:
    """Removes the AMIs, as an operator would, and checks that AWS has none of them left."""
    session = ec2_session(home)
    session.images.prune(set(), cloud="aws", discard=session.cloud.discard, everything=True)
    ec2 = boto3.client("ec2")
    ours = [{"Name": "tag-key", "Values": ["provisioner:image"]}]
    remaining = ec2.describe_images(Owners=["self"], Filters=ours)["Images"]
    remaining += ec2.describe_snapshots(OwnerIds=["self"], Filters=ours)["Snapshots"]
    assert remaining == []


def ec2_session(home: Home) -> Session:
    """Opens a session on EC2."""
    settings = load_settings()
    return Session(home=home, cloud=AwsCloud(home, settings), ca_bundle=settings.ca_bundle_path)
