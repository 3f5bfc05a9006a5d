"""What tests of the KV cache ask of a running server: its counts, and whether it is done
writing.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx

from hadal.core.cache import (
    DAMAGED_BLOCKS,
    DISK_EVICTED_BLOCKS,
    DISK_HIT_TOKENS,
    EVICTED_BLOCKS,
    MEMORY_HIT_TOKENS,
    MISS_TOKENS,
    RECOMPUTED_TOKENS,
    SKIPPED_BLOCKS,
    STORED_BLOCKS,
)
from hadal.core.config import OFF
from tests.dist.serving import Server
from tests.waiting import wait_until

TOTALS = {
    MEMORY_HIT_TOKENS: ("hadal_cache_hit_tokens_total{", 'tier="memory"'),
    DISK_HIT_TOKENS: ("hadal_cache_hit_tokens_total{", 'tier="disk"'),
    MISS_TOKENS: ("hadal_cache_miss_tokens_total{", ""),
    RECOMPUTED_TOKENS: ("hadal_cache_recomputed_tokens_total{", ""),
    STORED_BLOCKS: ("hadal_cache_stored_blocks_total{", ""),
    SKIPPED_BLOCKS: ("hadal_cache_skipped_blocks_total{", ""),
    DAMAGED_BLOCKS: ("hadal_cache_damaged_blocks_total{", ""),
    EVICTED_BLOCKS: ("hadal_cache_evicted_blocks_total{", 'tier="memory"'),
    DISK_EVICTED_BLOCKS: ("hadal_cache_evicted_blocks_total{", 'tier="disk"'),
}
"""How a series of each count begins in /metrics, and what else is in it."""
HEARTBEAT_S = 0.1
QUIET_S = 4 * HEARTBEAT_S
"""Counts come with heartbeats: a count that stands still for this long stands."""
SETTLE_S = 30.0


def cache_fields(
    folder: Path | None = None, *, memory: bool = True, disk_mb: int = 256
) -> dict[str, Any]:
    """Fields of a deployment that reads what is on disk (on an idle machine hadal-tiny computes it
    sooner), and whose counts come soon.
    """
    disk = {} if folder is None else {"folder": str(folder), "disk_mb": disk_mb, "recompute": OFF}
    return {
        "cache": disk if memory else {"memory": OFF, **disk},
        "heartbeat_s": HEARTBEAT_S,
    }


def counts(server: Server, key: str = "") -> dict[str, int]:
    """Each of TOTALS, summed over units; 0 where nothing was counted yet."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    text = httpx.get(f"{server.url}/metrics", timeout=10, headers=headers).text
    found = dict.fromkeys(TOTALS, 0)
    for line in text.splitlines():
        for total, (start, label) in TOTALS.items():
            if line.startswith(start) and label in line:
                found[total] += int(float(line.rpartition(" ")[2]))
    return found


def settle(server: Server, key: str = "") -> dict[str, int]:
    """Wait until the server writes no more; returns its counts."""
    since_s, seen = time.monotonic(), counts(server, key)

    def quiet() -> dict[str, int] | None:
        nonlocal since_s, seen
        time.sleep(0.1)
        now = counts(server, key)
        if now != seen:
            since_s, seen = time.monotonic(), now
        return seen if time.monotonic() - since_s > QUIET_S else None

    settled: dict[str, int] = wait_until(quiet, "nothing more is written to disk")
    return settled


def audit(server: Server) -> None:
    """Every ledger adds up and nothing is held for nobody. Fails the test otherwise."""
    reply: list[httpx.Response] = []

    def clean() -> bool:
        reply[:] = [httpx.get(f"{server.url}/audit", timeout=30)]
        return reply[0].status_code == 200

    deadline_s = time.monotonic() + SETTLE_S
    while not clean():
        assert time.monotonic() < deadline_s, reply[0].text
        time.sleep(0.2)
