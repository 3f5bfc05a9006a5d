"""Traffic between nodes that expert placements cause, on a model of DeepSeek-V3's routing fitted to measured loads.

A part of `python -m bench.balance_experts`. A token's affinities are normal, plus a bias per expert. A token
takes the best 4 of 8 groups, by the sum of each group's two best experts, and the best 8 experts of these
groups (DeepSeek-V3, section 2.1.2). Biases are fitted until the experts' loads match the measured ones; the
pairing of experts within a token is the model's and not measured. A token crosses to each remote node once,
however many of its experts are there. Tokens come evenly from all nodes.

Shapes: N tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from bench.balance_loads import NUM_GROUPS, NUM_NODES, PREFILL, read_loads, timed
from bench.tables import table_of
from hadal.core.arrays import Floats, Ints
from hadal.core.placement import Placement
from hadal.policy.experts.balance import Cluster, balance
from hadal.policy.experts.tables import Singles

NUM_RANKS, NUM_SLOTS = 32, 9
TOP_GROUPS, TOP_EXPERTS = 4, 8


@dataclass(frozen=True)
class Tokens:
    """Tokens of one layer: the experts of each token and the node of its origin."""

    experts_NK: Ints
    nodes_N: Ints


def route(scores_NE: Singles) -> Ints:
    """Return the experts [N, K] of group-limited routing, unordered."""
    grouped = scores_NE.reshape(len(scores_NE), NUM_GROUPS, -1)
    two_best = np.partition(grouped, -2, axis=2)[:, :, -2:].sum(axis=2)
    out = np.argpartition(two_best, -TOP_GROUPS, axis=1)[:, :-TOP_GROUPS]
    grouped = grouped.copy()
    grouped[np.arange(len(grouped))[:, None], out] = -np.inf
    return np.argpartition(grouped.reshape(len(scores_NE), -1), -TOP_EXPERTS, axis=1)[
        :, -TOP_EXPERTS:
    ]


def fitted_tokens(
    loads_E: Floats, num_tokens: int, random: np.random.Generator, num_rounds: int = 40
) -> Tokens:
    """Return tokens with expert loads close to `loads_E`."""
    wanted = loads_E / loads_E.sum()
    noise = random.standard_normal((num_tokens, len(wanted)), np.float32)
    bias = np.zeros(len(wanted), np.float32)
    for index in range(num_rounds):
        got = np.bincount(route(noise + bias).ravel(), minlength=len(wanted)) + 0.5
        bias += (0.5 if index < num_rounds // 2 else 0.2) * np.log(
            (wanted + 1e-6) / (got / got.sum())
        ).astype("f4")
    return Tokens(route(noise + bias), np.arange(num_tokens) % NUM_NODES)


def remote_nodes(
    placement: Placement, layer: int, tokens: Tokens, cluster: Cluster, *, local_first: bool
) -> float:
    """Return the mean number of remote nodes a token crosses to. An expert's replicas are taken in turn; with
    `local_first`, a replica on the token's own node is preferred.
    """
    slots, counts = placement.replicas(layer)
    node_of_slot = np.repeat(np.array(cluster.nodes), placement.num_expert_slots)
    taken = tokens.experts_NK
    turn = (np.arange(len(taken))[:, None] // NUM_NODES + np.arange(TOP_EXPERTS)) % counts[taken]
    nodes = node_of_slot[slots[taken, turn]]
    if local_first:
        here = (node_of_slot[slots[taken]] == tokens.nodes_N[:, None, None]).any(axis=2)
        nodes = np.where(here, tokens.nodes_N[:, None], nodes)
    met: NDArray[np.bool_] = np.zeros((len(nodes), NUM_NODES), bool)
    met[np.arange(len(nodes))[:, None], nodes] = True
    met[np.arange(len(nodes)), tokens.nodes_N] = False
    return float(met.sum(axis=1).mean())


def traffic(console: Console, folder: Path, *, is_quick: bool) -> None:
    every, num_tokens = (14, 2048) if is_quick else (7, 8192)
    table = table_of(
        "loads|plan|mean / worst|remote nodes a token|vs hierarchical|local first|ms",
        f"prefill 32 ranks on 4 nodes: traffic between nodes, every {every}th layer; ms for all"
        " layers",
        num_left=2,
    )
    cluster = Cluster.even(NUM_RANKS, NUM_NODES, NUM_SLOTS)
    fits: list[float] = []
    for name in PREFILL:
        loads = read_loads(folder, name)
        random = np.random.default_rng(0)
        layers = range(0, len(loads), every)
        tokens = [fitted_tokens(loads[layer], num_tokens, random) for layer in layers]
        base = 0.0
        fits += [
            np.corrcoef(
                np.bincount(each.experts_NK.ravel(), minlength=loads.shape[1]), loads[layer]
            )[0, 1]
            for layer, each in zip(layers, tokens, strict=True)
        ]
        for mode, target in (
            ("hierarchical", 0.0),
            ("hybrid", 0.95),
            ("hybrid", 0.98),
            ("global", 0.0),
        ):
            plan, ms = timed(
                lambda: balance(loads, cluster, mode=mode, num_groups=NUM_GROUPS, target=target), 3
            )
            plain, local = (
                np.mean(
                    [
                        remote_nodes(plan.placement, layer, each, cluster, local_first=first)
                        for layer, each in zip(layers, tokens, strict=True)
                    ]
                )
                for first in (False, True)
            )
            base = base or float(plain)
            table.add_row(
                name.removeprefix("prefill_"),
                mode if mode != "hybrid" else f"hybrid {target:.2f}",
                f"{plan.balancedness_L.mean():.4f} / {plan.balancedness_L.min():.3f}",
                f"{plain:.3f}",
                f"{plain / base - 1:+.1%}",
                f"{local / base - 1:+.1%}",
                f"{ms:.0f}",
            )
    table.caption = (
        f"least correlation of the model's loads with the measured ones: {min(fits):.4f}"
    )
    console.print(table)
