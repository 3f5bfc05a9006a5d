"""Bytes and times of dispatch and combine in DeepEP's two modes, over NVLink and RDMA.

*Normal* (prefill): a token goes once to each node with some of its experts, and from there over
NVLink to its ranks; the gate's limit on groups bounds the number of nodes. *Low latency* (decode):
one message per token and expert, directly to the expert's rank. Messages within the NVLink domain
use NVLink, in parallel to messages over RDMA. Both modes take

    fixed latency + max(RDMA bytes / rate of the NIC, NVLink bytes / rate of NVLink)

Rates are shares of the hardware's rates, from DeepEP's tables on H800. While computation runs, the
second term is longer, except in low-latency dispatch (lab/perf/constants). Does not depend on
schedules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hadal.core.config import PREFILL
from hadal.core.model_config import ModelConfig
from hadal.core.plans import NO_LINK_BYTES, LinkBytes
from hadal.lab.perf.constants import CONSTANTS, Constants
from hadal.lab.perf.hardware import Hardware
from hadal.perf.shapes import combine_bytes, low_latency_dispatch_bytes, normal_dispatch_bytes


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """Fitted parameters of one mode, for dispatch, combine or both."""

    fixed_s: float
    nic_share: float
    """Share of the NIC's rate that is reached."""
    nvlink_share: float
    """Share of NVLink's rate that is reached."""
    source: str
    residual: float
    """Median of |log(ours / table)|."""


NVLINK_SHARE = 0.79
"""Reached share of NVLink's rate: 153 and 158 of 200 GB/s on H800 (DeepEP README, EP8), 726 of 900
on SM100 (DeepEP V2's README).
"""
LOW_LATENCY_DISPATCH = LinkCurve(
    29.7e-6,
    0.894,
    NVLINK_SHARE,
    "DeepEP README, June 2025: EP8 to EP256 at 128 tokens on H800",
    0.023,
)
LOW_LATENCY_COMBINE = LinkCurve(22.2e-6, 0.850, NVLINK_SHARE, "the same table's combine", 0.021)
NORMAL = LinkCurve(
    60e-6,
    0.89,
    NVLINK_SHARE,
    "DeepEP README, April 2025: EP32 58/57 and EP64 51/50 GB/s counting the own node, 43 to 46 GB/s"
    " on the NIC",
    0.03,
)
COMM_SMS = 24
"""SMs that normal mode takes (DeepSeek's prefill figure: 24 of 132); low latency needs none."""


def expected_holders(model: ModelConfig, num_holders: float) -> float:
    """Return the expected number of distinct holders of a token's experts, among `num_holders`
    equal holders (nodes or ranks).

    A token uses `topk_group` of `n_group` groups, chosen at random, and at least one expert of
    each. With fewer holders than groups, several groups share a holder. With more, a token's
    experts in a group fall at random on the holders of the group. Source: V3 report 2.1.2; 4
    holders give 22/7 = 3.14 for V3.
    """
    if num_holders <= 1.0:
        return 1.0
    groups, chosen = model.n_group, model.topk_group
    if num_holders <= groups:
        none = 1.0
        for i in range(chosen):
            none *= max(0.0, groups - groups / num_holders - i) / (groups - i)
        return num_holders * (1.0 - none)
    spread: float = num_holders / groups
    experts: float = model.num_experts_per_tok / chosen
    none = math.pow(1.0 - 1.0 / spread, experts)
    return chosen * spread * (1.0 - none)


def remote_holders(model: ModelConfig, num_holders: float) -> float:
    """Return the expected number of holders besides the token's own: 2.36 of 4 nodes for V3."""
    return (
        expected_holders(model, num_holders) * (1.0 - 1.0 / num_holders)
        if num_holders > 1.0
        else 0.0
    )


