"""Tenants' shares of GPU time: sums equal the paid time, and each moment is shared by speed."""

from __future__ import annotations

from random import Random

import pytest

from hadal.core.facts import NodesFact
from hadal.stats.report import TENANT, report
from hadal.stats.tally import Tally
from hadal.stats.usage import TenantUse, WorkSpan, uses_of
from tests.fresh import fresh

HOUR_US = 3600 * 10**6


def node(unit: str, from_s: float, to_s: float, ranks: int = 2, model: str = "m") -> NodesFact:
    return NodesFact(unit, f"e{from_s}", "decode", ranks, 8, from_s, to_s, "H800", 2_000_000, model)


def span(tenant: str, from_us: int, to_us: int, tokens: int = 10, unit: str = "d") -> WorkSpan:
    return WorkSpan(unit, "m", tenant, from_us, to_us, tokens)


def test_what_one_uses_alone_is_its_own_and_the_rest_is_idle() -> None:
    uses, of_all = uses_of([node("d", 0, 3600)], [span("a", 0, HOUR_US // 4)], 0, HOUR_US)
    assert uses == {"a": of_all}
    assert of_all.as_json() == pytest.approx(
        {"gpu_hours_used": 0.5, "gpu_hours_idle": 1.5, "cost_used_usd": 1.0, "cost_idle_usd": 3.0}
    )


def test_two_at_once_share_by_speed_and_idle_by_use() -> None:
    spans = [span("a", 0, 1000, 30), span("b", 0, 1000, 10), span("b", 0, 1000, 5, unit="other")]
    uses, _ = uses_of([node("d", 0, 0.002, ranks=1)], spans, 0, 2000)
    assert uses["a"].used_rank_us == pytest.approx(750)
    assert uses["b"].used_rank_us == pytest.approx(250)
    assert (uses["a"].idle_rank_us, uses["b"].idle_rank_us) == pytest.approx((750, 250))


def test_time_is_cut_at_the_window_and_at_the_unit_s_life() -> None:
    nodes = [node("d", 0, 0.004, ranks=1), node("d", 0.006, 1.0, ranks=1)]
    uses, of_all = uses_of(nodes, [span("a", 0, 20_000)], 2000, 10_000)
    assert uses["a"].used_rank_us == of_all.used_rank_us == pytest.approx(6000)
    assert of_all.idle_rank_us == 0.0


def test_nobody_bears_what_was_idle_all_the_time() -> None:
    uses, of_all = uses_of([node("d", 0, 1)], [], 0, 10**6)
    assert (uses, of_all.idle_rank_us) == ({}, 2 * 10**6)
    assert uses_of([], [span("a", 0, 10)], 0, 10**6) == ({}, TenantUse())


def plain_shares(spans: list[WorkSpan], first: int, last: int) -> dict[str, float]:
    """Return tenant -> share in microseconds, computed for each microsecond by itself."""
    shares: dict[str, float] = {}
    for at in range(first, last):
        here = [one for one in spans if one.from_us <= at < one.to_us]
        speeds = [max(1, one.num_tokens) / (one.to_us - one.from_us) for one in here]
        for one, speed in zip(here, speeds, strict=True):
            shares[one.tenant] = shares.get(one.tenant, 0.0) + speed / sum(speeds)
    return shares


@pytest.mark.promise("Used and idle GPU-hours, and their cost, add up to what was paid for.")
def test_sums_are_what_was_paid_for_and_each_moment_s_share_is_right() -> None:
    random: Random = fresh()
    for _ in range(20):
        spans = []
        for _ in range(random.randint(1, 15)):
            begin = random.randint(0, 150)
            end = begin + random.choice([0, 1, random.randint(1, 90)])
            spans.append(span(random.choice("abc"), begin, end, random.choice([0, 1, 10**6])))
        first, last = random.randint(0, 60), random.randint(61, 240)
        fact = node("d", first / 1e6, last / 1e6, ranks=1, model=random.choice(["", "m"]))
        uses, of_all = uses_of([fact], spans, 0, 10**6)
        plain = {t: v for t, v in plain_shares(spans, first, last).items() if v}
        assert {tenant: use.used_rank_us for tenant, use in uses.items()} == pytest.approx(plain)
        assert of_all.used_rank_us + of_all.idle_rank_us == pytest.approx(last - first)
        if uses:
            idle = sum(use.idle_rank_us for use in uses.values())
            assert idle == pytest.approx(of_all.idle_rank_us, abs=1e-6)


def test_a_report_says_it_on_lines_of_tenants() -> None:
    made = report(
        Tally(), [node("d", 0, 3600)], 0, HOUR_US, by=TENANT, spans=[span("a", 0, HOUR_US)]
    )
    found = [(line.label, line.use and line.use.used_rank_us) for line in made.lines]
    assert found == [("a", pytest.approx(2 * HOUR_US))]
    assert made.as_json()["gpu_hours_used"] == pytest.approx(2.0)
    assert made.as_json()["tenants"][0]["cost_used_usd"] == pytest.approx(4.0)
    assert "gpu_hours_used" not in report(Tally(), [], 0, HOUR_US, by=TENANT).as_json()
