"""A browser that opens the console's pages and records violations: requests to another host, errors
and warnings.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.needs import need
from tests.waiting import DEADLINE_S

WAIT_MS = 1000 * DEADLINE_S
WIDE, NARROW = (1400, 900), (390, 844)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Yield Debian's Chromium, headless. Skips the test if it is not installed."""
    need("chromium")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"], timeout=WAIT_MS
        )
        yield browser
        browser.close()


@contextmanager
def looking(browser: Browser, url: str, path: str = "/", **context: Any) -> Iterator[Page]:
    """Yield a page with its own storage. Raises AssertionError at the end if a violation was recorded."""
    width, height = context.pop("size", WIDE)
    wrong: list[str] = []
    with browser.new_context(viewport={"width": width, "height": height}, **context) as opened:
        page = opened.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("request", lambda request: _note(wrong, request.url, url))
        page.on("websocket", lambda socket: _note(wrong, socket.url, url))
        page.on(
            "console",
            lambda said: (
                wrong.append(f"{said.type}: {said.text}")
                if said.type in ("error", "warning")
                else None
            ),
        )
        page.goto(url + path)
        yield page
    assert wrong == []


def _note(wrong: list[str], asked: str, url: str) -> None:
    host = url.split("//", 1)[1]
    if not asked.startswith((f"http://{host}/", f"ws://{host}/", "data:", "blob:")):
        wrong.append(f"asks for {asked}")
