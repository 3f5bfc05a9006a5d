"""Short replies with a schema: each is encoded from its struct here, which also gives /openapi.json
its schema.

Other replies, such as generated ones, are not here: for most, /openapi.json names a client type.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hadal.gateway.edge.errors import Shape


class OriginalCount(Shape):
    """Number of tokens of a prompt before its conversation was edited."""

    original_input_tokens: int


class TokenCount(Shape):
    input_tokens: int
    context_management: OriginalCount | None = None


class Tokenized(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    prompt: str


class ResponseDeleted(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Greeting(Shape):
    """Name of this server, its model and its endpoints."""

    server: str
    model: str
    endpoints: list[str]


class HealthReply(Shape, kw_only=True):
    """Readiness of the server, and missing units and ranks."""

    status: Literal["starting", "ready", "degraded", "draining"]
    units_up: dict[str, int]
    units_wanted: dict[str, int]
    ranks_up: dict[str, int]
    ranks_wanted: dict[str, int]
    missing: list[str]
    nodes: list[str] = msgspec.field(default_factory=list)
    model: str


class AuditReply(Shape):
    """Resources in use by every unit, and inconsistencies."""

    problems: list[str]
    units: dict[str, dict[str, int]]


CacheReason = Literal[
    "cached",
    "short",
    "off",
    "first",
    "differs",
    "extends",
    "evicted",
    "on_disk",
    "elsewhere",
    "concurrent",
    "weights",
]
"""Reason for which no more of a prompt was found in the cache; docs/cache-misses.md explains each."""


class PromptPlace(Shape):
    """Part of a prompt: a message, or with the role "tools" or "reply" no message."""

    role: str
    index: int | None = None
    """Number of the message, system messages included."""

    @property
    def name(self) -> str:
        """Return role and index, for lists."""
        return self.role if self.index is None else f"{self.role} {self.index}"


class CacheExplanation(Shape, kw_only=True):
    """Reason for which a prompt was not found whole, from a comparison with the nearest prompt."""

    reason: CacheReason
    detail: str
    """The reason as a sentence."""
    block_tokens: int
    reusable_blocks: int
    """Blocks that could have been found."""
    found_blocks: int
    common_tokens: int
    """First tokens that the nearest kept prompt shares."""
    position: int | None = None
    """First token that differs, from 0."""
    message: PromptPlace | None = None
    """Part of the prompt at `position`."""
    text: str = ""
    """Text of the prompt from `position` on, shortened."""
    kept_text: str = ""
    """Text of the nearest prompt from `position` on, shortened."""


class CacheReport(Shape):
    """Explanations of one request, one for each of its prompts."""

    id: str
    unix_s: float
    tenant: str
    prompts: list[CacheExplanation]


class CacheReports(Shape):
    """Latest requests with their explanations, the latest first."""

    data: list[CacheReport]
