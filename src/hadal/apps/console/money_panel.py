"""Console panel of money: income, cost and tokens in the ledger, by hour, model and tenant."""

from __future__ import annotations

from typing import Any

from nicegui import ui

from hadal.apps.console import charts, figures
from hadal.apps.console.charts import AMBER, GREEN, GREY, TEAL
from hadal.apps.console.series import Series
from hadal.apps.console.widgets import Chart, empty_note
from hadal.gateway.desk.frames import ConsoleFrame

_MAX_ROWS = 50
"""Maximum number of rows per table; the command `hadal report` prints all."""


class MoneyPanel:
    """Panel with requests, cache hits, tokens, cost and income, by model, tenant and hour."""

    def __init__(self) -> None:
        self._facts = ui.html("", sanitize=False)
        with ui.element("div").classes("h-grid") as self._grid:
            self._earned = Chart("Income and cost", "Dollars per hour.")
            self._tokens = Chart("Tokens", "Per hour.")
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
        """Update the panel."""
        money = frame.money
        total = money.get("hour")
        for element in (self._grid, *self._tables):
            element.set_visibility(bool(total))
        if not total:
            self._facts.set_content(
                empty_note(
                    frame,
                    "No ledger",
                    str(money.get("problem") or "")
                    or "Set url in the [ledger] table to record the tokens, cost and income"
                    " of every answer.",
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
                "A node serves several tenants at once. Its cost, unused time included, is divided in"
                " proportion to the work done for each."
            )
        elif frame.place:
            said = "A simulation records only sums, so there is no cost per tenant."
        else:
            said = (
                "There are too many requests to show costs per tenant here: use `hadal"
                " report --tenant`."
            )
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
            ("Margin", figures.percent(total["margin_percent"]), "(income - cost) / cost"),
            ("Tokens in", figures.number(total["tokens_in"]), f"{hit} from cache"),
            ("Tokens out", figures.number(total["tokens_out"]), f"{speed} tokens/s per user"),
        )
    )


def _money_table(lines: list[dict[str, Any]], by: str) -> str:
    is_by_tenant = by == "tenant"
    heads = [by, "requests", "tokens in", "from cache", "tokens out", "income", "cost", "margin"]
    rows = []
    for line in lines[:_MAX_ROWS]:
        # Cost of an hour, or of a model with its own units.
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
    more = f'<p class="h-note">{left:,} more rows: hadal report --by {by}.</p>' if left > 0 else ""
    return (
        figures.table([*heads, "refused"] if is_by_tenant else heads, rows) + more
        if rows
        else figures.empty("No requests yet", "Requests of the last 24 hours are shown here.")
    )


def _of_tenant(line: dict[str, Any]) -> tuple[float | None, float | None]:
    """Return cost and margin of a tenant; None if its use of the nodes was not computed."""
    if "cost_used_usd" not in line:
        return None, None
    cost = line["cost_used_usd"] + line["cost_idle_usd"]
    return cost, 100 * (line["income_usd"] / cost - 1) if cost else None
