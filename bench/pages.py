"""What ten open consoles cost the gateway, and the pictures of the pages in docs/.

    python -m bench.pages [--rounds N]     p99 of short requests with ten consoles open, by that without
    python -m bench.pages --near           the same, with their browser on this host
    python -m bench.pages --refresh        ms of a browser's main thread per refresh of a page with 278 nodes
    python -m bench.pages --pictures       docs/pages-*.png, of `laptop_ep` that `hadal bench` loads

Rounds with and without are taken in turn, and the figure is the median of the rounds' own ratios.
Operators look from hosts of their own: a console here is a connection that is sent all that a browser
would be, and draws none of it.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import socketio  # type: ignore[import-untyped]

from bench.server import Running, launched, wait_ready

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NUM_CONSOLES = 10
ROUND_S, SETTLE_S = 15.0, 6.0
MOST_REFRESH_MS = 200
CONCURRENCY = 2
SIZES = {"wide": (1400, 900), "narrow": (390, 844)}
LOADED_S = 90
"""Load before the console's first picture: percentiles are of a minute."""
LOAD = ("--concurrency=24", "--input=200-1200", "--output=60-300", "--shared=64")
PICTURED = """
[console]
port = 0
[ledger]
prices = "0/0/0"
gpu_hour_usd = 0.0
"""
"""Added to `laptop_ep`. No price is set: a margin at the rent of six GPUs would mean nothing here."""
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


class FarConsole:
    """A console in a browser elsewhere: it is sent all that one shows."""

    def __init__(self) -> None:
        self.num_frames = 0
        self._socket = socketio.AsyncClient(reconnection=False)
        self._client_id = ""
        self._next_message = 0

    async def open(self, url: str) -> None:
        """Load the page and connect, as the page's script does (createApp in NiceGUI 3's nicegui.js)."""
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"{url}/console")).raise_for_status().text
        found = re.search(r"query: ({.*?}),", page)
        assert found is not None, "the page names no query for its socket"
        asked = ast.literal_eval(found[1])
        self._client_id = asked["client_id"]
        self._socket.on("*", self._got)
        browser = {name: str(uuid.uuid4()) for name in ("document_id", "tab_id", "old_tab_id")}
        query = {**asked, "implicit_handshake": "true", **browser}
        await self._socket.connect(
            f"{url}?{urlencode(query)}",
            socketio_path="/_nicegui_ws/socket.io",
            transports=["websocket"],
        )

    async def close(self) -> None:
        """Leave the page."""
        await self._socket.disconnect()

    async def acknowledge(self) -> None:
        """Tell the server what need not be kept for this page any more."""
        told = {"client_id": self._client_id, "next_message_id": self._next_message}
        await self._socket.emit("ack", told)

    async def _got(self, event: str, message: dict[str, Any] | None = None) -> None:
        message = message or {}
        self._next_message = max(self._next_message, message.get("_id", -1) + 1)
        self.num_frames += "hadalFrames" in message.get("code", "")
        if "request_id" in message:  # What a browser keeps: nothing.
            answer = {"request_id": message["request_id"], "client_id": self._client_id}
            await self._socket.emit("javascript_response", {**answer, "result": ""})


async def watch_far(url: str) -> None:
    """Keep ten consoles open until the input ends; print the fewest frames that one of them got."""
    consoles = [FarConsole() for _ in range(NUM_CONSOLES)]
    for console in consoles:
        await console.open(url)
    print("open", flush=True)
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not ended.done():
        await asyncio.wait([ended], timeout=3.0)
        for console in consoles:
            await console.acknowledge()
    for console in consoles:
        await console.close()
    print(min(console.num_frames for console in consoles), flush=True)


