"""What pricing a step costs: one price, and a planner's sweep of 10,000 configurations.

    python -m bench.step_price [--configs 10000]

Needs no GPU and no data. The limits are those a planner needs: 1 ms a price, 30 s for the sweep, on
one core.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence

from rich.console import Console

from hadal.core.config import DECODE
from hadal.overlap.plan import DECODE_FIVE
from hadal.perf.hardware import HARDWARE
from hadal.perf.step import StepModel

LIMIT_ONE_S = 1e-3
LIMIT_SWEEP_S = 30.0
RANKS = (8, 16, 32, 48, 64, 72, 96, 128, 144, 256)
REPETITIONS = 300


def one_price_s(model: StepModel) -> float:
    """Median of a step on the way of a simulator: two given micro-batches, one schedule, never the
    same twice.
    """
    taken = []
    for index in range(REPETITIONS):
        start = time.perf_counter()
        price = model.decode(
            88 + index / 7, 4989 + index, 1, schedule="decode_five", expert_imbalance=1.1
        )
        taken.append(time.perf_counter() - start)
        assert price.schedule is DECODE_FIVE
        assert price.seconds > 0.0
    return statistics.median(taken)


def auto_price_s(model: StepModel) -> float:
    """Median with all schedules priced."""
    taken = []
    for index in range(REPETITIONS):
        start = time.perf_counter()
        model.decode(88 + index / 7, 4989 + index, 1)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def configurations(num: int) -> Iterator[tuple[str, int, int, int, int]]:
    """(hardware, ranks, requests, context, drafts), `num` of them."""
    contexts = (1024, 2048, 4096, 8192, 16384, 32768)
    grid = list(itertools.product(HARDWARE, RANKS, range(8, 264, 8), contexts, (0, 1)))
    return itertools.islice(grid, 0, None, max(1, len(grid) // num))


def sweep_s(num: int) -> tuple[int, float]:
    """Return (configurations priced, seconds), schedules chosen by price."""
    models: dict[tuple[str, int], StepModel] = {}
    start = time.perf_counter()
    count = 0
    for hardware, ranks, requests, context, drafts in itertools.islice(configurations(num), num):
        key = hardware, ranks
        if key not in models:
            models[key] = StepModel(ranks, HARDWARE[hardware])
        models[key].decode(requests, context, drafts)
        count += 1
    return count, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both beside their limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="1,000 configurations")
    options = parser.parse_args(arguments)
    console = Console(highlight=False)
    model = StepModel(144, HARDWARE["h800"])
    model.decode(88, 4989, 1)
    limit_ms = LIMIT_ONE_S * 1e3
    console.print(
        f"one {DECODE} step, one schedule: {one_price_s(model) * 1e3:.3f} ms (limit"
        f" {limit_ms:.0f} ms)"
    )
    console.print(
        f"the cheapest of all schedules: {auto_price_s(model) * 1e3:.3f} ms (limit"
        f" {limit_ms:.0f} ms)"
    )
    num = 1000 if options.quick else options.configs
    count, seconds = sweep_s(num)
    limit = LIMIT_SWEEP_S * count / 10_000
    console.print(
        f"{count:,} configurations, schedules by price: {seconds:.1f} s (limit {limit:.0f} s)"
    )


if __name__ == "__main__":
    main()
