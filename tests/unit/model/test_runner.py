"""Runner: its tokens equal the plain loop's for any order of joins, leaves and growth."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import Chunk, DecodePlan, Join, PrefillPlan, Sampling, StepDone
from hadal.model.cache import KvCache, block_bytes
from hadal.model.deepseek import DeepseekV3
from hadal.model.runner import ModelRunner
from hadal.overlap.plan import SCHEDULES
from hadal.reference.forward import generate
from tests.unit.model.checkpoints import Peer
from tests.unit.model.test_deepseek import random_tokens

GREEDY = Sampling(temperature=0.0)
NUM_SLOTS = 5


class Bench:
    """A runner, and as much of a leader as drives it: blocks, slots, step numbers."""

    def __init__(self, peer: Peer, num_blocks: int = 40) -> None:
        model = DeepseekV3(peer.weights, KvCache(peer.weights.config, num_blocks))
        model.cache.cache_PLSD.fill_(float("nan"))
        self.runner = ModelRunner(model, NUM_SLOTS)
        self.free = list(range(1, num_blocks))
        random.Random(1).shuffle(self.free)
        self.steps = self._count()

    @staticmethod
    def _count() -> Iterator[int]:
        yield from range(10**6)

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def prefill(self, *chunks: Chunk) -> StepDone:
        done = self.runner.execute(PrefillPlan(next(self.steps), chunks))
        assert done.error is None, done.error
        return done

    def decode(
        self,
        leaves: tuple[int, ...] = (),
        joins: tuple[Join, ...] = (),
        grown: tuple[tuple[int, int, int], ...] = (),
        resting: tuple[int, ...] = (),
    ) -> StepDone:
        plan = DecodePlan(next(self.steps), leaves, joins, grown, resting=resting)
        return self.runner.execute(plan)


def run_all(
    bench: Bench,
    prompts: list[list[int]],
    sampling: list[Sampling],
    num_tokens: int,
    seed: int,
    rested: float = 0.0,
) -> list[list[int]]:
    """Serve all prompts with random joins, leaves, growth and preemptions; return every output.
    `rested`: probability that a step leaves a slot out.
    """
    rng = random.Random(seed)
    outputs: list[list[int]] = [[] for _ in prompts]
    waiting, running = list(range(len(prompts))), {}
    blocks: dict[int, list[int]] = {}
    while waiting or running:
        leaves: list[int] = []
        for slot, i in list(running.items()):
            preempted = rng.random() < 0.03
            if len(outputs[i]) >= num_tokens or preempted:
                leaves.append(slot)
                bench.free += blocks.pop(i)
                del running[slot]
                if len(outputs[i]) < num_tokens:
                    waiting.append(i)
        joins = []
        while waiting and len(running) < NUM_SLOTS and rng.random() < 0.6:
            i = waiting.pop(rng.randrange(len(waiting)))
            known = prompts[i] + outputs[i]
            blocks[i] = bench.take(-(-len(known) // BLOCK_TOKENS))
            cut = rng.randrange(0, len(known))
            history = {"prompt": tuple(prompts[i]), "output": tuple(outputs[i])}
            if cut:
                head = Chunk(
                    str(i),
                    tuple(known[:cut]),
                    0,
                    tuple(blocks[i][: -(-cut // BLOCK_TOKENS)]),
                    None,
                    0,
                )
                assert bench.prefill(head).keys == ()
            tail = Chunk(
                str(i),
                tuple(known[cut:]),
                cut,
                tuple(blocks[i]),
                sampling[i],
                len(outputs[i]),
                **history,
            )
            outputs[i] += bench.prefill(tail).tokens
            slot = rng.choice([s for s in range(NUM_SLOTS) if s not in running])
            running[slot] = i
            joins.append(
                Join(
                    slot,
                    tuple(blocks[i]),
                    len(known),
                    outputs[i][-1],
                    len(outputs[i]),
                    sampling[i],
                    prompt=tuple(prompts[i]),
                    output=tuple(outputs[i]),
                )
            )
        grown = []
        for slot, i in running.items():
            position = len(prompts[i]) + len(outputs[i]) - 1
            if position // BLOCK_TOKENS == len(blocks[i]):
                blocks[i] += bench.take(1)
                grown.append((slot, len(blocks[i]) - 1, blocks[i][-1]))
        resting = tuple(slot for slot in running if rested and rng.random() < rested)
        done = bench.decode(tuple(leaves), tuple(joins), tuple(grown), resting)
        assert done.error is None, done.error
        assert sorted(done.keys) == sorted(running.keys() - set(resting))
        for slot, token in zip(done.keys, done.tokens, strict=True):
            outputs[running[slot]].append(token)
    return [output[:num_tokens] for output in outputs]


@pytest.mark.promise(
    "Batching, chunking, preemption, KV transfer, caches, widths, placements and "
    "retries affect when a token is generated, never which token."
)
@pytest.mark.promise("Greedy output equals a plain single-request loop over the reference model")
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(seed, marks=pytest.mark.more("one seed is one case")) for seed in (1, 2))],
)
def test_greedy_tokens_are_the_plain_loops(peers: dict[str, Peer], seed: int) -> None:
    peer, rng = peers["yarn_odd"], random.Random(seed)
    prompts = [random_tokens(peer, rng.randint(1, 140), seed=i) for i in range(12)]
    outputs = run_all(Bench(peer), prompts, [GREEDY] * 12, 45, seed)
    assert outputs == [generate(peer.weights, prompt, 45) for prompt in prompts]


def test_random_tokens_do_not_depend_on_the_schedule(plain: Peer) -> None:
    """Vary joins, batches and preemptions: the same seeds and penalties give the same tokens."""
    prompts = [random_tokens(plain, 20 + 13 * i, seed=i) for i in range(6)]
    sampling = [
        Sampling(
            temperature=0.9,
            top_p=0.9,
            seed=i,
            frequency_penalty=0.3 * (i % 2),
            repetition_penalty=1.0 + 0.2 * (i % 3),
        )
        for i in range(6)
    ]
    first, second, third = (
        run_all(Bench(plain), prompts, sampling, 40, seed, rested)
        for seed, rested in ((0, 0.0), (1, 0.0), (2, 0.4))
    )
    assert first == second == third
    assert len({tuple(output) for output in first}) == 6


def test_logprobs_come_with_their_row(plain: Peer) -> None:
    bench, asked = Bench(plain), Sampling(temperature=0.0, num_logprobs=2)
    prompts = [tuple(random_tokens(plain, 10, seed=i)) for i in range(3)]
    blocks = [tuple(bench.take(1)) for _ in prompts]
    chunks = [
        Chunk(str(i), prompts[i], 0, blocks[i], sampling, 0)
        for i, sampling in enumerate((None, GREEDY, asked))
    ]
    done = bench.prefill(*chunks)
    assert done.keys == (1, 2)
    assert list(done.draws) == [1]
    assert done.draws[1].top[0] == (done.tokens[1], done.draws[1].logprob)
    joins = [
        Join(slot, blocks[i], 10, done.tokens[i - 1], 1, chunks[i].sampling or GREEDY)
        for slot, i in ((4, 2), (0, 1))
    ]
    after = bench.decode(joins=tuple(joins))
    assert sorted(after.keys) == [0, 4]
    assert list(after.draws) == [after.keys.index(4)]
    (draw,) = after.draws.values()
    assert draw.top[0] == (after.tokens[after.keys.index(4)], draw.logprob)


@pytest.mark.parametrize("num_passes", [2, 5])
def test_passes_of_a_plan_draw_what_plans_draw_one_after_another(
    plain: Peer, num_passes: int
) -> None:
    sampling = (
        GREEDY,
        Sampling(temperature=0.9, top_p=0.9, seed=3, frequency_penalty=0.4, num_logprobs=2),
        Sampling(temperature=1.2, seed=5),
    )
    prompts = [random_tokens(plain, 58 + 3 * slot, seed=slot) for slot in range(3)]

    def drawn(passes: Sequence[int]) -> tuple[list[list[int]], list[float]]:
        bench, joins = Bench(plain), []
        for slot, (prompt, how) in enumerate(zip(prompts, sampling, strict=True)):
            blocks = tuple(bench.take(3))
            first = bench.prefill(Chunk(str(slot), tuple(prompt), 0, blocks, how, 0)).tokens[0]
            joins.append(Join(slot, blocks, len(prompt), first, 1, how, tuple(prompt), (first,)))
        outputs: list[list[int]] = [[], [], []]
        logprobs = []
        for step, count in enumerate(passes):
            plan = DecodePlan(step, (), tuple(joins), (), num_passes=count)
            done, joins = bench.runner.execute(plan), []
            assert done.error is None
            for row, (slot, token) in enumerate(zip(done.keys, done.tokens, strict=True)):
                outputs[slot].append(token)
                if row in done.draws:
                    assert slot == 1
                    logprobs.append(done.draws[row].logprob)
        return outputs, logprobs

    one_by_one = drawn([1] * 4 * num_passes)
    assert drawn([num_passes] * 4) == one_by_one
    assert len(one_by_one[1]) == 4 * num_passes


def test_a_step_that_goes_wrong_is_answered(plain: Peer) -> None:
    """Check that a failed step and the plan in flight after it return errors as text; then the runner
    works again.
    """
    bench = Bench(plain)
    prompt = random_tokens(plain, 30)
    blocks = tuple(bench.take(2))
    first = bench.prefill(Chunk("a", tuple(prompt), 0, blocks, GREEDY, 0)).tokens[0]
    join = Join(0, blocks, 30, first, 1, GREEDY)
    good = bench.decode(joins=(join,))
    assert good.error is None
    outside = bench.decode(joins=(Join(NUM_SLOTS, blocks, 30, first, 1, GREEDY),))
    assert outside.error is not None
    assert "slot" in outside.error
    behind = bench.decode(joins=(Join(3, blocks, 30, first, 1, GREEDY),))
    assert behind.error is not None
    assert behind.keys == ()
    again = bench.decode(leaves=tuple(range(NUM_SLOTS)), joins=(join,))
    assert (again.error, again.keys, again.tokens) == (None, (0,), good.tokens)
    broken = bench.runner.execute(
        PrefillPlan(9, (Chunk("b", (plain.vocab_size + 5,), 0, (3,), GREEDY, 0),))
    )
    assert broken.error is not None
    assert bench.decode(leaves=(0,)).keys == ()


def test_broken_logits_fail_their_slot_and_no_other(plain: Peer) -> None:
    bench = Bench(plain)
    blocks = tuple(bench.take(1))
    # Positions 0 .. 4 were never written, so this cache is NaN there.
    done = bench.decode(joins=(Join(2, blocks, 5, 1, 1, GREEDY),))
    assert done.error is None
    assert list(done.failed) == [2]
    assert "finite" in done.failed[2]


def test_a_step_past_the_end_of_the_context(plain: Peer) -> None:
    """Run one step past the last position, before the leave arrives: it fails no request."""
    bench = Bench(plain)
    last = plain.weights.config.max_position_embeddings - 1
    blocks = tuple(bench.take(-(-(last + 1) // BLOCK_TOKENS)))
    prompt = tuple(random_tokens(plain, last))
    token = bench.prefill(Chunk("a", prompt, 0, blocks, GREEDY, 0)).tokens[0]
    assert bench.decode(joins=(Join(1, blocks, last, token, 1, GREEDY),)).error is None
    assert bench.decode().error is None
    too_long = bench.decode(joins=(Join(0, blocks, last + 1, token, 1, GREEDY),))
    assert too_long.error is not None
    assert "positions" in too_long.error


def test_two_micro_batches_change_no_token(plain: Peer) -> None:
    """Cut prompts between micro-batches and decode steps in two, under every schedule."""
    prompts = [random_tokens(plain, 9 + 23 * i, seed=i) for i in range(4)]
    expected = [tuple(generate(plain.weights, prompt, 6)) for prompt in prompts]
    for schedule in SCHEDULES:
        bench = Bench(plain)
        blocks = [tuple(bench.take(2)) for _ in prompts]
        cuts = [0, 8, 40, len(prompts[3])]
        first = [
            Chunk(str(i), tuple(p[: cuts[i]]), 0, blocks[i], GREEDY if i == 3 else None, 0)
            for i, p in enumerate(prompts)
            if cuts[i]
        ]
        second = [
            Chunk(str(i), tuple(p[cuts[i] :]), cuts[i], blocks[i], GREEDY, 0)
            for i, p in enumerate(prompts)
            if cuts[i] < len(p)
        ]
        done = execute(
            bench, PrefillPlan(0, tuple(first), schedule, tuple(second), 2, is_traced=True)
        )
        assert done.keys == (2, 3, 4, 5)
        assert {event.micro_batch for event in done.events} == {0, 1}
        started = dict(zip((3, 0, 1, 2), done.tokens, strict=True))
        outputs = [[started[i]] for i in range(4)]
        joins = tuple(
            Join(4 - i, blocks[i], len(prompts[i]), started[i], 1, GREEDY) for i in range(4)
        )
        for step in range(5):
            done = execute(
                bench, DecodePlan(step, (), joins if not step else (), (), schedule, (1, 4), 2)
            )
            assert sorted(done.keys) == [1, 2, 3, 4]
            for slot, token in zip(done.keys, done.tokens, strict=True):
                outputs[4 - slot].append(token)
        assert [tuple(output) for output in outputs] == expected
        counts = {time.op: time.count for time in done.op_times}
        assert (counts["attn_in"], counts["head"], counts["draw"]) == (2 * 3, 2, 1)


def test_one_micro_batch_may_be_empty(plain: Peer) -> None:
    bench = Bench(plain)
    prompt = tuple(random_tokens(plain, 12))
    blocks = tuple(bench.take(1))
    expected = generate(plain.weights, prompt, 3)
    chunk = Chunk("a", prompt, 0, blocks, GREEDY, 0)
    for first, second in (((chunk,), ()), ((), (chunk,))):
        done = execute(bench, PrefillPlan(0, first, "prefill_dual", second, 2))
        assert (done.keys, done.tokens) == ((0,), (expected[0],))
    join = Join(3, blocks, 12, expected[0], 1, GREEDY)
    assert execute(bench, DecodePlan(1, (), (join,), (), "decode_five", (3,), 2)).tokens == (
        expected[1],
    )
    assert execute(bench, DecodePlan(2, (), (), (), "decode_five", (), 2)).tokens == (expected[2],)


def test_the_fused_step_says_what_it_took(plain: Peer) -> None:
    bench = Bench(plain)
    prompt = tuple(random_tokens(plain, 12))
    blocks = tuple(bench.take(1))
    token = bench.prefill(Chunk("a", prompt, 0, blocks, GREEDY, 0)).tokens[0]
    done = execute(
        bench, DecodePlan(1, (), (Join(0, blocks, 12, token, 1, GREEDY),), (), is_traced=True)
    )
    assert [time.op for time in done.op_times] == ["step", "draw"]
    assert [event.op for event in done.events] == ["step", "draw"]
    assert sum(time.seconds for time in done.op_times) <= done.elapsed_s
    assert (bench.runner.is_computing, bench.runner.lost) == (False, ())
    assert bench.runner.num_ops > 0


def staged(peer: Peer, num_blocks: int) -> tuple[ModelRunner, Tensor]:
    """Return a runner as on a GPU (cache apart from its pool) and the pool by blocks; all NaN."""
    memory = bytearray(block_bytes(peer.weights.config) * num_blocks)
    pool = torch.frombuffer(memory, dtype=torch.float32).view(num_blocks, -1).fill_(float("nan"))
    cache = KvCache(peer.weights.config, num_blocks, memory, is_staged=True)
    cache.cache_PLSD.fill_(float("nan"))
    return ModelRunner(DeepseekV3(peer.weights, cache), NUM_SLOTS), pool


def test_kv_is_handed_over_between_staged_caches(plain: Peer) -> None:
    """Publish each prefilled chunk; a join fetches pulled blocks; a later join keeps the cache's entries."""

    def run(runner: ModelRunner, plan: PrefillPlan | DecodePlan) -> StepDone:
        done = runner.execute(plan)
        assert isinstance(done, StepDone)
        assert (done.error, done.failed) == (None, {})
        return done

    (prefill, theirs), (decode, ours) = staged(plain, 8), staged(plain, 12)
    prompts = [random_tokens(plain, length, seed=length) for length in (64, 70, 130)]
    expected = [generate(plain.weights, prompt, 12) for prompt in prompts]
    sources, targets = ((1,), (5, 3), (7, 2, 4)), ((9, 1), (2, 3), (4, 6, 5))
    outputs, num_steps = [], 0
    for i, prompt in enumerate(prompts):
        head = Chunk(str(i), tuple(prompt[:40]), 0, sources[i][:1], None, 0)
        run(prefill, PrefillPlan(num_steps, (head,)))
        assert not theirs[sources[i][0]].isnan().all(), "not published with its chunk"
        assert theirs[list(sources[i][1:])].isnan().all(), "published before it was written"
        tail = Chunk(str(i), tuple(prompt[40:]), 40, sources[i], GREEDY, 0)
        outputs.append(list(run(prefill, PrefillPlan(num_steps + 1, (tail,))).tokens))
        num_steps += 2
        ours[list(targets[i][: len(sources[i])])] = theirs[list(sources[i])]  # The pull.

    def joins(is_pulled: bool) -> tuple[Join, ...]:
        return tuple(
            Join(
                i,
                targets[i],
                len(prompts[i]) + len(output) - 1,
                output[-1],
                len(output),
                GREEDY,
                is_pulled=is_pulled,
            )
            for i, output in enumerate(outputs)
        )

    def steps(first: DecodePlan, count: int) -> None:
        for plan in [first, *(DecodePlan(first.step_id + n, (), (), ()) for n in range(1, count))]:
            done = run(decode, plan)
            for slot, token in zip(done.keys, done.tokens, strict=True):
                outputs[slot].append(token)

    run(decode, DecodePlan(0, (), joins(True), ()))  # Void: its tokens are ignored.
    steps(DecodePlan(1, (), joins(True), ()), 5)
    ours.fill_(float("nan"))  # By now the pool lacks the newest entries: no step may read it.
    steps(DecodePlan(6, (0, 1, 2), joins(False), ()), 6)
    assert outputs == expected


