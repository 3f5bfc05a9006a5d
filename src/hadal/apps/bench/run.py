"""Execution of `hadal bench`, from its options to the printed and written results."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hadal.apps.bench.load import Level, LevelRun, LoadPlan, run_levels
from hadal.apps.bench.page import bench_html
from hadal.apps.bench.request import Target
from hadal.apps.bench.texts import Texts
from hadal.apps.bench.values import QUANTILES, summary
from hadal.core.errors import ConfigError
from hadal.progress import Bar
from hadal.results.folder import check_folder
from hadal.results.values import compact, duration, mapping, number, percent, plain, rows

EXIT_NOTHING, EXIT_STOPPED = 1, 130
LATE_S = 0.05
"""Accepted p99 lateness of this client, seconds. Above it a note says that results are off."""
SPREADS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))


@dataclass(frozen=True)
class BenchOptions:
    """Checked options of the command."""

    target: Target
    texts: Texts
    plan: LoadPlan
    levels: tuple[Level, ...]
    num_warm_up: int
    promises: Mapping[str, float]
    seed: int | None
    out: Path | None
    as_json: bool
    words: Mapping[str, Any]
    """Option values as written on the command line, for bench.json."""


def run(asked: BenchOptions) -> int:
    """Measure, print and write; return the exit code. Raises BenchError and ValueError."""
    if asked.out is not None:
        check_folder(asked.out)
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if asked.seed is None else asked.seed
    plan, texts = replace(asked.plan, seed=seed), replace(asked.texts, seed=seed)
    runs: list[LevelRun] = []
    notes: list[str] = []
    model, is_stopped = asked.target.model, False
    with Bar("hadal bench", len(asked.levels) * plan.duration_s) as bar:
        try:
            model = asyncio.run(
                run_levels(
                    asked.target,
                    texts,
                    plan,
                    asked.levels,
                    asked.num_warm_up,
                    runs,
                    notes,
                    lambda what, done_s: bar.update(what, done=done_s),
                )
            )
        except KeyboardInterrupt:
            is_stopped = True
    what = {
        "url": asked.target.url,
        "endpoint": asked.target.endpoint,
        "seed": seed,
        "duration_s": plan.duration_s,
        "shared_tokens": texts.num_shared,
        **asked.words,
    }
    found = summary(what, model, runs, asked.promises, notes, is_stopped=is_stopped)
    found["notes"] += _doubts(found)
    if asked.as_json:
        print(json.dumps(found, indent=2))
    else:
        show(Console(highlight=False), found)
    for path in write(asked.out, found) if asked.out is not None else ():
        print(f"Written: {path}", file=sys.stderr)
    if is_stopped:
        return EXIT_STOPPED
    return 0 if any(level["num_done"] for level in found["levels"]) else EXIT_NOTHING


def _doubts(found: Mapping[str, Any]) -> list[str]:
    """Return notes on why the figures may be unreliable."""
    doubts = []
    for level in rows(found, "levels"):
        late_s = number(level, "late_s", "p99")
        if level["kind"] != "concurrency" and late_s is not None and late_s > LATE_S:
            doubts.append(
                f"{level['name']}: this client sent requests {duration(late_s)} late at"
                " p99, and latencies include this delay. Run the client on a less busy"
                " machine to measure the server alone."
            )
    if found["is_stopped"]:
        doubts.append("Stopped by Ctrl-C: the last level is incomplete.")
    return doubts


def write(folder: Path, found: Mapping[str, Any]) -> list[Path]:
    """Write bench.json and bench.html, and return their paths. Raises ConfigError if that fails."""
    json_path, html_path = folder / "bench.json", folder / "bench.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        html_path.write_text(bench_html(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--out {folder} cannot be written: {(error.strerror or '').lower()}."
        ) from error
    return [json_path, html_path]


def show(console: Console, found: Mapping[str, Any]) -> None:
    """Print tables of throughput and latency, errors and notes."""
    levels = rows(found, "levels")
    console.print(Text(f"{found['model'] or 'no model'} at {found['url']}", style="bold"))
    if not levels:
        console.print("Nothing was measured.")
    else:
        console.print(_served(levels, has_promises=bool(found["slo_s"])))
        console.print(_latency(levels))
    for level in levels:
        for kind, count in mapping(level, "errors").items():
            console.print(Text(f"{level['name']}: {count} x {kind}", style="red"))
    for note in found["notes"]:
        console.print(Text(str(note), style="dim"), soft_wrap=True)


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _served(levels: list[Mapping[str, Any]], *, has_promises: bool) -> Table:
    heads = ["load", "sent", "failed", "req/s", "out/s", "in", "out", "cached"]
    table = _table(*heads, *(("good/s", "good") if has_promises else ()))
    for level in levels:
        share, good = number(level, "cache_hit_share"), number(level, "good_share")
        cells = [
            str(level["name"]),
            str(level["num_sent"]),
            str(level["num_sent"] - level["num_done"]),
            plain(number(level, "requests_per_s"), 2),
            compact(number(level, "tokens_out_per_s")),
            plain(number(level, "tokens_in_mean"), 0),
            plain(number(level, "tokens_out_mean"), 0),
            percent(None if share is None else 100 * share, 0),
        ]
        if has_promises:
            cells += [
                plain(number(level, "goodput_per_s"), 2),
                percent(None if good is None else 100 * good, 0),
            ]
        table.add_row(*cells)
    return table


def _latency(levels: list[Mapping[str, Any]]) -> Table:
    table = _table("load", "", "mean", *(f"p{mark}" for mark in QUANTILES), "max")
    for level in levels:
        for index, (name, key) in enumerate(SPREADS):
            marks = mapping(level, key)
            table.add_row(
                str(level["name"]) if index == 0 else "",
                name,
                *(
                    duration(number(marks, mark))
                    for mark in ("mean", *(f"p{mark}" for mark in QUANTILES), "max")
                ),
                end_section=index == len(SPREADS) - 1,
            )
    return table
