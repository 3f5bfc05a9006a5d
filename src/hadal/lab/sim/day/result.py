"""Result of a simulated day: the fluid day and the windows joined, through the ledger, as one value
and as JSON.

TPOT is the fluid's, corrected by the windows if there are any. TTFT comes from the windows; without
any, it is the workload's guess plus the fluid's longest wait of the hour. The number of nodes by
minute comes from the fluid. The load of units is given from both, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from hadal.core.arrays import Floats
from hadal.core.config import DECODE, PREFILL
from hadal.lab.sim.day.cache import KV_BYTES_TOKEN
from hadal.lab.sim.day.clock import hour_beijing
from hadal.lab.sim.day.curves import UnitCurves
from hadal.lab.sim.day.demand import DayDemand, generator
from hadal.lab.sim.day.fluid_day import FluidResult
from hadal.lab.sim.day.hour_window import HourWindow
from hadal.lab.sim.day.hours import Hour
from hadal.lab.sim.day.published import TOKENS_IN, TOKENS_OUT
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.day.tally import day_report, day_tally, nodes_facts
from hadal.lab.sim.expert_loads import ExpertRanks
from hadal.lab.sim.world.seen import Reading, quantiles
from hadal.stats.report import MODEL, Line, Report

PUBLISHED: dict[str, Any] = {
    "nodes_mean": 226.75,
    "nodes_peak": 278,
    "tokens_in": int(TOKENS_IN),
    "tokens_hit": 342_000_000_000,
    "hit_percent": 56.3,
    "tokens_out": int(TOKENS_OUT),
    "tokens_per_s_user": [20.0, 22.0],
    "kv_length_mean": 4989.0,
    "prefill_tokens_per_s_node": 73_700.0,
    "decode_tokens_per_s_node": 14_800.0,
    "cost_usd": 87_072.0,
    "income_usd": 562_027.0,
    "margin_percent": 545.0,
}
"""Published figures (DeepSeek-V3/R1 inference overview), 2025-02-27 12:00 to 02-28 12:00 in
Beijing. For comparison only: nothing is computed from them.
"""
TTFT_EDGES_S = np.geomspace(0.1, 100.0, 61)
TPOT_EDGES_S = np.arange(0.015, 0.1205, 0.0025)
FLAT = (
    "nodes_mean",
    "nodes_peak",
    "tokens_in",
    "tokens_hit",
    "tokens_out",
    "tokens_per_s_user",
    "kv_length_mean",
    "prefill_tokens_per_s_node",
    "decode_tokens_per_s_node",
    "cost_usd",
    "income_usd",
    "margin_percent",
    "hit_percent",
    "requests",
)
"""Keys of the figures of a day and of each alternative to it."""


@dataclass(frozen=True)
class DayResult:
    """Result of a study's day."""

    study: Study
    load: DayDemand
    experts: dict[str, ExpertRanks]
    """Role -> expert loads of ranks after placement."""
    curves: UnitCurves
    fluid: FluidResult
    windows: tuple[HourWindow | None, ...]
    """Window of each hour since second 0 [24]; None if the hour was not simulated."""
    report: Report
    """Report of the day by hour."""
    models: Report
    """Report of the day by model."""

    def flat(self) -> dict[str, Any]:
        """Return the day's figures: FLAT and the mean numbers of nodes by role."""
        total = self.report.total.as_json()
        found = {name: total[name] for name in FLAT}
        return {
            **found,
            "prefill_nodes_mean": float(self.fluid.prefill_nodes.mean()),
            "decode_nodes_mean": float(self.fluid.decode_nodes.mean()),
        }


def day_result(
    study: Study,
    load: DayDemand,
    experts: dict[str, ExpertRanks],
    curves: UnitCurves,
    fluid: FluidResult,
    windows: Sequence[HourWindow | None],
) -> DayResult:
    """Join the parts of a day. `windows`: 24, or empty."""
    windows = tuple(windows) or (None,) * 24
    first_token_s = _by_hour(windows, _first_token_s, _guess(study, fluid))
    fluid_s = np.array(
        [
            1.0 / hour.tokens_per_s_user if hour.tokens_per_s_user else 0.0
            for hour in fluid.day.hours
        ]
    )
    # A window covers only seconds: its ratio to the fluid at that moment corrects the whole hour.
    token_s = fluid_s * _by_hour(
        windows,
        lambda window: window.reading.decode.token_s / window.setting.token_s or None,
        np.ones(24),
    )
    tally, nodes = day_tally(study, load, first_token_s, token_s), nodes_facts(study, fluid)
    return DayResult(
        study,
        load,
        experts,
        curves,
        fluid,
        windows,
        day_report(tally, nodes),
        day_report(tally, nodes, MODEL),
    )


