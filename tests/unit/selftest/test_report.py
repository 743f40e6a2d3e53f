"""Tests what is sent to strangers after a self-test."""

from __future__ import annotations

from provisioner.errors import HostError
from provisioner.selftest.steps import Outcome, StepResult, report, without_names


def test_the_report_has_the_facts_the_steps_and_the_failure() -> None:
    done = StepResult(name="images", found="built", seconds=61.5, passed=True)
    failed = StepResult(name="rights", found="You may not.", seconds=1, passed=False)
    failure = HostError("You may not.", hint="Ask.", details="run_instances: no\x1b[2J")
    text = report(Outcome((done, failed), failure), {"region": "us-east-1"})
    assert text.splitlines()[:4] == [
        "region: us-east-1",
        "",
        "passed   61.5 s  images: built",
        "FAILED    1.0 s  rights: You may not.",
    ]
    assert "HostError, exit code 3: You may not.\nAsk.\nrun_instances: no" in text
    assert "\x1b" not in text


def test_it_names_no_account_user_key_or_public_address() -> None:
    said = (
        "arn:aws:iam::123456789012:user/alice may not, in 123456789012 with AKIAIOSFODNN7EXAMPLE from 203.0.113.9/32; "
        "i-0123456789abcdef0 and 10.215.0.4 stay"
    )
    assert without_names(said) == (
        "ARN may not, in ACCOUNT with KEY from ADDRESS/32; i-0123456789abcdef0 and 10.215.0.4 stay"
    )
