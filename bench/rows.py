"""Cost of `tenant_promise`, the largest slowdown of the light tenant's steps: the lower it is, the
shorter the time between the light tenant's tokens, and the fewer tokens/s all tenants have together.

    python -m bench rows

Steps of policy/rows in simulated time, without tensors or processes: a step's time is a fixed part plus a
part per row that it computes (LINES). Streams never end, so slots and prefill have no effect. The lines for
two cores were measured on the engine; the GPU's is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from bench.claims import Claim, print_claims
from bench.tables import table_of
from hadal.core.config import TENANT_PROMISE
from hadal.policy.rows import RowsView, requeued, resting_rows

LINES = {
    "hadal-tiny, 2 cores": (0.12e-3, 0.043e-3),
    "mid FP8, 2 cores": (1.9e-3, 0.5e-3),
    "a GPU": (30e-3, 0.02e-3),
}
"""(seconds of a step without rows, seconds per row)."""
NONE = 1000.0
PROMISES = (1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0, NONE)
NUM_STEPS = 6400
LIGHT, HEAVY, BATCH = 0, 1, 2
LEAST_TOGETHER = 0.6
"""Minimum tokens/s of all tenants under the default promise, as a share of those without a promise."""


@dataclass(frozen=True)
class Had:
    """Results of all tenants in one simulated run."""

    tokens_per_s: dict[int, float]
    gaps_ms: np.ndarray
    """Milliseconds between two steps that compute at least one row of the light tenant."""

    def gap_ms(self, percentile: float) -> float:
        return float(np.percentile(self.gaps_ms, percentile))

    @property
    def together(self) -> float:
        return sum(self.tokens_per_s.values())


def had(line: tuple[float, float], promise: float, counts: dict[int, int]) -> Had:
    """Run `counts` streams of LIGHT, HEAVY and BATCH for NUM_STEPS steps; return the results."""
    tenants = np.repeat(list(counts), list(counts.values()))
    turns = np.zeros(tenants.size, np.int64)
    is_batch, ranks, weights = tenants == BATCH, np.zeros_like(turns), np.ones(tenants.size)
    now_s, last_s, gaps_s = 0.0, 0.0, []
    num_tokens = np.zeros(1 + BATCH, np.int64)
    for step_id in range(1, NUM_STEPS + 1):
        view = RowsView(ranks, tenants, weights, is_batch, turns)
        rests = resting_rows(view, line, promise, step_id)
        is_computed = np.ones(tenants.size, np.bool_) if rests is None else ~rests
        turns = requeued(turns, is_computed)
        now_s += line[0] + line[1] * np.count_nonzero(is_computed)
        num_tokens += np.bincount(tenants[is_computed], minlength=1 + BATCH)
        if is_computed[tenants == LIGHT].any():
            gaps_s.append(now_s - last_s)
            last_s = now_s
    per_s = {tenant: float(num_tokens[tenant]) / now_s for tenant in counts}
    return Had(per_s, 1e3 * np.array(gaps_s))


def main(arguments: Sequence[str] = ()) -> None:
    """Print the trade-off for each line and load."""
    del arguments  # A run takes seconds with or without --quick.
    console, claims = Console(), []
    for name, line in LINES.items():
        for light, heavy in ((1, 32), (2, 32), (8, 32)):
            counts = {LIGHT: light, HEAVY: heavy}
            alone = had(line, NONE, {LIGHT: light})
            free = had(line, NONE, counts)
            table = table_of(
                "promise|together/s|of all|heavy/s|light/s|p50|p95",
                f"{name}: a tenant with {light} beside one with {heavy}",
                num_left=0,
            )
            for promise in PROMISES:
                each = had(line, promise, counts)
                table.add_row(
                    "none" if promise == NONE else f"{promise:g}",
                    f"{each.together:,.0f}",
                    f"{each.together / free.together:.0%}",
                    f"{each.tokens_per_s[HEAVY]:,.0f}",
                    f"{each.tokens_per_s[LIGHT]:,.0f}",
                    *(
                        f"{each.gap_ms(p):.2f} ms, {each.gap_ms(p) / alone.gap_ms(p):.2f}x"
                        for p in (50, 95)
                    ),
                )
                if promise == TENANT_PROMISE:
                    claims += _claims(f"{name}, {light} and {heavy}", alone, free, each)
            console.print(table)
        _print_batch(console, name, line)
    print_claims(console, claims)


def _claims(what: str, alone: Had, free: Had, each: Had) -> list[Claim]:
    """Return the claims about the default promise."""
    slower = each.gap_ms(95) / alone.gap_ms(95)
    together = each.together / free.together
    return [
        Claim(f"{what}: p95 between tokens", slower, "it alone", TENANT_PROMISE, is_most=True),
        Claim(f"{what}: tokens/s together", together, "all without a promise", LEAST_TOGETHER),
    ]


def _print_batch(console: Console, name: str, line: tuple[float, float]) -> None:
    """Print two streams beside a batch, and the batch alone."""
    alone, both = (
        had(line, TENANT_PROMISE, counts) for counts in ({LIGHT: 2}, {LIGHT: 2, BATCH: 60})
    )
    batch = had(line, TENANT_PROMISE, {BATCH: 60})
    console.print(
        f"{name}: two streams p95 {alone.gap_ms(95):.2f} ms alone, {both.gap_ms(95):.2f} ms beside a"
        f" batch of 60, which has {both.tokens_per_s[BATCH]:,.0f} tokens/s then and"
        f" {batch.together:,.0f} alone\n"
    )


if __name__ == "__main__":
    main()
