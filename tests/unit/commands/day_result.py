"""A made-up object as `hadal simulate` writes it to result.json, for the report's tests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

HOURS = (
    4.81,
    5.07,
    5.42,
    5.50,
    5.42,
    4.95,
    4.77,
    5.26,
    5.46,
    5.48,
    5.52,
    5.30,
    3.87,
    3.20,
    2.34,
    1.42,
    1.13,
    1.13,
    1.42,
    2.44,
    4.11,
    5.24,
    5.42,
    5.32,
)
"""Percent of a day's tokens per hour, from noon."""
PUBLISHED = {
    "nodes_mean": 226.75,
    "nodes_peak": 278,
    "tokens_in": 608_000_000_000,
    "tokens_hit": 342_000_000_000,
    "tokens_out": 168_000_000_000,
    "hit_percent": 56.3,
    "tokens_per_s_user": [20.0, 22.0],
    "kv_length_mean": 4989,
    "prefill_tokens_per_s_node": 73_700,
    "decode_tokens_per_s_node": 14_800,
    "cost_usd": 87_072,
    "income_usd": 562_027,
    "margin_percent": 545,
}


def histogram(rng: np.random.Generator, median: float, sigma: float) -> dict[str, Any]:
    """Return a histogram of log-normal times in 60 bins, each wider than the last by the same
    factor. `median` is in seconds.
    """
    times = median * np.exp(sigma * rng.standard_normal(20_000))
    edges = np.geomspace(median / 20, median * 20, 61)
    counts, _ = np.histogram(times, edges)
    p50, p90, p99 = np.quantile(times, (0.5, 0.9, 0.99))
    return {"edges": edges.tolist(), "counts": counts.tolist(), "p50": p50, "p90": p90, "p99": p99}


def hour(index: int, share: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return an hour of the day, with a simulated window. `share`: percent of the day's tokens."""
    tokens_in, nodes = int(6.1e9 * share), 30.0 * math.ceil(share / 5.6 * 9.2)
    noise = rng.normal(0, 1, 8)
    return {
        "hour_beijing": (12 + index) % 24,
        "nodes_mean": nodes,
        "prefill_nodes_mean": nodes * 0.4,
        "decode_nodes_mean": nodes * 0.6,
        "requests": int(1.6e6 * share),
        "tokens_in": tokens_in,
        "tokens_hit": int(tokens_in * (0.555 + 0.01 * noise[0])),
        "tokens_out": int(tokens_in * 0.277),
        "income_usd": 5580.0 * share,
        "cost_usd": 16.0 * nodes,
        "fluid": {
            "tokens_per_s_user": 21 + noise[1] / 2,
            "requests_per_rank": 16 * share,
            "prefill_use": 0.11 * share,
        },
        "window": {
            "prefill_units": int(nodes * 0.1),
            "decode_units": int(nodes / 30),
            "seconds": 10.0,
            "requests": int(4400 * share),
            "tokens_per_s_user": 21 + noise[2] / 2,
            "requests_per_rank": 16 * share + noise[3],
            "prefill_use": 0.11 * share + noise[4] / 50,
            "prefill_computed_share": 0.78,
            "kv_length_mean": 4989 + 40 * noise[5],
            "hit_percent": 56 + noise[6],
            "ttft_s": {"p50": 0.9, "p90": 2.1, "p99": 4.4},
            "tpot_s": {"p50": 0.046, "p90": 0.05, "p99": 0.055},
            "kv_imbalance": 1.04,
            "request_imbalance": 1.03,
            "prefill_imbalance": 1.05,
            "expert_imbalance": {"prefill": 1.2, "decode": 1.3},
        },
    }


def result(seed: int = 1) -> dict[str, Any]:
    """Return a made-up day as result.json has it, with random figures from `seed`."""
    rng = np.random.default_rng(seed)
    hours = [hour(index, share, rng) for index, share in enumerate(HOURS)]
    at = np.arange(1440) / 60.0
    demand = (
        np.interp(at, np.arange(24) + 0.5, HOURS) * 1.69e6 * (1 + 0.02 * rng.standard_normal(1440))
    )
    bundles = np.ceil(np.interp(at - 0.2, np.arange(24) + 0.5, HOURS) / 5.6 * 9.2).astype(int)
    decode, prefill = 18 * bundles, 12 * bundles + 4 * (bundles > 8)
    return {
        "nodes_mean": 226.1,
        "nodes_peak": 278,
        "prefill_nodes_mean": 95.5,
        "decode_nodes_mean": 130.6,
        "tokens_in": 608_311_000_000,
        "tokens_hit": 342_100_000_000,
        "tokens_out": 168_100_000_000,
        "tokens_per_s_user": 21.1,
        "kv_length_mean": 4993.0,
        "prefill_tokens_per_s_node": 73_710.0,
        "decode_tokens_per_s_node": 14_890.0,
        "cost_usd": 86_822.0,
        "income_usd": 562_911.0,
        "margin_percent": 548.3,
        "hit_percent": 56.24,
        "requests": 164_000_000,
        "hours": hours,
        "minutes": {
            "nodes": (decode + prefill).tolist(),
            "prefill_nodes": prefill.tolist(),
            "decode_nodes": decode.tolist(),
            "tokens_in_per_s": demand.round().tolist(),
        },
        "ttft_s": histogram(rng, 0.9, 0.7),
        "tpot_s": histogram(rng, 0.047, 0.08),
        "ranks": {
            "hour_beijing": 22,
            "decode_unit": "decode-0",
            "prefill_unit": "prefill-0",
            "kv_share": (0.38 + 0.004 * rng.standard_normal(144)).tolist(),
            "requests": (88 + rng.integers(-1, 2, 144)).tolist(),
            "prefill_attention": (1 + 0.02 * rng.standard_normal(32)).tolist(),
            "prefill_tokens": (9_200 + 90 * rng.standard_normal(32)).round().tolist(),
            "decode_experts": (1 + 0.1 * rng.standard_normal(144)).tolist(),
            "prefill_experts": (1 + 0.06 * rng.standard_normal(32)).tolist(),
        },
        "what_ifs": [
            {
                "name": name,
                "nodes_mean": nodes,
                "nodes_peak": int(nodes * 1.23),
                "cost_usd": nodes * 384.0,
                "income_usd": 562_911.0,
                "margin_percent": 100 * (562_911 / (nodes * 384.0) - 1),
                "tokens_per_s_user": 21.0,
                "hit_percent": hit,
                "prefill_tokens_per_s_node": 1.67e7 / nodes,
                "decode_tokens_per_s_node": 3.4e6 / nodes,
            }
            for name, nodes, hit in (
                ("as asked", 226.1, 56.2),
                ("H20 instead of H800", 512.0, 56.2),
                ("half the cache", 241.7, 49.8),
                ("round-robin instead of balancers", 288.0, 56.2),
                ("no expert balancer", 331.5, 56.2),
            )
        ],
        "published": dict(PUBLISHED),
        "study": {
            "name": "deepseek-day",
            "hardware": "h800",
            "gpu_hour_usd": 2.0,
            "fleet": {"bundle": [3, 1], "start_s": 600.0},
            "demand": {"shape": list(HOURS)},
        },
        "seconds": 412.0,
        "notes": [
            "Decode with 1 draft token is outside of what the curves were fitted to.",
            "V3 and R1 share units.",
        ],
    }
