"""Claims of speed: each is a ratio from one run and the bar (limit) for it, printed as held or missed.

A ratio of real times depends on the load of the machine, so no test asserts one. `make bench-quick` measures
them and prints all claims again at its end. Tests check what can be checked in simulated time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True)
class Claim:
    """A ratio that must reach a bar."""

    what: str
    ratio: float | None
    """The measured ratio; None: the run did not measure it."""
    of: str
    """Denominator of the ratio, in words."""
    bar: float
    is_most: bool = False
    """True if the bar is an upper limit of the ratio; else a lower limit."""

    @property
    def is_held(self) -> bool:
        """True if the ratio was measured and meets the bar."""
        if self.ratio is None:
            return False
        return self.ratio <= self.bar if self.is_most else self.ratio >= self.bar

    def __str__(self) -> str:
        bar = f"bar {'at most ' if self.is_most else ''}{self.bar:g}"
        if self.ratio is None:
            return f"{self.what}: not measured, {bar}"
        digits = 3 if self.is_most else 2
        verdict = "held" if self.is_held else "missed"
        return f"{self.what}: {self.ratio:.{digits}f}x of {self.of}, {bar}: {verdict}"


_measured: list[Claim] = []
"""All claims of this process, in order of measurement."""


def print_claims(console: Console, claims: Iterable[Claim]) -> None:
    """Print claims, and store them for the summary."""
    for claim in claims:
        _measured.append(claim)
        console.print(_shown(claim), soft_wrap=True)


def print_summary(console: Console) -> None:
    """Print all claims of this process again, and how many held; nothing if there are none."""
    if not _measured:
        return
    console.rule("claims")
    for claim in _measured:
        console.print(_shown(claim), soft_wrap=True)
    num_held = sum(claim.is_held for claim in _measured)
    console.print(f"{num_held} of {len(_measured)} claims held")


def _shown(claim: Claim) -> str:
    style = "green" if claim.is_held else "yellow"
    head, colon, verdict = str(claim).rpartition(": ")
    return f"{head}{colon}[{style}]{verdict}[/{style}]"
