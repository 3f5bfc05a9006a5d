"""Queue of prompts that wait for blocks in a prefill unit: their order, and the turns of their
tenants.

Independent of ranks and steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from hadal.core.messages.generation import Key
from hadal.policy.fairness import ServiceCounters, in_turns
from hadal.roles.prefill.prompts import PrefillAttempt


class PrefillQueue:
    """Queue of prompts, iterated by priority and arrival; `in_turns` adds the turns of tenants."""

    def __init__(self, num_max: int, burst_tokens: float) -> None:
        """`num_max`: maximum number of queued prompts beyond the number that an empty unit could
        start. `burst_tokens`: see ServiceCounters.
        """
        self.num_arrived = 0
        """Prompts added since the start: the number of the next one."""
        self._num_max = num_max
        self._prompts: dict[Key, PrefillAttempt] = {}
        self._tenant_to_num: Counter[str] = Counter()
        """Tenant -> number of its queued prompts; no entry for 0."""
        self._counters = ServiceCounters(burst_tokens)
        """Cost of prompts that started here, over the weight of their requests, by tenant."""

    def __iter__(self) -> Iterator[PrefillAttempt]:
        return iter(self._prompts.values())

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, key: Key) -> bool:
        return key in self._prompts

    @property
    def first(self) -> PrefillAttempt | None:
        """Next prompt, regardless of tenants."""
        return next(iter(self._prompts.values()), None)

    def has_room(self, num_starts: int) -> bool:
        """Return whether one more prompt may wait in a unit that can start `num_starts` prompts."""
        return len(self._prompts) < self._num_max + num_starts

    def add(self, prompt: PrefillAttempt) -> None:
        """Add a prompt; its number is `num_arrived`."""
        self.num_arrived += 1
        last = next(reversed(self._prompts.values()), None)
        tenant = prompt.generation.tenant
        if tenant not in self._tenant_to_num:
            self._counters.join(tenant, self._tenant_to_num.keys())
        self._tenant_to_num[tenant] += 1
        self._prompts[prompt.key] = prompt
        if last is not None and prompt.turn < last.turn:
            self._prompts = dict(sorted(self._prompts.items(), key=lambda item: item[1].turn))

    def take(self, key: Key) -> PrefillAttempt | None:
        """Remove a prompt and return it; None if it is not queued."""
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            tenant = prompt.generation.tenant
            self._tenant_to_num[tenant] -= 1
            if not self._tenant_to_num[tenant]:
                del self._tenant_to_num[tenant]
                self._counters.leave(tenant)
        return prompt

    def start(self, prompt: PrefillAttempt) -> None:
        """Remove a prompt that starts, and charge its tenant."""
        claim = prompt.claim
        self._counters.charge(claim.tenant, claim.cost)
        self.take(prompt.key)

    def clear(self) -> None:
        """Remove all prompts."""
        self._prompts.clear()
        self._tenant_to_num.clear()

    def in_turns(
        self, ready: Iterable[PrefillAttempt], started: Iterable[PrefillAttempt]
    ) -> Iterable[PrefillAttempt]:
        """Return the prompts of `ready`, all queued here, in the order in which they may start."""
        if len(self._tenant_to_num) < 2:
            return ready
        held = Counter(prompt.generation.tenant for prompt in started)
        return in_turns(ready, lambda prompt: prompt.claim, self._counters, held)
