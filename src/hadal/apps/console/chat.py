"""Chat page: sends questions to the gateway, shows thinking, text and tool calls as they arrive,
and stores conversations in the browser. A ChatPage is one open page. When it closes, only the
browser's copy remains (apps/console/kept).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nicegui import background_tasks, ui

from hadal.apps.console import tools
from hadal.apps.console.answer_view import AnswerView, code_styles
from hadal.apps.console.asking import AskError, Asking, ChatModel
from hadal.apps.console.claims import ChatClaim, Claims
from hadal.apps.console.conversation import ChatAnswer, ChatTurn, Conversation, KeptChat
from hadal.apps.console.kept import PIECE_CHARS, KeptChats
from hadal.apps.console.shell import Door, TopBar, head, icon_button

_SHOW_S = 0.06
"""Least seconds between two updates of a running answer; users would not notice faster updates."""
_SHOW_CHARS_PER_S = 50_000
"""Limit on shown characters per second: each update sends the whole text, so a long text is updated
less often.
"""
_MAX_ROUNDS = 8
"""Maximum number of answers per turn; it stops a model that calls tools for ever."""
_KEEP_S = 1.0
_KEEP_CHARS_PER_S = 250_000
"""Limit on stored characters per second: a running answer is stored every second, a long
conversation less often.
"""
_STORED_S = 1.0
"""Longest wait, in seconds, for a browser to confirm that it stored an answer."""
_IDEAS = ("What is 12 + 30?", "Spell the word harbour backwards.", "Sort 31, 4, 15, 9.")


class Composer:
    """Input field with its buttons."""

    def __init__(
        self,
        sent: Callable[[Any], Any],
        stop: Callable[[], None],
        settings: Callable[[], None],
        keep_all: Callable[[], None],
    ) -> None:
        """Build the field. Its buttons call the callbacks; `keep_all` cancels editing."""
        with ui.element("div").classes("h-composer-wrap"):
            with ui.element("div").classes("h-editing") as self._editing_note:
                ui.label("Ask again from this message. Sending it deletes the messages after it.")
                icon_button("close", "Cancel", keep_all)
            with ui.element("div").classes("h-composer"):
                field = ui.element("textarea").classes("h-input")
                field.props(
                    'rows="1" placeholder="Ask something" aria-label="Message" id="h-input"'
                    ' autocomplete="off"'
                )
                field.on(
                    "keydown",
                    sent,
                    js_handler="(e) => { if (e.key === 'Enter' && !e.shiftKey && !e.isComposing)"
                    " { e.preventDefault(); hadal.send(e.target, emit); } }",
                )
                with ui.element("div").classes("h-composer-foot"):
                    with ui.element("button").classes("h-quiet").on("click", settings) as button:
                        ui.icon("tune")
                        self._settings_label = ui.label("")
                    button.props('aria-label="Settings"')
                    ui.label("Enter sends · Shift+Enter adds a line · Esc stops").classes("h-hint")
                    self._send = ui.element("button").classes("h-send").props('aria-label="Send"')
                    self._send.on("click", sent, js_handler="() => hadal.send(hadal.field(), emit)")
                    with self._send:
                        ui.icon("arrow_upward")
                    self._stop = icon_button("stop", "Stop", stop, kind="h-send h-stop")

    def show(self, now: Conversation, *, is_editing: bool, is_running: bool) -> None:
        """Show the conversation's settings, and the buttons for the current state."""
        words = []
        if now.temperature is not None:
            words.append(f"temperature {now.temperature:g}")
        if now.system.strip():
            words.append("system prompt")
        self._settings_label.set_text(", ".join(words) or "Settings")
        self.show_editing(is_editing=is_editing)
        self._send.set_visibility(not is_running)
        self._stop.set_visibility(is_running)

    def show_editing(self, *, is_editing: bool) -> None:
        """Show or hide the note that the next question replaces an earlier one."""
        self._editing_note.set_visibility(is_editing)


