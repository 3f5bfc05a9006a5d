"""Loads for the prefill balancer: measured traces where their files are, seeded lognormals
otherwise.

Files are looked up by bench/shared_data.
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from bench.shared_data import shared_data

ROOT = Path(__file__).resolve().parents[1]
BLOCK_TOKENS = 512
"""Of a hash id in the Mooncake traces."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One prompt: positions below `num_cached` come out of a cache, whatever rank takes it."""

    at_s: float
    num_cached: int
    num_tokens: int
    """Still to compute; at least one."""


@dataclass(frozen=True, slots=True)
class UnitReport:
    """A stream of prompts in the order they arrive."""

    name: str
    source: str
    arrivals: tuple[Arrival, ...]

    def stretched(self, duration_s: float) -> UnitReport:
        """The same stream in `duration_s`."""
        first_s, last_s = self.arrivals[0].at_s, self.arrivals[-1].at_s
        scale = duration_s / (last_s - first_s)
        return replace(
            self, arrivals=tuple(replace(a, at_s=(a.at_s - first_s) * scale) for a in self.arrivals)
        )

    def first(self, num: int) -> UnitReport:
        return replace(self, arrivals=self.arrivals[:num])


def mooncake(path: Path) -> UnitReport:
    """Mooncake's conversations; a block seen before is cached, as on a disk that forgets
    nothing.
    """
    seen: set[int] = set()
    arrivals = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            num_blocks = 0
            for block in row["hash_ids"]:
                if block not in seen:
                    break
                num_blocks += 1
            seen.update(row["hash_ids"])
            num_cached = min(num_blocks * BLOCK_TOKENS, row["input_length"] - 1)
            arrivals.append(
                Arrival(row["timestamp"] / 1e3, num_cached, row["input_length"] - num_cached)
            )
    return UnitReport("mooncake-conv", path.name, tuple(arrivals))


def azure(name: str, path: Path) -> UnitReport:
    """Azure's 2023 traces hold lengths only: nothing is cached."""
    with path.open(encoding="utf-8", newline="") as rows:
        read = [
            (datetime.fromisoformat(r["TIMESTAMP"][:26]), int(r["ContextTokens"]))
            for r in csv.DictReader(rows)
        ]
    return UnitReport(
        name,
        path.name,
        tuple(Arrival((at - read[0][0]).total_seconds(), 0, max(1, n)) for at, n in read),
    )


def lognormal(name: str, mean: float, sigma: float, most: int, num: int, seed: int) -> UnitReport:
    """Poisson arrivals, lengths lognormal with this mean before they are capped at `most`; nothing
    cached.
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
    """Everything the bench runs on. Where a trace is absent its stand-in says so in `source`."""
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
