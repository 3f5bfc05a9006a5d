"""What replicas on a token's own node would save of the bytes between nodes.

    python -m bench.own_node [--quick]

Dispatch deals an expert's tokens out to its replicas in turn, wherever they come from. A rank could
take those on its own node first, and the others deal so that each replica still gets its part: then
of an expert's tokens as many stay on a node as the smaller of the node's part of the tokens and its
replicas' part. Loads are drawn (sim/expert_loads), placements and parts are the balancer's, tokens
come evenly from all nodes.

Shapes: L MoE layers, E experts, R ranks, S expert slots, D nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from hadal.core.config import DECODE, PREFILL
from hadal.core.placement import EMPTY, spread
from hadal.sim.expert_loads import (
    NUM_EXPERTS,
    NUM_LAYERS,
    RANKS_PER_NODE,
    balanced,
    draw_loads,
)

UNITS = ((PREFILL, 32), (DECODE, 16), (DECODE, 32), (DECODE, 96), (DECODE, 144))
NUM_REDUNDANT = 32


def shares(role: str, num_ranks: int, num_layers: int) -> tuple[float, float, float]:
    """Of (token, expert) pairs: those of experts with replicas; those between nodes, and those that
    were left if a token took a replica on its own node first.
    """
    loads_LE = draw_loads(role, np.random.default_rng(0), num_layers)
    in_order = spread(num_layers, NUM_EXPERTS, num_ranks, NUM_REDUNDANT)
    plan = balanced(loads_LE, role, in_order, NUM_REDUNDANT, RANKS_PER_NODE)
    slots_LRS, split_LRS = plan.placement.slot_to_expert_LRS, plan.split_LRS
    assert split_LRS is not None
    num_nodes = num_ranks // RANKS_PER_NODE
    layer, rank, slot = np.nonzero(slots_LRS != EMPTY)
    expert = slots_LRS[layer, rank, slot]
    part_LED = np.zeros((num_layers, NUM_EXPERTS, num_nodes))
    np.add.at(part_LED, (layer, expert, rank // RANKS_PER_NODE), split_LRS[layer, rank, slot])
    part_LED /= part_LED.sum(axis=2, keepdims=True)
    num_LE = np.zeros((num_layers, NUM_EXPERTS), np.int64)
    np.add.at(num_LE, (layer, expert), 1)
    kept_LE = np.minimum(part_LED, 1 / num_nodes).sum(axis=2)
    return (
        float(np.average(num_LE > 1, weights=loads_LE)),
        1.0 - 1.0 / num_nodes,
        1.0 - float(np.average(kept_LE, weights=loads_LE)),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.own_node", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four layers")
    num_layers = 4 if parser.parse_args(arguments).quick else NUM_LAYERS
    table = Table(title=f"{NUM_REDUNDANT} redundant experts, {num_layers} layers")
    for name in (
        "unit",
        "nodes",
        "pairs of experts with replicas",
        "between nodes",
        "own node first",
    ):
        table.add_column(name, justify="right")
    for role, num_ranks in UNITS:
        with_replicas, now, first = shares(role, num_ranks, num_layers)
        table.add_row(
            f"{role} EP{num_ranks}",
            str(num_ranks // RANKS_PER_NODE),
            f"{with_replicas:.0%}",
            f"{now:.1%}",
            f"{first:.1%} ({first / now - 1.0:+.1%})",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
