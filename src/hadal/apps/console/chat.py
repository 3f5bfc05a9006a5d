"""The chat page: asks the gateway, shows thinking, text and tools as they come, keeps conversations
in the browser.

One ChatPage is one open page; what it knows is gone with it, but for what the browser keeps.
"""

from __future__ import annotations

import asyncio
import html
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from nicegui import background_tasks, ui
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]

from hadal.apps.console import tools
from hadal.apps.console.asking import AskError, Asking
from hadal.apps.console.conversation import (
    ChatAnswer,
    ChatTurn,
    Conversation,
    KeptChat,
    ToolRun,
    read,
    read_list,
    to_json,
)
from hadal.apps.console.shell import Door, TopBar, head, store

_PREFIX = "hadal.chat."
_SHOW_S = 0.06
"""Time between two looks of a page at an answer that comes in: more often nobody reads."""
_SHOW_CHARS_PER_S = 50_000
"""Each look renders and sends the whole text: a long one is looked at less often."""
_MAX_ROUNDS = 8
"""Answers of one turn: a model that calls tools for ever is stopped."""
_MAX_SHOWN = 20_000
"""Characters of a tool's arguments or result that are shown."""
_MAX_LISTED = 1000
"""Conversations in the list; the browser may keep more."""
_PIECE_CHARS = 100_000
"""Of what the browser keeps, at once: whatever they are, far less than a socket's message may be."""
_MAX_PIECES = 1000
_JS_S = 10.0
_KEEP_S = 1.0
_KEEP_CHARS_PER_S = 250_000
"""What comes in is kept every second; of a long conversation no more than this is sent in one."""
_STORED_S = 1.0
"""A browser that has not said by then that it kept an answer is not waited for."""
_MAX_AGAIN = 5
_MAX_AGAIN_S = 60.0
"""A server that is busy for longer is not waited for."""
_IDEAS = ("What is 12 + 30?", "Spell the word harbour backwards.", "Sort 31, 4, 15, 9.")


class AnswerView:
    """One answer on the page."""

    def __init__(self) -> None:
        with ui.element("div").classes("h-answer"):
            with ui.element("details").classes("h-thinking") as self._thinking:
                with ui.element("summary"):
                    self._thought = ui.label("Thinking …")
                self._thinking_text = ui.element("div").classes("h-thinking-text")
                with self._thinking_text:
                    self._thinking_label = ui.label("")
            self._thinking.set_visibility(False)
            self._note = ui.label("").classes("h-muted")
            self._note.set_visibility(False)
            self._content = ui.html("").classes("h-md")
            self._calls = ui.element("div").classes("h-calls")
            self._error = ui.label("").classes("h-bad")
            self._error.set_visibility(False)
            self.foot = ui.element("div").classes("h-foot")
        self._shown: tuple[str, str] = ("", "")
        self._shown_calls: list[tuple[str, str, str | None]] = []

    def say(self, note: str) -> None:
        """What is to be said before anything has come; empty: nothing."""
        self._note.set_text(note)
        self._note.set_visibility(bool(note))

    def show(self, answer: ChatAnswer, *, is_over: bool) -> None:
        """Bring the page up to what came."""
        if is_over:
            self.say("")
        if answer.thinking:
            self._thinking.set_visibility(True)
            self._thinking_label.set_text(answer.thinking.strip())
            is_thinking = not is_over and not answer.content and not answer.calls
            self._thought.set_text(
                "Thinking …" if is_thinking else f"Thought for {answer.thought_s:.1f} s"
            )
        if answer.content != self._shown[1]:
            self._content.set_content(rendered(answer.content))
        self._shown = (answer.thinking, answer.content)
        calls = [(call.name, call.arguments, call.result) for call in answer.calls]
        if calls != self._shown_calls:
            self._shown_calls = calls
            self._calls.clear()
            with self._calls:
                for call in answer.calls:
                    _show_call(call, is_over=is_over)
        self._error.set_text(answer.error)
        self._error.set_visibility(bool(answer.error))
        if is_over:
            self._foot(answer)

    def _foot(self, answer: ChatAnswer) -> None:
        self.foot.clear()
        words = []
        if answer.tokens_per_s:
            words.append(f"{answer.tokens_per_s:.0f} tokens/s")
        if answer.num_prompt:
            hit = answer.num_hit / answer.num_prompt
            words.append(f"{hit:.0%} of the prompt from cache" if hit else "nothing from cache")
        if answer.first_s:
            words.append(f"first word after {answer.first_s:.2f} s")
        if answer.finish == "stopped":
            words.append("stopped")
        elif answer.finish == "length":
            words.append("cut at the limit of its length")
        with self.foot:
            ui.label(" · ".join(words)).classes("h-stats")


