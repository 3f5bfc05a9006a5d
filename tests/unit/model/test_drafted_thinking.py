"""Speculative tokens, reasoning and grammars together: wherever `</think>` falls among the drafts of a
step, the tokens are those without drafts, and every reply is valid.

A stand-in for the MTP module's drafts proposes the tokens of the reply without drafts, and changes
some. Requests go through the service, as a client's do; runner, sampler and grammars are real.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest

from hadal.core.arrays import Ints
from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Token
from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.desk.service import Choice, Service, read_served_model
from hadal.model.drafts import Drafter
from hadal.model.load import AS_STORED, load_weights
from hadal.reference.params import ModelWeights
from hadal.roles.front.names import FrontNames
from hadal.runtime.resolve import model_folder
from tests.levels import MORE
from tests.schemas import closed

from .test_drafts import Unit

MAX_TOKENS = 200
NUM_DRAFTS = (1, 2, 3)
THING = closed(kind={"enum": ["a", "b"]}, size={"type": "integer", "minimum": 0, "maximum": 99})
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": THING, "strict": True}}
TOOL = {"type": "function", "function": {"name": "note", "parameters": THING, "strict": True}}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": SCHEMA},
    "tools": {"tools": [TOOL], "tool_choice": "required"},
    "both": {"tools": [TOOL], "response_format": SCHEMA},
}
BUDGETS = (None, 2, 3, 4, 5) if MORE else (None, 4)
"""Maximum numbers of reasoning tokens; None: the model ends its reasoning by itself."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    model = read_served_model(model_folder(""), "tiny")
    with closing(Service(model, LimitsConfig(), FrontNames(CacheConfig(), "f0"))) as made:
        yield made


@pytest.fixture(scope="module")
def tiny() -> ModelWeights:
    return load_weights(model_folder(""), held=AS_STORED, with_mtp=True)


@dataclass
class Proposals:
    """Drafts for each step of one reply, and the places in them where `</think>` was right."""

    reply: Sequence[int] = ()
    num_prompt: int = 0
    closes: int = 0
    """Id of `</think>`."""
    wrong_at: int | None = None
    """Place of a wrong draft: `</think>`, or another token where that is right."""
    is_wrong_once: bool = False
    """True: only the draft at the place of the reply's `</think>` is wrong."""
    places: set[int] = field(default_factory=set)

    def after(self, position: int, num: int) -> list[int]:
        """Return the drafts after the token at this position."""
        first = position - self.num_prompt + 1
        drafts = list(self.reply[first : first + num])
        if self.closes in drafts:
            self.places.add(drafts.index(self.closes))
        if self.wrong_at is not None and self.wrong_at < len(drafts):
            is_close = drafts[self.wrong_at] == self.closes
            if is_close or not self.is_wrong_once:
                drafts[self.wrong_at] = self.closes + 1 if is_close else self.closes
        return drafts


def propose(monkeypatch: pytest.MonkeyPatch, proposals: Proposals) -> None:
    """Let all drafts be these."""
    draft = Drafter.draft

    def proposed(
        self: Drafter, num_drafts: int, slots_N: Ints, positions_N: Ints, *more: Any
    ) -> None:
        draft(self, num_drafts, slots_N, positions_N, *more)
        for slot, position in zip(slots_N.tolist(), positions_N.tolist(), strict=True):
            drafts = proposals.after(position, int(self.num_drafts_S[slot]))
            self.drafts_SK[slot, : len(drafts)] = drafts
            self.num_drafts_S[slot] = len(drafts)

    monkeypatch.setattr(Drafter, "draft", proposed)


