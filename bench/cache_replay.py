"""What share of prompt tokens the cache finds: Mooncake's traces through the real ledgers, without
a model.

    python -m bench.cache_replay [--quick] [--trace NAME]

memory: every prompt acquires what kv/blocks finds, has room made for the rest, names it and lets
go. disk: kv/disk_index is looked up, kv/disk_slots gives room to what is new, 32 blocks at a time,
and hears of uses every two seconds of the trace. disk+: decode writes what it generates as well.
The traces cannot show those blocks being found, so this is what they cost at worst; how much they
could bring at most is said below the table.

us: of the processor's time for each block in the ledgers. run: blocks of a write that lie side by
side.

Budgets are shares of the working set: the different full blocks of all prompts. "best": what nobody
can exceed who does not bend the rules; evicts what is needed last, knowing the future (Belady).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from rich.console import Console
from rich.table import Table

from bench.cache_traces import Trace, chats, continued_tokens, find
from bench.shared_data import MOONCAKE, MOONCAKE_SYNTHETIC, why_missing
from hadal.core.cache import NAME_BYTES, num_names, slice_of
from hadal.core.messages import BLOCK_TOKENS
from hadal.kv.blocks import BlockAllocator
from hadal.policy.eviction import Arc, Lru
from hadal.sim.day.cache import DiskReplay

Policy = type[Arc | Lru]
SHARES = (0.1, 0.03)
QUICK_PROMPTS = 3000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one replay."""

    num_hit_tokens: int
    num_tokens: int
    num_blocks: int
    """Looked up, added and evicted, each counted once."""
    took_s: float
    """Of the processor, in the ledgers."""
    num_runs: int = 0
    num_written: int = 0

    @property
    def share(self) -> float:
        return self.num_hit_tokens / self.num_tokens

    @property
    def block_us(self) -> float:
        return self.took_s / self.num_blocks * 1e6


def infinite(trace: Trace) -> list[int]:
    """By prompt: tokens that a cache finds which forgets nothing."""
    seen: set[int] = set()
    found = []
    for prompt in trace.prompts:
        numbers = prompt.numbers
        num = next((i for i, number in enumerate(numbers) if number not in seen), len(numbers))
        found.append(min(num, prompt.num_usable) * prompt.block_tokens)
        seen.update(numbers)
    return found


def memory(trace: Trace, num_blocks: int, policy: Policy = Arc) -> Outcome:
    """Through one rank's pool, one prompt at a time."""
    pool = BlockAllocator(num_blocks + 1, policy)
    num_hit_tokens = num_touched = 0
    took_s = 0.0
    for key, prompt in enumerate(trace.prompts):
        chain = prompt.chain
        start_s = time.process_time()
        found = pool.lookup(slice_of(chain, 0, prompt.num_usable))
        pool.acquire(found, key)
        new = pool.allocate(prompt.num_full - len(found), key)
        if new is not None:  # Else it is larger than the pool.
            pool.name(new, chain, len(found))
            pool.free(new, key)
        pool.free(found, key)
        pool.take_changes()
        took_s += time.process_time() - start_s
        num_hit_tokens += len(found) * prompt.block_tokens
        num_touched += prompt.num_full
    assert pool.check() == [], pool.check()
    return Outcome(num_hit_tokens, trace.num_tokens, num_touched, took_s)


def disk(
    trace: Trace, num_disk_slots: int, policy: Policy = Arc, *, with_answers: bool = False
) -> Outcome:
    """Through one writer's slots and one leader's index (sim/day/cache), nothing in memory."""
    cache = DiskReplay(num_disk_slots, policy)
    answers = count(1 << 100)
    num_hit = num_touched = 0
    took_s = 0.0
    for prompt in trace.prompts:
        chain = prompt.chain
        start_s = time.process_time()
        num_hit += cache.find(prompt.at_s, slice_of(chain, 0, prompt.num_usable))
        if with_answers:
            num_more = (prompt.num_tokens + prompt.num_output) // BLOCK_TOKENS - prompt.num_full
            chain += b"".join(next(answers).to_bytes(NAME_BYTES, "big") for _ in range(num_more))
        cache.store(chain)
        took_s += time.process_time() - start_s
        num_touched += num_names(chain)
    assert cache.check() == [], cache.check()
    return Outcome(
        num_hit * BLOCK_TOKENS,
        trace.num_tokens,
        num_touched,
        took_s,
        cache.num_runs,
        cache.num_written,
    )


