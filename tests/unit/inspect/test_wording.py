"""Tests that Inspect's users are told what they can change, and no option of a command that they do not run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.errors import BudgetError, TaskError, UsageError
from provisioner.inspect.failures import PreparationError, before_samples, for_inspect, told_in_full

PACKAGE = Path(__file__).parents[3] / "provisioner"
# What reaches Inspect's users: images, clouds, costs and environments. The command line's own messages are its own.
FOLDERS = (
    "clouds", "copying", "costs", "driver", "family", "images", "isolation", "machines", "ssh", "store", "terraform",
)  # fmt: skip
OPTION = re.compile(r"--(?:cloud|region|profile|spot|state|ttl|budget|env-file|allow)(?![\w-])")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Use --cloud aws.", "Use `cloud: aws` (in provisioner.yaml, or -T cloud=aws)."),
        ("or use another --region.", "or use another `region` (in provisioner.yaml, or set AWS_REGION)."),
        ("--region, --profile, --spot and --state are for --cloud aws.", "`region` and `spot` are for `cloud: aws`"),
        ("x does not fit --budget: 1", "x does not fit `budget` (in provisioner.yaml, or -T budget=USD): 1"),
        ("run `provisioner doctor --cloud aws` first", "run `provisioner doctor --cloud aws` first"),
        ("an --allowed-thing and --cloud-init", "an --allowed-thing and --cloud-init"),
    ],
    ids=["cloud", "region", "places", "budget", "command", "others"],
)
def test_options_become_what_an_eval_can_change(text: str, says: str) -> None:
    assert for_inspect(text).startswith(says)
    assert for_inspect(for_inspect(text)) == for_inspect(text)


def _messages() -> Iterator[str]:
    """Yields the strings of errors that the library raises, as they stand in its source."""
    for folder in FOLDERS:
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error"):
                    for text in ast.walk(node):
                        if isinstance(text, ast.Constant) and isinstance(text.value, str):
                            yield text.value


def test_no_error_names_an_option_to_inspects_users() -> None:
    named = [text for text in _messages() if OPTION.search(text)]
    assert len(named) > 5
    left = {text: said for text in named if OPTION.search(re.sub("`provisioner [^`]*`", "", said := for_inspect(text)))}
    assert left == {}


def test_an_error_and_bad_input_are_told_in_these_words() -> None:
    with pytest.raises(BudgetError) as raised, told_in_full():
        raise BudgetError("It does not fit --budget: $5.", hint="Give it a shorter --ttl.")
    assert str(raised.value).startswith(
        "It does not fit `budget` (in provisioner.yaml, or -T budget=USD): $5.\nGive it a shorter `ttl` (in"
    )
    with pytest.raises(TaskError, match="unknown option --region"), told_in_full():
        raise TaskError("start() raised: unknown option --region")
    with pytest.raises(PreparationError, match="`region` and `spot` are for `cloud: aws`"), before_samples():
        raise UsageError("--region, --profile, --spot and --state are for --cloud aws.")