def test_a_request_moves_between_staged_caches(plain: Peer) -> None:
    """Publish a request's KV with its last step at the source; the target fetches it and continues."""
    prompt = random_tokens(plain, 126, seed=3)
    expected = generate(plain.weights, prompt, 12)
    (source, theirs), (target, ours) = staged(plain, 8), staged(plain, 8)
    done = source.execute(PrefillPlan(0, (Chunk("a", tuple(prompt), 0, (5, 3), GREEDY, 0),)))
    assert isinstance(done, StepDone)
    output = list(done.tokens)
    join = Join(2, (5, 3, 6), 126, output[0], 1, GREEDY, is_pulled=True)
    theirs[6] = 0.0  # The leader may have granted a block that has no entries yet.
    plans = [
        DecodePlan(1, (), (join,), ()),
        *(DecodePlan(step_id, (), (), ()) for step_id in range(2, 5)),
    ]
    for plan in [*plans, DecodePlan(5, (), (), (), publishes=(2,))]:
        done = source.execute(plan)
        assert isinstance(done, StepDone)
        output += done.tokens
    ours[[1, 7, 4]] = theirs[[5, 3, 6]]
    length = len(prompt) + len(output) - 1
    for plan in [
        DecodePlan(
            6,
            (),
            (Join(0, (1, 7, 4), length, output[-1], len(output), GREEDY, is_pulled=True),),
            (),
        ),
        *(DecodePlan(step_id, (), (), ()) for step_id in range(7, 12)),
    ]:
        done = target.execute(plan)
        assert isinstance(done, StepDone)
        output += done.tokens
    assert output == expected[: len(output)]


