"""One layer, kernel by kernel: the published decode profile, and sums of ops."""

from collections.abc import Sequence

import pytest

from bench.calibration_points import DECODE_PROFILE
from hadal.core.config import DECODE, PREFILL
from hadal.core.model_config import parse_model_config
from hadal.lab.perf.layer import Kernel, MicroBatchLoad, kernels_of, op_seconds
from hadal.lab.perf.step import StepModel
from hadal.overlap.plan import ATTN_CORE, ATTN_IN, COMBINE, DISPATCH, EXPERTS, GATE, SHARED
from tests.family import CONFIGS

PROFILE = MicroBatchLoad(128, 128 * 4096, 64 * 4096, 128)


def seconds_of(kernels: Sequence[Kernel]) -> float:
    return sum(kernel.seconds for kernel in kernels)


def test_stages_of_the_decode_profile() -> None:
    """Compare us: ATTN-0 63, ATTN-1 344, dispatch 187, experts 128, combine 394, shared 34."""
    kernels = StepModel(128).kernels(DECODE, PROFILE, is_overlapped=True)
    published = {
        ATTN_IN: 63,
        ATTN_CORE: 325,
        GATE: 19,
        DISPATCH: 187,
        EXPERTS: 128,
        COMBINE: 394,
        SHARED: 34,
    }
    for op, us in published.items():
        assert seconds_of(kernels_of(kernels, op)) * 1e6 == pytest.approx(us, rel=0.18), op
    assert seconds_of(kernels) * 1e6 == pytest.approx(sum(published.values()), rel=0.02)


def test_every_published_kernel_is_priced() -> None:
    priced = {
        (kernel.op, kernel.name)
        for kernel in StepModel(128).kernels(DECODE, PROFILE, is_overlapped=True)
    }
    assert {(op, name) for name, op, _ in DECODE_PROFILE} == priced


def test_what_was_priced_before_costs_the_same_again() -> None:
    model = StepModel(128)
    for tokens, pairs in ((128, 1e6), (64, 1e6), (128, 2e6), (128, 1e6)):
        batch = MicroBatchLoad(tokens, pairs, pairs, tokens)
        for is_overlapped in (False, True):
            priced = model.kernels(DECODE, batch, is_overlapped=is_overlapped)
            assert priced == StepModel(128).kernels(DECODE, batch, is_overlapped=is_overlapped)


@pytest.mark.parametrize("phase", [DECODE, PREFILL])
def test_ops_are_the_sums_of_their_kernels(phase: str) -> None:
    kernels = StepModel(32).kernels(phase, PROFILE, is_overlapped=False)
    ops = op_seconds(kernels, 1e-6)
    assert ops.post == 1e-6
    found = (
        ops.attn_in
        + ops.attn_core
        + ops.gate
        + ops.shared
        + ops.experts
        + ops.dispatch
        + ops.combine
    )
    assert found == pytest.approx(seconds_of(kernels))
    assert ops.experts == pytest.approx(seconds_of(kernels_of(kernels, EXPERTS)))


def test_imbalance_slows_experts_and_links_and_nothing_else() -> None:
    model = StepModel(72)
    even = op_seconds(model.kernels(DECODE, PROFILE, is_overlapped=True), 0.0)
    skewed_batch = MicroBatchLoad(128, 128 * 4096, 64 * 4096, 128, expert_imbalance=1.5)
    skewed = op_seconds(model.kernels(DECODE, skewed_batch, is_overlapped=True), 0.0)
    found = (skewed.attn_in, skewed.attn_core, skewed.gate, skewed.shared)
    assert found == (even.attn_in, even.attn_core, even.gate, even.shared)
    assert skewed.experts > even.experts
    assert skewed.dispatch > 1.3 * even.dispatch
    assert skewed.combine > 1.3 * even.combine


def test_a_halved_micro_batch_is_half_of_everything() -> None:
    assert PROFILE.scaled(0.5) == MicroBatchLoad(64, 64 * 4096, 32 * 4096, 64)


@pytest.mark.parametrize("phase", [DECODE, PREFILL])
def test_sparse_attention_costs_no_less_for_more_and_less_than_dense(phase: str) -> None:
    """Attend with 128 tokens at ever longer contexts. Within index_topk the indexer adds only its
    projections; far beyond it, attention is cheaper than V3's.
    """
    sparse = StepModel(128, model=parse_model_config(CONFIGS["DeepSeek-V3.2"], "f"))
    dense = StepModel(128)
    seconds = []
    for context in (1024, 2048, 2100, 3000, 4096, 16384, 65536, 131072):
        batch = MicroBatchLoad(128, 128 * context, 64 * context, 128)
        kernels = sparse.kernels(phase, batch, is_overlapped=False)
        names = {kernel.name for kernel in kernels}
        assert ("index scores" in names) == ("select" in names) == (context > 2048)
        seconds.append(op_seconds(kernels, 0.0).attn_core)
    assert seconds == sorted(seconds)
    last = op_seconds(dense.kernels(phase, batch, is_overlapped=False), 0.0).attn_core
    assert seconds[-1] < 0.6 * last
