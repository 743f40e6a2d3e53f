"""Tests that the configuration of Inspect's sandbox is read strictly, and from logs leniently."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from inspect_ai.log import EvalDataset, read_eval_log, write_eval_log
from inspect_ai.util import SandboxEnvironmentSpec
from inspect_ai.util._sandbox.compose import ComposeConfig, is_docker_compatible_sandbox_type
from inspect_ai.util._sandbox.environment import deserialize_sandbox_specific_config

from provisioner.base.errors import UsageError
from provisioner.inspect.configuration import (
    COMPOSE_FILE_NAMES,
    FILE_NAMES,
    Configuration,
    Machine,
    compose_references,
    configuration_of,
    from_log,
    image_metadata,
    load,
    references,
    schema,
    with_metadata,
)
from provisioner.inspect.sandbox import ProvisionerSandbox

ROOT = Path(__file__).parents[3]


def _read(tmp_path: Path, text: str) -> Configuration:
    (tmp_path / "provisioner.yaml").write_text(text)
    return configuration_of(str(tmp_path / "provisioner.yaml"))


@pytest.mark.parametrize("name", ["provisioner.yaml", "compose.yaml"])
def test_a_path_may_go_up_from_a_file_as_in_docker(tmp_path: Path, name: str) -> None:
    (tmp_path / "task.py").touch()
    (tmp_path / "provisioner.yaml").write_text("ttl: 1h")
    (tmp_path / "compose.yaml").write_text("x-provisioner: {ttl: 1h}\nservices: {default: {image: debian}}")
    assert configuration_of(str(tmp_path / "task.py" / ".." / name)).ttl == "1h"


def test_the_published_schema_is_that_of_configurations() -> None:
    assert json.loads((ROOT / "docs" / "inspect.schema.json").read_text()) == schema()
    assert schema()["properties"]["budget"].get("type") == "number"  # null would mean no limit, and is refused


def test_the_example_is_valid() -> None:
    assert configuration_of(str(ROOT / "examples" / "inspect" / "provisioner.yaml")).by_role["primary"].name == "box"


def test_without_a_configuration_there_is_one_machine() -> None:
    configuration = configuration_of(None)
    assert configuration.by_role["primary"] == Machine(name="default", user="root")
    assert (configuration.cloud, configuration.internet) == ("local", "none")


def test_a_file_is_read_with_its_paths_relative_to_itself(tmp_path: Path) -> None:
    read = _read(
        tmp_path,
        """
machines:
  - packages: [nmap]
    run: ["echo hello > /srv/hello"]
    files: {/srv/data: ./data}
    env: {COLOUR: red}
    services: {web: "python3 -m http.server 80"}
