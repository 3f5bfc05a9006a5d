"""The console page: what the feed brings, in six views of which one is open. Only that one is brought
up to date.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Protocol

from nicegui import ui

from hadal.apps.console import charts, figures
from hadal.apps.console.charts import AMBER, GREEN, GREY, TEAL, Options
from hadal.apps.console.feed import Feed, Watcher
from hadal.apps.console.series import Series
from hadal.apps.console.shell import Door, TopBar, head
from hadal.core.config import ROLES
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.overview import LayerMove, Overview
from hadal.gateway.desk.frames import ConsoleFrame
from hadal.gateway.desk.trace import TraceReply
from hadal.overlap.trace import covered_share, duration_s, shares
from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.process.status import ProcessStatus, Status, wrong_nodes
from hadal.runtime.topology import CONSOLE, unit_and_rank

_NODE_RANKS = 8
"""Ranks that stand together where a server does not say how many a node has."""
_MAX_ROWS = 50
"""Of a table: who looks for more asks the command that prints them all."""
_STATE_WORDS = {
    "queued": "wait",
    "prefilling": "prompts computed",
    "transferring": "handed over",
    "decoding": "being answered",
    "retrying": "tried again",
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


class Panel(Protocol):
    """One view of the console."""

    def show(self, frame: ConsoleFrame, series: Series) -> None: ...


class Chart:
    """A titled chart. The page's script draws it, and only while it is in view: as a property of the
    element ECharts would read its options through Vue's proxies, which takes longer than drawing.
    """

    def __init__(self, title: str, note: str = "", classes: str = "") -> None:
        with ui.element("section").classes(f"h-panel {classes}"):
            ui.html(f"<h2>{title}</h2>")
            if note:
                ui.label(note).classes("h-note")
            self._chart = ui.echart({}).classes("h-chart")
        self._client = ui.context.client
        self._drawn = ""

    def show(self, options: Options) -> None:
        """Draw this from now on."""
        text = json.dumps(options)
        if text != self._drawn:
            self._drawn = text
            self._client.run_javascript(f"hadal.chart({self._chart.id}, {text})")


class HeatMap:
    """A map of loads by layer, drawn by the page's script: ECharts would take seconds for as many
    cells as a fleet has.
    """

    def __init__(self, title: str, note: str, column: str, most: float) -> None:
        self._most = most
        with ui.element("section").classes("h-panel"):
            ui.html(f"<h2>{title}</h2>")
            ui.label(note).classes("h-note")
            self._canvas = ui.element("canvas").classes("h-heat")
            self._canvas.props(f'data-column="{column}" data-most="{most:g}"')
            ui.html(
                f'<div class="h-heat-foot"><span>a row is a layer, a column {column}</span>'
                f'<span>nothing<i class="h-ramp"></i>{most:g} times the mean</span></div>'
            )
        self._client = ui.context.client
        self._drawn = ""

    def show(self, rows: Sequence[Sequence[float]]) -> None:
        """Draw this from now on."""
        num_columns, cells = charts.heat(rows, self._most)
        if cells != self._drawn:
            self._drawn = cells
            self._client.run_javascript(f'hadal.heat({self._canvas.id}, {num_columns}, "{cells}")')


class DeploymentMap:
    """Every unit with its ranks, and the processes beside them. Only what changed is sent."""

    def __init__(self) -> None:
        self._box = ui.element("div")
        self._names: list[tuple[str, list[str]]] = []
        self._parts: dict[str, tuple[ui.html, ui.html]] = {}

    def show(self, overview: Overview, status: Status | None) -> None:
        """Bring it up to date."""
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
    """What is up, how much is asked, how long it takes."""

    def __init__(self) -> None:
        self._facts = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Deployment</h2>")
            self._cluster = ui.label("").classes("h-note")
            self._map = DeploymentMap()
        with ui.element("div").classes("h-grid h-grid-four"):
            self._rates = Chart("Tokens per second", "Prompts taken in, answers made.")
            self._states = Chart("Requests", "Where they are now.")
            self._first = Chart("First token, ms", "Half, 95 and 99 of 100 take less.")
            self._per = Chart("Each token, ms", "Between one and the next of an answer.")
            self._cache = Chart("Prompt tokens per second", "By where they were found.")
            self._kv = Chart("KV memory in use, %", "What requests and caches hold.")
            self._balance = {
                role: Chart(f"Balance of {role}", "1: all ranks have the same to do.")
                for role in ROLES
            }

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Bring it up to date."""
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
                for word, key in (("half", "p50"), ("95 %", "p95"), ("99 %", "p99"))
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
                "tokens/s" if series.last("rate out") is not None else "measured in a moment",
            ),
            (
                "Requests",
                figures.number(running),
                f"{figures.number(states.get('queued', 0))} wait",
            ),
            (
                "First token",
                figures.milliseconds(series.last("first_token p95")),
                "95 of 100 come sooner",
            ),
            (
                "KV memory",
                figures.percent(100 * used / all_blocks if all_blocks else None),
                f"{figures.number(all_blocks)} blocks of {BLOCK_TOKENS} tokens",
            ),
            (
                "From cache",
                figures.percent(100 * totals.tokens_hit / answered if answered else None),
                "of all prompts' tokens",
            ),
            (
                "Margin, 24 h",
                figures.percent(total.get("margin_percent")),
                f"{figures.dollars(total.get('income_usd'))} earned",
            ),
        )
    )


