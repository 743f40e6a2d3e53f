"""Shows that a compose file's services run in a real machine by the rules of Docker, and pass Inspect's checks.

The file has a private network, volumes, a health check that another service waits for, and limits. The one image that
is needed comes from an archive.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from inspect_ai.util import SandboxEnvironment, SandboxUnavailableError

from provisioner.inspect import blocking
from provisioner.inspect.configuration import configuration_of
from provisioner.inspect.sandbox import ProvisionerSandbox, ServiceSandbox
from provisioner.store.home import Home
from tests import outside
from tests.inspect.checks import CHECKS, run_check
from tests.inspect.images import DEBIAN, DOCKERFILE, registry_of_archives
from tests.inspect.running import brought_up, ended

# The users of the service that Inspect's checks run in: root on asyncio, another on trio; or each on each.
PAIRS = [("asyncio", "web"), ("trio", "agent")]
if os.environ.get("PROVISIONER_TEST_CHECKS") == "all":
    PAIRS = [(loop, service) for loop in ("asyncio", "trio") for service in ("web", "agent")]

# An emulated machine of a busy host takes its memory slowly.
FULL_SECONDS = 240.0
# All in one file: a machine takes a minute to boot where there is no KVM.
# As files of published evals name their images. The archive is of an older engine, and does not have the digest.
PINNED = f"{DEBIAN}@sha256:{'a' * 64}"
COMPOSE = f"""
services:
  web:
    build: .
    command: [bash, -c, "cp /shared/ready /seen; sleep infinity"]
    init: true
    volumes: ["./data:/srv/data:ro", "shared:/shared"]
    networks: [inner]
    depends_on: {{store: {{condition: service_healthy}}}}
    environment: {{LEVEL: "${{SAMPLE_METADATA_LEVEL}}", PORT: 80}}
  agent:
    build: .
    user: agent
    working_dir: /home/agent
    command: sleep infinity
    x-default: true
    networks: [inner]
    mem_limit: 256m
    cpus: 0.5
    volumes: [".:/eval:ro"]
  store:
    image: {PINNED}
    x-local: true
    command: [bash, -c, "sleep 5; echo ready > /shared/ready; sleep infinity"]
    healthcheck: {{test: [CMD, test, -s, /shared/ready], start_interval: 1s, start_period: 300s, interval: 300s}}
    volumes: ["shared:/shared"]
    networks: [inner]
  alone:
    image: debian:12
    x-local: true
    command: sleep infinity
    network_mode: none
    restart: always
  odd:
    image: debian:12
    x-local: true
    command: sleep infinity
    cap_add: [NET_ADMIN]
    group_add: [tty, "4242"]
    security_opt: ["no-new-privileges:true"]
    ulimits: {{nofile: 2000}}
    tty: true
    oom_score_adj: 300
    ports: ["127.0.0.1::5900"]
  hog:
    image: debian:12
    x-local: true
    command: [bash, -c, "until test -e /begin; do sleep 1; done; exec tail /dev/zero"]
    network_mode: none
  done:
    image: debian:12
    x-local: true
    command: "true"
networks: {{inner: {{internal: true}}}}
volumes: {{shared: }}
x-provisioner: {{internet: full, machines: [{{memory_gb: 2}}]}}
"""
MEGABYTE = 1_000_000
DOWNLOAD = (
    f"exec 3<>/dev/tcp/{outside.THERE}/{outside.PORT}; "
    f"for _ in 1 2; do echo {MEGABYTE} >&3; head -c {MEGABYTE} <&3 | wc -c; done | xargs"
)

pytestmark = [
    pytest.mark.vm,
    pytest.mark.timeout(3600),
    pytest.mark.xdist_group("compose"),
]


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop that a test runs on."""
    return str(getattr(request, "param", "asyncio"))


@pytest.fixture(scope="module")
def services(home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, SandboxEnvironment]]:
    """The services of a sample, as Inspect gets them."""
    directory = tmp_path_factory.mktemp("eval")
    downloads = f'SHELL ["/bin/bash", "-c"]\nRUN {DOWNLOAD} > /downloaded\n'
    (directory / "Dockerfile").write_text(DOCKERFILE.replace(DEBIAN, PINNED) + downloads)
    (directory / "compose.yaml").write_text(COMPOSE)
    (directory / "data").mkdir()
    (directory / "data" / "note").write_text("from the eval's directory")
    configuration = configuration_of(str(directory / "compose.yaml")).model_copy(
        update={"registry": registry_of_archives()}
    )
    with outside.server_of_zeros():
        found = brought_up(configuration, {"level": "3"})
        try:
            yield found
        finally:
            ended(configuration, found)


