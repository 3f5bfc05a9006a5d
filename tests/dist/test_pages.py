"""The pages in a real browser, served by the console's process of a live server: a chat, and the
console while a rank dies, experts move, the fleet changes and money comes in.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from hadal.console.feed import PERIOD_S
from hadal.core.config import LimitsConfig
from hadal.core.messages import Generation
from hadal.gateway.chat import ChatFormat
from hadal.gateway.http import Patience
from hadal.gateway.openai import SamplingDefaults
from hadal.gateway.service import ServedModel
from hadal.gateway.vocabulary import Vocabulary
from tests.dist.browser import NARROW, browsing, looking
from tests.dist.conftest import Server, StartServer, starting
from tests.dist.keyed import keys_command
from tests.dist.serving import RANKED
from tests.unit.gateway.fake_units import Script
from tests.unit.gateway.serving import serving
from tests.unit.gateway.test_tools import BOS, EOS, V31, V31_TEMPLATE, vocabulary_of
from tests.waiting import wait_until

PAGES = {"mode": "auto", "port": 0}
WAIT_MS = 60_000
QUESTIONS = (
    "Count from 1 to 60.",
    "What is 4711 + 2345?",
    "Write the word harbour backwards.",
    "Which day is 9 days after May 28?",
)
NUM_CHATS = 16
"""At a time: what more tokens a step save of more is what pays."""
QUESTIONS_S = 8.0
"""So long they are of one kind."""
MOST_KILLS = 12
"""Of a rank, until the console sees it gone."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    ledger = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    fleet = {
        "mode": "auto",
        "decode_max": 2,
        "period_s": 1.0,
        "start_s": 5.0,
        "decode_tokens_per_s": 30.0,
    }
    with starting() as start:
        server = start(
            **RANKED, console=PAGES, fleet=fleet, environment={"HADAL_LEDGER": str(ledger)}
        )
        pages_of(server)
        yield server


def pages_of(server: Server) -> str:
    """Address of the pages, once they are served."""
    url = server.status().console_url
    wait_until(lambda: server.status().processes["console"].phase == "ready", "pages are there")
    return url


def ask(page: Page, text: str) -> None:
    page.fill("#h-input", text)
    page.press("#h-input", "Enter")


def done(page: Page, number: int = 1) -> None:
    """Wait until so many answers have their figures."""
    expect(page.locator(".h-stats")).to_have_count(number, timeout=WAIT_MS)
    expect(page.locator(".h-stats").last).to_contain_text("tokens/s", timeout=WAIT_MS)
    expect(page.locator("[aria-label=Regenerate]")).to_be_visible()


def test_a_chat_thinks_answers_and_is_kept_by_the_browser(server: Server, browser: Browser) -> None:
    with looking(browser, pages_of(server)) as page:
        ask(page, "What is 12 + 30?")
        done(page)
        expect(page.locator(".h-md").last).to_contain_text("42")
        thinking = page.locator(".h-thinking")
        assert thinking.get_attribute("open") is None, "folded"
        thinking.locator("summary").click()
        expect(page.locator(".h-thinking-text")).to_be_visible()
        ask(page, "What is 2 + 2?")
        done(page, 2)
        page.locator(".h-stats").last.evaluate("element => { element.dataset.old = 1; }")
        page.click("[aria-label=Regenerate]")
        expect(page.locator("[data-old]")).to_have_count(0)
        done(page, 2)
        page.hover(".h-asked-row >> nth=0")
        page.locator("[aria-label=Edit]").first.click()
        expect(page.locator("#h-input")).to_have_value("What is 12 + 30?")
        expect(page.locator(".h-editing")).to_be_visible()
        page.click("[aria-label='Keep it']")
        expect(page.locator(".h-editing")).to_be_hidden()
        page.locator("[aria-label=Edit]").first.click()
        expect(page.locator("#h-input")).to_have_value("What is 12 + 30?")
        expect(page.locator(".h-asked-text")).to_have_count(2)
        page.press("#h-input", "Shift+Enter")
        assert page.input_value("#h-input").count("\n") == 1, "a new line, and nothing is sent"
        ask(page, "What is 13 + 30?")
        expect(page.locator(".h-asked-text")).to_have_count(1)
        done(page)
        expect(page.locator(".h-md").last).to_contain_text("43")
        page.keyboard.press("Alt+KeyN")
        expect(page.locator(".h-empty")).to_be_visible()
        page.reload()
        page.click(".h-row-title")
        expect(page.locator(".h-asked-text")).to_have_text("What is 13 + 30?")


