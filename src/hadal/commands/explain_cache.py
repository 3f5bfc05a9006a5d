"""`hadal explain-cache`: why a request's prompt was not found in the cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from urllib.parse import quote

import msgspec
import typer

from hadal.gateway.api.shapes import CacheExplanation, CacheReport, CacheReports
from hadal.gateway.desk.fetch import FetchError, fetch_page

_PATH = "/v1/explain_cache"


def print_explanations(request_id: str, url: str, api_key: str, *, as_json: bool) -> None:
    """Print the explanation of one request, or with an empty id a table of the latest ones. Raises
    FetchError.
    """
    path = f"{_PATH}/{quote(request_id, safe='')}" if request_id else _PATH
    body = fetch_page(url, path, api_key=api_key, query={})
    try:
        reports = (
            [msgspec.json.decode(body, type=CacheReport)]
            if request_id
            else msgspec.json.decode(body, type=CacheReports).data
        )
    except msgspec.DecodeError as error:
        raise FetchError(f"{url} did not return an explanation ({error}).") from error
    if as_json:
        typer.echo(body.decode())
    elif request_id:
        typer.echo("\n\n".join(described(each) for each in reports[0].prompts))
    else:
        typer.echo("\n".join(lines_of(reports)))


def described(explanation: CacheExplanation) -> str:
    """Return an explanation as lines for the terminal."""
    lines = [f"{explanation.reason}: {explanation.detail}"]
    lines.append(found(explanation))
    if explanation.position is not None:
        lines += [
            f"this prompt     {explanation.text!r}",
            f"nearest prompt  {explanation.kept_text!r}",
        ]
    return "\n".join(lines)


def found(explanation: CacheExplanation) -> str:
    """Return the numbers of blocks as a sentence."""
    return (
        f"{explanation.found_blocks} of {explanation.reusable_blocks} blocks found, each of"
        f" {explanation.block_tokens} tokens; {explanation.common_tokens} tokens are shared with the"
        " nearest prompt."
    )


def place_of(explanation: CacheExplanation) -> str:
    """Return the first difference as a few words; empty if there is none."""
    if explanation.position is None:
        return ""
    place = explanation.message
    return f"{explanation.position}" if place is None else f"{explanation.position}, {place.name}"


def lines_of(reports: list[CacheReport]) -> list[str]:
    """Return a line for each prompt of the requests, below a line of heads."""
    head = ("time UTC", "request", "found", "reason", "differs at")
    rows: list[tuple[str, ...]] = [(*head, "tenant") if _has_tenants(reports) else head]
    for report in reports:
        for each in report.prompts:
            at = time.strftime("%H:%M:%S", time.gmtime(report.unix_s))
            blocks = f"{each.found_blocks} of {each.reusable_blocks}"
            row = (at, report.id, blocks, each.reason, place_of(each), report.tenant)
            rows.append(row[: len(rows[0])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _has_tenants(reports: Sequence[CacheReport]) -> bool:
    """Return True if the requests are of several tenants, as an operator sees them."""
    return len({report.tenant for report in reports}) > 1
