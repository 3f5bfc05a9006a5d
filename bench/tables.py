"""Helpers of all benchmarks: a parser with `--quick`, tables, a percentile, and result files."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.subject import ROOT


def parser_of(name: str, description: str | None, quick: str = "") -> argparse.ArgumentParser:
    """Return the parser of `python -m bench.NAME`. `quick`: help of --quick; empty: no --quick."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def table_of(columns: str, title: str = "", num_left: int = 1) -> Table:
    """Return a table. `columns`: names separated by "|"; the first `num_left` are left-aligned."""
    table = Table(title=title or None, title_justify="left")
    for index, name in enumerate(columns.split("|")):
        table.add_column(name, justify="left" if index < num_left else "right")
    return table


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))


def write(console: Console, name: str, found: Any) -> None:
    """Write a run's figures as JSON into bench/results, and print the path."""
    folder = ROOT / "bench" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    console.print(f"written: {path.relative_to(ROOT)}")