async def _said(sandbox: SandboxEnvironment, command: str, user: str | None = None) -> str:
    done = await sandbox.exec(["bash", "-c", command], user=user, timeout=120)
    return done.stdout.strip() or done.stderr.strip()


@pytest.mark.anyio
async def test_each_running_service_is_a_sandbox(
    services: dict[str, SandboxEnvironment],
) -> None:
    assert list(services) == ["agent", "web", "store", "alone", "odd", "hog"]


@pytest.mark.anyio
async def test_containers_are_as_their_file_and_image_say(services: dict[str, SandboxEnvironment]) -> None:
    assert await _said(services["web"], "id -un; pwd; cat /built; echo $COLOUR $LEVEL $PORT") == (
        "root\n/srv/work\nbuilt\nred 3 80"
    )
    assert await _said(services["agent"], "id -un; pwd") == "agent\n/home/agent"
    assert await _said(services["agent"], "id -un", user="root") == "root"
    assert "init" in await _said(services["web"], "cat /proc/1/comm")


@pytest.mark.anyio
async def test_volumes_are_copies_and_the_engines_own(
    services: dict[str, SandboxEnvironment],
) -> None:
    assert await services["web"].read_file("/srv/data/note") == "from the eval's directory"
    # Its image was built of the same directory, which only root may enter.
    assert await _said(services["agent"], "cat /eval/data/note", user="root") == "from the eval's directory"
    assert "Read-only" in await _said(services["web"], "echo x > /srv/data/note")
    assert await _said(services["web"], "cat /shared/ready") == "ready"


@pytest.mark.anyio
async def test_a_service_starts_after_the_one_that_it_needs_is_healthy(services: dict[str, SandboxEnvironment]) -> None:
    assert await _said(services["web"], "cat /seen") == "ready"


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
async def test_containers_download_whether_they_are_built_or_run(services: dict[str, SandboxEnvironment]) -> None:
    assert await _said(services["web"], "cat /downloaded") == f"{MEGABYTE} {MEGABYTE}"
    assert await _said(services["odd"], DOWNLOAD) == f"{MEGABYTE} {MEGABYTE}"


# All that a process may do, and what is of one process alone.
LOOKED_AT = """cat /proc/self/status /proc/self/mountinfo /proc/self/limits /proc/self/oom_score_adj
for file in /proc/self/attr/current /proc/self/loginuid /proc/self/uid_map; do cat $file 2>&1; done
umask; pwd; id; env | sort; readlink /proc/self/ns/*; ls /proc/self/fd"""
OWN = re.compile(r"(Tgid|Ngid|Pid|PPid|NS\w+|Vm\w+|Rss\w+|SigQ|FDSize|\w*voluntary_ctxt_switches):")


def _look(text: str) -> list[str]:
    return [line for line in text.splitlines() if not OWN.match(line)]


@pytest.mark.anyio
@pytest.mark.parametrize("user", [None, "agent:4", "1000", "daemon"])
@pytest.mark.parametrize("service", ["web", "agent", "alone", "odd"])
async def test_a_command_has_exactly_the_rights_that_docker_exec_gives(
    services: dict[str, SandboxEnvironment], service: str, user: str | None
) -> None:
    if service in ("alone", "odd") and user in ("agent:4",):  # its image has no such user
        user = "root:tty"
    sandbox = services[service].as_type(ServiceSandbox)
    as_user = ["--user", user] if user else []
    argv = ["docker", "exec", *as_user, "--interactive", sandbox.container.identity, "sh", "-c", LOOKED_AT]
    theirs = await blocking.call(lambda: sandbox.machines.on("primary", lambda connection: connection.run(argv)))
    ours = await sandbox.exec(["sh", "-c", LOOKED_AT], user=user, timeout=120)
    assert _look(ours.stdout) == _look(theirs.stdout.decode())
    cgroup = await _said(sandbox, "cat /proc/self/cgroup")
    assert cgroup.startswith("0::/call-")  # below the container's, which its namespace calls /


