"""Compare expert placements for measured DeepSeek-V3 loads: Hadal's, those of DeepSeek's EPLB, and an upper
bound, on one core.

`python -m bench.balance_experts [--eplb FOLDER]`. The loads are read from HADAL_SHARED_DATA or from
shared/data beside the checkout. EPLB is run as well if it is installed or if its folder (with `eplb.py`) is
given; otherwise figures that were measured before are printed, marked with *. Further tables: plans that may
move only a share of the replicas, plans for windows of steps, and the traffic between nodes that plans cause.
Times are medians of CPU time, one thread.
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.balance_loads import DECODE, NUM_GROUPS, NUM_NODES, PREFILL, read_loads, timed
from bench.balance_replan import replans, windows
from bench.balance_traffic import traffic
from bench.shared_data import EXPERT_LOADS, find, why_missing
from bench.tables import parser_of, table_of
from hadal.core.arrays import Floats
from hadal.policy.experts.balance import Cluster, balance

CASES = (
    ("prefill 32", "fast", 32, 9, PREFILL),
    ("prefill 32", "global", 32, 9, PREFILL),
    ("prefill 32", "hierarchical", 32, 9, PREFILL),
    ("prefill 32", "hybrid", 32, 9, PREFILL),
    ("EP72", "global", 72, 4, PREFILL + DECODE),
    ("EP96", "global", 96, 3, PREFILL + DECODE),
    ("decode 144", "fast", 144, 2, DECODE),
    ("decode 144", "global", 144, 2, DECODE),
)
MEASURED_EPLB = {
    "prefill 32 hierarchical": ".8325 / .436 / 527",
    "prefill 32 global": ".9935 / .987 / 1340",
    "EP72 global": ".9760 / .954 / 2010",
    "EP96 global": ".9630 / .912 / 2540",
    "decode 144 global": ".8657 / .661 / 2750",
}
"""Case and mode -> results of DeepSeek's eplb.py as "mean over layers / worst layer / ms". The first two are the
balance: the ranks' mean load divided by their largest load. Measured on two shared cores with SGLang's load matrices
(SGLang's issue 6017). Some averages are over other prompt lengths than ours (prefill in1024, 2048, 4096).
"""


def find_eplb(folder: str | None) -> Callable[..., Any] | None:
    if folder:
        sys.path.insert(0, folder)
    try:
        found: Callable[..., Any] = importlib.import_module("eplb").rebalance_experts
    except ModuleNotFoundError:
        return None
    return found


def bound(loads: Floats, mode: str, num_ranks: int, num_expert_slots: int) -> float:
    """Return an upper bound of the balance (mean / max of the ranks' loads), averaged over layers. Some rank
    has the heaviest replica, even if all extra replicas go to the heaviest experts. Mode "hierarchical": the
    balance of the nodes, as the exact maximum over all ways to deal two groups to each node.
    """
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
    for _ in range(num_ranks * num_expert_slots - share.shape[1]):
        counts[np.arange(len(share)), (share / counts).argmax(axis=1)] += 1
    return float((1 / np.maximum((share / counts).max(axis=1), 1.0)).mean())


def placements(
    console: Console, folder: Path, eplb: Callable[..., Any] | None, repeats: int
) -> None:
    table = table_of(
        "case|mode|ours|EPLB|bound",
        "expert placements: mean / worst layer / ms, averaged over the matrices",
        num_left=2,
    )
    for case, mode, num_ranks, num_expert_slots, names in CASES:
        cluster = Cluster.even(num_ranks, NUM_NODES, num_expert_slots)
        rows, theirs, bounds = [], [], []
        for name in names:
            loads = read_loads(folder, name)
            plan, ms = timed(
                lambda: balance(loads, cluster, mode=mode, num_groups=NUM_GROUPS), repeats
            )
            rows.append((plan.balancedness_L.mean(), plan.balancedness_L.min(), ms))
            bounds.append(bound(loads, mode, num_ranks, num_expert_slots))
            if eplb is not None and mode in ("global", "hierarchical"):
                theirs.append(run_eplb(eplb, loads, mode, num_ranks, num_expert_slots))
        peer = MEASURED_EPLB.get(f"{case} {mode}", "-")
        peer = figures(theirs) if theirs else peer if peer == "-" else f"{peer} *"
        table.add_row(case, mode, figures(rows), peer, f"{statistics.fmean(bounds):.4f}")
    console.print(table)


def figures(rows: Sequence[tuple[float, float, float]]) -> str:
    mean, ms = statistics.fmean(row[0] for row in rows), statistics.fmean(row[2] for row in rows)
    return f"{mean:.4f} / {min(row[1] for row in rows):.3f} / {ms:.1f}"


def run_eplb(
    eplb: Callable[..., Any], loads: Floats, mode: str, num_ranks: int, num_expert_slots: int
) -> tuple[float, float, float]:
    import torch

    groups, nodes = (NUM_GROUPS, NUM_NODES) if mode == "hierarchical" else (1, 1)
    weight = torch.from_numpy(loads)
    (physical, _, counts), ms = timed(
        lambda: eplb(weight, num_ranks * num_expert_slots, groups, nodes, num_ranks), 1
    )
    share = np.take_along_axis(loads / counts.numpy(), physical.numpy(), axis=1)
    per_rank = share.reshape(len(loads), num_ranks, num_expert_slots).sum(axis=2)
    result = per_rank.mean(axis=1) / per_rank.max(axis=1)
    return float(result.mean()), float(result.min()), ms


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("balance_experts", __doc__, "one repetition")
    parser.add_argument("--eplb", help="folder with DeepSeek's eplb.py")
    options = parser.parse_args(arguments)
    console = Console(width=120)
    folder = find(EXPERT_LOADS)
    if folder is None:
        console.print(f"[yellow]{why_missing(EXPERT_LOADS)}[/]")
        return
    placements(console, folder, find_eplb(options.eplb), 1 if options.quick else 5)
    replans(console, folder)
    windows(console, folder)
    traffic(console, folder, is_quick=options.quick)


if __name__ == "__main__":
    main()
