"""What ten open consoles cost the gateway, and the pictures of the pages in docs/.

    python -m bench.pages [--rounds N]     p99 of short requests with ten consoles open, by that without
    python -m bench.pages --pictures       docs/pages-*.png, of a server that is asked and of 278 nodes

Rounds with and without are taken in turn, and the figure is the median of the rounds' own ratios. The
browser is on this host as well and runs at the lowest priority: what it takes is not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.server import Running, launched, wait_ready

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NUM_CONSOLES = 10
ROUND_S, SETTLE_S = 15.0, 6.0
CONCURRENCY = 2
SIZES = {"wide": (1400, 900), "narrow": (390, 844)}
DEPLOYMENT = """
[console]
port = 0
[prefill]
threads = 1
kv_memory_mb = 64
[decode]
ranks = 2
threads = 1
kv_memory_mb = 32
redundant_experts = 32
"""


@contextmanager
def serving() -> Iterator[Running]:
    """A server that answers and has pages."""
    with launched(DEPLOYMENT) as server:
        wait_ready(server)
        yield server


def watch(url: str) -> None:
    """Keep ten consoles open until the input ends."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = chromium(playwright)
        for _ in range(NUM_CONSOLES):
            page = browser.new_page()
            page.goto(f"{url}/console")
            page.wait_for_selector(".h-unit")
        print("open", flush=True)
        sys.stdin.read()
        browser.close()


def chromium(playwright: Any) -> Any:
    """Debian's Chromium, without a screen."""
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("there is no chromium here: apt-get install chromium")
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


async def p99_ms(url: str, seconds: float) -> float:
    """Of short requests, a few at once, one after the other."""
    took: list[float] = []
    end_s = time.monotonic() + seconds
    body = {"model": "hadal-tiny", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}

    async def work(client: httpx.AsyncClient) -> None:
        while time.monotonic() < end_s:
            begun_s = time.monotonic()
            reply = await client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
            reply.raise_for_status()
            took.append(1e3 * (time.monotonic() - begun_s))

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        await asyncio.gather(*(work(client) for _ in range(CONCURRENCY)))
    return statistics.quantiles(took, n=100)[98]


def compare(num_rounds: int) -> None:
    """Print each round's two figures, and the median of their ratios."""
    with serving() as server:
        pages = pages_of(server)
        url = server.status.url
        asyncio.run(p99_ms(url, SETTLE_S))
        ratios = []
        for number in range(num_rounds):
            found = {}
            for has_consoles in (False, True) if number % 2 == 0 else (True, False):
                command = [
                    "nice",
                    "-n",
                    "19",
                    sys.executable,
                    "-m",
                    "bench.pages",
                    "--watch",
                    pages,
                ]
                watching = (
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                    if has_consoles
                    else None
                )
                if watching is not None and watching.stdout is not None:
                    watching.stdout.readline()
                time.sleep(SETTLE_S)
                found[has_consoles] = asyncio.run(p99_ms(url, ROUND_S))
                if watching is not None:
                    watching.communicate()
            ratios.append(found[True] / found[False])
            print(
                f"round {number + 1}: p99 {found[False]:.1f} ms without, {found[True]:.1f} ms with"
                f" {NUM_CONSOLES} consoles: {ratios[-1]:.3f}",
                flush=True,
            )
    print(f"median of {num_rounds} rounds: {statistics.median(ratios):.3f}")


def pages_of(server: Running) -> str:
    """Address of a server's pages, once they are served."""
    deadline_s = time.monotonic() + 120
    while server.status.processes["console"].phase != "ready":
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the pages do not come; see {server.log}")
        time.sleep(0.2)
    return str(server.status.console_url)


def pictures(frames: Path | None) -> None:
    """Write the pictures of docs/. `frames`: of the simulated peak; None: it is simulated first."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as name:
        browser = chromium(playwright)
        with serving() as server:
            for size, scheme in (("wide", "light"), ("narrow", "dark")):
                picture_chat(browser, pages_of(server), size, scheme)
        hadal = [sys.executable, "-m", "hadal.cli"]
        if frames is None:
            frames = Path(name) / "peak.gz"
            subprocess.run([*hadal, "simulate", "--frames", str(frames)], check=True)
        command = [*hadal, "console", "--frames", str(frames), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
            assert shown.stdout is not None
            url = shown.stdout.readline().strip()
            for size, scheme in (("wide", "dark"), ("narrow", "light")):
                picture_console(browser, url, size, scheme)
            shown.terminate()
        browser.close()


def page_of(browser: Any, size: str, scheme: str) -> Any:
    """A new page of that size, light or dark."""
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    return browser.new_context(viewport=viewport, color_scheme=scheme).new_page()


def picture_chat(browser: Any, url: str, size: str, scheme: str) -> None:
    """A chat of two turns, the thinking of the last unfolded."""
    page = page_of(browser, size, scheme)
    page.goto(url)
    for number, text in enumerate(("What is 12 + 30?", "What is 847 - 389?"), 1):
        page.fill("#h-input", text)
        page.press("#h-input", "Enter")
        page.wait_for_function(
            "number => document.querySelectorAll('.h-stats').length == number"
            " && document.querySelector('[aria-label=Regenerate]')",
            arg=number,
            timeout=60_000,
        )
    page.locator(".h-thinking summary").last.click()
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / f"pages-chat-{size}.png")


def picture_console(browser: Any, url: str, size: str, scheme: str) -> None:
    """The overview and, wide, the experts of the simulated peak."""
    page = page_of(browser, size, scheme)
    page.goto(url)
    page.wait_for_selector(".h-unit", timeout=60_000)
    page.wait_for_timeout(16_000)
    page.screenshot(path=DOCS / f"pages-console-{size}.png")
    if size == "wide":
        page.click(".h-tabs button:has-text('Experts')")
        page.wait_for_timeout(5_000)
        page.screenshot(path=DOCS / f"pages-experts-{size}.png")


def main() -> None:
    """Parse what is asked, and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pictures", action="store_true")
    parser.add_argument("--frames", type=Path, help="of hadal simulate --frames, for the pictures")
    parser.add_argument("--watch", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.watch:
        watch(asked.watch)
    elif asked.pictures:
        pictures(asked.frames)
    else:
        compare(asked.rounds)


if __name__ == "__main__":
    main()