def result_json(result: DayResult) -> dict[str, Any]:
    """Return the content of result.json, without the alternatives and the elapsed time."""
    fluid, study = result.fluid, result.study
    hours = [
        _hour_json(
            index, result.report.lines[index], fluid.day.hours[index], result.windows[index], result
        )
        for index in range(24)
    ]
    arrived = result.load.tokens_in.repeat(60) / 3600.0
    return {
        **result.flat(),
        "hours": hours,
        "minutes": {
            "nodes": (fluid.prefill_nodes + fluid.decode_nodes).tolist(),
            "prefill_nodes": fluid.prefill_nodes.tolist(),
            "decode_nodes": fluid.decode_nodes.tolist(),
            "tokens_in_per_s": np.round(arrived).tolist(),
        },
        "models": [{"model": line.label, **line.as_json()} for line in result.models.lines],
        "curves": {
            "requests_per_rank": [at for at, _ in result.curves.decode],
            "tpot_s": [tpot_s for _, tpot_s in result.curves.decode],
            "prefill_tokens_per_s_unit": result.curves.prefill_tokens_per_s,
            "decode_tokens_per_s_unit": fluid.capacity[1],
            "placed": {role: experts.imbalance for role, experts in result.experts.items()},
        },
        "ttft_s": _distribution(
            [(window.reading.ttft_s, None) for window in result.windows if window], TTFT_EDGES_S
        ),
        "tpot_s": _distribution(
            [
                (window.reading.decode.seconds_K, window.reading.decode.tokens_K)
                for window in result.windows
                if window
            ],
            TPOT_EDGES_S,
        ),
        "ranks": _ranks_json(result),
        "published": PUBLISHED if _is_published(study) else {},
        "study": msgspec.to_builtins(study),
        "notes": _notes(result),
    }


def _hour_json(
    index: int, line: Line, hour: Hour, window: HourWindow | None, result: DayResult
) -> dict[str, Any]:
    found, middle = line.as_json(), result.fluid.middles[index]
    keys = (
        "nodes_mean",
        "requests",
        "tokens_in",
        "tokens_hit",
        "tokens_out",
        "income_usd",
        "cost_usd",
        "hit_percent",
    )
    return {
        "hour_beijing": hour_beijing(index),
        **{key: found[key] for key in keys},
        "prefill_nodes_mean": hour.prefill_nodes_mean,
        "decode_nodes_mean": hour.decode_nodes_mean,
        "fluid": {
            "tokens_per_s_user": middle.tokens_per_s_user,
            "requests_per_rank": middle.requests_per_rank,
            "prefill_use": middle.prefill_use,
            "wait_s_max": hour.wait_s_max,
        },
        "window": None if window is None else _window_json(window, result.curves),
    }


def _window_json(window: HourWindow, curves: UnitCurves) -> dict[str, Any]:
    reading = window.reading
    prefill, decode, seconds = reading.prefill, reading.decode, reading.end_s - reading.begin_s
    could = window.setting.units.prefill * curves.prefill_computed_per_s * seconds
    # Count arrived tokens, as the fluid does. Computed ones are too few: no prompt of a window had
    # chunks computed before its start, and the longest prompts take longer than a window.
    came = reading.tokens_arrived * (1.0 - window.hit_share)
    kv = [float(share.max() / share.mean()) for share in reading.kv_share.values() if share.any()]
    return {
        "prefill_units": window.setting.units.prefill,
        "decode_units": window.setting.units.decode,
        "seconds": seconds,
        "requests": reading.num_arrived,
        "failed": reading.num_failed,
        "tokens_per_s_user": 1.0 / decode.token_s if decode.token_s else None,
        "requests_per_rank": decode.requests_per_rank,
        "prefill_use": came / could,
        "prefill_computed_share": prefill.tokens / came if came else None,
        "kv_length_mean": decode.positions_per_token,
        "hit_percent": 100.0 * window.hit_share,
        "ttft_s": _percentiles(reading.ttft_s, None),
        "tpot_s": _percentiles(decode.seconds_K, decode.tokens_K),
        "kv_imbalance": float(np.mean(kv)) if kv else None,
        "request_imbalance": decode.tokens_imbalance,
        "prefill_imbalance": prefill.positions_imbalance,
        "expert_imbalance": {PREFILL: prefill.expert_imbalance, DECODE: decode.expert_imbalance},
        "disk_read_gb_per_s": reading.disk_tokens * KV_BYTES_TOKEN / 1e9 / seconds,
        "disk_wait_s": reading.disk_wait_s,
        "problems": list(window.problems),
    }


def _percentiles(values: Floats, weights: Floats | None) -> dict[str, float | None]:
    found = quantiles(values, (0.5, 0.9, 0.99), weights) if len(values) else [None] * 3
    return dict(zip(("p50", "p90", "p99"), found, strict=True))


