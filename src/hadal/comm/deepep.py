"""The same dispatch and combine over DeepEP's kernels, where GPUs have them: NVLink and RDMA, no
sockets.

Written against `deep_ep.Buffer` (DeepEP V1, deep_ep/buffer.py; V2 keeps it as buffers/legacy.py).
NOT RUN so far: no machine with DeepEP was at hand. `why_not` says why it cannot be used here; what
is computed before a call into DeepEP runs on any device and is tested.

How exact it is. DeepEP's normal combine adds a rank's rows of a token before they travel, in BF16
rows, so its result depends on the number of ranks. Here, therefore, normal mode sends every (token,
expert) pair as a token of its own with top 1 ("exact": a row per pair comes back and is added at
the source by ascending expert id, the same bits at any width, at the price of low-latency mode's
bytes). Low-latency combine adds at the source in the order of top-k; ids are sorted before, so its
order is fixed, too, but it returns BF16. DeepEP has no FP32 rows: dispatch format "fp32" is
refused.

Shapes: T tokens, D hidden, K chosen, N received rows, M received pairs, S local expert slots, C
capacity of an expert slot, G groups.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hadal.comm.expert_comm import ExpertSlotCounts, Received, replicas_of
from hadal.comm.group import Interval
from hadal.core.placement import Placement
from hadal.core.plans import NO_LINK_BYTES, SCALE_GROUP, LinkBytes, row_bytes
from hadal.reference.codec import decode, encode
from hadal.reference.ops import Replicas, choose_replicas

_MIN_CAPABILITY = (9, 0)
"""Hopper: FP8 and the TMA stores that DeepEP's kernels use."""


def why_not(dispatch_format: str = "fp8", hidden_size: int = 7168) -> str | None:
    """Why DeepEP cannot be used here, or None."""
    if dispatch_format == "fp32":
        return "DeepEP sends FP8 or BF16 rows; dispatch format fp32 needs another transport."
    if hidden_size % SCALE_GROUP:
        return (
            f"DeepEP needs a hidden size that is a multiple of {SCALE_GROUP}; this one is"
            f" {hidden_size}."
        )
    if not torch.cuda.is_available():
        return "DeepEP needs CUDA; torch finds no GPU."
    if torch.cuda.get_device_capability() < _MIN_CAPABILITY:
        return "DeepEP needs a GPU of compute capability 9.0 (Hopper) or later."
    if importlib.util.find_spec("deep_ep") is None:
        return "the package deep_ep is not installed."
    if not dist.is_available() or not dist.is_initialized():
        return "DeepEP needs an initialised torch.distributed process group."
    return None


