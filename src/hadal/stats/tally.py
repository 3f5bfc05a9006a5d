"""Counters by quarter hour, model and tenant: sums of facts. Single facts, columns of millions of
facts, and counters summed elsewhere all pass through the same code, so that the live ledger and a
simulated day are counted alike.

All counters are integers and only ever added, so the order and grouping of the input do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from hadal.core.arrays import Ints
from hadal.core.facts import CANCELLED, FINISHES, RequestFact, micros
from hadal.stats.prices import BUCKET_US, ModelPrices


class Key(NamedTuple):
    """Group under which facts are summed."""

    bucket: int
    """Quarter hours since 1970, at completion."""
    model: str
    tenant: str


@dataclass(slots=True)
class Counts:
    """Sums over generations."""

    num_requests: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_refused: int = 0
    """Generations rejected before they reached a unit: by a quota, overload or shutdown."""
    num_failed: int = 0
    num_retries: int = 0
    tokens_hit: int = 0
    tokens_miss: int = 0
    tokens_out: int = 0
    kv_tokens: int = 0
    """Sum of KV lengths over output tokens."""
    tokens_after_first: int = 0
    """Output tokens after the first of each generation: those made in `stream_us`."""
    stream_us: int = 0
    """Sum of the times from first to last token."""
    income_pico_usd: int = 0

    @property
    def tokens_in(self) -> int:
        return self.tokens_hit + self.tokens_miss

    def add(self, other: Counts) -> None:
        """Add every counter of `other`."""
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTERS: tuple[str, ...] = tuple(one.name for one in fields(Counts))


def counts_of(fact: RequestFact) -> Counts:
    """Return one fact as counters."""
    stream_us = 0
    if fact.first_token_s is not None and fact.last_token_s is not None:
        stream_us = micros(fact.last_token_s) - micros(fact.first_token_s)
    is_finished, is_cancelled = fact.end in FINISHES, fact.end == CANCELLED
    return Counts(
        num_requests=1,
        num_finished=int(is_finished),
        num_cancelled=int(is_cancelled),
        num_refused=int(fact.is_refused),
        num_failed=int(not (is_finished or is_cancelled or fact.is_refused)),
        num_retries=fact.num_retries,
        tokens_hit=fact.tokens_hit,
        tokens_miss=fact.tokens_miss,
        tokens_out=fact.tokens_out,
        kv_tokens=fact.kv_tokens,
        tokens_after_first=max(0, fact.tokens_out - 1),
        stream_us=stream_us,
        income_pico_usd=fact.income_pico_usd,
    )


@dataclass(frozen=True)
class Columns:
    """Finished generations as columns, one entry per generation in each array: shape [N], int64.

    Raises ValueError when made with arrays of different lengths or another type.
    """

    completed_us: Ints
    """Completion time. All three times are unix microseconds."""
    first_token_us: Ints
    last_token_us: Ints
    tokens_hit: Ints
    tokens_miss: Ints
    tokens_out: Ints
    """Output tokens, at least 1."""
    kv_tokens: Ints
    model_index: Ints
    """Index into `models`."""
    tenant_index: Ints
    models: Sequence[str] = ("",)
    tenants: Sequence[str] = ("",)

    def __post_init__(self) -> None:
        shapes = {
            name: value.shape for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        if len(set(shapes.values())) > 1 or len(self.completed_us.shape) != 1:
            raise ValueError(f"columns must have equal lengths; they have shapes {shapes}.")
        if not all(
            value.dtype == np.int64
            for value in vars(self).values()
            if isinstance(value, np.ndarray)
        ):
            raise ValueError("columns must be int64 arrays; other types would lose tokens.")


class Tally:
    """Counters by key, initially empty."""

    def __init__(self) -> None:
        self.key_to_counts: dict[Key, Counts] = {}

    def __iter__(self) -> Iterator[tuple[Key, Counts]]:
        return iter(sorted(self.key_to_counts.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tally) and self.key_to_counts == other.key_to_counts

    __hash__ = None  # type: ignore[assignment]  # Mutable.

    def add(self, fact: RequestFact) -> None:
        """Add one fact, under the time of its completion."""
        self.add_counts(
            Key(micros(fact.completed_s) // BUCKET_US, fact.model, fact.tenant), counts_of(fact)
        )

    def add_facts(self, facts: Iterable[RequestFact]) -> None:
        for fact in facts:
            self.add(fact)

    def add_counts(self, key: Key, counts: Counts) -> None:
        """Add counters that were summed elsewhere; they are copied."""
        mine = self.key_to_counts.get(key)
        if mine is None:
            mine = self.key_to_counts[key] = Counts()
        mine.add(counts)

    def merge(self, other: Tally) -> None:
        """Add all counters of another tally."""
        for key, counts in other.key_to_counts.items():
            self.add_counts(key, counts)

    def add_columns(self, columns: Columns) -> None:
        """Add a fact for each entry, finished at its first attempt and not charged; see `priced`."""
        if not len(columns.completed_us):
            return
        buckets = columns.completed_us // BUCKET_US
        order = np.lexsort((columns.tenant_index, columns.model_index, buckets))
        keys = np.stack((buckets, columns.model_index, columns.tenant_index))[:, order]
        starts = np.flatnonzero(np.r_[True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)])
        ones = np.ones(len(order), dtype=np.int64)
        sums = {
            name: np.add.reduceat(values[order], starts)
            for name, values in {
                "num_requests": ones,
                "num_finished": ones,
                "tokens_hit": columns.tokens_hit,
                "tokens_miss": columns.tokens_miss,
                "tokens_out": columns.tokens_out,
                "kv_tokens": columns.kv_tokens,
                "tokens_after_first": np.maximum(columns.tokens_out - 1, 0),
                "stream_us": columns.last_token_us - columns.first_token_us,
            }.items()
        }
        for group, (bucket, model, tenant) in enumerate(keys[:, starts].T.tolist()):
            counters: dict[str, Any] = {name: int(values[group]) for name, values in sums.items()}
            self.add_counts(
                Key(bucket, columns.models[model], columns.tenants[tenant]), Counts(**counters)
            )

    def times(self, factor: int) -> Tally:
        """Return a copy with every counter multiplied by `factor`, to scale up a sample."""
        tally = Tally()
        for key, counts in self.key_to_counts.items():
            tally.key_to_counts[key] = Counts(
                **{name: factor * getattr(counts, name) for name in COUNTERS}
            )
        return tally

    def priced(self, model_prices: ModelPrices) -> Tally:
        """Return a copy charged by these prices; exact, as price tiers begin on quarter hours."""
        tally = Tally()
        for key, counts in self.key_to_counts.items():
            tally.add_counts(key, counts)
            charged = model_prices.of(key.model).charge(
                key.bucket * BUCKET_US, counts.tokens_hit, counts.tokens_miss, counts.tokens_out
            )
            tally.key_to_counts[key].income_pico_usd = charged
        return tally
