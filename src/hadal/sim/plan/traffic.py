"""What a deployment is planned for: how many requests, how long, how much of them cached, and at
which hours.

From a table of figures (a TOML file's), or from a trace's requests. Lengths are log-normal with a
given mean and spread where only those are known; a trace's own are drawn from where there is one.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from hadal.core.documents import cut, parse_json, shown
from hadal.core.errors import ConfigError
from hadal.policy.demand import DAY_S, FLAT, DayShape, learned_shape
from hadal.sim.day.clock import Floats, Ints
from hadal.sim.day.published import HOUR_S, SHAPE, TOKENS_IN, TOKENS_OUT, DemandCurve
from hadal.sim.workload import NO_PREFIX, V3, Parts, Workload

# Published traces as workloads. Text comes in, as lines or as what JSON made of it: opening files
# is the caller's.
#
# What a trace does not say is not made up: without ids of blocks nothing is a prefix of anything,
# and every request is a session by itself.


MOONCAKE_PART_TOKENS = 512
_NEVER = (0, 0, 1 << 62)
_TIME = re.compile(
    r"\s*([0-9]{4}-[0-9]{2}-[0-9]{2}["
    r" T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)(?:Z|\+00:00)?\s*"
)
_MOST_TOKENS, _MOST_S = 1 << 30, 1e10
"""Most tokens of a request, and most seconds of a trace: 300 years. More is a damaged file."""


class MooncakeRow(NamedTuple):
    at_s: float
    tokens_in: int
    tokens_out: int
    parts: tuple[int, ...]
    """Numbers of its 512-token parts, the last one perhaps not full; equal numbers: equal text from
    the first token.
    """


def mooncake_rows(lines: Iterable[str]) -> Iterator[MooncakeRow]:
    """Mooncake's JSON lines (FAST'25 release), one by one. Raises ValueError naming the line and
    what is wrong in it: a field, or that it has fewer parts than its length.
    """
    for number, line in enumerate(lines, 1):
        where = f"line {number}"
        row = parse_json(line, where)
        if not isinstance(row, dict):
            raise ConfigError(
                f"{where} is {shown(row)}: not one of Mooncake's traces, whose lines are objects."
            )
        length = _count(row.get("input_length"), f"{where}: input_length")
        num_out = _count(row.get("output_length"), f"{where}: output_length")
        at_ms, parts = row.get("timestamp"), row.get("hash_ids")
        if (
            isinstance(at_ms, bool)
            or not isinstance(at_ms, int | float)
            or not 0 <= at_ms <= _MOST_S * 1e3
        ):
            raise ConfigError(
                f"{where}: timestamp is {shown(at_ms)}; milliseconds from 0 on are needed."
            )
        if not isinstance(parts, list) or not all(type(part) is int for part in parts):
            raise ConfigError(f"{where}: hash_ids is {shown(parts)}; a list of numbers is needed.")
        if len(parts) * MOONCAKE_PART_TOKENS < length:
            raise ConfigError(
                f"{where}: {len(parts)} parts for {length} tokens: not one of Mooncake's traces."
            )
        yield MooncakeRow(at_ms / 1e3, length, num_out, tuple(parts))


def mooncake(lines: Iterable[str]) -> Workload:
    """A Mooncake trace. The first request that begins with all full parts of an earlier one and is
    longer than that and its answer is that session's next turn; what else of its text was there
    before counts as seen all the same. `idle_s`: since its deepest known part was used.
    """
    rows = sorted(mooncake_rows(lines), key=lambda row: row.at_s)
    end_to_turn: dict[int, tuple[int, int, int]] = {}
    """Session, turn and tokens with the answer, by the last full part of a prompt that nobody went
    on from.
    """
    part_to_use: dict[int, tuple[int, float]] = {}
    """Tokens of it that were computed, 512 but where a prompt ends, and when last."""
    sessions, turns, seen, idle_s = [], [], [], []
    for number, row in enumerate(rows):
        full = row.parts[: row.tokens_in // MOONCAKE_PART_TOKENS]
        known = list(takewhile(part_to_use.__contains__, row.parts))
        seen.append(sum(part_to_use[part][0] for part in known))
        idle_s.append(row.at_s - part_to_use[known[-1]][1] if known else np.inf)
        end = next(
            (part for part in reversed(full) if end_to_turn.get(part, _NEVER)[2] <= row.tokens_in),
            None,
        )
        session, turn, _ = (number, -1, 0) if end is None else end_to_turn.pop(end)
        sessions.append(session)
        turns.append(turn + 1)
        part_to_use.update(dict.fromkeys(full, (MOONCAKE_PART_TOKENS, row.at_s)))
        part_to_use.update(
            dict.fromkeys(row.parts[len(full) :], (row.tokens_in % MOONCAKE_PART_TOKENS, row.at_s))
        )
        if full:
            end_to_turn[full[-1]] = (session, turn + 1, row.tokens_in + row.tokens_out)
    first = np.cumsum([0, *(len(row.parts) for row in rows)])
    parts = Parts(
        MOONCAKE_PART_TOKENS,
        first,
        np.array([part for row in rows for part in row.parts], dtype=np.int64),
    )
    at_s = np.array([row.at_s for row in rows])
    return _workload(
        at_s,
        _ints(row.tokens_in for row in rows),
        _ints(row.tokens_out for row in rows),
        session=_ints(sessions),
        turn=_ints(turns),
        tokens_seen=_ints(seen),
        idle_s=np.array(idle_s),
        parts=parts,
    )


def azure(lines: Iterable[str]) -> Workload:
    """Azure's LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens. Second 0:
    the first arrival.
    """
    try:
        rows = list(csv.DictReader(lines))
    except csv.Error as error:
        raise ConfigError(f"cannot be read as CSV ({error}).") from error
    if not rows or not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= rows[0].keys():
        raise ConfigError(
            "no rows with TIMESTAMP, ContextTokens and GeneratedTokens: not one of Azure's traces."
        )
    at = np.array([_time(row["TIMESTAMP"], f"line {number}") for number, row in enumerate(rows, 2)])
    tokens_in, tokens_out = (
        _ints(_count(row[name], f"line {number}: {name}") for number, row in enumerate(rows, 2))
        for name in ("ContextTokens", "GeneratedTokens")
    )
    order = np.argsort(at, kind="stable")
    at_s = (at[order] - at.min()) / np.timedelta64(1, "s")
    return _workload(at_s, tokens_in[order], np.maximum(tokens_out[order], 1))


def _count(value: Any, what: str) -> int:
    """Tokens, as a number or as its digits. Raises ConfigError."""
    if isinstance(value, str) and re.fullmatch(r" *[0-9]{1,10} *", value):
        value = int(value)
    if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
        raise ConfigError(
            f"{what} is {shown(value)}; a number of tokens, {_MOST_TOKENS:,} at most, is needed."
        )
    return value


def _time(value: Any, where: str) -> np.datetime64:
    """A time of UTC from 1970 to 2200: what 64 bits of nanoseconds hold. Raises ConfigError."""
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is not None and "1970" <= found[1] < "2200":
        try:
            return np.datetime64(found[1], "ns")
        except ValueError:  # The 31st of February.
            pass
    raise ConfigError(
        f"{where}: TIMESTAMP is {shown(value)}; a time such as 2023-11-16 18:15:46.6805900 is"
        " needed."
    )


def _workload(
    at_s: Floats,
    tokens_in: Ints,
    tokens_out: Ints,
    *,
    session: Ints | None = None,
    turn: Ints | None = None,
    tokens_seen: Ints | None = None,
    idle_s: Floats | None = None,
    parts: Parts | None = None,
) -> Workload:
    """Return the workload of one tenant, without system prompts."""
    assert all(a <= b for a, b in pairwise(at_s)), "arrivals are in order"
    zeros = np.zeros(len(at_s), dtype=np.int64)
    return Workload(
        at_s,
        np.arange(len(at_s)) if session is None else session,
        zeros if turn is None else turn,
        tokens_in,
        tokens_out,
        zeros,
        zeros + NO_PREFIX,
        zeros,
        zeros if tokens_seen is None else tokens_seen,
        np.full(len(at_s), np.inf) if idle_s is None else idle_s,
        zeros,
        zeros + V3,
        parts,
    )


def _ints(values: Iterable[int]) -> Ints:
    return np.fromiter(values, dtype=np.int64)


DEEPSEEK_HIT_SHARE = 342e9 / 608e9
"""Share of input tokens that the cache on disk had (DeepSeek-V3/R1 inference system overview)."""
SHAPES: dict[str, DayShape] = {"flat": FLAT, "deepseek": SHAPE}
NUM_QUANTILES = 256
"""Quantiles that stand for a distribution of lengths, wherever a mean over it is taken."""
_SHAPE_MAX = 1e9
"""Of variations and lengths: far beyond any, and no square of it is infinite."""
REQUESTS_PER_S_MAX = 1e6
"""Some 500 of DeepSeek's published days at once: more is a mistake in a file."""
_FIELDS = (
    "requests_per_s",
    "tokens_in_day",
    "tokens_in",
    "tokens_out",
    "cached_share",
    "variation_in",
    "variation_out",
    "kv_length",
    "shape",
    "name",
)
EXAMPLE = """\
# What users ask of a deployment, for `hadal plan --traffic FILE`. Every line may be left out: what stands here is
# DeepSeek's published day (DeepSeek-V3/R1 inference system overview, 2025-02-27), and it is what is taken then.

requests_per_s = 1851.9   # mean over the day; or tokens_in_day = 608e9 instead
tokens_in = 3800          # of a prompt, mean, cached tokens among them
tokens_out = 1050         # generated for it, mean
cached_share = 0.5625     # of prompt tokens: found in the KV cache, not computed
variation_in = 1.0        # standard deviation of a prompt's length over its mean
variation_out = 1.0       # the same of what is generated
kv_length = 4989          # context of an output token, mean; 0: from the lengths above
shape = "deepseek"        # of the day: "flat", "deepseek", or 24 numbers, one per hour from 00:00 on, in any unit
"""


