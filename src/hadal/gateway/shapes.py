"""Replies of Hadal's own endpoints, and errors: each is encoded from its struct here, from which
/openapi.json has its schema as well.

Knows no reply in another service's format: /openapi.json names the client's type that reads it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Shape(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An object without other fields than it names. A field with a default may be missing."""


class ErrorFields(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ApiErrorReply(Shape):
    """An error as OpenAI's clients expect it."""

    error: ErrorFields


class MessageErrorFields(Shape):
    type: str
    message: str
    details: dict[str, Any] = {}


class MessageErrorReply(Shape):
    """An error as Anthropic's clients expect it."""

    type: Literal["error"]
    error: MessageErrorFields


class TokenCount(Shape):
    input_tokens: int


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
    """Whether requests can be answered, and what is missing."""

    status: Literal["starting", "ready", "degraded", "draining"]
    units_up: dict[str, int]
    units_wanted: dict[str, int]
    ranks_up: dict[str, int]
    ranks_wanted: dict[str, int]
    missing: list[str]
    nodes: list[str] = []
    model: str


class AuditReply(Shape):
    """What every unit has in use, and what does not add up."""

    problems: list[str]
    units: dict[str, dict[str, int]]
