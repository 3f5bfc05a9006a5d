"""Warm start: a stand-in prefill unit for requests that ran before a simulated world began.

    0 hops         decode units are up, and this unit instead of the prefill units
    SUBMIT_HOPS    these requests enter through the front, a batch per hop; it chooses decode units;
                   this unit answers immediately: the next token, and a lease on KV, pulled in one message's time
    PLACED_HOPS    later this unit is down and the prefill units are up; they prefill later arrivals

So the front and the decode leaders place these requests as any others. If they fit into one batch
(lab/sim/world/arrivals), no step runs with only some of them. Their KV existed before, so their
prefill takes no unit's time. Uses the messages of a prefill leader; has no ranks.
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
"""Name of the unit and of its pool."""
SUBMIT_HOPS = 2
"""Hops before requests are submitted; a hop is the time from sending a message until a role acts on
it. The UnitUp of this unit takes one hop, so the front has it by then.
"""
PLACED_HOPS = 6
"""Hops, rounded up, from submission until a request runs: to this unit, to the front, to decode, a
pull, and to the front again.
"""
_ENDLESS = 1 << 40


class WarmUnit:
    """Role of the warm unit. `output_tokens`: request number -> length of its output."""

    def __init__(self, output_tokens: Callable[[int], int]) -> None:
        self._output_tokens = output_tokens

    def start(self, now_s: float) -> list[Effect]:
        """Report to the front that this unit is up, with endless capacity."""
        return [Send("front", UnitUp(WARM, PREFILL, WARM, _ENDLESS, _ENDLESS))]

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Answer prompts immediately. This unit owns no blocks, so it ignores Release. Raises
        InvariantError for events other than Prefill, FrontUp, Release and Tick.
        """
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
                    raise InvariantError(f"{WARM} cannot handle {type(event).__name__}")
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
