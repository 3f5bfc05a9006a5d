"""Measured DeepSeek-V3 expert loads, and a clock: what the benches of expert placements share.

The loads are looked up by bench/shared_data.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hadal.policy.experts.tables import Floats

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
