"""A stack: how Terraform is asked, heard and judged, with small programs in its place; see tests/terraform too."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from provisioner.base.errors import HostError, TerraformError
from provisioner.terraform.render import VALUES
from provisioner.terraform.stack import Stack
from tests.unit.terraform.conftest import Program, error_line, runs, say, silent
from tests.waiting import BOUND_SECONDS


def test_outputs_are_found_among_lines_that_are_not_json(program: Program, tmp_path: Path) -> None:
    outputs = json.dumps({"type": "outputs", "outputs": {"environments": {"value": {"one": 1}, "sensitive": False}}})
    stack = program(say(tmp_path, f"panic: not json\n[1, 2]\n\n\x1b[31m\n{outputs}"))
    assert stack.apply(silent) == {"environments": {"one": 1}}


def test_an_apply_creates_as_much_at_once_as_it_is_told(program: Program, tmp_path: Path) -> None:
    program("exit 0").apply(silent, 5)
    assert "-parallelism=5" in runs(tmp_path)[0].split()


def test_an_error_shows_each_summary_once_and_the_last_lines(program: Program, tmp_path: Path) -> None:
    detail = "\n".join(f"line {number} {'x' * 1000}" for number in range(100))
    lines = [error_line("local-exec provisioner error", detail)] * 2
    stack = program(say(tmp_path, "\n".join(lines)) + "; exit 1")
    with pytest.raises(TerraformError) as failure:
        stack.apply(silent)
    shown = (failure.value.details or "").splitlines()
    assert failure.value.message == "terraform apply failed: local-exec provisioner error."
    assert (len(shown), max(map(len, shown))) == (20, 300)
    assert shown[-1].startswith("line 99 ")


def test_an_error_without_diagnostics_shows_the_last_lines(program: Program) -> None:
    stack = program("echo 'Segmentation fault' >&2; exit 139")
    with pytest.raises(TerraformError) as failure:
        stack.remove((), silent)
    assert failure.value.message == "terraform destroy failed: exit code 139."
    assert failure.value.details == "Segmentation fault"


def test_all_that_terraform_says_is_in_the_log_of_its_runs(program: Program) -> None:
    stack = program("echo first; echo second >&2")
    stack.apply(silent)
    stack.apply(silent)
    assert stack.log_text() == "first\nsecond\n" * 2


@pytest.mark.parametrize(
    ("said", "attempts"),
    [
        ("fork/exec .terraform/providers/x: text file busy", 3),
        ("timeout while waiting for plugin to start", 3),
        ("read tcp 192.0.2.1:443: connection reset by peer", 3),
        ("reading EC2 Key Pair (tests-main-abc-primary): couldn't find resource", 3),
        ("https response error StatusCode: 400, api error RequestExpired: Request has expired.", 3),
        (
            "https response error StatusCode: 403, api error UnauthorizedOperation: You are not authorized to do this.",
            3,
        ),
        ("Invalid value for variable", 1),
    ],
    ids=["busy", "plugin", "reset", "unseen", "session", "right", "other"],
)
def test_only_an_error_that_passes_by_itself_is_tried_again(
    program: Program, tmp_path: Path, said: str, attempts: int
) -> None:
    stack = program(say(tmp_path, error_line("Failed", said)) + "; exit 1")
    told: list[str] = []
    with pytest.raises(TerraformError, match="Failed"):
        stack.apply(told.append)
    assert (len(runs(tmp_path)), len(told)) == (attempts, attempts - 1)


def test_a_right_that_may_be_missing_is_named_at_the_first_refusal(program: Program, tmp_path: Path) -> None:
    said = "creating EC2 Instance: operation error EC2: RunInstances, https response error StatusCode: 403, "
    stack = program(say(tmp_path, error_line("Failed", f"{said}api error UnauthorizedOperation: No.")) + "; exit 1")
    told: list[str] = []
    with pytest.raises(TerraformError):
        stack.apply(told.append)
    assert "the cloud refuses ec2:RunInstances: a right is missing, or " in told[0]


def test_an_apply_whose_state_was_not_written_is_not_repeated(program: Program, tmp_path: Path) -> None:
    said = say(tmp_path, error_line("Failed to save state", "api error ExpiredToken"))
    stack = program(f"touch errored.tfstate; {said}; exit 1")
    with pytest.raises(TerraformError, match="Failed to save state"):
        stack.apply(silent)
    assert len(runs(tmp_path)) == 1


def test_a_second_attempt_that_works_is_enough(program: Program, tmp_path: Path) -> None:
    said = say(tmp_path, error_line("Failed", "connection reset by peer"))
    program(f"[ $(wc -l < {tmp_path}/runs) -gt 1 ] || {{ {said}; exit 1; }}").apply(silent)
    assert len(runs(tmp_path)) == 2


def test_an_interruption_before_the_last_file_leaves_no_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr("provisioner.terraform.stack.write_atomically", lambda path, text: written.append(path.name))
    Stack(tmp_path / "stack").write({"main.tf": "a", "modules/environment/main.tf": "b", "values.json": "c"})
    assert written[-1] == "main.tf"
    assert not Stack(tmp_path / "stack").exists


def test_forgetting_environments_needs_no_terraform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(tmp_path / "missing"))
    stack = Stack(tmp_path / "stack")
    stack.write({"main.tf": "", "environments.auto.tfvars.json": '{"environments": {"one": {}, "two": {}}}'})
    stack.forget({"one"})
    assert stack.exists
    stack.forget({"two"})
    assert not (tmp_path / "stack").exists()


def test_all_environments_of_a_stack_go_with_its_directory(program: Program, tmp_path: Path) -> None:
    stack = program("exit 0")
    stack.write({"environments.auto.tfvars.json": '{"environments": {"one": {}, "two": {}}}'})
    stack.remove({"one", "two"}, silent)
    assert [line.split()[0] for line in runs(tmp_path)] == ["destroy"]
    assert not (tmp_path / "stack").exists()
    stack.remove({"one", "two"}, silent)
    assert len(runs(tmp_path)) == 1


def test_some_environments_go_with_an_apply_of_the_others(program: Program, tmp_path: Path) -> None:
    stack = program("cat environments.auto.tfvars.json")
    stack.write({"environments.auto.tfvars.json": '{"environments": {"one": {}, "two": {}}}'})
    stack.remove({"one"}, silent)
    [line] = runs(tmp_path)
    assert line.split()[0] == "apply"
    assert "-refresh=false" in line
    assert '"two"' in stack.log_text()
    assert '"one"' not in stack.log_text()


def test_a_repetition_believes_the_state(program: Program, tmp_path: Path) -> None:
    said = say(tmp_path, error_line("couldn't find resource"))
    stack = program(f"[ $(wc -l < {tmp_path}/runs) -gt 1 ] || {{ {said}; exit 1; }}")
    stack.apply(silent, refresh=True)
    first, second = runs(tmp_path)
    assert "-refresh=false" not in first
    assert "-refresh=false" in second


@pytest.mark.parametrize(
    ("said", "code"),
    [("Successfully removed 2 resource instance(s).", 0), ("No matching objects found. To view", 1)],
    ids=["known", "unknown"],
)
def test_what_the_cloud_has_removed_is_forgotten(program: Program, tmp_path: Path, said: str, code: int) -> None:
    stack = program(f"{say(tmp_path, said)}; exit {code}")
    stack.write({VALUES: '{"environments": {"one": {}, "two": {}}}'})
    stack.release("one", silent)
    assert runs(tmp_path) == ['state rm module.environment["one"]']
    assert set(json.loads((tmp_path / "stack" / VALUES).read_text())["environments"]) == {"one", "two"}


def test_what_could_not_be_forgotten_is_told(program: Program) -> None:
    with pytest.raises(TerraformError, match="state rm"):
        program("echo broken; exit 1").release("one", silent)


def test_a_destroy_that_fails_keeps_the_stack(program: Program, tmp_path: Path) -> None:
    stack = program("exit 1")
    with pytest.raises(TerraformError):
        stack.remove((), silent)
    assert stack.exists


def test_an_error_names_the_environments_that_it_is_about(program: Program, tmp_path: Path) -> None:
    address = {"address": 'module.environment["one"].aws_instance.this'}
    lines = [
        json.dumps({"type": "diagnostic", "diagnostic": {"severity": "error", "summary": "Full", **extra}})
        for extra in (address, {"address": "module.network.x"}, {})
    ]
    stack = program(say(tmp_path, "\n".join(lines)) + "; exit 1")
    with pytest.raises(TerraformError) as failure:
        stack.apply(silent)
    assert failure.value.environments == {"one"}


def test_a_state_locked_by_another_controller_is_explained(program: Program, tmp_path: Path) -> None:
    stack = program(say(tmp_path, error_line("Error acquiring the state lock")) + "; exit 1")
    with pytest.raises(TerraformError, match="another controller is working on this stack") as failure:
        stack.apply(silent)
    assert "force-unlock" in (failure.value.hint or "")


def test_a_state_that_could_not_be_written_is_handed_in_first(program: Program, tmp_path: Path) -> None:
    stack = program("exit 0")
    (tmp_path / "stack" / "errored.tfstate").write_text("{}")
    stack.apply(silent)
    assert [line.split()[0] for line in runs(tmp_path)] == ["state", "apply"]
    assert runs(tmp_path)[0] == "state push errored.tfstate"
    assert not (tmp_path / "stack" / "errored.tfstate").exists()


def test_only_a_stack_with_a_backend_is_remote(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "stack")
    stack.write({"main.tf": ""})
    assert not stack.is_remote
    stack.write({"backend.tf.json": "{}"})
    assert stack.is_remote


def test_a_foreign_state_is_read_after_the_providers(program: Program, tmp_path: Path) -> None:
    stack = program("exit 0")
    (tmp_path / "terraform").write_text(f'#!/bin/sh\necho "$@" $(cd .terraform && ls *.tfstate) >> {tmp_path}/runs\n')
    remembered = tmp_path / "stack" / ".terraform" / "terraform.tfstate"
    remembered.parent.mkdir()
    remembered.write_text("{}")
    stack.write({"backend.tf.json": "{}"})
    stack.apply(silent)
    stack.apply(silent)
    first, second, *later = runs(tmp_path)
    assert set(first.split()) == {"init", "-backend=false", "-input=false", "-json", "-no-color"}
    assert set(second.split()) == {*first.split(), "-lockfile=readonly", "terraform.tfstate"} - {"-backend=false"}
    assert [line.split()[0] for line in later] == ["apply", "apply"]


def test_the_log_is_bounded_and_a_stack_without_one_says_nothing(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "stack")
    assert stack.log_text() == ""
    stack.write({"main.tf": ""})
    (tmp_path / "stack" / "terraform.log").write_text("x" * (2 << 20) + "end")
    assert stack.log_text().endswith("end")
    assert len(stack.log_text()) == 1 << 20


def test_two_controllers_take_turns(program: Program, tmp_path: Path) -> None:
    stack = program("exit 0")
    told: list[str] = []
    waits = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        waits.set()

    descriptor = os.open(tmp_path / "stack", os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    thread = threading.Thread(target=stack.apply, args=(tell,))
    thread.start()
    assert waits.wait(BOUND_SECONDS)
    assert not (tmp_path / "runs").exists()
    os.close(descriptor)
    thread.join()
    assert told == ["Waiting for another provisioner that works on the stack stack"]
    assert len(runs(tmp_path)) == 1


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"other": {}}'], ids=["empty", "cut", "list", "other"])
def test_damaged_values_are_not_taken_for_an_empty_stack(program: Program, tmp_path: Path, damaged: str) -> None:
    stack = program("")
    stack.write({"main.tf": "", VALUES: damaged})
    with pytest.raises(TerraformError, match="cannot be read"):
        stack.remove({"one"}, silent)
    assert not (tmp_path / "runs").exists()
    assert stack.exists


@pytest.mark.parametrize("name", ["terraform", "tofu"])
def test_the_versions_of_an_applied_stack_are_known(program: Program, tmp_path: Path, name: str) -> None:
    version = json.dumps({"type": "version", "@message": "x", name: "1.11.4", "ui": "1.2"})
    stack = program(say(tmp_path, version))
    assert stack.versions() == {}
    stack.apply(silent)
    assert stack.versions() == {"Terraform": "1.11.4"}
    (tmp_path / "stack" / ".terraform.lock.hcl").write_text(
        '# comment\n\nprovider "registry.terraform.io/hashicorp/aws" {\n  version     = "5.100.0"\n  hashes = []\n}\n'
    )
    assert stack.versions() == {"Terraform": "1.11.4", "provider hashicorp/aws": "5.100.0"}
    assert runs(tmp_path) == [line for line in runs(tmp_path) if line.startswith("apply ")]


def opentofu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """Makes a shell script OpenTofu, as far as its name goes. It lists its runs in `tofu-runs`."""
    path = tmp_path / "tofu"
    path.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/tofu-runs\n[ "$1" = init ] && exit 0\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("PROVISIONER_TERRAFORM", str(path))
    return tmp_path / "tofu-runs"


def test_messages_name_opentofu_if_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("provisioner.terraform.stack.RETRY_SECONDS", (0.0,))
    error = error_line("Failed", "connection reset by peer")
    opentofu(tmp_path, monkeypatch, f"echo '{error}'; exit 1")
    stack = Stack(tmp_path / "stack")
    stack.write({"main.tf": ""})
    told: list[str] = []
    with pytest.raises(TerraformError, match="tofu apply failed: Failed"):
        stack.apply(told.append)
    assert told[0].startswith("tofu apply failed: the network dropped a connection")
    opentofu(tmp_path, monkeypatch, f"echo '{error_line('Error acquiring the state lock')}'; exit 1")
    with pytest.raises(TerraformError) as failure:
        stack.remove((), silent)
    assert failure.value.message.startswith("tofu destroy did nothing")
    assert "`tofu force-unlock`" in (failure.value.hint or "")


def test_each_of_the_two_programs_initialises_a_root_for_itself(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = program("exit 0"), Stack(tmp_path / "second")
    second.write({"main.tf": ""})
    first.apply(silent)
    assert not (tmp_path / "tofu-runs").exists()
    ran = opentofu(tmp_path, monkeypatch, "exit 0")
    first.apply(silent)
    first.apply(silent)
    second.apply(silent)  # which copies what OpenTofu has installed for the first
    assert [line.split()[0] for line in ran.read_text().splitlines()] == ["init", "apply", "apply", "apply"]


PROVIDER = 'provider "registry.{}/hashicorp/aws" {{\n  version     = "5.100.0"\n}}\n'


def test_a_stack_stays_with_the_program_that_installed_its_provider(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = program("exit 0")
    (tmp_path / "stack" / ".terraform.lock.hcl").write_text(PROVIDER.format("opentofu.org"))
    with pytest.raises(HostError, match="OpenTofu made the stack stack, and Terraform would run now") as failure:
        stack.remove((), silent)
    assert "PROVISIONER_TERRAFORM=tofu" in (failure.value.hint or "")
    assert stack.exists
    assert not (tmp_path / "runs").exists()
    ran = opentofu(tmp_path, monkeypatch, "exit 0")
    stack.apply(silent)
    (tmp_path / "stack" / ".terraform.lock.hcl").write_text(PROVIDER.format("terraform.io"))
    with pytest.raises(HostError, match="Terraform made the stack stack, and OpenTofu would run now"):
        stack.apply(silent)
    assert [line.split()[0] for line in ran.read_text().splitlines()] == ["init", "apply"]


def test_a_shared_state_of_opentofu_is_refused_with_the_way_out(program: Program, tmp_path: Path) -> None:
    error = error_line("Failed to load plugin schemas", 'unavailable provider "registry.opentofu.org/hashicorp/aws"')
    stack = program(f"{say(tmp_path, error)}; exit 1")
    with pytest.raises(TerraformError, match="a provider that this stack does not use") as failure:
        stack.apply(silent)
    assert "If OpenTofu wrote it, set PROVISIONER_TERRAFORM=tofu" in (failure.value.hint or "")
    assert len(runs(tmp_path)) == 1