def _cluster(status: Status | None) -> str:
    """The nodes of a cluster by how they are, and how far a rollout is. Empty: there is neither."""
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
            + (f", {rollout.num_failed} starts came to nothing" if rollout.num_failed else "")
        )
    return " · ".join(said)


def _units_by_role(overview: Overview, status: Status | None) -> list[tuple[str, list[str]]]:
    """What there is to show: processes beside units, then the units of each role by number."""
    processes = status.processes if status is not None else {}
    units = {
        unit_and_rank(name)[0] for name, process in processes.items() if process.role in ROLES
    } | {unit for some in overview.snapshot.role_to_units.values() for unit in some}
    found = [("front", [name for name, process in processes.items() if process.role not in ROLES])]
    for role in ROLES:
        of_role = [unit for unit in units if unit.startswith(f"{role}-")]
        found.append((role, sorted(of_role, key=lambda unit: int(unit.rsplit("-", 1)[-1]))))
    return [(role, names) for role, names in found if names]


def _units(overview: Overview, status: Status | None, min_ranks: int = 1) -> list[str]:
    """Those of so many ranks at least, up or not, by role and number."""
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
        note = "rests" if leader is not None and leader.phase == ProcessPhase.RESTING else "not up"
    else:
        share = report.num_blocks_used / report.num_blocks if report.num_blocks else 0.0
        note = f"{report.num_requests:,} requests · {share:.0%} KV"
        if report.step_ms and report.idle_s < 10:
            note += f" · {figures.milliseconds(report.step_ms)} a step"
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


class Picker:
    """Buttons of which one is chosen."""

    def __init__(self, choose: Callable[[str], None]) -> None:
        self._choose = choose
        self._box = ui.element("div").classes("h-picker").props('role="tablist"')
        self._labels: dict[str, str] = {}
        self.chosen = ""

    def offer(self, names: Sequence[str], labels: Sequence[str] = ()) -> None:
        """What can be chosen now; the first is, if what was is not among them."""
        name_to_label = dict(zip(names, labels or names, strict=True))
        if list(name_to_label.items()) == list(self._labels.items()):
            return
        self._labels = name_to_label
        if self.chosen not in names:
            self.chosen = names[0] if names else ""
        self._draw()

    def _draw(self) -> None:
        self._box.clear()
        with self._box:
            for name, label in self._labels.items():
                button = ui.element("button").on("click", lambda name=name: self._pick(name))
                if name == self.chosen:
                    button.classes("h-picked")
                with button:
                    ui.label(label)

    def _pick(self, name: str) -> None:
        self.chosen = name
        self._draw()
        self._choose(name)


