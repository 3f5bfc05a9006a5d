"""Kernel curves: close to their tables, monotone, scaled to other hardware."""

import csv
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hadal.lab.perf.hardware import H800, HARDWARE
from hadal.lab.perf.roofline import (
    BF16,
    COMPUTE,
    CONTIGUOUS,
    CURVES,
    DENSE,
    FP4,
    FP8,
    LAUNCH,
    MASKED,
    MEMORY,
    MHA_PREFILL,
    MLA_DECODE,
    Roofline,
)
from hadal.perf.shapes import (
    DEEPSEEK_V3,
    absorbed_flops_per_pair,
    causal_pairs,
    expanded_flops_per_pair,
)
from tests.needs import shared_data

LINE = Roofline(H800)
DECODE_FLOPS = absorbed_flops_per_pair(DEEPSEEK_V3)
PREFILL_FLOPS = expanded_flops_per_pair(DEEPSEEK_V3)


def mla(line: Roofline, requests: float, context: float, queries: int = 1) -> float:
    rows = requests * queries
    return line.mla_decode(
        rows, rows * context, requests * context * 1152, DECODE_FLOPS, 128 * 1088 * 2
    ).seconds


def mha(line: Roofline, context: float) -> float:
    return line.mha_prefill(
        context, causal_pairs(context, 0), PREFILL_FLOPS, context * 128 * 640 * 2
    ).seconds


def table(name: str) -> Iterator[dict[str, str]]:
    with (shared_data("h800_kernels") / name).open(newline="") as file:
        yield from csv.DictReader(file)


def residual(pairs: Iterator[tuple[float, float]]) -> float:
    return statistics.median(abs(math.log(ours / theirs * 1e6)) for ours, theirs in pairs)


def grouped(name: str) -> Iterator[tuple[float, float]]:
    curve = MASKED if "decode" in name else CONTIGUOUS
    for row in table(name):
        slots = int(row["num_local_experts"])
        rows = slots * float(row["tokens_per_expert"])
        if rows < 2 * slots and curve is MASKED:
            continue  # About one token per expert: some get none, and the table does not say which.
        yield LINE.grouped(curve, rows, slots, 4096, 7168).seconds, float(row["up_proj_us"])
        yield LINE.grouped(curve, rows, slots, 7168, 2048).seconds, float(row["down_proj_us"])


def test_residuals_are_what_the_curves_say() -> None:
    dense = (
        (LINE.gemm(float(row["m"]), int(row["n"]), int(row["k"])).seconds, float(row["latency_us"]))
        for row in table("infersim_gemm_h800_data.csv")
    )
    assert residual(dense) == pytest.approx(DENSE.residual, abs=0.01)
    found = residual(grouped("infersim_grouped_gemm_decode_h800_data.csv"))
    assert found == pytest.approx(MASKED.residual, abs=0.01)
    found = residual(grouped("infersim_grouped_gemm_prefill_h800_data.csv"))
    assert found == pytest.approx(CONTIGUOUS.residual, abs=0.01)
    decode = (
        (mla(LINE, float(row["batch_size"]), float(row["kv_len"])), float(row["latency_us"]))
        for row in table("infersim_mla_decode_h800_128-512-64.csv")
    )
    assert residual(decode) == pytest.approx(MLA_DECODE.residual, abs=0.01)
    prefill = (
        (mha(LINE, float(row["seq_len"])), float(row["latency_us"]))
        for row in table("infersim_mla_prefill_h800_128-128-64.csv")
    )
    assert residual(prefill) == pytest.approx(MHA_PREFILL.residual, abs=0.01)


def test_the_decode_profiles_kernels() -> None:
    """Check anchors that are restated here, so that curves are tested without the tables, too."""
    assert LINE.gemm(128, 2112, 7168).seconds == pytest.approx(13e-6, rel=0.03)
    assert LINE.gemm(128, 24576, 1536).seconds == pytest.approx(19e-6, rel=0.08)
    assert LINE.gemm(128, 7168, 16384).seconds == pytest.approx(50e-6, rel=0.05)
    assert mla(LINE, 64, 4096, queries=2) == pytest.approx(255e-6, rel=0.01)
    both = (
        LINE.grouped(MASKED, 1024, 2, 4096, 7168).seconds
        + LINE.grouped(MASKED, 1024, 2, 7168, 2048).seconds
    )
    assert both == pytest.approx(120e-6, rel=0.1)


def test_bounds_are_named() -> None:
    assert LINE.gemm(16384, 7168, 16384).bound == COMPUTE
    assert LINE.gemm(64, 7168, 16384).bound == MEMORY
    assert LINE.elementwise(0.0).bound == LAUNCH
    assert LINE.elementwise(1e9).bound == MEMORY
    # With one query, reading takes as long as computing; with two, computing takes twice as long.
    assert LINE.mla_decode(128, 128 * 4096, 64 * 4096 * 1152, DECODE_FLOPS, 1).bound == COMPUTE


