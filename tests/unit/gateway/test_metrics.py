"""The text that Prometheus scrapes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from hadal.core.messages import Load
from hadal.gateway.metrics import Metrics
from hadal.roles.front_snapshot import FrontSnapshot, Totals


def test_every_number_of_the_front_and_the_units() -> None:
    load = Load("decode-0", "e", 100, 40, 3, 8, 0, 77, 2.5, 0.25)
    totals = Totals(
        submitted=9, finished=5, cancelled=1, failed=2, refused=1, tokens_in=50, tokens_out=60, retries=4, preemptions=3
    )
    snapshot = FrontSnapshot(
        True, {"queued": 6, "decoding": 3}, {"decode-0": load}, {"prefill": 2, "decode": 1}, totals
    )
    metrics = Metrics(lambda: snapshot)
    metrics.requests.labels("chat", "200").inc(2)
    metrics.first_token_s.observe(0.3)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }
    expected = {
        ("hadal_requests_total", "chat", "200"): 2,
        ("hadal_time_to_first_token_seconds_count",): 1,
        ("hadal_prompt_tokens_total",): 50,
        ("hadal_output_tokens_total",): 60,
        ("hadal_retries_total",): 4,
        ("hadal_preemptions_total",): 3,
        ("hadal_generations_total", "finished"): 5,
        ("hadal_generations_total", "refused"): 1,
        ("hadal_generations_now", "queued"): 6,
        ("hadal_draining",): 1,
        ("hadal_units_up", "prefill"): 2,
        ("hadal_units_up", "decode"): 1,
        ("hadal_kv_blocks", "decode-0"): 100,
        ("hadal_kv_blocks_used", "decode-0"): 40,
        ("hadal_steps_total", "decode-0"): 77,
        ("hadal_step_ms", "decode-0"): 2.5,
        ("hadal_overhead_ms", "decode-0"): 0.25,
    }
    assert {name: samples.get(name) for name in expected} == expected