def test_esc_stops_an_answer_and_what_came_stays(server: Server, browser: Browser) -> None:
    with looking(browser, pages_of(server)) as page:
        server.kill("decode-0", 19)  # SIGSTOP: the answer does not end by itself.
        try:
            ask(page, "Count from 1 to 90.")
            expect(page.locator(".h-stop")).to_be_visible()
            page.keyboard.press("Escape")
            expect(page.locator(".h-stats").last).to_contain_text("stopped")
        finally:
            server.kill("decode-0", 18)
        expect(page.locator(".h-send").first).to_be_visible()
        page.click("[aria-label=Regenerate]")
        done(page)


def test_an_answer_stays_until_something_takes_its_place(server: Server, browser: Browser) -> None:
    """Also where the page is loaded anew before anything has come."""
    with looking(browser, pages_of(server)) as page:
        ask(page, "What is 12 + 30?")
        done(page)
        for unit in ("prefill-0", "decode-0"):
            server.kill(unit, 19)  # SIGSTOP
        try:
            page.click("[aria-label=Regenerate]")
            expect(page.locator(".h-stop")).to_be_visible()
            page.reload()
            page.click(".h-row-title")
            expect(page.locator(".h-md").last).to_contain_text("42")
        finally:
            for unit in ("prefill-0", "decode-0"):
                server.kill(unit, 18)


def test_what_is_too_long_to_send_stays_in_the_field(server: Server, browser: Browser) -> None:
    with browser.new_context() as opened:
        page = opened.new_page()
        page.goto(pages_of(server))
        page.wait_for_selector("#h-input")
        long = "é" * 300_000
        page.evaluate(f"hadal.fill({json.dumps(long)})")
        page.press("#h-input", "Enter")
        assert page.evaluate("document.getElementById('h-input').validationMessage") == (
            "This message has 600,002 bytes; the page sends at most 400,000. Send less of it."
        )
        expect(page.locator("#h-input")).to_have_value(long)
        expect(page.locator(".h-asked-text")).to_have_count(0)
        # The page still works, and what it does take arrives.
        page.fill("#h-input", "x" * 390_000)
        page.press("#h-input", "Enter")
        expect(page.locator(".h-asked-text")).to_have_count(1, timeout=WAIT_MS)
        page.keyboard.press("Alt+n")
        ask(page, "What is 12 + 30?")
        done(page)
        expect(page.locator(".h-md").last).to_contain_text("42")


def test_what_a_model_writes_runs_nothing_and_fetches_nothing(
    server: Server, browser: Browser
) -> None:
    """A conversation out of the storage, as if a model had written it."""
    bad = (
        '<img src="http://198.51.100.7/x.png" onerror="document.title=1"> <script>alert(1)</script>'
    )
    kept = {
        "id": "0" * 16,
        "title": "bad",
        "turns": [{"asked": bad, "answers": [{"content": f"{bad} **bold** ![x](data:,x)"}]}],
    }
    policy = httpx.get(pages_of(server)).headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "connect-src 'self'" in policy
    with browser.new_context() as opened:
        page = opened.new_page()
        failed: list[str] = []
        page.on(
            "response", lambda reply: failed.append(reply.url) if "198.51" in reply.url else None
        )
        page.goto(pages_of(server))
        page.evaluate(f"localStorage.setItem('hadal.chat.0', {json.dumps(json.dumps(kept))})")
        page.reload()
        page.click(".h-row-title")
        expect(page.locator(".h-md strong")).to_have_text("bold")
        expect(page.locator(".h-asked-text")).to_have_text(bad)
        assert page.locator(".h-md script").count() == 0
        assert failed == []
        assert page.title() == "Hadal"