@dataclass(frozen=True)
class Traffic:
    """Requests of a day, by their means. Raises ValueError for what nobody could ask."""

    requests_per_s: float = TOKENS_IN / DemandCurve.tokens_in_request / DAY_S
    """Mean over the day."""
    tokens_in: float = DemandCurve.tokens_in_request
    """Mean tokens of a prompt, those in a cache among them."""
    tokens_out: float = DemandCurve.tokens_in_request * TOKENS_OUT / TOKENS_IN
    cached_share: float = DEEPSEEK_HIT_SHARE
    """Share of prompt tokens that is found in a cache, not computed."""
    variation_in: float = 1.0
    """Standard deviation over mean."""
    variation_out: float = 1.0
    kv_length: float = 0.0
    """Context of an output token, mean over output tokens. 0: `kv_length_mean` from the lengths."""
    shape: DayShape = SHAPE
    name: str = "DeepSeek's published day"
    lengths: tuple[Ints, Ints] | None = field(default=None, repr=False, compare=False)
    """(tokens in, tokens out) of requests to draw from; None: log-normal ones."""

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "tokens_in", "tokens_out"):
            if not (getattr(self, name) > 0.0 and math.isfinite(getattr(self, name))):
                raise ValueError(
                    f"traffic: {name} is {getattr(self, name):g}; it must be above 0 and finite."
                )
        if self.requests_per_s > REQUESTS_PER_S_MAX:
            raise ValueError(
                f"traffic: requests_per_s is {self.requests_per_s:g}; at most"
                f" {REQUESTS_PER_S_MAX:,.0f} are planned for (DeepSeek's published day has 1,852)."
            )
        if not 0.0 <= self.cached_share < 1.0:
            raise ValueError(
                f"traffic: cached_share is {self.cached_share:g}; from 0 to below 1 is possible."
            )
        for name in ("variation_in", "variation_out", "kv_length"):
            if not 0.0 <= getattr(self, name) <= _SHAPE_MAX:
                raise ValueError(
                    f"traffic: {name} is {getattr(self, name):g}; it cannot be negative, nor more than"
                    f" {_SHAPE_MAX:g}."
                )

    @property
    def tokens_new(self) -> float:
        """Mean tokens of a prompt that are computed."""
        return self.tokens_in * (1.0 - self.cached_share)

    @property
    def kv_length_mean(self) -> float:
        """E[O (I + O / 2)] / E[O] for lengths that do not depend on each other, or as given."""
        return self.kv_length or self.tokens_in + 0.5 * self.tokens_out * (
            1.0 + self.variation_out**2
        )

    @property
    def peak(self) -> float:
        """Highest point of the day's shape over its mean."""
        return float(self.shape.at(np.arange(0.0, DAY_S, 300.0)).max())

    def new_quantiles(self) -> Floats:
        """Computed tokens of prompts, [NUM_QUANTILES], equally many requests each."""
        middles = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        if self.lengths is not None:
            return np.asarray(np.quantile(self.lengths[0], middles) * (1.0 - self.cached_share))
        return np.array(
            [_log_normal_at(self.tokens_new, self.variation_in, float(at)) for at in middles]
        )

    def draw(self, size: int, rng: Generator) -> tuple[Ints, Ints]:
        """(tokens in, tokens out) of so many requests."""
        if self.lengths is not None:
            rows = rng.integers(0, len(self.lengths[0]), size)
            return self.lengths[0][rows], self.lengths[1][rows]
        normal = rng.standard_normal((2, size))
        # As spread as the mean context says, where that is known.
        spread2 = 2.0 * (self.kv_length_mean - self.tokens_in) / self.tokens_out - 1.0
        return (
            _log_normal(self.tokens_in, self.variation_in, normal[0]),
            _log_normal(self.tokens_out, math.sqrt(max(0.0, spread2)), normal[1]),
        )

    def curve(self) -> DemandCurve:
        """The day as the fluid takes it (sim/day/fluid)."""
        in_day = self.requests_per_s * DAY_S * self.tokens_in
        return DemandCurve(
            in_day, in_day * self.tokens_out / self.tokens_in, self.tokens_in, self.shape
        )


