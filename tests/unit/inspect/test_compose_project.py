"""Tests what a compose file becomes in a machine, and that each key that cannot be carried over is named."""

from __future__ import annotations

import json
import os
import re
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provisioner.base.errors import UsageError
from provisioner.inspect.compose import METADATA, read
from provisioner.inspect.compose_project import SLICE, Project, bases, translated


def project(directory: Path, text: str, **variables: str) -> Project:
    """Translates the text of a compose file, with variables of the sample's metadata and of this process."""
    (directory / "compose.yaml").write_text(text)
    metadata = {name.removeprefix(METADATA): value for name, value in variables.items() if name.startswith(METADATA)}
    with unittest.mock.patch.dict(os.environ, variables):
        return translated(read(str(directory / "compose.yaml")), metadata)


def _run(found: Project, service: str = "web") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(found.run)["services"][service]
    return value


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a build context and data."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "Dockerfile").write_text("FROM debian:12\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "settings.env").write_text("A=1\n")
    return tmp_path


def test_a_context_beside_the_files_directory_brings_its_dockerfile(directory: Path) -> None:
    (directory / "eval").mkdir()
    (directory / "app" / "web.Dockerfile").write_text("FROM debian:13\n")
    text = "services: {web: {build: {context: ../app, dockerfile: web.Dockerfile}}}"
    assert "FROM debian:13" in project(directory / "eval", text).dockerfiles


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
    assert run["environment"] == {"PORT": "80", "ANSWER": "yes", "DEBUG": "true"}
    assert run["restart"] == "no"
    assert [(port["target"], port["published"]) for port in run["ports"]] == [(80, "8080"), (22, "2222")]
    assert {"init", "network_mode", "healthcheck", "depends_on", "mem_limit", "cpus", "cap_add", "labels"} < run.keys()
    assert not any(key.startswith("x-") for key in run)
    volumes = [(each["type"], each.get("source"), each["target"]) for each in _run(found, "db")["volumes"]]
    assert volumes == [("volume", "keep", "/var/lib/postgresql"), ("volume", None, "/scratch")]
    assert json.loads(found.run)["networks"]["inner"]["internal"] is True
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
    assert builds["web"]["image"] == "sandbox-web"
    assert builds["web"]["build"] == {"context": "/opt/sandbox/context0", "dockerfile": "Dockerfile"}
    assert builds["api"]["build"]["args"] == {"KEY": "value", "LEVEL": "1"}
    assert _run(found) == {"image": "sandbox-web", "networks": {"default": None}, "cgroup_parent": SLICE}
    assert _run(found, "other")["image"] == "mine:2"
    assert found.images == ()
    assert found.local == frozenset()
    assert found.sources == (("context0", str(directory / "app")),)
    assert "FROM debian:12" in found.dockerfiles


def test_a_build_context_that_is_a_volume_too_has_two_copies(directory: Path) -> None:
    found = project(directory, "services: {web: {build: ./app, volumes: ['./app:/app']}}")
    assert found.sources == (("context0", str(directory / "app")), ("files1", str(directory / "app")))
    assert _run(found)["volumes"][0]["source"] == "/opt/sandbox/files1"  # contexts are removed after the build
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
    assert found.sources == (("files0", str(directory / "data")),)
    assert run["environment"] == {"A": "1", "FROM_HERE": "1", "SET": "x=y"}
    sources = [(each["source"], bool(each.get("read_only"))) for each in run["volumes"]]
    assert sources == [("/opt/sandbox/files0", True)] * 2 + [("/var/run/docker.sock", False)]


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
        ("container_name: x", "services.web.container_name: delete the line"),
        ("profiles: [x]", "services: there is none without a profile"),
        ("gpus: all", "services.web.gpus: a sample's machine has no GPU"),
        ("flavour: x", "services.web Additional property flavour is not allowed"),
        ("devices: [/dev/kvm]", "services.web.devices: a machine has none"),
        ("runtime: nvidia", "services.web.runtime: delete it"),
        ("platform: linux/arm64", "services.web.platform: machines are linux/amd64"),
        ("network_mode: 'container:x'", "services.web.network_mode: name a service"),
        ("security_opt: ['seccomp:./profile.json']", "services.web.security_opt: a seccomp profile"),
        ("ports: ['22:22']", "services.web.ports.0: the machine's own SSH server"),
        ("ports: ['20-30:20-30']", "services.web.ports.2: the machine's own SSH server"),
        ("mem_limit: 9999999g", "services.web.mem_limit: it must be from 0 to"),
        ("cpus: .inf", "unsupported value: +Inf"),
        ("cpus: 2000", "services.web.cpus: it must be from 0 to 1024 cores"),
        ("deploy: {resources: {limits: {cpus: '2000'}}}", "services.web.deploy.resources.limits.cpus: it must be from"),
        ("deploy: {replicas: 2}", "services.web.scale: a sandbox is one container"),
        (
            "deploy: {resources: {reservations: {devices: [{driver: nvidia, capabilities: [gpu]}]}}}",
            "services.web.deploy.resources.reservations.devices: a sample's machine has no GPU",
        ),
        ("volumes: ['/etc:/x']", "services.web.volumes.0: /etc lies outside of the file's directory"),
        ("volumes: ['~/.ssh:/x']", ".ssh lies outside of the file's directory"),
        ("volumes: [{type: bind, source: ./nothing, target: /x}]", "nothing is no file or directory"),
        ("env_file: missing.env", "missing.env not found"),
        ("build: 'https://example.com/x.git'", "services.web.build.context: it must be a directory here"),
        ("build: ./nothing", "services.web.build.context: "),
        ("build: {context: app, dockerfile: ../Dockerfile}", "services.web.build.dockerfile: "),
        ("build: {context: app, dockerfile: Other}", "services.web.build.dockerfile: "),
        ("build: {context: app, additional_contexts: {a: b}}", "services.web.build.additional_contexts.a: "),
        ("build: {context: app, ssh: [default]}", "services.web.build.ssh: delete it"),
        ("build: {context: app, platforms: [linux/arm64]}", "services.web.build.platforms: machines are linux/amd64"),
    ],
    ids=lambda value: value[:40],
)
def test_what_cannot_be_carried_over_is_named_by_its_key(directory: Path, service: str, said: str) -> None:
    image = "" if service.startswith("build") else "image: nginx, "
    with pytest.raises(UsageError, match=re.escape(said)):
        project(directory, f"services: {{web: {{{image}{service}}}}}")


