"""Overlap with real FP32 compute: rounds of all variants in turn, on a link of a given rate, until
enough are clean.

A round runs each way to do the step, and compute and link alone. A run in which others used more
than the gate's share of the machine is dropped and counted; a pair is one full batch and another
variant of the same round, both clean.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from bench.overlap_gate import Series, Timed, foreign_share, is_quiet, read_usage
from bench.overlap_model import ModelCase
from bench.overlap_net import Hosts
from bench.overlap_ranks import Answer, Ranks
from bench.overlap_variants import (
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
)
from hadal.perf.price import OpSeconds, Price

ALL = (*SCHEDULED, COMPUTE, LINK, COMPUTE_FULL, LINK_FULL)
SPLIT = (TWO, PREFILL, DECODE)
"""The same micro-batches: their outputs are the same bits."""
PAYLOAD_SHARE = 0.955
"""Of a limited link's rate; the rest is headers."""
CALIBRATION_RATE_BYTES_PER_S = 100e6
CALIBRATION_RUNS = 5
RUN_TIMEOUT_S = 60.0
QUIET_PAUSE_S = 1.0


@dataclass
class RealResult:
    """One model on one link."""

    case: ModelCase
    num_ranks: int
    link_over_compute: float
    """As asked for; what came of it is in the series."""
    rate_bytes_per_s: float
    num_cores: int
    series: Series = field(default_factory=Series)
    answers: dict[str, list[tuple[bool, list[Answer]]]] = field(default_factory=dict)
    """Variant -> of every run whether it was clean, and what the ranks said."""

    def clean(self, variant: Variant) -> list[list[Answer]]:
        return [answers for is_clean, answers in self.answers.get(variant.name, []) if is_clean]

    def exposed_s(self, variant: Variant) -> float | None:
        """Compute stood still for the link, of the rank that did longest; median of clean runs."""
        waits = [
            max(answer["ops"]["wait"][1] for answer in answers) for answers in self.clean(variant)
        ]
        return statistics.median(waits) if waits else None

    def ideal_s(self) -> float | None:
        """max(C, M): nobody can be faster."""
        compute_s, link_s = self.series.median_s(COMPUTE.name), self.series.median_s(LINK.name)
        return None if compute_s is None or link_s is None else max(compute_s, link_s)

    def prices(self) -> dict[str, Price] | None:
        """What perf/price says, from op times of compute alone and of the link alone; None if one
        was never clean.
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
        """Variants of the same micro-batches whose outputs are not those of the sequential one, to
        the bit.
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
    """Return (compute seconds of a step in two micro-batches, bytes the busiest rank sends in
    it).
    """
    ranks.ask({"do": "model", "case": asdict(case)}, RUN_TIMEOUT_S)
    hosts.limit(CALIBRATION_RATE_BYTES_PER_S)
    warm = ranks.run(TWO.question(), RUN_TIMEOUT_S)
    ranks.run(FULL.question(), RUN_TIMEOUT_S)
    runs = [ranks.run(COMPUTE.question(), RUN_TIMEOUT_S) for _ in range(CALIBRATION_RUNS)]
    # CPU time of the fastest: what others take away is not what the model costs.
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
    """Run rounds until `num_pairs` of prefill_dual are clean, or for `limit_s`. The order in a
    round is shuffled; one begins when the machine is quiet.
    """
    rate = step_bytes / (link_over_compute * compute_s)
    hosts.limit(rate / PAYLOAD_SHARE)
    result = RealResult(case, len(ranks), link_over_compute, rate, num_cores)
    for variant in (FULL, TWO):  # Notes what the link-only runs send.
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
