"""Tests what is read of an eval's compose file, and how its variables are replaced."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from inspect_ai.util import ComposeConfig

from provisioner.base.errors import HostError, UsageError
from provisioner.inspect import compose
from provisioner.inspect.compose import is_compose, program, read, resolve, run
from provisioner.inspect.compose_project import translated
from provisioner.inspect.configuration import Configuration, configuration_of
from provisioner.inspect.machine_family import project_of
from provisioner.store.home import Home
from tests.homes import compose as debians_compose


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$SET/${SET}", "here/here"),
        ("${EMPTY:-a}", "a"),
        ("$$SET", "$$SET"),
        ("level ${SAMPLE_METADATA_LEVEL}", "level 3"),
        ("${SAMPLE_METADATA_OTHER:-none}", "none"),
        ("${MISSING:-${SAMPLE_METADATA_LEVEL}}", "3"),
        ("${SAMPLE_METADATA_PRICE}", "5$$"),
    ],
)
def test_variables_come_from_file_process_and_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setenv("SET", "here")
    (tmp_path / ".env").write_text("EMPTY=\nSET=file\n")
    document = {"services": {"web": {"image": "x", "command": [text]}}}
    (tmp_path / "compose.yaml").write_text(json.dumps(document))
    project = translated(read(str(tmp_path / "compose.yaml")), {"LEVEL": "3", "PRICE": "5$"})
    assert json.loads(project.run)["services"]["web"]["command"] == [expected]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${EMPTY:?is not set}", "required variable EMPTY is missing a value: is not set"),
        ("${SAMPLE_METADATA_MY_FLAG}", "needs the sample's metadata 'my_flag', which it lacks"),
        ("costs ${", "invalid interpolation format"),
    ],
    ids=["required", "metadata", "dollar"],
)
def test_a_variable_that_cannot_be_replaced_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "compose.yaml").write_text(json.dumps({"services": {"web": {"image": "x", "command": [text]}}}))
    with pytest.raises(UsageError, match=re.escape(said)):
        translated(read(str(tmp_path / "compose.yaml")), {})


def test_metadata_of_a_file_is_known_before_a_sample(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("services: {web: {image: 'x:${SAMPLE_METADATA_TAG:-1}', command: [$SAMPLE_METADATA_FLAG]}}")
    assert read(str(path)).metadata_names == {"TAG", "FLAG"}


def test_a_dockerfile_alone_is_inspects_default_service(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12")
    file = read(str(tmp_path / "Dockerfile"))
    assert file.document["services"]["default"]["build"] == {"context": str(tmp_path), "dockerfile": "Dockerfile"}
    assert file.document["services"]["default"]["network_mode"] == "none"
    assert file.directory == tmp_path


def test_a_dockerfile_alone_has_a_network_where_the_machine_has_internet(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:12")
    for settings, mode in (({}, "none"), ({"internet": "full"}, None), ({"allow": ("10.0.0.1:80",)}, None)):
        configuration = Configuration.model_validate({"compose": str(tmp_path / "Dockerfile"), **settings})
        project = project_of(configuration, {})
        assert project
        assert json.loads(project.run)["services"]["default"].get("network_mode") == mode


def test_a_model_of_inspects_survives_its_log(tmp_path: Path) -> None:
    model = ComposeConfig.model_validate({"services": {"a": {"image": "x"}, "b": {"image": "y", "x-default": True}}})
    logged = ComposeConfig.model_validate(model.model_dump(exclude_none=True))
    for given in (model, logged, Configuration(compose=model), Configuration(compose=logged)):
        project = project_of(configuration_of(given), {})
        assert project
        assert project.services == ("b", "a")


def test_a_model_of_inspects_has_the_paths_of_the_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = ComposeConfig.model_validate({"services": {"a": {"image": "x", "x-default": True, "x-local": True}}})
    file = read(model)
    assert file.document["services"]["a"] == {"image": "x", "x-default": True, "x-local": True}
    assert file.directory == tmp_path


@pytest.mark.parametrize("text", ["services: {}", "services: [a]", "- a", "machines: []"])
def test_a_file_without_services_is_no_compose_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "compose.yaml").write_text(text)
    with pytest.raises(UsageError, match="is no compose file"):
        read(str(tmp_path / "compose.yaml"))


def test_aliases_that_stand_for_very_much_are_refused(tmp_path: Path) -> None:
    levels = "\n".join(f"  - &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 7))
    (tmp_path / "compose.yaml").write_text(f"services: {{a: {{image: x}}}}\nx-a:\n  - &a0 [x]\n{levels}")
    with pytest.raises(UsageError, match="says more than 100000 values"):
        read(str(tmp_path / "compose.yaml"))


@pytest.mark.parametrize("name", ["compose.yaml", "web-compose.yaml", "Dockerfile", "x.Dockerfile"])
def test_compose_files_are_known_by_their_names(name: str) -> None:
    assert is_compose(f"/somewhere/{name}")
    assert not is_compose("/somewhere/provisioner.yaml")


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH, with an apt-get that fails; Debian's keys are there."""
    keys = tmp_path / "debian-archive-trixie-stable.gpg"
    keys.touch()
    monkeypatch.setattr(compose, "DEBIAN_13_KEYS", keys)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return _script(tmp_path / "bin" / "apt-get", "echo 'E: The repository cannot be reached'\nexit 100").parent


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "home")
    found.make()
    (found.root / "compose").mkdir()
    return found


