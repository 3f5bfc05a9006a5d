"""The text that Prometheus scrapes."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hadal.core.balance import OBJECTIVES
from hadal.core.cache import CACHE_LEVELS, CACHE_TOTALS, STORED_BLOCKS
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.snapshot import FrontSnapshot, Totals
from hadal.core.messages.units import UnitReport
from hadal.core.plans import LinkBytes
from hadal.gateway.api.reply import Usage
from hadal.gateway.desk.metrics import Metrics
from hadal.runtime.ledger.writer import LedgerCounts


def scraped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return (name, label values in the order of the labels' names) -> value."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def idle(unit: str, **fields: Any) -> UnitReport:
    """Return the report of a unit without requests."""
    return UnitReport(unit, "e", 100, 0, 0, 8, 0, **fields)


def scraped_units(*loads: UnitReport) -> dict[tuple[str, ...], float]:
    snapshot = FrontSnapshot(False, {}, {load.unit: load for load in loads}, {}, Totals())
    return scraped(Metrics(lambda: snapshot))


def test_refused_connections_by_process_and_kind() -> None:
    snapshot = FrontSnapshot(False, {}, {}, {}, Totals())
    process_to_refused: dict[str, dict[str, int]] = {}
    metrics = Metrics(lambda: snapshot, refused=process_to_refused)
    process_to_refused["decode-0.1"] = {"kv": 3, "mesh": 4}
    samples = scraped(metrics)
    assert samples["hadal_refused_connections_total", "kv", "decode-0.1"] == 3
    assert samples["hadal_refused_connections_total", "mesh", "decode-0.1"] == 4


def test_a_unit_that_rests_shows_nothing_of_steps_that_are_long_over() -> None:
    load = UnitReport("decode-0", "e", 100, 0, 0, 8, 0, 77, 2.5, 0.25, balance={"kv": 0.5})
    of_steps = {
        ("hadal_step_ms", "decode-0"),
        ("hadal_overhead_ms", "decode-0"),
        ("hadal_balance", "kv", "decode-0"),
    }
    assert of_steps <= scraped_units(load).keys()
    rested = scraped_units(msgspec.structs.replace(load, idle_s=60.0))
    assert not of_steps & rested.keys()
    assert rested["hadal_steps_total", "decode-0"] == 77
    assert rested["hadal_kv_blocks", "decode-0"] == 100


def test_every_number_of_the_front_and_the_units() -> None:
    load = UnitReport("decode-0", "e", 100, 40, 3, 8, 0, 77, 2.5, 0.25)
    totals = Totals(
        submitted=9,
        finished=5,
        cancelled=1,
        failed=2,
        refused=1,
        tokens_in=50,
        retries=4,
        preemptions=3,
        requeued=2,
    )
    snapshot = FrontSnapshot(
        True,
        {"queued": 6, "decoding": 3},
        {"decode-0": load},
        {"prefill": {"prefill-0": 1, "prefill-1": 1}, "decode": {"decode-0": 1}},
        totals,
    )
    metrics = Metrics(lambda: snapshot, missing=lambda seen: ("decode-1", "decode-0.2"))
    metrics.requests.labels("chat", "200").inc(2)
    metrics.first_token_s.observe(0.3)
    samples = scraped(metrics)
    expected = {
        ("hadal_requests_total", "chat", "200"): 2,
        ("hadal_time_to_first_token_seconds_count",): 1,
        ("hadal_prompt_tokens_total",): 50,
        ("hadal_retries_total",): 4,
        ("hadal_preemptions_total",): 3,
        ("hadal_gave_way_total",): 2,
        ("hadal_generations_total", "finished"): 5,
        ("hadal_generations_total", "refused"): 1,
        ("hadal_generations_now", "queued"): 6,
        ("hadal_draining",): 1,
        ("hadal_units_up", "prefill"): 2,
        ("hadal_units_up", "decode"): 1,
        ("hadal_missing", "prefill"): 0,
        ("hadal_missing", "decode"): 2,
        ("hadal_kv_blocks", "decode-0"): 100,
        ("hadal_kv_blocks_used", "decode-0"): 40,
        ("hadal_steps_total", "decode-0"): 77,
        ("hadal_step_ms", "decode-0"): 2.5,
        ("hadal_overhead_ms", "decode-0"): 0.25,
    }
    assert {name: samples.get(name) for name in expected} == expected


@pytest.mark.promise(
    "Every objective is a gauge, mean over maximum of the ranks (core/balance), and "
    "is part of every traced step."
)
def test_what_the_balancers_did() -> None:
    decode = idle(
        "decode-0",
        balance={"kv": 0.97, "requests": 1, "experts": 0.88, "experts_worst": 0.8},
        num_replicas_moved=12,
        num_layers_flipped=3,
        num_requests_moved=2,
    )
    prefill = idle("prefill-0", balance=dict.fromkeys(OBJECTIVES, 0.5), num_replicas_moved=1)
    samples = scraped_units(decode, prefill)
    assert {name[1:]: value for name, value in samples.items() if name[0] == "hadal_balance"} == {
        ("kv", "decode-0"): 0.97,
        ("requests", "decode-0"): 1.0,
        ("experts", "decode-0"): 0.88,
        ("experts_worst", "decode-0"): 0.8,
        **{(objective, "prefill-0"): 0.5 for objective in OBJECTIVES},
    }
    names = (
        "hadal_replicas_moved_total",
        "hadal_layers_flipped_total",
        "hadal_requests_moved_total",
    )
    assert [samples[name, "decode-0"] for name in names] == [12, 3, 2]
    assert [samples[name, "prefill-0"] for name in names] == [1, 0, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.5", [0.5]])
def test_what_is_no_number_is_left_out(value: object) -> None:
    """A unit's wrong value hides neither its other numbers nor those of other units."""
    odd = idle("decode-0", balance={"kv": value, "requests": 0.9})
    samples = scraped_units(odd, idle("decode-1"))
    assert [name[1:] for name in samples if name[0] == "hadal_balance"] == [
        ("requests", "decode-0")
    ]
    assert samples["hadal_kv_blocks", "decode-1"] == 100