def traffic_of(table: Mapping[str, Any]) -> Traffic:
    """Read a TOML file's table (EXAMPLE has every field). Raises ValueError naming the field that
    is wrong.
    """
    for name in table:
        if name not in _FIELDS:
            raise ValueError(f"traffic: unknown field {shown(name)}. Known: {', '.join(_FIELDS)}.")
    if "requests_per_s" in table and "tokens_in_day" in table:
        raise ValueError("traffic: give requests_per_s or tokens_in_day; they say the same.")
    values: dict[str, Any] = {"name": "the traffic file"}
    for name, value in table.items():
        if name not in ("shape", "name"):
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"traffic: {name} is {shown(value)}; a number is needed.")
            values[name] = float(value)
    if "name" in table:
        values["name"] = cut(str(table["name"]))
    in_day = values.pop("tokens_in_day", None)
    if in_day is not None:
        tokens_in = values.get("tokens_in", Traffic.tokens_in)
        if tokens_in <= 0.0:
            raise ValueError(f"traffic: tokens_in is {tokens_in:g}; it must be above 0 and finite.")
        values["requests_per_s"] = in_day / tokens_in / DAY_S
    if "shape" in table:
        values["shape"] = shape_of(table["shape"])
    return Traffic(**values)


def shape_of(value: object) -> DayShape:
    """A shape by name, or of 24 hours from midnight on; hours too steep for a shape are smoothed.
    Raises ValueError.
    """
    if isinstance(value, str) and value in SHAPES:
        return SHAPES[value]
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 24:
        raise ValueError(
            f"traffic: shape is {shown(value)}; take {', '.join(SHAPES)}, or 24 numbers, one per"
            " hour."
        )
    if not all(isinstance(hour, int | float) and 0.0 <= hour < math.inf for hour in value):
        raise ValueError("traffic: shape has an hour that is no number from 0 on.")
    return learned_shape([float(hour) for hour in value])


