"""Traffic that a deployment is planned for: rate, lengths and cached share of requests, and the
shape of the day.

It is read from a TOML table or from a trace. Lengths are drawn from the trace if there is one, else
from log-normal distributions with a given mean. The spread of prompt lengths is given; the spread
of output lengths follows from the mean context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.random import Generator

from hadal.core.arrays import Floats, Ints
from hadal.core.documents import cut, shown
from hadal.lab.sim.day.published import HOUR_S, SHAPE, TOKENS_IN, TOKENS_OUT, DemandCurve
from hadal.lab.sim.workload import Workload
from hadal.policy.demand import DAY_S, FLAT, DayShape, learned_shape

DEEPSEEK_HIT_SHARE = 342e9 / 608e9
"""Share of input tokens found in the disk cache (DeepSeek-V3/R1 inference system overview)."""
SHAPES: dict[str, DayShape] = {"flat": FLAT, "deepseek": SHAPE}
NUM_QUANTILES = 256
"""Number of quantiles that represent a distribution of lengths when a mean over it is taken."""
_SHAPE_MAX = 1e9
"""Limit of variations and `kv_length`: far above realistic values, and its square is finite."""
REQUESTS_PER_S_MAX = 1e6
"""Limit of the rate, about 500x DeepSeek's published day: more is a mistake in a file."""
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
# What users ask of a deployment, for `hadal plan --traffic FILE`. Every line may be left out. The values
# below are the defaults: DeepSeek's published day (DeepSeek-V3/R1 inference system overview, 2025-02-27).

requests_per_s = 1851.9   # mean over the day; or tokens_in_day = 608e9 instead
tokens_in = 3800          # of a prompt, mean, cached tokens among them
tokens_out = 1050         # generated for it, mean
cached_share = 0.5625     # of prompt tokens: found in the KV cache, not computed
variation_in = 1.0        # standard deviation of prompt lengths over their mean
variation_out = 1.0       # standard deviation of output lengths over their mean
kv_length = 4989          # context of an output token, mean; 0: from the lengths above
shape = "deepseek"        # of the day's load: "flat", "deepseek", or 24 numbers, one per hour from 00:00, any unit
"""


@dataclass(frozen=True)
class Traffic:
    """Requests of a day, described by means. Raises ValueError for impossible values."""

    requests_per_s: float = TOKENS_IN / DemandCurve.tokens_in_request / DAY_S
    """Mean rate over the day."""
    tokens_in: float = DemandCurve.tokens_in_request
    """Mean tokens of a prompt, cached ones included."""
    tokens_out: float = DemandCurve.tokens_in_request * TOKENS_OUT / TOKENS_IN
    """Mean output tokens of a request."""
    cached_share: float = DEEPSEEK_HIT_SHARE
    """Share of prompt tokens found in a cache instead of computed."""
    variation_in: float = 1.0
    """Standard deviation of prompt lengths over their mean."""
    variation_out: float = 1.0
    """Standard deviation of output lengths over their mean. Used only if `kv_length` is 0."""
    kv_length: float = 0.0
    """Mean context of an output token. 0: computed from the lengths (`kv_length_mean`)."""
    shape: DayShape = SHAPE
    name: str = "DeepSeek's published day"
    lengths: tuple[Ints, Ints] | None = field(default=None, repr=False, compare=False)
    """(tokens in, tokens out) of requests to draw from. None: log-normal lengths."""

    def __post_init__(self) -> None:
        for name in ("requests_per_s", "tokens_in", "tokens_out"):
            if not (getattr(self, name) > 0.0 and math.isfinite(getattr(self, name))):
                raise ValueError(
                    f"traffic: {name} is {getattr(self, name):g}; it must be above 0 and finite."
                )
        if self.requests_per_s > REQUESTS_PER_S_MAX:
            raise ValueError(
                f"traffic: requests_per_s is {self.requests_per_s:g}; it must be at most"
                f" {REQUESTS_PER_S_MAX:,.0f} (DeepSeek's published day has 1,852)."
            )
        if not 0.0 <= self.cached_share < 1.0:
            raise ValueError(
                f"traffic: cached_share is {self.cached_share:g}; it must be from 0 to below 1."
            )
        for name in ("variation_in", "variation_out", "kv_length"):
            if not 0.0 <= getattr(self, name) <= _SHAPE_MAX:
                raise ValueError(
                    f"traffic: {name} is {getattr(self, name):g}; it must be from 0 to"
                    f" {_SHAPE_MAX:g}."
                )

    @property
    def tokens_new(self) -> float:
        """Mean number of computed tokens per prompt."""
        return self.tokens_in * (1.0 - self.cached_share)

    @property
    def kv_length_mean(self) -> float:
        """Mean context of an output token: `kv_length` or else E[O (I + O / 2)] / E[O]."""
        return self.kv_length or self.tokens_in + 0.5 * self.tokens_out * (
            1.0 + self.variation_out**2
        )

    @property
    def peak(self) -> float:
        """Highest point of the day's shape over its mean."""
        return float(self.shape.at(np.arange(0.0, DAY_S, 300.0)).max())

    def new_quantiles(self) -> Floats:
        """Return quantiles of the computed tokens of prompts [NUM_QUANTILES], equally weighted."""
        middles = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        if self.lengths is not None:
            return np.asarray(np.quantile(self.lengths[0], middles) * (1.0 - self.cached_share))
        return np.array(
            [_log_normal_at(self.tokens_new, self.variation_in, float(at)) for at in middles]
        )

    def draw(self, size: int, rng: Generator) -> tuple[Ints, Ints]:
        """Draw (tokens in, tokens out) of `size` requests."""
        if self.lengths is not None:
            rows = rng.integers(0, len(self.lengths[0]), size)
            return self.lengths[0][rows], self.lengths[1][rows]
        normal = rng.standard_normal((2, size))
        # Choose the spread of outputs so that the mean context is `kv_length_mean`.
        spread2 = 2.0 * (self.kv_length_mean - self.tokens_in) / self.tokens_out - 1.0
        return (
            _log_normal(self.tokens_in, self.variation_in, normal[0]),
            _log_normal(self.tokens_out, math.sqrt(max(0.0, spread2)), normal[1]),
        )

    def curve(self) -> DemandCurve:
        """Return the day's demand for the fluid (lab/sim/day/fluid)."""
        in_day = self.requests_per_s * DAY_S * self.tokens_in
        return DemandCurve(
            in_day, in_day * self.tokens_out / self.tokens_in, self.tokens_in, self.shape
        )


