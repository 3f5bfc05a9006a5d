"""Paged lists of objects, in OpenAI's format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hadal.core.errors import RequestError


def read_limit(query: Mapping[str, str], most: int, default: int = 20) -> int:
    """Return the requested number of objects, 1 to `most`. Raises RequestError."""
    text = query.get("limit", str(default))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise RequestError(f"limit is {text[:40]!r}; send 1 to {most}.", "limit")
    return int(text)


def is_ascending(query: Mapping[str, str]) -> bool:
    """Return True for ascending order; the default is descending. Raises RequestError."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order must be 'asc' or 'desc'.", "order")
    return order == "asc"


def list_page(objects: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return one page of a list. `objects` has `limit` + 1 entries if another page follows."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }
