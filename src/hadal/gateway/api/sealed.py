"""Reasoning in a field that clients send back with the next turn.

    messages     signature of a block without its text    the message's id, a dot, base64
    responses    encrypted_content of an item             FORM, a dot, base64

Clients that drop a reasoning's text send it back in these fields. It is encoded, not encrypted, and
proves nothing. Texts of other servers cannot be read.
"""

from __future__ import annotations

import base64
import re

FORM = "hadal.reasoning.1"
_OURS = re.compile(rf"(?:msg_[0-9a-f]{{32}}|{re.escape(FORM)})\.([A-Za-z0-9_-]*={{0,2}})")


def sealed(text: str, begin: str = FORM) -> str:
    """Return the field's value for a text. `begin`: FORM, or the id of a message."""
    return f"{begin}.{base64.urlsafe_b64encode(text.encode('utf-8', 'replace')).decode()}"


def opened(sealed_text: str) -> str | None:
    """Return the text in a field's value; None for one without, or of another server."""
    found = _OURS.fullmatch(sealed_text)
    try:
        return base64.urlsafe_b64decode(found[1]).decode() if found is not None else None
    except ValueError:  # Incomplete, or not UTF-8.
        return None
