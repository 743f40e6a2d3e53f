"""Tests what a compose file becomes in a machine, and that each key that cannot be carried over is named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from provisioner.errors import UsageError
from provisioner.inspect.compose import read
from provisioner.inspect.compose_project import Project, translated


def project(directory: Path, text: str, **variables: str) -> Project:
    """Translates the text of a compose file."""
    (directory / "compose.yaml").write_text(text)
    return translated(read(str(directory / "compose.yaml")), variables)


def _run(found: Project, service: str = "web") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(found.run)["services"][service]
    return value


_COMMAND = "services: {web: {image: x, command: [%s]}}"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a build context and data."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "Dockerfile").write_text("FROM debian:12\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "settings.env").write_text("A=1\n")
    return tmp_path


def test_what_the_engine_understands_is_passed_on_as_it_stands(directory: Path) -> None:
    text = """
name: mine
version: "3.9"
services:
  web:
    image: nginx
    command: [sh, -c, "echo $$HOME"]
    environment: {PORT: 80, ANSWER: yes, DEBUG: true}
    ports: [8080:80, 22:2222]
    restart: no
    init: true
    network_mode: none
    healthcheck: {test: [CMD, "true"], interval: 1s, retries: 3, disable: false}
    depends_on: {db: {condition: service_healthy}}
    mem_limit: 512m
    cpus: 1.5
    cap_add: [NET_ADMIN]
    privileged: true
    labels: {a: b}
    stop_grace_period: 1s
    x-anything: {not: passed}
  db:
    image: postgres:16
    volumes: ["keep:/var/lib/postgresql", "/scratch"]
    networks: [inner]
networks: {inner: {internal: true}}
volumes: {keep: }
"""
    with pytest.raises(UsageError, match=r"services\.web\.ports\.1: the machine's own SSH server has port 22"):
        project(directory, text)
    found = project(directory, text.replace("22:2222", "10.0.0.1:2222:22/tcp"))
    run = _run(found)
    assert run["command"] == ["sh", "-c", "echo $$HOME"]  # Compose replaces $$ again
    assert run["environment"] == {"PORT": 80, "ANSWER": "yes", "DEBUG": True}
    assert run["restart"] == "no"
    assert run["ports"] == ["8080:80", "10.0.0.1:2222:22/tcp"]
    assert {"init", "network_mode", "healthcheck", "depends_on", "mem_limit", "cpus", "cap_add", "labels"} < run.keys()
    assert not any(key.startswith("x-") for key in run)
    assert _run(found, "db")["volumes"] == ["keep:/var/lib/postgresql", "/scratch"]
    assert json.loads(found.run)["networks"] == {"inner": {"internal": True}}
    assert found.images == ("nginx", "postgres:16")
    assert found.cpus == 2


def test_images_are_built_of_copies_and_services_only_name_them(directory: Path) -> None:
    found = project(
        directory,
        """
services:
  web: {build: ./app, pull_policy: always}
  api: {build: {context: app, args: {KEY: , LEVEL: 1}, target: last}, image: "mine:2"}
  other: {image: "mine:2", x-local: true}
""",
        KEY="value",
    )
    builds = json.loads(found.build)["services"]
    assert builds["web"] == {"image": "sandbox-web", "build": {"context": "/opt/sandbox/context0"}}
    assert builds["api"]["build"]["args"] == {"KEY": "value", "LEVEL": 1}
    assert _run(found) == {"image": "sandbox-web"}
    assert _run(found, "other") == {"image": "mine:2"}
    assert found.images == ()
    assert found.local == frozenset()
    assert found.sources == (("context0", str(directory / "app")),)
    assert "FROM debian:12" in found.dockerfiles


def test_a_build_context_that_is_a_volume_too_has_two_copies(directory: Path) -> None:
    found = project(directory, "services: {web: {build: ./app, volumes: ['./app:/app']}}")
    assert found.sources == (("context0", str(directory / "app")), ("files1", str(directory / "app")))
    assert _run(found)["volumes"] == ["/opt/sandbox/files1:/app"]  # contexts are removed after the build
    assert found.copied_bytes == 2 * project(directory, "services: {web: {build: ./app}}").copied_bytes


def test_an_absolute_dockerfile_is_one_of_its_context(directory: Path) -> None:
    found = project(
        directory, f"services: {{web: {{build: {{context: app, dockerfile: {directory}/app/Dockerfile}}}}}}"
    )
    assert json.loads(found.build)["services"]["web"]["build"]["dockerfile"] == "Dockerfile"


@pytest.mark.parametrize(("size", "gib"), [("2Gi", 2), ("512MiB", 0.5), ("0.001t", 1.024), ("2 GB", 2)])
def test_sizes_are_written_as_docker_reads_them(directory: Path, size: str, gib: float) -> None:
    found = project(directory, f"services: {{web: {{image: x, mem_limit: {size}}}}}")
    assert found.memory_gb == pytest.approx(max(2.0, 1 + gib))


def test_what_changes_a_container_alone_changes_no_image(directory: Path) -> None:
    text = "services: {web: {build: ./app, command: 'echo $FLAG', environment: [FLAG]}}"
    one, other = project(directory, text, FLAG="1"), project(directory, text, FLAG="2")
    assert (one.build, one.images, one.sources) == (other.build, other.images, other.sources)
    assert one.run != other.run


def test_files_of_the_evals_directory_are_copied(directory: Path) -> None:
    found = project(
        directory,
        """
