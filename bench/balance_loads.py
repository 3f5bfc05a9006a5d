"""Loads for comparing balancers: prompts from measured traces if their files exist, else seeded
lognormals; measured DeepSeek-V3 expert loads; and a clock of CPU time.

bench/shared_data finds the files.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from bench.shared_data import shared_data
from hadal.core.arrays import Floats
from hadal.lab.sim.plan import traffic
from hadal.stats.traces import MOONCAKE_PART_TOKENS, mooncake_rows

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One prompt. Positions below `num_cached` are read from a cache, on every rank."""

    at_s: float
    num_cached: int
    num_tokens: int
    """Tokens still to compute, without cached ones; at least 1."""


@dataclass(frozen=True, slots=True)
class UnitReport:
    """A stream of prompts in order of arrival."""

    name: str
    source: str
    arrivals: tuple[Arrival, ...]

    def stretched(self, duration_s: float) -> UnitReport:
        """Return this stream, scaled to last `duration_s`."""
        first_s, last_s = self.arrivals[0].at_s, self.arrivals[-1].at_s
        scale = duration_s / (last_s - first_s)
        return replace(
            self, arrivals=tuple(replace(a, at_s=(a.at_s - first_s) * scale) for a in self.arrivals)
        )

    def first(self, num: int) -> UnitReport:
        return replace(self, arrivals=self.arrivals[:num])


def mooncake(path: Path) -> UnitReport:
    """Return Mooncake's conversations. Leading blocks that an earlier prompt had are cached, as on a disk
    without evictions.
    """
    seen: set[int] = set()
    arrivals = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in mooncake_rows(lines):
            num_blocks = sum(1 for _ in takewhile(seen.__contains__, row.parts))
            seen.update(row.parts)
            num_cached = min(num_blocks * MOONCAKE_PART_TOKENS, row.tokens_in - 1)
            arrivals.append(Arrival(row.at_s, num_cached, row.tokens_in - num_cached))
    return UnitReport("mooncake-conv", path.name, tuple(arrivals))


def azure(name: str, path: Path) -> UnitReport:
    """Return one of Azure's 2023 traces, which have lengths only: nothing is cached."""
    read = traffic.azure(path.read_text(encoding="utf-8").splitlines())
    arrivals = zip(read.arrival_s.tolist(), read.tokens_in.tolist(), strict=True)
    return UnitReport(name, path.name, tuple(Arrival(at, 0, max(1, n)) for at, n in arrivals))


def lognormal(name: str, mean: float, sigma: float, most: int, num: int, seed: int) -> UnitReport:
    """Return Poisson arrivals with lognormal lengths. `mean` is the mean before lengths are limited to the
    range from 16 to `most`; nothing is cached.
    """
    random = np.random.default_rng(seed)
    lengths = np.clip(
        random.lognormal(np.log(mean) - sigma * sigma / 2, sigma, num), 16, most
    ).astype(int)
    at_s = np.cumsum(random.exponential(1.0, num))
    source = f"synthetic: lognormal, mean {mean:g}, sigma {sigma:g}, at most {most}"
    return UnitReport(
        name,
        source,
        tuple(Arrival(float(t), 0, int(n)) for t, n in zip(at_s, lengths, strict=True)),
    )


def loads(seed: int = 0) -> list[UnitReport]:
    """Return all loads of the benchmark. If a trace is missing, a synthetic load replaces it, as its `source`
    says; azure-conv is left out instead.
    """
    folder = shared_data()
    found: dict[str, Path] = {}
    names = ("mooncake_conversation.jsonl.gz", "azure2023_code.csv", "azure2023_conv.csv")
    if folder is not None:
        found = {name: folder / name for name in names if (folder / name).is_file()}
    mooncake_path, code_path, conv_path = (found.get(name) for name in names)
    out = [
        mooncake(mooncake_path)
        if mooncake_path is not None
        else lognormal("mooncake-like", 12_000, 1.1, 128_000, 12_000, seed),
        lognormal("chat, 32K cap", 2_500, 1.4, 32_768, 20_000, seed + 1),
        azure("azure-code", code_path)
        if code_path is not None
        else lognormal("azure-code-like", 2_050, 0.9, 7_437, 20_000, seed + 2),
    ]
    if conv_path is not None:
        out.append(azure("azure-conv", conv_path))
    return out


PREFILL = (
    "prefill_in512",
    "prefill_in1024",
    "prefill_in500out1500",
    "prefill_in1000out1000",
    "prefill_in2000out100",
)
DECODE = ("decode_in500out1500", "decode_in1000out1000", "decode_in2000out100")
NUM_GROUPS, NUM_NODES = 8, 4


def read_loads(folder: Path, name: str) -> Floats:
    loads = np.array(
        json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))["tokens_per_expert"],
        float,
    )
    return np.asarray(loads[loads.sum(axis=1) > 0])


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Return (the result, median ms of CPU time)."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        times.append(1e3 * (time.process_time() - start))
    return result, statistics.median(times)
