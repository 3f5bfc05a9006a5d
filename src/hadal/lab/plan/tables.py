"""Terminal output of `hadal plan`: the best plans, the first one's simulation, and alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hadal.lab.sim.plan.measure import FleetDay, Measured
from hadal.lab.sim.plan.plan import DeploymentPlan
from hadal.lab.sim.plan.rows import Row, why
from hadal.lab.sim.plan.search import Search
from hadal.policy.slo import MEAN


def show(
    console: Console,
    search: Search,
    plans: Sequence[DeploymentPlan],
    rows: Sequence[Row],
    notes: Sequence[str],
    day: FleetDay,
    num_verify: int,
) -> None:
    """Print the whole result of a search."""
    best = plans[0]
    traffic, num_tried = best.traffic, sum(found.num_tried for found in search.found)
    console.print(Text(f"{traffic.name}: {best.slo}", style="bold"))
    console.print(
        f"[dim]{traffic.requests_per_s:,.4g} requests/s on average, {traffic.peak:.2f}x"
        f" that at the peak; {traffic.tokens_in:,.0f} tokens in"
        f" ({traffic.cached_share:.1%} cached), {traffic.tokens_out:,.0f} out."
        f" {num_tried:,} deployments priced.[/dim]"
    )
    console.print(_plans(search, plans))
    console.print(_promise(search, best, num_verify))
    console.print(
        f"The day with autoscaling, simulated as a continuous flow: {day.nodes_mean:.1f} nodes on"
        f" average, {day.nodes_peak} at most, {day.tokens_per_s_user:.1f} tokens/s per"
        f" user, longest wait {day.wait_s_max:.1f} s."
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
            text = "met the SLO in the simulator" + (
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
        f"Output tokens of the first plan cost ${plans[0].usd_per_million_out:.3f} per"
        " million, prefill included."
    )
    return table


def _promise(search: Search, best: DeploymentPlan, num_verify: int) -> Table | Text:
    """Return a table of the SLO, the priced and the simulated latencies; a sentence if the best
    plan was not simulated or no plan met the SLO.
    """
    if not num_verify:
        return Text(
            "Not simulated (use --verify 1): according to the step model alone, the plan"
            " meets the SLO.",
            "yellow",
        )
    measured = next(
        (seen for plan, seen in search.verified if plan is best or str(plan) == str(best)), None
    )
    if measured is None:
        worst = search.refuted[-1].why if search.refuted else "none was simulated"
        return Text(f"No plan met the SLO in the simulator; the last one: {worst}.", "yellow")
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
        f"Simulated: {measured.num_prefill} prefill + {measured.num_decode} decode units"
        f" at {measured.requests_per_s:,.0f} requests/s; prefill had"
        f" {measured.prefill_load:.0%} and decode {measured.decode_load:.0%} of the load"
        " planned for the peak"
    )


def _tried(rows: Sequence[Row]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        title="Alternatives",
        title_justify="left",
    )
    table.add_column("instead")
    table.add_column("value")
    table.add_column("$ a day", justify="right", no_wrap=True)
    table.add_column("extra cost, or why it was not chosen", ratio=1)
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
