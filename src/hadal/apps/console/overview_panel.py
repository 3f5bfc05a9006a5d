"""Console panel with the deployment's current state and a map of its units."""

from __future__ import annotations

from collections import Counter

from nicegui import ui

from hadal.apps.console import charts, figures
from hadal.apps.console.charts import GREEN, GREY, TEAL
from hadal.apps.console.series import Series
from hadal.apps.console.widgets import Chart
from hadal.core.config import ROLES
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.overview import Overview
from hadal.gateway.desk.frames import ConsoleFrame
from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.process.status import ProcessStatus, Status
from hadal.runtime.topology import unit_and_rank

_NODE_RANKS = 8
"""Ranks per node on the map, if the server does not report them."""
_STATE_WORDS = {
    "queued": "wait",
    "prefilling": "prefilling",
    "transferring": "KV transfer",
    "decoding": "decoding",
    "retrying": "retried",
}
_OBJECTIVES = {
    "attention": "attention",
    "tokens": "tokens",
    "time": "time",
    "kv": "KV cache",
    "requests": "requests",
    "experts": "experts",
    "experts_worst": "experts, worst layer",
}


class DeploymentMap:
    """Map of every unit with its ranks, and of the other processes. Only changes are sent."""

    def __init__(self) -> None:
        self._box = ui.element("div")
        self._names: list[tuple[str, list[str]]] = []
        self._parts: dict[str, tuple[ui.html, ui.html]] = {}

    def show(self, overview: Overview, status: Status | None) -> None:
        """Update the map."""
        roles = _units_by_role(overview, status)
        if roles != self._names:
            self._names = roles
            self._build()
        processes = status.processes if status is not None else {}
        for role, names in roles:
            for name in names:
                shown = (
                    _unit_figure(name, role, overview, processes)
                    if role in ROLES
                    else _process_figure(name, processes[name])
                )
                for part, text in zip(self._parts[name], shown, strict=True):
                    if part.content != text:
                        part.set_content(text)

    def _build(self) -> None:
        self._box.clear()
        self._parts.clear()
        with self._box:
            for role, names in self._names:
                with ui.element("div").classes("h-role"):
                    ui.html(f"<h3>{role.capitalize()}</h3>")
                    with ui.element("div").classes("h-units"):
                        for name in names:
                            with ui.element("div").classes("h-unit"):
                                parts = ui.html("", sanitize=False), ui.html("", sanitize=False)
                                self._parts[name] = parts


class OverviewPanel:
    """Panel with running units, load and latencies."""

    def __init__(self) -> None:
        self._facts = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Deployment</h2>")
            self._cluster = ui.label("").classes("h-note")
            self._map = DeploymentMap()
        with ui.element("div").classes("h-grid h-grid-four"):
            self._rates = Chart("Tokens per second", "Tokens of prompts and of answers.")
            self._states = Chart("Requests", "Requests by state.")
            self._first = Chart("Time to first token, ms", "p50, p95 and p99.")
            self._per = Chart(
                "Time per output token, ms", "p50, p95 and p99 of the time between tokens."
            )
            self._cache = Chart("Prompt tokens per second", "By source: memory, disk or computed.")
            self._kv = Chart("KV memory in use, %", "Blocks of requests and cached blocks.")
            self._balance = {
                role: Chart(f"Balance of {role}", "1: all ranks have equal load.") for role in ROLES
            }

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Update the panel."""
        overview = frame.overview
        if overview is None:
            return
        self._facts.set_content(_facts(overview, series, frame))
        self._cluster.set_text(_cluster(frame.status))
        self._cluster.set_visibility(bool(self._cluster.text))
        self._map.show(overview, frame.status)
        times = list(series.times_s)
        rates = series.of("rate ")
        self._rates.show(
            charts.lines(times, {"prompts": rates.get("in", []), "answers": rates.get("out", [])})
        )
        states = series.of("state ")
        named = {
            word: states[state]
            for state, word in _STATE_WORDS.items()
            if any(states.get(state, ()))
        }
        self._states.show(
            charts.lines(times, named or {"none now": [0.0] * len(times)}, stacked=True)
        )
        for chart, name in ((self._first, "first_token "), (self._per, "per_token ")):
            of_name = series.of(name)
            quantiles = {
                word: of_name.get(key, [])
                for word, key in (("p50", "p50"), ("p95", "p95"), ("p99", "p99"))
            }
            chart.show(charts.lines(times, quantiles))
        found = series.of("cache ")
        tiers = {name: found.get(name, []) for name in ("memory", "disk", "computed")}
        self._cache.show(charts.lines(times, tiers, stacked=True, colors=(TEAL, GREEN, GREY)))
        self._kv.show(charts.lines(times, series.of("kv ")))
        for role, chart in self._balance.items():
            balance = {
                _OBJECTIVES.get(objective, objective): values
                for objective, values in series.of(f"balance {role} ").items()
            }
            chart.show(charts.lines(times, balance, most=1.0))


def _facts(overview: Overview, series: Series, frame: ConsoleFrame) -> str:
    snapshot = overview.snapshot
    states, totals = snapshot.state_to_count, snapshot.totals
    num_units = sum(len(units) for units in snapshot.role_to_units.values())
    num_wanted = sum(overview.units_wanted.values())
    num_ranks = sum(num for units in snapshot.role_to_units.values() for num in units.values())
    running = sum(states.get(state, 0) for state in ("prefilling", "transferring", "decoding"))
    blocks = [report for report in snapshot.unit_to_report.values() if report.num_blocks]
    used = sum(report.num_blocks_used for report in blocks)
    all_blocks = sum(report.num_blocks for report in blocks)
    answered = totals.tokens_hit + totals.tokens_miss
    total = frame.money.get("hour", {})
    return figures.facts(
        (
            (
                "Server",
                overview.status.capitalize(),
                f"{max(num_units, num_wanted)} units, {num_ranks:,} ranks"
                if not overview.missing
                else f"missing: {', '.join(overview.missing[:3])}",
            ),
            (
                "Answers",
                f"{figures.number(series.last('rate out'))}",
                "tokens/s" if series.last("rate out") is not None else "not measured yet",
            ),
            (
                "Requests",
                figures.number(running),
                f"{figures.number(states.get('queued', 0))} queued",
            ),
            (
                "TTFT p95",
                figures.milliseconds(series.last("first_token p95")),
                "time to first token",
            ),
            (
                "KV memory",
                figures.percent(100 * used / all_blocks if all_blocks else None),
                f"{figures.number(all_blocks)} blocks of {BLOCK_TOKENS} tokens",
            ),
            (
                "From cache",
                figures.percent(100 * totals.tokens_hit / answered if answered else None),
                "of all prompt tokens",
            ),
            (
                "Margin, 24 h",
                figures.percent(total.get("margin_percent")),
                f"{figures.dollars(total.get('income_usd'))} earned",
            ),
        )
    )


def _cluster(status: Status | None) -> str:
    """Return the nodes per state and a rollout's progress; empty if there is neither."""
    if status is None:
        return ""
    said = []
    if status.nodes:
        phases = Counter(node.phase for node in status.nodes)
        said.append(f"{len(status.nodes)} nodes: {figures.spread(phases)}")
    rollout = status.rollout
    if rollout is not None and rollout.num_left:
        said.append(
            f"Rollout {rollout.number}: {rollout.num_units - rollout.num_left} of"
            f" {rollout.num_units} units are replaced"
            + (f", {rollout.num_failed} starts failed" if rollout.num_failed else "")
        )
    return " · ".join(said)


