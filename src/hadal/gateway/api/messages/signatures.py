"""Signatures of thinking blocks. One of a block without its text carries the reasoning, so that the
client can send it back with the next turn.

    display "summarized"   text in the block, signature = the message's id
    display "omitted"      no text, signature = the message's id, a dot, the reasoning in base64

A signature proves nothing, and one of another server is passed over.
"""

from __future__ import annotations

import base64
import binascii
import re

_OURS = re.compile(r"msg_[0-9a-f]{32}\.([A-Za-z0-9_-]*={0,2})")


def signed(reply_id: str, reasoning: str) -> str:
    """Return the signature of a block without its text."""
    return f"{reply_id}.{base64.urlsafe_b64encode(reasoning.encode()).decode()}"


def reasoning_of(signature: str) -> str:
    """Return the reasoning in a signature; "" for one without, or of another server."""
    found = _OURS.fullmatch(signature)
    if found is None:
        return ""
    try:
        return base64.urlsafe_b64decode(found[1]).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
