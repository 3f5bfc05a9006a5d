"""A whole step: monotone, calibrated within its aims, chosen by price, refused if impossible."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadal.core.config import DECODE, PREFILL
from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.layer import MicroBatchLoad
from hadal.lab.perf.step import StepModel, redundant_default, tokens_per_step
from hadal.overlap.plan import DECODE_FIVE, SCHEDULES, SEQUENTIAL
from hadal.perf.shapes import DEEPSEEK_V3, kv_bytes_per_token

RANKS = st.integers(1, 320)
HARDWARES = st.sampled_from(list(HARDWARE))
WAYS = st.sampled_from(["auto", *SCHEDULES])
NEVER_CHEAPER = 1.0 + 1e-12


@pytest.mark.promise(
    "Every curve is smooth and grows with its inputs, so one more request or token "
    "never makes a step cheaper."
)
@settings(derandomize=True)
@given(
    ranks=RANKS,
    name=HARDWARES,
    way=WAYS,
    batch=st.integers(2, 700),
    more=st.integers(1, 100),
    kv=st.floats(1.0, 160_000.0),
    by=st.floats(1.0, 4.0),
    mtp=st.integers(0, 3),
)
def test_decode_grows_with_batch_context_and_drafts(
    ranks: int, name: str, way: str, batch: int, more: int, kv: float, by: float, mtp: int
) -> None:
    model = StepModel(ranks, HARDWARE[name])
    seconds = model.decode(batch, kv, mtp, way).seconds
    assert seconds <= model.decode(batch + more, kv, mtp, way).seconds * NEVER_CHEAPER
    assert seconds <= model.decode(batch, kv * by, mtp, way).seconds * NEVER_CHEAPER
    assert seconds <= model.decode(batch, kv, mtp + 1, way).seconds * NEVER_CHEAPER


@settings(derandomize=True)
@given(
    ranks=RANKS,
    name=HARDWARES,
    way=WAYS,
    tokens=st.integers(2, 65536),
    more=st.integers(1, 4096),
    prompt=st.integers(128, 131_072),
    by=st.floats(1.0, 4.0),
)
def test_prefill_grows_with_tokens_and_prompt(
    ranks: int, name: str, way: str, tokens: int, more: int, prompt: int, by: float
) -> None:
    """Vary prompts from 128 tokens on: shorter ones draw many more first tokens per step."""
    model = StepModel(ranks, HARDWARE[name])
    seconds = model.prefill(tokens, prompt, schedule=way).seconds
    assert seconds <= model.prefill(tokens + more, prompt, schedule=way).seconds * NEVER_CHEAPER
    assert seconds <= model.prefill(tokens, prompt * by, schedule=way).seconds * NEVER_CHEAPER


@settings(derandomize=True)
@given(
    st.integers(1, 600),
    st.floats(100.0, 50_000.0),
    st.floats(1.0, 2.0),
    st.sampled_from([8, 72, 144]),
)
def test_imbalance_never_helps(batch: int, kv: float, by: float, ranks: int) -> None:
    model = StepModel(ranks)
    even = model.decode(batch, kv, expert_imbalance=1.0).seconds
    assert even <= model.decode(batch, kv, expert_imbalance=by).seconds
    assert even <= model.decode(batch, kv, expert_imbalance=1.0, attention_imbalance=by).seconds


@pytest.mark.promise(
    "Every curve is smooth and grows with its inputs, so one more request or token "
    "never makes a step cheaper."
)
def test_small_batches_are_monotone_too() -> None:
    """Count up from one request, which cannot be cut in two micro-batches, to two and more."""
    model = StepModel(144)
    seconds = [model.decode(batch, 4989).seconds for batch in range(1, 65)]
    assert seconds == sorted(seconds)
    seconds = [model.prefill(tokens, 131_072).seconds for tokens in range(1, 65)]
    assert seconds == sorted(seconds)


def test_auto_is_the_cheapest_and_changes_with_the_batch() -> None:
    model = StepModel(144)
    for batch in (1, 8, 64, 128, 256):
        auto = model.decode(batch, 4989)
        names = [name for name in SCHEDULES if batch > 1 or name == "sequential"]
        ways = [model.decode(batch, 4989, schedule=name).seconds for name in names]
        assert auto.seconds == min(ways)
    assert model.decode(1, 4989).schedule is SEQUENTIAL
    assert model.decode(96, 4989).schedule is DECODE_FIVE


def test_the_decode_pipeline_of_the_published_profile() -> None:
    """Price the published profile: 709 us by stages, 716 us as 87.3 ms / 61 layers / 2 micro-batches."""
    step = StepModel(128).decode(128, 4096, 1, mtp_accept=0.74, expert_imbalance=1.0)
    assert step.schedule is DECODE_FIVE
    assert 700e-6 < step.micro_batch_layer_s < 725e-6
    assert step.tokens_per_s_gpu == pytest.approx(step.tokens_per_s_user * 128)  # type: ignore[operator]


def test_overlap_pays_where_it_was_measured_to() -> None:
    """Compare with the gain in SGLang's prefill: 27 to 35 %."""
    model = StepModel(32, HARDWARE["h100"])
    gain = (
        model.prefill(16384, 1024, schedule="sequential").seconds
        / model.prefill(16384, 1024).seconds
    )
    assert 1.25 < gain < 1.40


def test_accepted_tokens_are_a_geometric_sum() -> None:
    assert tokens_per_step(0, 0.8) == 1.0
    assert tokens_per_step(1, 0.8) == 1.8
    assert tokens_per_step(3, 0.5) == pytest.approx(1.875)
    model = StepModel(144)
    one, two = model.decode(88, 4989, 1, mtp_accept=0.5), model.decode(88, 4989, 1, mtp_accept=1.0)
    assert one.seconds == two.seconds
    assert two.tokens_per_s_gpu == pytest.approx(one.tokens_per_s_gpu * 2.0 / 1.5)


