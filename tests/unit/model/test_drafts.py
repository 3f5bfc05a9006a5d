"""Speculative tokens change no output under any sampling; acceptance equals the offline measure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from hadal.core.config import DRAFTS_MAX
from hadal.core.drafts import Compared, summed
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation
from hadal.core.plans import Chunk, DecodePlan, Draw, Grammar, Join, PrefillPlan, Sampling, StepDone
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.drafts import Drafter, PromptTails
from hadal.model.execute import Recorder
from hadal.model.load import AS_STORED, load_weights
from hadal.model.mtp import MtpModule, right_drafts
from hadal.model.rank_table import RankTable
from hadal.model.runner import ModelRunner
from hadal.reference.params import ModelWeights
from hadal.runtime.resolve import model_folder
from hadal.tokens.grammars import Grammars, grammar_text
from hadal.tokens.table import read_token_table
from tests.dist.borders import near
from tests.dist.oracle import Case, everyday_cases
from tests.fresh import seeds
from tests.levels import FULL, MORE

STOP_ID = 1
NUM_TOKENS = 90 if MORE else 50
NUM_SLOTS = 4
OTHER_WAYS = pytest.mark.more("the way of served requests stays in `make test`")
LISTS = {"type": "array", "items": {"enum": ["a", "b", 12]}, "minItems": 50}
SAMPLINGS = (
    Sampling(temperature=1.5, grammar=Grammar(grammar_text(LISTS, follows_reasoning=False), (1,))),
    Sampling(temperature=0.0),
    Sampling(temperature=0.0, num_logprobs=3),
    Sampling(temperature=0.7, seed=5, num_logprobs=0),
    Sampling(temperature=1.0, seed=6, top_p=0.9, top_k=20),
    Sampling(temperature=1.1, seed=7, min_p=0.02, repetition_penalty=1.2),
    Sampling(temperature=0.8, seed=8, presence_penalty=0.6, frequency_penalty=0.3),
    Sampling(temperature=0.9, seed=9, logit_bias=((5, 4.0), (17, -8.0))),
    Sampling(
        temperature=1.2,
        num_logprobs=2,
        repetition_penalty=1.1,
        grammar=Grammar(grammar_text(None, follows_reasoning=True), (1,), begins_after=12),
    ),
)
TABLE = read_token_table(model_folder(""))
GRAMMARS = Grammars(lambda: TABLE, len(TABLE.token_bytes))


@pytest.fixture(scope="module")
def tiny() -> ModelWeights:
    """Return the shipped model: most of its drafts are right."""
    return load_weights(model_folder(""), held=AS_STORED, with_mtp=True)


class Unit:
    """A runner and just enough of a leader to drive it."""

    def __init__(self, weights: ModelWeights, num_drafts_max: int, *, num_blocks: int = 60) -> None:
        num_layers = weights.config.num_hidden_layers + 1
        cache = KvCache(weights.config, num_blocks, num_layers=num_layers)
        self.runner = ModelRunner(
            DeepseekV3(weights, cache), NUM_SLOTS, num_drafts_max=num_drafts_max, grammars=GRAMMARS
        )
        self.free = list(range(1, num_blocks))
        random.Random(1).shuffle(self.free)
        self.num_steps = 0
        self.drafts: Compared = ()

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def run(self, plan: PrefillPlan | DecodePlan) -> StepDone:
        done = self.runner.execute(plan)
        assert isinstance(done, StepDone)
        assert done.error is None, done.error
        assert done.failed == {}
        return done


class Request:
    """One request: how it is sampled, and its output."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.name = f"r{number}"
        self.prompt = [rng.randrange(20, 400) for _ in range(rng.choice([3, 40, 63, 64, 65, 130]))]
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        self.sampling = replace_seed(sampling, number)
        self.min_tokens = rng.choice([0, 0, 8]) if sampling.grammar is None else 0
        self.output: list[int] = []
        self.draws: list[Draw | None] = []
        self.blocks: list[int] = []
        self.num_preempted = 0
        self.first_preempted = 0
        """Number of output tokens at its first preemption."""

    def preempt(self) -> None:
        """Note that the request is prefilled again, with all its tokens so far."""
        if not self.num_preempted:
            self.first_preempted = len(self.output)
        self.num_preempted += 1

    def generation(self) -> Generation:
        """Return the request as a leader receives it."""
        return Generation(
            self.name,
            tuple(self.prompt),
            (),
            NUM_TOKENS,
            (STOP_ID,),
            self.min_tokens,
            self.sampling,
            0,
        )

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output

    def history(self) -> dict[str, Any]:
        return {
            "prompt": tuple(self.prompt),
            "output": tuple(self.output),
            "stop_ids": (STOP_ID,),
            "min_tokens": self.min_tokens,
        }


