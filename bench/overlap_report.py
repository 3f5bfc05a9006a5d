"""What an overlap run found, for people and as JSON. A figure that too few clean pairs carry is
"not measured".
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.overlap_gate import FOREIGN_MAX, spread
from bench.overlap_real import ALL, RealResult
from bench.overlap_variants import (
    CANDIDATES,
    COMPUTE,
    FULL,
    LINK,
    PREFILL,
    SCHEDULED,
    Variant,
    cheapest,
)

SPEED_UP_BAR, IDEAL_BAR, MAX_REGRET = 1.5, 0.75, 0.05


def speed_up(result: RealResult, variant: Variant, num_pairs: int) -> float | None:
    """Over one full batch, median of the clean pairs; None if they are too few."""
    ratios = result.series.ratios(FULL.name, variant.name)
    return statistics.median(ratios) if len(ratios) >= num_pairs else None


def of_ideal(result: RealResult, variant: Variant, num_pairs: int) -> float | None:
    """max(C, M) over the measured time; None where the speed-up is not measured."""
    ideal_s, median_s = result.ideal_s(), result.series.median_s(variant.name)
    if ideal_s is None or median_s is None or speed_up(result, variant, num_pairs) is None:
        return None
    return ideal_s / median_s


def regret(result: RealResult) -> tuple[Variant, float] | None:
    """What the price chooses, and by how much it is slower than the best measured; None if
    something is missing.
    """
    prices = result.prices()
    medians = {variant.name: result.series.median_s(variant.name) for variant in SCHEDULED}
    measured = {name: median_s for name, median_s in medians.items() if median_s is not None}
    if prices is None or len(measured) < len(medians):
        return None
    chosen = cheapest(prices, CANDIDATES)
    return chosen, measured[chosen.name] / min(measured.values()) - 1.0


def show(console: Console, result: RealResult, num_pairs: int) -> None:
    """A table of the variants, then what the claims come to."""
    case = result.case
    console.print(
        f"\n[bold]EP{result.num_ranks}, {case.num_tokens} tokens a micro-batch, {case.num_layers}"
        f" layers, {case.dispatch_format} dispatched, link {result.rate_bytes_per_s / 1e6:.0f} MB/s (communication"
        f" {result.link_over_compute:g}x of computation asked for)[/bold]"
    )
    table = Table()
    for name in (
        "",
        "ms",
        "over one full batch",
        "of ideal",
        "exposed wait ms",
        "priced ms",
        "measured/priced",
        "clean",
        "dropped",
    ):
        table.add_column(name, justify="left" if not name else "right")
    prices = result.prices()
    for variant in (*SCHEDULED, COMPUTE, LINK):
        price = prices.get(variant.name) if prices is not None else None
        table.add_row(*_row(result, variant, num_pairs, None if price is None else price.total_s))
    console.print(table)
    for line in findings(result, num_pairs):
        console.print(line)


def _row(result: RealResult, variant: Variant, num_pairs: int, priced_s: float | None) -> list[str]:
    median_s = result.series.median_s(variant.name)
    is_scheduled = variant in SCHEDULED
    ratios = (
        result.series.ratios(FULL.name, variant.name)
        if is_scheduled and variant is not FULL
        else []
    )
    share = of_ideal(result, variant, num_pairs) if is_scheduled else None
    exposed_s = result.exposed_s(variant) if is_scheduled else None
    too_few = f" ({len(ratios)} pairs)" if ratios and len(ratios) < num_pairs else ""
    return [
        variant.name,
        _ms(median_s),
        spread(ratios) + too_few,
        "-" if share is None else f"{share:.0%}",
        _ms(exposed_s),
        _ms(priced_s),
        "-" if median_s is None or priced_s is None else f"{median_s / priced_s:.2f}",
        f"{len(result.series.seconds(variant.name))}",
        f"{result.series.num_dropped([variant.name])}",
    ]


def findings(result: RealResult, num_pairs: int) -> list[str]:
    """The claims in words."""
    pairs, rounds = len(result.series.ratios(FULL.name, PREFILL.name)), len(result.series.rounds)
    lines = []
    ratio, share = speed_up(result, PREFILL, num_pairs), of_ideal(result, PREFILL, num_pairs)
    if ratio is None or share is None:
        lines.append(
            f"prefill_dual over one full batch: not measured, {pairs} clean pairs of {rounds};"
            f" {num_pairs} needed"
        )
    else:
        lines.append(
            f"prefill_dual over one full batch: {ratio:.2f}x, {share:.0%} of ideal, {pairs} clean"
            f" pairs of {rounds} (wanted: {SPEED_UP_BAR}x and {IDEAL_BAR:.0%}, where link and"
            " compute balance)"
        )
    compute_s, link_s = result.series.median_s(COMPUTE.name), result.series.median_s(LINK.name)
    if compute_s and link_s:
        bound = (compute_s + link_s) / max(compute_s, link_s)
        lines.append(
            f"communication was {link_s / compute_s:.2f}x of computation; hiding all of it would be"
            f" {bound:.2f}x"
        )
    choice = regret(result)
    if choice is None:
        lines.append("choice by price: not measured, a variant has no clean run")
    else:
        chosen, loss = choice
        verdict = "within" if loss <= MAX_REGRET else "MORE THAN"
        lines.append(
            f"choice by price: {chosen.name}, {loss:.1%} slower than the best ({verdict}"
            f" {MAX_REGRET:.0%})"
        )
    different = result.different_outputs()
    lines.append(
        f"outputs differ from the sequential ones: {', '.join(different)}"
        if different
        else "outputs of the overlapped schedules are the sequential ones' to the bit, in every run"
    )
    dropped = result.series.num_dropped(variant.name for variant in ALL)
    shares = [timed.foreign for r in result.series.rounds for timed in r.values()]
    lines.append(
        f"others used {spread([100 * share for share in shares])} % of the machine; runs above"
        f" {FOREIGN_MAX:.0%} are dropped: {dropped} of {len(shares)}"
    )
    return lines


def as_json(result: RealResult, num_pairs: int) -> dict[str, Any]:
    """Every run's seconds and others' share, and what they come to."""
    prices = result.prices()
    return {
        "case": asdict(result.case),
        "num_ranks": result.num_ranks,
        "link_over_compute": result.link_over_compute,
        "rate_bytes_per_s": result.rate_bytes_per_s,
        "runs": {
            variant.name: [
                {"seconds": r[variant.name].seconds, "foreign": r[variant.name].foreign}
                for r in result.series.rounds
            ]
            for variant in ALL
        },
        "priced_s": (
            None if prices is None else {name: price.total_s for name, price in prices.items()}
        ),
        "prefill_dual_over_full": speed_up(result, PREFILL, num_pairs),
        "prefill_dual_of_ideal": of_ideal(result, PREFILL, num_pairs),
        "findings": findings(result, num_pairs),
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"