def expert_slot_ids(
    ids_TK: Tensor, replicas: Replicas, shift: int, members: Sequence[int]
) -> Tensor:
    """The replica each pair takes as DeepEP's expert id, int64 [T, K]: position among `members` * S
    + local expert slot.

    Raises ValueError if an id is out of range, has no replica, or its replica is on a rank that is
    no member.
    """
    expert_slot_TK = choose_replicas(ids_TK, replicas, shift)
    position_R = torch.full((replicas.num_ranks,), -1, dtype=torch.int64)
    position_R[list(members)] = torch.arange(len(members))
    rank_TK = position_R.to(ids_TK.device)[expert_slot_TK // replicas.num_expert_slots]
    if bool((rank_TK < 0).any()):
        raise ValueError("the placement gives experts to ranks that are not members.")
    return rank_TK * replicas.num_expert_slots + expert_slot_TK % replicas.num_expert_slots


def by_expert(ids_TK: Tensor) -> Tensor:
    """The order of a token's choices by ascending expert id, int64 [T, K]."""
    return ids_TK.argsort(dim=1, stable=True)


def fp8_rows(x_TD: Tensor, dispatch_format: str) -> tuple[Tensor, Tensor]:
    """Return (codes E4M3 [T, D], scales FP32 [T, G]) as `Buffer.dispatch` takes them."""
    hidden = x_TD.shape[1]
    rows_TB = torch.empty(
        (len(x_TD), row_bytes(hidden, dispatch_format)), dtype=torch.uint8, device=x_TD.device
    )
    encode(x_TD, None, rows_TB, dispatch_format)
    codes_TD = rows_TB[:, :hidden].contiguous().view(torch.float8_e4m3fn)
    return codes_TD, rows_TB[:, hidden:].contiguous().view(torch.float32)


def fp32_rows(codes_ND: Tensor, scale_NG: Tensor) -> Tensor:
    """What `fp8_rows` encoded, FP32."""
    rows_NB = torch.cat(
        (codes_ND.view(torch.uint8), scale_NG.contiguous().view(torch.uint8)), dim=1
    )
    out_ND = torch.empty(codes_ND.shape, device=codes_ND.device)
    decode(rows_NB, out_ND, "fp8")
    return out_ND


def filled(counts_S: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """(expert slot [M], position [M]) of the rows that low-latency dispatch filled, by slot."""
    is_filled = torch.arange(capacity, device=counts_S.device)[None, :] < counts_S[:, None]
    expert_slot_M, position_M = is_filled.nonzero(as_tuple=True)
    return expert_slot_M, position_M


class DeepEpComm:
    """ExpertComm's interface over DeepEP. `members`: the ranks of the process group, in its order.

    Raises RuntimeError if `why_not` has a reason. After a rank is lost, a new process group and a
    new DeepEpComm are needed: DeepEP's buffers are registered with all peers.
    """

    def __init__(
        self,
        process_group: Any,
        members: Sequence[int],
        *,
        hidden_size: int,
        top_k: int,
        dispatch_format: str,
        mode: str,
        max_tokens: int,
        num_expert_slots: int,
    ) -> None:
        reason = why_not(dispatch_format, hidden_size)
        if reason is not None:
            raise RuntimeError(reason)
        deep_ep = importlib.import_module("deep_ep")
        self.mode, self.dispatch_format = mode, dispatch_format
        self.hidden_size, self.top_k = hidden_size, top_k
        self.members, self.max_tokens = tuple(members), max_tokens
        self.rank = self.members[process_group.rank()]
        self.num_experts = len(self.members) * num_expert_slots
        self.replicas: list[Replicas] = []
        self.counts = ExpertSlotCounts(0, num_expert_slots, "cuda")
        buffer = deep_ep.Buffer
        if mode == "low_latency":
            size = buffer.get_low_latency_rdma_size_hint(
                max_tokens, hidden_size, len(self.members), self.num_experts
            )
            self.buffer = buffer(
                process_group, 0, size, low_latency_mode=True, num_qps_per_rank=num_expert_slots
            )
            return
        configs = (
            buffer.get_dispatch_config(len(self.members)),
            buffer.get_combine_config(len(self.members)),
        )
        row_bytes = 2 * hidden_size
        nvl = max(
            config.get_nvl_buffer_size_hint(row_bytes, len(self.members)) for config in configs
        )
        rdma = max(
            config.get_rdma_buffer_size_hint(row_bytes, len(self.members)) for config in configs
        )
        self.buffer = buffer(process_group, nvl, rdma)

    def install(self, placement: Placement) -> None:
        """See ExpertComm.install."""
        self.replicas = [
            replicas_of(placement, layer, "cuda") for layer in range(placement.num_layers)
        ]
        self.counts = ExpertSlotCounts(placement.num_layers, placement.num_expert_slots, "cuda")

    def install_layer(self, layer: int, placement: Placement) -> None:
        """See ExpertComm.install_layer."""
        if placement.num_expert_slots * len(self.members) != self.num_experts:
            raise ValueError(
                f"a placement of {placement.num_expert_slots} slots; the buffers have {self.num_experts}"
                " in all."
            )
        self.replicas[layer] = replicas_of(placement, layer, "cuda")
        self.counts.clear(layer)

    def take_counts(self) -> Tensor:
        """See ExpertComm.take_counts."""
        return self.counts.take()

    def take_link_bytes(self) -> LinkBytes:
        """See ExpertComm.take_link_bytes. DeepEP does not say what it sent."""
        return NO_LINK_BYTES

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, layer: int) -> DeepEpHandle:
        """See ExpertComm.dispatch."""
        order_TK = by_expert(ids_TK)
        ids_TK = ids_TK.gather(1, order_TK)
        expert_slot_TK = expert_slot_ids(
            ids_TK, self.replicas[layer], layer + self.rank, self.members
        )
        kind = _LowLatencyHandle if self.mode == "low_latency" else _NormalHandle
        return kind(self, x_TD, expert_slot_TK, order_TK, layer)


class DeepEpHandle:
    """See comm/expert_comm.Handle. DeepEP reports no times, so the intervals stay None."""

    dispatch_interval: Interval | None = None
    combine_interval: Interval | None = None

    def __init__(
        self, comm: DeepEpComm, x_TD: Tensor, expert_slot_TK: Tensor, order_TK: Tensor, layer: int
    ) -> None:
        self._comm = comm
        self._layer = layer
        self._expert_slot_TK = expert_slot_TK
        self._order_TK = order_TK
        self._start(x_TD)

    def _start(self, x_TD: Tensor) -> None:
        raise NotImplementedError

    def finish_dispatch(self) -> Received:
        raise NotImplementedError

    def start_combine(self, y_MD: Tensor) -> None:
        raise NotImplementedError

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        raise NotImplementedError


class _NormalHandle(DeepEpHandle):
    """Every pair is a token with top 1: see the module's docstring."""

    def _start(self, x_TD: Tensor) -> None:
        comm, buffer = self._comm, self._comm.buffer
        pairs_P1 = self._expert_slot_TK.reshape(-1, 1)
        per_rank, per_node, per_expert, is_in_rank, event = buffer.get_dispatch_layout(
            pairs_P1,
            comm.num_experts,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        codes, scales = fp8_rows(x_TD, comm.dispatch_format)
        top_k = self._expert_slot_TK.shape[1]
        received, slots_N1, _, _, self._handle, self._event = buffer.dispatch(
            (
                codes.view(torch.uint8).repeat_interleave(top_k, 0).view(codes.dtype),
                scales.repeat_interleave(top_k, 0),
            ),
            topk_idx=pairs_P1,
            topk_weights=torch.ones(pairs_P1.shape, device=pairs_P1.device),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        self._received, self._slots_N1 = received, slots_N1

    def finish_dispatch(self) -> Received:
        self._event.current_stream_wait()
        expert_slot_M = self._slots_N1.flatten()
        self._comm.counts.add(self._layer, expert_slot_M)
        return Received(
            fp32_rows(*self._received),
            torch.arange(len(expert_slot_M), device=expert_slot_M.device),
            expert_slot_M,
        )

    def start_combine(self, y_MD: Tensor) -> None:
        buffer = self._comm.buffer
        self._back, _, self._event = buffer.combine(
            y_MD.to(torch.bfloat16),
            self._handle,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        self._event.current_stream_wait()
        weights_TK = weights_TK.gather(1, self._order_TK)
        rows_TKD = self._back.view(*weights_TK.shape, -1)
        routed_TD = torch.zeros((len(weights_TK), rows_TKD.shape[2]), device=rows_TKD.device)
        for k in range(weights_TK.shape[1]):
            routed_TD += rows_TKD[:, k].float() * weights_TK[:, k, None]
        return routed_TD


class _LowLatencyHandle(DeepEpHandle):
    """Send now, receive when the hook is called: between the two no SM is used."""

    _hook: Callable[[], None]

    def _start(self, x_TD: Tensor) -> None:
        comm = self._comm
        self._received, self._counts_S, self._handle, _, self._hook = (
            comm.buffer.low_latency_dispatch(
                x_TD.to(torch.bfloat16),
                self._expert_slot_TK,
                comm.max_tokens,
                comm.num_experts,
                use_fp8=True,
                round_scale=comm.dispatch_format == "fp8_pow2",
                return_recv_hook=True,
            )
        )

    def finish_dispatch(self) -> Received:
        self._hook()
        self._comm.counts.add_sums(self._layer, self._counts_S)
        codes_SCD, scale_SCG = self._received
        self._expert_slot_M, self._position_M = filled(self._counts_S, codes_SCD.shape[1])
        at = (self._expert_slot_M, self._position_M)
        codes_MD = codes_SCD.view(torch.uint8)[at].view(codes_SCD.dtype)
        x_ND = fp32_rows(codes_MD, scale_SCG[at])
        return Received(x_ND, torch.arange(len(x_ND), device=x_ND.device), self._expert_slot_M)

    def start_combine(self, y_MD: Tensor) -> None:
        comm = self._comm
        # Rows that were not filled are not sent.
        y_SCD = torch.empty(self._received[0].shape, dtype=torch.bfloat16, device=y_MD.device)
        y_SCD[self._expert_slot_M, self._position_M] = y_MD.to(torch.bfloat16)
        # Only the receiving kernel, which the hook launches, reads the weights: finish_combine
        # fills them before.
        self._weights_TK = torch.zeros(self._expert_slot_TK.shape, device=y_MD.device)
        self._routed: Tensor
        self._routed, _, self._hook = comm.buffer.low_latency_combine(
            y_SCD, self._expert_slot_TK, self._weights_TK, self._handle, return_recv_hook=True
        )

    def finish_combine(self, weights_TK: Tensor) -> Tensor:
        self._weights_TK.copy_(weights_TK.gather(1, self._order_TK))
        self._hook()
        return self._routed.float()
