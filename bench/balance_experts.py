"""Expert placements for measured DeepSeek-V3 loads: ours, DeepSeek's EPLB and the bound, one core.

`python -m bench.balance_experts [--eplb FOLDER]`. The loads are read from HADAL_SHARED_DATA or a folder shared/data
beside the checkout. EPLB runs beside ours when it is installed or its folder is given (its `eplb.py`); otherwise its
measured figures are printed, marked with *. Times are medians of CPU time.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.checkpoints import ROOT
from hadal.policy.expert_balance import Cluster, ExpertPlan, balance, balancedness
from hadal.policy.expert_packing import Floats

PREFILL = ("prefill_in512", "prefill_in1024", "prefill_in500out1500", "prefill_in1000out1000", "prefill_in2000out100")
DECODE = ("decode_in500out1500", "decode_in1000out1000", "decode_in2000out100")
CASES = (
    ("prefill 32", "fast", 32, 9, PREFILL), ("prefill 32", "global", 32, 9, PREFILL),
    ("prefill 32", "hierarchical", 32, 9, PREFILL), ("prefill 32", "hybrid", 32, 9, PREFILL),
    ("EP72", "global", 72, 4, PREFILL + DECODE), ("EP96", "global", 96, 3, PREFILL + DECODE),
    ("decode 144", "fast", 144, 2, DECODE), ("decode 144", "global", 144, 2, DECODE),
)  # fmt: skip
MEASURED_EPLB = {
    "prefill 32 hierarchical": ".8325 / .436 / 527", "prefill 32 global": ".9935 / .987 / 1340",
    "EP72 global": ".9760 / .954 / 2010", "EP96 global": ".9630 / .912 / 2540",
    "decode 144 global": ".8657 / .661 / 2750",
}  # fmt: skip
"""DeepSeek's eplb.py on SGLang's load matrices (issue 6017 there), mean / worst / ms, two shared cores; its averages
are over other lengths than ours in part (prefill in1024, 2048, 4096)."""
NUM_GROUPS, NUM_NODES = 8, 4


def loads_folder() -> Path | None:
    folder = Path(os.environ.get("HADAL_SHARED_DATA", ROOT.parent / "shared" / "data")) / "expert_loads"
    return folder if folder.is_dir() else None


def read_loads(folder: Path, name: str) -> Floats:
    loads = np.array(json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))["tokens_per_expert"], float)
    return loads[loads.sum(axis=1) > 0]


def find_eplb(folder: str | None) -> Callable[..., Any] | None:
    if folder:
        sys.path.insert(0, folder)
    try:
        found: Callable[..., Any] = importlib.import_module("eplb").rebalance_experts
    except ModuleNotFoundError:
        return None
    return found


def timed(call: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Return (the result, median ms of CPU time)."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        result = call()
        times.append(1e3 * (time.process_time() - start))
    return result, statistics.median(times)


def bound(loads: Floats, mode: str, num_ranks: int, num_slots: int) -> float:
    """Upper bound of mean/max, averaged over layers: the heaviest replica when all extra ones go to heavy experts;
    hierarchical: the exact ceiling over all ways to deal the groups to nodes."""
    share = loads / loads.sum(axis=1, keepdims=True) * num_ranks
    if mode == "hierarchical":
        groups = share.reshape(len(share), NUM_GROUPS, -1).sum(axis=2)
        pairings = {
            tuple(sorted(tuple(sorted(order[i : i + 2])) for i in range(0, 8, 2)))
            for order in itertools.permutations(range(NUM_GROUPS))
        }
        sums = groups[:, np.array(sorted(pairings))].sum(axis=3) / (num_ranks / NUM_NODES)
        return float((1 / sums.max(axis=2).min(axis=1)).mean())
    counts = np.ones_like(share)
    for _ in range(num_ranks * num_slots - share.shape[1]):
        counts[np.arange(len(share)), (share / counts).argmax(axis=1)] += 1
    return float((1 / np.maximum((share / counts).max(axis=1), 1.0)).mean())


def placements(console: Console, folder: Path, eplb: Callable[..., Any] | None, repeats: int) -> None:
    table = Table(title="expert placements: mean / worst layer / ms, averaged over the matrices", title_justify="left")
    for column in ("case", "mode", "ours", "EPLB", "bound"):
        table.add_column(column, justify="left" if column in ("case", "mode") else "right")
    for case, mode, num_ranks, num_slots, names in CASES:
        cluster = Cluster.even(num_ranks, NUM_NODES, num_slots)
        rows, theirs, bounds = [], [], []
        for name in names:
            loads = read_loads(folder, name)
            plan, ms = timed(lambda: balance(loads, cluster, mode=mode, num_groups=NUM_GROUPS), repeats)  # noqa: B023
            rows.append((plan.balancedness_L.mean(), plan.balancedness_L.min(), ms))
            bounds.append(bound(loads, mode, num_ranks, num_slots))
            if eplb is not None and mode in ("global", "hierarchical"):
                theirs.append(run_eplb(eplb, loads, mode, num_ranks, num_slots))
        peer = MEASURED_EPLB.get(f"{case} {mode}", "-")
        peer = figures(theirs) if theirs else peer if peer == "-" else f"{peer} *"
        table.add_row(case, mode, figures(rows), peer, f"{statistics.fmean(bounds):.4f}")
    console.print(table)


def figures(rows: Sequence[tuple[float, float, float]]) -> str:
    mean, ms = statistics.fmean(row[0] for row in rows), statistics.fmean(row[2] for row in rows)
    return f"{mean:.4f} / {min(row[1] for row in rows):.3f} / {ms:.1f}"


def run_eplb(
    eplb: Callable[..., Any], loads: Floats, mode: str, num_ranks: int, num_slots: int
) -> tuple[float, float, float]:
    import torch

    groups, nodes = (NUM_GROUPS, NUM_NODES) if mode == "hierarchical" else (1, 1)
    weight = torch.from_numpy(loads)
    (physical, _, counts), ms = timed(lambda: eplb(weight, num_ranks * num_slots, groups, nodes, num_ranks), 1)
    share = np.take_along_axis(loads / counts.numpy(), physical.numpy(), axis=1)
    per_rank = share.reshape(len(loads), num_ranks, num_slots).sum(axis=2)
    result = per_rank.mean(axis=1) / per_rank.max(axis=1)
    return float(result.mean()), float(result.min()), ms


def sequences(folder: Path) -> dict[str, list[Floats]]:
    """Loads that change: a drift (log-space Ornstein-Uhlenbeck, .9 kept, sigma .2) and a change of mix at each plan."""
    mixes = [read_loads(folder, name) for name in (*DECODE, DECODE[0])]
    random = np.random.default_rng(0)
    drifts = {}
    for kind, name in (("prefill", "prefill_in1024"), ("decode", "decode_in2000out100")):
        base = read_loads(folder, name)
        log, steps = np.zeros_like(base), [base]
        for _ in range(4):
            log = 0.9 * log + (1 - 0.81) ** 0.5 * 0.2 * random.standard_normal(base.shape)
            steps.append(base * np.exp(log))
        drifts[f"{kind} drift"] = steps
    return {**drifts, "decode mixes": mixes}


def migration(console: Console, folder: Path) -> None:
    table = Table(title="replicas moved per plan, % of slots (EPLB from scratch: 93 to 97 *)", title_justify="left")
    for column in ("case", "loads", "moved", "balancedness", "stale", "of the greedy from scratch", "ms"):
        table.add_column(column, justify="left" if column in ("case", "loads") else "right")
    for case, num_ranks, num_slots, limit, target in (
        ("prefill 32", 32, 9, 0.10, 0.99), ("EP72", 72, 4, 0.16, 0.975), ("decode 144", 144, 2, 0.18, 1.0),
    ):  # fmt: skip
        cluster = Cluster.even(num_ranks, 1, num_slots)
        for kind, steps in sequences(folder).items():
            today: ExpertPlan = balance(steps[0], cluster)
            rows = []
            for loads in steps[1:]:
                num_slots_in_all = len(loads) * num_ranks * num_slots
                stale = balancedness(today.placement, loads).mean()
                greedy = balance(loads, cluster, mode="fast").balancedness_L.mean()
                today, ms = timed(
                    lambda: balance(
                        loads, cluster, current=today.placement, max_moves=int(limit * num_slots_in_all), target=target  # noqa: B023
                    ), 1,
                )  # fmt: skip
                got = today.balancedness_L.mean()
                rows.append((today.moved_replicas / num_slots_in_all, got, stale, got / greedy, ms))
            moved, got, stale, of_greedy, ms = np.mean(rows, axis=0)
            table.add_row(
                case, kind, f"{moved:.1%}", f"{got:.4f}", f"{stale:.4f}", f"{of_greedy:.2%}", f"{ms:.0f}"
            )  # fmt: skip
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.balance_experts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repetition")
    parser.add_argument("--eplb", help="folder with DeepSeek's eplb.py")
    options = parser.parse_args(arguments)
    console = Console(width=120)
    folder = loads_folder()
    if folder is None:
        console.print("no measured expert loads: set HADAL_SHARED_DATA to the folder that holds expert_loads/")
        return
    placements(console, folder, find_eplb(options.eplb), 1 if options.quick else 5)
    migration(console, folder)


if __name__ == "__main__":
    main()
