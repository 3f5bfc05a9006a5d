"""Expert plans that may move only a share of the replicas: moves, balance and planning time when loads
drift or change; and plans for windows of steps.

A part of `python -m bench.balance_experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from bench.balance_loads import DECODE, NUM_GROUPS, NUM_NODES, read_loads, timed
from bench.tables import table_of
from hadal.core.arrays import Floats
from hadal.core.placement import Placement
from hadal.policy.experts.balance import Cluster, ExpertPlan, balance, balancedness

CASES = (
    ("prefill 32", 32, 9, 0.10, 0.99),
    ("EP72", 72, 4, 0.16, 0.975),
    ("decode 144", 144, 2, 0.18, 1.0),
)
"""(name, ranks, expert slots per rank, share of slots that may move, target of the balance: mean / max of the
ranks' loads).
"""


def sequences(folder: Path) -> dict[str, list[Floats]]:
    """Return name -> successive loads, one per plan. Prefill loads and decode loads drift (Ornstein-Uhlenbeck
    in log space: 0.9 of the deviation remains, sigma 0.2); "decode mixes" has another mix each time.
    """
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


def replans(console: Console, folder: Path) -> None:
    """Print one row per case and sequence: means over its re-plans, and the lowest ratio of a plan's balance
    to the greedy plan's.
    """
    table = table_of(
        "case|loads|moved|balanced|stale|of greedy|least|+ split|ms|1 layer ms",
        "replicas moved per plan, % of slots (EPLB from scratch: 93 to 97 *)",
        num_left=2,
    )
    for case, num_ranks, num_expert_slots, limit, target in CASES:
        cluster = Cluster.even(num_ranks, 1, num_expert_slots)
        for kind, steps in sequences(folder).items():
            today = balance(steps[0], cluster).placement
            rows, of_greedy = [], []
            for loads in steps[1:]:
                num_in_all = len(loads) * num_ranks * num_expert_slots
                stale = balancedness(today, loads).mean()
                greedy = balance(loads, cluster, mode="fast").balancedness_L.mean()
                one_ms = one_layer_ms(
                    today, loads, cluster, int(limit * num_ranks * num_expert_slots), target
                )
                plan, ms = timed(
                    lambda: balance(
                        loads,
                        cluster,
                        current=today,
                        max_moves=int(limit * num_in_all),
                        target=target,
                    ),
                    1,
                )
                today = plan.placement
                got = plan.balancedness_L.mean()
                split = balance(
                    loads, cluster, current=today, max_moves=0, weighted=True
                ).balancedness_L.mean()
                of_greedy.append(got / greedy)
                rows.append(
                    (
                        plan.moved_replicas / num_in_all,
                        got,
                        stale,
                        got / greedy,
                        split / greedy,
                        ms,
                        one_ms,
                    )
                )
            moved, got, stale, part, split, ms, one_ms = np.mean(rows, axis=0)
            table.add_row(
                case,
                kind,
                f"{moved:.1%}",
                f"{got:.4f}",
                f"{stale:.4f}",
                f"{part:.2%}",
                f"{min(of_greedy):.2%}",
                f"{split:.2%}",
                f"{ms:.0f}",
                f"{one_ms:.1f}",
            )
    console.print(table)


def one_layer_ms(
    today: Placement, loads: Floats, cluster: Cluster, max_moves: int, target: float
) -> float:
    """Return the median CPU time, ms, of planning one layer with weighted replicas, as a leader does; every
    8th layer is measured.
    """
    times = []
    for layer in range(0, len(loads), 8):
        now = Placement(today.num_experts, today.slot_to_expert_LRS[layer : layer + 1])
        one = loads[layer : layer + 1]
        _, ms = timed(
            lambda: balance(
                one, cluster, current=now, max_moves=max_moves, target=target, weighted=True
            ),
            3,
        )
        times.append(ms)
    return float(np.median(times))


def windows(console: Console, folder: Path) -> None:
    """Print the balance of plans for windows of steps. Each step has a random one of the decode mixes. A plan
    is made for 12 steps, and its balance is measured on 24 other steps.
    """
    table = table_of(
        "case|plan|for the sums|for the steps|ms",
        "mean/max of steps to come, planned for a window",
        num_left=2,
    )
    mixes = [read_loads(folder, name) for name in DECODE]
    random = np.random.default_rng(5)
    for case, num_ranks, num_expert_slots, limit, target in CASES:
        num_tokens = {9: 65536, 4: 9216, 2: 18432}[num_expert_slots]
        window, later = (
            np.stack([sampled(mixes[random.integers(3)], num_tokens, random) for _ in range(num)])
            for num in (12, 24)
        )
        cluster = Cluster.even(num_ranks, NUM_NODES, num_expert_slots)
        today = balance(mixes[0], cluster).placement
        near = int(limit * len(mixes[0]) * num_ranks * num_expert_slots)
        asked = min(target, 0.99)
        plans: dict[str, Callable[[Floats], ExpertPlan]] = {
            "global": lambda loads: balance(loads, cluster),
            "hybrid": lambda loads: balance(
                loads, cluster, mode="hybrid", num_groups=NUM_GROUPS, target=asked
            ),
            "near": lambda loads: balance(
                loads, cluster, current=today, max_moves=near, target=asked
            ),
            "split only": lambda loads: balance(
                loads, cluster, current=today, max_moves=0, weighted=True
            ),
        }
        for name, make in plans.items():
            seen = []
            for loads in (window.sum(axis=0), window):
                plan, ms = timed(lambda: make(loads), 1)
                seen.append(balancedness(plan.placement, later, plan.split_LRS).mean())
            table.add_row(case, name, f"{seen[0]:.4f}", f"{seen[1]:.4f}", f"{ms:.0f}")
    console.print(table)


def sampled(loads: Floats, num_tokens: int, random: np.random.Generator) -> Floats:
    """Draw one step's tokens [L, E] by layer and expert; each token takes 8 experts."""
    return np.asarray(
        random.poisson(8 * num_tokens * loads / loads.sum(axis=1, keepdims=True)), np.float64
    )
