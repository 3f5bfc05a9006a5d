"""One stream of a world, and the tokens that it must receive."""

from __future__ import annotations

from dataclasses import dataclass, field

from hadal.core.messages.generation import Deliver, Generation
from tests.sim.engine import expected_output


@dataclass
class Client:
    """One stream, and the tokens that it must receive."""

    generation: Generation
    longest: int
    """Maximum number of output tokens that fit in the context and the units."""
    expected: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    final: Deliver | None = None
    is_lost: bool = False
    """True if the front that served the stream died, which broke the stream."""

    def take(self, effect: Deliver) -> None:
        assert self.final is None, f"{effect.request_id}: something came after the end"
        if not self.expected:
            self.expected = expected_output(self.generation)[: self.longest]
        for token in effect.tokens:
            name = f"{effect.request_id}[{token.index}]"
            assert token.index == len(self.received), f"{name} came, {len(self.received)} was next"
            assert token.token == self.expected[token.index], f"{name} is wrong"
            is_last = token.index + 1 == len(self.expected)
            assert (token.finish is not None) == is_last, f"{name}: finish is {token.finish}"
            stops = (
                token.token in self.generation.stop_ids
                and token.index >= self.generation.min_tokens
            )
            assert not is_last or token.finish == ("stop" if stops else "length"), (
                f"{name}: finish is {token.finish}"
            )
            wants_logprob = self.generation.sampling.num_logprobs >= 0
            assert (token.logprob is not None) == wants_logprob, (
                f"{name}: logprob is {token.logprob}"
            )
            self.received.append(token.token)
        if effect.final:
            self.final = effect
            assert effect.error is not None or len(self.received) == len(self.expected), (
                f"{effect.request_id} is cut"
            )