IN_NETWORKS = "services: {web: {image: x, networks: [a, b]}}\nnetworks: "
WITH_VOLUME = "services: {web: {image: x, volumes: ['data:/x']}}\nvolumes: {data: {%s}}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: {web: {command: x}}", 'service "web" has neither an image nor a build context specified'),
        ("services: {web: {image: x}}\ninclude: [other.yaml]", "other.yaml: no such file or directory"),
        (f"{IN_NETWORKS} {{a: {{driver: macvlan}}, b: }}", "networks.a.driver: 'macvlan' leads out of the machine"),
        (
            f"{IN_NETWORKS} {{a: {{ipam: {{config: [{{subnet: 10.0.2.0/25}}]}}}}, b: }}",
            "networks.a.ipam.config.0.subnet: 10.0.2.0/25 overlaps 10.0.2.0/24, the machine's own network",
        ),
        (
            f"{IN_NETWORKS} {{a: {{external: true, name: n}}, b: {{external: true, name: n}}}}",
            "networks.b.name: networks.a has the same",
        ),
        (f"{IN_NETWORKS} {{a: {{name: n}}, b: {{external: true, name: n}}}}", "networks.b.name: networks.a has the"),
        (f"{IN_NETWORKS} {{a: {{name: bridge}}, b: }}", "networks.a.name: bridge is the engine's own: choose another"),
        (f"{IN_NETWORKS} {{a: {{name: none}}, b: }}", "networks.a.name: none is the engine's own: choose another"),
        (WITH_VOLUME % "external: true", "volumes.data.external: delete the line: there is nothing outside"),
        (WITH_VOLUME % "driver: nfs", "volumes.data.driver: 'nfs' leads out of the machine"),
        (WITH_VOLUME % "driver_opts: {type: nfs}", "volumes.data.driver_opts: delete it: the engine's volumes lie on"),
    ],
    ids=lambda value: value[-40:],
)
def test_what_cannot_be_carried_over_elsewhere_is_named(directory: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        project(directory, text)


def test_all_that_cannot_be_carried_over_is_told_at_once(directory: Path) -> None:
    text = "services: {a: {image: x, gpus: all, devices: [/dev/kvm]}, b: {image: y, container_name: c}}"
    with pytest.raises(UsageError) as raised:
        project(directory, text)
    assert str(raised.value).count("\n  - services.") == 3


def test_an_external_network_is_one_of_the_machines_own(directory: Path) -> None:
    text = "services: {web: {image: x, networks: [%s]}}\nnetworks: {%s: {external: true, name: %s}}"
    found = project(directory, text % ("ctf", "ctf", "ctfnet"))
    assert json.loads(found.run)["networks"] == {"ctf": {"name": "ctfnet", "ipam": {}}}
    [note] = found.notes
    assert "external network ctfnet is the sample's own" in note
    assert found.online == ("web",)


def test_an_external_network_that_the_engine_has_itself_stays_external(directory: Path) -> None:
    text = "services: {web: {image: x, networks: [b]}}\nnetworks: {b: {external: true, name: bridge}}"
    found = project(directory, text)
    assert json.loads(found.run)["networks"]["b"]["external"]
    assert found.notes == ()
    assert found.online == ("web",)
    assert project(directory, text.replace("bridge", "none")).online == ()


def test_files_of_variables_are_read_as_docker_reads_them(directory: Path) -> None:
    (directory / ".env").write_text("TAG=${BASE}-slim\nBASE=12\n".replace("TAG", "X") + "TAG=${BASE}-slim\n")
    (directory / "settings.env").write_text("export HOST\nURL=http://${HOST:-${OTHER:-none}}:80\nQUOTED='$HOST'\n")
    text = "services: {web: {image: 'debian:$TAG', env_file: [settings.env, {path: no.env, required: false}]}}"
    found = project(directory, text, HOST="example")
    assert found.images == ("debian:12-slim",)
    assert _run(found)["environment"] == {"URL": "http://none:80", "QUOTED": "$$HOST"}
    named = project(directory, text.replace("env_file:", "environment: [HOST], env_file:"), HOST="example")
    assert _run(named)["environment"] == {"HOST": "example", "URL": "http://example:80", "QUOTED": "$$HOST"}


def test_includes_extensions_merges_and_profiles_are_composes(directory: Path) -> None:
    (directory / "base.yaml").write_text("services: {base: {image: 'debian:12', environment: {A: 1}}}")
    (directory / "more.yaml").write_text("services: {db: {image: postgres}, off: {image: x, profiles: [never]}}")
    text = """
include: [more.yaml]
x-common: &common {cap_add: [NET_ADMIN]}
services:
  web:
    <<: *common
    extends: {file: base.yaml, service: base}
    environment: {B: "${NOT:-${NEITHER:-x}}"}
"""
    found = project(directory, text)
    assert found.services == ("web", "db")
    run = _run(found)
    assert (run["image"], run["environment"], run["cap_add"]) == ("debian:12", {"A": "1", "B": "x"}, ["NET_ADMIN"])
    assert found.notes == ()


def test_a_variable_that_is_not_set_is_named_as_compose_does(directory: Path) -> None:
    found = project(directory, "services: {web: {image: 'nginx:1', command: [run, '-key', '$KEY', '${KEY}']}}")
    assert found.notes == ("The variable KEY is not set: Compose puts nothing in its place.",)


def test_variables_that_no_file_names_stay_here(directory: Path) -> None:
    found = project(
        directory, "services: {web: {image: x, environment: [NAMED]}}", NAMED="yes", SECRET_OF_THE_OPERATOR="no"
    )
    assert _run(found)["environment"] == {"NAMED": "yes"}


def test_a_service_that_expects_the_operators_computer_is_told(directory: Path) -> None:
    found = project(directory, "services: {web: {image: x, extra_hosts: ['host.docker.internal:host-gateway']}}")
    assert found.notes == ("host-gateway leads web to the sample's machine, not to this computer as in Docker.",)


def test_a_directory_that_is_not_there_is_made_as_docker_does(directory: Path) -> None:
    found = project(directory, "services: {a: {image: x, volumes: ['./new:/x']}, b: {image: x, volumes: ['./new:/y']}}")
    sources = [_run(found, name)["volumes"][0]["source"] for name in ("a", "b")]
    assert sources == ["/opt/sandbox/new0"] * 2
    assert found.sources == ()


def test_the_machines_internet_keeps_its_network(directory: Path) -> None:
    text = "services: {web: {image: x}}\nnetworks: {default: {ipam: {config: [{subnet: 10.0.0.0/16}]}}}"
    (directory / "compose.yaml").write_text(text.replace("10.0.0.0/16", "10.0.3.0/24"))
    file = read(str(directory / "compose.yaml"))
    assert translated(file, {})
    with pytest.raises(UsageError, match=r"10\.0\.3\.0/24 overlaps 10\.0\.3\.0/24, the machine's own"):
        translated(file, {}, has_internet=True)


def test_images_are_built_after_those_that_they_are_made_from(directory: Path) -> None:
    for name, text in {
        "a": "ARG BASE=other\nFROM ${BASE}\n",
        "b": "FROM scratch AS z\nFROM z\nCOPY --from=c-image /x /x\n",
        "c": "FROM parent\n",
        "d": "# FROM sandbox-a\nFROM debian:12\n",
    }.items():
        (directory / name).mkdir()
        (directory / name / "Dockerfile").write_text(text)
    found = project(
        directory,
        """
services:
  a: {build: {context: a, args: {BASE: sandbox-b}}}
  b: {build: b}
  c: {build: {context: c, additional_contexts: {parent: "service:d"}}, image: c-image}
  d: {build: d}
""",
    )
    assert list(json.loads(found.build)["services"]) == ["d", "c", "b", "a"]
    contexts = json.loads(found.build)["services"]["c"]["build"]["additional_contexts"]
    assert contexts == {"parent": "docker-image://sandbox-d"}


def test_a_stage_with_the_name_of_a_service_s_image_is_no_need_of_it(directory: Path) -> None:
    (directory / "app" / "Dockerfile").write_text("FROM debian:12 AS web\nFROM web AS worker\nCOPY --from=web /x /x\n")
    services = ", ".join(
        f"{name}: {{image: {name}, build: {{context: app, target: {name}}}}}" for name in ("web", "worker")
    )
    assert project(directory, f"services: {{{services}}}").images == ()


def test_a_service_needs_only_the_images_that_its_target_reaches(directory: Path) -> None:
    stages = ("debian:12 AS base", "base AS web", "web-image AS worker", "worker-image AS last")
    (directory / "app" / "Dockerfile").write_text("".join(f"FROM {stage}\n" for stage in stages))
    targets = {"late": "LAST", "worker": "worker", "web": "'1'"}
    services = ", ".join(
        f"{name}: {{image: {name}-image, build: {{context: app, target: {target}}}}}"
        for name, target in targets.items()
    )
    found = project(directory, f"services: {{{services}}}")
    assert list(json.loads(found.build)["services"]) == ["web", "worker", "late"]


def test_a_stage_s_number_is_no_image() -> None:
    text = "FROM debian:12\nRUN --mount=from=0,target=/y true\nFROM alpine\nCOPY --from=0 /x /x\n"
    assert bases(text, {}, {}) == {"debian:12", "alpine"}
    assert bases(text, {}, {}, "0") == {"debian:12"}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, r"Dockerfile does not exist, or is no file"),  # which would keep a reader waiting
        (lambda path: path.write_bytes(bytes(2 << 20)), r"Dockerfile is larger than 1 MiB"),
    ],
    ids=["pipe", "large"],
)
def test_a_dockerfile_without_end_is_named(directory: Path, make: Callable[[Path], object], said: str) -> None:
    (directory / "app" / "Dockerfile").unlink()
    make(directory / "app" / "Dockerfile")
    with pytest.raises(UsageError, match=rf"services\.web\.build\.dockerfile: .*{said}"):
        project(directory, "services: {web: {build: ./app}}")


