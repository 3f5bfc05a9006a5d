"""HTML and SVG as text that cannot be broken by what it says: whatever is not markup already is
escaped.

element("td", name, class_="number")      -> <td class="number">a &lt; b</td>
"""

from __future__ import annotations

from html import escape

VOID = frozenset({"meta", "br", "hr"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def element(tag: str, /, *children: object, **attributes: object) -> Html:
    """One element. `class_` is class, `http_equiv` is http-equiv; children and attributes that are
    None are left out.

    A float among the attributes is a coordinate and keeps two decimals.
    """
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in VOID:
        return Html(f"<{tag}{shown}>")
    return Html(f"<{tag}{shown}>{together(*children)}</{tag}>")


def together(*children: object) -> Html:
    """Children one after the other, without an element around them."""
    return Html(
        "".join(
            child if isinstance(child, Html) else escape(str(child), quote=False)
            for child in children
            if child is not None
        )
    )


def _shown(value: object) -> str:
    return coordinate(value) if isinstance(value, float) else str(value)


def coordinate(value: float) -> str:
    """At most two decimals, no trailing zeros: a page has thousands of these."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text
