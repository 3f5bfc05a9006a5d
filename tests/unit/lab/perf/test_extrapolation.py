"""Notes on extrapolation: for sizes outside the tables, and for no others."""

import pytest

from hadal.lab.perf.hardware import HARDWARE
from hadal.lab.perf.step import StepModel


def test_the_published_profiles_are_inside() -> None:
    assert StepModel(128).decode(128, 4096, 1, schedule="decode_five").extrapolated == ()
    assert StepModel(32).prefill(16384, 4096, schedule="prefill_dual").extrapolated == ()


@pytest.mark.parametrize(
    ("ranks", "batch", "kv", "mtp", "words"),
    [
        (320, 128, 4096, 0, "ranks (DeepEP low latency): 320, measured from 8 to 256"),
        (4, 128, 4096, 0, "ranks (DeepEP low latency): 4,"),
        (128, 128, 200_000, 0, "context of a request (FlashMLA): 200000"),
        (128, 128, 100, 0, "context of a request (FlashMLA): 100,"),
        (128, 2, 4096, 0, "tokens of a micro-batch (GEMM): 2,"),
        (128, 1000, 4096, 0, "tokens of a micro-batch (DeepEP low latency)"),
        (128, 1200, 4096, 0, "requests of a micro-batch (FlashMLA)"),
        (128, 2400, 4096, 0, "rows of an expert (masked grouped GEMM)"),
        (128, 64, 4096, 2, "3 query tokens"),
    ],
)
def test_decode_inputs_outside(ranks: int, batch: int, kv: int, mtp: int, words: str) -> None:
    flags = StepModel(ranks).decode(batch, kv, mtp).extrapolated
    assert any(words in flag for flag in flags), flags


@pytest.mark.parametrize(
    ("ranks", "tokens", "prompt", "words"),
    [
        (128, 16384, 4096, "ranks (DeepEP normal): 128"),
        (32, 16384, 64, "prompt (FlashAttention 3): 64"),
        (32, 16384, 131072, "prompt (FlashAttention 3): 131072"),
        (32, 2_000_000, 4096, "rows of an expert (contiguous grouped GEMM)"),
        (32, 8, 4096, "tokens of a micro-batch (GEMM)"),
    ],
)
def test_prefill_inputs_outside(ranks: int, tokens: int, prompt: int, words: str) -> None:
    flags = StepModel(ranks).prefill(tokens, prompt).extrapolated
    assert any(words in flag for flag in flags), flags


def test_hardware_says_what_is_scaled() -> None:
    assert not any("hardware" in flag for flag in StepModel(72).decode(128, 4096).extrapolated)
    (flag,) = [
        flag
        for flag in StepModel(72, HARDWARE["h100"]).decode(128, 4096).extrapolated
        if "hardware" in flag
    ]
    assert "links scaled" in flag
    (flag,) = [
        flag
        for flag in StepModel(72, HARDWARE["gb200"]).decode(128, 4096).extrapolated
        if "hardware" in flag
    ]
    assert "FLOP/s, SMs and HBM" in flag
    fp4 = StepModel(72, HARDWARE["gb200"], expert_dtype="fp4").decode(128, 4096)
    assert any("FP4" in flag for flag in fp4.extrapolated)
