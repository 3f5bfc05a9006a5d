"""What a speed run holds: points, their figures per engine, and the machine they were taken on. No
measuring here.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from bench.bound import decode_cost, prefill_cost
from bench.machine import Limits
from hadal.core.model_config import ModelConfig

CONTEXT = 128
"""Tokens in the cache of each request when decoding starts."""
DECODE_STEPS = {1: 64, 8: 32, 32: 16, 64: 8}


@dataclass(frozen=True)
class Point:
    """One measurement: a prefill of `size` tokens, or decoding at batch `size`."""

    kind: str
    size: int

    @property
    def name(self) -> str:
        return f"prefill {self.size}" if self.kind == "prefill" else f"decode B={self.size}"

    @property
    def steps(self) -> int:
        """Decode steps of one measurement."""
        return DECODE_STEPS.get(self.size, 16) if self.kind == "decode" else 0

    def fits(self, config: ModelConfig) -> bool:
        """Whether the model's positions suffice."""
        num_tokens = self.size if self.kind == "prefill" else CONTEXT + self.steps
        return num_tokens + 1 < config.max_position_embeddings

    def bound(self, config: ModelConfig, limits: Limits, weight_bytes: int) -> float:
        """Tokens per second that no engine with FP32 products can exceed on this machine."""
        if self.kind == "prefill":
            cost = prefill_cost(config, self.size, weight_bytes)
        else:
            context = CONTEXT + self.steps // 2
            cost = decode_cost(config, self.size, context, weight_bytes)
        return self.size / cost.seconds(limits)


POINTS = (
    *(Point("prefill", n) for n in (128, 512, 2048)),
    *(Point("decode", n) for n in DECODE_STEPS),
)
QUICK_POINTS = tuple(
    point for point in POINTS if point not in (Point("prefill", 2048), Point("decode", 64))
)


@dataclass
class Series:
    """Tokens per second of one engine at one point, one value a repetition."""

    rates: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    """Cores that processes other than this one kept busy meanwhile."""

    @property
    def median(self) -> float:
        """The figure that is reported."""
        return statistics.median(self.rates)

    @property
    def best(self) -> float:
        """What the others left room for."""
        return max(self.rates)


@dataclass
class ModelResult:
    """Everything measured on one model."""

    model: str
    config: ModelConfig
    points: tuple[Point, ...]
    weight_bytes: int
    """Of one weight as Hadal holds it."""
    notes: dict[str, str] = field(default_factory=dict)
    """Engine -> how it ran, or why it did not."""
    series: dict[tuple[str, Point], Series] = field(default_factory=dict)

    def engines(self) -> list[str]:
        """Engines with at least one figure, in the order they were started."""
        return list(dict.fromkeys(engine for engine, _ in self.series))


@dataclass
class EngineResult:
    """One run of this benchmark."""

    threads: int
    limits: Limits
    machine: dict[str, str | int | float]
    models: list[ModelResult] = field(default_factory=list)
