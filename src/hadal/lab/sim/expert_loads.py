"""What a policy of expert placement leaves of imbalance: loads drawn as skewed as measured ones,
the real code on them.

    shares = expert_share("auto", "decode", 144, 32, rng)       policy/experts/balance on drawn loads
    StepModel(144, placed=shares.imbalance)                     what lab/perf/step calls `placed`
    shares.one_micro_batch(mean_rows, rng)                      rows by rank, chance included

An expert's load is log-normal: in each layer a deviate of its group (of the gate's neighbours) and
one of its own, both stretched by a factor of the layer. The deviations are fitted to SGLang's
published loads of DeepSeek-V3/R1, 256 experts in 58 layers (five prefill and three decode workloads
of its reproduction kit for large-scale expert parallelism): to the mean over layers of maximum over
mean of ranks, with experts in order and with our placement, and to the heaviest experts. Maximum
over mean of 32 prefill ranks in order 1.78 (drawn 1.74), with groups kept on nodes 1.16 (1.15), as
the balancer that serves places them 1.01 (1.01); of 144 decode ranks in order 3.72 (3.77), placed
1.15 (1.14). Groups come out more unequal than measured (deviation of the logarithm of their loads
0.31 and 0.37, drawn 0.38 and 0.44). `python -m bench expert_skew` prints both side by side.

Knows no workload: a real one has hot experts that stay hot, so loads are drawn once for a day, not
for each step. Shapes: L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hadal.core.arrays import Floats
from hadal.core.balance import AUTO, OFF
from hadal.core.config import DECODE, PREFILL
from hadal.core.placement import Placement, spread
from hadal.perf.shapes import DEEPSEEK_V3, num_moe_layers
from hadal.policy.experts.balance import Cluster, ExpertPlan, balance, rank_loads
from hadal.roles.leaders import groups_fit_nodes

POLICIES = (AUTO, OFF)
NUM_LAYERS, NUM_EXPERTS, NUM_GROUPS = (
    num_moe_layers(DEEPSEEK_V3),
    DEEPSEEK_V3.n_routed_experts,
    DEEPSEEK_V3.n_group,
)
RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Skew:
    """Standard deviations of the logarithm of loads."""

    group: float
    """Spread between a gate's groups within a layer."""
    expert: float
    """Spread between experts within their group."""
    layer: float
    """Spread of the layer's factor on both."""


SKEWS = {PREFILL: Skew(0.40, 0.60, 0.20), DECODE: Skew(0.47, 0.54, 0.20)}
"""Skews of both phases. Decode's loads come from fewer texts at a time, hence from more unequal
groups.
"""


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """What each rank receives in each layer over a whole run, over the mean of the ranks [L, R]."""

    share_LR: Floats

    @cached_property
    def imbalance(self) -> float:
        """Mean over layers of maximum over mean, at least 1: every layer waits for its busiest
        rank.
        """
        return max(1.0, float(self.share_LR.max(axis=1).mean()))

    @property
    def typical_layer(self) -> int:
        """The layer whose maximum is the median of all layers'."""
        order = np.argsort(self.share_LR.max(axis=1), kind="stable")
        return int(order[len(order) // 2])

    def one_micro_batch(
        self, mean_rows: float, rng: np.random.Generator, layer: int | None = None
    ) -> Floats:
        """Rows that ranks receive over their mean [R], in one layer (None: the typical one) of one
        micro-batch.

        `mean_rows` (token, expert) pairs a rank, thrown at random by the ranks' shares. Raises
        ValueError if there is less than one in all.
        """
        share_R = self.share_LR[self.typical_layer if layer is None else layer]
        num_rows = round(mean_rows * share_R.size)
        if num_rows < 1:
            raise ValueError(
                f"{mean_rows} rows a rank are none on {share_R.size} ranks; at least one row is"
                " needed."
            )
        rows_R = rng.multinomial(num_rows, share_R / share_R.sum())
        return np.asarray(rows_R / rows_R.mean())


def draw_loads(phase: str, rng: np.random.Generator, num_layers: int = NUM_LAYERS) -> Floats:
    """Loads of experts over their mean [L, E], as skewed as SGLang's of this phase."""
    if phase not in SKEWS:
        raise ValueError(f"phase {phase!r} is unknown; {PREFILL} or {DECODE}.")
    skew = SKEWS[phase]
    groups_LG = skew.group * rng.standard_normal((num_layers, NUM_GROUPS))
    logs_LE = np.repeat(groups_LG, NUM_EXPERTS // NUM_GROUPS, axis=1)
    logs_LE += skew.expert * rng.standard_normal((num_layers, NUM_EXPERTS))
    loads_LE = np.exp(logs_LE * np.exp(skew.layer * rng.standard_normal((num_layers, 1))))
    return np.asarray(loads_LE / loads_LE.mean(axis=1, keepdims=True))


def expert_share(
    policy: str,
    phase: str,
    num_ranks: int,
    num_redundant: int,
    rng: np.random.Generator,
    *,
    ranks_per_node: int = RANKS_PER_NODE,
    num_layers: int = NUM_LAYERS,
) -> ExpertRanks:
    """Draw a unit's loads, place its experts, and say what its ranks receive.

    `auto`: our balancer as roles/experts asks it: a gate's group stays on its node where ranks can
    be level like that (roles/leaders), replicas split their expert's tokens as it says; but from
    scratch, whatever that moves. `off`: experts in order, replicas evenly chosen, without a look at
    the loads. Raises ValueError for other policies and phases, and for experts and replicas that do
    not divide over the ranks.
    """
    if policy not in POLICIES:
        raise ValueError(f"expert policy {policy!r} is unknown; {' or '.join(POLICIES)}.")
    loads_LE = draw_loads(phase, rng, num_layers)
    if num_ranks == 1:
        return ExpertRanks(np.ones((num_layers, 1)))
    in_order = spread(num_layers, NUM_EXPERTS, num_ranks, num_redundant)
    if policy == OFF:
        loads_LR = rank_loads(in_order, loads_LE)
    else:
        plan = balanced(loads_LE, phase, in_order, num_redundant, ranks_per_node)
        loads_LR = rank_loads(plan.placement, loads_LE, plan.split_LRS)
    return ExpertRanks(np.asarray(loads_LR / loads_LR.mean(axis=1, keepdims=True)))


def balanced(
    loads_LE: Floats, phase: str, like: Placement, num_redundant: int, ranks_per_node: int
) -> ExpertPlan:
    """Return the balancer's answer to these loads, as a unit with so many slots and nodes asks it."""
    nodes = tuple(rank // ranks_per_node for rank in range(like.num_ranks))
    cluster = Cluster((like.num_expert_slots,) * like.num_ranks, nodes)
    by_nodes = groups_fit_nodes(phase, nodes[-1] + 1, NUM_GROUPS, num_redundant)
    mode = "hybrid" if by_nodes else "global"
    return balance(
        loads_LE, cluster, mode=mode, num_groups=NUM_GROUPS if by_nodes else 1, weighted=True
    )
