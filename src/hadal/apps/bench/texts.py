"""Prompts of a chosen length, made of common English words. `bench/calibration` measures how many
tokens a word has. Does not depend on a server.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hadal.apps.bench.lengths import BenchAsk
from hadal.stats.traces import MOONCAKE_PART_TOKENS

WORDS = """
the of and to in is it was for on that with as be at by this had not are but from or have an
they which one you were all her she there would their we him been has when who will no more if
out so up said what its about than into them can only other time new some could these two may
first then do any like my now over such our man me even most made after also well did many must
before back see through way where get much go good down day long little great people year work
life hand part old house place small found still between name should home big give air line set
own under read last never us left end along while might next sound below saw both few
""".split()  # noqa: SIM905  # A list would take a line per word.
TOKENS_PER_WORD = 1.3
"""Typical tokens per English word, used if the server does not report prompt tokens."""


@dataclass(frozen=True)
class Texts:
    """Generator of prompts of about a wanted length. Equal seeds and numbers give equal words."""

    seed: int
    tokens_per_word: float = TOKENS_PER_WORD
    tokens_around: float = 0.0
    """Tokens that a chat template adds to a prompt."""
    num_shared: int = 0
    """Length in tokens of the prefix shared by all prompts."""
    part_tokens: int = MOONCAKE_PART_TOKENS
    """Tokens per part of a trace, multiplied by the same scale as its lengths."""

    def prompt(self, ask: BenchAsk, number: int) -> str:
        """Return the text of the request with this number. Prompts share only the common prefix and
        equal parts.
        """
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
