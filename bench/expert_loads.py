"""Measured DeepSeek-V3 expert loads, and a clock: what the benches of expert placements share.

The loads are read from HADAL_SHARED_DATA or a folder shared/data beside the checkout.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import ROOT
from hadal.policy.expert_packing import Floats

PREFILL = ("prefill_in512", "prefill_in1024", "prefill_in500out1500", "prefill_in1000out1000", "prefill_in2000out100")
DECODE = ("decode_in500out1500", "decode_in1000out1000", "decode_in2000out100")
NUM_GROUPS, NUM_NODES = 8, 4


def loads_folder() -> Path | None:
    folder = Path(os.environ.get("HADAL_SHARED_DATA", ROOT.parent / "shared" / "data")) / "expert_loads"
    return folder if folder.is_dir() else None


def read_loads(folder: Path, name: str) -> Floats:
    loads = np.array(json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))["tokens_per_expert"], float)
    return np.asarray(loads[loads.sum(axis=1) > 0])


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Return (the result, median ms of CPU time)."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        times.append(1e3 * (time.process_time() - start))
    return result, statistics.median(times)
