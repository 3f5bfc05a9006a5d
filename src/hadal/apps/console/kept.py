"""Conversations in the browser's storage: a list of all, and loaded ones with their turns. Depends
on the browser only, not on what a page shows.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable

from nicegui import Client

from hadal.apps.console.conversation import Conversation, KeptChat, read, read_list, to_json
from hadal.apps.console.shell import store

PIECE_CHARS = 100_000
"""Characters per read from the browser; in any encoding far below the socket's message limit."""
_PREFIX = "hadal.chat."
_MAX_LISTED = 1000
"""Maximum number of conversations in the list; the browser may have more."""
_MAX_PIECES = 1000
_JS_S = 10.0


class KeptChats:
    """Conversations stored by the browser of one page."""

    def __init__(self, client: Client) -> None:
        self.all: list[KeptChat] = []
        """List of the conversations, newest first when read; `keep` adds a new one in front."""
        self._client = client
        self._loaded: dict[str, Conversation] = {}
        """Conversation id -> conversation with its turns."""
        self._opening = ""
        """Id of the conversation to show once it is loaded; empty if none."""
        self._reading = asyncio.Lock()
        self._num_failed = 0
        """Number of `open` calls that timed out."""

    async def refresh(self) -> None:
        """Read the list again."""
        self.all = await self._listed()

    async def _listed(self) -> list[KeptChat]:
        found = await self._client.run_javascript(
            f"return hadal.kept({json.dumps(_PREFIX)}, {_MAX_LISTED})", timeout=_JS_S
        )
        return read_list(found)

    def loaded(self, chat_id: str) -> Conversation | None:
        """Return a loaded conversation; None if it is not loaded."""
        return self._loaded.get(chat_id)

    async def newer(self, known: Conversation) -> Conversation | None:
        """Return the conversation if another page has stored it since; None if not."""
        kept = {one.id: one.changed_ms for one in await self._listed()}
        return await self.read(known.id) if kept.get(known.id, 0) > known.changed_ms else None

    async def open(self, chat_id: str, then: Callable[[Conversation | None], None]) -> None:
        """Load a conversation and call `then` with it, unless another one is requested meanwhile.
        None: it was deleted or is invalid. Raises TimeoutError if the browser does not answer.
        """
        self._opening = chat_id
        async with self._reading:
            try:
                found = self._loaded.get(chat_id) or await self.read(chat_id)
            except TimeoutError:
                self._num_failed += 1
                raise
        if self._opening != chat_id:
            return
        self._opening = ""
        if found is not None:
            self._loaded[chat_id] = found
        then(found)

    async def opened(self) -> bool:
        """Wait until the conversation being opened is loaded. Return False if loading failed."""
        num_failed = self._num_failed
        async with self._reading:
            return num_failed == self._num_failed

    def leave_opening(self) -> None:
        """Do not show the conversation being opened: the user went to another one."""
        self._opening = ""

    async def read(self, chat_id: str) -> Conversation | None:
        """Read a conversation from the browser; None if it is missing, invalid or too long."""
        name, texts, begin = json.dumps(_PREFIX + chat_id), list[str](), 0
        for _ in range(_MAX_PIECES):
            text, begin, is_all = await self._client.run_javascript(
                f"return hadal.piece({name}, {begin}, {PIECE_CHARS})", timeout=_JS_S
            )
            texts.append(text)
            if is_all:
                return read(chat_id, "".join(texts))
        return None

    def replace(self, conversation: Conversation) -> None:
        """Replace a conversation by the version that another page stored."""
        self._loaded[conversation.id] = conversation

    def unload(self, chat_id: str) -> None:
        """Drop a loaded conversation; the browser still has it."""
        self._loaded.pop(chat_id, None)

    def clear(self) -> None:
        """Drop all loaded conversations, because the page has closed."""
        self._loaded.clear()

    def keep(self, conversation: Conversation) -> int:
        """Store a conversation in the browser. Return the length of its JSON in characters."""
        conversation.changed_ms = int(time.time() * 1000)
        if conversation.id not in self._loaded:
            self._loaded[conversation.id] = conversation
            self.all.insert(0, KeptChat(conversation.id))
        for one in self.all:
            if one.id == conversation.id:
                one.title = conversation.title
        text = to_json(conversation)
        store(self._client, _PREFIX + conversation.id, text)
        return len(text)

    def delete(self, one: KeptChat) -> None:
        """Delete a conversation from the browser."""
        self.all.remove(one)
        if self._opening == one.id:
            self._opening = ""
        self.unload(one.id)
        store(self._client, _PREFIX + one.id, "")