def traffic_from(workload: Workload, name: str) -> Traffic:
    """What a trace asks for: its rate, lengths and what a cache would have of it, over the time
    that it covers.

    The shape is that of its hours if it covers a day; less is taken as a flat day. Raises
    ValueError for a trace of fewer than two requests, or of no time.
    """
    size = len(workload)
    span_s = float(workload.arrival_s[-1] - workload.arrival_s[0]) if size > 1 else 0.0
    if span_s <= 0.0:
        raise ValueError(
            f"{name}: {size} requests in {span_s:g} s show no rate; give a longer trace."
        )
    tokens_in, tokens_out = workload.tokens_in, workload.tokens_out
    mean_in, mean_out = float(tokens_in.mean()), float(tokens_out.mean())
    shape = FLAT
    if span_s >= DAY_S - HOUR_S:
        hours = (workload.arrival_s % DAY_S // HOUR_S).astype(np.int64)
        shape = learned_shape(np.bincount(hours, minlength=24).astype(np.float64).tolist())
    return Traffic(
        requests_per_s=(size - 1) / span_s,
        tokens_in=mean_in,
        tokens_out=mean_out,
        cached_share=float(workload.tokens_findable.sum() / tokens_in.sum()),
        variation_in=float(tokens_in.std() / mean_in),
        variation_out=float(tokens_out.std() / mean_out),
        kv_length=workload.kv_length_mean,
        shape=shape,
        name=name,
        lengths=(tokens_in, tokens_out),
    )


def _log_normal(mean: float, variation: float, normal: Floats) -> Ints:
    sigma2 = math.log1p(variation**2)
    drawn = mean * np.exp(math.sqrt(sigma2) * normal - 0.5 * sigma2)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _log_normal_at(mean: float, variation: float, quantile: float) -> float:
    sigma2 = math.log1p(variation**2)
    return mean * math.exp(math.sqrt(sigma2) * NormalDist().inv_cdf(quantile) - 0.5 * sigma2)
