"""Tests which file's settings count: the operator's, then the sample's own, then those beside the eval."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from inspect_ai.event import InfoEvent
from inspect_ai.hooks import TaskStart
from inspect_ai.log import EvalDataset
from inspect_ai.log._transcript import Transcript, init_transcript
from inspect_ai.util import ComposeConfig, ComposeService, SandboxEnvironmentSpec
from pydantic import BaseModel

from provisioner.base.errors import UsageError
from provisioner.inspect import evals, sandbox
from provisioner.inspect.configuration import Configuration, configuration_of, from_log, with_metadata
from provisioner.inspect.evals import Origin
from provisioner.inspect.failures import PreparationError
from provisioner.inspect.sandbox import ProvisionerSandbox
from tests.unit.fakes.cloud import FakeCloud
from tests.unit.fakes.guest import SETUP
from tests.unit.inspect.conftest import Configured


@pytest.fixture(autouse=True)
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The eval's directory, in which its process runs, which has said and used nothing yet."""
    monkeypatch.setattr(evals, "_used", set())
    directory = tmp_path / "eval"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory of a package, with a sample's own file in it."""
    directory = tmp_path / "package"
    directory.mkdir()
    return directory


def _of_operator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "operator.yaml").write_text(text)
    monkeypatch.setenv("PROVISIONER_INSPECT", str(tmp_path / "operator.yaml"))


def _compose(own: Path, settings: str = "") -> str:
    path = own / "compose.yaml"
    path.write_text(f"services: {{default: {{image: debian}}}}\n{settings}")
    return str(path)


def test_what_a_samples_own_file_leaves_out_is_taken_from_beside_the_eval(beside: Path, own: Path) -> None:
    (beside / "provisioner.yaml").write_text(
        "cloud: aws\nbudget: 5\nregistry: images\ninternet: full\nmachines: [{name: other}]\n"
    )
    found = configuration_of(_compose(own, "x-provisioner: {internet: none}\n"))
    assert (found.cloud, found.budget, found.registry) == ("aws", 5, str(beside / "images"))
    assert (found.internet, found.machines) == ("none", ())
    assert found.given_by == (f"{beside}/provisioner.yaml gives budget, cloud, registry.",)


