"""Assign every (token, expert) pair to a rank and expert slot, grouped by rank, in plain torch.
Independent of bytes and messages. Fast twin: `hadal.kernels.route`. Shapes: T tokens, K chosen, E
experts, M most replicas, P = T * K pairs, N rows (distinct tokens of a rank) of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replica locations of a layer's experts: expert slot ids of the whole unit (rank *
    num_expert_slots + slot).
    """

    expert_slots_EM: Tensor
    """Replicas of each expert, int32, padded with the expert's first slot."""
    counts_E: Tensor
    """int32"""
    num_ranks: int
    num_expert_slots: int
    """Number of expert slots per rank."""


@dataclass(frozen=True, slots=True)
class Route:
    """Pairs and rows grouped by rank, within a rank by token, then choice. All tensors are int32. A
    rank's rows are its distinct tokens, because a rank needs each token once.
    """

    num_pairs_R: list[int]
    num_rows_R: list[int]
    token_P: Tensor
    row_P: Tensor
    """Index of each pair's row among the rows of its rank."""
    expert_slot_P: Tensor
    """Expert slot of each pair on its rank."""
    token_N: Tensor
    at_TK: Tensor
    """Index of each (token, choice) among the P pairs."""
    expert_slot_TK: Tensor
    """Expert slot id of each pair in the whole unit."""


def choose_replicas(ids_TK: Tensor, replicas: Replicas, shift: int) -> Tensor:
    """Return the expert slot id of each pair, int64 [T, K]: replica (t + shift) % count of its
    expert, so that tokens spread evenly. Raises ValueError if an id is out of range or its expert
    has no replica.
    """
    if ids_TK.numel() and not 0 <= int(ids_TK.min()) <= int(ids_TK.max()) < len(replicas.counts_E):
        raise ValueError("an expert id is out of range.")
    counts_TK = replicas.counts_E[ids_TK].long()
    if bool((counts_TK < 1).any()):
        raise ValueError("an expert id has no replica.")
    token_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None]
    return replicas.expert_slots_EM[ids_TK, (token_T1 + shift) % counts_TK].long()


def route(ids_TK: Tensor, replicas: Replicas, shift: int) -> Route:
    """Choose every pair's replica and group the pairs by rank. Raises ValueError like
    `choose_replicas`.
    """
    num_tokens, top_k = ids_TK.shape
    num_ranks, num_expert_slots = replicas.num_ranks, replicas.num_expert_slots
    expert_slot_TK = choose_replicas(ids_TK, replicas, shift)
    rank_TK = expert_slot_TK // num_expert_slots
    order_P = rank_TK.flatten().argsort(stable=True)
    rank_P, token_P = rank_TK.flatten()[order_P], order_P // max(top_k, 1)
    at_P = torch.empty_like(order_P)
    at_P[order_P] = torch.arange(len(order_P), device=order_P.device)
    is_new_P = torch.ones_like(order_P, dtype=torch.bool)
    is_new_P[1:] = (rank_P[1:] != rank_P[:-1]) | (token_P[1:] != token_P[:-1])
    num_rows_R = torch.bincount(rank_P[is_new_P], minlength=num_ranks)
    first_row_R = num_rows_R.cumsum(0) - num_rows_R
    return Route(
        num_pairs_R=torch.bincount(rank_P, minlength=num_ranks).tolist(),
        num_rows_R=num_rows_R.tolist(),
        token_P=token_P.int(),
        row_P=(is_new_P.cumsum(0) - 1 - first_row_R[rank_P]).int(),
        expert_slot_P=(expert_slot_TK.flatten()[order_P] % num_expert_slots).int(),
        token_N=token_P[is_new_P].int(),
        at_TK=at_P.view(num_tokens, top_k).int(),
        expert_slot_TK=expert_slot_TK.int(),
    )
