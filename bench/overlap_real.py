"""Measure overlap with real FP32 compute: rounds of all variants in turn, on a link of a given rate, until
enough runs are clean.

A round runs each schedule of the step once, and compute and link alone. A run in which other processes used
more than FOREIGN_MAX of the machine is dropped and counted. A pair is one full batch and another variant of the
same round, both clean. A figure with too few clean pairs is shown as "not measured".
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from bench.machine import FOREIGN_MAX, foreign_share, is_quiet, read_usage
from bench.overlap_model import ModelCase
from bench.overlap_net import Hosts
from bench.overlap_ranks import Answer, Ranks
from bench.overlap_variants import (
    CANDIDATES,
    COMPUTE,
    COMPUTE_FULL,
    DECODE,
    FULL,
    LINK,
    LINK_FULL,
    PREFILL,
    SCHEDULED,
    TWO,
    Variant,
    cheapest,
)
from bench.tables import table_of
from hadal.perf.price import OpSeconds, Price


@dataclass(frozen=True)
class Timed:
    """One run of one variant. `foreign`: share of the machine's CPU time that other processes used."""

    seconds: float
    foreign: float

    @property
    def is_clean(self) -> bool:
        return self.foreign <= FOREIGN_MAX


@dataclass
class Series:
    """All runs of a set of variants, in rounds: one run of each variant per round."""

    rounds: list[dict[str, Timed]] = field(default_factory=list)

    def seconds(self, variant: str) -> list[float]:
        """Return the seconds of the clean runs."""
        return [r[variant].seconds for r in self.rounds if variant in r and r[variant].is_clean]

    def median_s(self, variant: str) -> float | None:
        """Return the median of the clean runs; None if no run was clean."""
        seconds = self.seconds(variant)
        return statistics.median(seconds) if seconds else None

    def ratios(self, over: str, under: str) -> list[float]:
        """Return the seconds of `over` divided by those of `under`, for each round in which both were clean."""
        return [
            r[over].seconds / r[under].seconds
            for r in self.rounds
            if over in r and under in r and r[over].is_clean and r[under].is_clean
        ]

    def num_dropped(self, variants: Iterable[str]) -> int:
        """Return the number of runs of these variants that are not clean, because other processes ran."""
        wanted = set(variants)
        return sum(
            not timed.is_clean for r in self.rounds for name, timed in r.items() if name in wanted
        )


def spread(values: Sequence[float]) -> str:
    """Return median and range as text."""
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


ALL = (*SCHEDULED, COMPUTE, LINK, COMPUTE_FULL, LINK_FULL)
SPLIT = (TWO, PREFILL, DECODE)
"""Variants with the same micro-batches: their outputs must be equal to the bit."""
PAYLOAD_SHARE = 0.955
"""Payload's share of a limited link's rate; the rest is headers."""
CALIBRATION_RATE_BYTES_PER_S = 100e6
CALIBRATION_RUNS = 5
RUN_TIMEOUT_S = 60.0
QUIET_PAUSE_S = 1.0


@dataclass
class RealResult:
    """Measurements of one model on one link."""

    case: ModelCase
    num_ranks: int
    link_over_compute: float
    """Requested ratio; the measured one follows from the series."""
    rate_bytes_per_s: float
    num_cores: int
    series: Series = field(default_factory=Series)
    answers: dict[str, list[tuple[bool, list[Answer]]]] = field(default_factory=dict)
    """Variant -> for every run, whether it was clean, and the answers of the ranks."""

    def clean(self, variant: Variant) -> list[list[Answer]]:
        return [answers for is_clean, answers in self.answers.get(variant.name, []) if is_clean]

    def exposed_s(self, variant: Variant) -> float | None:
        """Return the seconds for which compute waited for the link, on the rank that waited
        longest: median of the clean runs.
        """
        waits = [
            max(answer["ops"]["wait"][1] for answer in answers) for answers in self.clean(variant)
        ]
        return statistics.median(waits) if waits else None

    def ideal_s(self) -> float | None:
        """Return the longer of compute and link alone: the lower bound of every schedule's time."""
        compute_s, link_s = self.series.median_s(COMPUTE.name), self.series.median_s(LINK.name)
        return None if compute_s is None or link_s is None else max(compute_s, link_s)

    def prices(self) -> dict[str, Price] | None:
        """Return the prices of perf/price, from op times of compute alone and of the link alone;
        None if one of the two was never clean.
        """
        full, half = self._op_seconds(COMPUTE_FULL, LINK_FULL), self._op_seconds(COMPUTE, LINK)
        if full is None or half is None:
            return None
        return {
            variant.name: variant.price(full, half, self.case.num_layers) for variant in SCHEDULED
        }

    def _op_seconds(self, compute: Variant, link: Variant) -> OpSeconds | None:
        ran, sent = self.clean(compute), self.clean(link)
        if not ran or not sent:
            return None

        def op(name: str) -> float:
            means = [
                [float(answer["ops"][name][1] / answer["ops"][name][0]) for answer in answers]
                for answers in ran
            ]
            return statistics.median(map(max, means))

        def travel(name: str) -> float:
            return statistics.median(
                max(statistics.fmean(answer[name]) for answer in answers) for answers in sent
            )

        return OpSeconds(
            op("attn_in"),
            op("attn_core"),
            op("gate"),
            travel("dispatches_s"),
            op("shared"),
            op("experts"),
            travel("combines_s"),
            post=op("post"),
        )

    def different_outputs(self) -> list[str]:
        """Return the variants with the same micro-batches as the sequential one, but other outputs,
        compared to the bit.
        """
        digests = {
            variant.name: {
                tuple(a["digest"] for a in answers)
                for _, answers in self.answers.get(variant.name, [])
            }
            for variant in SPLIT
        }
        return [name for name, found in digests.items() if found != digests[TWO.name]]


