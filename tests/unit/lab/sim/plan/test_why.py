"""Plans that were tried, and the sentence that says why one lost."""

from __future__ import annotations

import pytest

from hadal.lab.sim.plan.rows import dimension_rows, rejected_rows, what_if_rows, why
from tests.unit.lab.sim.plan.test_plan import best, priced


def test_every_dimension_has_its_next_best_and_none_is_cheaper() -> None:
    found = priced()
    plan = found.ranked()[0]
    rows = list(dimension_rows(plan, found))
    names = [row.dimension for row in rows if row.plan is not None]
    assert names[:3] == ["decode width", "decode redundancy", "prefill width"]
    for row in rows:
        assert row.why
        if row.plan is not None:
            assert row.cost_usd is not None
            assert row.cost_usd >= plan.cost_usd
    widths = [row for row in rows if row.dimension == "decode width" and row.plan is not None]
    assert widths[0].plan is not None
    assert widths[0].plan.decode_unit.model.num_ranks != plan.decode_unit.model.num_ranks


def test_a_sentence_says_how_much_and_what_of() -> None:
    found = priced()
    plans = found.ranked()
    other = next(plan for plan in plans if plan.decode_unit.model.num_ranks == 32)
    text = why(other, plans[0])
    assert text.startswith(f"{other.cost_usd / plans[0].cost_usd - 1:+.1%}: ")
    assert f"runs {other.decode_unit.batch} requests per GPU" in text
    assert f"instead of {plans[0].decode_unit.batch}" in text
    narrow = next(plan for plan in plans if plan.decode_unit.model.num_ranks == 16)
    assert "limited by memory" in why(narrow, plans[0])
    dear = best(hardware="h100", usd=2.35)
    assert "$2.35 instead of $2 per GPU-hour" in why(dear, plans[0])
    assert why(plans[0], plans[0]).startswith("costs the same")


def test_what_cannot_be_is_there_once_for_each_width() -> None:
    rows = list(rejected_rows(priced().rejected))
    assert len({(row.dimension, row.value.split("+")[0]) for row in rows}) == len(rows)
    assert any("does not fit: weights take 101 GB of 80 GB" in row.why for row in rows)


def test_what_could_not_be_chosen() -> None:
    found = priced(hardware="gb200", usd=2.21)
    plan = found.ranked()[0]
    rows = {(row.dimension, row.value): row for row in what_if_rows(plan, found)}
    costs = {name: row.cost_usd for (name, value), row in rows.items() if "bundles" not in value}
    assert costs["fleet"] == pytest.approx(max(cost for cost in costs.values() if cost is not None))
    assert costs["MTP"] is not None
    assert costs["experts"] is not None
    assert max(costs["MTP"], costs["experts"]) < plan.cost_usd < (costs["fleet"] or 0.0)
    drafted = priced(mtp_tokens=(1,))
    assert not any(row.dimension == "MTP" for row in what_if_rows(drafted.ranked()[0], drafted))
