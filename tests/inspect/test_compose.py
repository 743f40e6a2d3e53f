"""Shows that an eval's compose file or Dockerfile runs unchanged in a real machine, by the rules of Docker.

No registry can be reached: the one image that is needed comes from an archive. The files have five shapes: a Dockerfile
alone, two services with a private network, volumes, a health check that another service waits for, and limits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest
from inspect_ai.util import SandboxEnvironment, SandboxUnavailableError
from inspect_ai.util._sandbox import self_check

from provisioner.inspect import blocking
from provisioner.inspect.configuration import Configuration, configuration_of
from provisioner.inspect.sandbox import ProvisionerSandbox
from provisioner.inspect.services import ServiceSandbox
from provisioner.store.home import Home
from tests.homes import cache
from tests.inspect.images import debian_archive

CHECKS = [name for name in dir(self_check) if name.startswith("test_")]
# The users of the service that Inspect's checks run in: root on asyncio, another on trio; or each on each.
PAIRS = [("asyncio", "web"), ("trio", "agent")]
if os.environ.get("PROVISIONER_TEST_CHECKS") == "all":
    PAIRS = [(loop, service) for loop in ("asyncio", "trio") for service in ("web", "agent")]

DOCKERFILE = """
FROM debian:12
RUN useradd --create-home agent && echo built > /built
ENV COLOUR=red
WORKDIR /srv/work
"""
# All shapes in one file but the Dockerfile alone: a machine takes a minute to boot where there is no KVM.
COMPOSE = """
services:
  web:
    build: .
    command: sleep infinity
    init: true
    volumes: ["./data:/srv/data:ro", "shared:/shared"]
    networks: [inner]
    depends_on: {store: {condition: service_healthy}}
    environment: {LEVEL: "${SAMPLE_METADATA_LEVEL}", PORT: 80}
  agent:
    build: .
    user: agent
    working_dir: /home/agent
    command: sleep infinity
    x-default: true
    networks: [inner]
    mem_limit: 256m
    cpus: 0.5
  store:
    image: debian:12
    x-local: true
    command: [bash, -c, "echo ready > /shared/ready; sleep infinity"]
    healthcheck: {test: [CMD, test, -s, /shared/ready], interval: 1s, timeout: 30s, retries: 100}
    volumes: ["shared:/shared"]
    networks: [inner]
  alone:
    image: debian:12
    x-local: true
    command: sleep infinity
    network_mode: none
  done:
    image: debian:12
    x-local: true
    command: "true"
networks: {inner: {internal: true}}
volumes: {shared: }
"""

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("compose"),
]


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop that a test runs on."""
    return str(getattr(request, "param", "asyncio"))


def _brought_up(configuration: Configuration, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
    anyio.run(ProvisionerSandbox.task_init, "compose", configuration)
    return anyio.run(ProvisionerSandbox.sample_init, "compose", configuration, metadata)


def _ended(configuration: Configuration, sandboxes: dict[str, SandboxEnvironment]) -> None:
    anyio.run(partial(ProvisionerSandbox.sample_cleanup, "compose", configuration, sandboxes, interrupted=False))


@pytest.fixture(scope="module")
def registry() -> str:
    """A directory of archives."""
    return str(debian_archive(cache()).parent)


@pytest.fixture(scope="module")
def services(
    home: Home, registry: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, SandboxEnvironment]]:
    """The services of a sample, as Inspect gets them."""
    directory = tmp_path_factory.mktemp("eval")
    (directory / "Dockerfile").write_text(DOCKERFILE)
    (directory / "compose.yaml").write_text(COMPOSE)
    (directory / "data").mkdir()
    (directory / "data" / "note").write_text("from the eval's directory")
    configuration = configuration_of(str(directory / "compose.yaml")).model_copy(update={"registry": registry})
    found = _brought_up(configuration, {"level": "3"})
    try:
        yield found
    finally:
        _ended(configuration, found)


