"""Take the pictures of the pages for docs/, and measure the cost of a page's refresh in a browser.

python -m bench.pages --refresh        ms of a browser's main thread per refresh of a page with 278 nodes
python -m bench.pages --pictures       docs/pages-*.png, of `laptop_ep` that `hadal bench` loads
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.server import Running, serving
from bench.tables import parser_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MOST_REFRESH_MS = 200
SIZES = {"wide": (1400, 900), "narrow": (390, 844)}
LOADED_S = 90
"""Seconds of load before the console's first picture: its percentiles cover one minute."""
LOAD = ("--concurrency=24", "--input=200-1200", "--output=60-300", "--shared=64")
PICTURED = """
[console]
port = 0
[ledger]
prices = "0/0/0"
gpu_hour_usd = 0.0
"""
"""Settings added to `laptop_ep`. Prices are 0, because a margin at the rent of GPUs means nothing on a CPU."""


def chromium(playwright: Any) -> Any:
    """Start Debian's Chromium without a screen."""
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("there is no chromium here: apt-get install chromium")
    return playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


def pages_of(server: Running) -> str:
    """Return the address of a server's pages. Waits until they are served."""
    deadline_s = time.monotonic() + 120
    while server.status.processes["console"].phase != "ready":
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the pages do not come; see {server.log}")
        time.sleep(0.2)
    return str(server.status.console_url)


def pictures() -> None:
    """Write the pictures of docs/: a chat, and the console of a live deployment under load."""
    from playwright.sync_api import sync_playwright

    text = (ROOT / "configs" / "laptop_ep.toml").read_text(encoding="utf-8")
    with sync_playwright() as playwright, serving(text + PICTURED) as server:
        browser, pages = chromium(playwright), pages_of(server)
        for size, scheme in (("wide", "light"), ("narrow", "dark")):
            picture_chat(browser, pages, size, scheme)
        with loaded(str(server.status.url)):
            time.sleep(LOADED_S)
            for size, scheme in (("wide", "dark"), ("narrow", "light")):
                picture_console(browser, f"{pages}/console", size, scheme)
        browser.close()


@contextmanager
def loaded(url: str) -> Iterator[None]:
    """Load the server with `hadal bench` in the block. Raises SystemExit if the load ends early."""
    command = [sys.executable, "-m", "hadal.cli", "bench", url, *LOAD, "--duration", "3600"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as load:
        try:
            yield
            if load.poll() is not None:
                raise SystemExit("hadal bench ended before the pictures were taken")
        finally:
            load.terminate()


@contextmanager
def peak_pages(frames: Path | None, folder: Path) -> Iterator[str]:
    """Serve the console of the simulated peak; yield its address. Without `frames`, simulates the day first."""
    hadal = [sys.executable, "-m", "hadal.cli"]
    if frames is None:
        frames = folder / "peak.gz"
        subprocess.run([*hadal, "simulate", "--frames", str(frames)], check=True)
    command = [*hadal, "console", "--frames", str(frames), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None
        try:
            yield shown.stdout.readline().strip()
        finally:
            shown.terminate()


def refresh(frames: Path | None) -> None:
    """Print the main-thread time of a refresh for each tab of the console, and the limit of this time."""
    from playwright.sync_api import sync_playwright

    with (
        sync_playwright() as playwright,
        tempfile.TemporaryDirectory() as name,
        peak_pages(frames, Path(name)) as url,
    ):
        browser = chromium(playwright)
        page = page_of(browser, "wide", "light")
        page.goto(url)
        page.wait_for_selector(".h-unit", timeout=60_000)
        session = page.context.new_cdp_session(page)
        # The main thread's own CPU time: other processes on this host do not add to it.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        for tab in ("Overview", "Experts", "Fleet", "Money"):
            page.click(f".h-tabs button:has-text('{tab}')")
            page.wait_for_timeout(2500)  # The page is built once; all later frames are refreshes.
            took_ms = refresh_ms(page, session, 4)
            verdict = "held" if took_ms <= MOST_REFRESH_MS else "missed"
            print(f"{tab:10} {took_ms:6.0f} ms a refresh, at most {MOST_REFRESH_MS}: {verdict}")
        browser.close()


def refresh_ms(page: Any, session: Any, num: int) -> float:
    """Return the main thread's ms per refresh, as the mean of `num` refreshes."""

    def now() -> tuple[float, int]:
        metrics = session.send("Performance.getMetrics")["metrics"]
        name_to_s = {metric["name"]: metric["value"] for metric in metrics}
        # DevTools commands of this measurement are not the page's work.
        own_s = name_to_s["TaskDuration"] - name_to_s["DevToolsCommandDuration"]
        return own_s, int(page.evaluate("window.hadalFrames"))

    begin_s, first = now()
    page.wait_for_function("first => window.hadalFrames >= first", arg=first + num, timeout=60_000)
    page.wait_for_timeout(300)
    end_s, last = now()
    return 1e3 * (end_s - begin_s) / (last - first)


def page_of(browser: Any, size: str, scheme: str) -> Any:
    """Return a new page of this size, light or dark."""
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    return browser.new_context(viewport=viewport, color_scheme=scheme).new_page()


def picture_chat(browser: Any, url: str, size: str, scheme: str) -> None:
    """Write the picture of a chat with two turns: the first with its reasoning unfolded, the second
    with a tool call.
    """
    page = page_of(browser, size, scheme)
    page.goto(url)
    for text, number in (("What is 847 - 389?", 1), ("What is 4321 * 1234?", 3)):
        page.fill("#h-input", text)
        page.press("#h-input", "Enter")
        page.wait_for_function(
            "number => document.querySelectorAll('.h-stats').length == number"
            " && document.querySelector('[aria-label=Regenerate]')",
            arg=number,
            timeout=60_000,
        )
    page.locator(".h-thinking summary").first.click()
    page.wait_for_timeout(500)
    page.screenshot(path=DOCS / f"pages-chat-{size}.png")


def picture_console(browser: Any, url: str, size: str, scheme: str) -> None:
    """Write the picture of the overview and, if wide, of the experts."""
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
    """Parse the arguments and run the chosen mode."""
    parser = parser_of("pages", __doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    frames_help = "of hadal simulate --frames, for --refresh"
    parser.add_argument("--frames", type=Path, help=frames_help)
    asked = parser.parse_args()
    if asked.refresh == asked.pictures:
        parser.error("--refresh or --pictures is needed.")
    if asked.refresh:
        refresh(asked.frames)
    else:
        pictures()


if __name__ == "__main__":
    main()
