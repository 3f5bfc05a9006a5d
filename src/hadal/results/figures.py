"""Charts as plotly figures, made as plain values without plotly.

    {"label": "...", "data": [traces], "layout": {...}}

Colours are names of style variables in `templates/style.html`, except transparent ones.
"""

from __future__ import annotations

from typing import Any

Figure = dict[str, Any]


def figure(label: str, data: list[Figure], height: int, **layout: Any) -> Figure:
    """Return a chart. `label`: description for screen readers."""
    return {
        "label": label,
        "data": data,
        "layout": {
            "height": height,
            "margin": {"l": 50, "r": 16, "t": 30, "b": 30},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 11.5, "color": "--ink"},
            "hoverlabel": {"bgcolor": "--card", "bordercolor": "--rule"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "--soft", "activecolor": "--ink"},
            "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
            "uirevision": "as zoomed",  # Constant, so that a redraw keeps the zoom.
            **layout,
        },
    }


def axis(title: str = "", **more: Any) -> Figure:
    named = {"title": {"text": title}} if title else {}
    colours = {"gridcolor": "--grid", "zerolinecolor": "--soft", "linecolor": "--soft"}
    return {**colours, "tickfont": {"color": "--soft"}, "automargin": True, **named, **more}
