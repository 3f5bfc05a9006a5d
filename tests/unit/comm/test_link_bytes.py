"""Bytes within nodes and between nodes: the counts equal the bytes that went over the queues."""

from __future__ import annotations

import pytest
import torch

from hadal.comm.expert_comm import ExpertComm
from hadal.core.placement import spread, without
from hadal.core.plans import NO_LINK_BYTES, ByNode, LinkBytes
from tests.unit.comm.queues import QueueGroup, in_threads, queue_groups
from tests.unit.comm.test_expert_comm import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    MODES,
    TOKENS,
    TOP_K,
    cuts,
    scene,
)

RANKS, NODE_RANKS = 6, 2
NUM_STEPS = 2


def comm_of(group: QueueGroup | None, mode: str, near: range | None) -> ExpertComm:
    return ExpertComm(
        group,
        hidden_size=HIDDEN,
        top_k=TOP_K,
        dispatch_format="fp8",
        mode=mode,
        max_tokens=TOKENS,
        near=near,
    )


def sent(groups: dict[int, QueueGroup], exchanges: slice) -> ByNode:
    """Return the bytes sent over the queues, within nodes and between them."""
    both = [0, 0]
    for rank, group in groups.items():
        for exchange in group.sent_to[exchanges]:
            for peer, size in exchange.items():
                both[rank // NODE_RANKS != peer // NODE_RANKS] += size
    return both[0], both[1]


@pytest.mark.parametrize("lost", [(), (1, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_every_byte_is_counted_once(mode: str, lost: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    tokens = scene(3)
    placement = spread(LAYERS, EXPERTS, RANKS, 2)
    placement = without(placement, lost) if lost else placement
    members = [rank for rank in range(RANKS) if rank not in lost]
    groups = queue_groups(members)
    shares = dict(zip(members, cuts(len(members), 3), strict=True))

    def work(rank: int) -> list[LinkBytes]:
        first = rank - rank % NODE_RANKS
        comm = comm_of(groups[rank], mode, range(first, first + NODE_RANKS))
        comm.install(placement)
        own, counted = shares[rank], []
        for _ in range(NUM_STEPS):
            for layer in range(LAYERS):
                handle = comm.dispatch(tokens.x_TD[own], tokens.ids_TK[own], layer)
                received = handle.finish_dispatch()
                handle.start_combine(received.x_ND[received.row_M])
                handle.finish_combine(tokens.weights_TK[own])
            counted.append(comm.take_link_bytes())
        assert comm.take_link_bytes() == NO_LINK_BYTES
        return counted

    counted = in_threads(work, members)
    whole = NO_LINK_BYTES
    for steps in counted.values():
        assert steps[0] == steps[1], "a step counts what it sent, not what was sent before"
        for step in steps:
            whole = whole.plus(step)
    assert whole.dispatch == sent(groups, slice(0, None, 2))
    assert whole.combine == sent(groups, slice(1, None, 2))
    assert min(*whole.dispatch, *whole.combine) > 0


def test_ranks_of_one_node_send_nothing_beyond_it_and_one_alone_nothing() -> None:
    def work(rank: int) -> LinkBytes:
        comm = comm_of(groups[rank], "normal", None)
        comm.install(spread(1, EXPERTS, 2))
        handle = comm.dispatch(torch.zeros(1, HIDDEN), torch.arange(TOP_K)[None], 0)
        received = handle.finish_dispatch()
        handle.start_combine(received.x_ND[received.row_M])
        handle.finish_combine(torch.ones(1, TOP_K))
        return comm.take_link_bytes()

    groups = queue_groups([0, 1])
    for link_bytes in in_threads(work, [0, 1]).values():
        assert link_bytes.dispatch[0] > 0
        assert link_bytes.dispatch[1] == link_bytes.combine[1] == 0
    alone = comm_of(None, "normal", None)
    alone.install(spread(1, EXPERTS, 1))
    alone.dispatch(torch.zeros(1, HIDDEN), torch.arange(TOP_K)[None], 0)
    assert alone.take_link_bytes() == NO_LINK_BYTES