def _kept(home: Home, text: str = "#!/bin/sh\n") -> Path:
    path = home.root / "compose" / hashlib.sha256(text.encode()).hexdigest()
    path.write_text(text)
    return path


@pytest.mark.parametrize("version", ["2.21.0", "v2.40.3", "5.0.0-desktop.1"])
def test_the_operators_own_compose_is_taken(programs: Path, home: Home, version: str) -> None:
    own = _script(programs / "docker-compose", f'[ "$*" = "version --short" ] && echo {version}')
    assert program(home) == own


@pytest.mark.timeout(60)
def test_a_file_is_resolved_by_the_compose_that_is_found(
    programs: Path, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "program", program)
    monkeypatch.setenv("PROVISIONER_HOME", str(home.root))
    (programs / "docker-compose").symlink_to(debians_compose())
    (tmp_path / "compose.yaml").write_text("services: {agent: {image: 'debian:12'}}\n")
    document, _ = resolve(read(str(tmp_path / "compose.yaml")), {})
    assert document["services"]["agent"]["image"] == "debian:12"


@pytest.mark.parametrize("answer", ["echo 2.20.9", "echo 1.29.2", "echo unknown", "exit 1", "exec sleep 600"])
def test_one_that_is_too_old_or_says_no_version_is_passed_over(
    programs: Path, home: Home, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    if "sleep" in answer:
        monkeypatch.setattr(compose, "_WAIT_SECONDS", 0.1)
    _script(programs / "docker-compose", answer)
    kept = _kept(home)
    assert program(home) == kept


def test_a_plugin_of_dockers_client_is_taken_first(programs: Path, home: Home, tmp_path: Path) -> None:
    plugin = _script(tmp_path / "docker" / "cli-plugins" / "docker-compose", "echo 2.40.0")
    other = _script(programs / "docker-compose", "echo 2.30.0")
    assert program(home) == other  # there is no client
    _script(programs / "docker", "exit 1")
    compose._installed.cache_clear()  # a process looks once
    assert program(home) == plugin


@pytest.mark.usefixtures("programs")
def test_debians_is_fetched_once(home: Home) -> None:
    kept = _kept(home)
    (home.root / "compose" / "archive").mkdir()
    assert program(home) == program(home) == kept


def test_one_that_was_changed_is_not_used(programs: Path, home: Home) -> None:
    _kept(home).write_text("#!/bin/sh\necho something else\n")
    (home.root / "compose" / "archive").mkdir()
    with pytest.raises(HostError, match="apt-get failed") as raised:
        program(home)
    assert "Install Docker's plugin docker-compose-plugin" in str(raised.value.hint)
    assert "The repository cannot be reached" in str(raised.value.details)
    assert not list((home.root / "compose").glob(".fetching-*"))
    (programs / "apt-get").unlink()
    with pytest.raises(HostError, match="apt-get is not installed"):
        program(home)


def test_without_debians_keys_nothing_is_fetched(programs: Path, home: Home, tmp_path: Path) -> None:
    _script(programs / "apt-get", f"touch {tmp_path}/started")
    (tmp_path / "debian-archive-trixie-stable.gpg").unlink()
    with pytest.raises(HostError, match="keys of Debian 13's archive are missing"):
        program(home)
    assert not (tmp_path / "started").exists()


def test_compose_is_confined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPERATORS_KEY", "secret")
    script = _script(tmp_path / "compose", "cat /proc/self/environ /proc/self/limits /proc/self/status /proc/net/dev")
    output, said = run(script, [], {"GIVEN": "1"})
    told = output.decode()
    assert not said
    assert "GIVEN=1" in told
    assert "secret" not in told
    limits = {"cpu time": 10, "file size": 1 << 20, "data size": 512 << 20, "open files": 256, "core file size": 0}
    for name, most in limits.items():
        assert re.search(rf"Max {name} +{most} +{most} ", told), name
    assert re.search(r"NoNewPrivs:\s+1\n", told)
    for kind in ("Eff", "Prm", "Bnd"):
        rights = re.search(rf"Cap{kind}:\s+(\w+)", told)
        assert rights
        if kind != "Bnd" or "\nUid:\t0" in told:
            assert int(rights[1], 16) & ~(1 << 2) == 0, kind  # CAP_DAC_READ_SEARCH
    own = [["unshare", *names, "--net", "true"] for names in ([], ["--map-current-user"])]
    may = any(subprocess.run(argv, capture_output=True, check=False).returncode == 0 for argv in own)
    assert not may or re.findall(r"^ *(\S+):.*\d$", told.partition("Inter-")[2], re.MULTILINE) == ["lo"]


# Of the namespaces below this one.
LIMITS = {
    "namespaces": "true",
    "no namespaces": "echo 1 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces",
}
PROGRAM = """
import sys
from pathlib import Path
from provisioner.inspect.compose import run
print(*run(Path(sys.argv[1]), [], {}))
"""


@pytest.mark.parametrize("limits", list(LIMITS))
@pytest.mark.parametrize("user", ["0", "1000"], ids=["root", "user"])
def test_compose_runs_for_each_user_also_where_there_are_no_namespaces(tmp_path: Path, user: str, limits: str) -> None:
    script = _script(tmp_path / "compose", "cat /proc/self/status /proc/net/dev")
    below = f'{LIMITS[limits]}; exec unshare --map-user={user} --map-group={user} -- "$@"'
    argv = ["unshare", "--map-root-user", "--", "sh", "-c", below, "sh", sys.executable, "-c", PROGRAM, str(script)]
    told = subprocess.run(argv, capture_output=True, check=True).stdout.decode().replace("\\n", "\n")
    rights = re.search(r"CapEff:\\t(\w+)", told)
    assert rights
    assert int(rights[1], 16) & ~(1 << 2) == 0  # CAP_DAC_READ_SEARCH
    networks = re.findall(r"^ *(\S+): +\d", told.partition("Inter-")[2], re.MULTILINE)
    assert limits != "namespaces" or networks == ["lo"]


@pytest.mark.parametrize("text", ["kill -XCPU $$", "exec sleep 600", "exit 2", "exec head -c 2000000 /dev/zero"])
def test_compose_that_exceeds_a_limit_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    if "sleep" in text:
        monkeypatch.setattr(compose, "_WAIT_SECONDS", 0.1)
    with pytest.raises(UsageError, match=r"it is too large: Compose may take 512 MiB of memory and 10 s"):
        run(_script(tmp_path / "compose", text), [], {})


def test_what_compose_says_is_the_message(tmp_path: Path) -> None:
    text = "echo 'time=now level=warning msg=old' >&2\necho 'services.web is wrong.' >&2\nexit 1"
    with pytest.raises(UsageError, match=r"^services\.web is wrong$"):
        run(_script(tmp_path / "compose", text), [], {})
    with pytest.raises(UsageError, match="Compose cannot be given the variables that it names"):
        run(_script(tmp_path / "compose", "true"), [], {"A": "x" * (1 << 18)})
