"""Read a page of a running server, for commands: its body, or an error for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from hadal.core.errors import HadalError

_CONNECT_S = 5.0


class FetchError(HadalError):
    """Error: the server cannot be reached, or refuses the request."""


def fetch_page(
    url: str, path: str, *, api_key: str = "", query: Mapping[str, str], wait_s: float = 0.0
) -> bytes:
    """Return the body of GET `path` at a server's URL, with or without /v1. `wait_s`: seconds that
    the answer itself may take. Raises FetchError.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    address = f"{url.rstrip('/').removesuffix('/v1')}{path}"
    timeout = httpx.Timeout(wait_s + 10, connect=_CONNECT_S)
    try:
        reply = httpx.get(address, params=dict(query), headers=headers, timeout=timeout)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise FetchError(
            f"{url} cannot be reached ({str(error) or type(error).__name__}). Is a server running?"
            " Start one with `hadal serve`, or name another URL."
        ) from error
    if reply.status_code != 200:
        raise FetchError(_error_of(reply))
    return reply.content


def _error_of(reply: httpx.Response) -> str:
    try:
        body: Any = reply.json()
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server returned status {reply.status_code}: {reply.text[:200]}"