def watch_near(url: str) -> None:
    """The same, in a browser that draws them."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = chromium(playwright)
        opened = [browser.new_page() for _ in range(NUM_CONSOLES)]
        for page in opened:
            page.goto(f"{url}/console")
            page.wait_for_selector(".h-unit")
        print("open", flush=True)
        sys.stdin.read()
        frames = [page.evaluate("window.hadalFrames || 0") for page in opened]
        browser.close()
    print(min(frames), flush=True)


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


@contextmanager
def watching(pages: str, *, is_near: bool) -> Iterator[None]:
    """Ten consoles are open, at the lowest priority. Raises SystemExit if they were shown nothing."""
    bench = [sys.executable, "-m", "bench.pages", "--watch", pages, *["--near"] * is_near]
    pipe = subprocess.PIPE
    with subprocess.Popen(["nice", "-n", "19", *bench], stdin=pipe, stdout=pipe, text=True) as run:
        assert run.stdout is not None
        if run.stdout.readline() != "open\n":
            raise SystemExit("the consoles do not open; what is above says why")
        yield
        said, _ = run.communicate()
    if int(said or 0) < ROUND_S / 2:
        raise SystemExit(f"a console was sent {said.strip() or 'nothing'} of what it shows")


def compare(num_rounds: int, *, is_near: bool) -> None:
    """Print each round's two figures, and the median of their ratios."""
    with serving() as server:
        pages = pages_of(server)
        url = server.status.url
        asyncio.run(p99_ms(url, SETTLE_S))
        ratios = []
        for number in range(num_rounds):
            found = {}
            for has_consoles in (False, True) if number % 2 == 0 else (True, False):
                with watching(pages, is_near=is_near) if has_consoles else nullcontext():
                    time.sleep(SETTLE_S)
                    found[has_consoles] = asyncio.run(p99_ms(url, ROUND_S))
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


def pictures() -> None:
    """Write the pictures of docs/: a chat, and the console of a live deployment under load."""
    from playwright.sync_api import sync_playwright

    text = (ROOT / "configs" / "laptop_ep.toml").read_text(encoding="utf-8")
    with sync_playwright() as playwright, launched(text + PICTURED) as server:
        wait_ready(server)
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
    """Load the server with `hadal bench` meanwhile. Raises SystemExit if the load ends by itself."""
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
    """Serve the console of the simulated peak; yields its address."""
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
    """Print what a refresh takes of the browser's main thread, for each page, and the limit."""
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
        # The thread's own time: what others take of this host meanwhile is not the page's.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        for tab in ("Overview", "Experts", "Fleet", "Money"):
            page.click(f".h-tabs button:has-text('{tab}')")
            page.wait_for_timeout(2500)  # It is made anew once; what follows are refreshes.
            took_ms = refresh_ms(page, session, 4)
            verdict = "held" if took_ms <= MOST_REFRESH_MS else "missed"
            print(f"{tab:10} {took_ms:6.0f} ms a refresh, at most {MOST_REFRESH_MS}: {verdict}")
        browser.close()


def refresh_ms(page: Any, session: Any, num: int) -> float:
    """Main thread's time per refresh, mean of `num`."""

    def now() -> tuple[float, int]:
        metrics = session.send("Performance.getMetrics")["metrics"]
        name_to_s = {metric["name"]: metric["value"] for metric in metrics}
        # What is asked of the browser meanwhile is not the page's work.
        own_s = name_to_s["TaskDuration"] - name_to_s["DevToolsCommandDuration"]
        return own_s, int(page.evaluate("window.hadalFrames"))

    begin_s, first = now()
    page.wait_for_function("first => window.hadalFrames >= first", arg=first + num, timeout=60_000)
    page.wait_for_timeout(300)
    end_s, last = now()
    return 1e3 * (end_s - begin_s) / (last - first)


def page_of(browser: Any, size: str, scheme: str) -> Any:
    """A new page of that size, light or dark."""
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    return browser.new_context(viewport=viewport, color_scheme=scheme).new_page()


def picture_chat(browser: Any, url: str, size: str, scheme: str) -> None:
    """A chat of two turns: the thinking of the first is unfolded, the second calls a tool."""
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
    """The overview and, wide, the experts."""
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
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--pictures", action="store_true")
    frames_help = "of hadal simulate --frames, for --refresh"
    parser.add_argument("--frames", type=Path, help=frames_help)
    parser.add_argument("--near", action="store_true", help="a browser on this host draws them")
    parser.add_argument("--watch", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.watch:
        if asked.near:
            watch_near(asked.watch)
        else:
            asyncio.run(watch_far(asked.watch))
    elif asked.refresh:
        refresh(asked.frames)
    elif asked.pictures:
        pictures()
    else:
        compare(asked.rounds, is_near=asked.near)


if __name__ == "__main__":
    main()