def calling(vocabulary: Vocabulary) -> Script:
    """What a model writes that calls two tools, one of them badly, then says what came of it."""
    args = '{"a": 4321, "operator": "*", "b": 1234}'
    calls = "".join(
        f"{V31.call_begin}{name}{V31.separator}{text}{V31.call_end}"
        for name, text in (
            ("calculate", args),
            ("convert", '{"value": 3, "from": "km", "to": "kg"}'),
        )
    )
    first = vocabulary.encode_controlled(f"Too large.{V31.calls_begin}{calls}{V31.calls_end}")
    end = vocabulary.control_ids[EOS]

    def script(generation: Generation, index: int) -> int:
        asked = vocabulary.decode(generation.prompt)
        ids = first
        if "<out>" in asked:
            ids = vocabulary.encode_controlled("It is **" + asked.split("<out>")[1][:7] + "**.")
        return ids[index] if index < len(ids) else end

    return script


@contextmanager
def caller(*, can_call: bool = True) -> Iterator[ServedModel]:
    """A model that can call tools, but for its weights."""
    marks = V31.marks if can_call else ()
    vocabulary = vocabulary_of([BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "</think>", *marks])
    end = vocabulary.control_ids[EOS]
    with closing(ChatFormat(vocabulary, V31_TEMPLATE, BOS, EOS, "here")) as chat:
        yield ServedModel("caller", vocabulary, chat, 8192, 600, (end,), None, SamplingDefaults())


@contextmanager
def slow_chat(browser: Browser, *, can_call: bool = True) -> Iterator[Page]:
    """A chat page of a model that goes on ticking."""
    with (
        caller(can_call=can_call) as model,
        serving(model, ticking(model.vocabulary), step_s=0.1, has_heartbeat=True) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):
        yield page


def test_a_page_that_is_closed_lets_its_answer_go(browser: Browser) -> None:
    """Its answer would take ten minutes. A page that lost its line has 20 s to come back."""
    with (
        caller() as model,
        serving(model, lambda generation, index: 5, step_s=1.0, has_heartbeat=True) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):

        def num_open() -> float:
            lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
            states = [line for line in lines if line.startswith("hadal_generations_now{")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in states)

        ask(page, "Count from 1 to 90.")
        wait_until(lambda: num_open() == 1, "an answer has begun")
        page.close()
        wait_until(lambda: num_open() == 0, "nobody makes it any more")


def ticking(vocabulary: Vocabulary) -> Script:
    """Says the same for as long as it is listened to."""
    ids = vocabulary.encode_plain("tick tock ")
    return lambda generation, index: ids[index % len(ids)]


def kept_chat(number: int, result: str) -> tuple[str, str]:
    """A name in the browser's storage and what is there: a conversation with a tool's long result."""
    call = {"id": "c", "name": "look", "arguments": "{}", "result": result}
    answers = [{"calls": [call], "finish": "tool_calls"}, {"content": "Seen.", "finish": "stop"}]
    chat = {"id": f"{number}", "title": f"chat {number}", "changed_ms": number}
    chat["turns"] = [{"asked": f"question {number}", "answers": answers}]
    return f"hadal.chat.{number}", json.dumps(chat, ensure_ascii=False)