@pytest.mark.anyio
async def test_a_command_in_a_service_is_ended_whole(services: dict[str, SandboxEnvironment]) -> None:
    sandbox = services["web"]
    with pytest.raises(TimeoutError, match="after 5 seconds"):
        await sandbox.exec(["sh", "-c", "setsid sleep 4321 & sleep 4322"], timeout=5)
    assert await _said(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 432[0-9]' || true") == "0"
    done = await sandbox.exec(["sh", "-c", "exit 124"], timeout=60)
    assert done.returncode == 124


@pytest.mark.anyio
@pytest.mark.parametrize("service", ["web", "agent"])
async def test_only_regular_files_are_read(services: dict[str, SandboxEnvironment], service: str) -> None:
    await _said(services[service], "test -e /tmp/fifo || mkfifo /tmp/fifo")
    for path in ("/dev/zero", "/tmp/fifo"):
        with pytest.raises(PermissionError, match="It is not a regular file"):
            await services[service].read_file(path)
    with pytest.raises(PermissionError, match="It is not a regular file"):
        await services[service].write_file("/tmp/fifo", "text")


@pytest.mark.anyio
async def test_a_port_that_the_engine_chose_is_shown(services: dict[str, SandboxEnvironment]) -> None:
    connection = await services["odd"].connection()
    [port] = connection.ports or []
    [place] = port.mappings
    assert (port.container_port, place.host_ip) == (5900, "127.0.0.1")
    assert place.host_port > 1024


@pytest.mark.anyio
async def test_a_container_that_was_started_again_is_noted(
    services: dict[str, SandboxEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[object] = []
    monkeypatch.setattr(
        "provisioner.inspect.sandbox.transcript",
        lambda: SimpleNamespace(info=lambda facts, source: notes.append(facts)),
    )
    sandbox = services["alone"].as_type(ServiceSandbox)
    kill = f"kill -9 $(docker inspect --format '{{{{.State.Pid}}}}' {sandbox.container.identity})"
    wait = f"until docker inspect --format '{{{{.RestartCount}}}} {{{{.State.Status}}}}' {sandbox.container.identity}"
    script = f"{kill}; {wait} | grep -qx '1 running'; do :; done"
    await blocking.call(lambda: sandbox.machines.on("primary", lambda connection: connection.run(["sh", "-c", script])))
    assert await _said(sandbox, "echo on") == "on"
    [note] = notes
    assert "restarts so far: 1" in str(note)
    sandbox.machines.look_last()
    assert sandbox.machines.memory.restarts == {"alone": 1}


@pytest.mark.anyio
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(("anyio_backend", "service"), PAIRS, indirect=["anyio_backend"])
async def test_inspects_check_passes_in_a_service(
    services: dict[str, SandboxEnvironment], service: str, check: str
) -> None:
    await run_check(services[service], check)


@pytest.mark.anyio
async def test_a_container_that_ends_is_unavailable_and_others_run(
    services: dict[str, SandboxEnvironment],
) -> None:
    store = services["store"].as_type(ServiceSandbox)
    kill = ["docker", "kill", store.container.identity]
    await blocking.call(lambda: store.machines.on("primary", lambda connection: connection.run(kill)))
    with pytest.raises(SandboxUnavailableError, match="The container of the service store does not run: exited"):
        await store.exec(["true"])
    assert await _said(services["web"], "echo on") == "on"


@pytest.mark.anyio
async def test_a_service_that_takes_all_memory_is_ended_and_its_sample_told(
    services: dict[str, SandboxEnvironment],
) -> None:
    await services["hog"].write_file("/begin", "")

    async def wait() -> None:
        begin = time.monotonic()
        while time.monotonic() - begin < FULL_SECONDS:
            await services["hog"].exec(["sleep", "1"])

    with pytest.raises(SandboxUnavailableError) as raised:
        await wait()
    said = str(raised.value)
    assert re.search(r"service hog does not run: .* ended tail \(process \d+\) in the service hog", said)
    assert "the machine's 2 GiB are full; raise `memory_gb` of its machine" in said
    assert await _said(services["web"], "echo on") == "on"
    environment = services["hog"].as_type(ProvisionerSandbox).machines.environment
    assert any("in the service hog" in warning for warning in environment.setup.warnings)
