from __future__ import annotations

from pathlib import Path

import pytest

from provisioner.base.errors import MissingVariablesError, UsageError
from provisioner.base.models import TaskSetup, VMSpec
from provisioner.family.env_file import check_required, is_variable_name, load_env_file, select_required

AUX = VMSpec(cpu_count_range=(1, 1), ram_gib_range=(1, 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1", {"A": "1"}),
        ("A=b=c==", {"A": "b=c=="}),
        ("export A=1 # comment\n# B=2\n\n", {"A": "1"}),
        ("A='# no comment'", {"A": "# no comment"}),
        ('A="two\\nlines"', {"A": "two\nlines"}),
        ('A="-----BEGIN\nkey\n-----END"', {"A": "-----BEGIN\nkey\n-----END"}),
        ("A=", {"A": ""}),
        ("A=1\nA=2", {"A": "2"}),
        ("A=1\r\nB=2\r\n", {"A": "1", "B": "2"}),
        ("A=$(id) `id` ${B} {{ x }} %{y}", {"A": "$(id) `id` ${B} {{ x }} %{y}"}),
        ("", {}),
    ],
)
def test_an_env_file_follows_dotenvs_rules(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    path = tmp_path / "env"
    path.write_bytes(text.encode())
    assert load_env_file(path) == expected


def test_a_value_never_takes_in_the_controllers_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTROLLERS_OWN", "secret")
    path = tmp_path / "env"
    path.write_text("A=${CONTROLLERS_OWN}")
    assert load_env_file(path) == {"A": "${CONTROLLERS_OWN}"}


@pytest.mark.parametrize(
    "text", ["hunter2-is-my-secret", "hunter2secret", "hunter2-is-my=secret", "A='hunter2", "=hunter2"]
)
def test_an_error_shows_no_part_of_what_may_be_a_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "env"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_env_file(path)
    assert "hunter2" not in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(("text", "quote"), [("A B=1", False), ("A='1", True)])
def test_a_quote_is_only_mentioned_where_there_is_one(tmp_path: Path, text: str, quote: bool) -> None:
    (tmp_path / "env").write_text(text)
    with pytest.raises(UsageError, match="line 1: not a line of the form NAME=value") as refused:
        load_env_file(tmp_path / "env")
    assert ("(is a quote left open?)" in refused.value.message) == quote


def test_only_the_required_variables_are_handed_out() -> None:
    assert select_required({"A": "1", "B": "2"}, ("B",)) == {"B": "2"}


def test_our_variables_win_over_the_env_file() -> None:
    supplied = {"VM_IP_ADDRESS": "10.0.0.2", "VM_SSH_USERNAME": "admin"}
    assert select_required({"VM_IP_ADDRESS": "x"}, ["VM_IP_ADDRESS"], supplied) == {"VM_IP_ADDRESS": "10.0.0.2"}


def test_the_aux_vms_variables_need_no_value() -> None:
    names = ("VM_SSH_USERNAME", "VM_SSH_PRIVATE_KEY", "VM_IP_ADDRESS")
    check_required({}, TaskSetup(required_environment_variables=names, aux_vm_spec=AUX))


def test_all_missing_names_are_in_one_error() -> None:
    setup = TaskSetup(required_environment_variables=("B", "VM_IP_ADDRESS", "A"), aux_vm_spec=AUX)
    with pytest.raises(MissingVariablesError) as caught:
        check_required({}, setup)
    assert caught.value.names == ["A", "B"]


@pytest.mark.parametrize("name", ["", "1A", "A-B", "A B", "A=B", "é", "A\n", "A$(id)", "A" * 257])
def test_a_name_that_no_shell_can_hold_is_none(name: str) -> None:
    assert not is_variable_name(name)