def test_five_megabytes_of_conversations_are_listed_and_opened(browser: Browser) -> None:
    """Nearly all that a browser keeps for a page, one of them longer than a socket's message may be;
    its characters are of two code units, so that pieces end between halves of some.
    """
    chats = [kept_chat(0, "." + 600_000 * "🙂")] + [
        kept_chat(number, 950_000 * "x") for number in range(1, 5)
    ]
    assert sum(len(text) for _, text in chats) > 4_400_000
    with (
        caller() as model,
        serving(model, ticking(model.vocabulary), has_heartbeat=True) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):
        expect(page.locator(".h-empty")).to_be_visible(timeout=WAIT_MS)
        for name, text in chats:
            page.evaluate("([name, text]) => localStorage.setItem(name, text)", [name, text])
        page.reload()
        expect(page.locator(".h-row-title")).to_have_text(
            [f"chat {n}" for n in (4, 3, 2, 1, 0)], timeout=WAIT_MS
        )
        for number in (0, 3, 0):
            page.locator(".h-row-title", has_text=f"chat {number}").click()
            expect(page.locator(".h-asked-text")).to_have_text(
                f"question {number}", timeout=WAIT_MS
            )
            expect(page.locator(".h-md").last).to_contain_text("Seen.", timeout=WAIT_MS)
        page.locator("summary", has_text="look").click()
        shown = page.locator(".h-call pre").last.inner_text()
        assert shown == "." + 19_999 * "🙂", "no half of a character was lost"
        page.hover(".h-row >> nth=0")
        page.locator("[aria-label=Delete]").first.click()
        expect(page.locator(".h-row-title")).to_have_count(4, timeout=WAIT_MS)


def test_a_browser_that_is_full_says_so_once_and_again_after_there_was_room(
    browser: Browser,
) -> None:
    with (
        caller() as model,
        serving(model, ticking(model.vocabulary), step_s=0.05, has_heartbeat=True) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):
        expect(page.locator(".h-empty")).to_be_visible(timeout=WAIT_MS)
        fill = """() => {
            for (let size = 1 << 22; size; size >>= 1)
                try {
                    for (let n = 0; ; n += 1) localStorage[`${size}.${n}`] = "x".repeat(size);
                } catch {}
        }"""
        said = page.get_by_text("This browser keeps nothing more")
        for name in ("first", "second"):
            page.evaluate(fill)
            ask(page, name)
            expect(said).to_be_visible(timeout=WAIT_MS)
            page.click("text=OK")
            expect(said).to_be_hidden(timeout=WAIT_MS)
            expect(page.locator(".h-answer").last).to_contain_text("tock tick tock")
            page.wait_for_timeout(1500)  # It would have been kept again meanwhile.
            expect(said).to_be_hidden()
            page.evaluate("localStorage.clear()")
            page.keyboard.press("Escape")
            page.wait_for_function("JSON.stringify(localStorage).includes('tick tock')")


def test_what_came_of_an_answer_that_is_left_is_kept(browser: Browser) -> None:
    """Another conversation is opened, and then the page is loaded anew, while an answer comes in."""
    with slow_chat(browser) as page:
        ask(page, "first")
        answer = page.locator(".h-answer").last
        expect(answer).to_contain_text("tick tock", timeout=WAIT_MS)
        page.keyboard.press("Alt+KeyN")
        expect(page.locator(".h-empty")).to_be_visible(timeout=WAIT_MS)
        page.locator(".h-row-title", has_text="first").click()
        expect(answer).to_contain_text("tick", timeout=WAIT_MS)
        expect(page.locator(".h-stats").last).to_contain_text("stopped", timeout=WAIT_MS)
        page.keyboard.press("Alt+KeyN")
        ask(page, "second")
        expect(page.locator(".h-asked-text")).to_have_text("second", timeout=WAIT_MS)
        page.wait_for_function(
            "Object.values(localStorage).some((text) => /second.*tick tock/.test(text))"
        )
        page.reload()
        for name in ("first", "second"):
            page.locator(".h-row-title", has_text=name).click()
            expect(page.locator(".h-asked-text")).to_have_text(name, timeout=WAIT_MS)
            expect(answer).to_contain_text("tick tock", timeout=WAIT_MS)
            expect(page.locator(".h-stats").last).to_contain_text("stopped", timeout=WAIT_MS)
            expect(page.locator("[aria-label=Regenerate]")).to_be_visible(timeout=WAIT_MS)