def test_a_cached_prefix_costs_attention_and_keys_but_not_the_rest() -> None:
    model = StepModel(32)
    cold, warm = model.prefill(16384, 4096), model.prefill(16384, 8192, cached_tokens=4096)
    assert cold.seconds < warm.seconds < 2 * cold.seconds
    assert warm.seconds < model.prefill(32768, 8192).seconds


def test_weights_and_kv_of_deepseeks_units() -> None:
    """Check a decode rank: 88 requests at 4,989 tokens are 30.9 GB of KV; weights are 24.2 GB."""
    model = StepModel(144)
    assert model.num_expert_slots == 2
    assert model.hbm_bytes(88 * 4989) == pytest.approx(24.2e9 + 30.9e9, rel=0.01)
    assert model.hbm_bytes(1) - model.hbm_bytes(0) == kv_bytes_per_token(DEEPSEEK_V3)
    assert StepModel(32).num_expert_slots == 9


def test_a_unit_that_drafts_holds_the_draft_layer() -> None:
    """Add the draft layer: 11.5 billion weights in the released checkpoints, a byte each (V3's
    README: 14 billion).
    """
    weights = StepModel(1).hbm_bytes(0, mtp_tokens=1) - StepModel(1).hbm_bytes(0)
    assert weights == pytest.approx(11.5e9, rel=0.01)
    model = StepModel(144)
    plain, drafts, more = (model.decode(88, 4989, mtp_tokens).hbm_bytes for mtp_tokens in (0, 1, 3))
    kv_bytes = 88 * 4989 * kv_bytes_per_token(DEEPSEEK_V3, 1)
    assert drafts - plain == pytest.approx(kv_bytes + model.hbm_bytes(0, 1) - model.hbm_bytes(0))
    assert more == drafts, "V3 has one draft layer, however often it is used"


def test_another_shape_of_the_same_architecture() -> None:
    """Price a shape without groups and query compression, like small models of the family."""
    small = replace(
        DEEPSEEK_V3,
        hidden_size=512,
        num_hidden_layers=6,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=None,
        num_attention_heads=8,
        moe_intermediate_size=256,
        intermediate_size=1024,
    )
    model = StepModel(4, model=small, num_redundant=0)
    assert 0.0 < model.decode(8, 500).seconds < model.decode(16, 500).seconds
    assert 0.0 < model.prefill(512, 256).seconds < StepModel(4).prefill(512, 256).seconds


def test_redundancy_where_it_divides() -> None:
    found = [redundant_default(DEEPSEEK_V3, ranks) for ranks in (1, 32, 72, 128, 144, 320)]
    assert found == [0, 32, 32, 0, 32, 64]


def test_a_simulators_way_in_gives_the_same_seconds() -> None:
    model = StepModel(144)
    step = model.decode(88, 4989, schedule="decode_five")
    seconds = model.price_works(DECODE, DECODE_FIVE, step.micro_batches, num_rows=88).seconds
    assert seconds == step.seconds
    prefill = model.prefill(8192, 4096, schedule="sequential")
    found = model.price_works(PREFILL, SEQUENTIAL, prefill.micro_batches, num_rows=2).seconds
    assert found == prefill.seconds


def test_the_slowest_ranks_attention_counts_and_the_mean_ranks_experts() -> None:
    model = StepModel(144)
    even = MicroBatchLoad(44, 44 * 5000, 44 * 5000, 44)
    slow = replace(even, num_pairs=60 * 5000, context_tokens=60 * 5000)
    busy = replace(even, mean_tokens=60)
    fair = model.price_works(DECODE, DECODE_FIVE, [even, even], num_rows=88).seconds
    assert model.price_works(DECODE, DECODE_FIVE, [slow, even], num_rows=88).seconds > fair
    assert model.price_works(DECODE, DECODE_FIVE, [busy, busy], num_rows=88).seconds > fair


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: StepModel(0), "0 ranks"),
        (lambda: StepModel(100, num_redundant=32), "44 redundant replicas would"),
        (lambda: StepModel(144, placed=0.9), "is 0.9; it must be at least 1"),
        (lambda: StepModel(144, expert_dtype="fp4"), "fp4 on b200 and gb200"),
        (lambda: StepModel(144).decode(0, 100), "requests of a rank: 0"),
        (lambda: StepModel(144).decode(8, math.nan), "KV tokens"),
        (lambda: StepModel(144).decode(8, math.inf), "inf; it must be above 0 and finite"),
        (lambda: StepModel(144).decode(8, 100, -1), "speculative tokens"),
        (lambda: StepModel(144).decode(8, 100, 1, mtp_accept=1.5), "from 0 to 1"),
        (lambda: StepModel(144).decode(8, 100, expert_imbalance=0.5), "expert imbalance is 0.5"),
        (
            lambda: StepModel(144).decode(8, 100, attention_imbalance=0.5),
            "attention imbalance is 0.5",
        ),
        (lambda: StepModel(144).decode(8, 100, schedule="fast"), "use one of auto, sequential"),
        (
            lambda: StepModel(144).decode(1, 100, schedule="decode_five"),
            "cannot be divided into two",
        ),
        (lambda: StepModel(32).prefill(0, 100), "tokens of a rank"),
        (
            lambda: StepModel(32).prefill(100, 100, cached_tokens=100),
            "at least one must be computed",
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()  # type: ignore[operator]