def drawn(weights: ModelWeights, choice: Choice, num_drafts: int, first: int) -> list[int]:
    """Return the reply. The first step makes `first` drafts, and each later one `num_drafts`."""
    unit, ask = Unit(weights, num_drafts), choice.generation
    blocks = tuple(unit.take((len(ask.prompt) + MAX_TOKENS) // BLOCK_TOKENS + 2))
    history = {"prompt": ask.prompt, "stop_ids": ask.stop_ids}
    chunk = Chunk("r", ask.prompt, 0, blocks, ask.sampling, 0, **history)
    output = list(unit.run(PrefillPlan(0, (chunk,))).tokens)
    joins: tuple[Join, ...] = (
        Join(
            0,
            blocks,
            len(ask.prompt),
            output[-1],
            1,
            ask.sampling,
            output=tuple(output),
            **history,
        ),
    )
    while len(output) < MAX_TOKENS and not set(output) & set(ask.stop_ids):
        num = first if joins else num_drafts
        tokens = unit.run(DecodePlan(unit.num_steps, (), joins, (), num_drafts=num)).tokens
        assert tokens, "a step draws a token"
        output += tokens
        unit.num_steps += 1
        joins = ()
    ends = [at for at, token in enumerate(output) if token in ask.stop_ids]
    return output[: ends[0] + 1] if ends else output


def asked(service: Service, kind: str, thinks: bool, budget: int | None, seed: int) -> Choice:
    """Return the reply to a request of this kind, before its tokens."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "thinking": {"type": "enabled" if thinks else "disabled"},
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0 if seed == 0 else 1.3,
        "seed": seed,
        **({} if budget is None else {"thinking_budget": budget}),
        **KINDS[kind],
    }
    tenant = Tenant(salt_of(b"key"))
    return asyncio.run(service.chat(json.dumps(body).encode(), "r", tenant)).choices[0]


def check(choice: Choice, tokens: Sequence[int], kind: str) -> None:
    """Require a whole reply that is valid."""
    assert tokens[-1] in choice.generation.stop_ids, f"{len(tokens)} tokens without an end"
    piece = choice.assembler.push(
        Token("r", 0, at, token, "stop" if token == tokens[-1] else None)
        for at, token in enumerate(tokens)
    )
    piece.add(choice.assembler.end("length"))
    arguments: dict[str, str] = {}
    last = ""
    for call in piece.calls:
        last = call.id or last
        arguments[last] = arguments.get(last, "") + call.arguments
    assert kind != "tools" or arguments
    assert kind != "schema" or not arguments
    for text in arguments.values() or [piece.content]:
        jsonschema.validate(json.loads(text), THING)


@pytest.mark.promise(
    "Drafts, thinking and a schema together change no token, wherever `</think>` falls in a draft"
)
@pytest.mark.slow("replies with three numbers of drafts, each with `</think>` at every place")
@pytest.mark.parametrize("thinks", [True, False], ids=["thinks", "answers"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_reasoning_at_each_place_of_a_draft(
    monkeypatch: pytest.MonkeyPatch, service: Service, tiny: ModelWeights, kind: str, thinks: bool
) -> None:
    proposals, rng = Proposals(), random.Random(kind)
    proposals.closes = service.model.vocabulary.control_ids["</think>"]
    propose(monkeypatch, proposals)
    for budget in BUDGETS if thinks else (None,):
        seed = 0 if budget is None and thinks else rng.randrange(1, 1000)
        choice = asked(service, kind, thinks, budget, seed)
        expected = drawn(tiny, choice, 0, 0)
        assert expected.count(proposals.closes) == thinks
        check(choice, expected, kind)
        proposals.reply, proposals.num_prompt = expected, len(choice.generation.prompt)
        for num_drafts in NUM_DRAFTS:
            proposals.wrong_at, proposals.places = None, set()
            for first in range(num_drafts + 1):
                assert drawn(tiny, choice, num_drafts, first) == expected, (num_drafts, first)
            assert proposals.places == (set(range(num_drafts)) if thinks else set())
            for proposals.wrong_at in range(num_drafts):
                for first in range(num_drafts + 1):
                    proposals.is_wrong_once = first % 2 == 1
                    assert drawn(tiny, choice, num_drafts, first) == expected, (num_drafts, first)
