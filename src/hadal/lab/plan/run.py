"""Run of `hadal plan`: reads the options, searches, prints and writes the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hadal.core.model_config import read_model_config
from hadal.lab.perf.hardware import HARDWARE, hardware_named
from hadal.lab.perf.rent import rents
from hadal.lab.perf.roofline import FP4, FP8
from hadal.lab.plan.files import (
    measured_object,
    plan_object,
    read_prices,
    read_traffic,
    row_object,
    write_plans,
)
from hadal.lab.plan.tables import show
from hadal.lab.sim.plan.day import DayRules
from hadal.lab.sim.plan.measure import fluid_of
from hadal.lab.sim.plan.plan import DeploymentPlan, HardwarePlans, SearchOptions, price_hardware
from hadal.lab.sim.plan.rows import Row, dimension_rows, what_if_rows, why
from hadal.lab.sim.plan.search import Search, impossible, too_large
from hadal.lab.sim.plan.units import Pricing
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.slo import parse_slo
from hadal.progress import Bar
from hadal.results.folder import check_folder


@dataclass(frozen=True)
class PlanOptions:
    """Options of `hadal plan`, as given by the user."""

    traffic: Path | None
    slo: str
    hardware: str
    prices: tuple[str, ...]
    mtp_tokens: int
    mtp_accept: float
    experts: str
    is_static: bool
    start_s: float
    num_verify: int
    top: int
    out: Path | None
    model: Path | None
    seed: int
    as_json: bool


def run(asked: PlanOptions) -> None:
    """Search, print and write. Raises ValueError that says in one line what to change."""
    if asked.out is not None:
        check_folder(asked.out)
    with Bar("hadal plan", 1.0) as bar:

        def advance(what: str, share: float) -> None:
            bar.update(what, done=share)

        search, notes = _priced(asked, advance)
        search.verify(
            asked.num_verify,
            np.random.default_rng(asked.seed),
            lambda plan, share: advance(f"simulating {plan}", share),
        )
        best = _best(search)
        advance("simulating its fleet's day", 0.0)
        day = fluid_of(best, np.random.default_rng(asked.seed))
        advance("comparing with other plans", 0.5)
        rows = list(_rows(search, best))
    plans = [best, *(plan for plan in search.ranked() if str(plan) != str(best))][: asked.top]
    report = _report(search, plans, rows, notes)
    report["fluid_day"] = {
        "nodes_mean": day.nodes_mean,
        "nodes_peak": day.nodes_peak,
        "tokens_per_s_user": day.tokens_per_s_user,
        "wait_s_max": day.wait_s_max,
    }
    model = str(asked.model.absolute()) if asked.model else ""
    paths = [] if asked.out is None else write_plans(asked.out, plans, report, model)
    if asked.as_json:
        print(json.dumps(report, indent=2))
        return
    console = Console(highlight=False)
    show(console, search, plans, rows, notes, day, asked.num_verify)
    for path in paths:
        console.print(f"Written: {path}", soft_wrap=True, markup=False)


def _priced(asked: PlanOptions, advance: Callable[[str, float], None]) -> tuple[Search, list[str]]:
    """Return the priced plans of all wanted hardware with a known rent, and notes on the hardware
    left out. Raises ValueError if no plan meets the SLO, the cheapest one needs too many nodes, or
    an option is impossible.
    """
    promise, traffic, choice = parse_slo(asked.slo), read_traffic(asked.traffic), _choice(asked)
    rent_of = rents(read_prices(asked.prices))
    names = [name.strip() for name in asked.hardware.split(",") if name.strip()]
    wanted = list(dict.fromkeys(hardware_named(name) for name in names)) or list(HARDWARE.values())
    priced = [one for one in wanted if one.name in rent_of]
    notes = [
        f"{one.name} is omitted: it has no reliable price. Give one with --price"
        f" {one.name}=DOLLARS."
        for one in wanted
        if one.name not in rent_of
    ]
    if not priced:
        raise ValueError(" ".join(notes))
    if choice.dtypes == (FP4,) and not any(one.fp4_flops for one in priced):
        raise ValueError(
            f"none of {', '.join(one.name for one in priced)} supports FP4; fp4 runs on"
            " b200 and gb200."
        )
    shape = DEEPSEEK_V3 if asked.model is None else read_model_config(asked.model)
    if asked.mtp_tokens and not shape.num_nextn_predict_layers:
        raise ValueError(
            f"--mtp-tokens is {asked.mtp_tokens}, but the model in {asked.model} has no"
            " MTP module (num_nextn_predict_layers is 0). Use 0."
        )
    found: list[HardwarePlans] = []
    for done, one in enumerate(priced):
        advance(f"pricing {one.name}", done / len(priced))
        pricing = Pricing(one, shape, traffic, promise, asked.mtp_accept)
        found.append(price_hardware(pricing, rent_of[one.name], choice))
    search = Search(found)
    if not search.ranked():
        raise ValueError(f"no plan meets {promise}. {impossible(found)}")
    if problem := too_large(search.ranked()[0]):
        raise ValueError(problem)
    return search, notes


def _choice(asked: PlanOptions) -> SearchOptions:
    if asked.experts not in (FP4, FP8):
        raise ValueError(f"--experts is {asked.experts!r}; use fp8 or fp4.")
    if not asked.start_s < 86_400.0:
        raise ValueError(f"--start is {asked.start_s:g}; it must be less than a day.")
    return SearchOptions(
        (asked.mtp_tokens,), (asked.experts,), DayRules(asked.is_static, asked.start_s)
    )


def _best(search: Search) -> DeploymentPlan:
    """Return the cheapest plan that met its SLO in the simulator; if none did, the cheapest one."""
    return search.verified[0][0] if search.verified else search.ranked()[0]


def _rows(search: Search, best: DeploymentPlan) -> Iterator[Row]:
    """Yield the alternatives to the best plan: other hardware, plans that failed in the simulator,
    every dimension, and options outside the search.
    """
    for one in search.found:
        plans = one.ranked()
        if one.pricing.hardware == best.hardware:
            continue
        name = one.pricing.hardware.name
        if not plans:
            yield Row("hardware", name, None, None, impossible([one]))
        else:
            yield Row("hardware", str(plans[0]), plans[0], plans[0].cost_usd, why(plans[0], best))
    yield from (
        Row("simulated", str(one.plan), one.plan, one.plan.cost_usd, one.why)
        for one in search.refuted
    )
    yield from dimension_rows(best, search.of(best))
    yield from what_if_rows(best, search.of(best))


def _report(
    search: Search, plans: Sequence[DeploymentPlan], rows: Sequence[Row], notes: Sequence[str]
) -> dict[str, Any]:
    first = plans[0]
    traffic = first.traffic
    return {
        "slo": str(first.slo),
        "num_tried": sum(found.num_tried for found in search.found),
        "traffic": {
            "name": traffic.name,
            "requests_per_s": traffic.requests_per_s,
            "tokens_in": traffic.tokens_in,
            "tokens_out": traffic.tokens_out,
            "cached_share": traffic.cached_share,
            "peak_over_mean": traffic.peak,
            "kv_length_mean": traffic.kv_length_mean,
        },
        "is_verified": search.is_verified(first),
        "plans": [plan_object(plan) for plan in plans],
        "simulated": [
            *(measured_object(plan, measured) for plan, measured in search.verified),
            *(measured_object(one.plan, one.measured) for one in search.refuted),
        ],
        "tried": [row_object(row) for row in rows],
        "notes": list(notes),
    }
