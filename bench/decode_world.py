"""A simulated decode unit of many ranks, in steps: requests arrive, grow by one token per step, and end. No tensors.

bench/balance_decode compares the placement rules of bench/decode_rules in this world. A step's time follows a
roofline of a 144-rank unit on H800 GPUs. The constants are estimates, stated here so that they can be changed:

    step_s = max_r(KV_S * kv + REQUEST_S / 2 * requests) + REQUEST_S / 2 * max_r(requests) + FIXED_S

Shapes: R ranks, S slots of a rank. KV is counted in tokens.
"""

from __future__ import annotations

import gzip
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from bench.shared_data import AZURE, MOONCAKE, find
from hadal.core.arrays import Ints
from hadal.lab.sim.plan.traces import azure
from hadal.policy.decode_moves import Move, RunningView
from hadal.policy.views import DecodeRanksView
from hadal.stats.traces import mooncake_rows

KV_S = 2.9e-8
REQUEST_S = 1.2e-4
FIXED_S = 20e-3
STALL_STEPS = 3
"""Steps for which a moved request produces no token."""
KV_FACTOR_MAX = 4
"""Limit of a rank's KV, as a multiple of the mean: high, because these runs compare balance, not memory limits.
"""


@dataclass(frozen=True)
class UnitReport:
    """Requests to draw from, as (prompt tokens, output tokens)."""

    name: str
    input_N: Ints
    output_N: Ints

    @property
    def mean_kv(self) -> float:
        """Mean KV of a running request: a long output is running for longer, so it counts more."""
        return float(
            (self.output_N * (self.input_N + self.output_N / 2)).sum() / self.output_N.sum()
        )


def r1_load(seed: int = 1, num: int = 50_000) -> UnitReport:
    """Return a reasoning load: short and long prompts, outputs of over a thousand tokens on average, about
    4.4k tokens of KV per running request.
    """
    random = np.random.default_rng(seed)
    prompts = np.clip(random.lognormal(np.log(1250), 1.3, num), 16, 65_536).astype(np.int64)
    outputs = np.clip(random.lognormal(np.log(700), 1.0, num), 8, 16_384).astype(np.int64)
    return UnitReport("r1-like", prompts, outputs)


def trace_loads() -> list[UnitReport]:
    """Return the public traces that are available."""
    loads = []
    if (path := find(MOONCAKE)) is not None:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            pairs = np.array([(row.tokens_in, row.tokens_out) for row in mooncake_rows(lines)])
        loads.append(UnitReport("mooncake-conv", *pairs[pairs[:, 1] > 0].T))
    if (path := find(AZURE)) is not None:
        read = azure(path.read_text(encoding="utf-8").splitlines())
        loads.append(UnitReport("azure-conv", read.tokens_in, read.tokens_out))
    return loads


@dataclass
class Result:
    """Sums over the measured steps."""

    num_steps: int = 0
    kv: float = 0.0
    requests: float = 0.0
    actual_s: float = 0.0
    ideal_s: float = 0.0
    num_running: float = 0.0
    num_arrived: int = 0
    num_moved: int = 0
    rule_s: list[float] = field(default_factory=list)
    """CPU seconds per placement, one entry per step."""


@dataclass
class Waiting:
    """A queued request. Rules must not read `num_output`: it is hidden state of the world."""

    num_input: int
    num_output: int


