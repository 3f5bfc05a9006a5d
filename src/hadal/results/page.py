"""Pages of results: tables, and the templates in `templates/` with filters that format numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from hadal.results.values import (
    compact,
    dollars,
    duration,
    hour_label,
    mapping,
    number,
    percent,
    plain,
)


@dataclass(frozen=True)
class Table:
    """Table with names in the first column and right-aligned figures in the others. Headings in
    `groups` span three columns each, up to the last column.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    groups: Sequence[str] = ()


@cache
def page_template(name: str) -> Template:
    """Return a page of templates/, with the filters that format numbers."""
    environment = Environment(
        loader=PackageLoader("hadal.results"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    written = (number, mapping, plain, compact, dollars, percent, duration, hour_label)
    environment.filters |= {function.__name__: function for function in written}
    return environment.get_template(name)
