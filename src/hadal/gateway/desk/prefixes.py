"""Recent prompts of one cache salt, searched for the longest common prefix with a new prompt.

    ids      tokens as 4 bytes each, highest first, so that texts in order are token lists in order
    nearest  the neighbours in this order: no other prompt shares a longer prefix

A prompt that is the beginning of another adds nothing to the search, so it is not stored: all turns
of a conversation take the memory of the last. Independent of tenants and limits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOKEN_BYTES = 4


def packed(ids: Sequence[int]) -> bytes:
    """Return tokens as bytes, in an order that is the order of the token lists."""
    return np.array(ids, dtype=">i4").tobytes()


def unpacked(ids: bytes) -> list[int]:
    """Return the tokens of `packed`."""
    tokens: list[int] = np.frombuffer(ids, dtype=">i4").tolist()
    return tokens


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """One computed prompt, without the beginning of the reply that a chat template adds. `owner`:
    digest of its tenant's key.
    """

    ids: bytes
    owner: bytes
    salt: bytes
    fingerprint: str
    """Fingerprint of the weights and the code that computed it."""
    computed_s: float
    """Time of its first token, seconds."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES


class PrefixIndex:
    """Prompts of all salts, those of one salt in order."""

    def __init__(self) -> None:
        self._salt_to_prompts: dict[bytes, list[KeptPrompt]] = {}

    def nearest(self, salt: bytes, ids: bytes) -> tuple[KeptPrompt | None, int]:
        """Return the prompt that shares the most first tokens, and their number."""
        prompts = self._salt_to_prompts.get(salt, [])
        at = _index(prompts, ids)
        best: KeptPrompt | None = None
        most = -1
        for prompt in prompts[max(0, at - 1) : at + 1]:
            num_common = num_common_tokens(prompt.ids, ids)
            # Of equal ones the latest: its text is the one that a developer remembers.
            if num_common > most or (
                best and num_common == most and prompt.computed_s > best.computed_s
            ):
                best, most = prompt, num_common
        return best, max(0, most)

    def add(self, prompt: KeptPrompt) -> tuple[KeptPrompt, KeptPrompt | None]:
        """Add a prompt unless it is the beginning of another. Return the prompt that is stored for
        it, and the one that it equals or continues and so replaces, if there is one.
        """
        prompts = self._salt_to_prompts.setdefault(prompt.salt, [])
        at = _index(prompts, prompt.ids)
        if at < len(prompts) and prompts[at].ids.startswith(prompt.ids):
            if prompts[at].ids != prompt.ids:
                return prompts[at], None
        elif at and prompt.ids.startswith(prompts[at - 1].ids):
            at -= 1
        else:
            prompts.insert(at, prompt)
            return prompt, None
        replaced, prompts[at] = prompts[at], prompt
        return prompt, replaced

    def remove(self, prompt: KeptPrompt) -> None:
        """Remove a prompt that was added and not replaced."""
        prompts = self._salt_to_prompts[prompt.salt]
        del prompts[_index(prompts, prompt.ids)]
        if not prompts:
            del self._salt_to_prompts[prompt.salt]

    def __len__(self) -> int:
        return sum(map(len, self._salt_to_prompts.values()))


def _index(prompts: list[KeptPrompt], ids: bytes) -> int:
    return bisect_left(prompts, ids, key=lambda prompt: prompt.ids)


def num_common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of equal first tokens of two packed prompts."""
    num_tokens = min(len(a), len(b)) // TOKEN_BYTES
    one, other = (np.frombuffer(ids, dtype=np.int32)[:num_tokens] for ids in (a, b))
    differs = one != other
    return int(differs.argmax()) if differs.any() else num_tokens
