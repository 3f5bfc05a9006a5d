"""Assign every (token, expert) pair to a rank and expert slot, grouped by rank, on a CPU. Twin:
`hadal.reference.route`.

Shapes: T tokens, K chosen, E experts, M most replicas, P = T * K pairs, N rows.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from hadal.kernels import library
from hadal.reference import route as twin
from hadal.reference.route import Replicas, Route


def route(ids_TK: Tensor, replicas: Replicas, shift: int) -> Route:
    """Return the twin's Route. Raises ValueError for an id out of range or without a replica."""
    lib = library.load()
    tensors = (ids_TK, replicas.expert_slots_EM, replicas.counts_E)
    if lib is None or any(x.device.type != "cpu" for x in tensors):
        return twin.route(ids_TK, replicas, shift)
    num_tokens, top_k = ids_TK.shape
    num_experts, most = replicas.expert_slots_EM.shape
    num_ranks, num_pairs = replicas.num_ranks, num_tokens * top_k
    library.check_shape("counts_E", replicas.counts_E, (num_experts,))
    ids_TK = library.as_int(ids_TK, torch.int64)
    expert_slots_EM, counts_E = (
        library.as_int(x, torch.int32) for x in (replicas.expert_slots_EM, replicas.counts_E)
    )
    # One allocation: scratch, pairs and rows of every rank, then five lists with an entry per pair.
    out = torch.empty(num_pairs * 6 + num_ranks * 6, dtype=torch.int32)
    sizes = [num_pairs + 4 * num_ranks, 2 * num_ranks, *([num_pairs] * 5)]
    scratch, counts, *lists = torch.split_with_sizes(out, sizes)
    pairs_address = counts.data_ptr()
    shape = (ctypes.c_int32 * 7)(
        num_tokens, top_k, num_experts, most, replicas.num_expert_slots, num_ranks, shift
    )
    library.check_status(
        lib.hadal_route(
            ctypes.addressof(shape),
            ids_TK.data_ptr(),
            expert_slots_EM.data_ptr(),
            counts_E.data_ptr(),
            scratch.data_ptr(),
            pairs_address,
            pairs_address + 4 * num_ranks,
            *(x.data_ptr() for x in lists),
        )
    )
    token_P, row_P, expert_slot_P, token_N, at_P = lists
    num_both = counts.tolist()
    num_pairs_R, num_rows_R = num_both[:num_ranks], num_both[num_ranks:]
    return Route(
        num_pairs_R,
        num_rows_R,
        token_P,
        row_P,
        expert_slot_P,
        token_N[: sum(num_rows_R)],
        at_P.view(num_tokens, top_k),
        scratch[:num_pairs].view(num_tokens, top_k),
    )
