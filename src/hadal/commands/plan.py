"""The search of `hadal plan`, from what was asked to what is printed and written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hadal.core.config import to_toml
from hadal.core.documents import MAX_TABLE_BYTES, MAX_TOML_BYTES, parse_toml, read_text, shown
from hadal.core.errors import ConfigError
from hadal.core.model_config import read_model_config
from hadal.perf.hardware import HARDWARE, hardware_named
from hadal.perf.rent import rents
from hadal.perf.roofline import FP4, FP8
from hadal.perf.shapes import DEEPSEEK_V3
from hadal.policy.capacity import MEAN, parse_slo
from hadal.progress import Bar
from hadal.sim.plan.day import DayRules
from hadal.sim.plan.deploy import deployment_of, heading_of, notes_of
from hadal.sim.plan.measure import FleetDay, Measured, fluid_of
from hadal.sim.plan.plan import DeploymentPlan, HardwarePlans, SearchOptions, price_hardware
from hadal.sim.plan.rows import Row, dimension_rows, what_if_rows, why
from hadal.sim.plan.search import Search, impossible, too_large
from hadal.sim.plan.traces import azure, mooncake
from hadal.sim.plan.traffic import Traffic, traffic_from, traffic_of
from hadal.sim.plan.units import Pricing

# What `hadal plan` reads and writes: traffic, prices, deployments, plan.json.


def read_traffic(path: Path | None) -> Traffic:
    """A table (.toml) or a trace: Mooncake's JSON lines (.jsonl, .jsonl.gz) or Azure's CSV. None:
    DeepSeek's day.

    Raises ValueError that says what is wrong with the file.
    """
    if path is None:
        return Traffic(kv_length=4989.0)
    name = path.name.lower()
    limit = MAX_TOML_BYTES if name.endswith(".toml") else MAX_TABLE_BYTES
    text = read_text(path, "traffic", limit, hint="--example-traffic prints one to begin with.")
    try:
        if name.endswith(".toml"):
            return traffic_of(parse_toml(text, path.name))
        if name.endswith((".jsonl", ".jsonl.gz")):
            return traffic_from(mooncake(text.splitlines()), path.name)
        if name.endswith((".csv", ".csv.gz")):
            return traffic_from(azure(text.splitlines()), path.name)
    except ValueError as error:
        raise ConfigError(f"{path}: {str(error).removeprefix(f'{path.name}: ')}") from error
    raise ValueError(
        f"{path}: .toml (--example-traffic), Mooncake's .jsonl or .jsonl.gz, or Azure's .csv is"
        " needed."
    )


def read_prices(given: Sequence[str]) -> dict[str, float]:
    """`h20=1.2` each. Raises ValueError."""
    found = {}
    for part in (part for text in given for part in text.split(",")):
        name, _, usd = part.partition("=")
        try:
            found[name.strip().lower()] = float(usd)
        except ValueError:
            raise ValueError(
                f"--price {shown(part)}: dollars per GPU-hour are needed, such as h20=1.2."
            ) from None
    return found


def check_folder(folder: Path) -> None:
    """Raises ValueError if plans could not be written there; makes nothing."""
    try:
        there = next(
            path
            for path in (folder, *folder.absolute().parents)
            if path.exists() or path.is_symlink()
        )
        if not there.is_dir():
            raise ValueError(f"--out {folder} cannot be written: {there} is not a folder.")
        # Root may write where the bits say nobody may; a file system that is mounted to be read
        # says no to all.
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"--out {folder} cannot be written: nothing can be made in {there}.")
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written: {(error.strerror or '').lower()}."
        ) from error


def write_plans(
    folder: Path, plans: Sequence[DeploymentPlan], report: dict[str, Any], model: str
) -> list[Path]:
    """A deployment for each plan, best first, and plan.json. Raises ValueError if the folder cannot
    be written.
    """
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, plan in enumerate(plans, 1):
            prefill, decode = plan.prefill.num_ranks, plan.decode.num_ranks
            path = folder / f"{number}_{plan.hardware.name}_ep{prefill}_ep{decode}.toml"
            path.write_text(
                to_toml(deployment_of(plan, model=model), heading_of(plan), notes_of(plan)),
                encoding="utf-8",
            )
            paths.append(path)
        (folder / "plan.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written: {(error.strerror or '').lower()}."
        ) from error
    return [*paths, folder / "plan.json"]


def plan_object(plan: DeploymentPlan) -> dict[str, Any]:
    """A plan for programs: units last in every name."""
    decode, prefill = plan.decode_unit, plan.prefill_unit
    return {
        "hardware": plan.hardware.name,
        "usd_per_gpu_hour": plan.rent.usd,
        "cost_usd_day": plan.cost_usd,
        "usd_per_million_tokens_out": plan.usd_per_million_out,
        "gpu_hours_day": plan.gpu_hours,
        "nodes_mean": plan.nodes_mean,
        "nodes_peak": plan.nodes_peak,
        "prefill": {
            "ranks": plan.prefill.num_ranks,
            "redundant_experts": prefill.model.num_redundant,
            "experts_dtype": prefill.model.expert_dtype,
            "chunk_tokens": prefill.chunk_tokens,
            "units_peak": plan.prefill.num_peak,
            "units_least": plan.prefill.num_least,
            "use": plan.prefill.use,
            "tokens_per_s": plan.prefill.unit_tokens_per_s,
            "step_s": prefill.step_s,
            "ttft_s": prefill.ttft_s,
        },
        "decode": {
            "ranks": plan.decode.num_ranks,
            "redundant_experts": decode.model.num_redundant,
            "experts_dtype": decode.model.expert_dtype,
            "mtp_tokens": decode.mtp_tokens,
            "batch": decode.batch,
            "is_memory_bound": decode.is_memory_bound,
            "units_peak": plan.decode.num_peak,
            "units_least": plan.decode.num_least,
            "use": plan.decode.use,
            "tokens_per_s": plan.decode.unit_tokens_per_s,
            "tpot_s": decode.tpot_s,
            "schedule": decode.price.schedule.name,
        },
        "extrapolated": list(plan.extrapolated),
    }


def row_object(row: Row) -> dict[str, Any]:
    return {
        "dimension": row.dimension,
        "value": row.value,
        "cost_usd_day": row.cost_usd,
        "why": row.why,
        "plan": None if row.plan is None else plan_object(row.plan),
    }


def measured_object(plan: DeploymentPlan, measured: Measured) -> dict[str, Any]:
    """What the simulator saw, beside the plan that it saw."""
    ttft, tpot = measured.ttft_s, measured.tpot_s
    return {
        "plan": str(plan),
        "prefill_units": measured.num_prefill,
        "decode_units": measured.num_decode,
        "requests_per_s": measured.requests_per_s,
        "prefill_load": measured.prefill_load,
        "decode_load": measured.decode_load,
        "is_full_load": measured.is_full,
        "seconds": measured.seconds,
        "requests": measured.num_requests,
        "ttft_s": {"mean": ttft.mean, "p50": ttft.p50, "p90": ttft.p90, "p99": ttft.p99},
        "tpot_s": {"mean": tpot.mean, "p50": tpot.p50, "p90": tpot.p90, "p99": tpot.p99},
        "requests_per_rank": measured.requests_per_rank,
        "kv_length_mean": measured.kv_length,
        "problem": measured.problem(plan),
    }


# What `hadal plan` found, for a terminal: the best plans, what the simulator says of them, why
# others lose.


def show(
    console: Console,
    search: Search,
    plans: Sequence[DeploymentPlan],
    rows: Sequence[Row],
    notes: Sequence[str],
    day: FleetDay,
    num_verify: int,
) -> None:
    """Print everything."""
    best = plans[0]
    traffic, num_tried = best.traffic, sum(found.num_tried for found in search.found)
    console.print(Text(f"{traffic.name}: {best.slo}", style="bold"))
    console.print(
        f"[dim]{traffic.requests_per_s:,.4g} requests/s on average, {traffic.peak:.2f} times that"
        f" at the peak; {traffic.tokens_in:,.0f} tokens in ({traffic.cached_share:.1%} cached),"
        f" {traffic.tokens_out:,.0f} out. {num_tried:,} deployments priced.[/dim]"
    )
    console.print(_plans(search, plans))
    console.print(_promise(search, best, num_verify))
    console.print(
        f"The day under the fleet's own role, as a fluid: {day.nodes_mean:.1f} nodes on average,"
        f" {day.nodes_peak} at most, {day.tokens_per_s_user:.1f} tokens/s to a user, longest wait"
        f" {day.wait_s_max:.1f} s."
    )
    console.print(_tried(rows))
    rent = best.rent
    console.print(
        f"[dim]A GPU-hour of {best.hardware.name}: ${rent.usd:g}, {rent.source} {rent.as_of}[/dim]".rstrip()
    )
    for note in notes:
        console.print(f"[yellow]note[/yellow] {note}")
    for flag in best.extrapolated:
        console.print(f"[yellow]extrapolated[/yellow] {flag}")


def _plans(search: Search, plans: Sequence[DeploymentPlan]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("")
    table.add_column("deployment", ratio=1)
    for name in ("units", "nodes", "peak", "$ a day"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, plan in enumerate(plans, 1):
        unit, prefill, decode = plan.decode_unit, plan.prefill, plan.decode
        what = Text(
            f"{plan.hardware.name}  prefill {plan.prefill_unit}; decode {unit}, {unit.batch}"
            " requests a GPU"
        )
        if number > 1:
            what.append(f"\n{why(plan, plans[0])}", "dim")
        elif search.is_verified(plan):
            is_full = next(seen.is_full for one, seen in search.verified if str(one) == str(plan))
            text = "kept its promise in the simulator" + (
                "" if is_full else ", at less than its planned load"
            )
            what.append(f"\n{text}", "green" if is_full else "yellow")
        table.add_row(
            str(number),
            what,
            f"{_range(prefill.num_least, prefill.num_peak)} P\n"
            f"{_range(decode.num_least, decode.num_peak)} D",
            f"{plan.nodes_mean:.1f}",
            f"{plan.nodes_peak:g}",
            f"{plan.cost_usd:,.0f}",
        )
    table.caption = (
        f"Output tokens of the first cost ${plans[0].usd_per_million_out:.3f} a million, prefill"
        " included."
    )
    return table


def _promise(search: Search, best: DeploymentPlan, num_verify: int) -> Table | Text:
    """The promise, what the step model says, and what the simulator saw."""
    if not num_verify:
        return Text(
            "Not simulated (--verify 1 does): the step model alone says that it keeps the promise.",
            "yellow",
        )
    measured = next(
        (seen for plan, seen in search.verified if plan is best or str(plan) == str(best)), None
    )
    if measured is None:
        worst = search.refuted[-1].why if search.refuted else "none was simulated"
        return Text(f"No plan kept its promise in the simulator; the last one: {worst}.", "yellow")
    slo = best.slo
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        title=_what(measured),
        title_justify="left",
    )
    table.add_column("")
    for name in ("promised", "priced", "simulated mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, promised, quantile, priced, seen, scale, unit in (
        (
            "TTFT",
            slo.ttft_s,
            slo.ttft_quantile,
            best.prefill_unit.ttft_s,
            measured.ttft_s,
            1.0,
            "s",
        ),
        (
            "TPOT",
            slo.tpot_s,
            slo.tpot_quantile,
            best.decode_unit.tpot_s,
            measured.tpot_s,
            1e3,
            "ms",
        ),
    ):
        of = "mean" if quantile == MEAN else f"p{100 * quantile:g}"
        table.add_row(
            name,
            f"{of} {promised * scale:.3g} {unit}",
            f"{priced * scale:.2f}",
            *(f"{value * scale:.2f}" for value in (seen.mean, seen.p50, seen.p90, seen.p99)),
        )
    return table


def _what(measured: Measured) -> str:
    return (
        f"Simulated: {measured.num_prefill} prefill + {measured.num_decode} decode units at"
        f" {measured.requests_per_s:,.0f} requests/s: prefill at {measured.prefill_load:.0%},"
        f" decode at {measured.decode_load:.0%} of the load planned for the peak"
    )


def _tried(rows: Sequence[Row]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        title="What was tried",
        title_justify="left",
    )
    table.add_column("instead")
    table.add_column("value")
    table.add_column("$ a day", justify="right", no_wrap=True)
    table.add_column("why not, or what it would bring", ratio=1)
    before = ""
    for row in rows:
        if before and row.dimension != before:
            table.add_section()
        cost = "-" if row.cost_usd is None else f"{row.cost_usd:,.0f}"
        table.add_row("" if row.dimension == before else row.dimension, row.value, cost, row.why)
        before = row.dimension
    return table


def _range(least: int, most: int) -> str:
    return str(most) if least == most else f"{least}-{most}"


@dataclass(frozen=True)
class PlanOptions:
    """The options of `hadal plan`, as they were given."""

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
    """Search, print, write. Raises ValueError, one line that says what to change."""
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
        advance("the day of its fleet", 0.0)
        day = fluid_of(best, np.random.default_rng(asked.seed))
        advance("what else was tried", 0.5)
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
    """All pairs of all hardware that has a price, and what is to be said of the rest."""
    promise, traffic, choice = parse_slo(asked.slo), read_traffic(asked.traffic), _choice(asked)
    rent_of = rents(read_prices(asked.prices))
    names = [name.strip() for name in asked.hardware.split(",") if name.strip()]
    wanted = list(dict.fromkeys(hardware_named(name) for name in names)) or list(HARDWARE.values())
    priced = [one for one in wanted if one.name in rent_of]
    notes = [
        f"{one.name} is left out: no trustworthy price of it was found. Give one with --price"
        f" {one.name}=DOLLARS."
        for one in wanted
        if one.name not in rent_of
    ]
    if not priced:
        raise ValueError(" ".join(notes))
    if choice.dtypes == (FP4,) and not any(one.fp4_flops for one in priced):
        raise ValueError(
            f"none of {', '.join(one.name for one in priced)} has FP4; fp4 runs on b200 and gb200."
        )
    shape = DEEPSEEK_V3 if asked.model is None else read_model_config(asked.model)
    if asked.mtp_tokens and not shape.num_nextn_predict_layers:
        raise ValueError(
            f"--mtp-tokens is {asked.mtp_tokens}, and the model in {asked.model} has no MTP module"
            " that could draft (num_nextn_predict_layers is 0). Leave it 0."
        )
    found: list[HardwarePlans] = []
    for done, one in enumerate(priced):
        advance(f"pricing {one.name}", done / len(priced))
        pricing = Pricing(one, shape, traffic, promise, asked.mtp_accept)
        found.append(price_hardware(pricing, rent_of[one.name], choice))
    search = Search(found)
    if not search.ranked():
        raise ValueError(f"nothing keeps {promise}. {impossible(found)}")
    if problem := too_large(search.ranked()[0]):
        raise ValueError(problem)
    return search, notes


def _choice(asked: PlanOptions) -> SearchOptions:
    if asked.experts not in (FP4, FP8):
        raise ValueError(f"--experts is {asked.experts!r}; fp8 or fp4.")
    if not asked.start_s < 86_400.0:
        raise ValueError(
            f"--start is {asked.start_s:g}; a unit that takes a day to start follows no day."
        )
    return SearchOptions(
        (asked.mtp_tokens,), (asked.experts,), DayRules(asked.is_static, asked.start_s)
    )


def _best(search: Search) -> DeploymentPlan:
    """The cheapest that kept its promise; where none was simulated, or none kept it, the cheapest
    by price.
    """
    return search.verified[0][0] if search.verified else search.ranked()[0]


def _rows(search: Search, best: DeploymentPlan) -> Iterator[Row]:
    """What was tried, beside the best: other hardware, every dimension, what could not be
    chosen.
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
