"""Prefill and decode units as vessels: requests are a fluid that flows in, is processed, and flows
out.

    arrivals -> prefill queue -> decode queue -> N requests on each decode unit -> finished
                     ^______________ given back: a drain's deadline, a unit that died

A decode unit with N requests gives each a token every tpot(N / ranks) seconds. So requests leave at
a rate of N / (tokens of a request x tpot) (Little's law). Over a step with an even inflow

    N(t + dt) = N_inf + (N - N_inf) e^(-dt / tau),   tau = tokens of a request x tpot,   N_inf = inflow x tau

The outflow is the inflow less the increase of N, so rounding loses no requests. A request that is
given back has on average as many tokens left as a new one, because lengths are assumed exponential.

Does not depend on the fleet or the hour of the day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hadal.core.arrays import Floats

Tpot = Callable[[Floats], Floats]
"""Function: requests of a rank -> seconds per output token of each. Increasing."""


@dataclass(frozen=True)
class UnitModel:
    """Throughput of units, priced by a step model or measured."""

    prefill_tokens_per_s: float
    """Prompt tokens/s of a prefill unit, cached tokens included."""
    decode_ranks: int
    """Ranks of a decode unit."""
    tpot_s: Tpot
    batch_max: float
    """Maximum number of requests of a decode rank, limited by memory or by slots."""


@dataclass
class Engine:
    """All units that are up, with their contents in requests. Steps may have any length."""

    model: UnitModel
    tokens_in_request: float
    tokens_out_request: float
    prefill_units: dict[str, bool] = field(default_factory=dict)
    """Prefill units that are up -> True if new requests may go there."""
    decode_units: dict[str, bool] = field(default_factory=dict)
    """Decode units that are up -> True if new requests may go there."""
    held: dict[str, float] = field(default_factory=dict)
    """Decode unit -> number of its requests."""
    num_arrived: float = 0.0
    num_prefilled: float = 0.0
    num_returned: float = 0.0
    num_finished: float = 0.0
    prefill_queue: float = 0.0
    decode_queue: float = 0.0
    held_s: float = 0.0
    """Sum over requests of their seconds on decode units."""

    @property
    def tokens_out(self) -> float:
        """Output tokens so far: finished requests times their mean length."""
        return self.num_finished * self.tokens_out_request

    def up(self, unit: str, *, is_decode: bool) -> None:
        """Add an empty unit."""
        (self.decode_units if is_decode else self.prefill_units)[unit] = True
        if is_decode:
            self.held[unit] = 0.0

    def down(self, unit: str) -> None:
        """Remove a unit that ended or died; its requests go back to the prefill queue."""
        self.prefill_units.pop(unit, None)
        if self.decode_units.pop(unit, None) is not None:
            self.give_back(unit)
            del self.held[unit]

    def give_back(self, unit: str) -> None:
        """Move all requests of a decode unit back to the prefill queue."""
        self.num_returned += self.held[unit]
        self.prefill_queue += self.held[unit]
        self.held[unit] = 0.0

    def open(self, unit: str, is_open: bool) -> None:
        """Allow or forbid new requests on a unit that is up."""
        for units in (self.prefill_units, self.decode_units):
            if unit in units:
                units[unit] = is_open

    def step(self, num_new: float, step_s: float) -> None:
        """Advance by one step in which `num_new` requests arrive evenly."""
        self.num_arrived += num_new
        self.prefill_queue += num_new
        num_units = sum(self.prefill_units.values())
        most = num_units * self.model.prefill_tokens_per_s * step_s / self.tokens_in_request
        num_done = min(self.prefill_queue, most)
        self.prefill_queue -= num_done
        self.num_prefilled += num_done
        self.decode_queue += num_done
        if self.decode_units:
            self._decode(step_s)

    def _decode(self, step_s: float) -> None:
        """Advance all decode units by one step. Arrays are [units]."""
        held = np.array([self.held[unit] for unit in self.decode_units])
        is_open = np.array(list(self.decode_units.values()))
        num_ranks = self.model.decode_ranks
        guess = held
        for _ in range(3):  # tau depends on the step's mean batch: fixed-point iteration.
            batch = np.minimum(0.5 * (held + guess) / num_ranks, self.model.batch_max)
            tau_s = self.tokens_out_request * self.model.tpot_s(batch)
            stay = np.exp(-step_s / tau_s)
            # Share of the inflow that is still on the unit at the end of the step.
            per_request = tau_s / step_s * (1.0 - stay)
            room = (
                np.maximum(0.0, (self.model.batch_max * num_ranks - held * stay) / per_request)
                * is_open
            )
            inflow = _level(held * stay, per_request, room, self.decode_queue)
            guess = held * stay + inflow * per_request
        self.decode_queue = max(0.0, self.decode_queue - float(inflow.sum()))
        out = held + inflow - guess
        self.num_finished += float(out.sum())
        # N = rate of leaving x tau, so the integral of N over the step is the outflow x tau.
        self.held_s += float((out * tau_s).sum())
        self.held.update(zip(self.decode_units, guess.tolist(), strict=True))


def _level(bottom: Floats, per_request: Floats, room: Floats, num_requests: float) -> Floats:
    """Pour requests into vessels so that they end up equally full, because the front always chooses
    the emptiest unit.

    Args:
        bottom: [units] earlier requests that are left at the end of the step.
        per_request: [units] share of the inflow that is left at the end of the step.
        room: [units] largest inflow.

    Returns:
        [units] inflow; its sum is `num_requests`, or the sum of `room` if that is less.
    """
    if num_requests >= room.sum():
        return room
    # The poured volume is piecewise linear in the level: a vessel's piece begins at its bottom and
    # ends when it is full.
    levels = np.concatenate([bottom, bottom + room * per_request])
    order = np.argsort(levels)
    slopes = np.cumsum(np.concatenate([1.0 / per_request, -1.0 / per_request])[order])
    levels = levels[order]
    poured = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(levels))])
    level = float(np.interp(num_requests, poured, levels))
    inflow = np.clip((level - bottom) / per_request, 0.0, room)
    total = float(inflow.sum())
    return inflow * (num_requests / total) if total > 0.0 else inflow