def test_a_busy_server_is_asked_again_until_it_is_stopped_or_has_room(browser: Browser) -> None:
    limits = LimitsConfig(max_running=1, max_queued=0)
    patience = Patience(retry_after_s=4.0)
    with (
        caller() as model,
        serving(
            model,
            ticking(model.vocabulary),
            step_s=0.05,
            has_heartbeat=True,
            limits=limits,
            patience=patience,
        ) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):
        body = {"model": "caller", "prompt": "a", "stream": True}
        url = f"{gateway.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as other:
            assert other.status_code == 200
            ask(page, "first")
            expect(page.get_by_text("Busy, trying again")).to_be_visible(timeout=WAIT_MS)
            page.click("[aria-label=Stop]")
            expect(page.locator(".h-stats").last).to_contain_text("stopped", timeout=WAIT_MS)
            expect(page.get_by_text("Busy, trying again")).to_be_hidden(timeout=WAIT_MS)
            ask(page, "second")
            expect(page.get_by_text("Busy, trying again")).to_be_visible(timeout=WAIT_MS)
        expect(page.locator(".h-answer").last).to_contain_text("tick tock", timeout=WAIT_MS)
        assert page.locator(".h-bad:visible").count() == 0
        page.keyboard.press("Escape")
        expect(page.locator(".h-stats").last).to_contain_text("stopped", timeout=WAIT_MS)


def test_a_key_is_forgotten(browser: Browser) -> None:
    with (
        caller() as model,
        serving(model, ticking(model.vocabulary), has_heartbeat=True, keys=("mine",)) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):
        forget = page.locator("[aria-label='Forget key']")
        for path in ("/", "/console"):
            page.goto(pages + path)
            expect(page.locator(".h-door")).to_be_visible(timeout=WAIT_MS)
            expect(forget).to_be_hidden(timeout=WAIT_MS)
            page.fill(".h-door input", "mine")
            page.press(".h-door input", "Enter")
            if path == "/":
                expect(page.locator("#h-input")).to_be_visible(timeout=WAIT_MS)
                page.reload()
                expect(page.locator("#h-input")).to_be_visible(timeout=WAIT_MS)
            else:
                expect(page.locator(".h-tabs")).to_be_visible(timeout=WAIT_MS)
            kept = "Object.values(localStorage).filter((text) => text === 'mine').length"
            assert page.evaluate(kept) == 1
            forget.click()
            expect(page.locator(".h-door")).to_be_visible(timeout=WAIT_MS)
            assert page.evaluate(kept) == 0


def test_nothing_is_lost_while_the_server_is_away_or_another_page_asks(browser: Browser) -> None:
    with caller() as model, ExitStack() as stack:
        ids = model.vocabulary.encode_controlled("Here.\n```html\n<style>* { display: none }")
        end = model.vocabulary.control_ids[EOS]

        def script(generation: Generation, index: int) -> int:
            return ids[index] if index < len(ids) else end

        options: dict[str, Any] = {"has_heartbeat": True, "keys": ("mine",)}
        with serving(model, script, **options) as gateway:
            pages = stack.enter_context(child("--url", gateway.url))
            page = stack.enter_context(looking(browser, pages))
            page.fill(".h-door input", "mine")
            page.press(".h-door input", "Enter")
            ask(page, "first")
            done(page)
            other = page.context.new_page()
            other.goto(pages)
            other.click(".h-row-title")
            ask(other, "second")
            done(other, 2)
            asked = page.locator(".h-asked-text")
            expect(asked).to_have_text(["first", "second"], timeout=WAIT_MS)
            other.close()
            ask(page, "third")
            done(page, 3)
            port = gateway.address[1]
        page.click("[aria-label=Regenerate]")
        expect(page.locator(".q-notification")).to_contain_text("connection to the server broke")
        done(page, 3)
        page.reload()
        expect(page.locator(".h-door h1")).to_have_text("No server", timeout=WAIT_MS)
        with serving(model, script, port=port, **options):
            page.click(".h-door .h-primary")
            page.click(".h-row-title")
            expect(asked).to_have_text(["first", "second", "third"], timeout=WAIT_MS)
            expect(page.locator(".h-md pre").last).to_contain_text("<style>")


