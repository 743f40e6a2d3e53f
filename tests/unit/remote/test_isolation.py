"""Tests how the probes' results are judged. tests/local tests the probes themselves."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from provisioner.errors import IsolationError
from provisioner.models import ProbeResult
from provisioner.remote.isolation import _ProbeReport, judge, require


def reports(probe: str, reached: bool, user: str = "root") -> list[_ProbeReport]:
    answer = [{"user": user, "probe": probe, "reached": reached, "detail": "connected"}]
    return TypeAdapter(list[_ProbeReport]).validate_python(answer)


NEVER = ["metadata 169.254.169.254", "controller's loopback via 10.0.2.2", "ipv6"]
OFFLINE = ["tcp 1.1.1.1:443", "dns udp 8.8.8.8", "dns tcp 169.254.169.253 via eth0", "ping 1.1.1.1", "s3 by name",
           "resolve a public name", "reach the internet by name", "udp 1.1.1.1:443"]  # fmt: skip
ALWAYS = ["neighbour 10.213.0.3", "allowed 203.0.113.7:443"]


@pytest.mark.parametrize(
    ("probe", "full_internet", "promised"),
    [
        *((probe, False, False) for probe in [*OFFLINE, *NEVER]),
        *((probe, True, False) for probe in NEVER),
        *((probe, online, True) for probe in ALWAYS for online in (False, True)),
        ("reach the internet by name", True, True),
        ("a probe of tomorrow", False, False),
    ],
)
def test_reaching_more_or_less_than_promised_is_an_error_that_names_the_probe(
    probe: str, full_internet: bool, promised: bool
) -> None:
    require(judge("primary", reports(probe, promised), full_internet), canary_visited=False)
    with pytest.raises(IsolationError, match="1 of 1 probes differ") as raised:
        require(judge("primary", reports(probe, not promised, "agent"), full_internet), canary_visited=False)
    assert f"primary machine, as agent: {probe}" in (raised.value.details or "")
    assert raised.value.exit_code == 6


def test_with_internet_only_promised_and_forbidden_probes_are_judged() -> None:
    assert judge("aux", reports("tcp 1.1.1.1:443", False), full_internet=True) == ()


def test_results_without_any_probe_are_an_error() -> None:
    with pytest.raises(IsolationError, match="No isolation probe"):
        require((), canary_visited=False)


def test_a_visit_to_the_canary_is_an_error_even_if_the_machine_reports_none() -> None:
    quiet = ProbeResult(machine="aux", user="root", probe="ipv6", reached=False, expected=False, detail="")
    with pytest.raises(IsolationError, match="loopback"):
        require((quiet,), canary_visited=True)
