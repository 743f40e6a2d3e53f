"""Opens Debian's Chromium without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

# Beside emulated machines on two cores, half a minute may not be enough.
LAUNCH_MS = 180_000


@contextmanager
def chromium() -> Iterator[Browser]:
    """Starts Chromium, and ends it. It shows our own pages alone: as root, it refuses to run in its sandbox."""
    program = shutil.which("chromium")
    assert program, "Debian's package chromium is missing: scripts/setup dev installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"], timeout=LAUNCH_MS)
        yield browser
        browser.close()
