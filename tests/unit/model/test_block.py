"""A layer's ops in a unit: schedules and modes change no bit, widths and placements change no token."""

from __future__ import annotations

import pytest
import torch

from hadal.core.placement import spread
from hadal.core.plans import Chunk
from hadal.kernels import library
from hadal.overlap.plan import DECODE_FIVE, PREFILL_DUAL, SCHEDULES, SEQUENTIAL, Schedule
from tests.unit.model.checkpoints import Peer
from tests.unit.model.test_deepseek import random_tokens
from tests.unit.model.units import NUM_STEPS, rank_model, unit_logits

TOLERANCE = 1e-4


def make_prompts(peer: Peer, count: int = 5) -> list[list[int]]:
    return [random_tokens(peer, 3 + 19 * i, seed=i) for i in range(count)]


def test_a_comm_of_one_rank_adds_what_the_local_kernel_adds(plain: Peer) -> None:
    prompts = make_prompts(plain)
    logits = unit_logits(plain, 1, prompts, SEQUENTIAL)
    for number, prompt in enumerate(prompts):
        tokens = list(prompt)
        for step in range(NUM_STEPS + 1):
            theirs = plain.logits(tokens)[-1]
            assert float((logits[step, number] - theirs).abs().max()) <= TOLERANCE
            tokens.append(int(theirs.argmax()))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dispatch_format", ["fp32", "fp8"])
def test_overlapped_is_sequential_to_the_bit(
    plain: Peer, num_ranks: int, dispatch_format: str
) -> None:
    """Run the same micro-batches in turn and interleaved, with any order of arrival, in both modes."""
    prompts = make_prompts(plain)
    expected = unit_logits(plain, num_ranks, prompts, SEQUENTIAL, dispatch_format=dispatch_format)
    for seed, schedule in enumerate((PREFILL_DUAL, DECODE_FIVE)):
        for mode in ("normal", "low_latency"):
            logits = unit_logits(
                plain,
                num_ranks,
                prompts,
                schedule,
                dispatch_format=dispatch_format,
                mode=mode,
                seed=seed,
            )
            assert torch.equal(logits, expected), (schedule.name, mode)


@pytest.mark.promise(
    "Rounding therefore depends on neither width (number of ranks), placement, mode "
    "nor arrival order: with the same kernels the results are the same bits."
)
@pytest.mark.parametrize("name", ["plain", "all_moe", "deep"])
@pytest.mark.parametrize("dispatch_format", ["fp32", "fp8", "fp8_pow2"])
def test_widths_and_placements_change_no_bit(
    peers: dict[str, Peer], name: str, dispatch_format: str
) -> None:
    """Compare units of different widths (numbers of ranks) bit by bit. Every kernel gives a row the
    same bits in any batch, so even rounding to FP8 does not make widths differ.

    "deep" prefills in multi-head form. There torch's attention depends on where a prompt is cut, so
    no prompt is cut.
    """
    peer = peers[name]
    prompts = make_prompts(peer)
    num_micro_batches = 1 if name == "deep" else 2
    expected = unit_logits(
        peer,
        1,
        prompts,
        SEQUENTIAL,
        dispatch_format=dispatch_format,
        num_micro_batches=num_micro_batches,
    )
    for num_ranks, num_redundant, schedule in (
        (2, 0, PREFILL_DUAL),
        (2, 8, SEQUENTIAL),
        (4, 16, DECODE_FIVE),
    ):
        logits = unit_logits(
            peer,
            num_ranks,
            prompts,
            schedule,
            num_redundant=num_redundant,
            dispatch_format=dispatch_format,
            num_micro_batches=num_micro_batches,
        )
        if library.load() is not None:
            assert torch.equal(logits, expected)
        # torch's products depend on the batch, and FP8 enlarges a difference in the last bit.
        elif dispatch_format == "fp32":
            assert float((logits - expected).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_idle_ranks_join_with_nothing(
    plain: Peer, schedule: Schedule, num_micro_batches: int
) -> None:
    """Serve one prompt on four ranks: three have no token, and the last layer has one row."""
    prompts = make_prompts(plain, 2)[1:]
    expected = unit_logits(plain, 1, prompts, schedule, num_micro_batches=num_micro_batches)
    logits = unit_logits(plain, 4, prompts, schedule, num_micro_batches=num_micro_batches)
    assert torch.equal(logits, expected)


def test_fp8_dispatch_is_near_fp32(plain: Peer) -> None:
    """Compare logits of FP8 and FP32 dispatch. A dispatched value is off by 2^-4 of its size at
    most and a returned one by 2^-9 (arXiv 2412.19437, 3.3; E4M3 has 3 mantissa bits, BF16 7). So
    logits stay within a few percent of their spread.
    """
    prompts = make_prompts(plain)
    exact = unit_logits(plain, 2, prompts, SEQUENTIAL)[0]
    rounded = unit_logits(plain, 2, prompts, SEQUENTIAL, dispatch_format="fp8")[0]
    difference = (exact - rounded).abs()
    assert 0 < float(difference.mean()) < 2**-4 * float(exact.std())


def test_failed_steps_leave_nothing_live(peers: dict[str, Peer]) -> None:
    """Fail the second micro-batch while the first one's dispatch is in flight; later steps must work."""
    peer = peers["all_moe"]
    model = rank_model(
        peer, None, spread(3, peer.weights.config.n_routed_experts, 1), "fp8", "normal"
    )
    prompt = tuple(random_tokens(peer, 20))
    good, bad = Chunk("a", prompt, 0, (1,), None, 0), Chunk("b", prompt, 0, (99,), None, 0)
    expected = model.prefill_split([[good], []], [[0], []], PREFILL_DUAL)[0]
    for _ in range(3):
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            model.prefill_split([[good], [bad]], [[0], [0]], PREFILL_DUAL)
    assert torch.equal(model.prefill_split([[good], []], [[0], []], PREFILL_DUAL)[0], expected)