class ChatPage:
    """State of one open chat page."""

    def __init__(self, asking: Asking, claims: Claims) -> None:
        # Stored, because `ui.context.client` fails in a handler if the clicked element is gone.
        self._client = ui.context.client
        self._model = ChatModel(asking)
        self._claims = claims
        self._kept = KeptChats(self._client)
        self._now = _new()
        self._editing: int | None = None
        """Index of the turn that the next question replaces; None: it is added as a new turn."""
        self._task: asyncio.Task[Any] | None = None
        self._is_running = False
        self._num_follows = 0

    async def build(self) -> None:
        """Build the page, and fill it once the browser is connected."""
        head("Hadal")
        ui.add_head_html(f"<style>{code_styles()}</style>")
        self._client.on_delete(self._closed)
        self._bar = TopBar("chat")
        with self._bar.left:
            menu = icon_button("menu", "Conversations", self._show_list, kind="h-icon h-menu")
        menu.move(self._bar.left, 0)
        self._body = ui.element("main").classes("h-chat")
        await self._client.connected(timeout=30.0)
        await self._bar.remember()
        what = "This server needs an API key. The key is stored only in this browser."
        door = Door("chat", what, self._model.knock)
        with self._body:
            await door.open(self._body, self._enter)

    async def _enter(self, key: str) -> None:
        self._bar.show_key(key)
        self._bar.model.set_text(self._model.name)
        await self._kept.refresh()
        self._layout()
        self._show()

    # ---- the page ----
    def _layout(self) -> None:
        with ui.element("aside").classes("h-side"):
            with ui.element("button").classes("h-new").on("click", self.new):
                ui.icon("add")
                ui.label("New chat")
                ui.label("Alt N").classes("h-key")
            self._list = ui.element("div").classes("h-list")
        ui.element("div").classes("h-veil").on("click", self._hide_list)
        with ui.element("section").classes("h-main"):
            with ui.element("div").classes("h-scroll").props('id="h-scroll"'):
                self._turns = ui.element("div").classes("h-turns").props('aria-live="polite"')
            self._composer = Composer(
                self._sent, self.stop, self._settings, self._keep_what_follows
            )
        keys = ui.element("div").classes("h-none")
        keys.on("new", self.new)
        keys.on("stop", self.stop)
        keys.on("kept", self._kept_elsewhere, args=["detail"])
        self._client.run_javascript(f"hadal.keys({keys.id})")

    def _show_rows(self) -> None:
        """Show the list of all conversations."""
        self._list.clear()
        with self._list:
            for one in self._kept.all:
                self._list_row(one)
            if not self._kept.all:
                ui.label(
                    "Conversations are stored only in this browser, not on the server."
                ).classes("h-list-empty")

    def _show(self) -> None:
        """Show the current conversation, and the list of all conversations."""
        self._show_rows()
        self._turns.clear()
        with self._turns:
            if not self._now.turns:
                self._empty()
            for number, turn in enumerate(self._now.turns):
                self._turn(number, turn)
        self._composer.show(
            self._now, is_editing=self._editing is not None, is_running=self._is_running
        )
        self._client.run_javascript("hadal.bottom(); hadal.focus()")

    def _list_row(self, one: KeptChat) -> None:
        row = ui.element("div").classes("h-row" + (" h-row-now" if one.id == self._now.id else ""))
        with row:
            with ui.element("button").classes("h-row-title").on("click", lambda: self._open(one)):
                ui.label(one.title or "New chat")
            icon_button("close", "Delete", lambda: self._delete(one), kind="h-icon h-row-delete")

    def _empty(self) -> None:
        with ui.element("div").classes("h-empty"):
            ui.html("<h1>What would you like to know?</h1>")
            ui.label(f"{self._model.name} answers. Messages go only to this server.").classes(
                "h-muted"
            )
            with ui.element("div").classes("h-ideas"):
                for idea in _IDEAS:
                    with (
                        ui.element("button")
                        .classes("h-idea")
                        .on("click", lambda idea=idea: self.ask(idea))
                    ):
                        ui.label(idea)

    def _turn(self, number: int, turn: ChatTurn) -> None:
        with ui.element("div").classes("h-asked-row"):
            with ui.element("div").classes("h-asked"):
                ui.label(turn.asked).classes("h-asked-text")
            icon_button(
                "edit",
                "Edit",
                lambda: self._edit(number),
                kind="h-icon h-edit",
                title="Edit and ask again",
            )
        view = None
        for answer in turn.answers:
            view = AnswerView()
            view.show(answer, is_over=True)
        if view is not None and number == len(self._now.turns) - 1 and not self._is_running:
            self._again(view, turn)

    def _again(self, view: AnswerView, turn: ChatTurn) -> None:
        """Add the buttons for the last answer."""
        text = "\n\n".join(answer.content for answer in turn.answers if answer.content)
        with view.foot:
            icon_button("content_copy", "Copy", lambda: self._copy(text), title="Copy")
            icon_button("refresh", "Regenerate", self.regenerate, title="Regenerate")

    def _copy(self, text: str) -> None:
        self._client.run_javascript(f"hadal.copy({json.dumps(text)})")

    def _show_list(self) -> None:
        self._client.run_javascript("document.body.classList.toggle('h-list-open')")

    def _hide_list(self) -> None:
        self._client.run_javascript("document.body.classList.remove('h-list-open')")

    # ---- actions of the user ----
    def new(self) -> None:
        """Start a new conversation, with the settings of this one."""
        self._leave()
        self._kept.leave_opening()
        before, self._now = self._now, _new()
        self._now.system, self._now.temperature = before.system, before.temperature
        self._now.has_tools = before.has_tools
        self._hide_list()
        self._show()

    def stop(self) -> None:
        """Stop the running answer; its text so far stays."""
        if self._task is not None:
            self._task.cancel()

    async def ask(self, text: str) -> None:
        """Ask a question, unless an answer is running; if a conversation is being opened, ask it
        there. If opening fails, or `_follow` says that asking is impossible, put the text back into
        the field.
        """
        is_there = await self._kept.opened()
        if not text.strip() or self._is_running:
            return
        if not is_there or not await self._follow():
            self._client.run_javascript(f"hadal.fill({json.dumps(text)})")
            return
        self._kept.leave_opening()
        if self._editing is not None:
            del self._now.turns[self._editing :]
            self._now.title = self._now.title if self._now.turns else ""
        self._now.ask(text)
        self._kept.keep(self._now)
        self._begin([])

    async def regenerate(self) -> None:
        """Ask the last question again. Its old answers are kept if nothing new arrives."""
        if self._now.turns and not self._is_running and await self._follow():
            turn = self._now.turns[-1]
            before, turn.answers = turn.answers, []
            self._begin(before)

    async def _follow(self) -> bool:
        """Load what another page of this browser stored of the conversation. Return False if asking
        is impossible: the other page is getting an answer, or the user has opened another
        conversation.
        """
        now = self._now
        if self._kept.loaded(now.id) is None:  # Not stored yet, so no other page has it.
            return True
        self._is_running = True  # Block questions while the browser is read.
        self._num_follows += 1
        number, found = self._num_follows, None
        is_free = await self._may_ask(now.id)
        if is_free:
            with suppress(TimeoutError):
                found = await self._kept.newer(now)
        if self._now is not now or number != self._num_follows:
            return False
        self._is_running = False
        if not is_free:
            return False
        if found is not None:
            self._now = found
            self._kept.replace(found)
            num = 0 if self._editing is None else self._editing + 1
            if now.turns[:num] != found.turns[:num]:
                self._editing = None
            self._show()
        return await self._may_ask(now.id)

    async def _may_ask(self, chat_id: str) -> bool:
        """Return True if no other page is getting an answer there; otherwise show a note."""
        if await self._claims.may_ask(chat_id, self):
            return True
        with self._body:
            ui.notify("Another page is waiting for an answer in this conversation.")
        return False

    async def _sent(self, event: Any) -> None:
        await self.ask(str(event.args))

    async def _open(self, one: KeptChat) -> None:
        try:
            await self._kept.open(one.id, self._opened)
        except TimeoutError:
            with self._body:
                ui.notify("The browser did not load this conversation in time. Open it again.")

    def _opened(self, found: Conversation | None) -> None:
        if found is self._now:
            self._hide_list()
            return
        if found is None:
            with self._body:
                ui.notify("This conversation is no longer in this browser.")
            return
        self._leave()
        self._now = found
        self._hide_list()
        self._show()

    def _delete(self, one: KeptChat) -> None:
        self._kept.delete(one)
        if one.id == self._now.id:
            self._leave()
            self._now = _new()
            self._show()
        else:
            self._show_rows()

    async def _kept_elsewhere(self, event: Any) -> None:
        """Reload a conversation that another page of this browser changed."""
        chat_id = str(event.args["detail"])
        await self._kept.refresh()
        found = await self._kept.read(chat_id)
        if chat_id != self._now.id:
            self._kept.unload(chat_id)
        elif found is not None and not self._is_running:
            self._leave()
            self._now = found
            self._kept.replace(found)
            self._show()
            return
        self._show_rows()

    def _edit(self, number: int) -> None:
        """Put a question into the field for editing; sending replaces it and all later turns."""
        if self._is_running:
            return
        self._editing = number
        self._composer.show_editing(is_editing=True)
        text = self._now.turns[number].asked
        self._client.run_javascript(f"hadal.fill({json.dumps(text)})")

    def _keep_what_follows(self) -> None:
        self._editing = None
        self._composer.show_editing(is_editing=False)
        self._client.run_javascript("hadal.fill('')")

    def _settings(self) -> None:
        opened = self._now
        with ui.dialog() as dialog, ui.card().classes("h-card"):
            dialog.on("hide", dialog.delete)
            ui.html("<h2>This conversation</h2>")
            system = ui.textarea("System prompt", value=opened.system)
            system.props(f"outlined autogrow maxlength={PIECE_CHARS}")
            system.classes("h-field")
            own = ui.switch("Default temperature of the model", value=opened.temperature is None)
            temperature = 0.6 if opened.temperature is None else opened.temperature
            slider = ui.slider(min=0, max=2, step=0.05, value=temperature)
            slider.props("label").bind_enabled_from(own, "value", backward=lambda value: not value)
            has_tools = ui.switch("Tools: arithmetic, countries, units", value=opened.has_tools)
            if not self._model.can_call:
                has_tools.disable()
                ui.label("This model was not trained to call tools.").classes("h-muted")

            async def done() -> None:
                is_shown = self._now.id == opened.id and not self._is_running
                if is_shown and not await self._follow():
                    return
                now = self._kept.loaded(opened.id) or opened
                now.system = str(system.value or "")
                now.temperature = None if own.value else float(slider.value)
                now.has_tools = bool(has_tools.value)
                if now.turns:
                    self._kept.keep(now)
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
        """Clean up after the page has closed."""
        self._leave()
        self._now = _new()
        self._kept.clear()

    def _begin(self, before: list[ChatAnswer]) -> None:
        self._is_running, self._editing = True, None
        now = self._now
        claim = self._claims.take(now.id, self)
        self._show()
        task = self._task = background_tasks.create(self._run(now, before))
        task.add_done_callback(lambda _: self._over(now.id, claim))

    def _over(self, chat_id: str, claim: ChatClaim) -> None:
        claim.is_over = True
        background_tasks.create(self._release(chat_id, claim))

    async def _release(self, chat_id: str, claim: ChatClaim) -> None:
        """Release the claim once the browser has stored the answer, or after _STORED_S, so that
        other pages may ask.
        """
        try:
            with suppress(TimeoutError):  # A timeout is likely if the page is gone.
                # The call's own time limit does not cover the wait for a disconnected page.
                async with asyncio.timeout(_STORED_S):
                    # localStorage writes are synchronous, so earlier writes are complete when this
                    # returns.
                    await self._client.run_javascript("return true", timeout=_STORED_S)
        finally:
            self._claims.release(chat_id, claim)

    async def _run(self, conversation: Conversation, before: list[ChatAnswer]) -> None:
        """Get answers to the last question, and run the model's tool calls between them. `before`:
        answers to restore if no new text or call arrives.
        """
        turn = conversation.turns[-1]
        try:
            for _ in range(_MAX_ROUNDS):
                answer = await self._answer(conversation, turn)
                if not answer.wants_results:
                    break
            else:
                answer.error = (
                    f"Stopped after {_MAX_ROUNDS} rounds of tool calls, the limit per question."
                )
        finally:
            has_come = any(one.content or one.thinking or one.calls for one in turn.answers)
            why = next((one.error for one in turn.answers if one.error), "")
            if before and not has_come:
                turn.answers = before
            if self._kept.loaded(conversation.id) is not None:  # Not deleted, page still open.
                self._kept.keep(conversation)
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
        offered = tools.DEFINITIONS if self._model.can_call else []
        body = conversation.body(self._model.name, offered)
        answer = ChatAnswer()
        turn.answers.append(answer)
        try:
            await self._stream(conversation, body, answer, view)
            if answer.wants_results:
                await self._carry_out(answer, view)
        except AskError as error:
            if self._model.refuses_tools(body, error):  # Ask again without tools.
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
        async for event in self._model.answer(body, view.say):
            now_s = time.monotonic()
            answer.take(event, now_s - start_s)
            if now_s - shown_s >= _SHOW_S + len(answer.content) / _SHOW_CHARS_PER_S:
                shown_s = now_s
                view.show(answer, is_over=False)
            if now_s >= keep_s:  # A reloaded page then has the answer so far.
                num_chars = self._kept.keep(conversation)
                keep_s = now_s + max(_KEEP_S, num_chars / _KEEP_CHARS_PER_S)

    async def _carry_out(self, answer: ChatAnswer, view: AnswerView) -> None:
        """Run the answer's tool calls in order, and update their cards."""
        for call in answer.calls:
            view.show(answer, is_over=False)
            await asyncio.sleep(0)  # Let the page show the running call.
            try:
                call.result = tools.run(call.name, call.arguments)
            except tools.ToolError as error:
                call.result, call.is_error = str(error), True
        view.show(answer, is_over=False)


def _new() -> Conversation:
    return Conversation(secrets.token_hex(8))


def add_chat(asking: Asking) -> None:
    """Serve the chat at `/`."""
    claims = Claims()

    @ui.page("/")
    async def chat() -> None:
        await ChatPage(asking, claims).build()
