"""The report of 60 runs with every outcome as a browser shows it: light and dark, wide and narrow, with no way out.

PROVISIONER_TEST_PICTURES names a directory in which the pictures are kept, to be looked at.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import axe_playwright_python
import pytest
from playwright.sync_api import Browser, Page

from provisioner.batch.report.page import render
from provisioner.batch.results import OUTCOMES
from tests.batch import report_sample
from tests.browser import chromium

AXE = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text()
WIDTHS = {"wide": 1100, "phone": 400}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of a batch that cost nothing, and of one that did."""
    directory = tmp_path_factory.mktemp("report")
    paths = {cloud: directory / f"{cloud}.html" for cloud in ("local", "aws")}
    for cloud, path in paths.items():
        rows, evidence = report_sample.rows(cloud), report_sample.evidence(cloud)
        path.write_text(render(report_sample.batch(cloud), rows, evidence))
    return paths


def opened(browser: Browser, path: Path, scheme: Any = "light", width: int = 1100, **options: Any) -> Page:
    """The page, whose troubles and requests are collected in page.troubles."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: troubles.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    vars(page)["troubles"] = troubles
    return page


def troubles_of(page: Page) -> list[str]:
    return [trouble for trouble in vars(page)["troubles"] if not trouble.startswith("data:")]


def pixels(page: Page, picture: bytes) -> dict[str, int]:
    """How often each colour is on a picture of the page, counted by the browser itself."""
    counted: dict[str, int] = page.evaluate(
        """async (data) => {
            const image = new Image(); image.src = "data:image/png;base64," + data; await image.decode();
            const canvas = new OffscreenCanvas(image.width, image.height), context = canvas.getContext("2d");
            context.drawImage(image, 0, 0);
            const found = {}, dots = context.getImageData(0, 0, image.width, image.height).data;
            for (let at = 0; at < dots.length; at += 4) {
                const colour = dots.slice(at, at + 3).join(",");
                found[colour] = (found[colour] || 0) + 1;
            }
            return found;
        }""",
        base64.b64encode(picture).decode(),
    )
    return counted


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize(
    ("scheme", "paper"), [("light", (252, 252, 251)), ("dark", (25, 25, 24))], ids=["light", "dark"]
)
@pytest.mark.parametrize("cloud", ["local", "aws"])
def test_the_page_is_drawn_without_complaints_or_requests(
    browser: Browser, page_files: dict[str, Path], cloud: str, scheme: str, paper: tuple[int, int, int], width: int
) -> None:
    page = opened(browser, page_files[cloud], scheme, width)
    page.locator("li.run details").nth(22).evaluate("run => run.open = true")
    picture = page.screenshot(full_page=True)
    if directory := os.environ.get("PROVISIONER_TEST_PICTURES"):
        (Path(directory) / f"report-{cloud}-{scheme}-{width}.png").write_bytes(picture)
    assert troubles_of(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing runs out of the page
    colours = pixels(page, picture)
    assert max(colours, key=lambda colour: colours[colour]) == ",".join(map(str, paper))
    # Every outcome is there in its colour: the bars of how runs ended alone are hundreds of dots each.
    for outcome in OUTCOMES:
        colour = page.locator(f"rect.o-{outcome}").first.evaluate("bar => getComputedStyle(bar).fill")
        assert colours.get(colour.removeprefix("rgb(").removesuffix(")").replace(" ", ""), 0) > 300, outcome
    page.close()


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, page_files: dict[str, Path], scheme: str, width: int) -> None:
    page = opened(browser, page_files["aws"], scheme, width)
    # One in four runs is opened, among them most outcomes: all of them would take axe minutes.
    page.evaluate("document.querySelectorAll('details').forEach((part, number) => { part.open = number % 4 == 0 })")
    page.evaluate(AXE)
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 20
    assert [(finding["id"], [node["target"] for node in finding["nodes"][:3]]) for finding in found["violations"]] == []
    page.close()


def test_what_it_says_can_be_read_without_its_script(browser: Browser, page_files: dict[str, Path]) -> None:
    page = opened(browser, page_files["local"], java_script_enabled=False)
    body = page.inner_text("body")
    for words in ("nightly", "planner-large", "the agent ran out of time", "How runs ended", "agents limited to 30m"):
        assert words in body
    assert "USD" not in body
    assert page.locator("li.run:visible").count() == 60
    assert not page.locator("#controls").is_visible()
    page.locator("li.run summary").nth(22).click()
    shown = page.locator("li.run").nth(22).inner_text()
    # What families and agents say stays text.
    for words in ("Scoring raised KeyError: <script>alert(1)</script>", "KeyError: 'flag'", "Instructions", "[059] $"):
        assert words in shown
    page.close()


def test_runs_are_found_sorted_and_opened(browser: Browser, page_files: dict[str, Path]) -> None:
    page = opened(browser, page_files["aws"])
    shown = page.locator("li.run:visible")
    page.select_option("#outcome", label="the agent ran out of time")
    assert shown.count() == 3
    assert page.inner_text("#count") == "3 of 60 runs"
    page.select_option("#agent", "baseline")
    assert shown.count() == 2
    page.click("#open")
    assert page.locator("li.run details[open]").count() == 2
    page.click("#close")
    page.select_option("#outcome", "")
    page.select_option("#agent", "")
    page.fill("#find", "OPTIMISE")
    assert shown.count() == 15
    for choice, order in (("-score", True), ("score", False)):
        page.select_option("#sort", choice)
        scores = [run.get_attribute("data-score") for run in shown.all()]
        numbers = [float(score) for score in scores if score]
        assert numbers == sorted(numbers, reverse=order)
        assert scores[len(numbers) :] == [""] * (15 - len(numbers))  # those without a score come last
    page.fill("#find", "")
    page.select_option("#sort", "-cost")
    costs = [int(run.get_attribute("data-cost") or 0) for run in shown.all()]
    assert len(costs) == 60
    assert costs == sorted(costs, reverse=True)
    assert troubles_of(page) == []
    page.close()


def test_a_smuggled_script_does_not_run(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "smuggled.html"
    page_text = render(report_sample.batch(), report_sample.rows(), {})
    smuggled = '<script>document.title = "taken"</script><img src="x" onerror="document.title = \'taken\'">'
    path.write_text(page_text.replace("<main>", f"<main>{smuggled}"))
    page = opened(browser, path)
    assert page.title() == "nightly: results"
    assert any("Content Security Policy" in trouble for trouble in troubles_of(page))
    page.close()
