"""Explain misses of the cache by the first difference between a prompt and the nearest earlier one.

    a prompt is tokenised      ──► PromptTrace: its tokens, and the places of its messages
    its first token arrives    ──► compared with the kept prompts of the same salt, then kept itself

So a prompt is compared only with computed prompts, and its explanation is ready when its reply
begins. The front reports the number of found blocks. Each gateway compares with its own requests.

Prompts and explanations share one limit of bytes; the least recently used go first. Those of a
withdrawn key go at once. A reply is kept only as a part of later prompts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from hadal.core.config import GatewayConfig
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.generation import Generation, PrefixSources
from hadal.gateway.api.shapes import CacheExplanation, CacheReport, PromptPlace
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.cache_reasons import Comparison
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.prefixes import TOKEN_BYTES, KeptPrompt, PrefixIndex, packed, unpacked
from hadal.gateway.text.chat import Prompt
from hadal.gateway.text.places import REPLY, Places
from hadal.gateway.text.vocabulary import Vocabulary

SHOWN_CHARS = 40
"""Characters shown of both texts at the first difference."""
_SHOWN_TOKENS = 4 * SHOWN_CHARS
"""Tokens decoded for them: a character has at most four bytes, and a token at least one."""
_PROMPT_BYTES = 768
"""Memory of a kept prompt besides its tokens, approximate."""
_EXPLANATION_BYTES = 2560
"""Memory of an explanation, approximate and rather too high."""
MAX_RECENT = 200
"""Most reports that a list has."""


@dataclass(eq=False)
class PromptTrace:
    """One prompt on its way to the first token."""

    explainer: CacheExplainer
    request_id: str
    tenant: Tenant
    generation: Generation
    """Without block names, nothing is searched or kept."""
    places: Places
    """Parts of the prompt; positions are bytes of its text."""
    explanation: CacheExplanation | None = None
    """None: its first token has not arrived."""

    def computed(self, num_cached: int, sources: PrefixSources | None, start_s: float) -> None:
        """Explain what was found: `num_cached` tokens. `start_s`: arrival of the request, seconds."""
        sources = PrefixSources() if sources is None else sources
        self.explanation = self.explainer.explain(self, num_cached, sources, start_s)
        self.places = Places()  # The reply may take long.


@dataclass(eq=False)
class _Kept:
    """Explained request. `prompts`: one explanation for each of its prompts."""

    owner: bytes
    tenant: str
    id: str
    unix_s: float
    prompts: list[CacheExplanation] = field(default_factory=list)


class CacheExplainer:
    """Recent prompts and explanations of one gateway. Used by the event loop's thread, but for
    `trace`.
    """

    def __init__(
        self,
        max_bytes: int,
        vocabulary: Vocabulary,
        now: Callable[[], float],
        unix_time: Callable[[], float],
    ) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._vocabulary = vocabulary
        # One more for ids beyond the tokenizer's table, which have no text.
        self._lengths = np.array([*map(len, vocabulary.token_bytes), 0], dtype=np.int32)
        self._now = now
        self._unix_time = unix_time
        self._index = PrefixIndex()
        self._requests: dict[tuple[bytes, str], _Kept] = {}
        self._entries: OrderedDict[int, tuple[KeptPrompt | _Kept, int]] = OrderedDict()
        """id() of each kept object -> the object and its bytes; the oldest first."""
        self._owners: Collection[bytes] | None = None
        """Digests of the accepted keys; None: all are accepted."""

    def __len__(self) -> int:
        return len(self._entries)

    def trace(
        self, request_id: str, tenant: Tenant, generation: Generation, prompt: Prompt
    ) -> PromptTrace:
        """Return the trace of a prompt. Any thread may call; the time is that of its places."""
        return PromptTrace(self, request_id, tenant, generation, prompt.find_places())

    def _in_tokens(self, ids: bytes, places: Places) -> Places:
        """Return places with byte positions in a prompt's text as token positions."""
        if not places.ends:
            return places
        starts = self._lengths.take(np.frombuffer(ids, ">i4"), mode="clip").cumsum()
        return replace(places, ends=tuple((np.searchsorted(starts, places.ends) + 1).tolist()))

    def explain(
        self, trace: PromptTrace, num_cached: int, sources: PrefixSources, start_s: float
    ) -> CacheExplanation:
        """Explain a prompt at its first token; keep the prompt and its explanation."""
        generation = trace.generation
        ids = packed(generation.prompt)
        places = self._in_tokens(ids, trace.places)
        # Without the beginning of the reply, which the tenant has not sent.
        has_reply = len(places.parts) > 1 and places.parts[-1].role == REPLY
        num_sent = places.ends[-1] if has_reply else len(generation.prompt)
        kept, num_common = self._index.nearest(generation.salt, ids)
        found = Comparison(
            len(generation.prompt),
            num_sent,
            generation.fingerprint,
            bool(generation.chain),
            num_cached,
            sources,
            start_s,
            kept,
            num_common,
        )
        position = found.position
        texts = ["", ""]
        place = None
        if position is not None and kept is not None:
            texts = [self._text_at(tokens, position) for tokens in (ids, kept.ids)]
            part = places.at(position)
            place = None if part is None else PromptPlace(part.role, part.index)
        explanation = CacheExplanation(
            reason=found.reason,
            detail=found.detail(place),
            block_tokens=BLOCK_TOKENS,
            reusable_blocks=found.num_usable,
            found_blocks=num_cached // BLOCK_TOKENS,
            common_tokens=num_common,
            position=position,
            message=place,
            text=texts[0],
            kept_text=texts[1],
        )
        self._keep(trace, ids[: num_sent * TOKEN_BYTES], explanation)
        return explanation

    def _text_at(self, ids: bytes, position: int) -> str:
        at = position * TOKEN_BYTES
        tokens = unpacked(ids[at : at + _SHOWN_TOKENS * TOKEN_BYTES])
        return self._vocabulary.decode(tokens)[:SHOWN_CHARS]

    def _keep(self, trace: PromptTrace, sent: bytes, explanation: CacheExplanation) -> None:
        """Keep an explanation and the prompt's tokens without the beginning of the reply, `sent`."""
        owner = trace.tenant.key_digest
        if self._owners is not None and owner not in self._owners:
            return  # The key was withdrawn while the request ran.
        key = owner, trace.request_id
        kept = self._requests.get(key)
        if kept is None:
            kept = _Kept(owner, trace.tenant.name, trace.request_id, self._unix_time())
            self._requests[key] = kept
        kept.prompts.append(explanation)
        self._count(kept, len(kept.prompts) * _EXPLANATION_BYTES)
        generation = trace.generation
        if generation.chain and len(sent) + _PROMPT_BYTES <= self._max_bytes:
            prompt, replaced = self._index.add(
                KeptPrompt(sent, owner, generation.salt, generation.fingerprint, self._now())
            )
            if replaced is not None:
                self._uncount(replaced)
            self._count(prompt, len(prompt.ids) + _PROMPT_BYTES)
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries.values()))[0])

    def _count(self, entry: KeptPrompt | _Kept, num_bytes: int) -> None:
        self._uncount(entry)
        self._entries[id(entry)] = entry, num_bytes
        self.num_bytes += num_bytes

    def _uncount(self, entry: KeptPrompt | _Kept) -> None:
        _, num_bytes = self._entries.pop(id(entry), (entry, 0))
        self.num_bytes -= num_bytes

    def _drop(self, entry: KeptPrompt | _Kept) -> None:
        self._uncount(entry)
        if isinstance(entry, KeptPrompt):
            self._index.remove(entry)
        else:
            del self._requests[entry.owner, entry.id]

    def retain(self, owners: Collection[bytes] | None) -> None:
        """Drop everything of keys that are not among `owners`; None: all keys are accepted."""
        self._owners = owners
        if owners is not None:
            for entry, _ in [*self._entries.values()]:
                if entry.owner not in owners:
                    self._drop(entry)

    def report(self, owner: bytes, request_id: str) -> CacheReport | None:
        """Return the explanations of a tenant's request; None if there are none of this tenant."""
        kept = self._requests.get((owner, request_id))
        return None if kept is None else _report(kept)

    def recent(self, owner: bytes, *, sees_all: bool) -> list[CacheReport]:
        """Return the latest reports, the latest first: with `sees_all` those of other tenants as
        well, without the texts of their prompts.
        """
        latest: deque[_Kept] = deque(maxlen=MAX_RECENT)
        for entry, _ in self._entries.values():
            if isinstance(entry, _Kept) and (sees_all or entry.owner == owner):
                latest.append(entry)
        return [_report(kept, with_texts=kept.owner == owner) for kept in reversed(latest)]

    def check(self) -> list[str]:
        """Return inconsistencies between the entries and their totals."""
        entries = [entry for entry, _ in self._entries.values()]
        num_prompts = sum(isinstance(entry, KeptPrompt) for entry in entries)
        is_sound = (
            self.num_bytes == sum(num_bytes for _, num_bytes in self._entries.values())
            and num_prompts == len(self._index)
            and len(entries) - num_prompts == len(self._requests)
        )
        return [] if is_sound else ["the kept prompts and explanations do not add up"]


def _report(kept: _Kept, *, with_texts: bool = True) -> CacheReport:
    prompts = [
        each if with_texts else msgspec.structs.replace(each, text="", kept_text="")
        for each in kept.prompts
    ]
    return CacheReport(kept.id, kept.unix_s, kept.tenant, prompts)


def cache_explainer(
    settings: GatewayConfig, vocabulary: Vocabulary, clock: GatewayClock
) -> CacheExplainer | None:
    """Return an empty store with the limit from the settings; None if it is 0."""
    max_bytes = settings.explain_cache_mb << 20
    return CacheExplainer(max_bytes, vocabulary, clock.now, clock.unix_time) if max_bytes else None