def test_a_block_is_in_the_pool_when_the_step_that_fills_it_is_done(plain: Peer) -> None:
    prompt = random_tokens(plain, 126, seed=3)
    runner, pool = staged(plain, 8)
    done = runner.execute(PrefillPlan(0, (Chunk("a", tuple(prompt), 0, (5, 3), GREEDY, 0),)))
    assert isinstance(done, StepDone)
    join = Join(2, (5, 3, 6), 126, done.tokens[0], 1, GREEDY, is_pulled=True)
    holes = []
    for plan in (
        DecodePlan(1, (), (join,), ()),
        DecodePlan(2, (), (), (), publishes_full=True),
        DecodePlan(3, (), (), ()),
    ):
        runner.execute(plan)
        holes.append(bool(pool[3].isnan().any()))
    assert holes == [True, False, False]
    assert pool[6].isnan().all()


def test_plans_that_cannot_run(plain: Peer) -> None:
    bench = Bench(plain)
    chunk = Chunk("a", (1, 2), 0, tuple(bench.take(1)), GREEDY, 0)
    unknown = bench.runner.execute(PrefillPlan(0, (chunk,), "upside_down"))
    assert isinstance(unknown, StepDone)
    assert "upside_down" in (unknown.error or "")
    join = Join(0, (5,), 2, 1, 1, GREEDY)
    absent = bench.runner.execute(DecodePlan(1, (), (join,), (), "decode_five", (2,), 2))
    assert isinstance(absent, StepDone)
    assert "not occupied" in (absent.error or "")


