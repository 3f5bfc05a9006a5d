"""The pages in a real browser, served by the console's process of a live server. Tested: a chat,
and the console while a rank dies, experts move, the fleet changes and income arrives.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from hadal.core.config import LimitsConfig
from hadal.core.messages.generation import Generation
from hadal.gateway.desk.auth import Keys
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.edge.intake import Patience
from hadal.gateway.text.asks import SamplingDefaults
from hadal.gateway.text.chat import ChatFormat
from hadal.gateway.text.vocabulary import Vocabulary
from tests.dist import gate
from tests.dist.browser import NARROW, WAIT_MS, browsing, looking
from tests.dist.serving import RANKED, Server, StartServer
from tests.unit.gateway.fake_units import Script
from tests.unit.gateway.serving import Serving, serving
from tests.unit.gateway.test_tools import BOS, EOS, V31, V31_TEMPLATE, vocabulary_of
from tests.waiting import DEADLINE_S, PATIENCE_S, join, wait_until

PAGES = {"mode": "auto", "port": 0}
QUESTIONS = (
    "Count from 1 to 60.",
    "What is 4711 + 2345?",
    "Write the word harbour backwards.",
    "Which day is 9 days after May 28?",
)
SOME_MONEY = re.compile(r"^\$(0\.0*)?[1-9]")
NUM_CHATS = 16
"""Concurrent chats. Moves pay off only if they save time for many tokens per step."""
MOST_CHANGES = 300
"""Maximum number of changes of the document by one refresh of a page with 2,224 ranks: unchanged
parts must not be rebuilt. `python -m bench.pages --refresh` measures the milliseconds.
"""
COUNT_CHANGES = """() => {
    window.numChanged = 0;
    const count = (changes) => {
        for (const one of changes) window.numChanged += 1 + one.addedNodes.length;
    };
    const all = { subtree: true, childList: true, attributes: true, characterData: true };
    new MutationObserver(count).observe(document.body, all);
}"""
NUM_OF_A_KIND = 128
"""Number of consecutive questions of one kind."""
MORE_PAGES = pytest.mark.more("one chat in a browser stands in `make test`")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture
def server(mortal: StartServer) -> Server:
    return mortal(console=PAGES)


def pages_of(server: Server) -> str:
    """Wait until the pages are served; return their address."""
    url = server.status().console_url
    wait_until(lambda: server.status().processes["console"].phase == "ready", "pages are there")
    return url


def ask(page: Page, text: str) -> None:
    page.fill("#h-input", text)
    page.press("#h-input", "Enter")


def done(page: Page, number: int = 1) -> None:
    """Wait until this number of answers have their figures."""
    expect(page.locator(".h-stats")).to_have_count(number)
    expect(page.locator(".h-stats").last).to_contain_text("tokens/s")
    expect(page.locator("[aria-label=Regenerate]")).to_be_visible()


@pytest.mark.slow("a browser is started")
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
        page.click("[aria-label='Cancel']")
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


@pytest.mark.promise("Esc stops an answer (and the server stops its work)")
def test_esc_stops_an_answer_and_what_came_stays(server: Server, browser: Browser) -> None:
    with looking(browser, pages_of(server)) as page:
        server.gate.hold(gate.DECODE)
        ask(page, "Count from 1 to 90.")
        expect(page.locator(".h-stop")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".h-stats").last).to_contain_text("stopped")
        server.gate.open()
        expect(page.locator(".h-send").first).to_be_visible()
        page.click("[aria-label=Regenerate]")
        done(page)


@MORE_PAGES
def test_an_answer_stays_until_something_takes_its_place(server: Server, browser: Browser) -> None:
    """The old answer stays even if the page is reloaded before the new answer has begun."""
    with looking(browser, pages_of(server)) as page:
        ask(page, "What is 12 + 30?")
        done(page)
        server.gate.hold(gate.PREFILL)
        page.click("[aria-label=Regenerate]")
        expect(page.locator(".h-stop")).to_be_visible()
        page.reload()
        page.click(".h-row-title")
        expect(page.locator(".h-md").last).to_contain_text("42")


@MORE_PAGES
def test_what_is_too_long_to_send_stays_in_the_field(server: Server, browser: Browser) -> None:
    with browser.new_context() as opened:
        page = opened.new_page()
        page.goto(pages_of(server))
        expect(page.locator(".h-empty")).to_be_visible()
        long = "é" * 300_000
        page.evaluate(f"hadal.fill({json.dumps(long)})")
        page.press("#h-input", "Enter")
        assert page.evaluate("document.getElementById('h-input').validationMessage") == (
            "This message has 600,002 bytes; the page sends at most 400,000. Send less of it."
        )
        expect(page.locator("#h-input")).to_have_value(long)
        expect(page.locator(".h-asked-text")).to_have_count(0)
        # The page still works, and accepts a message within the limit.
        page.fill("#h-input", "x" * 390_000)
        page.press("#h-input", "Enter")
        expect(page.locator(".h-asked-text")).to_have_count(1)
        page.keyboard.press("Alt+n")
        expect(page.locator(".h-empty")).to_be_visible()
        ask(page, "What is 12 + 30?")
        done(page)
        expect(page.locator(".h-md").last).to_contain_text("42")


@pytest.mark.promise("A browser that is shown these pages asks no other host for anything")
@pytest.mark.promise("Answers are markdown; HTML in them is text, and pictures are links.")
def test_what_a_model_writes_runs_nothing_and_fetches_nothing(
    server: Server, browser: Browser
) -> None:
    """Opens a conversation from the browser's storage, as if a model had written it."""
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
    """Return the script of a model that calls two tools, one of them wrongly, then states the result."""
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
    """Yield a model that can call tools, without weights."""
    marks = V31.marks if can_call else ()
    vocabulary = vocabulary_of([BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "</think>", *marks])
    end = vocabulary.control_ids[EOS]
    with closing(
        ChatFormat(
            vocabulary, {"default": V31_TEMPLATE}, {"bos_token": BOS, "eos_token": EOS}, "here"
        )
    ) as chat:
        yield ServedModel("caller", vocabulary, chat, 8192, 6000, (end,), SamplingDefaults())