def test_two_pages_do_not_write_over_each_other(browser: Browser) -> None:
    with slow_chat(browser) as page:
        ask(page, "first")
        expect(page.locator(".h-answer").last).to_contain_text("tick tock", timeout=WAIT_MS)
        other = page.context.new_page()
        other.goto(page.url)
        other.click(".h-row-title")
        ask(other, "second")
        expect(other.locator(".q-notification")).to_contain_text(
            "Another page is getting an answer"
        )
        expect(other.locator("#h-input")).to_have_value("second")
        page.keyboard.press("Escape")
        expect(page.locator(".h-stats").last).to_contain_text("stopped", timeout=WAIT_MS)
        other.press("#h-input", "Enter")
        expect(other.locator(".h-asked-text")).to_have_text(["first", "second"], timeout=WAIT_MS)
        expect(other.locator(".h-answer")).to_have_count(2, timeout=WAIT_MS)
        expect(other.locator(".h-answer").first).to_contain_text("tick tock", timeout=WAIT_MS)
        other.keyboard.press("Escape")
        expect(other.locator(".h-stats").last).to_contain_text("stopped", timeout=WAIT_MS)
        expect(page.locator(".h-asked-text")).to_have_text(["first", "second"], timeout=WAIT_MS)
        other.close()


def test_tools_run_and_their_results_go_back(browser: Browser) -> None:
    """Several calls at once, one of them wrong: the gateway is the real one, its units write a
    script.
    """
    with (
        caller() as model,
        serving(model, calling(model.vocabulary), step_s=0.002, has_heartbeat=True) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):
        ask(page, "What is 4321 * 1234?")
        done(page, 2)
        cards = page.locator(".h-call")
        expect(cards).to_have_count(2)
        expect(cards.first).to_contain_text("calculate")
        expect(cards.first).to_contain_text("5332114")
        expect(cards.last).to_contain_text("km measures length and kg measures mass.")
        expect(page.locator(".h-md strong")).to_have_text("5332114")