def test_no_kernel_beats_the_hardware() -> None:
    for name, hardware in HARDWARE.items():
        line = Roofline(hardware)
        assert (
            line.gemm(8192, 7168, 16384).seconds > 2 * 8192 * 7168 * 16384 / hardware.fp8_flops
        ), name
        assert line.gemm(16, 7168, 16384).seconds > 7168 * 16384 / hardware.hbm_bytes_per_s, name
        assert mha(line, 8192) > causal_pairs(8192, 0) * PREFILL_FLOPS / hardware.bf16_flops, name
        assert mla(line, 256, 8192) > 256 * 8192 * 1152 / hardware.hbm_bytes_per_s, name


def test_sms_and_clock_slow_what_computes_and_not_what_reads() -> None:
    fewer = Roofline(H800, sm_share=108 / 132)
    throttled = Roofline(H800, is_sustained=True)
    for line in (fewer, throttled):
        assert line.gemm(8192, 7168, 16384).seconds > 1.1 * LINE.gemm(8192, 7168, 16384).seconds
        assert line.elementwise(1e9) == LINE.elementwise(1e9)
    # An H20 is not power-limited, so its sustained clock is its full clock.
    cool = HARDWARE["h20"]
    found = Roofline(cool, is_sustained=True).gemm(8192, 7168, 16384)
    assert found == Roofline(cool).gemm(8192, 7168, 16384)
    with pytest.raises(ValueError, match="sm_share"):
        Roofline(H800, sm_share=0.0)


def test_fp4_halves_what_is_read() -> None:
    line = Roofline(HARDWARE["gb200"])
    ratio = (
        line.grouped(MASKED, 64, 32, 4096, 7168, FP4).seconds
        / line.grouped(MASKED, 64, 32, 4096, 7168).seconds
    )
    assert 0.5 < ratio < 0.7


def test_a_curve_has_a_source_and_a_residual() -> None:
    assert all(curve.source and 0.0 < curve.residual < 0.1 for curve in CURVES.values())


@settings(derandomize=True)
@given(
    rows=st.floats(0.5, 65536),
    by=st.floats(1.0, 4.0),
    n=st.integers(64, 32768),
    k=st.integers(128, 20000),
    slots=st.integers(1, 300),
    dtype=st.sampled_from([FP8, BF16]),
    name=st.sampled_from(list(HARDWARE)),
)
def test_more_rows_wider_layers_and_more_experts_take_longer(
    rows: float, by: float, n: int, k: int, slots: int, dtype: str, name: str
) -> None:
    line = Roofline(HARDWARE[name])
    at_all = line.gemm(rows, n, k, dtype).seconds
    assert at_all <= line.gemm(rows * by, n, k, dtype).seconds
    assert at_all <= line.gemm(rows, n * 2, k, dtype).seconds
    assert at_all <= line.gemm(rows, n, k * 2, dtype).seconds
    for curve in (MASKED, CONTIGUOUS):
        hit = line.grouped(curve, rows, slots, n, k).seconds
        assert hit <= line.grouped(curve, rows * by, slots, n, k).seconds * (1 + 1e-12)
        assert hit <= line.grouped(curve, rows, slots + 1, n, k).seconds * (1 + 1e-12)


@settings(derandomize=True)
@given(
    st.floats(0.5, 1024),
    st.floats(1.0, 2e5),
    st.floats(1.0, 3.0),
    st.integers(1, 3),
    st.sampled_from(list(HARDWARE)),
)
def test_longer_contexts_and_more_requests_take_longer(
    requests: float, context: float, by: float, queries: int, name: str
) -> None:
    line = Roofline(HARDWARE[name])
    at_all = mla(line, requests, context, queries)
    assert at_all <= mla(line, requests * by, context, queries)
    assert at_all <= mla(line, requests, context * by, queries)
    assert at_all <= mla(line, requests, context, queries + 1)
    assert mha(line, context) <= mha(line, context * by)


@pytest.mark.promise(
    "Every curve is smooth and grows with its inputs, so one more request or token "
    "never makes a step cheaper."
)
def test_there_is_no_cliff() -> None:
    """Add 1 % of rows: it never costs more than 2 %. Nearest-row look-ups fail this."""
    rows = 1.0
    while rows < 32768:
        for seconds in (
            lambda m: LINE.gemm(m, 7168, 16384).seconds,
            lambda m: LINE.grouped(MASKED, m, 4, 4096, 7168).seconds,
            lambda m: mla(LINE, m, 4096),
        ):
            assert seconds(rows * 1.01) / seconds(rows) < 1.02
        rows *= 1.01


def test_faster_memory_and_tensor_cores_are_faster() -> None:
    wide = Roofline(replace(H800, hbm_bytes_per_s=2 * H800.hbm_bytes_per_s))
    fast = Roofline(replace(H800, fp8_flops=2 * H800.fp8_flops, bf16_flops=2 * H800.bf16_flops))
    assert wide.gemm(16, 7168, 16384).seconds < 0.7 * LINE.gemm(16, 7168, 16384).seconds
    assert fast.gemm(16384, 7168, 16384).seconds < 0.7 * LINE.gemm(16384, 7168, 16384).seconds
