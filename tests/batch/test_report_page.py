"""The report as a browser shows it: headless Chromium, light and dark, with no way out of the page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from provisioner.batch.report import PHASES, render
from provisioner.batch.results import Row
from provisioner.models import Phase

BEGIN = datetime(2026, 1, 2, 12, tzinfo=UTC)
# Beside emulated machines on two cores, half a minute may not be enough.
LAUNCH_MS = 180_000
AGENTS = {"solver": "scored", "failing": "agent_failed", "sleeping": "timed_out", "unlucky": "infrastructure_failed"}


def rows() -> list[Row]:
    results = []
    for number, (agent, outcome) in enumerate([*AGENTS.items()] * 6):
        start = BEGIN + timedelta(seconds=20 * number)
        results.append(
            Row.model_validate(
                {
                    "key": f"guess/<easy>/{agent}/{number}", "family": "guess",
                    "task": "<easy>" if number % 2 else "hard",
                    "agent": agent, "repetition": number, "outcome": outcome, "message": "<script>alert(1)</script>",
                    "score": {"scored": number % 3 / 2, "timed_out": 0.5}.get(outcome), "environment": f"env-{number}",
                    "cost_micro_usd": 12_345 * number, "started_at": start, "ended_at": start + timedelta(seconds=90),
                    "phases": [Phase(name="boot", seconds=30), Phase(name="agent", seconds=50)],
                }
            )
        )  # fmt: skip
    return results


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium, "Debian's package chromium is missing: scripts/setup dev installs it"
    with sync_playwright() as playwright:
        # Chromium refuses to run as root in its sandbox; the page is our own.
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=LAUNCH_MS)
        yield opened
        opened.close()


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(render("batch-1", rows(), BEGIN, "../archive"))
    return path


def opened(browser: Browser, path: Path, scheme: Any) -> tuple[Page, list[str]]:
    """The page, and what went wrong or left it."""
    troubles: list[str] = []
    page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme=scheme)
    page.on("console", lambda message: troubles.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: troubles.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    page.wait_for_load_state("networkidle")
    return page, [trouble for trouble in troubles if not trouble.startswith("data:")]


def pixels(page: Page) -> dict[str, int]:
    """How often each colour is on a picture of the page, counted by the browser itself."""
    picture = page.screenshot(full_page=True)
    assert picture.startswith(b"\x89PNG")
    import base64

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


@pytest.mark.parametrize(
    ("scheme", "paper", "ink"), [("light", (252, 252, 251), "dark"), ("dark", (25, 25, 24), "light")]
)
def test_the_page_is_drawn_in_light_and_dark_without_a_complaint_and_without_a_request(
    browser: Browser, page_file: Path, scheme: str, paper: tuple[int, int, int], ink: str
) -> None:
    page, troubles = opened(browser, page_file, scheme)
    assert troubles == []
    colours = pixels(page)
    assert max(colours, key=lambda colour: colours[colour]) == ",".join(map(str, paper))
    # The pictures are there: bars, intervals and the timeline's phases, each in its colour, many dots of each.
    mark, boot, agent = (
        page.evaluate(
            """(name) => { const probe = document.createElement("i"); probe.style.color = `var(${name})`;
            document.body.append(probe); const told = getComputedStyle(probe).color; probe.remove();
            return told.match(/\\d+/g).slice(0, 3).join(","); }""",
            name,
        )
        for name in ("--mark", *(f"--p{PHASES.index(phase)}" for phase in ("boot", "agent")))
    )
    assert all(colours.get(colour, 0) > 500 for colour in (mark, boot, agent))
    text = page.evaluate("getComputedStyle(document.body).color")
    bright = sum(int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(",")) > 380
    assert bright == (ink == "light")
    page.close()


def test_what_it_says_can_be_read_and_leads_to_the_logs(browser: Browser, page_file: Path) -> None:
    page, _ = opened(browser, page_file, "light")
    body = page.inner_text("body")
    for words in ("batch-1", "guess/hard, solver", "the agent ran out of time", "infrastructure failed", "USD"):
        assert words in body
    # What families and agents are called stays text.
    assert page.locator("script").count() == 0
    assert "<script>alert(1)</script>" in body
    # Each picture fits its place, and no text runs out of the page.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#timeline svg").count() == len(rows())
    assert page.locator("tbody a").first.get_attribute("href") == "../archive/env-0/logs"
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.close()
