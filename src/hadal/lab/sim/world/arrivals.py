"""Requests of a simulated world on their way into its front: those that ran before together at the
start, the others at their times.

Knows the front as a function that takes submitted requests, and no units.
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
    """Users of a world. `submit`: hands requests to the front at once.

    `blocks_N`: blocks of each request that are on disk; the disk changes them. `stores`: blocks of
    the whole prompt have names, so that they can be written.
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
        """Requests that arrive, in their order."""
        self._next = 0
        """Index of the next of those."""

    def begin(self) -> None:
        """Submit requests as they arrive, from now on."""
        if self._numbers.size:
            # Earlier, all that wait would go to the unit whose word that it is up comes first.
            up_s = self._clock.now() + SUBMIT_HOPS * HOP_S
            self._clock.at(max(up_s, self._next_s()), self._submit_next)

    def submit_running(self, most: int) -> float:
        """Submit the requests that run at the start, `most` at once, so that the queue behind each
        is looked at once a batch. Return the time at which all of them run.
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
        if self._stores:  # Names of what can be written, too.
            num_blocks = max(num_blocks, int(self._requests.tokens_in[number]) // BLOCK_TOKENS)
        return Submit(self._requests.generation(number, self._max_context, num_blocks))
