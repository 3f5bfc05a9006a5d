"""Records of a simulated world, and their sums over an interval of time.

Events are recorded one by one and summed afterwards, so any interval can be read. A step that lies
partly inside counts for that part. Values are plain arrays and can be pickled. Does not depend on
roles or clocks.

Shapes: N requests, K steps, R ranks of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats, Ints
from hadal.core.config import DECODE, PREFILL
from hadal.lab.sim.runners import StepWork
from hadal.lab.sim.world.requests import Requests

TPOT_TOKENS = 20
"""Minimum number of tokens generated in this world for a request's TPOT: fewer are too noisy."""


@dataclass(frozen=True)
class Seen:
    """Outcome of each request, arrays [N]. A time is NaN if it has not been reached."""

    first_token_s: Floats
    """Time of each first token. For a request that ran at the start: its first in this world."""
    end_s: Floats
    is_failed: NDArray[np.bool_]
    tokens_hit: Ints
    """Cached prompt tokens: they were not computed for the first token."""


def nothing_seen(size: int) -> Seen:
    """Return the record of `size` requests before anything happened."""
    return Seen(
        np.full(size, np.nan),
        np.full(size, np.nan),
        np.zeros(size, np.bool_),
        np.zeros(size, np.int64),
    )


@dataclass
class WorldLog:
    """Log that is written while a world runs."""

    steps: dict[str, list[tuple[str, float, float, StepWork]]] = field(
        default_factory=lambda: {PREFILL: [], DECODE: []}
    )
    """Steps of each role, in the order in which they began: (unit, begin, seconds, work)."""
    prefill_ranks: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)
    """(tokens [R], (token, position) pairs [R]) of each prefill step, in the order of `steps`."""
    reads: list[tuple[float, float, float, int, int]] = field(default_factory=list)
    """Disk reads in the order of request: (requested, begin, end, tokens wanted, tokens read)."""
    writes: list[tuple[float, float, int]] = field(default_factory=list)
    """Disk writes: (time of request, end, tokens)."""
    ranks: list[tuple[float, str, Floats, Floats]] = field(default_factory=list)
    """Samples: (time, decode unit, used share of each rank's blocks [R], requests per rank [R])."""


@dataclass(frozen=True)
class StepReading:
    """Steps of one role's units. An imbalance is maximum over mean of a unit's ranks, averaged over
    busy time.
    """

    num_steps: float
    tokens: float
    """Prefill: tokens computed. Decode: output tokens, without first tokens."""
    positions: float
    """Prefill: (token, position) pairs. Decode: sum of KV lengths over new tokens."""
    busy_share: float
    """Share of the units' time that is busy with steps."""
    step_s: float
    """Mean duration of a step, seconds."""
    token_s: float
    """Mean time per token of a request, weighted by tokens, seconds. Meaningful for decode only."""
    requests_per_rank: float
    """Decode: requests per rank. Prefill: chunks of a step per rank. Mean over busy time."""
    tokens_imbalance: float
    """Prefill: imbalance of tokens. Decode: imbalance of requests."""
    positions_imbalance: float
    expert_imbalance: float
    two_micro_batches_share: float
    """Share of busy time with two micro-batches."""
    seconds_K: Floats
    """Seconds of each step that lies at least partly in the interval. For decode, divided by the
    mean tokens that a request got in the step: the time per token.
    """
    tokens_K: Floats
    """Tokens of each step's part in the interval: weights of `seconds_K` for quantiles by token."""

    @property
    def positions_per_token(self) -> float:
        """Decode: mean KV length per output token."""
        return self.positions / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Reading:
    """Sums and means over [begin_s, end_s)."""

    begin_s: float
    end_s: float
    prefill: StepReading
    decode: StepReading
    num_arrived: int
    tokens_arrived: int
    """Prompt tokens of the requests that arrived."""
    num_ended: int
    num_failed: int
    ttft_s: Floats
    """TTFT of requests with their first token in the interval, if not running at the start."""
    tpot_s: Floats
    """Mean time per token of each request that ended in the interval without failing, if it had at
    least TPOT_TOKENS to generate in this world.
    """
    tokens_in: int
    """Prompt tokens of the requests in `ttft_s`."""
    tokens_hit: int
    """Cached (not computed) prompt tokens of the requests in `ttft_s`."""
    disk_tokens: int
    """Tokens of disk reads that ended in the interval. Requests placed at the start read none."""
    disk_wait_s: float
    """Mean time that a read was queued behind others, seconds."""
    disk_read_s: float
    """Mean time from the request of a read to its end, seconds."""
    disk_tokens_written: int
    kv_share: Mapping[str, Floats]
    """Decode unit -> used share of each rank's blocks, mean of the samples [R]."""
    requests: Mapping[str, Floats]
    """Decode unit -> requests of each rank, mean of the samples [R]."""
    prefill_tokens: Mapping[str, Floats]
    """Prefill unit -> tokens that each rank computed [R]."""
    prefill_pairs: Mapping[str, Floats]
    """Prefill unit -> (token, position) pairs of each rank's core attention [R]."""


