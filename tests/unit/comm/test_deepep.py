"""The DeepEP backend where there is none: it says why, and what it computes before it calls DeepEP
is right.
"""

import pytest
import torch

from hadal.comm import deepep
from hadal.comm.layout import MessageLayout
from hadal.core.placement import spread, without
from hadal.reference import codec as slow
from hadal.reference.ops import Replicas, route


def replicas(lost: tuple[int, ...] = ()) -> Replicas:
    placement = spread(1, 12, 4, 4)
    if lost:
        placement = without(placement, lost)
    expert_slots_EM, counts_E = placement.replicas(0)
    return Replicas(
        torch.from_numpy(expert_slots_EM).int(),
        torch.from_numpy(counts_E).int(),
        placement.num_ranks,
        placement.num_expert_slots,
    )


def test_it_says_why_not() -> None:
    assert "fp32" in (deepep.why_not("fp32", 7168) or "")
    assert "multiple of 128" in (deepep.why_not("fp8", 192) or "")
    reason = deepep.why_not("fp8", 7168)
    if not torch.cuda.is_available():
        assert "CUDA" in (reason or "")
    if reason is not None:
        with pytest.raises(RuntimeError, match=r"\w"):
            deepep.DeepEpComm(
                None,
                (0, 1),
                hidden_size=7168,
                top_k=8,
                dispatch_format="fp8",
                mode="normal",
                max_tokens=128,
                num_expert_slots=2,
            )


@pytest.mark.parametrize("lost", [(), (1,), (0, 3)])
def test_slot_ids_are_the_routes_choice(lost: tuple[int, ...]) -> None:
    where, members = replicas(lost), [rank for rank in range(4) if rank not in lost]
    generator = torch.Generator().manual_seed(1)
    ids_TK = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(20)])
    expert_slot_TK = deepep.expert_slot_ids(ids_TK, where, 5, members)
    way = route(ids_TK, where, 5)
    flat = expert_slot_TK.flatten()
    at = way.at_TK.flatten().long()
    assert torch.equal((flat % where.num_expert_slots).int(), way.expert_slot_P[at])
    counts = torch.bincount(flat // where.num_expert_slots, minlength=len(members)).tolist()
    assert counts == [way.num_pairs_R[rank] for rank in members]


def test_slot_ids_refuse_what_is_not_there() -> None:
    with pytest.raises(ValueError, match="out of range"):
        deepep.expert_slot_ids(torch.tensor([[12]]), replicas(), 0, range(4))
    with pytest.raises(ValueError, match="not members"):
        deepep.expert_slot_ids(torch.arange(12)[None, :], replicas(), 0, (0, 1))


@pytest.mark.parametrize("dispatch_format", ["fp8", "fp8_pow2"])
def test_rows_are_those_of_our_own_format(dispatch_format: str) -> None:
    x_TD = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    codes, scales = deepep.fp8_rows(x_TD, dispatch_format)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.float8_e4m3fn, (5, 256), (5, 2))
    rows = torch.empty((5, MessageLayout(dispatch_format, 256).row_bytes), dtype=torch.uint8)
    out = torch.empty_like(x_TD)
    slow.encode(x_TD, None, rows, dispatch_format)
    slow.decode(rows, out, dispatch_format)
    assert torch.equal(deepep.fp32_rows(codes, scales), out)


def test_which_rows_of_a_slot_are_filled() -> None:
    expert_slot_M, position_M = deepep.filled(torch.tensor([2, 0, 1]), 4)
    assert expert_slot_M.tolist() == [0, 0, 2]
    assert position_M.tolist() == [0, 1, 0]


def test_choices_are_sorted_by_expert() -> None:
    order = deepep.by_expert(torch.tensor([[7, 2, 5]]))
    assert order.tolist() == [[1, 2, 0]]
