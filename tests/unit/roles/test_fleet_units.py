"""Test the table of unit states, and the nodes that a unit owns in each."""

from __future__ import annotations

from itertools import product

import pytest

from hadal.core.errors import InvariantError
from hadal.roles.fleet.units import OWNS_NODES, WORKS, UnitMove, UnitState, UnitTable, next_state

S, M = UnitState, UnitMove
CAN = {
    (S.STOPPED, M.START): S.STARTING,
    (S.STARTING, M.READY): S.UP,
    (S.STARTING, M.STOP): S.STOPPING,
    (S.STARTING, M.END): S.STOPPED,
    (S.UP, M.DRAIN): S.DRAINING,
    (S.UP, M.END): S.STOPPED,
    (S.DRAINING, M.KEEP): S.UP,
    (S.DRAINING, M.STOP): S.STOPPING,
    (S.DRAINING, M.END): S.STOPPED,
    (S.STOPPING, M.END): S.STOPPED,
}


@pytest.mark.parametrize(("state", "move"), list(product(S, M)))
def test_the_table_says_what_can_happen_and_the_rest_raises(
    state: UnitState, move: UnitMove
) -> None:
    if (state, move) in CAN:
        assert next_state(state, move) is CAN[state, move]
        return
    with pytest.raises(InvariantError, match=f"a unit that is {state} cannot {move}"):
        next_state(state, move)


def test_nodes_are_owned_from_the_start_to_the_end() -> None:
    assert WORKS < OWNS_NODES == set(S) - {S.STOPPED}
    table = UnitTable({"prefill": 2, "decode": 1})
    assert list(table.by_name) == ["prefill-0", "prefill-1", "decode-0"]
    unit = table.by_name["prefill-1"]
    for move, num_owning, num_working in (
        (M.START, 1, 1),
        (M.READY, 1, 1),
        (M.DRAIN, 1, 0),
        (M.STOP, 1, 0),
        (M.END, 0, 0),
    ):
        table.move(unit, move, 3.0)
        found = (table.num_owning("prefill"), table.num_working("prefill"))
        assert found == (num_owning, num_working)
        assert table.num_owning("decode") == 0
        assert unit.since_s == 3.0
