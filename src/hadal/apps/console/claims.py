"""Claims of pages on conversations: only one page at a time gets an answer in a conversation,
because two would overwrite each other's stored copy.
"""

from __future__ import annotations

import asyncio


class ChatClaim:
    """Right of one page to get an answer in a conversation."""

    def __init__(self, page: object) -> None:
        self.page = page
        self.is_over = False
        """True once the answer has ended; the browser then has a second to store it."""
        self.released = asyncio.Event()


class Claims:
    """Claims by conversation id. While a page has a claim, no other page may ask there."""

    def __init__(self) -> None:
        self._id_to_claim: dict[str, ChatClaim] = {}

    async def may_ask(self, chat_id: str, page: object) -> bool:
        """Return True if no other page is getting an answer there. If an answer has ended, first
        wait for the release of its claim.
        """
        while claim := self._id_to_claim.get(chat_id):
            if claim.page is page:
                return True
            if not claim.is_over:
                return False
            await claim.released.wait()
        return True

    def take(self, chat_id: str, page: object) -> ChatClaim:
        """Claim a conversation; replaces an earlier claim of this page."""
        claim = self._id_to_claim[chat_id] = ChatClaim(page)
        return claim

    def release(self, chat_id: str, claim: ChatClaim) -> None:
        """End a claim, unless a later claim has replaced it."""
        if self._id_to_claim.get(chat_id) is claim:
            del self._id_to_claim[chat_id]
        claim.released.set()
