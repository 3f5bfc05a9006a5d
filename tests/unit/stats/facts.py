"""Facts drawn from a seed, for tests that need many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hadal.core.facts import CANCELLED, FINISHES, RequestFact, micros, sum_kv_tokens
from hadal.stats.prices import R1
from hadal.stats.report import QUANTILES, Detail, Details

START_S = 1_740_628_800.0
"""2025-02-27 12:00 in Beijing, the start of DeepSeek's day."""
ENDS = ("stop", "length", "cancelled", "429", "503", "504")


def random_facts(
    seed: int, number: int, span_s: float = 86_400.0, prefix: str = "r"
) -> list[RequestFact]:
    """Draw facts of three models and four tenants, with all kinds of ends, charged at R1's prices."""
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
        request_id,
        f"t{rng.integers(4)}",
        f"m{rng.integers(3)}",
        hit,
        miss,
        out,
        sum_kv_tokens(hit + miss, out),
        end,
        first_s - 1.0,
        completed_s,
        first_s if out else None,
        last_s if out else None,
        "prefill-0" if is_let_in or rng.random() < 0.5 else "",
        "decode-0",
        int(rng.integers(0, 3)),
        R1.charge(micros(completed_s), hit, miss, out),
    )


def details_of(facts: Iterable[RequestFact], key: Callable[[RequestFact], Any]) -> Details:
    """Return the details that a database should find, computed fact by fact."""
    facts = list(facts)
    groups: dict[Any, list[RequestFact]] = {}
    for fact in facts:
        groups.setdefault(key(fact), []).append(fact)
    found = {name: _detail_of(group) for name, group in groups.items()}
    return Details(
        _detail_of(facts), {name: detail for name, detail in found.items() if detail != Detail()}
    )


def _detail_of(facts: list[RequestFact]) -> Detail:
    ttft_us, tpot_ns = [], []
    for fact in facts:
        if fact.first_token_s is not None and fact.last_token_s is not None:
            first_us = micros(fact.first_token_s)
            ttft_us.append(first_us - micros(fact.received_s))
            if fact.tokens_out > 1:
                tpot_ns.append(
                    (micros(fact.last_token_s) - first_us) * 1000 // (fact.tokens_out - 1)
                )
    errors = Counter(fact.end for fact in facts if fact.end not in (*FINISHES, CANCELLED))
    return Detail(_nearest_ranks(ttft_us), _nearest_ranks(tpot_ns), dict(errors))


def _nearest_ranks(values: list[int]) -> tuple[int, ...]:
    values = sorted(values)
    return (
        tuple(values[-(-len(values) * percent // 100) - 1] for percent in QUANTILES)
        if values
        else ()
    )
