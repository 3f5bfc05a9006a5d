"""Counts of the KV cache of a running server, and waits for its writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

from hadal.core.balance import OFF
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
    split,
)
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.gateway.desk.salts import salt_of
from hadal.kv.names import extend, root_of
from hadal.runtime.process.process import read_run
from tests.dist.segments import names_on_disk
from tests.dist.serving import Server
from tests.waiting import DEADLINE_S, Hang, wait_until

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
"""Count -> beginning of its series in /metrics, and a label that the series must have ("": any)."""
ON_DISK = ("hadal_cache_blocks{", 'tier="disk"')
"""Beginning and label of the series that counts the blocks on disk that a unit can find."""
HEARTBEAT_S = 0.1


def cache_fields(
    folder: Path | None = None, *, memory: bool = True, disk_mb: int = 256
) -> dict[str, Any]:
    """Return deployment fields for a server that always reads from disk and reports counts soon. An
    idle machine would compute hadal-tiny's KV faster than it reads it.
    """
    disk = {} if folder is None else {"folder": str(folder), "disk_mb": disk_mb, "recompute": OFF}
    return {
        "cache": disk if memory else {"memory": OFF, **disk},
        "heartbeat_s": HEARTBEAT_S,
    }


def counts(server: Server, key: str = "") -> dict[str, int]:
    """Return each of TOTALS, summed over units; 0 if nothing was counted yet."""
    lines = _metrics(server, key)
    return {total: sum(_values(lines, *series)) for total, series in TOTALS.items()}


def total(server: Server, name: str, label: str) -> int:
    """Return the sum of a counter's series that have a label; 0 if nothing was counted yet."""
    return sum(_values(_metrics(server, ""), f"{name}{{", label))


def settle(server: Server, key: str = "") -> dict[str, int]:
    """Wait until no request, read or write is in progress; return the counts then.

    A unit's counts reach the front before its answer to a later audit does. The ledgers of all
    units must add up; otherwise this raises Hang with the last audit.
    """

    def is_done() -> str:
        reply = httpx.get(f"{server.url}/audit", timeout=DEADLINE_S, headers=server.headers(key))
        is_idle = reply.status_code == 200 and not any(
            unit["num_blocks_used"] or unit["num_requests"]
            for unit in reply.json()["units"].values()
        )
        return "" if is_idle else f"the last audit: {reply.text}"

    _wait_right(is_done, "nothing is asked, read or written any more")
    return counts(server, key)


def wait_found(server: Server, folder: Path, key: str = "") -> None:
    """Wait until every unit can find all of its model's blocks in a folder. Valid only while the
    server does not write.
    """
    fingerprint = read_run(server.folder).fingerprint

    def is_found() -> str:
        nums = _values(_metrics(server, key), *ON_DISK)
        num_there = len(names_on_disk(folder, fingerprint))
        return "" if set(nums) == {num_there} else f"units know {nums} of {num_there} blocks"

    _wait_right(is_found, "every unit can find what is on disk")


def num_on_disk(server: Server, folder: Path, prompts: Iterable[tuple[int, ...]]) -> int:
    """Return the number of prompt tokens found if every block in the folder can be found: whole
    blocks from the start of each prompt, never its last position. Valid for prompts sent without a
    key.
    """
    run = read_run(server.folder)
    there, root = names_on_disk(folder, run.fingerprint), root_of(run.fingerprint.encode())
    total = 0
    for prompt in prompts:
        for name in split(extend(root, b"", prompt[:-1], salt_of(b""))):
            if name not in there:
                break
            total += BLOCK_TOKENS
    return total


def _wait_right(wrong: Callable[[], str], what: str) -> None:
    """Wait until `wrong` returns an empty string; raises Hang with the last non-empty one."""
    last = [""]

    def is_right() -> bool:
        last[0] = wrong()
        return not last[0]

    try:
        wait_until(is_right, what)
    except Hang as hang:
        raise Hang(f"{hang}; {last[0]}") from None


def _metrics(server: Server, key: str) -> list[str]:
    reply = httpx.get(f"{server.url}/metrics", timeout=DEADLINE_S, headers=server.headers(key))
    return reply.text.splitlines()


def _values(lines: list[str], start: str, label: str) -> list[int]:
    return [
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith(start) and label in line
    ]