def ticking(vocabulary: Vocabulary) -> Script:
    """Return a script that repeats the same words without end."""
    ids = vocabulary.encode_plain("tick tock ")
    return lambda generation, index: ids[index % len(ids)]


@contextmanager
def scripted(
    browser: Browser,
    script: Callable[[Vocabulary], Script] = ticking,
    *,
    can_call: bool = True,
    **options: Any,
) -> Iterator[tuple[Page, Serving]]:
    """Yield a chat page and its gateway with units that write a script."""
    with (
        caller(can_call=can_call) as model,
        serving(model, script(model.vocabulary), **options) as gateway,
        child("--url", gateway.url) as pages,
        looking(browser, pages) as page,
    ):
        yield page, gateway


@contextmanager
def child(*arguments: str) -> Iterator[str]:
    """Serve the pages from a process of their own, like `hadal console`; yield their address."""
    command = [sys.executable, "-m", "hadal.cli", "console", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip().removesuffix("/console")
        finally:
            process.terminate()


@pytest.mark.promise("Esc stops an answer (and the server stops its work)")
@MORE_PAGES
@pytest.mark.slow("a page that lost its line has 20 s to come back")
def test_a_page_that_is_closed_lets_its_answer_go(browser: Browser) -> None:
    """Its answer would take 10 minutes. A page that lost its connection has 20 s to reconnect."""
    with scripted(browser, lambda _: lambda *_: 5, step_s=1.0) as (page, gateway):

        def num_open() -> float:
            lines = httpx.get(f"{gateway.url}/metrics").text.splitlines()
            states = [line for line in lines if line.startswith("hadal_generations_now{")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in states)

        ask(page, "Count from 1 to 90.")
        wait_until(lambda: num_open() == 1, "an answer has begun")
        page.close()
        wait_until(lambda: num_open() == 0, "nobody makes it any more")


def kept_chat(number: int, result: str) -> tuple[str, str]:
    """Return (name, text) of an entry in the browser's storage: a conversation with a long tool result."""
    call = {"id": "c", "name": "look", "arguments": "{}", "result": result}
    answers = [{"calls": [call], "finish": "tool_calls"}, {"content": "Seen.", "finish": "stop"}]
    chat = {"id": f"{number}", "title": f"chat {number}", "changed_ms": number}
    chat["turns"] = [{"asked": f"question {number}", "answers": answers}]
    return f"hadal.chat.{number}", json.dumps(chat, ensure_ascii=False)


@MORE_PAGES
def test_five_megabytes_of_conversations_are_listed_and_opened(browser: Browser) -> None:
    """The chats fill nearly all of a browser's storage for a page. One is longer than a socket's message
    may be; its characters have two code units, so that some pieces end within a character.
    """
    chats = [kept_chat(0, "." + 600_000 * "🙂")] + [
        kept_chat(number, 950_000 * "x") for number in range(1, 5)
    ]
    assert sum(len(text) for _, text in chats) > 4_400_000
    with scripted(browser) as (page, _):
        expect(page.locator(".h-empty")).to_be_visible()
        for name, text in chats:
            page.evaluate("([name, text]) => localStorage.setItem(name, text)", [name, text])
        page.reload()
        expect(page.locator(".h-row-title")).to_have_text([f"chat {n}" for n in (4, 3, 2, 1, 0)])
        for number in (0, 3, 0):
            page.locator(".h-row-title", has_text=f"chat {number}").click()
            expect(page.locator(".h-asked-text")).to_have_text(f"question {number}")
            expect(page.locator(".h-md").last).to_contain_text("Seen.")
        page.locator("summary", has_text="look").click()
        shown = page.locator(".h-call pre").last.inner_text()
        assert shown == "." + 19_999 * "🙂", "no half of a character was lost"
        page.hover(".h-row >> nth=0")
        page.locator("[aria-label=Delete]").first.click()
        expect(page.locator(".h-row-title")).to_have_count(4)


@MORE_PAGES
@pytest.mark.slow("all that a browser keeps is filled, twice")
def test_a_browser_that_is_full_says_so_once_and_again_after_there_was_room(
    browser: Browser,
) -> None:
    with scripted(browser, step_s=0.05) as (page, _):
        expect(page.locator(".h-empty")).to_be_visible()
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
            expect(said).to_be_visible()
            page.get_by_role("button", name="OK", exact=True).click()
            expect(said).to_be_hidden()
            # These words take at least 1.5 s, so the page has tried to store the answer again by now (every
            # second). The notice must not come back.
            expect(page.locator(".h-answer").last).to_contain_text("tick tock " * 15 + "tick")
            expect(said).to_be_hidden()
            page.evaluate("localStorage.clear()")
            page.keyboard.press("Escape")
            page.wait_for_function("JSON.stringify(localStorage).includes('tick tock')")


@pytest.mark.promise(
    "An answer is stored while it arrives. If you leave or reload the page, the part "
    "that has arrived stays."
)
@MORE_PAGES
def test_what_came_of_an_answer_that_is_left_is_kept(browser: Browser) -> None:
    """While an answer streams, another conversation is opened, and later the page is reloaded."""
    with scripted(browser, step_s=0.1) as (page, _):
        ask(page, "first")
        answer = page.locator(".h-answer").last
        expect(answer).to_contain_text("tick tock")
        page.keyboard.press("Alt+KeyN")
        expect(page.locator(".h-empty")).to_be_visible()
        page.locator(".h-row-title", has_text="first").click()
        expect(answer).to_contain_text("tick")
        expect(page.locator(".h-stats").last).to_contain_text("stopped")
        page.keyboard.press("Alt+KeyN")
        expect(page.locator(".h-empty")).to_be_visible()
        ask(page, "second")
        expect(page.locator(".h-asked-text")).to_have_text("second")
        page.wait_for_function(
            "Object.values(localStorage).some((text) => /second.*tick tock/.test(text))"
        )
        page.reload()
        for name in ("first", "second"):
            page.locator(".h-row-title", has_text=name).click()
            expect(page.locator(".h-asked-text")).to_have_text(name)
            expect(answer).to_contain_text("tick tock")
            expect(page.locator(".h-stats").last).to_contain_text("stopped")
            expect(page.locator("[aria-label=Regenerate]")).to_be_visible()


@pytest.mark.promise("the page asks again, five times at most, unless you stop it")
@MORE_PAGES
@pytest.mark.slow("the page waits for seconds before it asks again")
def test_a_busy_server_is_asked_again_until_it_is_stopped_or_has_room(browser: Browser) -> None:
    limits = LimitsConfig(max_running=1, max_queued=0)
    options = {"limits": limits, "patience": Patience(retry_after_s=4.0), "step_s": 0.05}
    with scripted(browser, **options) as (page, gateway):
        body = {"model": "caller", "prompt": "a", "stream": True}
        url = f"{gateway.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as other:
            assert other.status_code == 200
            ask(page, "first")
            expect(page.get_by_text("busy; retrying")).to_be_visible()
            page.click("[aria-label=Stop]")
            expect(page.locator(".h-stats").last).to_contain_text("stopped")
            expect(page.get_by_text("busy; retrying")).to_be_hidden()
            ask(page, "second")
            expect(page.get_by_text("busy; retrying")).to_be_visible()
        expect(page.locator(".h-answer").last).to_contain_text("tick tock")
        assert page.locator(".h-bad:visible").count() == 0
        page.keyboard.press("Escape")
        expect(page.locator(".h-stats").last).to_contain_text("stopped")


@MORE_PAGES
def test_a_key_is_forgotten(browser: Browser) -> None:
    with scripted(browser, keys=("mine",)) as (page, _):
        pages = page.url.rstrip("/")
        forget = page.locator("[aria-label='Forget key']")
        for path in ("/", "/console"):
            page.goto(pages + path)
            expect(page.locator(".h-door")).to_be_visible()
            expect(forget).to_be_hidden()
            page.fill(".h-door input", "mine")
            page.press(".h-door input", "Enter")
            if path == "/":
                expect(page.locator("#h-input")).to_be_visible()
                page.reload()
                expect(page.locator("#h-input")).to_be_visible()
            else:
                expect(page.locator(".h-tabs")).to_be_visible()
            kept = "Object.values(localStorage).filter((text) => text === 'mine').length"
            assert page.evaluate(kept) == 1
            forget.click()
            expect(page.locator(".h-door")).to_be_visible()
            assert page.evaluate(kept) == 0


@MORE_PAGES
def test_nothing_is_lost_while_the_server_is_away_or_another_page_asks(browser: Browser) -> None:
    with caller() as model, ExitStack() as stack:
        ids = model.vocabulary.encode_controlled("Here.\n```html\n<style>* { display: none }")
        end = model.vocabulary.control_ids[EOS]

        def script(generation: Generation, index: int) -> int:
            return ids[index] if index < len(ids) else end

        options: dict[str, Any] = {"keys": ("mine",)}
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
            expect(asked).to_have_text(["first", "second"])
            other.close()
            ask(page, "third")
            done(page, 3)
            port = gateway.address[1]
        page.click("[aria-label=Regenerate]")
        expect(page.locator(".q-notification")).to_contain_text("connection to the server broke")
        done(page, 3)
        page.reload()
        expect(page.locator(".h-door h1")).to_have_text("No server")
        with serving(model, script, port=port, **options):
            page.click(".h-door .h-primary")
            page.click(".h-row-title")
            expect(asked).to_have_text(["first", "second", "third"])
            expect(page.locator(".h-md pre").last).to_contain_text("<style>")


SLOW_READS = """
    const read = hadal.piece;
    hadal.piece = async (...asked) => {
        await new Promise((resume) => setTimeout(resume, 1000));
        return read(...asked);
    };
"""
SLOW_ANSWERS = """
    const emit = window.socket.emit.bind(window.socket);
    window.socket.emit = (name, ...said) => {
        setTimeout(() => emit(name, ...said), name === "javascript_response" ? 500 : 0);
    };
"""
"""Delays the browser's replies by 0.5 s, so that an answer ends before its storage is confirmed."""


@MORE_PAGES
def test_two_pages_do_not_write_over_each_other(browser: Browser) -> None:
    with scripted(browser, step_s=0.1) as (page, _):
        ask(page, "first")
        expect(page.locator(".h-answer").last).to_contain_text("tick tock")
        other = page.context.new_page()
        other.goto(page.url)
        other.evaluate(SLOW_READS)
        other.click(".h-row-title")
        ask(other, "second")
        expect(other.locator(".q-notification")).to_contain_text(
            "Another page is waiting for an answer"
        )
        expect(other.locator("#h-input")).to_have_value("second")
        page.evaluate(SLOW_ANSWERS)
        page.keyboard.press("Escape")
        expect(page.locator(".h-stats").last).to_contain_text("stopped")
        other.press("#h-input", "Enter")
        expect(other.locator(".h-asked-text")).to_have_text(["first", "second"])
        expect(other.locator(".h-answer")).to_have_count(2)
        expect(other.locator(".h-answer").first).to_contain_text("tick tock")
        other.keyboard.press("Escape")
        expect(other.locator(".h-stats").last).to_contain_text("stopped")
        expect(page.locator(".h-asked-text")).to_have_text(["first", "second"])
        other.close()


@MORE_PAGES
def test_tools_run_and_their_results_go_back(browser: Browser) -> None:
    """Several calls at once, one of them wrong. The gateway is real; its units write a script."""
    with scripted(browser, calling, step_s=0.002) as (page, _):
        ask(page, "What is 4321 * 1234?")
        done(page, 2)
        cards = page.locator(".h-call")
        expect(cards).to_have_count(2)
        expect(cards.first).to_contain_text("calculate")
        expect(cards.first).to_contain_text("5332114")
        expect(cards.last).to_contain_text("km measures length and kg measures mass.")
        expect(page.locator(".h-md strong")).to_have_text("5332114")


@MORE_PAGES
def test_the_model_that_ships_calls_a_tool(server: Server, browser: Browser) -> None:
    """Sets temperature 0, because at its default temperature the model is sometimes wrong."""
    with looking(browser, pages_of(server)) as page:
        page.click(".h-quiet")
        page.get_by_text("Default temperature of the model").click()
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


@MORE_PAGES
def test_a_model_without_tools_is_asked_without_them(browser: Browser) -> None:
    with scripted(browser, can_call=False, step_s=0.1) as (page, _):
        ask(page, "first")
        expect(page.locator(".h-answer").last).to_contain_text("tick tock")
        page.keyboard.press("Escape")
        expect(page.locator(".h-stats").last).to_contain_text("stopped")
        page.click(".h-quiet")
        expect(page.get_by_text("was not trained to call tools")).to_be_visible()


# ---- the console ----


def tab(page: Page, name: str) -> None:
    page.click(f".h-tabs button:has-text('{name}')")


@contextmanager
def kept_busy(server: Server) -> Iterator[None]:
    """Send several chats at a time until the block ends. Their kind changes every few seconds, so
    that a move of experts always pays.
    """
    enough, numbers = threading.Event(), itertools.count()

    def work() -> None:
        while not enough.is_set():
            body = {"model": "hadal-tiny", "max_tokens": 100}
            question = QUESTIONS[next(numbers) // NUM_OF_A_KIND % len(QUESTIONS)]
            body["messages"] = [{"role": "user", "content": question}]
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)

    threads = [threading.Thread(target=work) for _ in range(NUM_CHATS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        enough.set()
        join(*threads)


@contextmanager
def without_forks(server: Server) -> Iterator[None]:
    """Prevent restarts within the block: the process that ranks are forked from is frozen."""
    status = Path(f"/proc/{server.pids()['decode-0.1']}/stat").read_text()
    parent = int(status.rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(parent, signal.SIGCONT)


@MORE_PAGES
@pytest.mark.slow("a fleet grows, and experts move")
def test_the_console_shows_a_rank_die_experts_move_the_fleet_grow_and_money(
    start_server: StartServer, browser: Browser, tmp_path: Path
) -> None:
    fleet = {"mode": "auto", "decode_max": 2, "period_s": 1.0, "start_s": 5.0}
    server = start_server(
        **RANKED,
        console=PAGES,
        fleet={**fleet, "decode_tokens_per_s": 3.0},
        ledger={"url": str(tmp_path / "ledger.sqlite")},
    )
    with looking(browser, pages_of(server), "/console") as page:
        expect(page.locator(".h-fact-value").first).to_have_text("Ready")
        unit = page.locator(".h-unit", has_text="decode-0")
        expect(unit.locator("i[title*=works]")).to_have_count(4)
        with kept_busy(server):
            working = unit.locator("i[title='rank 1: works']")
            with without_forks(server):
                old_pid = server.kill("decode-0.1")
                expect(working).to_have_count(0)
            server.wait_restarted("decode-0.1", old_pid)
            expect(working).to_have_count(1)
            expect(unit).to_contain_text("started again 1 ×")
            tab(page, "Problems")
            row = (
                page.locator("tr", has_text="decode-0.1").filter(has_text="killed by SIGKILL").first
            )
            expect(row).to_be_visible()
            tab(page, "Fleet")
            expect(
                page.locator("td", has_text=re.compile("^grow: decode needs")).first
            ).to_be_visible()
            expect(page.locator(".h-chart canvas")).to_have_count(2)
            tab(page, "Steps")
            expect(page.locator("rect.h-mb0").first).to_be_attached()
            expect(page.locator(".h-fact", has_text="Hidden")).to_be_visible()
            tab(page, "Experts")
            page.locator(".h-picker button", has_text="decode-0").click()
            expect(page.locator("canvas.h-heat")).to_have_count(2)
            expect(
                page.locator("button", has_text=re.compile(r"layer \d, step"))
            ).not_to_have_count(0)
            expect(page.locator(".h-fact", has_text="Balance before")).to_be_visible()
        tab(page, "Money")
        expect(page.locator("td", has_text="hadal-tiny").first).to_be_visible()
        tenant = page.locator("tr", has_text="everyone").locator("td")
        expect(tenant.first).to_be_visible()
        expect(tenant.nth(6)).to_have_text(SOME_MONEY)
        expect(page.locator(".h-fact-value").first).to_have_text(SOME_MONEY)


@MORE_PAGES
def test_keys_guard_chat_and_console_until_they_are_withdrawn(browser: Browser) -> None:
    """A withdrawn key of a file is tested by test_quotas."""
    left = "asks-only"
    with scripted(browser, keys=(left, "runs-all name=op operator")) as (page, gateway):
        url = page.url.rstrip("/")
        expect(page.locator(".h-door")).to_be_visible()
        assert page.locator("#h-input").count() == 0
        page.fill(".h-door input", "wrong")
        page.click(".h-door .h-primary")
        expect(page.locator(".h-bad")).to_contain_text("not valid")
        page.fill(".h-door input", left)
        page.click(".h-door .h-primary")
        expect(page.locator("#h-input")).to_be_visible()
        page.goto(f"{url}/console")
        expect(page.locator(".h-bad")).to_contain_text("no right to operate")
        assert page.locator(".h-tabs button").count() == 0, "nothing is shown before"
        page.fill(".h-door input", "runs-all")
        page.press(".h-door input", "Enter")
        expect(page.locator(".h-tabs button").first).to_be_visible()
        assert page.evaluate("localStorage.getItem('hadal.key')") == left, "the chat's own"
        gateway.world.gateway.tenancy.take(Keys([left]))
        expect(page.locator(".h-problem")).to_contain_text("not valid")
        assert page.locator(".h-tabs button").count() == 0, "they would show what others still see"
        assert page.locator(".h-unit").count() == 0
        assert httpx.get(f"{gateway.url}/status").status_code == 401
        assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 403


@MORE_PAGES
def test_the_console_lists_requests_with_texts_of_the_own_key_only(browser: Browser) -> None:
    with scripted(browser, keys=("guest", "runs-all name=op operator")) as (page, gateway):
        rules = "Write the numbers below each other. " * 20
        for key, days in (("guest", ("Monday", "Tuesday")), ("runs-all", ("Friday", "Sunday"))):
            for day in days:
                messages = [{"role": "user", "content": f"It is {day}. {rules}"}]
                reply = httpx.post(
                    f"{gateway.url}/v1/chat/completions",
                    json={"model": "caller", "messages": messages, "max_tokens": 2},
                    headers={"authorization": f"Bearer {key}"},
                    timeout=DEADLINE_S,
                )
                assert reply.status_code == 200
        page.goto(f"{page.url.rstrip('/')}/console")
        page.fill(".h-door input", "runs-all")
        page.press(".h-door input", "Enter")
        tab(page, "Requests")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(4)
        expect(rows.first).to_contain_text("differs")
        expect(rows.first).to_contain_text("unday.")
        expect(rows.first).to_contain_text("riday.")
        expect(rows.nth(2)).to_contain_text("differs")
        assert "uesday" not in page.locator("main.h-console").inner_text()


@pytest.mark.slow("seconds of 278 nodes are simulated")
@MORE_PAGES
def test_278_nodes_are_shown(browser: Browser, tmp_path: Path) -> None:
    frames = tmp_path / "peak.gz"
    command = [sys.executable, "-m", "hadal.cli", "simulate", "--frames", str(frames)]
    subprocess.run(command, check=True, timeout=800, stdout=subprocess.DEVNULL)
    with child("--frames", str(frames)) as pages, looking(browser, pages, "/console") as page:
        expect(page.locator(".h-model")).to_have_text("simulated, 278 nodes")
        assert page.locator(".h-ranks i").count() == 278 * 8
        page.evaluate(COUNT_CHANGES)
        name_to_num = {}
        for name in ("Overview", "Experts", "Fleet", "Money"):
            tab(page, name)
            wait_frames(page, 2)  # The tab is built once; later frames are refreshes.
            page.evaluate("window.numChanged = 0")
            num_frames = wait_frames(page, 3)
            name_to_num[name] = round(page.evaluate("window.numChanged") / num_frames)
        print(f"changes of the document by a refresh: {name_to_num}")
        assert max(name_to_num.values()) <= MOST_CHANGES, name_to_num


def wait_frames(page: Page, num: int) -> int:
    """Wait for `num` frames of the feed; return how many arrived."""
    first = page.evaluate("window.hadalFrames")
    wait_until(lambda: page.evaluate("window.hadalFrames") >= first + num, "frames come")
    return int(page.evaluate("window.hadalFrames")) - first


@MORE_PAGES
def test_pages_fit_a_phone(server: Server, browser: Browser) -> None:
    for path in ("/", "/console"):
        with looking(browser, pages_of(server), path, size=NARROW, color_scheme="dark") as page:
            expect(page.locator("#h-input, .h-unit").first).to_be_visible()
            page.wait_for_function(
                f"document.documentElement.scrollWidth <= {NARROW[0]}", timeout=WAIT_MS
            )
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert dark == "rgb(14, 20, 24)"


@pytest.mark.promise("If the pages end, requests go on and the supervisor starts them again")
def test_the_console_is_started_again_and_requests_do_not_notice(server: Server) -> None:
    pages_of(server)
    old_pid = server.kill("console")
    server.wait_restarted("console", old_pid)
    assert httpx.get(pages_of(server)).status_code == 200