def best(trace: Trace, num_blocks: int) -> float:
    """The most a cache of this size can find. Whatever is needed last goes, new blocks included; a
    block is needed no later than those behind it in its text, so what is left is prefixes, as it is
    in ours.
    """
    never = len(trace.prompts)
    next_use: dict[int, int] = {}
    uses: list[list[int]] = []
    for at, prompt in zip(range(never - 1, -1, -1), reversed(trace.prompts), strict=True):
        numbers = prompt.numbers
        uses.append([next_use.get(number, never) for number in numbers])
        next_use |= dict.fromkeys(numbers, at)
    heap: list[tuple[int, int]] = []
    here: dict[int, int] = {}
    num_hit_tokens = 0
    for prompt in trace.prompts:
        numbers = prompt.numbers
        num = next((i for i, number in enumerate(numbers) if number not in here), len(numbers))
        num_hit_tokens += min(num, prompt.num_usable) * prompt.block_tokens
        for number, use in zip(numbers, uses.pop(), strict=True):
            here[number] = use
            heappush(heap, (-use, number))
        while len(here) > num_blocks:
            use, number = heappop(heap)
            if here.get(number) == -use:
                del here[number]
    return num_hit_tokens / trace.num_tokens


def row(
    trace: Trace, share: float, replay: Callable[[Trace, int, Policy], Outcome]
) -> tuple[Outcome, Outcome]:
    """Ours and LRU at a share of the working set."""
    num_blocks = max(1, int(share * trace.num_blocks()))
    return replay(trace, num_blocks, Arc), replay(trace, num_blocks, Lru)


def answers(trace: Trace, num_disk_slots: int, policy: Policy) -> Outcome:
    """The disk with generated text on it as well."""
    return disk(trace, num_disk_slots, policy, with_answers=True)


def report(trace: Trace, table: Table, *, is_part: bool) -> None:
    """One trace's rows."""
    most = sum(infinite(trace)) / trace.num_tokens
    if not is_part:
        for name, replay in (("memory", memory), ("disk", disk)):
            ours = replay(trace, trace.num_blocks(), Arc)
            table.add_row(
                trace.name, name, "100 %", f"{ours.share:.2%}", "", f"{most:.2%}", *_costs(ours)
            )
    for share in SHARES:
        bound = best(trace, int(share * trace.num_blocks()))
        caches = (
            [("memory", memory)]
            if is_part
            else [("memory", memory), ("disk", disk), ("disk+", answers)]
        )
        for name, replay in caches:
            ours, lru = row(trace, share, replay)
            said = "green" if ours.share > lru.share else "red"
            table.add_row(
                trace.name,
                name,
                f"{share:.0%}",
                f"[{said}]{ours.share:.2%}[/]",
                f"{lru.share:.2%}",
                f"{bound:.2%}",
                *_costs(ours),
            )


def _costs(outcome: Outcome) -> tuple[str, str]:
    length = f"{outcome.num_written / outcome.num_runs:.1f}" if outcome.num_runs else ""
    return f"{outcome.block_us:.1f}", length


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cache_replay", description=__doc__)
    parser.add_argument("--trace", default="", help="only traces whose names begin with this")
    parser.add_argument(
        "--quick", action="store_true", help=f"the first {QUICK_PROMPTS} prompts of each trace"
    )
    options = parser.parse_args(arguments)
    console = Console()
    traces = find()
    if not traces:
        console.print(f"[yellow]{why_missing(MOONCAKE, MOONCAKE_SYNTHETIC)}[/]")
    whole = [trace for trace in (*traces, chats(0)) if trace.name.startswith(options.trace)]
    if options.quick:
        whole = [Trace(trace.name, trace.prompts[:QUICK_PROMPTS]) for trace in whole]
    for trace in whole:
        table = Table(title="share of prompt tokens found")
        for title in ("trace", "cache", "budget", "ours", "LRU", "best", "us", "run"):
            table.add_column(title, justify="left" if title in ("trace", "cache") else "right")
        report(trace, table, is_part=False)
        for half in () if options.quick else trace.halves():
            report(half, table, is_part=True)
        more = sum(
            max(0, n - m)
            for n, m in zip(continued_tokens(trace.prompts), infinite(trace), strict=True)
        )
        console.print(table)
        console.print(
            f"{trace.name}: {len(trace.prompts):,} prompts, {trace.num_tokens / 1e6:.1f} M tokens,"
            f" working set {trace.num_blocks():,} blocks; answers on disk could add up to"
            f" {more / trace.num_tokens:.2%}",
            highlight=False,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
