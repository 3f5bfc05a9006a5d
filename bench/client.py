"""A streaming client that costs little: it shares the cores with the server it measures. Raw
HTTP/1.1 over asyncio.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 600.0


@dataclass
class Stream:
    """When the pieces of one answer came. Times of time.perf_counter()."""

    started_s: float = 0.0
    piece_times_s: list[float] = field(default_factory=list)
    """One per network read that held tokens; several tokens may share one under load."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Of those, that were not computed."""
    num_tokens: int = 0
    error: str | None = None

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.piece_times_s[0] - self.started_s

    @property
    def per_token_s(self) -> float:
        """Mean time between tokens after the first; 0 for a single one."""
        span = self.piece_times_s[-1] - self.piece_times_s[0]
        return span / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


async def stream(
    address: tuple[str, int], path: str, body: Mapping[str, Any], key: str = ""
) -> Stream:
    """Send a request with `stream` and its usage asked for, and read the answer to its end. `key`: of
    its tenant; empty: none.
    """
    result = Stream()
    content = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address[0]}\r\nContent-Type:"
        " application/json\r\nConnection: close\r\n"
    )
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    result.started_s = time.perf_counter()
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
        try:
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
            tail = b""
            while piece := await reader.read(65536):
                if b"data: " in piece:
                    result.piece_times_s.append(time.perf_counter())
                tail = (tail + piece)[-4096:]
        finally:
            writer.close()
    if status != b"200":
        result.error = f"{status.decode()}: {tail.decode(errors='replace')}"
        return result
    usage = _usage(tail)
    if usage is None or b"data: [DONE]" not in tail:
        result.error = f"the stream ended with {tail[-200:]!r}"
        return result
    result.num_prompt_tokens, result.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    result.num_cached_tokens = usage["prompt_cache_hit_tokens"]
    return result


def _usage(tail: bytes) -> dict[str, int] | None:
    """The usage of the last event that has one."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {") and b'"usage"' in line:
            usage: dict[str, int] | None = json.loads(line[6:]).get("usage")
            if usage:
                return usage
    return None


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of all are at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