async def _said(sandbox: SandboxEnvironment, command: str, user: str | None = None) -> str:
    done = await sandbox.exec(["bash", "-c", command], user=user, timeout=120)
    return done.stdout.strip() or done.stderr.strip()


@pytest.mark.anyio
async def test_each_service_that_runs_is_a_sandbox_and_the_marked_one_the_default(
    services: dict[str, SandboxEnvironment],
) -> None:
    assert list(services) == ["agent", "web", "store", "alone"]


@pytest.mark.anyio
async def test_containers_are_as_their_file_and_image_say(services: dict[str, SandboxEnvironment]) -> None:
    assert await _said(services["web"], "id -un; pwd; cat /built; echo $COLOUR $LEVEL $PORT") == (
        "root\n/srv/work\nbuilt\nred 3 80"
    )
    assert await _said(services["agent"], "id -un; pwd") == "agent\n/home/agent"
    assert await _said(services["agent"], "id -un", user="root") == "root"
    assert "init" in await _said(services["web"], "cat /proc/1/comm")


@pytest.mark.anyio
async def test_volumes_are_copies_of_the_evals_directory_and_the_engines_own(
    services: dict[str, SandboxEnvironment],
) -> None:
    assert await services["web"].read_file("/srv/data/note") == "from the eval's directory"
    assert "Read-only" in await _said(services["web"], "echo x > /srv/data/note")
    assert await _said(services["web"], "cat /shared/ready") == "ready"


@pytest.mark.anyio
async def test_services_reach_each_other_by_name_and_nothing_else(services: dict[str, SandboxEnvironment]) -> None:
    assert await _said(services["web"], "getent hosts store > /dev/null && echo found") == "found"
    assert await _said(services["alone"], "getent hosts store > /dev/null || echo lost") == "lost"
    assert await _said(services["alone"], "cat /proc/net/dev | grep -c eth0 || true") == "0"
    outside = "timeout 10 bash -c 'exec 3<>/dev/tcp/1.1.1.1/53' 2> /dev/null && echo out || echo kept in"
    for name in ("web", "agent", "alone"):
        assert await _said(services[name], outside) == "kept in"


@pytest.mark.anyio
async def test_limits_are_the_containers_and_the_machine_has_room(services: dict[str, SandboxEnvironment]) -> None:
    limits = await _said(services["agent"], "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/cpu.max")
    assert limits.split() == [str(256 << 20), "50000", "100000"]
    environment = services["agent"].as_type(ProvisionerSandbox).machines.environment
    assert environment.machines["primary"].distribution == "debian-13"
    assert all(probe.reached == probe.expected for probe in environment.probes)


@pytest.mark.anyio
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("anyio_backend", "service"), PAIRS, indirect=["anyio_backend"])
async def test_inspects_check_passes_in_a_service(
    services: dict[str, SandboxEnvironment], service: str, check: str
) -> None:
    try:
        await getattr(self_check, check)(services[service])
    except TimeoutError:  # an emulated CPU of a busy host gets the ten seconds that Inspect gives each command again
        await getattr(self_check, check)(services[service])


@pytest.mark.anyio
async def test_a_container_that_ends_is_unavailable_and_the_others_go_on(
    services: dict[str, SandboxEnvironment],
) -> None:
    store = services["store"].as_type(ServiceSandbox)
    kill = ["docker", "kill", store.container.identity]
    await blocking.call(lambda: store.machines.on("primary", lambda connection: connection.run(kill)))
    with pytest.raises(SandboxUnavailableError, match="The container of the service store does not run: 'exited"):
        await store.exec(["true"])
    assert await _said(services["web"], "echo on") == "on"


def test_a_dockerfile_alone_is_an_eval(home: Home, registry: str, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    configuration = configuration_of(str(tmp_path / "Dockerfile")).model_copy(update={"registry": registry})
    sandboxes = _brought_up(configuration, {})
    try:
        assert list(sandboxes) == ["default"]
        assert anyio.run(_said, sandboxes["default"], "cat /built; pwd") == "built\n/srv/work"
    finally:
        _ended(configuration, sandboxes)
