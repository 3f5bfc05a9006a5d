"""Shared pieces of what benchmarks print and parse: a table of columns, a parser with `--quick`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from rich.table import Table


def parser_of(name: str, description: str | None, quick: str = "") -> argparse.ArgumentParser:
    """Return the parser of `python -m bench.NAME`. `quick`: what its --quick does; empty: it has none."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    return parser


def table_of(columns: str, title: str = "", num_left: int = 1) -> Table:
    """Return a table. `columns`: names divided by "|", of which the first `num_left` stand left."""
    table = Table(title=title or None, title_justify="left")
    for index, name in enumerate(columns.split("|")):
        table.add_column(name, justify="left" if index < num_left else "right")
    return table


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that `share` of all do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf"))