def _distribution(
    parts: Sequence[tuple[Floats, Floats | None]], edges: Floats
) -> dict[str, Any] | None:
    """Return a histogram with percentiles over all windows; None if there is none. Windows are
    equally long, so each hour counts by its load.
    """
    if not parts:
        return None
    values = np.concatenate([values for values, _ in parts])
    weights = np.concatenate(
        [np.ones(len(values)) if weights is None else weights for values, weights in parts]
    )
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges, weights=weights)
    return {"edges": edges.tolist(), "counts": counts.tolist(), **_percentiles(values, weights)}


def _ranks_json(result: DayResult) -> dict[str, Any] | None:
    """Return the ranks of one unit per role in the busiest hour: means over its window, and for
    experts the rows of one micro-batch. None if no window has samples.
    """
    looked = [window for window in result.windows if window is not None and window.reading.kv_share]
    if not looked:
        return None
    window = max(looked, key=lambda window: window.reading.decode.requests_per_rank)
    unit = min(window.reading.kv_share)
    rng, prefill = generator(result.study, "ranks"), window.reading.prefill
    role_to_tokens = {
        DECODE: window.reading.decode.requests_per_rank * (1 + result.study.drafts),
        PREFILL: prefill.tokens / max(prefill.num_steps, 1.0) / result.study.prefill.ranks,
    }
    rows = {  # Per micro-batch (half a step): each token goes to 8 experts.
        role: result.experts[role].one_micro_batch(max(1.0, 4.0 * num_tokens), rng).tolist()
        for role, num_tokens in role_to_tokens.items()
    }
    return {
        "hour_beijing": hour_beijing(window.setting.index),
        "decode_unit": unit,
        **_prefill_ranks_json(window.reading),
        "kv_share": window.reading.kv_share[unit].tolist(),
        "requests": window.reading.requests[unit].tolist(),
        "decode_experts": rows[DECODE],
        "prefill_experts": rows[PREFILL],
    }


def _prefill_ranks_json(reading: Reading) -> dict[str, Any]:
    """Return the tokens/s of each rank in the first unit that prefilled, and the core attention of
    each rank over the mean of the ranks.
    """
    if not reading.prefill_tokens:
        return {"prefill_unit": None, "prefill_tokens": [], "prefill_attention": []}
    unit = min(reading.prefill_tokens)
    tokens, pairs = reading.prefill_tokens[unit], reading.prefill_pairs[unit]
    return {
        "prefill_unit": unit,
        "prefill_tokens": (tokens / (reading.end_s - reading.begin_s)).tolist(),
        "prefill_attention": (pairs / (pairs.mean() or 1.0)).tolist(),
    }


def _notes(result: DayResult) -> list[str]:
    notes = []
    late = max(hour.wait_s_max for hour in result.fluid.day.hours)
    if late > 60.0:
        notes.append(
            f"The fleet is too small at times: the longest wait in a queue is {late:,.0f} s."
        )
    if result.study.drafts:
        notes.append(
            f"Decode verifies {result.study.drafts} speculative token(s) per step with"
            f" acceptance {result.study.mtp_accept:g}. This was not published for that"
            " day; see docs/calibration.md."
        )
    if not any(result.windows):
        notes.append(
            "No window was simulated: speeds come from the fluid model, and times to the"
            " first token are rough estimates."
        )
    problems = sum(len(window.problems) for window in result.windows if window)
    if problems:
        notes.append(f"Ledgers of simulated units had {problems} problems: this is a bug in Hadal.")
    return notes


def _is_published(study: Study) -> bool:
    """Return True if the study is the published day, apart from seed, windows and cache sample."""
    usual = Study()
    return (
        replace(
            study,
            seed=usual.seed,
            window=usual.window,
            cache=replace(study.cache, sample=usual.cache.sample),
        )
        == usual
    )


def _guess(study: Study, fluid: FluidResult) -> Floats:
    """Return the guessed TTFT by hour [24], seconds, for a day without windows."""
    return np.array([study.workload.first_token_s + hour.wait_s_max for hour in fluid.day.hours])


def _first_token_s(window: HourWindow) -> float | None:
    """Return the mean TTFT of a window; None if it has no first token."""
    return float(window.reading.ttft_s.mean()) if len(window.reading.ttft_s) else None


def _by_hour(
    windows: Sequence[HourWindow | None],
    value: Callable[[HourWindow], float | None],
    otherwise: Floats,
) -> Floats:
    """Return a value per hour [24]: its window's, or interpolated linearly between windows. If no
    window has a value, return `otherwise`.
    """
    readings = [None if window is None else value(window) for window in windows]
    known = [(index, found) for index, found in enumerate(readings) if found is not None]
    if not known:
        return otherwise
    at, found_at = zip(*known, strict=True)
    return np.asarray(np.interp(np.arange(24), at, found_at))
