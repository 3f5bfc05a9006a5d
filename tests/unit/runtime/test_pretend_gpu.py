"""Test that a rank's Runner on the pretend GPU draws the CPU's tokens: prefill in two
micro-batches, decode, drafts, log-probabilities, masks; FP32 and FP8; one rank, and two over NCCL
and gloo.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from hadal.core.config import Deployment, UnitsConfig, num_cache_layers
from hadal.core.plans import (
    Chunk,
    DecodePlan,
    Draw,
    Formed,
    FormPlan,
    Grammar,
    Join,
    Member,
    PrefillPlan,
    Sampling,
    Score,
    StepDone,
    StepPlan,
)
from hadal.kernels import library
from hadal.model.runner import ModelRunner
from hadal.roles.leaders import first_placement
from hadal.runtime.process.process import Run
from hadal.runtime.rank.device import open_device
from hadal.runtime.rank.host import make_group
from hadal.runtime.rank.news import News
from hadal.runtime.rank.runner import make_lone_runner, make_runner
from hadal.runtime.resolve import Resolved, model_folder, plan
from hadal.runtime.transfer.pool import KvPool, pool_name, remove_shared_memory
from hadal.tokens.grammars import grammar_text
from tests.pretend import pretend_gpu
from tests.waiting import DEADLINE_S, join

RUN = f"pretend{os.getpid()}"
ROLE = "decode"
NUM_BLOCKS = 2
"""Blocks per request."""
LISTS = Grammar(
    grammar_text({"type": "array", "items": {"enum": [1, 23]}}, follows_reasoning=False), (1,)
)
ASKED: tuple[tuple[str, Sampling], ...] = (
    ("What is 12 + 30?", Sampling(temperature=0.0, num_logprobs=3)),
    (
        "Sort these words: pear, fig, apple, plum, quince, date, cherry",
        Sampling(
            temperature=0.9,
            top_p=0.95,
            top_k=40,
            min_p=0.01,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            seed=5,
        ),
    ),
    ("Write a list of numbers.", Sampling(temperature=1.3, seed=7, num_logprobs=0, grammar=LISTS)),
    (
        "Reverse the word harbour",
        Sampling(temperature=1.0, seed=9, logit_bias=((40, 2.0), (41, -5.0))),
    ),
)
STOP_IDS, MIN_TOKENS = (1,), 4
NUM_SCORES = 2
TOLERANCE = 1e-3
"""Tolerance of log-probabilities in FP32: sums in another order."""
ROUNDED_TOLERANCE = 0.1
"""Tolerance of log-probabilities where a last bit may round to another FP8 code."""


@dataclass(frozen=True)
class Case:
    """Number formats and requests of a test case."""

    dispatch_format: str = "fp32"
    compute: str = "fp32"
    num_drafts: int = 1
    asked: tuple[int, ...] = tuple(range(len(ASKED)))
    """Indices in ASKED."""
    num_steps: int = 5

    @property
    def is_rounded(self) -> bool:
        return (self.dispatch_format, self.compute) != ("fp32", "fp32")


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    remove_shared_memory(RUN)


@functools.cache
def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(model_folder("") / "tokenizer.json"))
    turns = (
        f"<｜begin▁of▁sentence｜><｜User｜>{text}<｜Assistant｜><think>\n" for text, _ in ASKED
    )
    return [tuple(tokenizer.encode(turn, add_special_tokens=False).ids) for turn in turns]


def resolved_of(
    case: Case, device: str, num_ranks: int = 1, *, transport: str = "auto", mode: str = ""
) -> Resolved:
    units = UnitsConfig(
        ranks=num_ranks,
        kv_blocks=1 + NUM_BLOCKS * len(ASKED),
        max_requests=128,
        threads=1,
        drafts=case.num_drafts,
        mode=mode,
    )
    return plan(
        Deployment(
            device=device,
            transport=transport,
            dispatch_format=case.dispatch_format,
            compute=case.compute,
            decode=units,
        )
    )


def pool_of(resolved: Resolved, rank: int) -> KvPool:
    config, deployment = resolved.config, resolved.deployment
    layers = num_cache_layers(deployment, config)
    shape = (deployment.decode.kv_blocks, layers, 64, config.entry_dim)
    return KvPool.create(pool_name(RUN, f"decode-0.{rank}", "1"), shape)


class Rank:
    """Runner, and just enough of a leader to drive it."""

    def __init__(self, runner: ModelRunner, case: Case, own: tuple[int, ...]) -> None:
        self._runner = runner
        self._case = case
        self._own = own
        self._steps = itertools.count()
        self.answers = {number: Answer() for number in own}

    def serve(self) -> None:
        """Prefill the prompts in two steps of two micro-batches, transfer their KV through the
        pool, and decode in two micro-batches.
        """
        parts = [self._chunks(number) for number in self._own]
        self._prefill([first for first, _, _ in parts], [second for _, second, _ in parts])
        last = [third for _, _, third in parts]
        self._prefill(last[:1], last[1:])
        joins = tuple(self._join(slot, number) for slot, number in enumerate(self._own))
        for step in range(self._case.num_steps):
            is_last = step == self._case.num_steps - 1
            plan = DecodePlan(
                next(self._steps),
                leaves=(0,) if is_last and 0 in self._own else (),
                joins=joins if step == 0 else (),
                grown=(),
                schedule="decode_five",
                second=tuple(range(1, len(joins))),
                num_micro_batches=2,
                publishes=(len(joins) - 1,) if step == 1 else (),
                is_counted=True,
                publishes_full=True,
                num_drafts=self._case.num_drafts,
            )
            done = self._done(plan)
            self._note(done, [self._own[slot] for slot in done.keys])

    def _blocks(self, number: int) -> tuple[int, ...]:
        return tuple(range(1 + number * NUM_BLOCKS, 1 + (number + 1) * NUM_BLOCKS))

    def _chunks(self, number: int) -> list[Chunk]:
        """Return the prompt in three chunks, all tokens scored. A token is drawn after the last
        one.
        """
        prompt, sampling = prompts()[number], ASKED[number][1]
        ends = 0, len(prompt) // 3, 2 * len(prompt) // 3, len(prompt)
        return [
            Chunk(
                str(number),
                prompt[start:end],
                start,
                self._blocks(number)[: -(-end // 64)],
                sampling if end == len(prompt) else None,
                0,
                prompt=prompt,
                stop_ids=STOP_IDS,
                min_tokens=MIN_TOKENS,
                num_scores=NUM_SCORES,
                following=-1 if end == len(prompt) else prompt[end],
            )
            for start, end in itertools.pairwise(ends)
        ]

    def _prefill(self, first: list[Chunk], second: list[Chunk]) -> None:
        chunks = [*first, *second]
        plan = PrefillPlan(
            next(self._steps),
            tuple(first),
            "prefill_dual",
            tuple(second),
            num_micro_batches=2,
            is_traced=True,
            is_counted=True,
        )
        done = self._done(plan)
        self._note(done, [int(chunks[index].request_id) for index in done.keys])
        for index, scores in done.scores.items():
            self.answers[int(chunks[index].request_id)].scores += scores

    def _join(self, slot: int, number: int) -> Join:
        prompt, tokens = prompts()[number], tuple(self.answers[number].tokens)
        return Join(
            slot,
            self._blocks(number),
            len(prompt),
            tokens[-1],
            1,
            ASKED[number][1],
            prompt=prompt,
            output=tokens,
            stop_ids=STOP_IDS,
            min_tokens=MIN_TOKENS,
            is_pulled=True,
        )

    def _note(self, done: StepDone, numbers: list[int]) -> None:
        for number, token in zip(numbers, done.tokens, strict=True):
            self.answers[number].tokens.append(token)
        for index, draw in done.draws.items():
            self.answers[numbers[index]].draws.append(draw)

    def _done(self, plan: StepPlan) -> StepDone:
        done = self._runner.execute(plan)
        assert isinstance(done, StepDone)
        assert done.error is None, done.error
        assert not done.failed
        return done


def served_alone(case: Case, device: str) -> dict[int, Answer]:
    """Return the answers of a unit of one rank."""
    resolved = resolved_of(case, device)
    pool = pool_of(resolved, 0)
    where = open_device(0 if device == "cuda" else None)
    runner = make_lone_runner(resolved.deployment, resolved.config, ROLE, pool, where)
    rank = Rank(runner, case, case.asked)
    try:
        rank.serve()
    finally:
        runner.close()
        pool.close()
    return rank.answers


def served_by_two(case: Case, folder: Path, transport: str, mode: str) -> dict[int, Answer]:
    """Return the answers of a unit of two ranks: threads that share the GPU."""
    resolved = resolved_of(case, "cuda", 2, transport=transport, mode=mode)
    deployment, config = resolved.deployment, resolved.config
    placement = first_placement(deployment, config, ROLE)
    members = tuple(Member(rank, f"e{rank}", Run.address, 0) for rank in range(2))
    form = FormPlan(1, 2, members, placement.to_bytes(), placement.num_expert_slots)
    run = Run(RUN, deployment, secret=bytes(32))
    answers: dict[int, Answer] = {}
    barrier = threading.Barrier(2)

    def work(index: int) -> None:
        device = open_device(0)
        group = make_group(run, index, f"e{index}", News(), folder=folder, device=device)
        pool = pool_of(resolved, index)
        runner, _ = make_runner(deployment, config, ROLE, index, group, pool, device)
        try:
            formed = runner.execute(form)
            assert isinstance(formed, Formed)
            assert formed.error is None
            rank = Rank(runner, case, case.asked[index::2])
            rank.serve()
            answers.update(rank.answers)
            barrier.wait(DEADLINE_S)  # A rank that leaves ends the other's formation.
        finally:
            runner.close()
            pool.close()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    join(*threads)
    return answers


@functools.cache
def on_the_cpu(case: Case) -> dict[int, Answer]:
    """Return the CPU's answers. With rounded values they are by plain torch, not the CPU kernels: a
    last bit may give another FP8 code, and with it another draw.
    """
    with pytest.MonkeyPatch.context() as patch:
        if case.is_rounded:
            patch.setattr(library, "load", lambda: None)
            patch.setattr("hadal.runtime.rank.runner.load", lambda: None)
        return served_alone(case, "cpu")


def check(case: Case, answers: dict[int, Answer]) -> None:
    """Raise AssertionError unless these are the CPU's answers."""
    expected = on_the_cpu(case)
    assert sorted(answers) == sorted(expected)
    for number, answer in answers.items():
        theirs = expected[number]
        assert answer.tokens == theirs.tokens, f"request {number}"
        assert len(answer.draws) == len(theirs.draws)
        assert len(answer.scores) == len(theirs.scores)
        for ours, other in zip(
            [*answer.draws, *answer.scores], [*theirs.draws, *theirs.scores], strict=True
        ):
            tolerance = ROUNDED_TOLERANCE if case.is_rounded else TOLERANCE
            assert ours.logprob == pytest.approx(other.logprob, abs=tolerance)
            assert len(ours.top) == len(other.top)
            if not case.is_rounded:
                assert [token for token, _ in ours.top] == [token for token, _ in other.top]