def _coloured(code: str, language: str, _: str) -> str:
    try:
        lexer = get_lexer_by_name(language or "text")
    except ClassNotFound:
        lexer = get_lexer_by_name("text")
    return str(highlight(code, lexer, HtmlFormatter(nowrap=True)))


_MARKDOWN = MarkdownIt("js-default", {"highlight": _coloured}).disable("image")


def rendered(text: str) -> str:
    """HTML of what a model wrote. HTML in it is text, as all of it; and a block of code is one from
    its first line on, whether or not its end has come.
    """
    return str(_MARKDOWN.render(text))


@cache
def _code_styles() -> str:
    """Colours of code, in light and dark."""
    light, dark = (
        HtmlFormatter(nobackground=True, style=style).get_style_defs(f"{where}.h-md pre")
        for style, where in (("default", ""), ("github-dark", ".body--dark "))
    )
    return f"{light}\n{dark}"


def _show_call(call: ToolRun, *, is_over: bool) -> None:
    """A card: the tool, what it was given, and what it gave or that it runs."""
    with ui.element("details").classes("h-call"):
        with ui.element("summary"):
            if call.result is None and not is_over:
                ui.spinner(size="14px").classes("h-spin")
            else:
                is_done = call.result is not None and not call.is_error
                ui.icon("done" if is_done else "priority_high").classes(
                    "h-good-icon" if is_done else "h-bad-icon"
                )
            ui.label(call.name or "a tool").classes("h-call-name")
            ui.label(_arguments_line(call.arguments)).classes("h-call-arguments")
            if call.result is not None:
                ui.label(call.result[:80]).classes("h-call-result")
        ui.html(f"<pre>{html.escape(call.arguments[:_MAX_SHOWN])}</pre>")
        if call.result is not None:
            ui.html(f"<pre>{html.escape(call.result[:_MAX_SHOWN])}</pre>")


