"""Base class of all messages, and the names of processes used in every conversation."""

from __future__ import annotations

import msgspec

BLOCK_TOKENS = 64
"""Tokens of KV in one block (DeepSeek's storage unit and FlashMLA's page)."""
SCRATCH_BLOCK = 0
"""Block to which padded rows of a batch write; it is never leased or owned."""
SUPERVISOR = "supervisor"
"""Name of the supervisor on the wire."""
NODE_PROVIDER = "ray"
"""Name of the node provider's process, which acquires nodes from Ray."""
FRONT = "front"
"""Name on the wire of the gateway that runs the front (router)."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of every message on the wire; the tag is the class's name."""