def _units_by_role(overview: Overview, status: Status | None) -> list[tuple[str, list[str]]]:
    """Return [(role, names)]: processes outside units as "front", then units by role and number."""
    processes = status.processes if status is not None else {}
    units = {
        unit_and_rank(name)[0] for name, process in processes.items() if process.role in ROLES
    } | {unit for some in overview.snapshot.role_to_units.values() for unit in some}
    found = [("front", [name for name, process in processes.items() if process.role not in ROLES])]
    for role in ROLES:
        of_role = [unit for unit in units if unit.startswith(f"{role}-")]
        found.append((role, sorted(of_role, key=lambda unit: int(unit.rsplit("-", 1)[-1]))))
    return [(role, names) for role, names in found if names]


def unit_names(overview: Overview, status: Status | None, min_ranks: int = 1) -> list[str]:
    """Return units with at least `min_ranks` ranks, up or not, by role and number."""
    return [
        unit
        for role, names in sorted(_units_by_role(overview, status))
        if role in ROLES and overview.ranks_wanted.get(role, 1) >= min_ranks
        for unit in names
    ]


def _process_figure(name: str, process: ProcessStatus) -> tuple[str, str]:
    return figures.unit_head(name, _life(process), _phase(process.phase)), ""


def _unit_figure(
    unit: str, role: str, overview: Overview, processes: dict[str, ProcessStatus]
) -> tuple[str, str]:
    snapshot = overview.snapshot
    report = snapshot.unit_to_report.get(unit)
    is_up = unit in snapshot.role_to_units.get(role, {})
    leader = processes.get(unit)
    num_ranks = overview.ranks_wanted.get(role, 1)
    absent = set(report.absent) if report is not None else set()
    states, hosts = [], []
    num_again = max(0, leader.num_starts - 1) if leader is not None else 0
    for rank in range(num_ranks):
        process = processes.get(f"{unit}.{rank}") if num_ranks > 1 else leader
        phase = _phase(process.phase) if process is not None else "up" if is_up else "rests"
        states.append("down" if phase == "up" and (rank in absent or not is_up) else phase)
        hosts.append(process.host if process is not None else "")
        if process is not None and process is not leader:
            num_again += max(0, process.num_starts - 1)
    if report is None:
        note = "rests" if leader is not None and leader.phase == ProcessPhase.RESTING else "down"
    else:
        share = report.num_blocks_used / report.num_blocks if report.num_blocks else 0.0
        note = f"{report.num_requests:,} requests · {share:.0%} KV"
        if report.step_ms and report.idle_s < 10:
            note += f" · {figures.milliseconds(report.step_ms)} per step"
    if named := sorted({host for host in hosts if host}):
        note += f" · on {named[0]}" if len(named) == 1 else f" · on {len(named)} hosts"
    if num_again:
        note += f" · started again {num_again} ×"
    state = "up" if is_up and not absent else "rests" if set(states) == {"rests"} else "starting"
    per_node = overview.ranks_per_node.get(role, _NODE_RANKS)
    return figures.unit_head(unit, note, state), figures.rank_map(states, hosts, per_node)


def _life(process: ProcessStatus) -> str:
    words = [f"pid {process.pid}"] if process.pid else []
    if process.num_starts > 1:
        words.append(f"started again {process.num_starts - 1} ×")
    return " · ".join(words)


def _phase(phase: str) -> str:
    return {
        ProcessPhase.READY: "up",
        ProcessPhase.STARTING: "starting",
        ProcessPhase.WAITING: "down",
        ProcessPhase.RESTING: "rests",
    }.get(ProcessPhase(phase), "down")
