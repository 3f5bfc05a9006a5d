"""Parts of a chart as inline SVG: axes, grids, lines, areas, bars. Knows no report; colours are
classes of day_style.

    ┌ Box ───────────────────────┐
    │ top                        │   y: Axis from box.bottom_px up to box.top_px
    │     ╭──╮      plot         │   x: Axis from box.left_px to box.right_px
    │ ────┴──┴─────────────────  │
    └────────────────────────────┘

Coordinates are pixels of the viewBox, y downwards. Tooltips are <title> elements, so a page needs
no script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hadal.commands.markup import Html, coordinate, element, together

LOG_SPAN = 30.0
"""An axis from `low` to more than so many times that is shown by orders of magnitude."""


@dataclass(frozen=True)
class Box:
    """Where a chart's plot lies within its viewBox."""

    width: float
    height: float
    left: float = 52.0
    right: float = 20.0
    top: float = 22.0
    bottom: float = 26.0

    @property
    def right_px(self) -> float:
        return self.width - self.right

    @property
    def bottom_px(self) -> float:
        return self.height - self.bottom


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `begin_px` to `end_px`."""

    low: float
    high: float
    begin_px: float
    end_px: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; a value beyond the ends is at the end."""
        held = min(max(value, self.low), self.high)
        return self.begin_px + (self.end_px - self.begin_px) * self._share(held)

    def _share(self, value: float) -> float:
        if self.high <= self.low:
            return 0.0
        if self.is_log:
            low = math.log(self.low)  # A ratio of the ends may be beyond all numbers.
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, num: int = 5) -> list[float]:
        """About so many round values within the axis."""
        if not self.is_log:
            return [
                tick
                for tick in round_values(self.low, self.high, num)
                if self.low <= tick <= self.high
            ]
        found = [
            factor * 10.0**power
            for power in range(
                math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
            )
            for factor in ((1, 2, 5) if self.high / self.low < 10**3.5 else (1,))
        ]
        return [tick for tick in found if self.low <= tick <= self.high]


def round_values(low: float, high: float, num: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten that cover low to high in about `num`
    steps.
    """
    span = high - low
    # Doubles tell no two values apart that are closer than this, and have few digits left below the
    # last.
    if not span > max(1e-12 * max(abs(low), abs(high)), 1e-290) or not math.isfinite(span):
        return [low]
    raw = span / max(num, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        factor * power
        for factor in (1.0, 2.0, 2.5, 5.0, 10.0)
        if factor * power >= raw * (1 - 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def from_zero(box: Box, values: Sequence[float], *, at_least: float = 0.0) -> Axis:
    """An upright axis from 0 (or the lowest value, if that is negative) to a round value above the
    highest.
    """
    low, high = min([0.0, *values]), max([at_least, 0.0, *values])
    ticks = round_values(low, high if high > low else 1.0, 4)
    return Axis(min(ticks[0], low), max(ticks[-1], high), box.bottom_px, box.top)


def around(box: Box, values: Sequence[float]) -> Axis:
    """An upright axis around a line's values. It spans a fifth of the highest at least: noise is to
    look like noise.
    """
    low, high = min(values), max(values)
    missing = max(0.0, 0.2 * max(abs(low), abs(high)) - (high - low))
    ticks = round_values(low - missing / 2, high + missing / 2, 4)
    if len(ticks) < 2:  # All are 0.
        ticks = [0.0, 1.0]
    return Axis(ticks[0], ticks[-1], box.bottom_px, box.top)


def svg(box: Box, label: str, *parts: object, class_: str = "chart") -> Html:
    """The chart. `label` says what it shows to who cannot see it; its figures are in the table
    beside it.
    """
    view = f"0 0 {coordinate(box.width)} {coordinate(box.height)}"
    return element("svg", *parts, viewBox=view, class_=class_, role="img", aria_label=label)


def text(x: float, y: float, shown: str, class_: str = "", anchor: str | None = None) -> Html:
    return element("text", shown, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def grid(box: Box, axis: Axis, shown: Callable[[float], str], num: int = 4) -> Html:
    """Level lines with their values to the left; the zero line is stronger."""
    parts = []
    for tick in axis.ticks(num):
        y = axis.at(tick)
        parts.append(line(box.left, y, box.right_px, y, "zero" if tick == 0.0 else "grid"))
        parts.append(text(box.left - 8, y + 3.5, shown(tick), "tick", "end"))
    return together(*parts)


def below(
    box: Box, axis: Axis, ticks: Sequence[tuple[float, str]], *, has_lines: bool = False
) -> Html:
    """Labels under the plot at values of the x axis, with upright lines where wanted."""
    parts = []
    for value, label in ticks:
        x = axis.at(value)
        if has_lines:
            parts.append(line(x, box.top, x, box.bottom_px, "grid"))
        parts.append(text(x, box.bottom_px + 20, label, "tick", "middle"))
    return together(*parts)


def path(points: Sequence[tuple[float, float] | None], class_: str) -> Html:
    """A line through points; None breaks it. A point between two gaps is a dot."""
    commands, dots, run = [], [], list[tuple[float, float]]()
    for point in [*points, None]:
        if point is not None:
            run.append(point)
            continue
        if len(run) == 1:
            dots.append(dot(*run[0], f"{class_} dot"))
        elif run:
            commands.append("M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in run))
        run = []
    drawn = element("path", d="".join(commands), class_=f"line {class_}") if commands else None
    return together(drawn, *dots)


def area(
    upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], class_: str
) -> Html:
    """What lies between two lines."""
    if not upper:
        return Html()
    around = "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in [*upper, *reversed(lower)])
    return element("path", d=f"M{around}Z", class_=f"area {class_}")


def bar(
    x: float, y: float, width: float, height: float, class_: str, title: str | None = None
) -> Html:
    """A rectangle with a tooltip; what is too low or narrow to be seen stays a hair."""
    shown = element("title", title) if title else None
    return element(
        "rect", shown, x=x, y=y, width=max(width, 0.5), height=max(height, 0.5), class_=class_
    )


def dot(x: float, y: float, class_: str, title: str | None = None) -> Html:
    return element(
        "circle", element("title", title) if title else None, cx=x, cy=y, r=3.2, class_=class_
    )


def hover(x: float, y: float, width: float, height: float, title: str) -> Html:
    """An invisible stretch of the plot that has a tooltip."""
    return element(
        "rect", element("title", title), x=x, y=y, width=width, height=height, class_="hover"
    )


def stepped(axis_x: Axis, axis_y: Axis, values: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of a line that keeps each value from its index to the next; equal neighbours are one
    tread.
    """
    corners: list[tuple[float, float]] = []
    for index, value in enumerate(values):
        if index and value == values[index - 1]:
            continue
        if corners:
            corners.append((axis_x.at(index), corners[-1][1]))
        corners.append((axis_x.at(index), axis_y.at(value)))
    if corners:
        corners.append((axis_x.at(len(values)), corners[-1][1]))
    return corners


def thinned(values: Sequence[float | None], num_max: int) -> list[float | None]:
    """Means of equal runs, at most `num_max` of them; None where a run has no number."""
    size = max(1, math.ceil(len(values) / num_max))
    found: list[float | None] = []
    for begin in range(0, len(values), size):
        run = [value for value in values[begin : begin + size] if value is not None]
        found.append(math.fsum(run) / len(run) if run else None)
    return found


def legend(*entries: tuple[str, str]) -> Html:
    """Swatches with names: (class, name)."""
    return element(
        "p",
        *(
            element("span", element("i", class_=f"swatch {class_}"), name)
            for class_, name in entries
        ),
        class_="legend",
    )