def test_names_of_nobody_make_no_series() -> None:
    samples = scraped_units(idle("decode-0", balance={"luck": 0.5, 'k"v\n': 0.5, "time": 0.5}))
    assert [name[1:] for name in samples if name[0] == "hadal_balance"] == [("time", "decode-0")]


def test_a_load_of_before_there_was_balance() -> None:
    """Fields that an older unit does not send have default values."""
    short = msgspec.msgpack.encode(("UnitReport", "decode-0", "e", 100, 40, 3, 8, 0))
    load = msgspec.msgpack.decode(short, type=AnyMessage)
    assert isinstance(load, UnitReport)
    samples = scraped_units(load)
    assert samples["hadal_layers_flipped_total", "decode-0"] == 0
    assert not [name for name in samples if name[0] == "hadal_balance"]


def test_what_the_caches_did() -> None:
    prefill = idle("prefill-0", cache={name: n for n, name in enumerate(CACHE_TOTALS, 1)})
    counted = {STORED_BLOCKS: 7, **dict.fromkeys(CACHE_LEVELS, 3), "x": 1}
    samples = scraped_units(prefill, idle("decode-0", cache=counted), idle("decode-1"))
    assert {
        name: value for name, value in samples.items() if name[0].startswith("hadal_cache")
    } == {
        ("hadal_cache_hit_tokens_total", "memory", "prefill-0"): 1,
        ("hadal_cache_hit_tokens_total", "disk", "prefill-0"): 2,
        ("hadal_cache_miss_tokens_total", "prefill-0"): 3,
        ("hadal_cache_recomputed_tokens_total", "prefill-0"): 4,
        ("hadal_cache_stored_blocks_total", "prefill-0"): 5,
        ("hadal_cache_stored_blocks_total", "decode-0"): 7,
        ("hadal_cache_skipped_blocks_total", "prefill-0"): 6,
        ("hadal_cache_damaged_blocks_total", "prefill-0"): 7,
        ("hadal_cache_evicted_blocks_total", "memory", "prefill-0"): 8,
        ("hadal_cache_evicted_blocks_total", "disk", "prefill-0"): 9,
        ("hadal_cache_blocks", "memory", "decode-0"): 3,
        ("hadal_cache_blocks", "disk", "decode-0"): 3,
    }, "every name in core/cache has a series, and what a unit does not count has none"


def test_prompts_by_what_was_reused() -> None:
    snapshot = FrontSnapshot(False, {}, {}, {}, Totals(tokens_hit=640, tokens_miss=100))
    metrics = Metrics(lambda: snapshot)
    metrics.count_usage(Usage(200, 5, 0, 128))
    metrics.count_usage(Usage(30, 5, 0))
    samples = scraped(metrics)
    assert {
        name: value for name, value in samples.items() if name[0].endswith("prompt_tokens_total")
    } == {
        ("hadal_answered_prompt_tokens_total", "hit"): 640,
        ("hadal_answered_prompt_tokens_total", "miss"): 100,
        ("hadal_usage_prompt_tokens_total", "hit"): 128,
        ("hadal_usage_prompt_tokens_total", "miss"): 102,
        ("hadal_prompt_tokens_total",): 0,
    }


def test_what_became_of_the_ledgers_facts() -> None:
    snapshot = FrontSnapshot(False, {}, {}, {}, Totals())
    counts = LedgerCounts(
        num_written=1,
        num_same=2,
        num_refused=3,
        num_delayed=4,
        num_lost=5,
        num_waiting=6,
        is_down=True,
    )
    samples = scraped(Metrics(lambda: snapshot, lambda: counts))
    assert {
        name[1:]: value for name, value in samples.items() if name[0] == "hadal_ledger_facts_total"
    } == {("written",): 1, ("same",): 2, ("refused",): 3, ("delayed",): 4, ("lost",): 5}
    assert (samples["hadal_ledger_waiting",], samples["hadal_ledger_down",]) == (6, 1)
    assert not any(
        name[0].startswith("hadal_ledger") for name in scraped(Metrics(lambda: snapshot))
    )


async def test_a_gateway_shows_what_another_has_counted() -> None:
    snapshot = FrontSnapshot(False, {}, {}, {}, Totals())
    other = Metrics(lambda: snapshot, lambda: LedgerCounts(num_written=3, is_down=True))
    _, body = await other.counted({})
    text = Metrics(lambda: snapshot).text({"gateway-1": body}).decode()
    assert 'hadal_ledger_down{gateway="gateway-1"} 1.0' in text
    assert 'hadal_ledger_facts_total{gateway="gateway-1",outcome="written"} 3.0' in text


def test_bytes_within_nodes_and_between_them() -> None:
    busy = idle("decode-0", link_bytes=LinkBytes((1, 2), (0, 4), (0, 0)))
    samples = scraped_units(busy, idle("prefill-0"))
    assert {
        name[1:]: value for name, value in samples.items() if name[0] == "hadal_link_bytes_total"
    } == {
        ("dispatch", "within", "decode-0"): 1,
        ("dispatch", "between", "decode-0"): 2,
        ("combine", "within", "decode-0"): 0,
        ("combine", "between", "decode-0"): 4,
    }