def read(
    begin_s: float,
    end_s: float,
    log: WorldLog,
    seen: Seen,
    requests: Requests,
    num_units: Mapping[str, int],
    num_ranks: Mapping[str, int],
) -> Reading:
    """Sum up the records of [begin_s, end_s). Raises ValueError if the interval is empty."""
    if not begin_s < end_s:
        raise ValueError(f"the interval [{begin_s}, {end_s}) is empty.")

    def inside(time_s: Floats) -> NDArray[np.bool_]:
        return (time_s >= begin_s) & (time_s < end_s)

    is_running, arrival_s = requests.is_running, requests.arrival_s
    first = inside(seen.first_token_s) & ~is_running
    arrived, ended = inside(arrival_s) & ~is_running, inside(seen.end_s)
    tokens_left = requests.tokens_out - requests.tokens_done
    paced = ended & ~seen.is_failed & (tokens_left >= TPOT_TOKENS)
    steps = {
        role: _read_steps(role, log.steps[role], begin_s, end_s, num_units[role], num_ranks[role])
        for role in (PREFILL, DECODE)
    }
    samples = [one for one in log.ranks if begin_s <= one[0] < end_s]
    prefill_tokens, prefill_pairs = _rank_sums(log, begin_s, end_s)
    reads = [one for one in log.reads if begin_s <= one[2] < end_s]
    return Reading(
        begin_s,
        end_s,
        steps[PREFILL],
        steps[DECODE],
        num_arrived=int(arrived.sum()),
        tokens_arrived=int(requests.tokens_in[arrived].sum()),
        num_ended=int(ended.sum()),
        num_failed=int((ended & seen.is_failed).sum()),
        ttft_s=(seen.first_token_s - arrival_s)[first],
        tpot_s=(seen.end_s - seen.first_token_s)[paced] / (tokens_left[paced] - 1),
        tokens_in=int(requests.tokens_in[first].sum()),
        tokens_hit=int(seen.tokens_hit[first].sum()),
        disk_tokens=sum(one[4] for one in reads),
        disk_wait_s=float(np.mean([one[1] - one[0] for one in reads])) if reads else 0.0,
        disk_read_s=float(np.mean([one[2] - one[0] for one in reads])) if reads else 0.0,
        disk_tokens_written=sum(
            tokens for _, at_s, tokens in log.writes if begin_s <= at_s < end_s
        ),
        kv_share=_means([one[1:3] for one in samples]),
        requests=_means([(one[1], one[3]) for one in samples]),
        prefill_tokens=prefill_tokens,
        prefill_pairs=prefill_pairs,
    )


def _means(samples: Sequence[tuple[str, Floats]]) -> dict[str, Floats]:
    by_unit: dict[str, list[Floats]] = {}
    for unit, of_ranks in samples:
        by_unit.setdefault(unit, []).append(of_ranks)
    return {unit: np.mean(some, axis=0) for unit, some in sorted(by_unit.items())}