class World:
    """Slots of all ranks as arrays. `reported` is a rule's view, some steps old if loads are stale."""

    def __init__(
        self,
        load: UnitReport,
        *,
        num_ranks: int,
        num_slots: int,
        num_running: int,
        stale_steps: int,
        seed: int,
    ):
        self.load, self.num_ranks, self.num_slots = load, num_ranks, num_slots
        self.random = np.random.default_rng(seed)
        self.arrivals_per_step = num_ranks * num_running / float(load.output_N.mean())
        self.kv_max = int(KV_FACTOR_MAX * num_running * load.mean_kv)
        self.step = 0
        self.number = 0
        """Number of the last placement."""
        self.kv_R: Ints = np.zeros(num_ranks, np.int64)
        self.requests_R: Ints = np.zeros(num_ranks, np.int64)
        self.born_RS: Ints = np.zeros((num_ranks, num_slots), np.int64)
        """Step at which the request's KV would have been 0: step - born = tokens of KV."""
        self.is_running_RS = np.zeros((num_ranks, num_slots), np.bool_)
        self.end_RS: Ints = np.zeros((num_ranks, num_slots), np.int64)
        self.waiting: deque[Waiting] = deque()
        self._ends: dict[int, list[tuple[int, int]]] = {}
        self._reports: deque[tuple[Ints, Ints, int]] = deque(maxlen=stale_steps + 1)
        for index in self._first(num_ranks * num_running).tolist():
            # This request starts in the middle of its run: one part of its output exists, the other
            # part follows.
            num_done = int(self.random.integers(0, load.output_N[index]))
            self.waiting.append(
                Waiting(int(load.input_N[index]) + num_done, int(load.output_N[index]) - num_done)
            )

    def _first(self, num: int) -> Ints:
        share = self.load.output_N / self.load.output_N.sum()
        return self.random.choice(self.load.output_N.size, num, p=share)

    def arrive(self) -> None:
        for index in self.random.integers(
            0, self.load.output_N.size, self.random.poisson(self.arrivals_per_step)
        ):
            self.waiting.append(
                Waiting(int(self.load.input_N[index]), int(self.load.output_N[index]))
            )

    @property
    def reported(self) -> tuple[DecodeRanksView, int]:
        """The reported loads, and the number of the last placement that they include."""
        kv_R, requests_R, number = (
            self._reports[0] if self._reports else (self.kv_R, self.requests_R, self.number)
        )
        return self._view(kv_R, requests_R), number

    @property
    def exact(self) -> DecodeRanksView:
        return self._view(self.kv_R, self.requests_R)

    def _view(self, kv_R: Ints, requests_R: Ints) -> DecodeRanksView:
        size = self.num_ranks
        return DecodeRanksView(
            np.arange(size),
            np.full(size, self.kv_max),
            kv_R,
            kv_R,
            requests_R,
            np.full(size, self.num_slots),
        )

    def report(self) -> None:
        self._reports.append((self.kv_R.copy(), self.requests_R.copy(), self.number))

    def seat(self, rank: int, waiting: Waiting) -> None:
        slot = int(np.flatnonzero(~self.is_running_RS[rank])[0])
        self._put(rank, slot, waiting.num_input, self.step + waiting.num_output)
        self.number += 1

    def _put(self, rank: int, slot: int, num_kv: int, end: int) -> None:
        self.is_running_RS[rank, slot] = True
        self.born_RS[rank, slot] = self.step - num_kv
        self.end_RS[rank, slot] = end
        self._ends.setdefault(end, []).append((rank, slot))
        self.kv_R[rank] += num_kv
        self.requests_R[rank] += 1

    def _take(self, rank: int, slot: int) -> int:
        num_kv = self.step - int(self.born_RS[rank, slot])
        self.is_running_RS[rank, slot] = False
        self.kv_R[rank] -= num_kv
        self.requests_R[rank] -= 1
        return num_kv

    def movable(self) -> RunningView:
        kv_RS = np.where(self.is_running_RS, self.step - self.born_RS, 0)
        return RunningView(kv_RS, kv_RS)

    def move(self, move: Move) -> None:
        """Move a request to another rank. It ends STALL_STEPS steps later than without the move."""
        end = int(self.end_RS[move.from_rank, move.slot])
        num_kv = self._take(move.from_rank, move.slot)
        self._ends[end].remove((move.from_rank, move.slot))
        slot = int(np.flatnonzero(~self.is_running_RS[move.to_rank])[0])
        self._put(move.to_rank, slot, num_kv, end + STALL_STEPS)

    def run_step(self, result: Result | None) -> None:
        """Run one step on all ranks together, and measure the balance of the computed loads."""
        if result is not None and self.requests_R.any():
            kv_R, requests_R = self.kv_R, self.requests_R
            result.num_steps += 1
            result.kv += float(kv_R.mean() / kv_R.max())
            result.requests += float(requests_R.mean() / requests_R.max())
            result.actual_s += float((KV_S * kv_R + REQUEST_S / 2 * requests_R).max())
            result.actual_s += REQUEST_S / 2 * float(requests_R.max()) + FIXED_S
            result.ideal_s += (
                KV_S * float(kv_R.mean()) + REQUEST_S * float(requests_R.mean()) + FIXED_S
            )
            result.num_running += float(requests_R.mean())
        self.kv_R += self.requests_R
        self.step += 1
        for rank, slot in self._ends.pop(self.step, ()):
            self._take(rank, slot)

    def check(self) -> None:
        kv_RS = np.where(self.is_running_RS, self.step - self.born_RS, 0)
        assert (kv_RS.sum(axis=1) == self.kv_R).all(), "KV does not add up"
        assert (self.is_running_RS.sum(axis=1) == self.requests_R).all(), "requests do not add up"


Rule = Callable[[World, list[Waiting]], list[int]]
"""Function that returns ranks for the first waiting requests; the others stay queued."""