allow: ["example.com:443"]
ttl: 2h
""",
    )
    assert read.by_role["primary"].files == (("/srv/data", str(tmp_path / "data")),)
    assert read.by_role["primary"].env == (("COLOUR", "red"),)
    assert hash(read) == hash(read.model_copy())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("machines: [{naame: x}]", "machines.0.naame: unknown key; perhaps name?"),
        ("machine: [{}]", "machine: unknown key; perhaps machines?"),
        ("family: ./here", "needs a `task`"),
        ("task: main", "belong to a task family"),
        ("family: ./here\ntask: main\ninternet: full", "says itself"),
        ("ttl: 3 fortnights", "ttl"),
        ("ttl: 30d", "time to live"),
        ("allow: [example.com]", "allow"),
        ("machines: [{packages: ['nmap; reboot']}]", "packages"),
        ("machines: [{env: {'A B': x}}]", "name of a variable"),
        ("machines: [{files: {relative: x}}]", "absolute path"),
        ('machines: [{services: {web: "a\\nb"}}]', "several lines"),
        ("machines: [{user: 'root; id'}]", "user"),
        ("machines: [{name: a}, {name: a}]", "two machines are called a"),
        ("machines: [{name: a}, {name: aux}]", "aux is reserved: choose another name"),
        ("machines: [{name: a}, {name: keys}]", "keys is reserved: choose another name"),
        ("machines: [{name: a}, {name: default}]", "only the first machine may be called default"),
        ("machines: [{name: localhost}]", "the machine itself"),
        ('machines: [{workdir: "/a\\r"}]', "workdir"),
        ('machines: [{files: {"/a\\0": x}}]', "absolute path"),
        ('machines: [{services: {web: "a\\0"}}]', "control characters"),
        ("- just a list", "must be a mapping"),
        ("cloud: mars", "cloud"),
        ("fork: machines", "fork"),
        ("cloud: aws\nfork: epochs", "environments on aws cannot be frozen"),
        ("cloud: aws\nfork: samples", "`fork: samples` needs `cloud: local`"),
        (
            "machines: [{name: Web_1}]",
            "machines.0 ('Web_1').name: 'Web_1' is not possible: a machine's name has 1 to 32",
        ),
        ("machines: [{user: A}]", "machines.0.user: 'A' is not possible: a user's name has"),
        (
            "machines: [{}, {name: web, packages: [Curl]}]",
            "machines.1 ('web').packages.0: 'Curl' is not possible: it must",
        ),
        (
            "machines: [{env: {A-B: x}}]",
            "machines.0.env: 'A-B' is not the name of a variable: use letters, digits and _",
        ),
        (
            "machines: [{name: web, env: {PORT: 1}}]",
            "('web').env: the value of 'PORT' must be text, not 1: write it in q",
        ),
        ("machines: [{env: {A-B: 1}}]", "in quotes; 'A-B' is not the name of a variable"),
        ("machines: [{name: web, naame: x}]", "machines.0 ('web').naame: unknown key; perhaps name?"),
        ("ttl: 90", "ttl: '90' is not a duration. Say the unit: 90h for hours, 90m for minutes."),
        ("machines: [{memory_gb: 4GB}]", "machines.0.memory_gb: must be a number, without a unit, not '4GB'"),
        ("machines: {box: {user: a}}", "machines: must be a list: write `- name: box` in place of `box:`"),
        ("", "is empty: write `{}` for one machine of the default kind"),
        ("registry: /x", "`registry` belongs to a compose file"),
        ("compose: x\nfamily: y\ntask: z", "`family` and `compose` exclude each other"),
        ("compose: x\nmachines: [{}, {name: b}]", "with `compose` there is one machine"),
        ("compose: x\nmachines: [{user: b}]", "each service says it: remove user of the machine"),
        ("budget:", "budget: is empty: write US dollars as a number alone, such as 5 or 2.50, or leave it out"),
        ("budget: yes", "budget: true is not an amount: write US dollars as a number alone, such as 5 or 2.50"),
        ("budget: $5", "budget: '$5' is not an amount: write US dollars as a number alone, such as 5 or 2.50"),
    ],
    ids=lambda value: value[:30].replace("\n", " ") if isinstance(value, str) else None,
)
def test_a_files_mistakes_are_told_before_creation(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        _read(tmp_path, text)


def test_an_error_names_the_full_path_of_a_relative_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("a: [", "- a list", "services: {}", "naame: x"):
        (tmp_path / "provisioner.yaml").write_text(text)
        with pytest.raises(UsageError, match=re.escape(str(tmp_path / "provisioner.yaml"))):
            configuration_of("provisioner.yaml")


def test_a_missing_file_and_another_providers_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: it does not exist") as raised:
        configuration_of(str(tmp_path / "missing.yaml"))
    assert "in the directory of the task's file" in (raised.value.hint or "")
    with pytest.raises(UsageError, match="cannot read a Machine"):
        configuration_of(Machine())
    with pytest.raises(UsageError, match="ComposeConfig has no services"):
        configuration_of(ComposeConfig(services={}))


def test_a_samples_metadata_is_put_in_its_place() -> None:
    configuration = Configuration(machines=(Machine(run=("echo ${SAMPLE_METADATA_MY_FLAG}",)),))
    assert references(configuration) == {"MY_FLAG"}
    replaced = with_metadata(configuration, {"my flag": 'a "b" ${SAMPLE_METADATA_MY_FLAG}'})
    assert replaced.by_role["primary"].run == ('echo a "b" ${SAMPLE_METADATA_MY_FLAG}',)
    with pytest.raises(UsageError, match="my_flag"):
        with_metadata(configuration, {})
    with pytest.raises(UsageError, match="nonsense"):
        with_metadata(Configuration(allow=("${SAMPLE_METADATA_X}",)), {"x": "nonsense"})


def test_a_configuration_survives_a_log_of_another_version() -> None:
    configuration = Configuration(machines=(Machine(env=(("A", "b"),), packages=("git",)),))
    spec = SandboxEnvironmentSpec("provisioner", configuration)
    assert SandboxEnvironmentSpec.model_validate_json(spec.model_dump_json()).config == configuration
    assert from_log({"cloud": "local", "of_tomorrow": 1}) == Configuration()
    assert from_log({"cloud": "mars"}).cloud == "mars"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped"])
def test_what_a_log_holds_is_refused_before_it_makes_machines(name: str) -> None:
    forged = from_log({"machines": [{"services": {name: "true"}}]})
    assert forged.by_role["primary"].services == ((name, "true"),)
    with pytest.raises(UsageError, match="is not a service's name: use 1 to 32 of a-z"):
        configuration_of(forged)
    valid = Configuration(machines=(Machine(name="box", services=(("web", "true"),)),), internet="full")
    assert configuration_of(valid) == valid
    assert hash(configuration_of(valid)) == hash(valid)


@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(machines=(Machine(files=(("/data", "/srv/data/${SAMPLE_METADATA_ID}"),)),)),
        Configuration(family="/srv/families/${SAMPLE_METADATA_ID}", task="main"),
        Configuration(family="/srv/family", task="main", env_file="/srv/${SAMPLE_METADATA_ID}.env"),
    ],
    ids=["files", "family", "env_file"],
)
def test_a_samples_metadata_leads_out_of_no_directory(configuration: Configuration) -> None:
    with pytest.raises(UsageError, match="may not lead elsewhere"):
        with_metadata(configuration, {"id": "../../etc/hostname"})
    assert "1" in with_metadata(configuration, {"id": "1"}).model_dump_json()


def test_a_samples_metadata_takes_no_more_room_than_a_file() -> None:
    configuration = Configuration(machines=(Machine(run=("${SAMPLE_METADATA_X}" * 2000,)),))
    with pytest.raises(UsageError, match="larger than"):
        with_metadata(configuration, {"x": "a" * 500_000})


def test_a_reference_works_in_every_string_and_is_checked() -> None:
    x = "${SAMPLE_METADATA_X}"
    machine = Machine(name=x, user=x, workdir=f"/{x}", packages=(f"lib{x}",), env=((x, x),), services=((x, x),),
                      files=((f"/srv/{x}", x),), run=(x,))  # fmt: skip
    configuration = Configuration(machines=(machine, Machine(name="other")), ttl=x, allow=(f"{x}:443",), region=x)
    assert Configuration.model_validate_json(configuration.model_dump_json()) == configuration
    with pytest.raises(UsageError) as raised:
        with_metadata(configuration, {"x": "1 ${SAMPLE_METADATA_X}"})
    for field in ("name", "user", "packages", "env", "services", "files", "ttl"):
        assert f"{field}" in str(raised.value)
    family = Configuration(family=x, task=x, env_file=f"{x}.env")
    replaced = with_metadata(family, {"x": "here"})
    assert (replaced.family, replaced.task) == (str(Path.cwd() / "here"), "here")
    assert replaced.env_file == str(Path.cwd() / "here.env")


@pytest.mark.parametrize(
    ("path", "given", "becomes"),
    [
        ("${SAMPLE_METADATA_DIR}", "/srv/x", "/srv/x"),
        ("${SAMPLE_METADATA_DIR}/a", "/srv/x", "/srv/x/a"),
        ("${SAMPLE_METADATA_DIR}/a", "~", "{home}/a"),
        ("${SAMPLE_METADATA_DIR}/a", "./x", "{here}/x/a"),
        ("./data/${SAMPLE_METADATA_DIR}", "x", "{here}/data/x"),
        ("/srv/${SAMPLE_METADATA_DIR}", "x", "/srv/x"),
    ],
)
def test_a_metadata_path_is_absolute_or_relative_to_the_file(
    tmp_path: Path, path: str, given: str, becomes: str
) -> None:
    """And it stays so when the configuration is read from a log, in another directory."""
    expected = becomes.format(here=tmp_path, home=Path.home())
    for text in (f"family: {path}\ntask: main\nenv_file: {path}", f"machines: [{{files: {{/srv/x: '{path}'}}}}]"):
        read = _read(tmp_path, text)
        again = from_log(json.loads(read.model_dump_json()))
        assert (again, hash(again)) == (read, hash(read))
        final = with_metadata(again, {"dir": given})
        paths = {final.family, final.env_file} if final.family else {source for _, source in final.machines[0].files}
        assert paths == {expected}


def test_the_paths_of_a_configuration_in_python_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configuration = Configuration(family="fam", task="main", env_file="./secrets.env")
    assert (configuration.family, configuration.env_file) == (str(tmp_path / "fam"), str(tmp_path / "secrets.env"))


def test_machines_of_another_version_are_read_from_a_log(tmp_path: Path) -> None:
    logged = {
        "cloud": "local",
        "machines": [
            {"name": "a", "of_tomorrow": {"x": [1]}, "packages": ["git"], "env": [["A", "b"]]},
            {"name": "NOT a name", "env": {"A": "b"}, "packages": ["; reboot"]},
        ],
    }
    read = from_log(logged)
    assert hash(read) == hash(from_log(logged))
    assert list(read.by_role) == ["primary", "NOT a name"]
    assert read.machines[0] == Machine(name="a", packages=("git",), env=(("A", "b"),))
    assert from_log({"machines": None, "cloud": "local"}) == Configuration()
    dataset = EvalDataset(name="d", samples=1, sample_ids=[1])
    spec = {"type": "provisioner", "config": logged}
    eval_spec = {"created": "2026-01-01T00:00:00+00:00", "task": "t", "model": "mockllm/model", "sandbox": spec,
                 "dataset": dataset.model_dump(), "config": {}}  # fmt: skip
    path = str(tmp_path / "log.json")
    (tmp_path / "log.json").write_text(json.dumps({"version": 2, "status": "success", "eval": eval_spec}))
    log = read_eval_log(path)
    assert log.eval.sandbox is not None
    assert log.eval.sandbox.config == read
    write_eval_log(log, path)
    again = read_eval_log(path)
    assert again.eval.sandbox is not None
    assert again.eval.sandbox.config == read


@pytest.mark.parametrize("name", COMPOSE_FILE_NAMES)
def test_a_compose_file_beside_the_task_is_used(tmp_path: Path, name: str) -> None:
    def found() -> str:
        """Returns the first file beside the task, as Inspect does."""
        return next(str(tmp_path / each) for each in ProvisionerSandbox.config_files() if (tmp_path / each).exists())

    (tmp_path / name).write_text("services: {default: {image: debian}}")
    assert configuration_of(found()) == Configuration(compose=str(tmp_path / name))
    (tmp_path / FILE_NAMES[-1]).write_text("internet: full")
    assert configuration_of(found()).internet == "full"


def test_inspect_hands_compose_files_over() -> None:
    assert is_docker_compatible_sandbox_type(ProvisionerSandbox)
    ours = Configuration(compose="/evals/compose.yaml", internet="full")
    assert deserialize_sandbox_specific_config("provisioner", ours.model_dump()) == ours


def test_a_compose_files_extension_holds_our_configuration(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(
        "services: {a: {image: x}}\n"
        "x-provisioner: {internet: full, registry: ./images, machines: [{memory_gb: 4, files: {/a: ./b}}]}"
    )
    configuration = configuration_of(str(path))
    assert (configuration.internet, configuration.registry) == ("full", str(tmp_path / "images"))
    assert configuration.machines[0].files == (("/a", str(tmp_path / "b")),)
    for wrong, said in (
        ("[1]", "x-provisioner must be a mapping"),
        ("{interned: full}", "interned: unknown key; perhaps internet?"),
        ("{compose: x}", "x-provisioner.compose is not possible"),
    ):
        path.write_text(f"services: {{a: {{image: x}}}}\nx-provisioner: {wrong}")
        with pytest.raises(UsageError, match=re.escape(said)):
            configuration_of(str(path))


def test_a_compose_file_is_relative_to_its_configuration(tmp_path: Path) -> None:
    configuration = _read(tmp_path, "compose: sub/compose.yaml\nregistry: https://mirror.example")
    assert configuration.compose == str(tmp_path / "sub" / "compose.yaml")
    assert configuration.registry == "https://mirror.example"


def test_a_compose_files_references_are_known(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("services: {a: {image: 'x:$SAMPLE_METADATA_TAG'}}")
    assert compose_references(configuration_of(str(tmp_path / "compose.yaml"))) == {"TAG"}
    assert references(configuration_of(str(tmp_path / "compose.yaml"))) == set()
    assert references(Configuration(compose="/${SAMPLE_METADATA_DIR}/compose.yaml")) == {"DIR"}
    model = ComposeConfig.model_validate({"services": {"a": {"image": "x", "command": "${SAMPLE_METADATA_A}"}}})
    configuration = Configuration(compose=model, allow=("${SAMPLE_METADATA_HOST}:443",))
    replaced = with_metadata(configuration, {"host": "10.0.0.1", "a": "b"})
    assert replaced.compose == model
    assert replaced.allow == ("10.0.0.1:443",)
    assert hash(configuration) == hash(configuration.model_copy())


def test_images_depend_on_metadata_with_a_default_and_on_none_that_lacks(tmp_path: Path) -> None:
    compose = tmp_path / "compose.yaml"
    compose.write_text("services: {a: {image: 'x:${SAMPLE_METADATA_TAG:-1}'}}")
    given = configuration_of(str(compose))
    assert image_metadata(given, {"TAG": "2", "OTHER": "3"}) == {"TAG": "2"}
    assert image_metadata(given, {"OTHER": "3"}) == {}
    built = Configuration(machines=(Machine(run=("echo ${SAMPLE_METADATA_A}",)),))
    assert image_metadata(built, {"A": "1", "B": "2"}) == {"A": "1"}
    assert image_metadata(built, {"B": "2"}) == {}
    assert image_metadata(Configuration(allow=("${SAMPLE_METADATA_A}:443",)), {"A": "10.0.0.1"}) == {}


def test_a_compose_file_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "compose.human.yaml").write_text("services: {a: {image: x}}\nx-provisioner: {internet: full}")
    configuration = configuration_of(str(tmp_path / "compose.human.yaml"))
    assert (configuration.compose, configuration.internet) == (str(tmp_path / "compose.human.yaml"), "full")


def test_settings_that_count_for_nothing_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "compose.yaml").write_text("services: {a: {image: x}}\nx-provisioner: {internet: full}")
    (tmp_path / "provisioner.yaml").write_text("compose: compose.yaml")
    assert load(tmp_path / "provisioner.yaml").internet == "none"
    assert "x-provisioner in" in caplog.text
    assert "counts for nothing" in caplog.text


def test_the_how_tos_examples_are_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "inspect.md").read_text()
    examples = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for name in ("data", "flag.txt", "notes"):
        (tmp_path / name).touch()
    names = [[machine.name for machine in _read(tmp_path, example).machines] for example in examples]
    assert names == [["box"], ["client", "web"], [], ["default", "target"]]


def test_a_logged_machine_of_a_compose_file_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("services: {web: {image: x}}\nx-provisioner: {machines: [{memory_gb: 2}]}")
    given = configuration_of(str(tmp_path / "compose.yaml"))
    assert configuration_of(given) == given
    assert configuration_of(from_log(json.loads(given.model_dump_json()))) == given
