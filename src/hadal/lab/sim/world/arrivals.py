"""Submission of a simulated world's requests to its front (router): first requests that run at the
start, in batches; then all others at their arrival times.

The front is a function that takes submitted requests. Does not depend on units.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.requests import Submit
from hadal.lab.sim.slot_drafts import Ints
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.process import HOP_S
from hadal.lab.sim.world.requests import Requests
from hadal.lab.sim.world.warm import PLACED_HOPS, SUBMIT_HOPS


class Arrivals:
    """Users of a world. `submit`: passes requests to the front without delay.

    `blocks_N`: number of leading blocks of each request on disk, updated by the disk. `stores`:
    True if all full blocks of a prompt get names, so that they can be written.
    """

    def __init__(
        self,
        clock: SimClock,
        requests: Requests,
        blocks_N: Ints,
        submit: Callable[..., None],
        max_context: int,
        *,
        stores: bool,
    ) -> None:
        self._clock = clock
        self._requests = requests
        self._blocks_N = blocks_N
        self._submit_to = submit
        self._max_context = max_context
        self._stores = stores
        self._numbers = np.flatnonzero(~requests.is_running)
        """Numbers of the requests that arrive after the start, in the order of arrival."""
        self._next = 0
        """Index in `_numbers` of the next arrival."""

    def begin(self) -> None:
        """Submit requests as they arrive, from now on."""
        if self._numbers.size:
            # Before all units have reported to the front, the first ones would get all requests.
            up_s = self._clock.now() + SUBMIT_HOPS * HOP_S
            self._clock.at(max(up_s, self._next_s()), self._submit_next)

    def submit_running(self, most: int) -> float:
        """Submit the requests that run at the start in batches of `most`, so that a queue is
        processed once per batch instead of once per request. Return the time at which all run.
        """
        numbers, at_s = np.flatnonzero(self._requests.is_running).tolist(), 0.0
        for batch, first in enumerate(range(0, len(numbers), most)):
            at_s = (SUBMIT_HOPS + batch) * HOP_S
            self._clock.at(at_s, partial(self._submit, numbers[first : first + most]))
        return at_s + PLACED_HOPS * HOP_S

    def _submit_next(self) -> None:
        number = int(self._numbers[self._next])
        self._next += 1
        self._submit([number])
        if self._next < self._numbers.size:
            self._clock.at(self._next_s(), self._submit_next)

    def _next_s(self) -> float:
        return float(self._requests.arrival_s[self._numbers[self._next]])

    def _submit(self, numbers: list[int]) -> None:
        self._submit_to(*(self._submitted(number) for number in numbers))

    def _submitted(self, number: int) -> Submit:
        num_blocks = int(self._blocks_N[number])
        if self._stores:  # Blocks can be written only if they have names.
            num_blocks = max(num_blocks, int(self._requests.tokens_in[number]) // BLOCK_TOKENS)
        return Submit(self._requests.generation(number, self._max_context, num_blocks))