def traffic_of(table: Mapping[str, Any]) -> Traffic:
    """Read a TOML file's table (see EXAMPLE). Raises ValueError that names the wrong field."""
    for name in table:
        if name not in _FIELDS:
            raise ValueError(f"traffic: unknown field {shown(name)}. Known: {', '.join(_FIELDS)}.")
    if "requests_per_s" in table and "tokens_in_day" in table:
        raise ValueError("traffic: give either requests_per_s or tokens_in_day, not both.")
    values: dict[str, Any] = {"name": "the traffic file"}
    for name, value in table.items():
        if name not in ("shape", "name"):
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"traffic: {name} is {shown(value)}; it must be a number.")
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
    """Return a shape by its name, or from 24 hourly values starting at midnight. Changes too steep
    for a shape are smoothed. Raises ValueError for any other value.
    """
    if isinstance(value, str) and value in SHAPES:
        return SHAPES[value]
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 24:
        raise ValueError(
            f"traffic: shape is {shown(value)}; use {', '.join(SHAPES)}, or 24 numbers,"
            " one per hour."
        )
    if not all(isinstance(hour, int | float) and 0.0 <= hour < math.inf for hour in value):
        raise ValueError("traffic: each hour of shape must be a number, 0 or more.")
    return learned_shape([float(hour) for hour in value])


def traffic_from(workload: Workload, name: str) -> Traffic:
    """Return the traffic of a trace: its rate, its lengths, and the cached share of an infinite
    cache. The shape is that of its hours from second 0 if it spans at least 23 hours, else flat.
    Raises ValueError for a trace with fewer than two requests or without duration.
    """
    size = len(workload)
    span_s = float(workload.arrival_s[-1] - workload.arrival_s[0]) if size > 1 else 0.0
    if span_s <= 0.0:
        raise ValueError(
            f"{name}: {size} requests in {span_s:g} s are too few to measure a rate; use a"
            " longer trace."
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
