"""Tests real applies and destroys of local stacks: what they create, keep and remove."""

from __future__ import annotations

import shutil

import pytest

from provisioner.base.errors import TerraformError
from provisioner.clouds.local.cloud import LocalVariables
from provisioner.terraform.render import render_stack
from provisioner.terraform.stack import Stack
from tests.terraform.conftest import Site, silent

ENDPOINT = {"host": "127.0.0.1", "port": 2200, "private_address": None}


def test_one_apply_creates_every_environment(site: Site) -> None:
    site.write(site.spec("one", ("primary", "aux")), site.spec("two"), site.spec("three"))
    outputs = site.stack.apply(silent)
    assert outputs["environments"] == {
        "one": {"machines": {"primary": ENDPOINT, "aux": ENDPOINT}},
        "two": {"machines": {"primary": ENDPOINT}},
        "three": {"machines": {"primary": ENDPOINT}},
    }
    assert site.done("start") == ["one/aux", "one/primary", "three/primary", "two/primary"]


def test_programs_notes_are_told_and_other_output_is_not(site: Site) -> None:
    site.write(site.spec("one", ("primary", "aux")))
    release, told = site.sleep("one"), []

    def tell(text: str) -> None:
        told.append(text)
        release.unlink()  # until then no start ends

    site.stack.apply(tell)
    assert told == ["Making something"]  # each says it


def test_the_machines_of_an_environment_start_side_by_side(site: Site) -> None:
    site.write(site.spec("one", ("primary", "aux")))
    (site.root / "one" / "wait-for-peer").touch()
    site.stack.apply(silent)
    assert site.done("start") == ["one/aux", "one/primary"]


def test_a_second_apply_changes_nothing(site: Site) -> None:
    site.write(site.spec("one"))
    first = site.stack.apply(silent)
    calls = site.journal
    assert site.stack.apply(silent) == first
    assert site.journal == calls


def test_an_environment_that_joins_leaves_the_others_alone(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    site.write(site.spec("one"), site.spec("two"))
    site.stack.apply(silent)
    assert site.done("start") == ["one/primary", "two/primary"]
    assert site.done("destroy") == []


def test_removing_an_environment_destroys_it_and_no_other(site: Site) -> None:
    site.write(site.spec("one", ("primary", "aux")), site.spec("two"))
    site.stack.apply(silent)
    site.stack.remove({"one"}, silent)
    assert site.done("destroy") == ["one/aux", "one/primary"]
    assert (site.root / "two" / "primary" / "endpoint.json").exists()
    assert site.stack.exists


def test_the_stack_goes_with_its_last_environment(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    site.stack.remove({"one"}, silent)
    assert site.done("destroy") == ["one/primary"]
    assert not site.directory.exists()


def test_removing_what_is_gone_is_no_error(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    site.stack.remove({"one"}, silent)
    site.stack.remove({"one"}, silent)
    assert not site.directory.exists()


def test_a_stack_that_was_never_applied_can_be_removed(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.remove({"one"}, silent)
    assert site.journal == []


def test_removal_works_without_the_environments_directory(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    shutil.rmtree(site.root / "one")
    site.stack.remove({"one"}, silent)
    assert site.done("destroy") == ["one/primary"]


def test_an_environment_can_go_after_anothers_was_removed(site: Site) -> None:
    site.write(site.spec("one"), site.spec("two"))
    site.stack.apply(silent)
    shutil.rmtree(site.root / "two")
    site.stack.remove({"one"}, silent)
    assert site.done("destroy") == ["one/primary"]


def test_a_failed_start_shows_the_end_of_its_output(site: Site) -> None:
    site.write(site.spec("one"))
    (site.root / "one" / "fail-primary").touch()
    with pytest.raises(TerraformError) as failure:
        site.stack.apply(silent)
    details = failure.value.details or ""
    assert "local-exec" in failure.value.message
    assert details.splitlines()[-1] == "QEMU said no"
    assert "line 29 of the output" in details
    assert len(details.splitlines()) <= 20


def test_a_machine_that_failed_to_start_is_still_destroyed(site: Site) -> None:
    # Terraform taints a resource whose create-time provisioner failed and never runs its destroy-time provisioner.
    site.write(site.spec("one", ("primary", "aux")))
    (site.root / "one" / "fail-primary").touch()
    with pytest.raises(TerraformError):
        site.stack.apply(silent)
    site.stack.remove({"one"}, silent)
    assert site.done("destroy") == ["one/aux", "one/primary"]


def test_an_apply_after_a_failed_start_tries_that_machine_again(site: Site) -> None:
    site.write(site.spec("one", ("primary", "aux")))
    fail = site.root / "one" / "fail-primary"
    fail.touch()
    with pytest.raises(TerraformError):
        site.stack.apply(silent)
    fail.unlink()
    outputs = site.stack.apply(silent)
    assert outputs["environments"]["one"]["machines"] == {"primary": ENDPOINT, "aux": ENDPOINT}
    assert site.done("start") == ["one/aux", "one/primary", "one/primary"]


def test_no_value_is_evaluated_on_its_way_through_terraform(site: Site) -> None:
    images = {
        "file": '${file("/etc/hostname")}',
        "if": "%{ if true }yes%{ endif }",
        "jinja": "{{ cloud }}{% raw %}",
        "escapes": "$${x} %%{y}",
        "shell": "quote\" apostrophe' backslash\\ `id` $(id) ; &",
        "lines": "new\nline\ttab",
        "unicode": "ünïcode \u2028 \U0001f600",
        "heredoc": "<<EOT\nheredoc\nEOT",
        "empty": "",
    }
    site.write(*[site.spec(name, image=image) for name, image in images.items()])
    site.stack.apply(silent)
    started = {e["machine"].split("/")[0]: e["settings"]["image"] for e in site.journal if e["operation"] == "start"}
    assert started == images


def test_the_log_keeps_all_that_terraform_said(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    assert "Apply complete" in (site.directory / "terraform.log").read_text()


def test_a_changed_root_is_initialised_again(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    main = (site.directory / "main.tf").read_text()
    copy = site.directory / "modules" / "another"
    shutil.copytree(site.directory / "modules" / "environment", copy)
    site.stack.write({"main.tf": main.replace("./modules/environment", "./modules/another")})
    site.stack.apply(silent)
    assert site.done("start") == ["one/primary"]


def test_an_initialisation_that_was_cut_short_is_done_again(site: Site) -> None:
    site.write(site.spec("one"))
    modules = site.directory / ".terraform" / "modules"
    modules.mkdir(parents=True)
    (modules / "modules.json").write_text('{"Modules":[{"Key":"","Source":"","Dir":"."}]}')
    site.stack.apply(silent)
    assert site.done("start") == ["one/primary"]


def test_a_stack_copies_what_init_made_of_the_same_files(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    assert "Initializing" in site.stack.log_text()
    second = Stack(site.root / "second")
    second.write(render_stack("local", LocalVariables, {"two": site.spec("two")}))
    second.apply(silent)
    assert "Initializing" not in second.log_text()
    assert site.done("start") == ["one/primary", "two/primary"]


def test_a_stack_copies_nothing_that_leads_nowhere(site: Site) -> None:
    site.write(site.spec("one"))
    site.stack.apply(silent)
    [cached] = (site.root / ".initialised").iterdir()
    (cached / ".terraform" / "provider").symlink_to(site.root / "a-mirror-that-is-gone")
    second = Stack(site.root / "second")
    second.write(render_stack("local", LocalVariables, {"two": site.spec("two")}))
    second.apply(silent)
    assert "Initializing" in second.log_text()
