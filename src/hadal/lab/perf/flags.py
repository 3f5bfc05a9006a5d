"""Warnings, as text, about inputs of a step outside the tables that the curves were fitted to."""

from __future__ import annotations

from typing import Protocol

from hadal.core.model_config import ModelConfig
from hadal.lab.perf.hardware import H800, Hardware
from hadal.lab.perf.layer import MicroBatchLoad
from hadal.lab.perf.roofline import FP4

DENSE_ROWS = (16.0, 32768.0)
MASKED_ROWS = (1.0, 4096.0)
CONTIGUOUS_ROWS = (32.0, 32768.0)
MLA_CONTEXT = (1024.0, 131072.0)
MLA_REQUESTS = (1.0, 512.0)
MHA_CONTEXT = (1024.0, 32768.0)
LOW_LATENCY_RANKS = (8, 256)
LOW_LATENCY_TOKENS = (16.0, 256.0)
NORMAL_RANKS = (8, 64)
"""All nine: (lowest, highest) inputs in the tables of lab/perf/roofline and lab/perf/links."""


class PricedUnit(Protocol):
    """Attributes of a StepModel that the flags need."""

    model: ModelConfig
    hardware: Hardware
    num_ranks: int
    num_expert_slots: int
    expert_dtype: str


def decode_flags(
    unit: PricedUnit, batch: MicroBatchLoad, kv_tokens: float, queries: int
) -> tuple[str, ...]:
    """Return warnings about a decode micro-batch, with `queries` tokens of each request."""
    found = [
        _outside("tokens of a micro-batch (GEMM)", batch.num_tokens, DENSE_ROWS),
        _outside("rows of an expert (masked grouped GEMM)", _expert_rows(unit, batch), MASKED_ROWS),
        _outside("context of a request (FlashMLA)", kv_tokens, MLA_CONTEXT),
        _outside("requests of a micro-batch (FlashMLA)", batch.num_tokens / queries, MLA_REQUESTS),
    ]
    if unit.num_ranks > 1:
        found += [
            _outside("ranks (DeepEP low latency)", unit.num_ranks, LOW_LATENCY_RANKS),
            _outside(
                "tokens of a micro-batch (DeepEP low latency)",
                batch.mean_tokens,
                LOW_LATENCY_TOKENS,
            ),
        ]
    if queries > 2:
        found.append(f"{queries} query tokens of a request: FlashMLA was measured with 1 and 2")
    return _all(unit, found)


def prefill_flags(unit: PricedUnit, batch: MicroBatchLoad, prompt_tokens: float) -> tuple[str, ...]:
    """Return warnings about a prefill micro-batch of prompts with `prompt_tokens` tokens."""
    found = [
        _outside("tokens of a micro-batch (GEMM)", batch.num_tokens, DENSE_ROWS),
        _outside(
            "rows of an expert (contiguous grouped GEMM)",
            _expert_rows(unit, batch),
            CONTIGUOUS_ROWS,
        ),
        _outside("prompt (FlashAttention 3)", prompt_tokens, MHA_CONTEXT),
    ]
    if unit.num_ranks > 1:
        found.append(_outside("ranks (DeepEP normal)", unit.num_ranks, NORMAL_RANKS))
    return _all(unit, found)


def _expert_rows(unit: PricedUnit, batch: MicroBatchLoad) -> float:
    routed = batch.mean_tokens * unit.model.num_experts_per_tok
    return routed * batch.expert_imbalance / unit.num_expert_slots


def _all(unit: PricedUnit, found: list[str | None]) -> tuple[str, ...]:
    flags = [flag for flag in found if flag is not None]
    hardware = unit.hardware
    same_chip = (hardware.bf16_flops, hardware.hbm_bytes_per_s) == (
        H800.bf16_flops,
        H800.hbm_bytes_per_s,
    )
    if hardware.name != H800.name and same_chip:
        flags.append(
            f"hardware {hardware.name}: links scaled from H800's tables by NVLink and NIC rates"
        )
    elif hardware.name != H800.name:
        flags.append(
            f"hardware {hardware.name}: H800's curves scaled by FLOP/s, SMs and HBM bandwidth,"
            " links by their rates"
        )
    if unit.expert_dtype == FP4:
        flags.append("experts in FP4: no table; FP8's curve on FP4's FLOP/s and bytes")
    return tuple(flags)


def _outside(what: str, value: float, limits: tuple[float, float]) -> str | None:
    low, high = limits
    return None if low <= value <= high else f"{what}: {value:g}, measured from {low:g} to {high:g}"
