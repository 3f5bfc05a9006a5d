"""View of one answer on the chat page: thinking, Markdown text, a card per tool call, figures.

Depends on the answer's values only, not on the gateway or conversations.
"""

from __future__ import annotations

import html
import json
from functools import cache

from markdown_it import MarkdownIt
from nicegui import ui
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]

from hadal.apps.console.conversation import ChatAnswer, ToolRun

_MAX_SHOWN = 20_000
"""Maximum number of characters shown of a tool call's arguments or result."""


class AnswerView:
    """View of one answer: its thinking, text, tool calls and error, updated while it streams."""

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
        """Show a note before the answer arrives; an empty note hides it."""
        self._note.set_text(note)
        self._note.set_visibility(bool(note))

    def show(self, answer: ChatAnswer, *, is_over: bool) -> None:
        """Show the answer so far."""
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
            words.append(
                f"{hit:.0%} of the prompt from cache" if hit else "none of the prompt from cache"
            )
        if answer.first_s:
            words.append(f"first token after {answer.first_s:.2f} s")
        if answer.finish == "stopped":
            words.append("stopped")
        elif answer.finish == "length":
            words.append("cut at the length limit")
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
    """Return a model's Markdown as HTML. HTML in the text is escaped. A code block is shown from
    its first line on, even if its end has not arrived.
    """
    return str(_MARKDOWN.render(text))


@cache
def code_styles() -> str:
    """Return the CSS colours of code, in light and dark mode."""
    light, dark = (
        HtmlFormatter(nobackground=True, style=style).get_style_defs(f"{where}.h-md pre")
        for style, where in (("default", ""), ("github-dark", ".body--dark "))
    )
    return f"{light}\n{dark}"


def _show_call(call: ToolRun, *, is_over: bool) -> None:
    """Show a card with the tool, its arguments, and its result or a spinner."""
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