@contextmanager
def child(*arguments: str) -> Iterator[str]:
    """The pages alone in a process of their own, as `hadal console` serves them."""
    command = [sys.executable, "-m", "hadal.cli", "console", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().removesuffix("/console")
        finally:
            process.terminate()


def test_the_model_that_ships_calls_a_tool(server: Server, browser: Browser) -> None:
    """Greedy: at its own temperature it is wrong now and then."""
    with looking(browser, pages_of(server)) as page:
        page.click(".h-quiet")
        page.get_by_text("The model's own temperature").click()
        page.locator(".q-slider--enabled").click(position={"x": 1, "y": 10})
        page.get_by_role("button", name="Done").click()
        expect(page.get_by_text("temperature 0", exact=True)).to_be_visible()
        ask(page, "What is 4321 * 1234?")
        done(page, 2)
        card = page.locator(".h-call")
        expect(card).to_have_count(1)
        expect(card).to_contain_text("calculate")
        expect(card).to_contain_text("5332114")
        expect(page.locator(".h-md").last).to_contain_text("5332114")


def test_a_model_without_tools_is_asked_without_them(browser: Browser) -> None:
    with slow_chat(browser, can_call=False) as page:
        ask(page, "first")
        expect(page.locator(".h-answer").last).to_contain_text("tick tock", timeout=WAIT_MS)
        page.keyboard.press("Escape")
        expect(page.locator(".h-stats").last).to_contain_text("stopped", timeout=WAIT_MS)
        page.click(".h-quiet")
        expect(page.get_by_text("was not taught to call tools")).to_be_visible()


# ---- the console ----


def tab(page: Page, name: str) -> None:
    page.click(f".h-tabs button:has-text('{name}')")


@contextmanager
def kept_busy(server: Server) -> Iterator[None]:
    """Some chats at a time, as long as it is looked at: a slow host gets there later. All are of one
    kind for some seconds and then of another, so that there is always something that pays to be
    moved.
    """
    enough = threading.Event()

    def work() -> None:
        while not enough.is_set():
            body = {"model": "hadal-tiny", "max_tokens": 100}
            question = QUESTIONS[int(time.monotonic() / QUESTIONS_S) % len(QUESTIONS)]
            body["messages"] = [{"role": "user", "content": question}]
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

    threads = [threading.Thread(target=work) for _ in range(NUM_CHATS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        for thread in threads:
            thread.join()


def is_seen_gone(shown: Locator) -> bool:
    """Whether what is shown goes within two of the console's looks."""
    try:
        expect(shown).to_have_count(0, timeout=1000 * 2 * PERIOD_S)
    except AssertionError:
        return False
    return True


def test_the_console_shows_a_rank_die_experts_move_the_fleet_grow_and_money(
    server: Server, browser: Browser
) -> None:
    with looking(browser, pages_of(server), "/console") as page:
        expect(page.locator(".h-fact-value").first).to_have_text("Ready", timeout=WAIT_MS)
        unit = page.locator(".h-unit", has_text="decode-0")
        expect(unit.locator("i[title*=works]")).to_have_count(4)
        with kept_busy(server):
            working = unit.locator("i[title='rank 1: works']")
            # On a quick machine it is back before the console looks again. Whoever dies once more is
            # started later each time.
            was_seen, num_killed = False, 0
            while not was_seen and num_killed < MOST_KILLS:
                old_pid = server.kill("decode-0.1")
                num_killed += 1
                was_seen = is_seen_gone(working)
                server.wait_restarted("decode-0.1", old_pid)
            assert was_seen
            expect(working).to_have_count(1, timeout=WAIT_MS)
            expect(unit).to_contain_text(f"started again {num_killed} ×")
            tab(page, "Problems")
            row = (
                page.locator("tr", has_text="decode-0.1").filter(has_text="killed by SIGKILL").first
            )
            expect(row).to_be_visible(timeout=WAIT_MS)
            tab(page, "Fleet")
            expect(
                page.locator("td", has_text=re.compile("^grow: decode needs")).first
            ).to_be_visible(timeout=WAIT_MS)
            expect(page.locator(".h-chart canvas")).to_have_count(2)
            tab(page, "Steps")
            expect(page.locator("rect.h-mb0").first).to_be_attached(timeout=WAIT_MS)
            expect(page.locator(".h-fact", has_text="Hidden")).to_be_visible()
            tab(page, "Experts")
            page.locator(".h-picker button", has_text="decode-0").click()
            expect(page.locator("canvas.h-heat")).to_have_count(2, timeout=WAIT_MS)
            expect(
                page.locator("button", has_text=re.compile(r"layer \d, step"))
            ).not_to_have_count(0, timeout=WAIT_MS)
            expect(page.locator(".h-fact", has_text="Balance before")).to_be_visible()
        tab(page, "Money")
        expect(page.locator("td", has_text="hadal-tiny").first).to_be_visible(timeout=WAIT_MS)
        tenant = page.locator("tr", has_text="everyone").locator("td")
        expect(tenant.first).to_be_visible()
        expect(tenant.nth(6)).to_contain_text("$0.")
        assert page.locator(".h-fact-value").first.inner_text().startswith("$0.0")


def test_keys_guard_chat_and_console(start_server: StartServer, browser: Browser) -> None:
    keys = {"HADAL_API_KEYS": "asks-only, runs-all operator"}
    server = start_server(console=PAGES, environment=keys)
    url = pages_of(server)
    with looking(browser, url) as page:
        expect(page.locator(".h-door")).to_be_visible()
        assert page.locator("#h-input").count() == 0
        page.fill(".h-door input", "wrong")
        page.click(".h-door .h-primary")
        expect(page.locator(".h-bad")).to_contain_text("not known")
        page.fill(".h-door input", "asks-only")
        page.click(".h-door .h-primary")
        expect(page.locator("#h-input")).to_be_visible()
        page.goto(f"{url}/console")
        expect(page.locator(".h-bad")).to_contain_text("no right to operate")
        assert page.locator(".h-unit").count() == 0, "nothing is shown before"
        page.fill(".h-door input", "runs-all")
        page.press(".h-door input", "Enter")
        expect(page.locator(".h-unit", has_text="decode-0")).to_be_visible(timeout=WAIT_MS)
        assert page.evaluate("localStorage.getItem('hadal.key')") == "asks-only", "the chat's own"
    assert httpx.get(f"{server.url}/status").status_code == 401
    refused = httpx.get(url, headers={"Host": "evil.example"})
    assert refused.status_code == 403
    log = server.log()
    assert "asks-only" not in log
    assert "runs-all" not in log


def test_a_key_that_is_withdrawn_sees_nothing_any_more(
    start_server: StartServer, browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "keys.txt"
    key, _ = (
        keys_command(path, "add", "op", "--right", "operator"),
        keys_command(path, "add", "other"),
    )
    server = start_server("--api-keys-file", str(path), console=PAGES)
    with looking(browser, pages_of(server), "/console") as page:
        page.fill(".h-door input", key)
        page.press(".h-door input", "Enter")
        expect(page.locator(".h-unit", has_text="decode-0")).to_be_visible(timeout=WAIT_MS)
        keys_command(path, "revoke", "op")
        expect(page.locator(".h-problem")).to_contain_text("not known", timeout=WAIT_MS)
        assert page.locator(".h-tabs button").count() == 0, "they would show what others still see"
        assert page.locator(".h-unit").count() == 0


def test_278_nodes_are_shown_within_200_ms(browser: Browser, tmp_path: Path) -> None:
    frames = tmp_path / "peak.gz"
    command = [sys.executable, "-m", "hadal.cli", "simulate", "--frames", str(frames)]
    subprocess.run(command, check=True, timeout=250, stdout=subprocess.DEVNULL)
    with child("--frames", str(frames)) as pages, looking(browser, pages, "/console") as page:
        expect(page.locator(".h-model")).to_have_text("simulated, 278 nodes", timeout=WAIT_MS)
        assert page.locator(".h-ranks i").count() == 278 * 8
        session = page.context.new_cdp_session(page)
        # The thread's own time: what others take of this host meanwhile is not the page's.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        name_to_ms = {}
        for name in ("Overview", "its charts", "Experts", "Fleet", "Money"):
            if name == "its charts":
                page.locator(".h-chart").last.scroll_into_view_if_needed()
            else:
                tab(page, name)
            page.wait_for_timeout(2500)  # It is made anew once; what follows are refreshes.
            name_to_ms[name] = round(refresh_ms(page, session, 4))
        print(f"milliseconds of the browser's main thread a refresh: {name_to_ms}")
        assert max(name_to_ms.values()) <= 200, name_to_ms


def refresh_ms(page: Page, session: Any, num: int) -> float:
    """What a refresh takes of the page's main thread, mean of `num`."""

    def now() -> tuple[float, int]:
        metrics = session.send("Performance.getMetrics")["metrics"]
        name_to_s = {metric["name"]: metric["value"] for metric in metrics}
        # What this test asks of the browser meanwhile is not the page's work either.
        own_s = name_to_s["TaskDuration"] - name_to_s["DevToolsCommandDuration"]
        return own_s, int(page.evaluate("window.hadalFrames"))

    begin_s, first = now()
    wait_until(lambda: page.evaluate("window.hadalFrames") >= first + num, "frames come")
    page.wait_for_timeout(300)
    end_s, last = now()
    return 1e3 * (end_s - begin_s) / (last - first)


def test_pages_fit_a_phone(server: Server, browser: Browser) -> None:
    for path in ("/", "/console"):
        with looking(browser, pages_of(server), path, size=NARROW, color_scheme="dark") as page:
            expect(page.locator("#h-input, .h-unit").first).to_be_visible(timeout=WAIT_MS)
            page.wait_for_timeout(500)
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW[0]
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert dark == "rgb(14, 20, 24)"


def test_the_console_is_started_again_and_requests_do_not_notice(server: Server) -> None:
    pages_of(server)
    old_pid = server.kill("console")
    server.wait_restarted("console", old_pid)
    assert httpx.get(pages_of(server)).status_code == 200
