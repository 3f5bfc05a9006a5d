"""Which page of a browser gets an answer in which conversation: one at a time, or one would write over
the other's.
"""

from __future__ import annotations

import asyncio


class ChatClaim:
    """The right of one page to get an answer in a conversation."""

    def __init__(self, page: object) -> None:
        self.page = page
        self.is_over = False
        """The answer has ended, and the browser is being asked to keep it: a matter of a second."""
        self.released = asyncio.Event()


class Claims:
    """Conversations in which a page is getting an answer: no other page may ask there meanwhile."""

    def __init__(self) -> None:
        self._id_to_claim: dict[str, ChatClaim] = {}

    async def may_ask(self, chat_id: str, page: object) -> bool:
        """Return whether no page but this one is getting an answer there. An answer that has ended
        is waited for until it is kept.
        """
        while claim := self._id_to_claim.get(chat_id):
            if claim.page is page:
                return True
            if not claim.is_over:
                return False
            await claim.released.wait()
        return True

    def take(self, chat_id: str, page: object) -> ChatClaim:
        """Claim a conversation, also where this page has a claim already."""
        claim = self._id_to_claim[chat_id] = ChatClaim(page)
        return claim

    def release(self, chat_id: str, claim: ChatClaim) -> None:
        """End a claim; a later one of its page stays."""
        if self._id_to_claim.get(chat_id) is claim:
            del self._id_to_claim[chat_id]
        claim.released.set()