services:
  web:
    image: nginx
    env_file: settings.env
    environment: [FROM_HERE, NOT_SET, SET=x=y]
    volumes:
      - ./data:/srv/data:ro
      - {type: bind, source: data, target: /other, read_only: true}
      - /var/run/docker.sock:/var/run/docker.sock
""",
        FROM_HERE="1",
    )
    run = _run(found)
    assert found.sources == (("files0", str(directory / "settings.env")), ("files1", str(directory / "data")))
    assert run["env_file"] == ["/opt/sandbox/files0"]
    assert run["environment"] == {"FROM_HERE": "1", "SET": "x=y"}
    assert run["volumes"][0] == "/opt/sandbox/files1:/srv/data:ro"
    assert run["volumes"][1]["source"] == "/opt/sandbox/files1"
    assert run["volumes"][2] == "/var/run/docker.sock:/var/run/docker.sock"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{a: {image: x}, b: {image: x}}", ("a", "b")),
        ("{a: {image: x}, default: {image: x}}", ("default", "a")),
        ("{a: {image: x}, default: {image: x}, b: {image: x, x-default: true}}", ("b", "a", "default")),
    ],
    ids=["the first", "called default", "marked"],
)
def test_the_default_service_is_found_by_dockers_rules(directory: Path, text: str, names: tuple[str, ...]) -> None:
    assert project(directory, f"services: {text}").services == names


def test_a_machine_has_room_for_its_services(directory: Path) -> None:
    limits = "{deploy: {resources: {limits: {memory: 3g, cpus: '3.5'}}}, image: x}"
    found = project(directory, f"services: {{a: {limits}, b: {{image: x, mem_limit: 512m}}, c: {{image: x}}}}")
    assert (found.cpus, found.memory_gb) == (4, 5.5)
    reserved = "{deploy: {resources: {reservations: {memory: 2g}}}, image: x}"
    assert project(directory, f"services: {{a: {reserved}, b: {{image: x, mem_reservation: 4g}}}}").memory_gb == 7
    assert project(directory, "services: {a: {image: x}}").memory_gb == 2


def test_services_that_docker_gives_internet_are_known(directory: Path) -> None:
    found = project(
        directory,
        """
services:
  open: {image: x}
  none: {image: x, network_mode: none}
  shared: {image: x, network_mode: "service:none"}
  inner: {image: x, networks: [inner]}
  both: {image: x, networks: {inner: , outer: }}
