"""Counters are equal whether facts are added one by one, in columns, or merged from elsewhere."""

import numpy as np
import pytest

from hadal.core.facts import CANCELLED, RequestFact, micros
from hadal.stats.prices import BUCKET_US, R1, V3, ModelPrices
from hadal.stats.tally import COUNTERS, Columns, Counts, Key, Tally, counts_of

from .facts import random_facts


def fact(end: str = "stop", tokens_out: int = 3, **more: object) -> RequestFact:
    first, last = (1.0, 2.5) if tokens_out else (None, None)
    fields = {"tokens_hit": 4, "tokens_miss": 5, **more}
    return RequestFact(
        "r",
        "t",
        "m",
        tokens_out=tokens_out,
        kv_tokens=9,
        end=end,
        received_s=0.5,
        completed_s=3.0,
        first_token_s=first,
        last_token_s=last,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("end", "tokens_out", "counted"),
    [
        ("stop", 3, "num_finished"),
        ("length", 3, "num_finished"),
        (CANCELLED, 3, "num_cancelled"),
        (CANCELLED, 0, "num_cancelled"),
        ("504", 0, "num_failed"),
        ("500", 2, "num_failed"),
        ("400", 0, "num_failed"),
    ],
)
def test_every_request_ends_in_one_way(end: str, tokens_out: int, counted: str) -> None:
    counts = counts_of(fact(end, tokens_out))
    ends = ("num_finished", "num_cancelled", "num_refused", "num_failed")
    found = {name: getattr(counts, name) for name in ends}
    assert found == {name: int(name == counted) for name in ends}


def test_refused_is_what_no_token_was_spent_on() -> None:
    assert counts_of(fact("503", 0, tokens_hit=0, tokens_miss=0)).num_refused == 1
    given_up = counts_of(fact("503", 2))
    assert (given_up.num_refused, given_up.num_failed) == (0, 1)


def test_what_a_unit_had_and_gave_up_failed_though_its_status_is_that_of_a_refusal() -> None:
    """Count a request that was retried before its first token until no unit could take it."""
    given_up = counts_of(
        fact("503", 0, tokens_hit=0, tokens_miss=0, prefill_unit="prefill-0", num_retries=3)
    )
    assert (given_up.num_refused, given_up.num_failed) == (0, 1)


def test_time_per_token_counts_from_the_first() -> None:
    counts = counts_of(fact(tokens_out=3))
    assert (counts.tokens_after_first, counts.stream_us) == (2, 1_500_000)
    counts = counts_of(fact(tokens_out=0))
    assert (counts.tokens_after_first, counts.stream_us) == (0, 0)


def test_order_and_grouping_change_nothing() -> None:
    facts = random_facts(1, 500)
    whole, left, right = Tally(), Tally(), Tally()
    whole.add_facts(facts)
    left.add_facts(facts[300:])
    right.add_facts(reversed(facts[:300]))
    left.merge(right)
    assert left == whole
    assert sum(counts.tokens_out for _, counts in whole) == sum(fact.tokens_out for fact in facts)
    found = sum(counts.income_pico_usd for _, counts in whole)
    assert found == sum(fact.income_pico_usd for fact in facts)


def test_merging_shares_nothing() -> None:
    one, other = Tally(), Tally()
    one.add_counts(Key(1, "m", "t"), Counts(num_requests=1))
    other.merge(one)
    other.add_counts(Key(1, "m", "t"), Counts(num_requests=1))
    assert one.key_to_counts[Key(1, "m", "t")].num_requests == 1


def columns_of(facts: list[RequestFact]) -> Columns:
    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    models, tenants = sorted({one.model for one in facts}), sorted({one.tenant for one in facts})
    return Columns(
        ints([micros(one.completed_s) for one in facts]),
        ints([micros(one.first_token_s or 0) for one in facts]),
        ints([micros(one.last_token_s or 0) for one in facts]),
        ints([one.tokens_hit for one in facts]),
        ints([one.tokens_miss for one in facts]),
        ints([one.tokens_out for one in facts]),
        ints([one.kv_tokens for one in facts]),
        ints([models.index(one.model) for one in facts]),
        ints([tenants.index(one.tenant) for one in facts]),
        models,
        tenants,
    )


def test_columns_are_the_facts() -> None:
    """Columns charged afterwards give the tally of facts charged one by one, over a day with both tiers."""
    facts = [
        one
        for one in random_facts(2, 3000)
        if one.end in ("stop", "length") and one.tokens_out and not one.num_retries
    ]
    assert len(facts) > 200
    one_by_one, at_once = Tally(), Tally()
    one_by_one.add_facts(facts)
    at_once.add_columns(columns_of(facts[:100]))
    at_once.add_columns(columns_of(facts[100:]))
    assert sum(counts.income_pico_usd for _, counts in at_once) == 0
    assert at_once.priced(ModelPrices(R1)) == one_by_one


def test_columns_lose_no_token_beyond_a_float() -> None:
    big = 2**60 + 1
    one = np.array([1], dtype=np.int64)
    tally = Tally()
    tally.add_columns(Columns(one, one, one, one * big, one, one, one * big, one * 0, one * 0))
    assert next(iter(tally))[1].kv_tokens == big


def test_columns_that_do_not_fit_together_are_refused() -> None:
    one, two = np.ones(1, dtype=np.int64), np.ones(2, dtype=np.int64)
    with pytest.raises(ValueError, match="equal lengths"):
        Columns(one, one, one, two, one, one, one, one, one)
    with pytest.raises(ValueError, match="int64"):
        Columns(one, one, one, one.astype(np.float64), one, one, one, one, one)


def test_no_columns_are_nothing() -> None:
    none = np.zeros(0, dtype=np.int64)
    tally = Tally()
    tally.add_columns(Columns(*[none] * 9))
    assert list(tally) == []


def test_pricing_makes_a_copy_by_model_and_time() -> None:
    tally = Tally()
    noon, night = 12 * 4, 17 * 4
    for bucket, model in ((noon, "chat"), (night, "chat"), (noon, "r1"), (night, "r1")):
        tally.add_counts(
            Key(bucket, model, "t"),
            Counts(tokens_hit=1, tokens_miss=1, tokens_out=1, income_pico_usd=7),
        )
    priced = tally.priced(ModelPrices(R1, {"chat": V3}))
    assert {(key.bucket, key.model): counts.income_pico_usd for key, counts in priced} == {
        (noon, "chat"): 1_440_000,
        (night, "chat"): 720_000,
        (noon, "r1"): 2_880_000,
        (night, "r1"): 720_000,
    }
    assert {counts.income_pico_usd for _, counts in tally} == {7}


def test_a_key_is_a_quarter_hour() -> None:
    tally = Tally()
    tally.add(fact())
    assert next(iter(tally))[0] == Key(micros(3.0) // BUCKET_US, "m", "t")
    assert set(COUNTERS) == {one for one in dir(Counts()) if one in Counts.__slots__}


def test_a_sample_stands_for_all() -> None:
    """Multiply every counter; the sample itself stays unchanged."""
    tally = Tally()
    tally.add_facts(random_facts(50, 7))
    before = {
        key: Counts(**{name: getattr(counts, name) for name in COUNTERS}) for key, counts in tally
    }
    added = Tally()
    for _ in range(3):
        added.merge(tally)
    assert tally.times(3) == added
    assert dict(tally) == before
    model_prices = ModelPrices(R1)
    # Charged before or after, the money is the same.
    assert tally.times(7).priced(model_prices) == tally.priced(model_prices).times(7)
