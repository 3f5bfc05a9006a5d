"""How requests that ran before a simulated world began come to run in it: a unit that has prefilled
them all.

    0 hops         decode units up, and this one instead of those of prefill
    SUBMIT_HOPS    all of them enter through the front, which chooses their decode units
                   this one answers at once: the next token, and a lease on KV that takes no time to pull
    PLACED_HOPS    later this one is down, and prefill's units are up; later arrivals are prefilled by them

So front and decode leaders place them as they would place any others, together, and no step has
only some of them. The KV of each was there before; its prefill takes no unit's time. Knows the
messages of a prefill leader and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from hadal.core.config import PREFILL
from hadal.core.errors import InvariantError
from hadal.core.messages.generation import Generation, Token
from hadal.core.messages.units import FrontUp, KvLease, Prefill, PrefillDone, Release, UnitUp
from hadal.core.seams import Effect, Event, Send, Tick
from hadal.kv.blocks import blocks_for
from hadal.lab.sim.runners import STOP_ID, WORD_ID
from hadal.roles.unit.tokens import finish_of

WARM = "prefill-warm"
"""The unit's name, and that of its pool."""
SUBMIT_HOPS = 2
"""A hop: what a message takes until somebody looks at it. This unit's word that it is up has one to
go.
"""
PLACED_HOPS = 6
"""Messages until a placed request runs: to this unit, to the front, to decode, a pull, and to the
front again.
"""
_ENDLESS = 1 << 40


class WarmUnit:
    """`output_tokens`: request number -> length of its output."""

    def __init__(self, output_tokens: Callable[[int], int]) -> None:
        self._output_tokens = output_tokens

    def start(self, now_s: float) -> list[Effect]:
        """Be up."""
        return [Send("front", UnitUp(WARM, PREFILL, WARM, _ENDLESS, _ENDLESS))]

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Answer prompts; nothing is held, so nothing need be released."""
        out: list[Effect] = []
        for event in events:
            match event:
                case Prefill(generation):
                    out.append(Send("front", self._done(generation)))
                case FrontUp():
                    out += self.start(now_s)
                case Release() | Tick():
                    pass
                case _:
                    raise InvariantError(f"{WARM} cannot take {type(event).__name__}")
        return out

    def _done(self, generation: Generation) -> PrefillDone:
        index = len(generation.output)
        num_tokens = len(generation.prompt) + index
        is_last = index + 1 >= self._output_tokens(generation.sampling.seed)
        value = STOP_ID if is_last else WORD_ID
        finish = finish_of(generation, index, value)
        blocks = (0,) * blocks_for(num_tokens)
        lease = None if finish is not None else KvLease(WARM, blocks, blocks, num_tokens)
        token = Token(generation.request_id, generation.attempt, index, value, finish)
        return PrefillDone(WARM, token, lease, num_tokens)
