"""A page parsed with html.parser, independently of its writer: its text, tags, tables and the
figures of its charts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html.parser import HTMLParser
from typing import Any

from plotly.offline import get_plotlyjs

from hadal.lab.simulate.page import report_html

VOID = {"meta", "br", "hr"}
PLOTLY = get_plotlyjs()


class Page(HTMLParser):
    """A parsed page; raises if a tag does not close the open one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.style = ""
        self.scripts: list[str] = []
        self.shown: list[str] = []
        """Ids of charts, and "table" for each table, in the order of the page."""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "script":
            self.scripts.append("")
        if tag == "table" or found.get("class") == "chart":
            self.shown.append(found.get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            self.style += data
            return
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += data
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> dict[str, Any]:
        """Return the charts' figures; fail on NaN and infinity, which JSON does not have."""
        found = json.loads(self.scripts[1], parse_constant=lambda said: [][len(said)])
        assert isinstance(found, dict)
        return found

    def num(self, tag: str, class_: str | None = None) -> int:
        return sum(
            name == tag and (class_ is None or class_ in (attrs.get("class") or "").split())
            for name, attrs in self.tags
        )

    def row(self, first: str) -> list[str]:
        """Return the first row with this text in its first cell."""
        return next(row for row in self.rows if row and row[0] == first)


def text_of(result: Mapping[str, Any]) -> str:
    """Return a result's report as HTML without plotly's own script, which it must have once."""
    parts = report_html(result).split(PLOTLY)
    assert len(parts) == 2
    return "".join(parts)