def test_images_that_are_made_from_each_other_are_refused(directory: Path) -> None:
    for name, base in (("a", "sandbox-b"), ("b", "sandbox-a:latest")):
        (directory / name).mkdir()
        (directory / name / "Dockerfile").write_text(f"FROM {base}\n")
    with pytest.raises(UsageError, match="their images are made from each other"):
        project(directory, "services: {a: {build: a}, b: {build: b}}")


def test_too_much_for_an_image_is_named_before_the_copy(directory: Path) -> None:
    for name, gib in (("app", 5), ("data", 4)):
        (directory / name / "large").touch()
        os.truncate(directory / name / "large", gib << 30)
    text = "services: {web: {build: ./app, volumes: ['./data:/data', './data:/other']}}"
    with pytest.raises(UsageError, match=r"services\.web\.volumes\.0: with .*data, more than 8 GiB would be copied"):
        project(directory, text)
    (directory / "data" / "large").unlink()
    assert project(directory, text)


@pytest.mark.parametrize(
    "text",
    [
        "services: {web: {image: x, command: [%s]}}" % ("$LONG, " * 20),
        f"x-long: &long {'x' * 100_000}\nservices: {{web: {{image: x, command: [{'*long, ' * 20}]}}}}",
        "services: {" + "".join(f"s{number}: {{image: x, environment: [LONG]}}, " for number in range(20)) + "}",
    ],
    ids=["variables", "aliases", "environment"],
)
def test_a_file_that_grows_by_aliases_or_variables_is_refused(directory: Path, text: str) -> None:
    with pytest.raises(UsageError, match="with its aliases and variables in their places, it is too large"):
        project(directory, text, LONG="x" * 100_000)


def test_metadata_leads_to_no_file_elsewhere(directory: Path) -> None:
    (directory / "eval").mkdir()
    text = "services: {web: {image: x, volumes: ['./$SAMPLE_METADATA_DATA:/x']}}"
    with pytest.raises(UsageError, match="lies outside of the file's directory"):
        project(directory / "eval", text, SAMPLE_METADATA_DATA="../data")
    assert project(directory / "eval", text.replace("./$SAMPLE_METADATA_DATA", "../data")).sources
