"""Placement rules for decode behind one interface: ours and those of other systems (read in their sources).

Each rule sees the reported loads plus the placements that it made since, as a dispatcher does. Shapes: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.decode_world import Rule, Waiting, World
from hadal.core.arrays import Ints
from hadal.policy.decode_balance import Arrival, place
from hadal.policy.views import DecodeRanksView

Choice = Callable[[Ints, Ints, Ints, np.random.Generator, int], int]
"""(KV [R], requests [R], ranks with a free slot, generator, number of placements so far) -> rank."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A placement that the caller has sent; a rank's report may or may not include it yet."""

    row: int
    """Row of the rank in the view."""
    number: int
    """Sequence number of the placement; a report states the last number that it includes."""
    arrival: Arrival


def with_sent(
    ranks: DecodeRanksView, num_seen_R: Sequence[int], sent: Sequence[Sent]
) -> DecodeRanksView:
    """Return the reported loads plus the placements that the ranks' reports do not include. Without these,
    all arrivals would go to the rank that was lightest in the report.

    `num_seen_R`: the last sequence number that each rank's report includes.
    """
    used_R, worst_R, requests_R = (
        ranks.num_blocks_used.copy(),
        ranks.num_blocks_worst.copy(),
        ranks.num_requests.copy(),
    )
    for placed in sent:
        if placed.number > num_seen_R[placed.row]:
            used_R[placed.row] += placed.arrival.num_blocks
            worst_R[placed.row] += placed.arrival.num_blocks_worst
            requests_R[placed.row] += 1
    return replace(ranks, num_blocks_used=used_R, num_blocks_worst=worst_R, num_requests=requests_R)


class Ours:
    """Rule of policy/decode_balance. It adds placements that no report includes yet to the reported loads."""

    def __init__(self) -> None:
        self._sent: list[Sent] = []

    def __call__(self, world: World, waiting: list[Waiting]) -> list[int]:
        view = self.seen(world)
        # KV never limits this world, so worst-case lengths are left out.
        arrivals = [Arrival(one.num_input, one.num_input) for one in waiting]
        ranks = place(view, arrivals, preempts=True)
        number = world.number
        for rank, arrival in zip(ranks, arrivals, strict=False):
            number += 1
            self._sent.append(Sent(rank, number, arrival))
        return ranks

    def seen(self, world: World) -> DecodeRanksView:
        view, number = world.reported
        self._sent = [sent for sent in self._sent if sent.number > number]
        return with_sent(view, [number] * world.num_ranks, self._sent)


class Peer:
    """Rule of a peer. It places one request at a time, in order of arrival."""

    def __init__(self, choice: Choice, seed: int) -> None:
        self._choice = choice
        self._random = np.random.default_rng(seed)
        self._sent: list[Sent] = []

    def __call__(self, world: World, waiting: list[Waiting]) -> list[int]:
        view, seen = world.reported
        self._sent = [sent for sent in self._sent if sent.number > seen]
        view = with_sent(view, [seen] * world.num_ranks, self._sent)
        kv_R, requests_R, ranks = view.num_blocks_used.copy(), view.num_requests.copy(), list[int]()
        number = world.number
        for one in waiting:
            free = np.flatnonzero(requests_R < world.num_slots)
            if not free.size:
                break
            rank = self._choice(kv_R, requests_R, free, self._random, number)
            number += 1
            kv_R[rank] += one.num_input
            requests_R[rank] += 1
            self._sent.append(Sent(rank, number, Arrival(one.num_input, one.num_input)))
            ranks.append(rank)
        return ranks


def _power_of_two(
    kv_R: Ints, requests_R: Ints, free: Ints, random: np.random.Generator, number: int
) -> int:
    first, second = (int(rank) for rank in random.choice(free, 2))
    return first if requests_R[first] <= requests_R[second] else second


PEERS: dict[str, Choice] = {
    "random": lambda kv_R, requests_R, free, random, number: int(random.choice(free)),
    # The next rank with a free slot; argmax of an all-False array is 0, the first one.
    "round robin": lambda kv_R, requests_R, free, random, number: int(
        free[(free >= number % kv_R.size).argmax()]
    ),
    "power of two (requests)": _power_of_two,
    "least requests (vLLM)": lambda kv_R, requests_R, free, random, number: int(
        free[requests_R[free].argmin()]
    ),
    "least KV (SGLang total_tokens)": lambda kv_R, requests_R, free, random, number: int(
        free[kv_R[free].argmin()]
    ),
}


def rule(name: str, seed: int) -> Rule:
    """Return a peer's rule by `name`; any other name returns ours."""
    return Peer(PEERS[name], seed) if name in PEERS else Ours()