def replace_seed(sampling: Sampling, number: int) -> Sampling:
    return Sampling(
        **{
            **{name: getattr(sampling, name) for name in sampling.__struct_fields__},
            "seed": 1000 + number,
        }
    )


def serve(
    unit: Unit,
    seed: int,
    drafts: Iterator[int],
    *,
    preempted: float,
    rested: float = 0.0,
    num_tokens: int = NUM_TOKENS,
) -> list[Request]:
    """Serve all requests with joins, leaves, cut prompts and growth; plans have one pass or several.
    `drafts`: drafts that each plan makes. `preempted`, `rested`: probability per plan that a request
    leaves and joins again later, or is not computed.
    """
    texts, rng, passes = (random.Random(seed + number) for number in range(3))
    requests = [Request(number, texts) for number in range(10)]
    waiting, running = list(requests), dict[int, Request]()
    num_drafts = 0
    while waiting or running:
        leaves = []
        for slot, request in list(running.items()):
            is_done = len(request.output) >= num_tokens or STOP_ID in request.output
            if is_done or rng.random() < preempted:
                leaves.append(slot)
                unit.free += request.blocks
                del running[slot]
                if not is_done:
                    request.preempt()
                    waiting.append(request)
        joins = []
        while waiting and len(running) < NUM_SLOTS and rng.random() < 0.6:
            request = waiting.pop(rng.randrange(len(waiting)))
            slot = rng.choice([s for s in range(NUM_SLOTS) if s not in running])
            joins.append(prefill(unit, request, slot, random.Random(request.name)))
            running[slot] = request
        num_before, num_drafts = num_drafts, next(drafts)
        num_passes = passes.choice([1, 1, 2, 4]) if num_drafts == num_before else 1
        grown = []
        for slot, request in running.items():
            # Room for the drafts of all passes and for those made last, beside the accepted tokens.
            wanted = -(-(len(request.known) + 2 + 4 * num_passes) // BLOCK_TOKENS)
            while len(request.blocks) < wanted:
                request.blocks += unit.take(1)
                grown.append((slot, len(request.blocks) - 1, request.blocks[-1]))
        resting = tuple(slot for slot in running if rng.random() < rested)
        plan = DecodePlan(
            unit.num_steps,
            tuple(leaves),
            tuple(joins),
            tuple(grown),
            num_drafts=num_drafts,
            num_passes=num_passes,
            resting=resting,
        )
        done = unit.run(plan)
        unit.num_steps += 1
        unit.drafts = summed((unit.drafts, done.drafts))
        assert set(done.keys) == running.keys() - set(resting)
        if STOP_ID not in done.tokens:
            num_right = sum(right for _, right in done.drafts)
            assert len(done.tokens) == num_passes * len(set(done.keys)) + num_right
        for row, (slot, token) in enumerate(zip(done.keys, done.tokens, strict=True)):
            running[slot].output.append(token)
            running[slot].draws.append(done.draws.get(row))
    return requests


def assert_same(requests: list[Request], expected: list[Request]) -> None:
    """Require equal tokens and log-probabilities. A request that was prefilled again may round
    differently: its log-probabilities are not compared, and its first different token must be one
    of two between which the draw was a near tie.
    """
    for request, other in zip(requests, expected, strict=True):
        length = min(len(request.output), len(other.output))
        assert length >= NUM_TOKENS or STOP_ID in request.output[:length]
        ours, theirs = request.output[:length], other.output[:length]
        if not request.num_preempted:
            assert (ours, request.draws[:length]) == (theirs, other.draws[:length]), request.name
        elif ours != theirs:
            at = next(at for at in range(length) if ours[at] != theirs[at])
            assert at >= request.first_preempted, request.name
            drawn = {ours[at], theirs[at]}
            found = near(model_folder(""), request.generation(), ours[:at])
            assert any(drawn <= tokens for tokens in found), (request.name, at, drawn)


def prefill(unit: Unit, request: Request, slot: int, rng: random.Random) -> Join:
    known = request.known
    request.blocks = unit.take(-(-len(known) // BLOCK_TOKENS))
    cut = rng.randrange(0, len(known))
    if cut:
        blocks = tuple(request.blocks[: -(-cut // BLOCK_TOKENS)])
        unit.run(PrefillPlan(0, (Chunk(request.name, tuple(known[:cut]), 0, blocks, None, 0),)))
    tail = Chunk(
        request.name,
        tuple(known[cut:]),
        cut,
        tuple(request.blocks),
        request.sampling,
        len(request.output),
        **request.history(),
    )
    done = unit.run(PrefillPlan(0, (tail,)))
    request.output += done.tokens
    request.draws.append(done.draws.get(0))
    return Join(
        slot,
        tuple(request.blocks),
        len(known),
        request.output[-1],
        len(request.output),
        request.sampling,
        **request.history(),
    )


def always(num: int) -> Iterator[int]:
    while True:
        yield num


def sometimes(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        num = rng.choice([0, 0, 1, 2, 3])
        yield from [num] * rng.randint(1, 30)


@pytest.mark.promise(
    "A draft is right if and only if the sampler draws the same token at that seed, "
    "index and logits."
)
@pytest.mark.slow("ten requests decoded five times")
@pytest.mark.parametrize("seed", seeds(1, 2, 10))
def test_whatever_is_drafted_the_tokens_are_the_same(tiny: ModelWeights, seed: int) -> None:
    print("seed", seed)
    expected = serve(Unit(tiny, 0), seed, always(0), preempted=0.0)
    for preempted in (0.0, 0.02):
        several = (always(1), always(2), always(3)) if FULL else (always(seed % 3 + 1),)
        for drafts in (*several, sometimes(seed)):
            unit = Unit(tiny, 3)
            requests = serve(unit, seed, drafts, preempted=preempted)
            assert_same(requests, expected)
            tried, right = unit.drafts[0]
            assert 0 < right <= tried


@pytest.mark.slow("ten requests decoded three times")
@pytest.mark.parametrize("seed", seeds(1, 1))
def test_requests_that_rest_draw_the_same_and_keep_their_drafts(
    tiny: ModelWeights, seed: int
) -> None:
    print("seed", seed)
    expected = serve(Unit(tiny, 0), seed, always(0), preempted=0.0)
    for drafts, preempted in ((always(2), 0.0), (sometimes(seed), 0.02)):
        unit = Unit(tiny, 3)
        requests = serve(unit, seed, drafts, preempted=preempted, rested=0.4)
        assert_same(requests, expected)
    # A resting request keeps its drafts; the next plan that computes it checks them, even if that plan
    # makes no drafts.
    unit = Unit(tiny, 3)
    texts = random.Random(0)  # Long enough, with room for drafts.
    joins = tuple(prefill(unit, Request(slot, texts), slot, random.Random(1)) for slot in range(2))
    unit.run(DecodePlan(0, (), joins, (), num_drafts=2))
    drafter = unit.runner._decode._drafter
    assert drafter is not None
    unit.run(DecodePlan(1, (), (), (), resting=(1,)))
    assert (drafter.num_drafts_S[:2].tolist(), drafter.has_drafts) == ([0, 2], True)
    unit.run(DecodePlan(2, (), (), ()))
    assert (drafter.num_drafts_S[:2].tolist(), drafter.has_drafts) == ([0, 0], False)


def test_a_draft_without_room_is_not_checked(tiny: ModelWeights) -> None:
    """Fill the last block: the step returns one token, and it is the right one."""
    unit, other = Unit(tiny, 3), Unit(tiny, 0)
    outputs = []
    for each, num_drafts in ((unit, 3), (other, 0)):
        request = Request(1, random.Random(3))
        request.prompt = request.prompt[:2] + [50] * 58
        join = prefill(each, request, 0, random.Random(4))
        each.run(DecodePlan(0, (), (join,), (), num_drafts=num_drafts))
        tokens: list[int] = []
        for step in range(1, 12):
            grown = ()
            if len(request.known) - 1 + len(tokens) + 1 >= BLOCK_TOKENS * len(request.blocks):
                request.blocks += each.take(1)
                grown = ((0, len(request.blocks) - 1, request.blocks[-1]),)
            tokens += each.run(DecodePlan(step, (), (), grown, num_drafts=num_drafts)).tokens
        outputs.append(tokens)
    assert outputs[0][: len(outputs[1])] == outputs[1]


def test_a_failed_request_fails_alone(tiny: ModelWeights) -> None:
    """Leave one request no token to draw: the other continues as if it were alone."""
    outputs = []
    for has_bad in (False, True):
        unit, rng = Unit(tiny, 2), random.Random(2)
        good, bad = Request(0, rng), Request(2, rng)
        joins = [prefill(unit, request, slot, rng) for slot, request in enumerate((good, bad))]
        # Every token would end it, and no end is allowed before the 50th token.
        joins[1] = msgspec.structs.replace(
            joins[1], stop_ids=tuple(range(tiny.config.vocab_size)), min_tokens=50
        )
        plan = DecodePlan(0, (), tuple(joins[: 1 + has_bad]), (), num_drafts=2)
        tokens: list[int] = []
        for step in range(1, 6):
            done = unit.runner.execute(plan)
            assert isinstance(done, StepDone)
            assert done.error is None
            # The bad request has no token left to draw, and is not computed again.
            assert done.failed.keys() == ({1} if has_bad and step == 1 else set())
            pairs = zip(done.keys, done.tokens, strict=True)
            tokens += [token for slot, token in pairs if slot == 0]
            plan = DecodePlan(step, (), (), (), num_drafts=2)
        outputs.append(tokens)
    assert outputs[0] == outputs[1]


def test_tails_are_of_the_text_that_goes_on() -> None:
    tails = PromptTails(2)
    head = Chunk("a", (1, 2, 3), 0, (1,), None, 0)
    tails.keep(head, torch.ones(4))
    assert tails.before(replace_start(head, 5)) is None  # Another chunk of the text.
    tails.keep(head, torch.ones(4))
    found = tails.before(replace_start(head, 3))
    assert found is not None
    assert found.tolist() == [1.0] * 4
    assert tails.before(replace_start(head, 3)) is None
    for name in "bcd":
        tails.keep(Chunk(name, (1,), 0, (1,), None, 0), torch.zeros(4))
    assert tails.before(Chunk("b", (1,), 1, (1,), None, 0)) is None
    assert tails.before(Chunk("d", (1,), 1, (1,), None, 0)) is not None


def replace_start(chunk: Chunk, start: int) -> Chunk:
    return Chunk(chunk.request_id, chunk.tokens, start, chunk.block_ids, None, 0)


def test_rooms_follow_a_row_that_moves() -> None:
    table = RankTable(3, 300)
    table.join(Join(0, (4,), 10, 1, 1, Sampling()))
    table.join(Join(1, (5, 6), 70, 1, 1, Sampling()))
    table.leave(0)
    assert table.rooms_B.tolist() == [128]
    table.grow(1, 2, 9)
    assert table.rooms_B.tolist() == [192]
    table.advance(np.array([7]), np.array([3]))
    assert (table.tokens_B.tolist(), table.positions_B.tolist()) == ([7], [73])


class Side:
    """The blocks of one runner; tests copy KV from one to another as KV transfers and moves do."""

    def __init__(self, weights: ModelWeights, num_drafts: int) -> None:
        self.unit = Unit(weights, num_drafts, num_blocks=120)

    @property
    def cache(self) -> torch.Tensor:
        return self.unit.runner._model.cache.cache_PLSD

    def prefill(self, text: list[int], cuts: list[int], blocks: list[int]) -> int:
        """Prefill a prompt in chunks that end at `cuts`, after a cached prefix; return its token."""
        for start, end in pairwise(cuts):
            is_last = end == len(text)
            sampling = Sampling(temperature=0.0) if is_last else None
            part = tuple(blocks[: -(-end // BLOCK_TOKENS)])
            done = self.unit.run(
                PrefillPlan(0, (Chunk("text", tuple(text[start:end]), start, part, sampling, 0),))
            )
        return done.tokens[0]

    def decode(
        self, known: list[int], blocks: list[int], num_tokens: int, num_drafts: int = 1
    ) -> tuple[list[int], int, int]:
        """Return (tokens, drafts tried, drafts right) from the last known token on."""
        tokens: list[int] = []
        tried = right = 0
        while len(known) + 6 > BLOCK_TOKENS * len(blocks):
            blocks += self.unit.take(1)
        join = Join(0, tuple(blocks), len(known) - 1, known[-1], 1, Sampling(temperature=0.0))
        plan = DecodePlan(0, (), (join,), (), num_drafts=num_drafts)
        while len(tokens) < num_tokens:
            done = self.unit.run(plan)
            tried += bool(tokens)
            right += len(done.tokens) - 1
            tokens += done.tokens
            grown = []
            while len(known) + len(tokens) + 6 > BLOCK_TOKENS * len(blocks):
                blocks += self.unit.take(1)
                grown.append((0, len(blocks) - 1, blocks[-1]))
            plan = DecodePlan(0, (), (), tuple(grown), num_drafts=num_drafts)
        self.unit.run(DecodePlan(0, (), (), (), publishes=(0,)))
        self.unit.run(DecodePlan(0, (0,), (), ()))
        return tokens, tried, right


def live(way: str, weights: ModelWeights, case: Case, rng: random.Random) -> tuple[int, int]:
    """Return (tried, right) of a case's first drafts, with KV that was made or moved as `way` says."""
    prompt, output = list(case.prompt), list(case.output)
    num_blocks = -(-len(prompt) // BLOCK_TOKENS)
    prefill, decode = Side(weights, 1), Side(weights, 1)
    blocks = prefill.unit.take(num_blocks)
    cuts = [0, len(prompt)]
    if way == "cut":
        cuts[1:1] = sorted(rng.sample(range(1, len(prompt)), min(3, len(prompt) - 1)))
    if way == "hit" and len(prompt) > BLOCK_TOKENS:
        full = rng.randrange(1, -(-len(prompt) // BLOCK_TOKENS)) * BLOCK_TOKENS
        # A text with the same beginning was prefilled before.
        prefill.prefill([*prompt[:full], 7, 8, 9], [0, full + 3], [*blocks, *prefill.unit.take(1)])
        cuts = [full, len(prompt)]
    first = prefill.prefill(prompt, cuts, blocks)
    assert first == output[0]
    if way == "alone":
        decode = prefill
    else:
        theirs = decode.unit.take(num_blocks)
        decode.cache[theirs] = prefill.cache[blocks]
        blocks = theirs
    known = [*prompt, first]
    if way != "move":
        _, tried, right = decode.decode(known, blocks, len(output) - 1)
        return tried, right
    half = len(output) // 2
    tokens, tried, right = decode.decode(known, blocks, half)
    assert tokens == output[1 : 1 + len(tokens)]
    other = Side(weights, 1)
    ours = other.unit.take(len(blocks))
    other.cache[ours] = decode.cache[blocks]
    known += tokens
    _, more_tried, more_right = other.decode(known, ours, max(1, len(output) - len(tokens) - 1))
    return tried + more_tried, right + more_right


@pytest.mark.parametrize(
    "way",
    [
        "handed over",
        *(pytest.param(way, marks=OTHER_WAYS) for way in ("alone", "cut", "hit", "move")),
    ],
)
def test_as_many_drafts_are_right_as_the_offline_measure_says(tiny: ModelWeights, way: str) -> None:
    module = Side(tiny, 1).unit.runner._decode._module
    assert module is not None
    rng, expected, found = random.Random(3), np.zeros(2), np.zeros(2)
    for case in everyday_cases(16, 5):
        text = [*case.prompt, *case.output]
        if len(case.output) < 6:
            continue
        is_right = right_drafts(module, text, len(case.prompt) + 2)
        expected += (len(is_right), int(is_right.sum()))
        found += live(way, tiny, case, rng)
    print(way, expected, found, expected[1] / expected[0], found[1] / found[0])
    assert abs(expected[1] / expected[0] - found[1] / found[0]) <= 0.01


def entries_of(tiny: ModelWeights, num_drafts: int, num_tokens: int) -> tuple[list[int], Tensor]:
    """Return (text, module's entries of full blocks [B, 64, D]) of a request with drafts."""
    unit = Unit(tiny, DRAFTS_MAX)
    request = Request(0, random.Random(3))
    request.prompt = [random.Random(5).randrange(20, 400) for _ in range(60)]
    joins: tuple[Join, ...] = (prefill(unit, request, 0, random.Random(4)),)
    grown: tuple[tuple[int, int, int], ...] = ()
    drawn: list[int] = []
    for step in count():
        if len(drawn) >= num_tokens:
            break
        done = unit.run(DecodePlan(step, (), joins, grown, num_drafts=num_drafts))
        drawn += done.tokens
        joins, new = (), []
        while len(request.known) + len(drawn) + 8 > BLOCK_TOKENS * len(request.blocks):
            request.blocks += unit.take(1)
            new.append((0, len(request.blocks) - 1, request.blocks[-1]))
        grown = tuple(new)
    text = [*request.known, *drawn]
    layer = tiny.config.num_hidden_layers
    cache_PLSD = unit.runner._model.cache.cache_PLSD
    full = request.blocks[: (len(text) - 1) // BLOCK_TOKENS]
    return text, cache_PLSD[full, layer].clone()


def test_a_block_has_the_same_entries_however_many_are_drafted(tiny: ModelWeights) -> None:
    """Compare all numbers of drafts. At 0 a rank keeps a block's tokens until the block is full."""
    expected_text, expected = entries_of(tiny, 3, 150)
    for num_drafts in (0, 1, 2):
        text, entries = entries_of(tiny, num_drafts, 150)
        num_same = min(len(text), len(expected_text))
        assert text[:num_same] == expected_text[:num_same]
        num_blocks = (num_same - 1) // BLOCK_TOKENS
        assert num_blocks >= 3
        assert (entries[:num_blocks] - expected[:num_blocks]).abs().max() < 1e-3


@pytest.mark.parametrize("max_rows", [4, 5, 7, 64])
def test_one_call_does_what_its_passes_do(tiny: ModelWeights, max_rows: int) -> None:
    """Compare one call in C with single passes: equal entries and drafts, wherever the blocks end."""
    num_slots, rng = 4, random.Random(max_rows)
    config, vocabulary = tiny.config, tiny.config.vocab_size
    sides = []
    for is_in_c in (True, False):
        cache = KvCache(config, 1 + 8 * num_slots, num_layers=config.num_hidden_layers + 1)
        module = MtpModule(DeepseekV3(tiny, cache))
        module.prepare(max_rows, num_slots)
        drafter = Drafter(module, num_slots, DRAFTS_MAX)
        if not is_in_c:
            drafter._table = None
        sides.append((drafter, cache.cache_PLSD))
    slots = np.arange(num_slots)
    table = torch.arange(1, 1 + 8 * num_slots, dtype=torch.int32).reshape(num_slots, 8)
    positions = np.array([rng.choice([5, 60, 63, 64, 70]) for _ in slots])
    for drafter, _ in sides:
        for slot in slots.tolist():
            drafter.join(slot, int(positions[slot]), 7 + slot)
    for step in range(80):
        num_drawn = np.array([rng.randint(1, 1 + DRAFTS_MAX) for _ in slots])
        new = positions + num_drawn
        of = np.repeat(slots, num_drawn)
        within = np.arange(len(of)) - np.repeat(num_drawn.cumsum() - num_drawn, num_drawn)
        tokens = np.array([rng.randrange(vocabulary) for _ in of])
        states = torch.randn(
            len(of), config.hidden_size, generator=torch.Generator().manual_seed(step)
        )
        filling = np.flatnonzero(new // BLOCK_TOKENS > positions // BLOCK_TOKENS)
        rooms = (new + rng.choice([0, 1, 2, 64]) + 63) // BLOCK_TOKENS * BLOCK_TOKENS
        num_drafts = rng.choice([0, 0, 1, 2, 3])
        for drafter, _ in sides:
            drafter.write(slots[filling], positions[filling] + 1, table[filling])
            drafter.note(of, positions[of] + within + 1, tokens, np.arange(len(of)), states)
            drafter.draft(num_drafts, slots, new, rooms, table, Recorder())
        in_c, by_passes = (drafter for drafter, _ in sides)
        assert (in_c.num_drafts_S == by_passes.num_drafts_S).all()
        for slot, num in enumerate(in_c.num_drafts_S):
            assert (in_c.drafts_SK[slot, :num] == by_passes.drafts_SK[slot, :num]).all()
        assert (in_c._num_written_S == by_passes._num_written_S).all()
        positions = new
        if positions.max() > 500:
            break
    assert torch.equal(sides[0][1], sides[1][1])


def test_what_the_module_s_kernels_cannot_use_is_refused(tiny: ModelWeights) -> None:
    cache = KvCache(tiny.config, 4, num_layers=tiny.config.num_hidden_layers + 1)
    drafter = Drafter(MtpModule(DeepseekV3(tiny, cache)), 2, 1)
    one, states = np.array([1]), torch.zeros(1, tiny.config.hidden_size)
    for slots, rows in ((np.array([2]), np.array([0])), (one, one), (one, -one)):
        with pytest.raises(ValueError, match="out of range"):
            drafter.note(slots, one, one, rows, states)
    with pytest.raises(ValueError, match="hidden_RD"):
        drafter.note(one, one, one, one - 1, states[:, :5])
    table = torch.ones(1, 1, dtype=torch.int32)
    for num_drafts, slots in ((2, one), (1, np.array([2])), (-1, one)):
        with pytest.raises(ValueError, match="out of range"):
            drafter._module.fused_step(1, 1).draft(
                drafter._table, num_drafts, slots, one, one * 64, table
            )


def test_a_step_that_fails_loses_no_entries(
    tiny: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail a step: its rows leave, and their deferred entries are written then, as they cannot be later."""
    unit = Unit(tiny, 1)
    request = Request(0, random.Random(3))
    request.prompt = list(range(20, 50))
    join = prefill(unit, request, 0, random.Random(4))
    known = [*request.known, *unit.run(DecodePlan(0, (), (join,), ())).tokens]
    for step in range(1, 20):
        known += unit.run(DecodePlan(step, (), (), ())).tokens

    def fail(*_: object) -> Tensor:
        raise RuntimeError("broken")

    with monkeypatch.context() as context:
        context.setattr(unit.runner._model, "decode", fail)
        done = unit.runner.execute(DecodePlan(20, (), (), ()))
    assert isinstance(done, StepDone)
    assert done.error is not None
    layer, (block,) = tiny.config.num_hidden_layers, request.blocks
    entries = unit.runner._model.cache.cache_PLSD[block, layer, : len(known)]
    assert entries.abs().amax(-1).min() > 0
    _, expected = entries_of_prompt(tiny, known)
    assert (entries - expected[: len(known)]).abs().max() < 1e-3


def entries_of_prompt(tiny: ModelWeights, prompt: list[int]) -> tuple[Request, Tensor]:
    """Prefill a prompt; return the request and the module's entries of its first block."""
    unit, request = Unit(tiny, 1), Request(0, random.Random(3))
    request.prompt = [*prompt, 20]
    prefill(unit, request, 0, random.Random(4))
    cache_PLSD = unit.runner._model.cache.cache_PLSD
    return request, cache_PLSD[request.blocks[0], tiny.config.num_hidden_layers]
