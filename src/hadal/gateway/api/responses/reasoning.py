"""Reasoning items of earlier turns, which clients send back.

Some clients never send the text of an item back, only its `encrypted_content`. So with `include:
["reasoning.encrypted_content"]` this server writes the text there, encoded but not encrypted: the
same item shows it as `content`. The content of another server's item cannot be read.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "hadal.reasoning.1."


def sealed(text: str) -> str:
    """Return the text of an item as its `encrypted_content`."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def opened(content: str) -> str | None:
    """Return the text in an `encrypted_content`; None if another server wrote it."""
    if not content.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(content[len(_PREFIX) :], b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
