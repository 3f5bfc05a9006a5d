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
from tests.waiting import Hang, wait_until

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
ON_DISK = ("hadal_cache_blocks{", 'tier="disk"')
"""The same for the blocks on disk that a unit can find."""
HEARTBEAT_S = 0.1


def cache_fields(
    folder: Path | None = None, *, memory: bool = True, disk_mb: int = 256
) -> dict[str, Any]:
    """Return fields of a deployment that reads what is on disk (on an idle machine hadal-tiny
    computes it sooner), and whose counts come soon.
    """
    disk = {} if folder is None else {"folder": str(folder), "disk_mb": disk_mb, "recompute": OFF}
    return {
        "cache": disk if memory else {"memory": OFF, **disk},
        "heartbeat_s": HEARTBEAT_S,
    }


def counts(server: Server, key: str = "") -> dict[str, int]:
    """Return each of TOTALS, summed over units; 0 where nothing was counted yet."""
    lines = _metrics(server, key)
    return {total: sum(_values(lines, *series)) for total, series in TOTALS.items()}


def total(server: Server, name: str, label: str) -> int:
    """Return the sum of a counter's series that have a label; 0 where nothing was counted yet."""
    return sum(_values(_metrics(server, ""), f"{name}{{", label))


def settle(server: Server, key: str = "") -> dict[str, int]:
    """Wait until nothing is asked, read or written any more; return the counts then.

    What a unit counts reaches the front before the answer to an audit that comes after it. The
    ledgers of all units must add up: else it fails with what is wrong.
    """

    def is_done() -> str:
        reply = httpx.get(f"{server.url}/audit", timeout=60, headers=server.headers(key))
        is_idle = reply.status_code == 200 and not any(
            unit["num_blocks_used"] or unit["num_requests"]
            for unit in reply.json()["units"].values()
        )
        return "" if is_idle else f"the last audit: {reply.text}"

    _wait_right(is_done, "nothing is asked, read or written any more")
    return counts(server, key)


def wait_found(server: Server, folder: Path, key: str = "") -> None:
    """Wait until every unit can find all blocks that lie in a folder and are its model's. Only for
    a server that does not write meanwhile.
    """
    fingerprint = read_run(server.folder).fingerprint

    def is_found() -> str:
        nums = _values(_metrics(server, key), *ON_DISK)
        num_there = len(names_on_disk(folder, fingerprint))
        return "" if set(nums) == {num_there} else f"units know {nums} of {num_there} blocks"

    _wait_right(is_found, "every unit can find what is on disk")


def num_on_disk(server: Server, folder: Path, prompts: Iterable[tuple[int, ...]]) -> int:
    """Return the tokens of prompts, sent without a key, that are found if all that lies in a folder
    is: whole blocks from each prompt's first on, and never its last position.
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
    """Wait until a look finds nothing wrong; fails with what the last one found."""
    last = [""]

    def is_right() -> bool:
        last[0] = wrong()
        return not last[0]

    try:
        wait_until(is_right, what)
    except Hang as hang:
        raise Hang(f"{hang}; {last[0]}") from None


def _metrics(server: Server, key: str) -> list[str]:
    reply = httpx.get(f"{server.url}/metrics", timeout=60, headers=server.headers(key))
    return reply.text.splitlines()


def _values(lines: list[str], start: str, label: str) -> list[int]:
    return [
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith(start) and label in line
    ]
