"""Lengths of requests in tokens: drawn from a distribution, or read from a trace file.

    parse_lengths("lognormal:800:1", "--input").draw(rng, 64) -> 64 lengths
    read_trace(Path("mooncake.jsonl.gz")) -> the requests of a trace and their times

Does not depend on texts or a server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator

from hadal.core.documents import MAX_TABLE_BYTES, read_text, shown
from hadal.core.errors import ConfigError
from hadal.stats.traces import azure_rows, mooncake_rows

MAX_TOKENS = 1_000_000
_LENGTHS = (
    "a number (200), a range (100-400), normal:MEAN:SPREAD, lognormal:MEAN:VARIATION or"
    " exponential:MEAN"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of token counts, made by `parse_lengths`. `first`, `second`: its parameters."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, rng: Generator, size: int) -> list[int]:
        """Return `size` lengths, each at least 1."""
        match self.kind:
            case "range":
                drawn = rng.integers(int(self.first), int(self.second) + 1, size).astype(float)
            case "normal":
                drawn = rng.normal(self.first, self.second, size)
            case "lognormal":
                sigma2 = np.log1p(self.second**2)
                drawn = rng.lognormal(np.log(self.first) - sigma2 / 2, np.sqrt(sigma2), size)
            case _:
                drawn = rng.exponential(self.first, size)
        return [int(value) for value in np.clip(np.rint(drawn), 1, MAX_TOKENS)]


def parse_lengths(text: str, option: str) -> Lengths:
    """Return the distribution that an option describes. Raises ConfigError."""
    number = r"([0-9]{1,7}(?:\.[0-9]{1,6})?)"
    word = text.strip().lower()
    found: Lengths | None = None
    if one := re.fullmatch("([0-9]{1,7})", word):
        found = Lengths("range", float(one[1]), float(one[1]))
    elif two := re.fullmatch("([0-9]{1,7})-([0-9]{1,7})", word):
        found = Lengths("range", float(two[1]), float(two[2]))
    elif named := re.fullmatch(f"(normal|lognormal):{number}:{number}", word):
        found = Lengths(named[1], float(named[2]), float(named[3]))
    elif named := re.fullmatch(f"(exponential):{number}", word):
        found = Lengths(named[1], float(named[2]))
    if (
        found is None
        or not 1 <= found.first <= MAX_TOKENS
        or (found.kind == "range" and not found.first <= found.second <= MAX_TOKENS)
    ):
        raise ConfigError(f"{option} is {shown(text)}; use {_LENGTHS}, in tokens.")
    return found


@dataclass(frozen=True, slots=True)
class BenchAsk:
    """Lengths of one request, before its text is made."""

    tokens_in: int
    tokens_out: int
    parts: tuple[int, ...] = ()
    """Ids of the prompt's 512-token parts, if the trace has them: equal ids mean equal text."""


@dataclass(frozen=True)
class TraceLoad:
    """Requests of a trace file, in order."""

    asks: tuple[BenchAsk, ...]
    at_s: tuple[float, ...]
    """Arrival times in seconds after the first arrival."""


def read_trace(path: Path, scale: float = 1.0) -> TraceLoad:
    """Return the requests of Mooncake's .jsonl or Azure's .csv, gzipped or not; lengths are
    multiplied by `scale`. Raises ConfigError.
    """
    name = path.name.lower()
    if not name.endswith((".jsonl", ".jsonl.gz", ".csv", ".csv.gz")):
        raise ConfigError(
            f"{path} is not a trace: use Mooncake's .jsonl or .jsonl.gz, or Azure's .csv"
            " or .csv.gz."
        )
    lines = read_text(path, "trace", MAX_TABLE_BYTES).splitlines()
    try:
        rows = azure_rows(lines) if ".csv" in name else sorted(mooncake_rows(lines))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no requests.")
    asks = tuple(
        BenchAsk(max(1, round(scale * before)), max(1, round(scale * after)), parts)
        for _, before, after, parts in rows
    )
    return TraceLoad(asks, tuple(at_s - rows[0][0] for at_s, *_ in rows))