class Links:
    """Bytes and times of one rank's exchanges in a unit of `num_ranks`."""

    def __init__(
        self,
        model: ModelConfig,
        hardware: Hardware,
        num_ranks: int,
        constants: Constants = CONSTANTS,
    ) -> None:
        self._model, self._hardware, self._num_ranks = model, hardware, num_ranks
        self._constants = constants
        domain = min(num_ranks, hardware.nvlink_domain)
        self._local_share = domain / num_ranks
        self._nodes = num_ranks / domain
        self._remote_nodes = remote_holders(model, self._nodes)
        self._remote_ranks = remote_holders(model, float(num_ranks))

    def link_bytes(self, phase: str, num_tokens: float) -> LinkBytes:
        """Return the mean bytes that one MoE layer sends between the unit's ranks for `num_tokens`
        tokens, without what a rank sends to itself.
        """
        model = self._model
        if self._num_ranks == 1 or num_tokens <= 0.0:
            return NO_LINK_BYTES
        if phase == PREFILL:
            # NVLink carries tokens for ranks of the own node, and forwards tokens of other nodes.
            within, between = self._remote_ranks, self._remote_nodes
            sizes = normal_dispatch_bytes(model), combine_bytes(model)
        else:
            between = model.num_experts_per_tok * (1.0 - self._local_share)
            own = model.num_experts_per_tok / self._num_ranks
            within = model.num_experts_per_tok - between - own
            sizes = low_latency_dispatch_bytes(model), combine_bytes(model)
        dispatch, combine = (
            (round(num_tokens * within * size), round(num_tokens * between * size))
            for size in sizes
        )
        return LinkBytes(dispatch, combine)

    def low_latency_s(
        self, num_tokens: float, imbalance: float, *, is_overlapped: bool
    ) -> tuple[float, float]:
        """Return the seconds of (dispatch, combine) with `num_tokens` tokens per rank, and
        `imbalance` times as many rows on the busiest one.
        """
        if self._num_ranks == 1:
            return 0.0, 0.0
        messages = num_tokens * self._model.num_experts_per_tok * imbalance
        slowdown = self._constants.combine_slowdown if is_overlapped else 1.0
        return (
            self._direct_s(
                LOW_LATENCY_DISPATCH, messages * low_latency_dispatch_bytes(self._model), 1.0
            ),
            self._direct_s(LOW_LATENCY_COMBINE, messages * combine_bytes(self._model), slowdown),
        )

    def _direct_s(self, curve: LinkCurve, total_bytes: float, slowdown: float) -> float:
        remote_s = (
            total_bytes
            * (1.0 - self._local_share)
            / (self._hardware.nic_bytes_per_s * curve.nic_share)
        )
        local_s = (
            total_bytes
            * self._local_share
            / (self._hardware.nvlink_bytes_per_s * curve.nvlink_share)
        )
        return curve.fixed_s + slowdown * max(remote_s, local_s)

    def normal_s(
        self, num_tokens: float, imbalance: float, *, is_overlapped: bool
    ) -> tuple[float, float]:
        """Return the seconds of (dispatch, combine) with `num_tokens` tokens per rank, and
        `imbalance` times as many on the busiest one.
        """
        if self._num_ranks == 1:
            return 0.0, 0.0
        share = self._constants.prefill_link_share if is_overlapped else 1.0
        return (
            self._forwarded_s(num_tokens * imbalance * normal_dispatch_bytes(self._model), share),
            self._forwarded_s(num_tokens * imbalance * combine_bytes(self._model), share),
        )

    def _forwarded_s(self, token_bytes: float, share: float) -> float:
        remote_s = (
            token_bytes * self._remote_nodes / (self._hardware.nic_bytes_per_s * NORMAL.nic_share)
        )
        local_s = (
            token_bytes
            * self._remote_ranks
            / (self._hardware.nvlink_bytes_per_s * NORMAL.nvlink_share)
        )
        return NORMAL.fixed_s + max(remote_s, local_s) / share

    @property
    def received_ranks(self) -> float:
        """Mean number of distinct ranks that receive a token."""
        return expected_holders(self._model, float(self._num_ranks))
