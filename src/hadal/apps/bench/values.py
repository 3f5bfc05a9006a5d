"""Measurements of `hadal bench` as one object, `bench.json`: the source of its tables and page.

    summary(...) -> {"url", "model", "levels": [{"name", "ttft_s": {"p50": ...}, ...}], ...}

A failed request counts only in `num_sent`, `errors`, `late_s` and the base of `good_share`; one
stopped by Ctrl-C counts only in `num_stopped`. Unknown values are None. Works on samples; does not
depend on sockets.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hadal.apps.bench.load import STOPPED, LevelRun
from hadal.apps.bench.request import Sample
from hadal.core.documents import shown
from hadal.core.errors import ConfigError

QUANTILES = (50, 90, 95, 99)
_CURVE = tuple(range(0, 101, 2))
"""Percentiles of a distribution curve in the page."""
_UNITS_S = {"s": 1.0, "ms": 1e-3}


def ttft_s(sample: Sample) -> float | None:
    """Return the time from the request's due time to its first text; None without text."""
    return None if sample.first_s is None else sample.first_s - sample.due_s


def tpot_s(sample: Sample) -> float | None:
    """Return the mean time per token after the first piece of text, assumed to be one token."""
    if sample.first_s is None or sample.last_s is None:
        return None
    num = sample.num_pieces if sample.tokens_out is None else sample.tokens_out
    return (sample.last_s - sample.first_s) / (num - 1) if num > 1 else None


def longest_gap_s(sample: Sample) -> float | None:
    """Return the longest time between two pieces of text; None with fewer than two."""
    return max(sample.gaps_s, default=None)


def e2e_s(sample: Sample) -> float | None:
    """Return the time from the request's due time to its end."""
    return sample.end_s - sample.due_s


PROMISES: Mapping[str, Callable[[Sample], float | None]] = {
    "ttft": ttft_s,
    "tpot": tpot_s,
    "itl": longest_gap_s,
    "e2e": e2e_s,
}
"""Metric -> function that measures it on a sample, for the limits (SLOs) that a user may set."""


def parse_promises(text: str) -> dict[str, float]:
    """Parse SLOs such as `ttft=2s,tpot=50ms` into name -> seconds; may be empty. Raises
    ConfigError.
    """
    promises: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.lower().split(","))):
        found = re.fullmatch(r"([a-z0-9]+)\s*=\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(ms|s)", part)
        if found is None or found[1] not in PROMISES or not float(found[2]):
            raise ConfigError(
                f"--slo: {shown(part)} is not a limit; use limits of"
                f" {', '.join(PROMISES)}, as in ttft=2s,tpot=50ms."
            )
        if found[1] in promises:
            raise ConfigError(f"--slo: {found[1]} is given twice; give it once.")
        promises[found[1]] = float(found[2]) * _UNITS_S[found[3]]
    return promises


def kept(sample: Sample, promises: Mapping[str, float]) -> bool:
    """Return whether an answered request met all SLOs; an unmeasured metric counts as met."""
    measured = ((PROMISES[name](sample), most_s) for name, most_s in promises.items())
    return all(value is None or value <= most_s for value, most_s in measured)


def level_summary(run: LevelRun, promises: Mapping[str, float]) -> dict[str, Any]:
    """Return a level's entry in bench.json. Rates are over its `elapsed_s`."""
    counted = [sample for sample in run.samples if sample.end_s and sample.error != STOPPED]
    done = [sample for sample in counted if not sample.error]
    errors = Counter(sample.error for sample in counted if sample.error)
    good = [sample for sample in done if kept(sample, promises)]
    elapsed_s = run.elapsed_s

    def per_s(number: float) -> float | None:
        return number / elapsed_s if elapsed_s > 0.0 else None

    tokens_in, tokens_out = _sum(done, "tokens_in"), _sum(done, "tokens_out")
    tokens_cached = _sum(done, "tokens_cached")
    return {
        "name": run.level.name,
        "kind": run.level.kind,
        "value": run.level.value,
        "elapsed_s": elapsed_s,
        "num_sent": len(counted),
        "num_done": len(done),
        "num_stopped": len(run.samples) - len(counted),
        "errors": dict(errors.most_common()),
        "requests_per_s": per_s(len(done)),
        "tokens_in_per_s": None if tokens_in is None else per_s(tokens_in),
        "tokens_out_per_s": None if tokens_out is None else per_s(tokens_out),
        "tokens_in_mean": None if tokens_in is None else tokens_in / len(done),
        "tokens_out_mean": None if tokens_out is None else tokens_out / len(done),
        "cache_hit_share": tokens_cached / tokens_in
        if tokens_cached is not None and tokens_in
        else None,
        "num_good": len(good) if promises else None,
        "good_share": len(good) / len(counted) if promises and counted else None,
        "goodput_per_s": per_s(len(good)) if promises else None,
        "ttft_s": spread([ttft_s(sample) for sample in done]),
        "tpot_s": spread([tpot_s(sample) for sample in done]),
        "itl_s": spread([gap_s for sample in done for gap_s in sample.gaps_s]),
        "e2e_s": spread([e2e_s(sample) for sample in done]),
        "late_s": spread([sample.sent_s - sample.due_s for sample in counted]),
        "ttft_curve_s": curve([ttft_s(sample) for sample in done]),
        "tpot_curve_s": curve([tpot_s(sample) for sample in done]),
    }


def _sum(done: Sequence[Sample], name: str) -> int | None:
    """Return the field's sum over all requests; None without any, or if the server left it out of
    one.
    """
    values = [getattr(sample, name) for sample in done]
    return sum(values) if values and all(isinstance(value, int) for value in values) else None


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum of the known values; None if there are none."""
    known = _known(values)
    if not known:
        return None
    marks = np.percentile(known, QUANTILES)
    return {
        "mean": float(np.mean(known)),
        **{f"p{mark}": float(value) for mark, value in zip(QUANTILES, marks, strict=True)},
        "max": float(np.max(known)),
    }


def curve(values: Sequence[float | None]) -> list[float]:
    """Return percentiles 0, 2, 4 ... 100 of the known values."""
    known = _known(values)
    return [float(value) for value in np.percentile(known, _CURVE)] if known else []


def summary(
    asked: Mapping[str, Any],
    model: str,
    runs: Sequence[LevelRun],
    promises: Mapping[str, float],
    notes: Sequence[str],
    *,
    is_stopped: bool,
) -> dict[str, Any]:
    """Return the object for bench.json. `asked`: its first fields, the options of the command."""
    return {
        **asked,
        "model": model,
        "slo_s": dict(promises),
        "is_stopped": is_stopped,
        "notes": list(notes),
        "levels": [level_summary(run, promises) for run in runs],
    }
