"""The report: the published day follows from its own totals, and each figure from its definition.

Source of the figures: DeepSeek-V3/R1 inference system overview, 2025-02-27 12:00 to 02-28 12:00 in
Beijing.
"""

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest

from hadal.core.facts import NodesFact, micros
from hadal.stats.prices import (
    BUCKET_US,
    H800_HOUR_MICRO_USD,
    HOUR_S,
    R1,
    ModelPrices,
    rent_pico_usd,
    to_micro_usd,
)
from hadal.stats.report import BY, Report, report, use_of
from hadal.stats.tally import Counts, Key, Tally

from .facts import START_S, random_facts

FROM_US = int(START_S * 1e6)
DAY_US = 86_400 * 10**6
TO_US = FROM_US + DAY_US
BEIJING_S = 8 * HOUR_S
HIT, MISS, OUT = 342 * 10**9, 266 * 10**9, 168 * 10**9
KV_LENGTH = 4_989


def nodes(
    unit: str, role: str, number: int, from_h: float = 0.0, to_h: float = 24.0, model: str = ""
) -> NodesFact:
    return NodesFact(
        unit,
        "e",
        role,
        number * 8,
        8,
        START_S + from_h * HOUR_S,
        START_S + to_h * HOUR_S,
        "H800",
        H800_HOUR_MICRO_USD,
        model,
    )