def calibrate(ranks: Ranks, case: ModelCase, hosts: Hosts) -> tuple[float, float]:
    """Return (compute seconds of a step in two micro-batches, bytes sent by the busiest rank)."""
    ranks.ask({"do": "model", "case": asdict(case)}, RUN_TIMEOUT_S)
    hosts.limit(CALIBRATION_RATE_BYTES_PER_S)
    warm = ranks.run(TWO.question(), RUN_TIMEOUT_S)
    ranks.run(FULL.question(), RUN_TIMEOUT_S)
    runs = [ranks.run(COMPUTE.question(), RUN_TIMEOUT_S) for _ in range(CALIBRATION_RUNS)]
    # CPU time of the fastest run: time that other processes take is not a cost of the model.
    compute_s = min(max(answer["execute_cpu_s"] for answer in answers) for answers in runs)
    return compute_s, max(answer["num_bytes"] for answer in warm)


def measure(
    ranks: Ranks,
    case: ModelCase,
    hosts: Hosts,
    link_over_compute: float,
    compute_s: float,
    step_bytes: float,
    *,
    num_pairs: int,
    limit_s: float,
    num_cores: int,
    progress: Callable[[str], None],
) -> RealResult:
    """Run rounds until `num_pairs` pairs of prefill_dual are clean, or for `limit_s`. The order
    within a round is shuffled. A round begins when the machine is quiet.
    """
    rate = step_bytes / (link_over_compute * compute_s)
    hosts.limit(rate / PAYLOAD_SHARE)
    result = RealResult(case, len(ranks), link_over_compute, rate, num_cores)
    for variant in (FULL, TWO):  # Records the exchanges that the link-only runs replay.
        ranks.run(variant.question(), RUN_TIMEOUT_S)
    shuffler, end_s = random.Random(case.num_tokens), time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if not is_quiet(num_cores):
            progress("waiting: others use the machine")
            time.sleep(QUIET_PAUSE_S)
            continue
        variants = list(ALL)
        shuffler.shuffle(variants)
        result.series.rounds.append(
            {variant.name: _timed(ranks, variant, result) for variant in variants}
        )
        done = len(result.series.ratios(FULL.name, PREFILL.name))
        progress(f"{done} of {num_pairs} clean pairs, {len(result.series.rounds)} rounds")
        if done >= num_pairs and result.prices() is not None:
            break
    return result


def _timed(ranks: Ranks, variant: Variant, result: RealResult) -> Timed:
    ours_s, before = time.process_time(), read_usage()
    answers = ranks.run(variant.question(), RUN_TIMEOUT_S)
    after = read_usage()
    own_s = time.process_time() - ours_s + sum(answer["cpu_s"] for answer in answers)
    timed = Timed(answers[0]["elapsed_s"], foreign_share(before, after, own_s, result.num_cores))
    result.answers.setdefault(variant.name, []).append((timed.is_clean, answers))
    return timed


SPEED_UP_BAR, IDEAL_BAR, MAX_REGRET = 1.5, 0.75, 0.05


def speed_up(result: RealResult, variant: Variant, num_pairs: int) -> float | None:
    """Return the speed-up against one full batch, as the median of the clean pairs; None if there are fewer
    than `num_pairs`.
    """
    ratios = result.series.ratios(FULL.name, variant.name)
    return statistics.median(ratios) if len(ratios) >= num_pairs else None


def of_ideal(result: RealResult, variant: Variant, num_pairs: int) -> float | None:
    """Return the ideal time (the longer of compute alone and link alone) divided by the measured time; None
    if one is not measured.
    """
    ideal_s, median_s = result.ideal_s(), result.series.median_s(variant.name)
    if ideal_s is None or median_s is None or speed_up(result, variant, num_pairs) is None:
        return None
    return ideal_s / median_s


def regret(result: RealResult) -> tuple[Variant, float] | None:
    """Return the cheapest variant by price, and its slowdown against the fastest measured one, as a share
    (0.05 if it is 5 % slower); None if a measurement is missing.
    """
    prices = result.prices()
    medians = {variant.name: result.series.median_s(variant.name) for variant in SCHEDULED}
    measured = {name: median_s for name, median_s in medians.items() if median_s is not None}
    if prices is None or len(measured) < len(medians):
        return None
    chosen = cheapest(prices, CANDIDATES)
    return chosen, measured[chosen.name] / min(measured.values()) - 1.0


def show(console: Console, result: RealResult, num_pairs: int) -> None:
    """Print a table of the variants, then the findings."""
    case = result.case
    console.print(
        f"\n[bold]EP{result.num_ranks}, {case.num_tokens} tokens a micro-batch, {case.num_layers}"
        f" layers, {case.dispatch_format} dispatched, link {result.rate_bytes_per_s / 1e6:.0f} MB/s (communication"
        f" {result.link_over_compute:g}x of computation asked for)[/bold]"
    )
    table = table_of(
        "|ms|over one full batch|of ideal|exposed wait ms|priced ms|measured/priced|clean|dropped"
    )
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
    """Return the findings as lines of text."""
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
    """Return every run's seconds and other processes' share, the prices and the findings."""
    return {
        "case": asdict(result.case),
        "link_over_compute": result.link_over_compute,
        "rate_bytes_per_s": result.rate_bytes_per_s,
        "rounds": [{name: asdict(run) for name, run in r.items()} for r in result.series.rounds],
        "priced_s": {name: price.total_s for name, price in (result.prices() or {}).items()},
        "findings": findings(result, num_pairs),
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f}"
