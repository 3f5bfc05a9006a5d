"""`hadal report`: DeepSeek's published table, for the served requests in the gateway's ledger."""

from __future__ import annotations

import json
import re
import time

import typer
from rich.console import Console
from rich.markup import escape

from hadal.commands.report_tables import render
from hadal.core.errors import ConfigError
from hadal.runtime.ledger.address import ledger_url, shown
from hadal.runtime.ledger.store import LedgerWindow, Store
from hadal.stats.ledger import LedgerError
from hadal.stats.prices import BUCKET_S, ModelPrices, price_list
from hadal.stats.report import HOUR, TENANT, iso, report

_UNITS_S = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_MAX_S = 3660 * _UNITS_S["d"]
"""Longest time of a report in seconds: ten years."""


def run(
    *,
    last: str,
    by: str,
    as_json: bool,
    ledger: str,
    prices: str,
    is_utc: bool,
    has_uses: bool = False,
    now_s: float | None = None,
) -> None:
    """Print the report of the time span `last`. `prices`: price list that replaces the charged
    prices; empty: none. `has_uses`: report by tenant, with each tenant's share of GPU time.
    """
    if has_uses and by not in (HOUR, TENANT):
        raise ConfigError(f"--tenant groups by tenant, but --by is {by!r}; leave one of them out.")
    by = TENANT if has_uses else by
    now_s = time.time() if now_s is None else now_s
    offset_s = 0 if is_utc else time.localtime(now_s).tm_gmtoff // BUCKET_S * BUCKET_S
    to_us = int(now_s * 1e6) + 1
    from_us = to_us - seconds_of(last) * 1_000_000
    model_prices = ModelPrices(price_list(prices)) if prices else None
    url = ledger_url(ledger)
    if not url:
        raise LedgerError("the ledger is off. Name one with --ledger, or unset HADAL_LEDGER.")
    window = read(url, from_us, to_us, by, offset_s, has_spans=has_uses)
    tally = window.tally.priced(model_prices) if model_prices else window.tally
    made = report(
        tally,
        window.nodes,
        from_us,
        to_us,
        by=by,
        utc_offset_s=offset_s,
        details=window.details,
        spans=window.spans,
    )
    if as_json:
        typer.echo(json.dumps(made.as_json(), indent=2))
        return
    console = Console()
    console.print(render(made, f"Served in the last {last}"))
    if not made.total.counts.num_requests:
        console.print(_why_empty(window, offset_s))
    console.print(f"[dim]Ledger: {escape(shown(url))}[/dim]", highlight=False)


def read(
    url: str, from_us: int, to_us: int, by: str, utc_offset_s: int, *, has_spans: bool = False
) -> LedgerWindow:
    """Return a ledger's records between two times. Raises LedgerError, StoreDown and ValueError."""
    store = Store(url)
    try:
        return store.read(from_us, to_us, by=by, utc_offset_s=utc_offset_s, has_spans=has_spans)
    except LedgerError as error:
        raise LedgerError(
            f"{error} `hadal serve` creates one with its first request; to read another,"
            " use --ledger."
            if "there is no ledger" in str(error) or "holds no ledger" in str(error)
            else str(error)
        ) from None
    finally:
        store.close()


def seconds_of(text: str) -> int:
    """Return the seconds of "90m", "24h", "7d", "2w" or a number of hours. Raises ValueError."""
    found = re.fullmatch(r"([0-9]{1,6})\s*([mhdw]?)", text.strip().lower())
    if not found or not int(found[1]):
        raise ValueError(f"--last is {text!r}; write it like 90m, 24h, 7d or 2w.")
    seconds = int(found[1]) * _UNITS_S[found[2] or "h"]
    if seconds > _MAX_S:
        raise ValueError(f"--last is {text!r}; use at most {_MAX_S // _UNITS_S['d']}d.")
    return seconds


def _why_empty(window: LedgerWindow, offset_s: int) -> str:
    if window.last_completed_us is None:
        return "No request has ended yet. Send one, for example with `hadal chat`."
    return (
        "No request ended in this period; the last one ended at"
        f" {iso(window.last_completed_us, offset_s)}. Choose a longer period with --last."
    )