FP32 = Case()
FP8 = Case("fp8", "fp8", asked=(0, 2), num_steps=3)
DISPATCH_ALONE = Case("fp8_pow2", num_drafts=0, num_steps=3)
TWO_DRAFTS = Case(num_drafts=2)


@pytest.mark.parametrize(
    "case",
    [
        FP8,
        pytest.param(FP32, marks=pytest.mark.more("two ranks compute in FP32")),
        pytest.param(DISPATCH_ALONE, marks=pytest.mark.more("FP8 is one case")),
        pytest.param(TWO_DRAFTS, marks=pytest.mark.more("one draft is one case")),
    ],
    ids=str,
)
def test_one_rank_on_a_gpu_draws_the_cpus_tokens(case: Case) -> None:
    with pretend_gpu():
        answers = served_alone(case, "cuda")
    check(case, answers)


@pytest.mark.parametrize(
    ("case", "transport", "mode"),
    [
        (FP32, "nccl", "normal"),
        (FP8, "nccl", "low_latency"),
        pytest.param(DISPATCH_ALONE, "gloo", "normal", marks=pytest.mark.more("slower than NCCL")),
        pytest.param(TWO_DRAFTS, "nccl", "normal", marks=pytest.mark.more("one draft is one case")),
    ],
    ids=str,
)
def test_two_ranks_on_gpus_draw_the_cpus_tokens(
    tmp_path: Path, case: Case, transport: str, mode: str
) -> None:
    with pretend_gpu():
        answers = served_by_two(case, tmp_path, transport, mode)
    check(case, answers)
