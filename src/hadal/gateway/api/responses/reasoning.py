"""Reasoning items of earlier turns, which clients send back.

Some clients send an item back without its text, only with its `encrypted_content`. So with
`include: ["reasoning.encrypted_content"]` this server writes the text there, encoded but not
encrypted: the same item shows it as `content`. Another server's content cannot be read.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "hadal.reasoning.1."
_FERNET = "gAAAAA"
"""Beginning of all tokens of Fernet, the form of OpenAI's encrypted texts."""


def is_encrypted(content: str) -> bool:
    """Return True if another server encrypted this text."""
    return content.startswith(_FERNET)


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
