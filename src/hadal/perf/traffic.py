"""What dispatch and combine move and how long it takes: DeepEP's two ways, over NVLink and RDMA.

*Normal* (prefill): a token goes once to each node that has experts of it, there over NVLink to its
ranks; the gate's limit on groups keeps the nodes few. *Low latency* (decode): one message per token
and expert, straight to its rank; those inside the NVLink domain go over NVLink, beside those that
go over RDMA. Either takes

    fixed latency + max(RDMA bytes / rate of the NIC, NVLink bytes / rate of NVLink)

Rates are shares of the hardware's, from DeepEP's tables on H800. Knows no schedules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hadal.core.model_config import ModelConfig
from hadal.perf.constants import CONSTANTS, Constants
from hadal.perf.hardware import Hardware
from hadal.perf.shapes import combine_bytes, low_latency_dispatch_bytes, normal_dispatch_bytes


@dataclass(frozen=True, slots=True)
class LinkCurve:
    """Fitted to one direction of one mode."""

    fixed_s: float
    nic_share: float
    """Of the NIC's rate."""
    nvlink_share: float
    source: str
    residual: float
    """Median of |log(ours / table)|."""


NVLINK_SHARE = 0.79
"""153 and 158 of 200 GB/s on H800 (DeepEP README, EP8), 726 of 900 on SM100 (DeepEP V2's
README).
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
"""SMs that normal kernels take from computation (DeepSeek's prefill figure: 24 of 132). Low latency
takes none.
"""


def expected_places(model: ModelConfig, num_places: float) -> float:
    """Distinct places a token's experts are in, of `num_places` equal ones (nodes, or ranks) that
    hold whole groups.

    A token reaches `topk_group` of `n_group` groups, chosen at random, and every one of them. With
    fewer places than groups, several groups share a place; with more, a group's experts of a token
    fall at random on the places it has. Source: V3 report 2.1.2; 4 places give 22/7 = 3.14 for V3.
    """
    if num_places <= 1.0:
        return 1.0
    groups, chosen = model.n_group, model.topk_group
    if num_places <= groups:
        none = 1.0
        for i in range(chosen):
            none *= max(0.0, groups - groups / num_places - i) / (groups - i)
        return num_places * (1.0 - none)
    spread: float = num_places / groups
    experts: float = model.num_experts_per_tok / chosen
    none = math.pow(1.0 - 1.0 / spread, experts)
    return chosen * spread * (1.0 - none)


def remote_places(model: ModelConfig, num_places: float) -> float:
    """The same, without the token's own place: 2.36 of 4 nodes."""
    return (
        expected_places(model, num_places) * (1.0 - 1.0 / num_places) if num_places > 1.0 else 0.0
    )


class Links:
    """The links of one rank in a unit of `num_ranks`."""

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
        self._remote_nodes = remote_places(model, self._nodes)
        self._remote_ranks = remote_places(model, float(num_ranks))

    def low_latency_s(
        self, num_tokens: float, imbalance: float, *, is_overlapped: bool
    ) -> tuple[float, float]:
        """Return (dispatch, combine) of `num_tokens` tokens a rank, `imbalance` times that for the
        busiest one.
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
        """Return (dispatch, combine) of `num_tokens` tokens a rank."""
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
        """Distinct ranks a token goes to."""
        return expected_places(self._model, float(self._num_ranks))
