"""Requests that a load asks for: lengths by a distribution, or a trace's requests, and their texts.

Prompts are made of common words; a calibration finds how many make a token at a server. Knows no
server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator

from hadal.core.documents import MAX_TABLE_BYTES, read_text, shown
from hadal.core.errors import ConfigError
from hadal.sim.plan.traces import MOONCAKE_PART_TOKENS, azure, mooncake_rows

MAX_TOKENS = 1_000_000
_LENGTHS = (
    "a number (200), a range (100-400), normal:MEAN:SPREAD, lognormal:MEAN:VARIATION or"
    " exponential:MEAN"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of tokens, from `parse_lengths`."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, rng: Generator, size: int) -> list[int]:
        """So many lengths, each at least 1."""
        match self.kind:
            case "range":
                drawn = rng.integers(int(self.first), int(self.second) + 1, size).astype(float)
            case "normal":
                drawn = rng.normal(self.first, self.second, size)
            case "lognormal":
                sigma2 = np.log1p(self.second**2)
                drawn = rng.lognormal(np.log(self.first) - sigma2 / 2, np.sqrt(sigma2), size)
            case _:
                drawn = rng.exponential(self.first, size)
        return [int(value) for value in np.clip(np.rint(drawn), 1, MAX_TOKENS)]


def parse_lengths(text: str, option: str) -> Lengths:
    """Read a distribution as one writes it. Raises ConfigError."""
    number = r"([0-9]{1,7}(?:\.[0-9]{1,6})?)"
    word = text.strip().lower()
    found: Lengths | None = None
    if one := re.fullmatch("([0-9]{1,7})", word):
        found = Lengths("range", float(one[1]), float(one[1]))
    elif two := re.fullmatch("([0-9]{1,7})-([0-9]{1,7})", word):
        found = Lengths("range", float(two[1]), float(two[2]))
    elif named := re.fullmatch(f"(normal|lognormal):{number}:{number}", word):
        found = Lengths(named[1], float(named[2]), float(named[3]))
    elif named := re.fullmatch(f"(exponential):{number}", word):
        found = Lengths(named[1], float(named[2]))
    if (
        found is None
        or not 1 <= found.first <= MAX_TOKENS
        or (found.kind == "range" and not found.first <= found.second <= MAX_TOKENS)
    ):
        raise ConfigError(f"{option} is {shown(text)}; {_LENGTHS} is needed, in tokens.")
    return found


@dataclass(frozen=True, slots=True)
class BenchAsk:
    """One request before it is text."""

    tokens_in: int
    tokens_out: int
    parts: tuple[int, ...] = ()
    """Numbers of its 512-token parts, where a trace has them: equal numbers are equal text."""


@dataclass(frozen=True)
class TraceLoad:
    """The requests of a trace file, in order."""

    asks: tuple[BenchAsk, ...]
    at_s: tuple[float, ...]
    """Since the first arrival."""


def read_trace(path: Path, scale: float = 1.0) -> TraceLoad:
    """Mooncake's .jsonl or .jsonl.gz, or Azure's .csv; lengths are multiplied by `scale`. Raises
    ConfigError.
    """
    name = path.name.lower()
    if not name.endswith((".jsonl", ".jsonl.gz", ".csv", ".csv.gz")):
        raise ConfigError(
            f"{path}: a trace is Mooncake's .jsonl or .jsonl.gz, or Azure's .csv or .csv.gz."
        )
    lines = read_text(path, "trace", MAX_TABLE_BYTES).splitlines()
    try:
        if ".csv" in name:
            work = azure(lines)
            rows: list[tuple[float, int, int, tuple[int, ...]]] = [
                (float(at), int(before), int(after), ())
                for at, before, after in zip(
                    work.arrival_s, work.tokens_in, work.tokens_out, strict=True
                )
            ]
        else:
            rows = sorted(tuple(row) for row in mooncake_rows(lines))  # type: ignore[misc]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not rows:
        raise ConfigError(f"{path}: there is no request in it.")
    asks = tuple(
        BenchAsk(max(1, round(scale * before)), max(1, round(scale * after)), parts)
        for _, before, after, parts in rows
    )
    return TraceLoad(asks, tuple(at_s - rows[0][0] for at_s, *_ in rows))


WORDS = """
the of and to in is it was for on that with as be at by this had not are but from or have an
they which one you were all her she there would their we him been has when who will no more if
out so up said what its about than into them can only other time new some could these two may
first then do any like my now over such our man me even most made after also well did many must
before back see through way where get much go good down day long little great people year work
life hand part old house place small found still between name should home big give air line set
own under read last never us left end along while might next sound below saw both few
""".split()  # noqa: SIM905  # A list would be a line a word.
TOKENS_PER_WORD = 1.3
"""Where a server does not say how many tokens a prompt has: a word of English at common tokenizers."""


@dataclass(frozen=True)
class Texts:
    """Makes prompts of about so many tokens. The same seed and number make the same words."""

    seed: int
    tokens_per_word: float = TOKENS_PER_WORD
    tokens_around: float = 0.0
    """What a template puts around a prompt."""
    num_shared: int = 0
    """Tokens with which all prompts begin."""
    part_tokens: int = MOONCAKE_PART_TOKENS
    """Tokens of a part of a trace, scaled as its lengths are."""

    def prompt(self, ask: BenchAsk, number: int) -> str:
        """The text of the request with this number, which no other shares beyond what is asked for."""
        left = max(1, round((ask.tokens_in - self.tokens_around) / self.tokens_per_word))
        words: list[str] = []
        shared = min(left, round(self.num_shared / self.tokens_per_word))
        words += self._words(shared, 0, 0)
        per_part = max(1, round(self.part_tokens / self.tokens_per_word))
        for part in ask.parts:
            words += self._words(min(per_part, left - len(words)), 1, part)
        return " ".join(words + self._words(left - len(words), 2, number))

    def _words(self, size: int, *key: int) -> list[str]:
        if size <= 0:
            return []
        drawn = np.random.default_rng([self.seed, *key]).integers(0, len(WORDS), size)
        return [WORDS[index] for index in drawn]


@dataclass(frozen=True)
class Level:
    """A load that is held for a while."""

    kind: str
    """rate, concurrency or trace."""
    value: float

    @property
    def name(self) -> str:
        """As tables have it."""
        return {
            "rate": f"{self.value:g}/s",
            "concurrency": f"{self.value:g} at once",
            "trace": f"trace x{self.value:g}",
        }[self.kind]

    def arrivals(
        self, rng: Generator, trace: TraceLoad | None, end_s: float, num_max: int
    ) -> Iterator[float]:
        """When requests of an open load are due."""
        if self.kind == "trace":
            assert trace is not None
            times: Iterator[float] = (at_s / self.value for at_s in trace.at_s)
        else:
            times = _poisson(rng, self.value)
        for _, at_s in zip(range(num_max), times, strict=False):
            if at_s >= end_s:
                return
            yield at_s


def _poisson(rng: Generator, rate: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1.0 / rate))
        yield at_s
