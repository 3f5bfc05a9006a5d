"""Test DecodeTable: rows, growth, ends by token count, and what `check` detects."""

from __future__ import annotations

import numpy as np

from hadal.core.messages.units import Decode, KvLease
from hadal.roles.decode.table import DecodeTable, SlotState
from tests.unit.roles.driving import decode


def table_with(
    prompt: int = 10, *block_ids: int, max_tokens: int = 5, stop_ids: tuple[int, ...] = ()
) -> DecodeTable:
    table = DecodeTable(4, 8)
    request = decode(prompt=prompt, max_tokens=max_tokens, stop_ids=stop_ids)
    assert occupant(table, request, 0, block_ids or (7,)) == 0
    return table


def occupant(table: DecodeTable, request: Decode, arrival: int, block_ids: tuple[int, ...]) -> int:
    """Add a request that is pulling its KV; return its slot."""
    return table.reserve(request.generation, request.lease, arrival, block_ids)


def test_reserve_takes_the_first_free_slot() -> None:
    table = table_with()
    assert occupant(table, decode("b"), 1, (3,)) == 1
    table.vacate(0)
    assert occupant(table, decode("c"), 2, (4,)) == 0
    assert table.check() == []


def test_one_that_is_still_pulling_needs_nothing() -> None:
    assert table_with(64, 1).needing_block().size == 0


def test_check_sees_what_does_not_agree() -> None:
    for spoil in (
        lambda table: table.occupants.__setitem__(0, None),
        lambda table: table.length.__setitem__(0, 65),
        lambda table: table.output_index.__setitem__(0, 3),
        lambda table: table.state.__setitem__(0, SlotState.ACTIVE),
        lambda table: table.room.__setitem__(0, 128),
    ):
        table = table_with()
        assert table.check() == []
        spoil(table)
        assert table.check()
    assert np.count_nonzero(table.state) == 1


def test_a_row_goes_to_another_slot_with_all_that_its_request_needs() -> None:
    table = table_with(70, 7, 8, stop_ids=(3, 4))
    table.outputs[0] = [0, 5]
    table.state[0] = SlotState.MOVING
    table.tail[0, :3], table.is_named[0], table.names[0] = (9, 8, 7), True, b"n"
    table.length[0] += 1
    table.output_index[0] += 1
    table.last_token[0] = 5
    assert table.reserve_for(0, (1, 2), slice(2, 4)) == 2
    assert (table.state[2], table.blocks_of(2), table.check()) == (SlotState.RESERVED, (1, 2), [])
    table.length[0] += 1
    table.output_index[0] += 1
    lease = KvLease("p0", (7, 8), (0, 0), 72)
    table.go_on_at(0, 2, lease)
    table.vacate(0)
    found = (int(table.length[2]), int(table.output_index[2]), int(table.last_token[2]))
    assert found == (72, 3, 5)
    is_stop = table.stops.are_drawn(np.array([2, 2, 2]), np.array([3, 4, 5]))
    found = (is_stop.tolist(), table.outputs, table.is_as_pulled(2))
    assert found == ([True, True, False], {2: [0, 5]}, True)
    assert (table.state[2], table.occupant(2).lease, table.check()) == (SlotState.READY, lease, [])
    found = (table.tail[2, :3].tolist(), table.is_named[2], table.names[2])
    assert found == ([9, 8, 7], True, b"n")


def test_one_that_moves_is_neither_computed_nor_grown() -> None:
    table = table_with(64, 7)
    for state in (SlotState.MOVING, SlotState.RESERVED, SlotState.FILLING):
        table.state[0] = state
        assert table.needing_block().size == 0
        assert not table.advance(0).any()
        table.roll_back(np.zeros(4, np.int64))
        assert table.state[0] == state
