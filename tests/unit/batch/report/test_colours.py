"""Outcomes can be told apart by everybody: each has words, a shape, and a colour that differs in any colour vision.

The matrices simulate protanopia, deuteranopia and tritanopia (Machado, Oliveira and Fernandes 2009); distances are
those of CIE 1976, contrasts those of WCAG 2.
"""

from __future__ import annotations

import itertools
import math
import re

import pytest

from provisioner.base.config import data_directory
from provisioner.batch.results import OUTCOMES

STYLE = (data_directory("templates") / "report" / "style.css").read_text()
SHAPES = (data_directory("templates") / "report" / "macros.html.j2").read_text()
VISIONS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
LIGHT, DARK = STYLE.split("@media (prefers-color-scheme: dark)", 1)
SCHEMES = {"light": LIGHT, "dark": DARK.split("}\n}", 1)[0]}
# Ten is about the difference that two neighbouring colours of a chart need.
LEAST_DISTANCE = 20


def colours(scheme: str) -> dict[str, tuple[float, float, float]]:
    """The scheme's colours, as linear light."""
    found = re.findall(r"--([\w]+): #([0-9a-f]{6})", SCHEMES[scheme])
    return {name: _linear(value) for name, value in found}


def _linear(value: str) -> tuple[float, float, float]:
    parts = [int(value[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def luminance(colour: tuple[float, float, float]) -> float:
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def contrast(first: tuple[float, float, float], second: tuple[float, float, float]) -> float:
    less, more = sorted((luminance(first), luminance(second)))
    return (more + 0.05) / (less + 0.05)


def lab(colour: tuple[float, float, float], vision: str) -> tuple[float, float, float]:
    seen = [min(1, max(0, sum(map(float.__mul__, map(float, row), colour)))) for row in VISIONS[vision]]
    x, z = (
        0.4124 * seen[0] + 0.3576 * seen[1] + 0.1805 * seen[2],
        0.0193 * seen[0] + 0.1192 * seen[1] + 0.9505 * seen[2],
    )
    y = 0.2126 * seen[0] + 0.7152 * seen[1] + 0.0722 * seen[2]
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.9505, y, z / 1.089))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_differ_for_colour_blind_readers(scheme: str, vision: str) -> None:
    known = colours(scheme)
    for first, second in itertools.combinations(OUTCOMES, 2):
        distance = math.dist(lab(known[first], vision), lab(known[second], vision))
        assert distance > LEAST_DISTANCE, (first, second)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_contrasts_are_those_of_wcag_aa(scheme: str) -> None:
    known = colours(scheme)
    for paper in ("page", "card"):
        assert contrast(known["ink"], known[paper]) >= 7
        assert contrast(known["soft"], known[paper]) >= 4.5
    graphics = [*OUTCOMES, "mark", "range"]
    assert {name for name in graphics if contrast(known[name], known["page"]) < 3} == set()


def test_each_outcome_has_a_shape_of_its_own() -> None:
    shapes = dict(re.findall(r'<symbol id="s-(\w+)"[^>]*>(.*?)</symbol>', SHAPES))
    assert shapes.keys() == OUTCOMES.keys()
    assert len(set(shapes.values())) == len(OUTCOMES)