def execute(bench: Bench, plan: PrefillPlan | DecodePlan) -> StepDone:
    done = bench.runner.execute(plan)
    assert isinstance(done, StepDone)
    assert done.error is None, done.error
    return done


def test_prefill_goes_on_behind_blocks_that_were_read_into_the_pool(plain: Peer) -> None:
    """Read blocks into the pool, as if from disk: a staged cache fetches them by plan, not before."""
    (first, theirs), (second, ours) = staged(plain, 4), staged(plain, 6)
    prompt = random_tokens(plain, 130, seed=130)
    expected = generate(plain.weights, prompt, 1)
    whole = first.execute(PrefillPlan(0, (Chunk("a", tuple(prompt), 0, (1, 2, 3), GREEDY, 0),)))
    ours[[5, 2]] = theirs[[1, 2]]
    rest = Chunk("b", tuple(prompt[128:]), 128, (5, 2, 4), GREEDY, 0)
    unfetched = second.execute(PrefillPlan(0, (rest,)))
    fetched = second.execute(PrefillPlan(1, (rest,), fetches=(5, 2)))
    assert isinstance(whole, StepDone)
    assert isinstance(unfetched, StepDone)
    assert isinstance(fetched, StepDone)
    assert unfetched.failed.keys() == {0}, "what is not fetched is not there"
    assert list(fetched.tokens) == list(whole.tokens) == expected
