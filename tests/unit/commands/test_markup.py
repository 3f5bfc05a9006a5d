"""Markup: what is said cannot become markup, and coordinates are short."""

from __future__ import annotations

from hadal.commands.markup import Html, coordinate, element, together


def test_text_and_attributes_are_escaped_and_markup_is_not() -> None:
    inner = element("b", "a < b & c")
    assert inner == "<b>a &lt; b &amp; c</b>"
    assert element("p", inner, None, 3, class_='x" onload="y', title=None) == (
        '<p class="x&quot; onload=&quot;y"><b>a &lt; b &amp; c</b>3</p>'
    )
    assert together("<i>", Html("<i>")) == "&lt;i&gt;<i>"


def test_names_of_attributes_and_empty_elements() -> None:
    assert element("meta", http_equiv="X", name="n") == '<meta http-equiv="X" name="n">'
    assert (
        element("svg", viewBox="0 0 1 1", class_="a") == '<svg viewBox="0 0 1 1" class="a"></svg>'
    )


def test_coordinates_keep_two_decimals_at_most() -> None:
    values = (1.0, 0.126, -0.001, 100.5, 1200.0)
    assert [coordinate(value) for value in values] == ["1", "0.13", "0", "100.5", "1200"]