class ExpertsPanel:
    """Where a unit's experts lie, what they bear, and what was moved."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        with ui.element("div").classes("h-row-of"):
            self._units = Picker(self._watch)
        self._nothing = ui.html("", sanitize=False)
        self._body = ui.element("div").classes("h-stack")
        with self._body:
            self._ranks = HeatMap(
                "Load of each rank, layer by layer",
                "Tokens that its experts got lately. Where a row is uneven, ranks wait for the warmest.",
                "a rank",
                2.0,
            )
            self._experts = HeatMap(
                "Load of each expert",
                "Before it is shared out: the busiest have copies on several ranks.",
                "an expert",
                4.0,
            )
            with ui.element("section").classes("h-panel"):
                ui.html("<h2>Moves</h2>")
                ui.label(
                    "A layer is placed anew where that saves more time than it takes."
                    " Balance is what both placements would make of the tokens of now."
                ).classes("h-note")
                self._moves = Picker(lambda name: self._show_move())
                self._move = ui.html("", sanitize=False)
        self._last: dict[str, LayerMove] = {}

    def _watch(self, unit: str) -> None:
        self._watcher.experts = {unit} if unit else set()

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Bring it up to date."""
        overview = frame.overview
        if overview is None:
            return
        wide = _units(overview, frame.status, min_ranks=2)
        self._units.offer(wide)
        self._watch(self._units.chosen)
        self._body.set_visibility(bool(wide))
        if not wide:
            self._nothing.set_content(
                figures.empty(
                    "Each unit is one rank here",
                    "It holds all experts, so there is nothing to place. With ranks = 4 in the"
                    " deployment's [decode] table they are spread, and this page shows how.",
                )
            )
            return
        found = overview.experts.get(self._units.chosen)
        self._body.set_visibility(found is not None)
        if found is None:
            self._nothing.set_content(_nothing_of(self._units.chosen, frame, "It is asked."))
            return
        self._nothing.set_content("")
        self._ranks.show(found.rank_loads)
        self._experts.show(found.expert_loads)
        self._last = {str(move.number): move for move in reversed(found.moves)}
        self._moves.offer(
            list(self._last),
            [f"layer {move.layer}, step {move.step_id:,}" for move in self._last.values()],
        )
        self._show_move()

    def _show_move(self) -> None:
        move = self._last.get(self._moves.chosen)
        if move is None:
            self._move.set_content(
                figures.empty(
                    "Nothing has been moved yet",
                    "Moves come when enough tokens were counted and some ranks had more than others.",
                )
            )
            return
        self._move.set_content(
            figures.facts(
                (
                    ("Balance before", f"{move.balance_before:.3f}", "as the experts lay"),
                    ("after", f"{move.balance_after:.3f}", "as they lie now"),
                    ("Copies moved", str(move.num_moved), f"in layer {move.layer}"),
                )
            )
            + figures.placement(move.before, move.after)
        )


