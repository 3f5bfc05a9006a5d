"""Ledger of a simulated day: requests and units as facts in the server's own format, and their
report.

Requests are the day's sample (lab/sim/day/demand) with drawn lengths and the token times of their
hour; counters are multiplied by the sampling rate. Units are the nodes that the fluid day owned,
minute by minute. So the code that counts, prices and reports real serving is used for a simulated
day too. Simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from hadal.core.arrays import Floats
from hadal.core.config import DECODE, PREFILL
from hadal.core.facts import NodesFact
from hadal.lab.perf.hardware import hardware_named
from hadal.lab.sim.day.clock import hour_index
from hadal.lab.sim.day.demand import DayDemand
from hadal.lab.sim.day.fluid_day import STEP_S, FluidResult
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.workload import MODEL_NAMES
from hadal.policy.demand import DAY_S
from hadal.stats.prices import micro_usd
from hadal.stats.report import HOUR, Report, report
from hadal.stats.tally import Columns, Tally

BEGIN_S = datetime(2025, 2, 27, 4, tzinfo=UTC).timestamp()
"""Unix time of second 0 of the published day: noon in Beijing."""
BEIJING_S = 8 * 3600
_US = 1_000_000


def day_tally(study: Study, load: DayDemand, first_token_s: Floats, token_s: Floats) -> Tally:
    """Return the priced tally of requests completed within the day. `first_token_s`, `token_s`:
    TTFT and TPOT by hour of arrival [24], seconds.
    """
    came = load.workload
    hour = hour_index(came.arrival_s)
    first_s = came.arrival_s + first_token_s[hour]
    end_s = first_s + (came.tokens_out - 1) * token_s[hour]
    today = (end_s >= 0) & (end_s < DAY_S)
    tokens_in, tokens_out = came.tokens_in[today], came.tokens_out[today]
    hit = np.rint(load.tokens_hit[today]).astype(np.int64)
    first_us, end_us = (
        np.rint((BEGIN_S + column[today]) * _US).astype(np.int64) for column in (first_s, end_s)
    )
    tally = Tally()
    tally.add_columns(
        Columns(
            completed_us=end_us,
            first_token_us=first_us,
            last_token_us=end_us,
            tokens_hit=hit,
            tokens_miss=tokens_in - hit,
            tokens_out=tokens_out,
            kv_tokens=tokens_out * tokens_in + tokens_out * (tokens_out - 1) // 2,
            model_index=came.model[today].astype(np.int64),
            tenant_index=np.zeros(len(hit), np.int64),
            models=MODEL_NAMES,
        )
    )
    return tally.times(load.scale).priced(study.model_prices())


def nodes_facts(study: Study, fluid: FluidResult) -> list[NodesFact]:
    """Return the day's units. A role's k-th unit is up while the fleet owns nodes for k units."""
    rules, gpus = study.rules(), hardware_named(study.hardware).gpus_per_node
    facts = []
    for role, nodes, size in (
        (PREFILL, fluid.prefill_nodes, rules.prefill.unit_nodes),
        (DECODE, fluid.decode_nodes, rules.decode.unit_nodes),
    ):
        for index in range(int(nodes.max()) // size):
            for first, last in _runs(nodes >= (index + 1) * size):
                facts.append(
                    NodesFact(
                        f"{role}-{index}",
                        f"{first}",
                        role,
                        size * gpus,
                        gpus,
                        BEGIN_S + first * STEP_S,
                        BEGIN_S + last * STEP_S,
                        study.hardware,
                        micro_usd(study.gpu_hour_usd),
                    )
                )
    return facts


def day_report(tally: Tally, nodes: Sequence[NodesFact], by: str = HOUR) -> Report:
    """Return the report of the day from noon to noon in Beijing, by hour unless `by` is given."""
    begin_us = round(BEGIN_S * _US)
    return report(
        tally, nodes, begin_us, begin_us + round(DAY_S) * _US, by=by, utc_offset_s=BEIJING_S
    )


def _runs(is_up: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_up, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
