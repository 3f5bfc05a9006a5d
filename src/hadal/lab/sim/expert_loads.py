"""Imbalance that remains under a policy of expert placement: the server's own balancer runs on
drawn loads that are as skewed as measured ones.

    shares = expert_share("auto", "decode", 144, 32, rng)       policy/experts/balance on drawn loads
    StepModel(144, placed=shares.imbalance)                     lab/perf/step's `placed`
    shares.one_micro_batch(mean_rows, rng)                      rows by rank, with chance

An expert's load is log-normal: in each layer the sum of a deviate of its gate group and one of its
own, both stretched by a factor of the layer. The deviations are fitted to SGLang's published loads
of DeepSeek-V3/R1, 256 experts in 58 layers (five prefill and three decode workloads of its
reproduction kit for large-scale expert parallelism): to the mean over layers of maximum over mean
of ranks, with experts in order and with our placement, and to the heaviest experts.

Maximum over mean, measured (drawn). 32 prefill ranks: experts in order 1.78 (1.74), groups kept on
nodes 1.16 (1.15), placed by the server's balancer 1.01 (1.01). 144 decode ranks: in order 3.72
(3.77), placed 1.15 (1.14). Drawn groups are more unequal than measured ones: the deviation of the
logarithm of their loads is 0.38 and 0.44, measured 0.31 and 0.37 (prefill, decode).
tests/unit/lab/sim/test_expert_loads compares drawn with measured loads.

Does not depend on a workload. In a real one hot experts stay hot, so loads are drawn once per day,
not per step. Shapes: L MoE layers, E experts, R ranks.
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
"""Skews by phase. Decode's groups are more unequal: its loads come from fewer texts."""


@dataclass(frozen=True, eq=False)
class ExpertRanks:
    """Load of each rank in each layer over a whole run."""

    share_LR: Floats
    """Rows of a rank over the mean of the ranks [L, R]."""

    @cached_property
    def imbalance(self) -> float:
        """Mean over layers of maximum over mean, at least 1: layers wait for the busiest rank."""
        return max(1.0, float(self.share_LR.max(axis=1).mean()))

    @property
    def typical_layer(self) -> int:
        """Layer with the median of all layers' maxima."""
        order = np.argsort(self.share_LR.max(axis=1), kind="stable")
        return int(order[len(order) // 2])

    def one_micro_batch(
        self, mean_rows: float, rng: np.random.Generator, layer: int | None = None
    ) -> Floats:
        """Draw the rows of each rank over their mean [R], in one layer of one micro-batch.

        `mean_rows`: (token, expert) pairs per rank; they are assigned at random by the ranks'
        shares. `layer` None: the typical layer. Raises ValueError for less than one row in all.
        """
        share_R = self.share_LR[self.typical_layer if layer is None else layer]
        num_rows = round(mean_rows * share_R.size)
        if num_rows < 1:
            raise ValueError(
                f"{mean_rows} rows per rank on {share_R.size} ranks are less than one row"
                " in total; use more."
            )
        rows_R = rng.multinomial(num_rows, share_R / share_R.sum())
        return np.asarray(rows_R / rows_R.mean())


def draw_loads(phase: str, rng: np.random.Generator, num_layers: int = NUM_LAYERS) -> Floats:
    """Draw loads of experts over their mean [L, E], as skewed as SGLang's of this phase. Raises
    ValueError for an unknown phase.
    """
    if phase not in SKEWS:
        raise ValueError(f"phase {phase!r} is unknown; use {PREFILL} or {DECODE}.")
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
    """Draw a unit's loads, place its experts, and return the load of its ranks.

    `auto`: the balancer as roles/experts calls it. A gate group stays on one node if ranks can be
    balanced that way (roles/leaders), and replicas split their expert's tokens as planned. Unlike
    live, it places from scratch and ignores the cost of moves. `off`: experts in order, replicas
    chosen evenly, independent of the loads. Raises ValueError for other policies and phases, and
    for experts and replicas that do not divide over the ranks.
    """
    if policy not in POLICIES:
        raise ValueError(f"expert policy {policy!r} is unknown; use {' or '.join(POLICIES)}.")
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
    """Return the balancer's plan for these loads, for a unit with the slots and ranks of `like`."""
    nodes = tuple(rank // ranks_per_node for rank in range(like.num_ranks))
    cluster = Cluster((like.num_expert_slots,) * like.num_ranks, nodes)
    by_nodes = groups_fit_nodes(phase, nodes[-1] + 1, NUM_GROUPS, num_redundant)
    mode = "hybrid" if by_nodes else "global"
    return balance(
        loads_LE, cluster, mode=mode, num_groups=NUM_GROUPS if by_nodes else 1, weighted=True
    )