def _arguments_line(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return text[:80]
    if not isinstance(found, dict):
        return text[:80]
    return ", ".join(f"{name} {value}" for name, value in found.items())[:80]


class ChatPage:
    """One open page."""

    def __init__(self, asking: Asking, answered: dict[str, tuple[ChatPage, int]]) -> None:
        """`answered`: by id, conversations in which a page is getting an answer, and which of its
        askings that is.
        """
        self._asking = asking
        self._answered = answered
        self._key = ""
        self._model = ""
        self._can_call = True
        """Until the server refuses tools: its model was not taught any."""
        self._all: list[KeptChat] = []
        self._loaded: dict[str, Conversation] = {}
        """Those of them whose turns are here."""
        self._now = _new()
        self._opening = ""
        """The one whose turns are on their way."""
        self._reading = asyncio.Lock()
        self._editing: int | None = None
        """The turn in whose place the next question is asked; None: it is asked behind all."""
        self._task: asyncio.Task[Any] | None = None
        self._is_running = False
        self._num_follows = self._num_begun = 0

    async def build(self) -> None:
        """Make the page, and fill it when the browser is there."""
        head("Hadal")
        ui.add_head_html(f"<style>{_code_styles()}</style>")
        self._client = ui.context.client
        self._client.on_delete(self._closed)
        # Not the client of the moment: what was clicked may be gone by the time it acts.
        self._bar = TopBar("chat")
        with self._bar.left:
            menu = ui.element("button").classes("h-icon h-menu").on("click", self._show_list)
            menu.props('aria-label="Conversations"')
            with menu:
                ui.icon("menu")
        menu.move(self._bar.left, 0)
        self._body = ui.element("main").classes("h-chat")
        await self._client.connected(timeout=30.0)
        await self._bar.remember()
        what = "This server answers those who have a key. It stays in this browser."
        door = Door("chat", what, self._knock)
        with self._body:
            await door.open(self._body, self._enter)

    async def _knock(self, key: str) -> None:
        self._model = await self._asking.model(key)

    async def _enter(self, key: str) -> None:
        self._key = key
        self._bar.show_key(key)
        self._bar.model.set_text(self._model)
        self._all = await self._listed()
        self._layout()
        self._show()

    async def _listed(self) -> list[KeptChat]:
        """What the browser keeps."""
        found = await self._client.run_javascript(
            f"return hadal.kept({json.dumps(_PREFIX)}, {_MAX_LISTED})", timeout=_JS_S
        )
        return read_list(found)

    # ---- the page ----
    def _layout(self) -> None:
        self._side = ui.element("aside").classes("h-side")
        with self._side:
            with ui.element("button").classes("h-new").on("click", self.new):
                ui.icon("add")
                ui.label("New chat")
                ui.label("Alt N").classes("h-key")
            self._list = ui.element("div").classes("h-list")
        self._veil = ui.element("div").classes("h-veil").on("click", self._hide_list)
        with ui.element("section").classes("h-main"):
            self._scroll = ui.element("div").classes("h-scroll").props('id="h-scroll"')
            with self._scroll:
                self._turns = ui.element("div").classes("h-turns").props('aria-live="polite"')
            with ui.element("div").classes("h-composer-wrap"):
                with ui.element("div").classes("h-editing") as self._editing_note:
                    ui.label("Asks again from here. What follows goes once this is sent.")
                    leave = ui.element("button").classes("h-icon").props('aria-label="Keep it"')
                    with leave.on("click", self._keep_what_follows):
                        ui.icon("close")
                self._composer()
        keys = ui.element("div").classes("h-none")
        keys.on("new", self.new)
        keys.on("stop", self.stop)
        keys.on("kept", self._kept_elsewhere, args=["detail"])
        self._client.run_javascript(f"hadal.keys({keys.id})")

    def _composer(self) -> None:
        with ui.element("div").classes("h-composer"):
            self._input = ui.element("textarea").classes("h-input")
            self._input.props(
                'rows="1" placeholder="Ask something" aria-label="Message" id="h-input"'
                ' autocomplete="off"'
            )
            self._input.on(
                "keydown",
                self._sent,
                js_handler="(e) => { if (e.key === 'Enter' && !e.shiftKey && !e.isComposing)"
                " { e.preventDefault(); hadal.send(e.target, emit); } }",
            )
            with ui.element("div").classes("h-composer-foot"):
                with ui.element("button").classes("h-quiet").on("click", self._settings) as button:
                    ui.icon("tune")
                    self._settings_label = ui.label("")
                button.props('aria-label="Settings"')
                ui.label("Enter sends · Shift Enter a new line · Esc stops").classes("h-hint")
                self._send = ui.element("button").classes("h-send").props('aria-label="Send"')
                self._send.on(
                    "click",
                    self._sent,
                    js_handler="() => hadal.send(hadal.field(), emit)",
                )
                with self._send:
                    ui.icon("arrow_upward")
                self._stop = ui.element("button").classes("h-send h-stop").on("click", self.stop)
                self._stop.props('aria-label="Stop"')
                with self._stop:
                    ui.icon("stop")
        self._settings_button = button

    def _show_rows(self) -> None:
        """The list of all conversations."""
        self._list.clear()
        with self._list:
            for one in self._all:
                self._list_row(one)
            if not self._all:
                ui.label("Conversations stay in this browser. The server keeps none.").classes(
                    "h-list-empty"
                )

    def _show(self) -> None:
        """The conversation, and the list of all."""
        self._show_rows()
        self._turns.clear()
        with self._turns:
            if not self._now.turns:
                self._empty()
            for number, turn in enumerate(self._now.turns):
                self._turn(number, turn)
        words = []
        if self._now.temperature is not None:
            words.append(f"temperature {self._now.temperature:g}")
        if self._now.system.strip():
            words.append("system prompt")
        self._settings_label.set_text(", ".join(words) or "Settings")
        self._editing_note.set_visibility(self._editing is not None)
        self._state(is_running=self._is_running)
        self._client.run_javascript("hadal.bottom(); hadal.focus()")

    def _list_row(self, one: KeptChat) -> None:
        row = ui.element("div").classes("h-row" + (" h-row-now" if one.id == self._now.id else ""))
        with row:
            with ui.element("button").classes("h-row-title").on("click", lambda: self._open(one)):
                ui.label(one.title or "New chat")
            with (
                ui.element("button")
                .classes("h-icon h-row-delete")
                .props('aria-label="Delete"')
                .on("click", lambda: self._delete(one))
            ):
                ui.icon("close")

    def _empty(self) -> None:
        with ui.element("div").classes("h-empty"):
            ui.html("<h1>What would you like to know?</h1>")
            ui.label(
                f"{self._model} answers. What you ask goes to this server and nowhere else."
            ).classes("h-muted")
            with ui.element("div").classes("h-ideas"):
                for idea in _IDEAS:
                    with (
                        ui.element("button")
                        .classes("h-idea")
                        .on("click", lambda idea=idea: self.ask(idea))
                    ):
                        ui.label(idea)

    def _turn(self, number: int, turn: ChatTurn) -> AnswerView | None:
        """Show a turn; returns the view of its last answer."""
        with ui.element("div").classes("h-asked-row"):
            with ui.element("div").classes("h-asked"):
                ui.label(turn.asked).classes("h-asked-text")
            with (
                ui.element("button")
                .classes("h-icon h-edit")
                .props('aria-label="Edit" title="Edit and ask again"')
                .on("click", lambda: self._edit(number))
            ):
                ui.icon("edit")
        view = None
        for answer in turn.answers:
            view = AnswerView()
            view.show(answer, is_over=True)
        if view is not None and number == len(self._now.turns) - 1 and not self._is_running:
            self._again(view, turn)
        return view

    def _again(self, view: AnswerView, turn: ChatTurn) -> None:
        """What can be done with the last answer."""
        text = "\n\n".join(answer.content for answer in turn.answers if answer.content)
        with view.foot:
            for icon, name, act in (
                ("content_copy", "Copy", lambda: self._copy(text)),
                ("refresh", "Regenerate", self.regenerate),
            ):
                button = ui.element("button").classes("h-icon").on("click", act)
                button.props(f'aria-label="{name}" title="{name}"')
                with button:
                    ui.icon(icon)

    def _state(self, *, is_running: bool) -> None:
        self._is_running = is_running
        self._send.set_visibility(not is_running)
        self._stop.set_visibility(is_running)

    def _copy(self, text: str) -> None:
        self._client.run_javascript(f"hadal.copy({json.dumps(text)})")

    def _show_list(self) -> None:
        self._client.run_javascript("document.body.classList.toggle('h-list-open')")

    def _hide_list(self) -> None:
        self._client.run_javascript("document.body.classList.remove('h-list-open')")

    # ---- what people do ----
    def new(self) -> None:
        """Begin another conversation, with the settings of this one."""
        self._leave()
        self._opening = ""
        before, self._now = self._now, _new()
        self._now.system, self._now.temperature = before.system, before.temperature
        self._now.has_tools = before.has_tools
        self._hide_list()
        self._show()

    def stop(self) -> None:
        """Stop the answer that comes in; what came of it stays."""
        if self._task is not None:
            self._task.cancel()

    async def ask(self, text: str) -> None:
        """Ask, unless an answer is on its way. A conversation that is being opened is the one to ask in."""
        async with self._reading:
            pass
        if not text.strip() or self._is_running:
            return
        if not await self._follow():
            self._client.run_javascript(f"hadal.fill({json.dumps(text)})")
            return
        self._opening = ""
        if self._editing is not None:
            del self._now.turns[self._editing :]
            self._now.title = self._now.title if self._now.turns else ""
        self._now.ask(text)
        self._keep(self._now)
        self._begin([])

    async def regenerate(self) -> None:
        """Have the last question answered anew. What answered it goes when something comes."""
        if self._now.turns and not self._is_running and await self._follow():
            turn = self._now.turns[-1]
            before, turn.answers = turn.answers, []
            self._begin(before)

    async def _follow(self) -> bool:
        """Take over what another page of this browser kept of the conversation. False if nothing can be
        asked: that page is getting an answer, or this one shows something else by now.
        """
        now = self._now
        if now.id not in self._loaded:  # No page but this one has it.
            return True
        if not self._may_ask(now.id):
            return False
        self._is_running = True  # Nobody asks while the browser is read.
        self._num_follows += 1
        number, found = self._num_follows, None
        with suppress(TimeoutError):
            kept = {one.id: one.changed_ms for one in await self._listed()}
            if kept.get(now.id, 0) > now.changed_ms:
                found = await self._read(now.id)
        if self._now is not now or number != self._num_follows:
            return False
        self._is_running = False
        if found is not None:
            self._loaded[now.id] = self._now = found
            num = 0 if self._editing is None else self._editing + 1
            if now.turns[:num] != found.turns[:num]:
                self._editing = None
            self._show()
        return self._may_ask(now.id)

    def _may_ask(self, chat_id: str) -> bool:
        """Whether no other page is getting an answer there; says so if one is."""
        if self._answered.get(chat_id, (self, 0))[0] is self:
            return True
        with self._body:
            ui.notify("Another page is getting an answer in this conversation.")
        return False

    async def _sent(self, event: Any) -> None:
        await self.ask(str(event.args))

    async def _open(self, one: KeptChat) -> None:
        self._opening = one.id
        async with self._reading:
            found = self._loaded.get(one.id) or await self._read(one.id)
        if self._opening != one.id:
            return  # Meanwhile something else was wanted.
        self._opening = ""
        if found is self._now:
            self._hide_list()
            return
        if found is None:
            with self._body:
                ui.notify("The browser does not keep this conversation any more.")
            return
        self._leave()
        self._loaded[one.id] = self._now = found
        self._hide_list()
        self._show()

    async def _read(self, chat_id: str) -> Conversation | None:
        """A conversation out of the browser, piece by piece."""
        name, texts, begin = json.dumps(_PREFIX + chat_id), list[str](), 0
        for _ in range(_MAX_PIECES):
            text, begin, is_all = await self._client.run_javascript(
                f"return hadal.piece({name}, {begin}, {_PIECE_CHARS})", timeout=_JS_S
            )
            texts.append(text)
            if is_all:
                return read(chat_id, "".join(texts))
        return None

    def _delete(self, one: KeptChat) -> None:
        self._all.remove(one)
        if self._opening == one.id:
            self._opening = ""
        self._loaded.pop(one.id, None)
        store(self._client, _PREFIX + one.id, "")
        if one.id == self._now.id:
            self._leave()
            self._now = _new()
            self._show()
        else:
            self._show_rows()

    async def _kept_elsewhere(self, event: Any) -> None:
        """Another page of this browser changed a conversation: what is here of it is old."""
        chat_id = str(event.args["detail"])
        self._all = await self._listed()
        found = await self._read(chat_id)
        if chat_id != self._now.id:
            self._loaded.pop(chat_id, None)
        elif found is not None and not self._is_running:
            self._leave()
            self._loaded[chat_id] = self._now = found
            self._show()
            return
        self._show_rows()

    def _edit(self, number: int) -> None:
        """Take a question into the field: it and what followed go once another is sent."""
        if self._is_running:
            return
        self._editing = number
        self._editing_note.set_visibility(True)
        text = self._now.turns[number].asked
        self._client.run_javascript(f"hadal.fill({json.dumps(text)})")

    def _keep_what_follows(self) -> None:
        self._editing = None
        self._editing_note.set_visibility(False)
        self._client.run_javascript("hadal.fill('')")

    def _settings(self) -> None:
        opened = self._now
        with ui.dialog() as dialog, ui.card().classes("h-card"):
            dialog.on("hide", dialog.delete)
            ui.html("<h2>This conversation</h2>")
            system = ui.textarea("System prompt", value=opened.system)
            system.props(f"outlined autogrow maxlength={_PIECE_CHARS}")
            system.classes("h-field")
            own = ui.switch("The model's own temperature", value=opened.temperature is None)
            temperature = 0.6 if opened.temperature is None else opened.temperature
            slider = ui.slider(min=0, max=2, step=0.05, value=temperature)
            slider.props("label").bind_enabled_from(own, "value", backward=lambda value: not value)
            has_tools = ui.switch("Tools: arithmetic, countries, units", value=opened.has_tools)
            if not self._can_call:
                has_tools.disable()
                ui.label("This model was not taught to call tools.").classes("h-muted")

            async def done() -> None:
                is_shown = self._now.id == opened.id and not self._is_running
                if is_shown and not await self._follow():
                    return
                now = self._loaded.get(opened.id, opened)
                now.system = str(system.value or "")
                now.temperature = None if own.value else float(slider.value)
                now.has_tools = bool(has_tools.value)
                if now.turns:
                    self._keep(now)
                dialog.close()
                self._show()

            ui.button("Done", on_click=done).props("unelevated no-caps").classes("h-primary")
        dialog.open()

    # ---- asking ----
    def _leave(self) -> None:
        self.stop()
        self._task = self._editing = None
        self._is_running = False

    def _closed(self) -> None:
        """The page is gone, and with it whoever waited for an answer."""
        self._leave()
        self._now = _new()
        self._loaded.clear()

    def _keep(self, conversation: Conversation) -> int:
        """Have the browser keep it as it is now; returns how long it is."""
        conversation.changed_ms = int(time.time() * 1000)
        if conversation.id not in self._loaded:
            self._loaded[conversation.id] = conversation
            self._all.insert(0, KeptChat(conversation.id))
        for one in self._all:
            if one.id == conversation.id:
                one.title = conversation.title
        text = to_json(conversation)
        store(self._client, _PREFIX + conversation.id, text)
        return len(text)

    def _begin(self, before: list[ChatAnswer]) -> None:
        self._is_running, self._editing = True, None
        self._num_begun += 1
        now, number = self._now, self._num_begun
        self._answered[now.id] = self, number
        self._show()
        task = self._task = background_tasks.create(self._run(now, before))
        task.add_done_callback(lambda _: background_tasks.create(self._over(now.id, number)))

    async def _over(self, chat_id: str, number: int) -> None:
        """Other pages may ask there, unless this one has asked again."""
        try:
            with suppress(TimeoutError):  # As is likely where the page is gone.
                # The call's own limit leaves out the wait for a page that lost its line.
                async with asyncio.timeout(_STORED_S):
                    # localStorage is written at once: what the browser was told before is kept then.
                    await self._client.run_javascript("return true", timeout=_STORED_S)
        finally:
            if self._answered.get(chat_id) == (self, number):
                del self._answered[chat_id]

    async def _run(self, conversation: Conversation, before: list[ChatAnswer]) -> None:
        """Have the last question answered, carrying out what the model calls in between. `before`:
        what answers it if nothing comes.
        """
        turn = conversation.turns[-1]
        try:
            for _ in range(_MAX_ROUNDS):
                answer = await self._answer(conversation, turn)
                if not answer.wants_results:
                    break
            else:
                answer.error = f"{_MAX_ROUNDS} rounds of tools are enough for one question."
        finally:
            has_come = any(one.content or one.thinking or one.calls for one in turn.answers)
            why = next((one.error for one in turn.answers if one.error), "")
            if before and not has_come:
                turn.answers = before
            if conversation.id in self._loaded:  # Neither deleted nor its page gone.
                self._keep(conversation)
            if self._now is conversation and self._task in (None, asyncio.current_task()):
                self._is_running = False
                self._task = None
                with self._body:
                    self._show()
                    if before and not has_come and why:
                        ui.notify(why, type="negative")

    async def _answer(self, conversation: Conversation, turn: ChatTurn) -> ChatAnswer:
        with self._turns:
            view = AnswerView()
        offered = tools.DEFINITIONS if self._can_call else []
        body = conversation.body(self._model, offered)
        answer = ChatAnswer()
        turn.answers.append(answer)
        try:
            await self._stream(conversation, body, answer, view)
            if answer.wants_results:
                await self._carry_out(answer, view)
        except AskError as error:
            if "tools" in body and error.status == 400 and error.param.startswith("tool"):
                self._can_call = False  # The model was not taught any: ask again without.
                turn.answers.remove(answer)
                self._turns.remove(self._turns.default_slot.children[-1])
                return await self._answer(conversation, turn)
            answer.error = str(error)
        except asyncio.CancelledError:
            answer.finish = "stopped"
            raise
        finally:
            view.show(answer, is_over=True)
        return answer

    async def _stream(
        self,
        conversation: Conversation,
        body: dict[str, Any],
        answer: ChatAnswer,
        view: AnswerView,
    ) -> None:
        start_s = shown_s = time.monotonic()
        keep_s = start_s + _KEEP_S
        async for event in self._events(body, view):
            now_s = time.monotonic()
            answer.take(event, now_s - start_s)
            if now_s - shown_s >= _SHOW_S + len(answer.content) / _SHOW_CHARS_PER_S:
                shown_s = now_s
                view.show(answer, is_over=False)
            if now_s >= keep_s:  # A page that is reloaded comes back with it.
                num_chars = self._keep(conversation)
                keep_s = now_s + max(_KEEP_S, num_chars / _KEEP_CHARS_PER_S)

    async def _events(self, body: dict[str, Any], view: AnswerView) -> AsyncIterator[Any]:
        """What the gateway answers, asked again when it says so if it is busy. Raises AskError."""
        for num_tries in itertools.count():
            try:
                async for event in self._asking.stream(body, self._key):
                    yield event
                return
            except AskError as error:
                again_s = error.again_s
                if again_s is None or again_s > _MAX_AGAIN_S or num_tries == _MAX_AGAIN:
                    raise
                view.say(f"Busy, trying again in {again_s:.0f} s.")
                await asyncio.sleep(again_s)
                view.say("")

    async def _carry_out(self, answer: ChatAnswer, view: AnswerView) -> None:
        """Run each call; its card shows it at work, then what it gave."""
        for call in answer.calls:
            view.show(answer, is_over=False)
            await asyncio.sleep(0)  # The page shows that it runs.
            try:
                call.result = tools.run(call.name, call.arguments)
            except tools.ToolError as error:
                call.result, call.is_error = str(error), True
        view.show(answer, is_over=False)


def _new() -> Conversation:
    return Conversation(secrets.token_hex(8))


def add_chat(asking: Asking) -> None:
    """Serve the chat at `/`."""
    answered: dict[str, tuple[ChatPage, int]] = {}

    @ui.page("/")
    async def chat() -> None:
        await ChatPage(asking, answered).build()
