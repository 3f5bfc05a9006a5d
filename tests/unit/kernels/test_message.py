"""Whole messages by the kernels: byte for byte those of comm's plain path."""

import pytest
import torch

from hadal.comm.codec import Codec
from hadal.comm.layout import DISPATCH_FORMATS, MessageLayout
from hadal.comm.low_latency import LowLatencyMode
from hadal.comm.normal import NormalMode
from hadal.core.placement import spread
from hadal.kernels.message import LOW_LATENCY, NORMAL, MessageFormat, unpack
from hadal.kernels.route import route
from hadal.reference.route import Replicas
from tests.fresh import fresh

EXPERTS, RANKS, TOP_K = 12, 4, 3
SEEDS = [1, fresh().randrange(1 << 30)]


def replicas() -> Replicas:
    placement = spread(1, EXPERTS, RANKS, 4)
    expert_slots_EM, counts_E = placement.replicas(0)
    return Replicas(
        torch.from_numpy(expert_slots_EM).int(),
        torch.from_numpy(counts_E).int(),
        RANKS,
        placement.num_expert_slots,
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 30])
@pytest.mark.parametrize("dispatch_format", DISPATCH_FORMATS)
@pytest.mark.parametrize("kind", [NORMAL, LOW_LATENCY])
def test_messages_are_the_plain_paths(
    built: None, kind: int, dispatch_format: str, num_tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(num_tokens, 130, generator=generator)
    ids_TK = torch.randint(0, EXPERTS, (num_tokens, TOP_K), generator=generator)
    where, peers = replicas(), (0, 2, 3)
    way = route(ids_TK, where, 1)
    codec = Codec(MessageLayout(dispatch_format, 130))
    if kind == NORMAL:
        normal = NormalMode(codec, "cpu")
        fast = normal.pack(0, x_TD, way, where.num_expert_slots, 5, peers)
        fill = normal._fill
    else:
        low_latency = LowLatencyMode(
            codec, "cpu", max_tokens=30, top_k=TOP_K, peers=peers, num_held=4
        )
        fast = low_latency.pack(low_latency.sets[0], x_TD, way, where.num_expert_slots, 5, peers)
        fill = low_latency._fill
    assert set(fast) == set(peers)
    for peer, written in fast.items():
        plain = torch.full_like(written, 99)
        fill(plain, x_TD, way, 5, peer)
        assert torch.equal(written, plain), seed


def test_messages_that_name_what_is_not_there_are_refused(built: None) -> None:
    where, x_TD = replicas(), torch.zeros(3, 8)
    normal = NormalMode(Codec(MessageLayout("fp32", 8)), "cpu")
    way = route(torch.tensor([[0, 1, 2]] * 3), where, 0)
    peer = next(rank for rank in range(RANKS) if way.num_pairs_R[rank] and rank != 1)
    written = normal.pack(0, x_TD, way, where.num_expert_slots, 0, (peer,))[peer]
    rows, pairs = way.num_rows_R[peer], way.num_pairs_R[peer]
    nothing = torch.zeros(0, dtype=torch.int32)
    row_M = torch.zeros(pairs, dtype=torch.int64)
    expert_slot_M = torch.zeros(pairs, dtype=torch.int64)
    out_ND = x_TD[:rows]

    counts_S = torch.zeros(where.num_expert_slots + 1, dtype=torch.int64)

    def read() -> bool:
        own = (nothing, nothing, nothing)
        return unpack(
            [(written, rows, pairs)],
            x_TD,
            own,
            MessageFormat(NORMAL, "fp32"),
            counts_S[:-1],
            row_M,
            expert_slot_M,
            torch.empty_like(out_ND),
        )

    assert read()
    assert counts_S.tolist() == torch.bincount(expert_slot_M, minlength=len(counts_S)).tolist()
    written[16 + 4 * pairs : 20 + 4 * pairs].view(torch.int32).fill_(where.num_expert_slots)
    with pytest.raises(ValueError, match="row"):
        read()
    assert counts_S[-1] == 0, "nothing is counted behind the slots"
    written[16 + 4 * pairs : 20 + 4 * pairs].view(torch.int32).fill_(0)
    written[16:20].view(torch.int32).fill_(rows)
    with pytest.raises(ValueError, match="row"):
        read()
