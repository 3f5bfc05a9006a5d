"""Test UnitReporter: it reports changes and due heartbeats, and wakes neither late nor twice."""

from __future__ import annotations

from hadal.core.messages.units import UnitReport
from hadal.core.seams import WakeAt
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit.report import ReportBuilder, UnitIdentity
from hadal.roles.unit.reporter import UnitReporter
from tests.unit.roles.driving import of, sent


def reporter() -> UnitReporter:
    return reporter_of(RankPools(5))[0]


def reporter_of(pools: RankPools) -> tuple[UnitReporter, ReportBuilder]:
    identity = UnitIdentity("decode-0", "decode", "e")
    report = ReportBuilder(identity, pools, 4)
    return UnitReporter(identity, pools, report, 0.5), report


def test_load_is_sent_when_it_changed_and_as_a_beat() -> None:
    unit = reporter()
    assert len(sent(unit.heartbeat(0.0, 0, 0, None), UnitReport)) == 1
    assert unit.heartbeat(0.1, 0, 0, None) == []
    assert sent(unit.heartbeat(0.2, 1, 9, None), UnitReport)[0].num_tokens_waiting == 9
    assert sent(unit.heartbeat(0.6, 1, 9, None), UnitReport) == []
    assert len(sent(unit.heartbeat(0.7, 1, 9, None), UnitReport)) == 1


def test_it_is_woken_for_whatever_comes_first() -> None:
    unit = reporter()
    assert of(unit.heartbeat(0.0, 0, 0, 0.3), WakeAt) == [WakeAt(0.3)]
    assert of(unit.heartbeat(0.1, 0, 0, 0.3), WakeAt) == []
    assert of(unit.heartbeat(0.1, 0, 0, 0.2), WakeAt) == [WakeAt(0.2)]
    assert of(unit.heartbeat(0.2, 0, 0, None), WakeAt) == [WakeAt(0.5)]


def test_load_says_what_the_leader_keeps_of_balance_and_rates() -> None:
    unit, report = reporter_of(RankPools(5))
    report.balanced({"kv": 0.5})
    report.measured(1e-3, 1e-6, step_s=0.0)
    (load,) = sent(unit.heartbeat(0.0, 0, 0, None), UnitReport)
    report.balanced({"kv": 0.75})  # A message must never change after it was sent.
    assert (load.balance, load.token_s, load.pair_s) == ({"kv": 0.5}, 1e-3, 1e-6)


def test_load_says_for_how_long_there_was_nothing_to_do() -> None:
    unit = reporter()
    times = ((0.0, 0, 0), (5.0, 0, 0), (9.0, 1, 0), (30.0, 0, 7), (31.0, 0, 0), (61.0, 0, 0))
    said = [
        sent(unit.heartbeat(now_s, *work, None), UnitReport)[0].idle_s for now_s, *work in times
    ]
    assert said == [0.0, 5.0, 0.0, 0.0, 1.0, 31.0]
