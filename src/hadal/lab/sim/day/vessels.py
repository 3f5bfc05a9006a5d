"""Prefill and decode units as vessels: requests are a fluid, which flows in, is worked on and
flows out.

    arrivals -> prefill queue -> decode queue -> N requests on each decode unit -> finished
                     ^______________ given back: a drain's deadline, a unit that died

A decode unit with N requests gives each a token every tpot(N / ranks) seconds, so they leave at N
/ (tokens of one x tpot) (Little's law), and over a step with an even inflow

    N(t + dt) = N_inf + (N - N_inf) e^(-dt / tau),   tau = tokens of a request x tpot,   N_inf = inflow x tau

What flows out is what flowed in less what stayed, so that nothing is lost by rounding. A request
that is given back has on average as much before it as a new one: lengths are taken to be
exponential.

Knows no fleet and no hour of the day.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hadal.core.arrays import Floats

Tpot = Callable[[Floats], Floats]
"""Requests of a rank -> seconds per output token of each. Rises."""


@dataclass(frozen=True)
class UnitModel:
    """What units do, as a step model prices it or as it was measured."""

    prefill_tokens_per_s: float
    """Tokens/s of a prefill unit, prompt tokens out of a cache among them."""
    decode_ranks: int
    """Ranks of a decode unit."""
    tpot_s: Tpot
    batch_max: float
    """Requests of a decode rank, at most: by memory, or by slots."""


@dataclass
class Engine:
    """All units that are up, and what is in them, in requests. Times are steps of any length."""

    model: UnitModel
    tokens_in_request: float
    tokens_out_request: float
    prefill_units: dict[str, bool] = field(default_factory=dict)
    """Up: whether new requests may go there."""
    decode_units: dict[str, bool] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    """Requests on each decode unit."""
    num_arrived: float = 0.0
    num_prefilled: float = 0.0
    num_returned: float = 0.0
    num_finished: float = 0.0
    prefill_queue: float = 0.0
    decode_queue: float = 0.0
    held_s: float = 0.0
    """Seconds that requests were on decode units, summed."""

    @property
    def tokens_out(self) -> float:
        """All output tokens so far of those that have finished (lengths are exponential)."""
        return self.num_finished * self.tokens_out_request

    def up(self, unit: str, *, is_decode: bool) -> None:
        """A unit begins to work, empty."""
        (self.decode_units if is_decode else self.prefill_units)[unit] = True
        if is_decode:
            self.held[unit] = 0.0

    def down(self, unit: str) -> None:
        """A unit ends, or dies: what is on it goes back to the prefill queue."""
        self.prefill_units.pop(unit, None)
        if self.decode_units.pop(unit, None) is not None:
            self.give_back(unit)
            del self.held[unit]

    def give_back(self, unit: str) -> None:
        """All on this decode unit is prefilled again elsewhere."""
        self.num_returned += self.held[unit]
        self.prefill_queue += self.held[unit]
        self.held[unit] = 0.0

    def open(self, unit: str, is_open: bool) -> None:
        """New requests may, or may not, go to a unit that is up."""
        for units in (self.prefill_units, self.decode_units):
            if unit in units:
                units[unit] = is_open

    def step(self, num_new: float, step_s: float) -> None:
        """`num_new` requests come, evenly over the step."""
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
        """One step of all decode units. Arrays are [units]."""
        held = np.array([self.held[unit] for unit in self.decode_units])
        is_open = np.array(list(self.decode_units.values()))
        num_ranks = self.model.decode_ranks
        guess = held
        for _ in range(3):  # tau is that of the step's mean batch, which is found by looking again.
            batch = np.minimum(0.5 * (held + guess) / num_ranks, self.model.batch_max)
            tau_s = self.tokens_out_request * self.model.tpot_s(batch)
            stay = np.exp(-step_s / tau_s)
            per_request = (
                tau_s / step_s * (1.0 - stay)
            )  # Of what flows in, so much is there at the end.
            room = (
                np.maximum(0.0, (self.model.batch_max * num_ranks - held * stay) / per_request)
                * is_open
            )
            inflow = _level(held * stay, per_request, room, self.decode_queue)
            guess = held * stay + inflow * per_request
        self.decode_queue = max(0.0, self.decode_queue - float(inflow.sum()))
        out = held + inflow - guess
        self.num_finished += float(out.sum())
        # N is the rate of leaving times tau: its integral over the step is what left, times tau.
        self.held_s += float((out * tau_s).sum())
        self.held.update(zip(self.decode_units, guess.tolist(), strict=True))


def _level(bottom: Floats, per_request: Floats, room: Floats, num_requests: float) -> Floats:
    """Pour requests into vessels so that they end up equally full (the front chooses the emptier
    unit each time).

    Args:
        bottom: [units] what is there already at the end of the step.
        per_request: [units] what of one that flows in is there at the end.
        room: [units] what flows in at most.

    Returns:
        [units] what flows in; the sum is `num_requests`, or all the room if that is less.
    """
    if num_requests >= room.sum():
        return room
    # What is poured rises with the level in straight pieces: a vessel begins to take at its bottom
    # and ends when full.
    levels = np.concatenate([bottom, bottom + room * per_request])
    order = np.argsort(levels)
    slopes = np.cumsum(np.concatenate([1.0 / per_request, -1.0 / per_request])[order])
    levels = levels[order]
    poured = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(levels))])
    level = float(np.interp(num_requests, poured, levels))
    inflow = np.clip((level - bottom) / per_request, 0.0, room)
    total = float(inflow.sum())
    return inflow * (num_requests / total) if total > 0.0 else inflow
