"""Facts out of a seed, for tests that need many."""

from __future__ import annotations

import numpy as np

from hadal.core.facts import RequestFact, micros, sum_kv_tokens
from hadal.stats.prices import R1

START_S = 1_740_628_800.0
"""2025-02-27 12:00 in Beijing, where DeepSeek's day begins."""
ENDS = ("stop", "length", "cancelled", "429", "503", "504")


def random_facts(seed: int, number: int, span_s: float = 86_400.0, prefix: str = "r") -> list[RequestFact]:
    """Of three models and four tenants, all kinds of ends among them, charged at R1's prices."""
    rng = np.random.default_rng(seed)
    return [_fact(rng, f"{prefix}{index}", span_s) for index in range(number)]


def _fact(rng: np.random.Generator, request_id: str, span_s: float) -> RequestFact:
    end = str(rng.choice(ENDS))
    is_let_in = end not in ("429", "503")
    hit, miss = (int(rng.integers(0, 5000)) * is_let_in for _ in range(2))
    out = int(rng.integers(0, 2000)) * is_let_in
    completed_s = START_S + float(rng.random()) * span_s
    last_s = completed_s - float(rng.random()) * 0.1
    first_s = last_s - out * 0.05 * float(rng.random())
    return RequestFact(
        request_id, f"t{rng.integers(4)}", f"m{rng.integers(3)}", hit, miss, out, sum_kv_tokens(hit + miss, out), end,
        first_s - 1.0, completed_s, first_s if out else None, last_s if out else None,
        "prefill-0" if is_let_in or rng.random() < 0.5 else "", "decode-0",
        int(rng.integers(0, 3)), R1.charge(micros(completed_s), hit, miss, out),
    )  # fmt: skip