def test_the_operators_settings_count_whatever_other_files_say(
    beside: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (beside / "provisioner.yaml").write_text("budget: 5\nttl: 3h\n")
    _of_operator(monkeypatch, tmp_path, "budget: 1\ncloud: aws\n")
    found = configuration_of(_compose(own, "x-provisioner: {budget: 900, cloud: local}\n"))
    assert (found.budget, found.cloud, found.ttl) == (1, "aws", "3h")
    assert found.given_by == (
        f"{beside}/provisioner.yaml gives ttl.",
        f"{tmp_path}/operator.yaml (PROVISIONER_INSPECT) gives budget, cloud.",
    )


@pytest.mark.parametrize("where", ["beside", "own", "operator"])
def test_any_file_can_require_kvm_whatever_the_others_say(
    beside: Path, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    said = {name: f"require_kvm: {str(name == where).lower()}" for name in ("beside", "own", "operator")}
    (beside / "provisioner.yaml").write_text(said["beside"])
    _of_operator(monkeypatch, tmp_path, said["operator"])
    assert configuration_of(_compose(own, f"x-provisioner: {{{said['own']}}}\n")).require_kvm


@pytest.mark.parametrize("kind", ["compose file", "model", "log", "configuration", "metadata"])
def test_no_file_of_a_package_widens_what_the_operator_allows(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _of_operator(monkeypatch, tmp_path, "internet: none\nbudget: 1\n")
    wide = {"internet": "full", "allow": ("pypi.org:443",), "budget": 900}
    service = ComposeService.model_validate({"image": "debian"})
    kinds: dict[str, BaseModel | str] = {
        "compose file": _compose(own, 'x-provisioner: {internet: full, allow: ["pypi.org:443"], budget: 900}\n'),
        "model": ComposeConfig.model_validate({"services": {"default": service}, "x-provisioner": wide}),
        "log": from_log(wide),
        "configuration": Configuration.model_validate(wide),
        "metadata": Configuration.model_validate({"allow": ("${SAMPLE_METADATA_WHERE}",)}),
    }
    found = with_metadata(configuration_of(kinds[kind]), {"where": "pypi.org:443"})
    assert (found.internet, found.allow, found.budget) == ("none", (), 1)


def test_the_operator_may_allow_some_places_alone(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _of_operator(monkeypatch, tmp_path, 'internet: none\nallow: ["pypi.org:443"]\n')
    found = configuration_of(_compose(own, 'x-provisioner: {allow: ["example.org:443"]}\n'))
    assert found.allow == ("pypi.org:443",)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("machines: []\nfamily: x\n", "may not have family, machines: it is for all samples"),
        ("cluod: aws\n", "may not have cluod"),
        ("budget:\n", "budget: is empty"),
        ("cloud: mars\n", r"operator.yaml \(PROVISIONER_INSPECT\) is not valid:\n  - cloud"),
        ("[]", "must be a mapping"),
    ],
    ids=["machines", "unknown", "empty", "value", "list"],
)
def test_a_mistake_in_the_operators_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    _of_operator(monkeypatch, tmp_path, text)
    with pytest.raises(UsageError, match=says):
        configuration_of(None)


def test_the_operators_file_is_one_by_an_absolute_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: Path
) -> None:
    (beside / "settings.yaml").write_text("budget: 1\n")
    # Inspect begins samples in another directory than that in which it builds their images.
    for named in (str(tmp_path / "nothing.yaml"), "settings.yaml"):
        monkeypatch.setenv("PROVISIONER_INSPECT", named)
        with pytest.raises(UsageError, match=rf"{named} \(PROVISIONER_INSPECT\) is not the absolute path of a file"):
            configuration_of(None)


def _own(own: Path, name: str) -> str:
    path = own / f"{name}.yaml"
    path.write_text("{}")
    return str(path)


def _start(config: str, beside: Path) -> None:
    """Says that an eval of two samples starts, as Inspect does once it has shown each configuration."""
    spec = SimpleNamespace(
        task="asks",
        task_file=str(beside / "asks.py"),
        sandbox=SandboxEnvironmentSpec("provisioner", config),
        dataset=EvalDataset(sample_ids=["a", "b"]),
    )
    start = cast(TaskStart, SimpleNamespace(eval_id="eval", spec=spec))
    anyio.run(evals.EvalHooks().on_task_start, start)


def test_a_file_of_the_eval_that_no_sample_uses_is_told_with_their_number(
    own: Path, beside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (beside / "aws.yaml").write_text("budget: 5\n")
    for name in ("a", "b"):
        anyio.run(ProvisionerSandbox.task_init_environment, _own(own, name), {})
    _start("aws.yaml", beside)
    assert f"{beside}/aws.yaml is not used: all 2 samples of asks name" in caplog.text
    caplog.clear()
    anyio.run(ProvisionerSandbox.task_init_environment, str(beside / "aws.yaml"), {})
    _start("aws.yaml", beside)
    assert caplog.text == ""


def test_a_file_beside_the_eval_is_used_by_samples_with_files_of_their_own(
    own: Path, beside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (beside / "provisioner.yaml").write_text("budget: 5\n")
    anyio.run(ProvisionerSandbox.task_init_environment, _own(own, "a"), {})
    _start("provisioner.yaml", beside)
    assert caplog.text == ""


def test_the_log_of_a_sample_and_the_operator_read_which_file_gave_what(
    configured: Configured, own: Path, beside: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (beside / "provisioner.yaml").write_text("ttl: 3h\n")
    line = f"{beside}/provisioner.yaml gives ttl."
    for _ in range(2):
        anyio.run(ProvisionerSandbox.task_init, "startup", _own(own, "a"))
    assert caplog.text.count(line) == 1
    _start("provisioner.yaml", beside)
    monkeypatch.chdir("/")  # samples begin in the directory of Inspect's own process
    monkeypatch.setattr(sandbox, "origin_of_sample", lambda *_: Origin("asks", "eval"))
    transcript = Transcript()
    init_transcript(transcript)
    sandboxes = anyio.run(ProvisionerSandbox.sample_init, "asks", _own(own, "a"), {})
    anyio.run(ProvisionerSandbox.sample_cleanup, "asks", None, sandboxes, False)
    began = next(event.data for event in transcript.events if isinstance(event, InfoEvent))
    assert isinstance(began, dict)
    assert began["settings"] == [line]


def test_a_family_with_the_internet_is_refused_where_the_operator_allows_none(
    cloud: FakeCloud, configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _of_operator(monkeypatch, tmp_path, "internet: none\n")
    tasks = {"main": {"instructions": "", "permissions": ["full_internet"]}}
    cloud.guest_defaults = {"values": {"setup": {**SETUP, "tasks": tasks}}}
    refusal = r"main has the permission full_internet, and .*operator\.yaml"
    with pytest.raises(PreparationError, match=refusal):
        anyio.run(ProvisionerSandbox.task_init, "startup", configured())
    with pytest.raises(UsageError, match=refusal):  # which may be the first to know the task
        anyio.run(ProvisionerSandbox.sample_init, "asks", configured(), {})
    assert cloud.existing() == []
