"""Parts of all pages: the head with styles, the top bar, dark mode, and the form for a key. A key
is stored in the browser; this process has it only in memory, while the page is open.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from nicegui import Client, app, ui

from hadal.apps.console.asking import AskError

STATIC = Path(__file__).with_name("static")
_ASSETS = "/assets"
_DARK = "hadal.dark"
_PAGE_TO_KEY = {"chat": "hadal.key", "console": "hadal.operator_key"}
"""Page -> name of its key in the browser's storage. Chats are charged to the chat's own key,
if one is stored.
"""
_JS_S = 10.0
"""Time limit of a query to the browser's storage."""


def add_assets() -> None:
    """Serve the styles and the script of the pages."""
    app.add_static_files(_ASSETS, STATIC)


def _asset(name: str) -> str:
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"{_ASSETS}/{name}?{digest}"


async def stored(name: str) -> str:
    """Return the value that the browser has stored under a name; empty if there is none."""
    found = await ui.run_javascript(
        f"return localStorage.getItem({json.dumps(name)}) || ''", timeout=_JS_S
    )
    return str(found or "")


def store(client: Client, name: str, text: str) -> None:
    """Store a text in the browser, or delete it if empty."""
    client.run_javascript(f"hadal.store({json.dumps(name)}, {json.dumps(text)})")


def head(title: str) -> None:
    """Set styles and title of a page."""
    ui.page_title(title)
    ui.add_head_html(f'<link rel="stylesheet" href="{_asset("console.css")}">')
    ui.add_head_html(f'<script src="{_asset("console.js")}"></script>')


def icon_button(
    icon: str, label: str, act: Callable[[], object], *, kind: str = "h-icon", title: str = ""
) -> ui.element:
    """Return a button that shows only an icon. `label`: its name for screen readers; `title`: its
    tooltip.
    """
    button = ui.element("button").classes(kind).props(f'aria-label="{label}"').on("click", act)
    if title:
        button.props(f'title="{title}"')
    with button:
        ui.icon(icon)
    return button


class TopBar:
    """Top bar: name, served model, links, a button to forget keys, dark mode."""

    def __init__(self, here: str) -> None:
        """`here`: "chat" or "console"."""
        self._here = here
        self.dark = ui.dark_mode(None)
        with ui.element("header").classes("h-bar"):
            self.left = ui.element("div").classes("h-bar-left")
            with self.left:
                ui.link("Hadal", "/").classes("h-brand")
                self.model = ui.label("").classes("h-muted h-model")
            with ui.element("nav").classes("h-bar-right"):
                for name, path in (("Chat", "/"), ("Console", "/console")):
                    link = ui.link(name, path).classes("h-nav")
                    if name.lower() == here:
                        link.classes("h-nav-here").props('aria-current="page"')
                self._forget = icon_button(
                    "key_off", "Forget key", self._forget_key, title="Forget key"
                )
                self._forget.set_visibility(False)
                icon_button("contrast", "Light or dark", self._toggle, title="Light or dark")

    async def remember(self) -> None:
        """Restore light or dark (default: the system's), and the button to forget a stored key."""
        kept = await stored(_DARK)
        self.dark.set_value({"1": True, "0": False}.get(kept))
        self.show_key(await stored(_PAGE_TO_KEY[self._here]))

    def show_key(self, key: str) -> None:
        """Show the button to forget keys if `key` is not empty."""
        self._forget.set_visibility(bool(key))

    def _forget_key(self) -> None:
        """Delete both keys and reload the page, so that it no longer shows data of these keys."""
        for name in _PAGE_TO_KEY.values():
            store(ui.context.client, name, "")
        ui.run_javascript("location.reload()")

    async def _toggle(self) -> None:
        is_dark = await ui.run_javascript(
            "return document.body.classList.contains('body--dark')", timeout=_JS_S
        )
        self.dark.set_value(not is_dark)
        store(ui.context.client, _DARK, "0" if is_dark else "1")


class Door:
    """Form for an API key, shown until the server accepts one; not shown if it needs none. Without
    a server, the form says so instead.
    """

    def __init__(self, page: str, what: str, try_key: Callable[[str], Awaitable[None]]) -> None:
        """`page`: "chat" or "console"; `what`: text on the key's purpose; `try_key` raises AskError
        if a key is refused or the server does not answer.
        """
        self._name = _PAGE_TO_KEY[page]
        self._what = what
        self._try = try_key

    async def open(self, into: ui.element, then: Callable[[str], Awaitable[None]]) -> None:
        """Call `then` with an accepted key: a stored one, or one that the user enters into the form
        in `into`. A page without its own stored key tries the other page's.
        """
        names = sorted(_PAGE_TO_KEY.values(), key=lambda name: name != self._name)
        kept = [await stored(name) for name in names]
        key = kept[0] or kept[1]
        try:
            await self._try(key)
        except AskError as error:
            self._form(into, then, error, key, is_first=not key)
            return
        await then(key)

    def _form(
        self,
        into: ui.element,
        then: Callable[[str], Awaitable[None]],
        error: AskError,
        kept: str,
        *,
        is_first: bool,
    ) -> None:
        """Show the form. `kept`: the stored key that was tried; `is_first`: there was none."""
        into.clear()
        is_refused = error.status in (401, 403)
        with into, ui.element("form").classes("h-door").on("submit.prevent", lambda: None):
            ui.html("<h1>" + ("API key needed" if is_refused else "No server") + "</h1>")
            ui.label(self._what if is_refused else str(error)).classes("h-muted")
            field = ui.input("API key").props("outlined dense type=password autocomplete=off")
            field.classes("h-field")
            field.set_visibility(is_refused)
            said = ui.label("" if is_first or not is_refused else str(error)).classes("h-bad")

            async def enter() -> None:
                key = str(field.value or "").strip() if is_refused else kept
                try:
                    await self._try(key)
                except AskError as refusal:
                    if refusal.status in (401, 403) and not is_refused:
                        self._form(into, then, refusal, kept, is_first=is_first)
                    else:
                        said.set_text(str(refusal))
                    return
                if is_refused:
                    store(ui.context.client, self._name, key)
                into.clear()
                with into:
                    await then(key)

            field.on("keydown.enter", enter)
            ui.button("Open" if is_refused else "Try again", on_click=enter).props(
                "unelevated no-caps"
            ).classes("h-primary")
