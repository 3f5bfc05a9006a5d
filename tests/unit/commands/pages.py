"""A page read back: its text, its tags, its tooltips, with html.parser, which knows nothing of how
it was made.
"""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "hr"}


class Page(HTMLParser):
    """Fails on tags that do not close what is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.titles: list[str] = []
        """Of shapes in charts: tooltips."""
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        if "svg" in self.open and self.open[-1] == "title":
            self.titles.append(data)
            return
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def num(self, tag: str, class_: str | None = None) -> int:
        return sum(
            name == tag and (class_ is None or class_ in (attrs.get("class") or "").split())
            for name, attrs in self.tags
        )

    def row(self, first: str) -> list[str]:
        """The first row whose first cell says this."""
        return next(row for row in self.rows if row and row[0] == first)
