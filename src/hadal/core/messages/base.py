"""Base of all messages, and the names of the processes that every conversation knows."""

from __future__ import annotations

import msgspec

BLOCK_TOKENS = 64
"""Tokens of KV in one block (DeepSeek's storage unit and FlashMLA's page)."""
SCRATCH_BLOCK = 0
"""Padded rows of a batch write there, so nobody ever owns it."""
SUPERVISOR = "supervisor"
"""Name of the supervisor on the wire."""
LENDER = "ray"
"""Name of the process that has nodes from Ray."""
FRONT = "front"
"""Name on the wire of the gateway that holds the front."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of everything on the wire; the tag is the class's name."""
