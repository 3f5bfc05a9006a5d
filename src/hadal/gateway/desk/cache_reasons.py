"""Reasons for which blocks of a prompt were not found, from a comparison with the nearest prompt.

The comparison has two results: how many blocks the front reported as found, and how many the prompt
shares with the nearest kept prompt. If fewer were found than are shared, the text is not the
reason. Independent of how prompts are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import PrefixSources
from hadal.gateway.api.shapes import CacheReason, PromptPlace
from hadal.gateway.desk.prefixes import KeptPrompt
from hadal.policy.cached_prefix import usable_blocks

_REASON_TO_DETAIL: dict[CacheReason, str] = {
    "cached": "All whole blocks of the prompt were found.",
    "short": f"The prompt is shorter than a block of {BLOCK_TOKENS} tokens and one more; only whole"
    " blocks are cached.",
    "off": "The cache is off for this request: the deployment has none, or the prompt's"
    " log-probabilities were requested.",
    "first": "This gateway keeps no earlier prompt with this key and cache_salt.",
    "on_disk": "The next blocks are on disk, and computing them was predicted to be faster.",
    "elsewhere": "Another prefill unit has more of the prompt in memory; this one was predicted to"
    " finish earlier.",
    "weights": "The nearest prompt was computed by other weights or other code. Such KV is not used.",
    "concurrent": "The nearest prompt was still being computed when this request arrived.",
    "evicted": "The nearest prompt has the same beginning, but its blocks were evicted, not kept,"
    " or held only by a unit that took no more requests.",
}


@dataclass(frozen=True)
class Comparison:
    """One prompt beside the nearest kept prompt."""

    num_tokens: int
    num_sent: int
    """Tokens before the beginning of the reply that a chat template adds."""
    fingerprint: str
    is_named: bool
    """False: the cache is off for this prompt."""
    num_cached: int
    """Tokens that the front reported as found."""
    sources: PrefixSources
    start_s: float
    """Arrival of the request, seconds."""
    kept: KeptPrompt | None
    num_common: int
    """First tokens that the kept prompt shares; 0 without one."""

    @property
    def num_usable(self) -> int:
        """Return the number of blocks that could have been found."""
        return usable_blocks(self.num_tokens)

    @property
    def position(self) -> int | None:
        """Return the first token that the kept prompt does not have there; None: it has all."""
        return self.num_common if self.kept and self.num_common < self.num_sent else None

    @property
    def reason(self) -> CacheReason:
        """Return why no more blocks were found."""
        num_found = self.num_cached // BLOCK_TOKENS
        if not self.num_usable:
            return "short"
        if not self.is_named:
            return "off"
        if num_found >= self.num_usable:
            return "cached"
        if self.sources.num_recomputed:
            return "on_disk"
        if self.sources.num_elsewhere:
            return "elsewhere"
        if self.kept is None:
            return "first"
        if num_found < min(self.num_common // BLOCK_TOKENS, self.num_usable):
            return self._lost(self.kept)
        return "extends" if self.num_common == self.kept.num_tokens else "differs"

    def _lost(self, kept: KeptPrompt) -> CacheReason:
        """Return why blocks were not found although a prompt with the same text was computed."""
        if kept.fingerprint != self.fingerprint:
            return "weights"
        return "concurrent" if kept.computed_s > self.start_s else "evicted"

    def detail(self, place: PromptPlace | None) -> str:
        """Return the reason as a sentence. `place`: part of the prompt at `position`."""
        reason = self.reason
        if reason in _REASON_TO_DETAIL:
            return _REASON_TO_DETAIL[reason]
        where = f"{self.num_common}{_named(place)}"
        if reason == "extends":
            return f"The prompt continues the nearest one; the first token behind it is {where}."
        shared = self.num_common // BLOCK_TOKENS
        more = (
            " More blocks were found than both share: of a reply, a public prefix, or a prompt that"
            " this gateway does not keep."
            if self.num_cached // BLOCK_TOKENS > shared
            else ""
        )
        return f"The prompt differs from the nearest one at token {where}.{more}"


def _named(place: PromptPlace | None) -> str:
    if place is None:
        return ""
    if place.index is None:
        return f", in the {place.role}"
    return f", in message {place.index} ({place.role})"
