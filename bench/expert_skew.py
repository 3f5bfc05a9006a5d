"""Skew of expert loads: SGLang's measured ones beside those that the simulator draws, and what
placements leave of it.

`python -m bench.expert_skew [--layers N] [--seed N]`. The loads are read from HADAL_SHARED_DATA or
a folder shared/data beside the checkout; without them the drawn ones are printed alone. Every
figure is a mean over layers: deviations of the logarithm of loads (of groups' means, and of experts
within their group), the heaviest and the eighth heaviest expert over the mean, and the maximum over
mean of the ranks, with experts in order (off) and with our balancer (auto).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.expert_loads import DECODE, PREFILL, read_loads
from bench.shared_data import EXPERT_LOADS, find, why_missing
from hadal.core.config import UnitsConfig
from hadal.core.placement import spread
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.experts.balance import Cluster, balance, rank_loads
from hadal.policy.experts.tables import Floats
from hadal.roles.leaders import keeps_groups
from hadal.sim.expert_loads import NUM_GROUPS, RANKS_PER_NODE, draw_loads

UNITS = {"prefill": 32, "decode": 144}
NUM_REDUNDANT = 32


def figures(phase: str, loads: Floats) -> list[float]:
    """Skew of loads [layers, experts], then what is left of it on a unit of the phase: off,
    auto.
    """
    share = loads / loads.mean(axis=1, keepdims=True)
    grouped = share.reshape(len(share), NUM_GROUPS, -1)
    logs = np.log(np.maximum(grouped, 1e-3))
    heaviest = np.sort(share, axis=1)
    num_ranks = UNITS[phase]
    units = UnitsConfig(
        ranks=num_ranks, ranks_per_node=RANKS_PER_NODE, redundant_experts=NUM_REDUNDANT
    )
    by_nodes = keeps_groups(units, DEEPSEEK_V3, phase)
    cluster = Cluster.even(
        num_ranks, num_ranks // RANKS_PER_NODE, (share.shape[1] + NUM_REDUNDANT) // num_ranks
    )
    plan = balance(
        share, cluster, mode="hierarchical" if by_nodes else "global", num_groups=NUM_GROUPS
    )
    left = []
    for placement in (spread(*share.shape, num_ranks, NUM_REDUNDANT), plan.placement):
        received = rank_loads(placement, share)
        left.append(float((received.max(axis=1) / received.mean(axis=1)).mean()))
    return [
        float(np.log(grouped.mean(axis=2)).std(axis=1).mean()),
        float(logs.std(axis=2).mean()),
        float(heaviest[:, -1].mean()),
        float(heaviest[:, -8].mean()),
        *left,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.expert_skew", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="as many drawn layers as the model has"
    )
    parser.add_argument("--layers", type=int, default=5800, help="drawn for each phase")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    console, folder = Console(width=120), find(EXPERT_LOADS)
    if folder is None:
        console.print(f"[yellow]{why_missing(EXPERT_LOADS)}[/]")
    table = Table(title="expert loads, measured and drawn", title_justify="left")
    for column in ("loads", "sd of groups", "sd within", "heaviest", "8th", "EP", "off", "auto"):
        table.add_column(column, justify="left" if column == "loads" else "right")
    rng = np.random.default_rng(options.seed)
    for phase, names in (("prefill", PREFILL), ("decode", DECODE)):
        rows = (
            [(name, figures(phase, read_loads(folder, name))) for name in names] if folder else []
        )
        if rows:
            rows.append(
                (
                    f"{phase}, mean",
                    [float(value) for value in np.mean([found for _, found in rows], axis=0)],
                )
            )
        drawn = draw_loads(phase, rng, 58 if options.quick else options.layers)
        rows.append((f"{phase}, drawn", figures(phase, drawn)))
        for name, found in rows:
            shown = [f"{value:.3f}" for value in found]
            style = "bold" if name.endswith("drawn") else None
            table.add_row(name, *shown[:4], str(UNITS[phase]), *shown[4:], style=style)
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