class StepsPanel:
    """What a unit does in a step: both halves of its tokens, and what was hidden."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        with ui.element("div").classes("h-row-of"):
            self._units = Picker(self._watch)
            self._ranks = Picker(lambda rank: self._draw())
        self._facts = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>One step</h2>")
            ui.label(
                "Two halves of a step's tokens take turns: while one is on its way to its experts,"
                " the other is computed. What is left of waiting is not hidden."
            ).classes("h-note")
            ui.html(
                '<div class="h-legend"><i class="h-k0"></i>first half<i class="h-k1"></i>second half'
                '<i class="h-kw"></i>waits</div>'
            )
            self._whole = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>One layer of it</h2>")
            self._layer = ui.html("", sanitize=False)
        self._trace: TraceReply | None = None

    def _watch(self, unit: str) -> None:
        self._watcher.traced = {unit} if unit else set()
        if self._trace is not None and self._trace.unit != unit:
            self._trace = None

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Bring it up to date."""
        if frame.overview is None:
            return
        self._units.offer(_units(frame.overview, frame.status))
        unit = self._units.chosen
        self._watch(unit)
        trace = frame.traces.get(unit)
        if trace is not None and trace.steps and trace.steps[-1].events:
            self._trace = trace
        if self._trace is None:
            self._facts.set_content("")
            self._layer.set_content("")
            self._whole.set_content(
                _nothing_of(
                    unit,
                    frame,
                    "A unit without work takes no steps. Ask the model something, and the next one is"
                    " shown here.",
                )
            )
        self._draw()

    def _draw(self) -> None:
        if self._trace is None:
            return
        step = self._trace.steps[-1]
        found = {str(share.rank): share for share in shares(step.events)}
        self._ranks.offer(list(found), [f"rank {rank}" for rank in found])
        rank = int(self._ranks.chosen)
        covered = covered_share(step.events)
        exposed_s = sum(share.exposed_s for share in found.values()) / len(found)
        self._facts.set_content(
            figures.facts(
                (
                    ("Step", f"{step.step_id:,}", step.schedule),
                    (
                        "Took",
                        figures.milliseconds(duration_s(step.events) * 1e3),
                        "first to last op",
                    ),
                    ("Tokens", f"{step.num_tokens:,}", f"in {step.num_micro_batches} part(s)"),
                    (
                        "Hidden",
                        figures.percent(100 * covered if covered is not None else None),
                        "of the time on the way" if covered is not None else "nothing travelled",
                    ),
                    ("Waited", figures.milliseconds(exposed_s * 1e3), "mean of the ranks"),
                )
            )
        )
        mine = [event for event in step.events if event.rank == rank]
        begin_s = min(event.start_s for event in mine)
        self._whole.set_content(
            figures.timeline(mine, rank, begin_s, max(event.end_s for event in mine))
        )
        layers = sorted({event.layer for event in mine if event.lane == "link"}) or sorted(
            {event.layer for event in mine}
        )
        of_layer = [event for event in mine if event.layer == layers[len(layers) // 2]]
        self._layer.set_content(
            figures.timeline(
                mine,
                rank,
                min(event.start_s for event in of_layer),
                max(event.end_s for event in of_layer),
            )
        )


def _nothing_of(unit: str, frame: ConsoleFrame, why: str) -> str:
    """What is said where nothing of a unit is there; `why`: if it is up and live."""
    overview = frame.overview
    is_up = overview is not None and any(
        unit in units for units in overview.snapshot.role_to_units.values()
    )
    if frame.place:
        why = "The recording has some units' experts and steps, not all."
    elif not is_up:
        why = "It is not up."
    return figures.empty(f"Nothing of {unit} yet", why)


def _none(frame: ConsoleFrame, title: str, text: str) -> str:
    """What is said where there is nothing of what the server's own host alone knows."""
    if frame.status is None:
        title = "Known on the server's host alone"
        text = "hadal console, run on the host of the server, shows it."
    return figures.empty(title, text)


class FleetPanel:
    """Demand and forecast, how many units there are, and why."""

    def __init__(self) -> None:
        self._facts = ui.html("", sanitize=False)
        self._body = ui.element("div").classes("h-grid")
        with self._body:
            self._charts = {
                role: Chart(f"Demand for {role}", "What was asked, and what is expected.")
                for role in ROLES
            }
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Decisions</h2>")
            self._changes = ui.html("", sanitize=False)

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Bring it up to date."""
        fleet = frame.fleet
        self._body.set_visibility(fleet is not None)
        if fleet is None:
            self._facts.set_content("")
            self._changes.set_content(
                _none(
                    frame,
                    "The number of units is fixed",
                    'With mode = "auto" in the [fleet] table, units come when more is asked for'
                    " than they can take, and go when they are not needed. Each decision is told here.",
                )
            )
            return
        items = [("Nodes", f"{fleet.num_nodes:,}", f"of {fleet.num_nodes_max:,}")]
        for role, seen in fleet.roles.items():
            items.append(
                (f"{role.capitalize()} units", f"{seen.num_wanted}", figures.spread(seen.states))
            )
            self._charts[role].show(
                charts.demand(
                    seen.times_s,
                    seen.rates,
                    fleet.now_s,
                    seen.ahead_s,
                    seen.forecast,
                    seen.unit_rate * seen.num_wanted,
                )
            )
        self._facts.set_content(figures.facts(items))
        rows = [
            (
                charts.moment(change.at_s, fleet.now_s),
                str(change.prefill),
                str(change.decode),
                change.why,
            )
            for change in reversed(fleet.changes)
        ]
        now = f'<p class="h-note">Last: {escape(fleet.why or "none yet")}</p>'
        self._changes.set_content(
            now + figures.table(("time", "prefill", "decode", "why"), rows[:40], num_text=4)
            if rows
            else now
            + figures.empty("Nothing has changed", "As many units are there as at the beginning.")
        )


class MoneyPanel:
    """The ledger: what was asked, found, made, paid and earned."""

    def __init__(self) -> None:
        self._facts = ui.html("", sanitize=False)
        with ui.element("div").classes("h-grid") as self._grid:
            self._earned = Chart("Income and cost", "Of each hour, in dollars.")
            self._tokens = Chart("Tokens", "Of each hour.")
        with ui.element("section").classes("h-panel") as models:
            ui.html("<h2>Models</h2>")
            self._models = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel") as tenants:
            ui.html("<h2>Tenants</h2>")
            self._shared = ui.label().classes("h-note")
            self._tenants = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel") as by_hour:
            ui.html("<h2>Hours</h2>")
            self._hours = ui.html("", sanitize=False)
        self._tables = models, tenants, by_hour

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Bring it up to date."""
        money = frame.money
        total = money.get("hour")
        for element in (self._grid, *self._tables):
            element.set_visibility(bool(total))
        if not total:
            self._facts.set_content(
                _none(
                    frame,
                    "No ledger",
                    str(money.get("problem") or "")
                    or "Give the [ledger] table a url, and every answer's tokens, cost and income"
                    " are written there.",
                )
            )
            return
        self._facts.set_content(_money_facts(total, "" if frame.place else ", 24 h"))
        hours = [hour for hour in total["hours"] if hour["requests"] or hour["cost_usd"]]
        labels = [hour["hour"][11:16] for hour in hours]
        self._earned.show(
            charts.bars(
                labels,
                {
                    "income": [h["income_usd"] for h in hours],
                    "cost": [h["cost_usd"] for h in hours],
                },
                (TEAL, AMBER),
            )
        )
        self._tokens.show(
            charts.bars(
                labels,
                {
                    "in, from cache": [h["tokens_hit"] for h in hours],
                    "in, computed": [h["tokens_miss"] for h in hours],
                    "out": [h["tokens_out"] for h in hours],
                },
                (GREEN, GREY, TEAL),
            )
        )
        if "cost_used_usd" in money["tenant"]:
            said = (
                "A node works for several tenants at once. Its cost is shared by what it computed for"
                " each, and what nobody used in the same proportion."
            )
        elif frame.place:
            said = "A simulation keeps sums, which say of no tenant what it cost."
        else:
            said = "Of so many requests, `hadal report --tenant` says what each tenant cost."
        self._shared.set_text(said)
        for element, by in ((self._models, "model"), (self._tenants, "tenant")):
            lines = sorted(money[by][f"{by}s"], key=lambda line: -line["income_usd"])
            element.set_content(_money_table(lines, by))
        named = [{**hour, "hour": hour["hour"][:16].replace("T", " ")} for hour in hours]
        self._hours.set_content(_money_table(named[::-1], "hour"))


def _money_facts(total: dict[str, Any], when: str) -> str:
    hit, speed = figures.percent(total["hit_percent"]), figures.number(total["tokens_per_s_user"])
    nodes = figures.number(total["nodes_mean"])
    return figures.facts(
        (
            (
                f"Income{when}",
                figures.dollars(total["income_usd"]),
                f"{total['requests']:,} requests",
            ),
            ("Cost", figures.dollars(total["cost_usd"]), f"{nodes} nodes on average"),
            ("Margin", figures.percent(total["margin_percent"]), "income over cost, less one"),
            ("Tokens in", figures.number(total["tokens_in"]), f"{hit} from cache"),
            ("Tokens out", figures.number(total["tokens_out"]), f"{speed} tokens/s per user"),
        )
    )


def _money_table(lines: list[dict[str, Any]], by: str) -> str:
    is_by_tenant = by == "tenant"
    heads = [by, "requests", "tokens in", "from cache", "tokens out", "income", "cost", "margin"]
    rows = []
    for line in lines[:_MAX_ROWS]:
        # Of an hour, or of a model, whose units serve no other.
        own = line["cost_usd"], line["margin_percent"]
        cost, margin = _of_tenant(line) if is_by_tenant else own
        rows.append(
            [
                str(line[by]),
                f"{line['requests']:,}",
                figures.number(line["tokens_in"]),
                figures.percent(line["hit_percent"]),
                figures.number(line["tokens_out"]),
                figures.dollars(line["income_usd"]),
                figures.dollars(cost),
                figures.percent(margin),
                *([f"{line['requests_refused']:,}"] if is_by_tenant else []),
            ]
        )
    left = len(lines) - len(rows)
    more = f'<p class="h-note">And {left:,} more: hadal report --by {by}.</p>' if left > 0 else ""
    return (
        figures.table([*heads, "refused"] if is_by_tenant else heads, rows) + more
        if rows
        else figures.empty("Nobody asked yet", "Requests of the last 24 hours stand here.")
    )


def _of_tenant(line: dict[str, Any]) -> tuple[float | None, float | None]:
    """Cost and margin, as far as it was asked who used the nodes' time."""
    if "cost_used_usd" not in line:
        return None, None
    cost = line["cost_used_usd"] + line["cost_idle_usd"]
    return cost, 100 * (line["income_usd"] / cost - 1) if cost else None


class ProblemsPanel:
    """What ended and was started again, and the last warnings and errors."""

    def __init__(self) -> None:
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Now</h2>")
            self._now = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Ended, and why</h2>")
            self._ends = ui.html("", sanitize=False)
        with ui.element("section").classes("h-panel"):
            ui.html("<h2>Warnings and errors</h2>")
            self._lines = ui.html("", sanitize=False)

    def show(self, frame: ConsoleFrame, series: Series) -> None:
        """Bring it up to date."""
        status = frame.status
        said = [frame.problem] if frame.problem else []
        if frame.overview is not None:
            said += [f"{name} is missing." for name in frame.overview.missing]
        if status is not None:
            said += wrong_nodes(status)
            said += [
                f"{name} is {process.phase}"
                + (f": {process.last_end}." if process.last_end else ".")
                for name, process in status.processes.items()
                if process.phase not in (ProcessPhase.READY, ProcessPhase.RESTING)
                and name != CONSOLE
            ]
        self._now.set_content(
            figures.table(("",), [(text,) for text in dict.fromkeys(said[:40])])
            if said
            else figures.empty(
                "All is well",
                "Every process that is wanted works."
                if status is not None
                else "Nothing is missing, as far as the gateway tells.",
            )
        )
        ends = [
            (
                charts.moment(end.unix_s, frame.unix_s),
                end.name,
                end.reason,
                "asked to" if end.is_asked else "",
            )
            for end in reversed(status.ends if status is not None else ())
        ]
        self._ends.set_content(
            figures.table(("time", "process", "how", ""), ends, num_text=4)
            if ends
            else _none(
                frame,
                "Nothing has ended",
                "A process that dies is started again, and told of here.",
            )
        )
        lines = [
            (charts.moment_of(line.time, frame.unix_s), line.process, line.level.lower(), line.text)
            for line in reversed(frame.lines)
        ]
        self._lines.set_content(
            figures.table(("time", "process", "", "what"), lines, num_text=4)
            if lines
            else _none(
                frame,
                "None",
                "What processes warn of is gathered here; hadal logs has all they say.",
            )
        )


class ConsolePage:
    """One open console."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._panel: Panel | None = None
        self._shown_s = 0.0
        """The time of what is shown."""

    async def build(self) -> None:
        """Make the page, and fill it when the browser is there."""
        head("Hadal console")
        self._bar = TopBar("console")
        self._body = ui.element("main").classes("h-console")
        client = ui.context.client
        await client.connected(timeout=30.0)
        await self._bar.remember()
        door = Door(
            "console",
            "The console shows what all tenants do together, so it opens with a key that has the"
            " right to operate.",
            self._feed.source.check,
        )
        with self._body:
            await door.open(self._body, self._enter)

    async def _enter(self, key: str) -> None:
        self._bar.show_key(key)
        self._watcher = Watcher(key, self._show, self._leave)
        with ui.element("div").classes("h-tabs").props('role="tablist"'):
            self._tabs = {}
            for name in _PANELS:
                button = ui.element("button").on("click", lambda name=name: self._open(name))
                button.props('role="tab"')
                with button:
                    ui.label(name)
                self._tabs[name] = button
            self._said = ui.label("").classes("h-updated")
        self._problem = ui.label("").classes("h-problem")
        self._problem.set_visibility(False)
        self._content = ui.element("div").classes("h-content")
        self._open("Overview")
        client = ui.context.client
        client.on_delete(lambda: self._feed.forget(self._watcher))
        self._feed.watch(self._watcher)

    def _open(self, name: str) -> None:
        for other, tab in self._tabs.items():
            tab.classes(add="h-tab-here") if other == name else tab.classes(remove="h-tab-here")
        self._content.clear()
        self._watcher.experts, self._watcher.traced = set(), set()
        with self._content:
            self._panel = _PANELS[name](self._watcher)
        if self._feed.last is not None:
            self._show(self._feed.last)

    def _show(self, frame: ConsoleFrame) -> None:
        with self._body:
            if frame.overview is not None:
                self._bar.model.set_text(frame.place or frame.overview.model)
            self._problem.set_text(frame.problem)
            self._problem.set_visibility(bool(frame.problem))
            if frame.overview is not None or frame.place:
                self._shown_s = frame.unix_s if frame.overview is None else frame.overview.unix_s
            if self._shown_s:
                said = "" if frame.place else "as of "
                self._said.set_text(f"{said}{charts.clock(self._shown_s)} UTC")
            if self._panel is not None:
                self._panel.show(frame, self._feed.series)
            # What the tests time: everything of this frame was sent before it.
            ui.run_javascript("window.hadalFrames = (window.hadalFrames || 0) + 1")

    def _leave(self, reason: str) -> None:
        """Show nothing any more but why: not even tabs, which would show what others still see."""
        self._panel = None
        self._body.clear()
        with self._body:
            ui.label(reason).classes("h-problem")


_PANELS: dict[str, Callable[[Watcher], Panel]] = {
    "Overview": lambda watcher: OverviewPanel(),
    "Experts": ExpertsPanel,
    "Steps": StepsPanel,
    "Fleet": lambda watcher: FleetPanel(),
    "Money": lambda watcher: MoneyPanel(),
    "Problems": lambda watcher: ProblemsPanel(),
}


def add_console(feed: Feed) -> None:
    """Serve the console at `/console`."""

    @ui.page("/console")
    async def console() -> None:
        await ConsolePage(feed).build()