def published_day() -> Report:
    """Return a report of the published totals, spread evenly over the day. The average number of
    nodes is the published one.

    The two published throughputs and the sum of 226.75 imply 131.25 decode and 95.5 prefill nodes.
    """
    tally = Tally()
    for quarter in range(96):
        share = [total // 96 + (quarter < total % 96) for total in (HIT, MISS, OUT)]
        tally.add_counts(
            Key(FROM_US // BUCKET_US + quarter, "r1", "all"),
            Counts(
                num_requests=1,
                num_finished=1,
                tokens_hit=share[0],
                tokens_miss=share[1],
                tokens_out=share[2],
                kv_tokens=KV_LENGTH * share[2],
                tokens_after_first=share[2],
                stream_us=share[2] * 10**6 // 21,
            ),
        )
    # Decode: seven units all day and an eighth for seven hours. Prefill: 90 nodes all day and 44 for
    # three hours. The peak is 278 nodes.
    units = [nodes(f"decode-{i}", "decode", 18) for i in range(7)]
    units += [nodes("decode-7", "decode", 18, 8, 15), nodes("prefill-all", "prefill", 90)]
    units += [nodes("prefill-day", "prefill", 44, 8, 11)]
    return report(
        tally.priced(ModelPrices(R1.flat())), units, FROM_US, TO_US, utc_offset_s=BEIJING_S
    )


def test_the_published_cost_is_an_identity() -> None:
    """Check that 226.75 nodes of 8 GPUs for 24 hours at $2 per GPU hour cost $87,072."""
    node_us = Fraction(226.75) * DAY_US
    assert to_micro_usd(rent_pico_usd(int(node_us * 8), H800_HOUR_MICRO_USD)) == 87_072 * 10**6
    assert 226.75 * 8 * 24 * 2 == 87_072
    total = published_day().total
    assert total.nodes.mean == 226.75
    assert total.cost_micro_usd == 87_072 * 10**6


def test_the_published_throughputs_are_day_totals_over_nodes_of_a_role() -> None:
    total = published_day().total
    assert total.nodes.hours("prefill") == 95.5 * 24
    assert total.nodes.hours("decode") == 131.25 * 24
    assert total.prefill_tokens_per_s_node == pytest.approx(73_686, abs=0.5)
    assert total.decode_tokens_per_s_node == pytest.approx(14_815, abs=0.5)


def test_the_published_tokens_at_the_prices_of_r1() -> None:
    total = published_day().total
    assert to_micro_usd(R1.standard.charge(HIT, 0, 0)) == 47_880 * 10**6
    assert to_micro_usd(R1.standard.charge(0, MISS, 0)) == 146_300 * 10**6
    assert to_micro_usd(R1.standard.charge(0, 0, OUT)) == 367_920 * 10**6
    assert total.income_micro_usd == 562_100 * 10**6
    assert total.counts.tokens_in == 608 * 10**9
    assert total.hit_percent == 56.25
    assert total.kv_length_mean == KV_LENGTH
    assert total.tokens_per_s_user == pytest.approx(21)


def test_the_published_income_lies_within_the_rounding_of_the_published_tokens() -> None:
    """Check the published $562,027 against intervals. Totals were published in whole billions, so
    each is known to half a billion only. The income lies in the interval that they allow, and in
    the part that a hit share of 56.3 % leaves.
    """
    half = 5 * 10**8
    incomes, near = [], []
    for d_in, d_hit, d_out in itertools.product(range(-10, 11), repeat=3):
        tokens_in = 608 * 10**9 + half * d_in // 10
        hit = HIT + half * d_hit // 10
        out = OUT + half * d_out // 10
        income = to_micro_usd(R1.standard.charge(hit, tokens_in - hit, out))
        incomes.append(income)
        if 0.5625 <= hit / tokens_in < 0.5635:
            near.append(income)
    assert (min(incomes), max(incomes)) == (560_525 * 10**6, 563_675 * 10**6)
    assert min(near) < 562_027 * 10**6 < max(near)


def test_the_published_margin() -> None:
    assert round((562_027 - 87_072) / 87_072 * 100) == 545
    assert published_day().total.margin_percent == pytest.approx(545.55, abs=0.01)


def test_the_hours_are_those_of_the_clock_asked_for() -> None:
    made = published_day()
    assert [line.label[11:16] for line in made.lines][:2] == ["12:00", "13:00"]
    assert len(made.lines) == 24
    assert made.lines[0].start_s == START_S
    assert sum(line.counts.tokens_out for line in made.lines) == OUT
    assert sum(line.cost_micro_usd for line in made.lines) == 87_072 * 10**6
    assert (
        max(float(line.nodes.peak) for line in made.lines) == float(made.total.nodes.peak) == 278.0
    )
    assert made.lines[8].nodes.mean == 278.0
    in_utc = report(Tally(), [], FROM_US, TO_US)
    assert in_utc.lines[0].label == "2025-02-27T04:00:00+00:00"


@pytest.mark.parametrize("by", BY)
def test_lines_add_up_to_the_total(by: str) -> None:
    tally = Tally()
    tally.add_facts(random_facts(3, 400))
    units = [
        nodes("d", "decode", 18, 3.3, 9.1, "m0"),
        nodes("p", "prefill", 4, 2.7, 20.9, "m1"),
        nodes("s", "decode", 1),
    ]
    made = report(tally, units, FROM_US, TO_US, by=by, utc_offset_s=5 * HOUR_S + 1800)
    for name in Counts.__slots__:
        found = sum(getattr(line.counts, name) for line in made.lines)
        assert found == getattr(made.total.counts, name)
    if by != "tenant":
        cost = sum((line.nodes.cost_pico_usd for line in made.lines), Fraction(0))
        assert cost == made.total.nodes.cost_pico_usd
    names = {
        "hour": 25,
        "model": ["(shared)", "m0", "m1", "m2"],
        "tenant": ["t0", "t1", "t2", "t3"],
    }[by]
    found = len(made.lines) if isinstance(names, int) else [line.label for line in made.lines]
    assert found == names


@pytest.mark.parametrize("offset_s", [0, 20_700])
def test_hours_have_the_nodes_that_lie_in_them(offset_s: int) -> None:
    """Sum the hours: node time and cost equal the total's, wherever nodes begin and end."""
    rng = np.random.default_rng(3)
    starts = START_S + rng.integers(-9000, 90_000, 60)
    nodes = [
        NodesFact(f"u{at}", "e", "decode", 3, 8, float(start), float(start + length), "", 2_000_000)
        for at, (start, length) in enumerate(zip(starts, rng.integers(0, 20_000, 60), strict=True))
    ]
    window = micros(START_S + 100.0), micros(START_S + 80_000.5)
    made = report(Tally(), nodes, *window, utc_offset_s=offset_s)
    assert (
        sum(line.nodes.cost_pico_usd for line in made.lines) == made.total.nodes.cost_pico_usd > 0
    )
    for line in made.lines:
        assert line.start_s is not None
        first = max(window[0], line.start_s * 10**6)
        last = min(window[1], (line.start_s + 3600) * 10**6)
        assert line.nodes == use_of(nodes, first, last)


def test_a_window_cuts_hours_and_nodes() -> None:
    first_us = FROM_US + 30 * 60 * 10**6
    made = report(
        Tally(),
        [nodes("d", "decode", 18, 0, 24)],
        first_us,
        first_us + 3600 * 10**6,
        utc_offset_s=BEIJING_S,
    )
    assert [line.nodes.window_us for line in made.lines] == [1800 * 10**6] * 2
    assert [line.nodes.mean for line in made.lines] == [18.0, 18.0]
    assert made.total.cost_micro_usd == 18 * 8 * 2 * 10**6


def test_a_part_of_a_node_is_a_part() -> None:
    use = use_of(
        [NodesFact("d", "e", "decode", 2, 8, START_S, START_S + 3600, "cpu", 2_000_000)],
        FROM_US,
        TO_US,
    )
    assert use.peak == Fraction(1, 4)
    assert use.hours("decode") == 0.25
    assert use.cost_pico_usd == 4 * 10**12, "two ranks for an hour at $2"


def test_the_peak_is_of_one_instant() -> None:
    one = nodes("a", "decode", 18, 0, 2)
    other = nodes("b", "decode", 18, 2, 4)
    both = nodes("c", "prefill", 4, 1, 3)
    assert use_of([one, other, both], FROM_US, TO_US).peak == 22
    assert use_of([other, both, one], FROM_US, FROM_US + 3600 * 10**6).peak == 18
    assert use_of([], FROM_US, TO_US).peak == 0


def test_what_cannot_be_said_is_not_said() -> None:
    total = report(Tally(), [], FROM_US, TO_US).total
    assert (total.hit_percent, total.tokens_per_s_user, total.kv_length_mean) == (None, None, None)
    found = (total.prefill_tokens_per_s_node, total.decode_tokens_per_s_node, total.margin_percent)
    assert found == (None, None, None)
    assert total.cost_micro_usd == total.income_micro_usd == 0


def test_json_is_flat_and_can_be_written() -> None:
    fields = json.loads(json.dumps(published_day().as_json()))
    assert fields["nodes_mean"] == 226.75
    assert fields["nodes_peak"] == 278.0
    assert fields["tokens_in"] == 608 * 10**9
    assert fields["cost_usd"] == 87_072.0
    assert fields["income_micro_usd"] == 562_100 * 10**6
    assert fields["from"] == "2025-02-27T12:00:00+08:00"
    assert fields["hours"][0]["hour"] == "2025-02-27T12:00:00+08:00"
    assert len(fields["hours"]) == 24


def test_what_makes_no_report_is_refused() -> None:
    with pytest.raises(ValueError, match="must end after it begins"):
        report(Tally(), [], FROM_US, FROM_US)
    with pytest.raises(ValueError, match="by hour, model, tenant"):
        report(Tally(), [], FROM_US, TO_US, by="day")
    with pytest.raises(ValueError, match="quarter hour"):
        report(Tally(), [], FROM_US, TO_US, utc_offset_s=100)
