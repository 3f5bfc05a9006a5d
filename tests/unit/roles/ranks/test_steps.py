"""Test the merge of several ranks' results into one."""

from __future__ import annotations

from hadal.core.plans import Draw, LinkBytes, OpTime, StepDone, TraceEvent
from hadal.roles.ranks.steps import merge


def test_merging_keeps_the_slowest_time_of_each_op_and_names_ranks() -> None:
    event = TraceEvent(0, "compute", "gate", 0, 0, 0.0, 1.0)
    parts = {
        0: StepDone(
            1,
            (0,),
            (5,),
            {0: Draw(-1.0, ())},
            0.2,
            None,
            {},
            (OpTime("gate", 2, 0.1), OpTime("wait", 2, 0.3)),
        ),
        2: StepDone(
            1, (1,), (6,), {}, 0.3, None, {1: "not finite"}, (OpTime("gate", 2, 0.2),), (event,)
        ),
    }
    done = merge(1, (0, 8, 16), parts)
    assert (done.keys, done.tokens, done.elapsed_s) == ((0, 17), (5, 6), 0.3)
    assert (done.draws, done.failed) == ({0: Draw(-1.0, ())}, {17: "not finite"})
    assert done.op_times == (OpTime("gate", 2, 0.2), OpTime("wait", 2, 0.3))
    assert done.events[0].rank == 2


def test_rows_of_the_ranks_follow_one_another_and_keys_may_repeat() -> None:
    """Tokens of one slot need not be adjacent in a part, and some rows have no log-probabilities."""
    first, second, third = (Draw(-float(number), ()) for number in (1, 2, 3))
    parts = {
        1: StepDone(1, (0, 0, 1), (7, 8, 9), {1: third}, 0.1),
        0: StepDone(1, (2, 1, 2), (4, 5, 6), {0: first, 2: second}, 0.1, None, {1: "not finite"}),
    }
    done = merge(1, (0, 8), parts)
    assert (done.keys, done.tokens) == ((2, 1, 2, 8, 8, 9), (4, 5, 6, 7, 8, 9))
    assert done.draws == {0: first, 2: second, 4: third}
    assert done.failed == {1: "not finite"}


def test_bytes_of_the_ranks_add_up() -> None:
    parts = {
        rank: StepDone(1, (), (), {}, 0.1, link_bytes=LinkBytes((rank, 10), (20, 30 * rank)))
        for rank in (1, 2)
    }
    assert merge(1, (0, 8, 16), parts).link_bytes == LinkBytes((3, 20), (40, 90))