networks: {inner: {internal: true}, outer: }
""",
    )
    assert found.online == ("open", "both")


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("container_name: x", "services.web.container_name: remove it: Inspect's docker sandbox refuses it, too"),
        ("secrets: [x]", "services.web.secrets: use a volume"),
        ("configs: [x]", "services.web.configs: use a volume"),
        ("profiles: [x]", "services.web.profiles: remove"),
        ("gpus: all", "services.web.gpus: a machine has no GPUs"),
        ("extends: x", "services.web.extends: write the service out"),
        ("flavour: x", "services.web.flavour: unknown, or not carried over"),
        ("devices: [/dev/kvm]", "services.web.devices: a machine has none"),
        ("runtime: nvidia", "services.web.runtime: the machine's engine has runc"),
        ("platform: linux/arm64", "services.web.platform: machines are linux/amd64"),
        ("network_mode: 'container:x'", "services.web.network_mode: name a service"),
        ("security_opt: ['seccomp:./profile.json']", "services.web.security_opt: a seccomp profile"),
        ("ports: ['22:22']", "services.web.ports.0: the machine's own SSH server"),
        ("ports: ['20-30:20-30']", "services.web.ports.0: the machine's own SSH server"),
        ("ports: [{target: 80}]", "services.web.ports.0"),
        ("volumes: ['data:/x']", "services.web.volumes: 'data' is not one of the file's volumes"),
        ("volumes: [{type: volume, source: data, target: /x}]", "services.web.volumes: 'data' is not one of"),
        ("ipc: service:db", "services.web.ipc: 'db' is not one of the file's services"),
        ("network_mode: service:db", "services.web.network_mode: 'db' is not one of the file's services"),
        ("pid: service:db", "services.web.pid: 'db' is not one of the file's services"),
        ("links: ['db:other']", "services.web.links: 'db' is not one of the file's services"),
        ("depends_on: [db]", "services.web.depends_on: 'db' is not one of the file's services"),
        ("networks: [far]", "services.web.networks: 'far' is not one of the file's networks"),
        ("mem_limit: much", "services.web.mem_limit: it must be a size such as 512m or 2g, up to 65536g, not 'much'"),
        ("mem_reservation: 1e3", "services.web.mem_reservation: it must be a size"),
        (f"mem_limit: {'9' * 400}g", "services.web.mem_limit: it must be a size"),
        ("cpus: .inf", "services.web.cpus: it must be a number from 0 to 1024, not inf"),
        ("cpus: .nan", "services.web.cpus: it must be a number from 0 to 1024, not nan"),
        (
            "deploy: {resources: {limits: {cpus: many}}}",
            "services.web.deploy.resources.limits.cpus: it must be a number from 0 to 1024, not 'many'",
        ),
        (
            "deploy: {resources: {limits: {memory: 1x}}}",
            "services.web.deploy.resources.limits.memory: it must be a size",
        ),
        ("deploy: {replicas: 2}", "services.web.deploy: Unknown field: 'replicas'"),
        (
            "deploy: {resources: {reservations: {devices: [{driver: nvidia}]}}}",
            "services.web.deploy.resources.reservations.devices: a machine has no such devices",
        ),
        ("volumes: ['./nothing:/x']", "services.web.volumes.0: "),
        ("volumes: ['/etc:/x']", "services.web.volumes.0: /etc lies outside of the file's directory"),
        ("volumes: ['~/.ssh:/x']", ".ssh lies outside of the file's directory"),
        ("volumes: [{type: image, source: x, target: /x}]", "services.web.volumes.0.type: 'image' cannot be"),
        ("env_file: missing.env", "services.web.env_file: "),
        ("healthcheck: {shape: round}", "services.web.healthcheck.shape: unknown"),
        ("build: 'https://example.com/x.git'", "services.web.build.context: it must be a directory here"),
        ("build: ./nothing", "services.web.build.context: "),
        ("build: {context: app, dockerfile: ../Dockerfile}", "services.web.build.dockerfile: it must lie in"),
        ("build: {context: app, dockerfile: Other}", "services.web.build.dockerfile: "),
        ("build: {context: app, additional_contexts: {a: b}}", "services.web.build.additional_contexts: copy what"),
        ("build: {context: app, ssh: [default]}", "services.web.build.ssh: unknown, or not carried over"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_be_carried_over_is_named_by_its_key(directory: Path, service: str, said: str) -> None:
    image = "" if service.startswith("build") else "image: nginx, "
    with pytest.raises(UsageError, match=re.escape(said)):
        project(directory, f"services: {{web: {{{image}{service}}}}}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("include: [other.yaml]", "include: write the services out"),
        ("secrets: {a: {file: b}}", "secrets: use a volume"),
        ("networks: {a: {external: true}}", "networks.a.external: there is nothing outside of the sample's machine"),
        ("networks: {a: {driver: macvlan}}", "networks.a.driver: 'macvlan' leads out of the machine"),
        ("volumes: {a: {external: true}}", "volumes.a.external: there is nothing outside"),
        ("volumes: {a: {driver: nfs}}", "volumes.a.driver: 'nfs' leads out of the machine"),
        ("volumes: {a: {driver_opts: {type: nfs}}}", "volumes.a.driver_opts: the engine's volumes lie on"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_be_carried_over_at_the_files_top_is_named(directory: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        project(directory, f"services: {{web: {{image: nginx}}}}\n{text}")


@pytest.mark.parametrize(
    "line",
    [
        "URL=http://${HOST}:80",
        "HOST=$HOST",
        "HOST",
        "export HOST",
        'URL="$HOST #1"',
        "URL=${HOST:-localhost}",
        "A=1\nB=$A$HOST",
    ],
)
def test_a_file_of_variables_takes_none_of_this_computer(directory: Path, line: str) -> None:
    (directory / "settings.env").write_text(f"{line}\n")
    text = "services: {web: {image: nginx, env_file: [settings.env]}}"
    with pytest.raises(UsageError, match=r"services\.web\.env_file: .*settings\.env takes HOST from this computer"):
        project(directory, text, HOST="example")
    assert project(directory, text).sources  # Compose leaves it empty here, too


def test_environment_gives_a_file_of_variables_no_values(directory: Path) -> None:
    (directory / "settings.env").write_text("HOST\nURL=$HOST\n")
    text = "services: {web: {image: nginx, env_file: settings.env, environment: {HOST: db}}}"
    with pytest.raises(UsageError, match="takes HOST from this computer"):
        project(directory, text, HOST="example")


@pytest.mark.parametrize(
    "line",
    ["HOST=a\nURL=$HOST", "# $HOST", "URL='$HOST'", "URL=b # $HOST", "URL=$$HOST", 'URL="\\$HOST"',
     "A='{\n$HOST\nHOST\n}'",
     "\ufeffHOST=a\nURL=$HOST", "my-key='$HOST'", "GIVEN", "URL=$FIRST",
     'URL="x"  # $HOST', 'A="{\\"k\\": 1,\n$HOST"'],
)  # fmt: skip
def test_a_file_of_variables_may_name_its_own(directory: Path, line: str) -> None:
    (directory / "first.env").write_text("FIRST=1\n")
    (directory / "settings.env").write_text(f"{line}\n")
    text = "services: {web: {image: nginx, env_file: [first.env, settings.env], environment: [GIVEN]}}"
    assert project(directory, text, HOST="example", FIRST="2", GIVEN="3").sources


def test_a_file_of_variables_outside_is_told_once_and_not_read(directory: Path) -> None:
    (directory.parent / "outside.env").write_text("HOST\n")
    text = f"services: {{web: {{image: nginx, env_file: {directory.parent}/outside.env}}}}"
    with pytest.raises(UsageError) as raised:
        project(directory, text, HOST="example")
    assert raised.value.message.count("outside.env") == 1


def test_too_much_for_an_image_is_named_before_the_copy(directory: Path) -> None:
    for name, gib in (("app", 5), ("data", 4)):
        (directory / name / "large").touch()
        os.truncate(directory / name / "large", gib << 30)
    text = "services: {web: {build: ./app, volumes: ['./data:/data', './data:/other']}}"
    with pytest.raises(UsageError, match=r"services\.web\.volumes\.0: with .*data, more than 8 GiB would be copied"):
        project(directory, text)
    (directory / "data" / "large").unlink()
    assert project(directory, text)


def test_a_dockerfile_without_end_is_named(directory: Path) -> None:
    os.truncate(directory / "app" / "Dockerfile", 2 << 30)
    with pytest.raises(UsageError, match=r"services\.web\.build\.dockerfile: .*Dockerfile is larger than 1 MiB"):
        project(directory, "services: {web: {build: ./app}}")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (_COMMAND % ("$LONG, " * 20), "services.web.command."),
        (f"x-long: &long {'x' * 100_000}\n{_COMMAND % ('*long, ' * 20)}", "services.web.command."),
        (f"x-long: &long {{{'x' * 1000}: 1}}\n{_COMMAND % ('*long, ' * 2000)}", "services.web.command."),
        (
            "services: {" + "".join(f"s{number}: {{image: x, environment: [LONG]}}, " for number in range(20)) + "}",
            "services.s10.environment",
        ),
    ],
    ids=["variables", "aliases", "keys", "environment"],
)
def test_a_file_that_grows_by_aliases_is_named_by_its_key(directory: Path, text: str, where: str) -> None:
    with pytest.raises(UsageError, match=re.escape(where) + ".*the file has more than 1048576 characters"):
        project(directory, text, LONG="x" * 100_000)


def test_all_that_cannot_be_carried_over_is_told_at_once(directory: Path) -> None:
    with pytest.raises(UsageError) as raised:
        project(directory, "services: {a: {image: x, gpus: all, secrets: [b]}, b: {image: y, container_name: c}}")
    assert str(raised.value).count("\n  - services.") == 3


def test_a_service_needs_an_image(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"services\.web: needs `image` or `build`"):
        project(directory, "services: {web: {command: x}}")


def test_metadata_leads_to_no_file_elsewhere(directory: Path) -> None:
    (directory / "eval").mkdir()
    text = "services: {web: {image: x, volumes: ['./$SAMPLE_METADATA_DATA:/x']}}"
    with pytest.raises(UsageError, match="lies outside of the file's directory"):
        project(directory / "eval", text, SAMPLE_METADATA_DATA="../data")
    assert project(directory / "eval", text.replace("./$SAMPLE_METADATA_DATA", "../data")).sources