def part_inside(
    at_s: Floats | float, seconds: Floats | float, begin_s: float, end_s: float
) -> Floats:
    """Return the share of each step (from `at_s`, for `seconds`) within [begin_s, end_s)."""
    inside_s = np.minimum(np.add(at_s, seconds), end_s) - np.maximum(at_s, begin_s)
    return np.asarray(np.maximum(inside_s, 0.0) / seconds)


def _rank_sums(
    log: WorldLog, begin_s: float, end_s: float
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Return prefill unit -> tokens [R], unit -> pairs [R]; a step counts for its part inside."""
    tokens: dict[str, Floats] = {}
    pairs: dict[str, Floats] = {}
    for (unit, at_s, seconds, _), of_ranks in zip(
        log.steps[PREFILL], log.prefill_ranks, strict=True
    ):
        part = float(part_inside(at_s, seconds, begin_s, end_s))
        if part > 0.0:
            for found, amounts in zip((tokens, pairs), of_ranks, strict=True):
                found[unit] = found.get(unit, 0.0) + part * np.asarray(amounts, np.float64)
    return dict(sorted(tokens.items())), dict(sorted(pairs.items()))


def _read_steps(
    role: str,
    steps: Sequence[tuple[str, float, float, StepWork]],
    begin_s: float,
    end_s: float,
    num_units: int,
    num_ranks: int,
) -> StepReading:
    inside = [one for one in steps if one[1] < end_s and one[1] + one[2] > begin_s]
    if not inside:
        return StepReading(*(0.0,) * 7, 1.0, 1.0, 1.0, 0.0, np.zeros(0), np.zeros(0))
    at_s, seconds = (np.array([one[column] for one in inside]) for column in (1, 2))
    work = np.array([one[3] for one in inside], np.float64)
    tokens, positions, texts, most_tokens, most_positions, imbalance, num_micro_batches, _ = work.T
    part = part_inside(at_s, seconds, begin_s, end_s)
    part_s = part * seconds
    made = tokens * part
    # Decode balances its ranks by requests, so their imbalance does not count tokens.
    amounts, num_each = tokens, np.ones(len(tokens))
    if role == DECODE:
        amounts, num_each = texts, np.maximum(tokens, 1.0) / np.maximum(texts, 1.0)
    each_s = seconds / num_each

    def over_mean(most: Floats, amount: Floats) -> float:
        has = amount > 0.0
        return (
            float(np.average(most[has] * num_ranks / amount[has], weights=part_s[has]))
            if has.any()
            else 1.0
        )

    return StepReading(
        num_steps=float(part.sum()),
        tokens=float(made.sum()),
        positions=float((positions * num_each * part).sum()),
        busy_share=float(part_s.sum()) / ((end_s - begin_s) * num_units),
        step_s=float(part_s.sum() / part.sum()),
        token_s=float(np.average(each_s, weights=made)) if made.any() else 0.0,
        requests_per_rank=float(np.average(texts, weights=part_s)) / num_ranks,
        tokens_imbalance=over_mean(most_tokens, amounts),
        positions_imbalance=over_mean(most_positions, positions),
        expert_imbalance=float(np.average(imbalance, weights=part_s)),
        two_micro_batches_share=float(np.average(num_micro_batches > 1, weights=part_s)),
        seconds_K=each_s,
        tokens_K=made,
    )


def quantiles(values: Floats, at: Sequence[float], weights: Floats | None = None) -> list[float]:
    """Return the quantiles `at` (0 to 1) of the values. Raises ValueError if there are none."""
    if not len(values):
        raise ValueError("quantiles need at least one value.")
    order = np.argsort(values)
    below = np.cumsum(np.ones(len(values)) if weights is None else weights[order])
    rows = np.minimum(np.searchsorted(below, np.asarray(at) * below[-1]), len(order) - 1)
    return [float(value) for value in values[order[rows]]]
