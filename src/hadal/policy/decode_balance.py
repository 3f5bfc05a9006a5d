"""Place a step's arrivals on the ranks of a decode unit: equal KV and equal request counts at once.

A step takes as long as its slowest rank, and a rank's time grows with the KV that it reads and with
the requests that it computes. Either alone leaves the other uneven, so both are measured against
the unit's mean and the larger counts:

    kv share       (blocks used + the request's) / rank's blocks  over the same of the whole unit
    request share  (requests + 1) / rank's slots                  over the same of the whole unit
    choice         the rank where the larger of the two is smallest; the smaller one decides between equals

While a rank sticks out in KV, the others' KV costs less than the step takes anyway, so requests
count a little more (`SLACK`). Ranks then drift less into few large requests here and many small
ones there; it was found by measuring, and helps most where few arrive a step
(bench/balance_decode).

Arrivals of one step are placed largest first, as small ones fill what large ones left uneven. Who
gets in is decided not by size but by the order of arrival: when somebody does not fit, those who
came later wait, so nobody is overtaken.

Knows nothing of tensors, networks or time, and no output lengths: only what a request holds now and
at its longest. The caller owns the state and applies the choice. Shapes: R ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hadal.policy.admission import Bools, fits_decode
from hadal.policy.fairness import is_batch
from hadal.policy.views import DecodeRanksView, HolderView, Ints

Floats = NDArray[np.float64]

TIE_WEIGHT = 1e-6
"""Share of the sum of both shares that is added to the larger one: it decides only between equals.
"""
SLACK = 0.25
"""Share of the fullest rank's lead in KV over the mean that is added to request shares. .25 was
chosen out of 0, .25, .35, .5 and .7: it lifts long outputs and long prompts (KV balance +.01) and
leaves short ones (azure-conv) at .98.
"""
SLACK_MAX = 0.03
"""A unit of few ranks or few requests is always uneven; there both shares should count about
alike.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that waits for a rank."""

    num_blocks: int
    """KV blocks that it takes now, the one that its first step writes included."""
    num_blocks_worst: int
    """KV blocks that it holds if it runs to its last allowed token."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_blocks <= self.num_blocks_worst:
            raise ValueError(
                f"{self.num_blocks} blocks now, {self.num_blocks_worst} at its longest: not in"
                " order."
            )


class Shares:
    """Both shares of every rank over the unit's, kept up while requests come and go. One decision
    long.
    """

    def __init__(
        self, ranks: DecodeRanksView, num_blocks_coming: int, num_coming: int, *, preempts: bool
    ) -> None:
        """`..._coming` belong to the means: what the unit will hold when all are placed."""
        self.ranks = ranks
        self.preempts = preempts
        self.used_R = ranks.num_blocks_used.copy()
        self.worst_R = ranks.num_blocks_worst.copy()
        self.requests_R = ranks.num_requests.copy()
        kv_share = (int(self.used_R.sum()) + num_blocks_coming) / max(
            int(ranks.num_blocks.sum()), 1
        )
        request_share = (int(self.requests_R.sum()) + num_coming) / max(
            int(ranks.num_requests_max.sum()), 1
        )
        self.per_block_R: Floats = 1.0 / (np.maximum(ranks.num_blocks, 1) * (kv_share or 1.0))
        """What one block adds to a rank's KV share."""
        over = float((self.used_R * self.per_block_R).max(initial=1.0)) - 1.0
        self.slack = min(SLACK * over, SLACK_MAX)
        self.per_request_R: Floats = 1.0 / (
            np.maximum(ranks.num_requests_max, 1) * (request_share or 1.0)
        )

    @property
    def kv_R(self) -> Floats:
        return self.used_R * self.per_block_R

    @property
    def request_R(self) -> Floats:
        return self.requests_R * self.per_request_R

    def fits(self, arrival: Arrival) -> Bools:
        """[R] where it may go: a free slot, room in the worst case, or else somebody who is ready
        to let others go.

        Even then its own worst case has to fit into an empty rank, or preempting all others would
        not help it.
        """
        ranks = self.ranks
        fits_R: Bools = self.requests_R < ranks.num_requests_max
        if self.preempts:
            fits_R &= fits_decode(
                ranks.num_blocks - self.used_R, arrival.num_blocks, self.requests_R
            )
            fits_R &= arrival.num_blocks_worst <= ranks.num_blocks
        else:
            fits_R &= self.worst_R + arrival.num_blocks_worst <= ranks.num_blocks
        return fits_R

    def choose(self, arrival: Arrival) -> int | None:
        """The row of the best rank; None if it fits nowhere. The lowest row of equals."""
        fits_R = self.fits(arrival)
        kv_R = (self.used_R + arrival.num_blocks) * self.per_block_R
        request_R = (self.requests_R + 1) * self.per_request_R
        score_R = np.where(
            fits_R,
            np.maximum(kv_R, request_R + self.slack) + TIE_WEIGHT * (kv_R + request_R),
            np.inf,
        )
        row = int(score_R.argmin())
        return row if fits_R[row] else None

    def add(self, row: int, arrival: Arrival, count: int = 1) -> None:
        """Place it there; `count` -1 takes it away."""
        self.used_R[row] += count * arrival.num_blocks
        self.worst_R[row] += count * arrival.num_blocks_worst
        self.requests_R[row] += count


def place(ranks: DecodeRanksView, arrivals: Sequence[Arrival], *, preempts: bool) -> list[int]:
    """Return the ranks of the first arrivals, in their order; those behind the end of the list
    wait.

    `preempts`: the caller has a plan for a rank that runs short (policy/decode_balance), so what
    fits now with head-room is let in. Without it, only what fits if everybody on the rank runs to
    its longest.
    """
    num = _num_at_most(ranks, arrivals, preempts)
    while num > 0:
        shares, rows, failed = _largest_first(ranks, arrivals[:num], preempts)
        if failed is None:
            break
        num = failed
    else:
        shares, rows = (
            Shares(
                ranks, sum(arrival.num_blocks for arrival in arrivals[:1]), 1, preempts=preempts
            ),
            [],
        )
    # Without those who came behind the first that did not fit, it may fit after all.
    for arrival in arrivals[num:]:
        row = shares.choose(arrival) if ranks.ranks.size else None
        if row is None:
            break
        shares.add(row, arrival)
        rows.append(row)
    return ranks.ranks[rows].tolist() if rows else []


def place_by_counts(
    ranks: DecodeRanksView, arrivals: Sequence[Arrival], *, preempts: bool
) -> list[int]:
    """The same by numbers of requests alone: each to the rank that has fewest, the lowest of
    equals. What others do.
    """
    shares, rows = Shares(ranks, 0, 0, preempts=preempts), list[int]()
    for arrival in arrivals:
        fits_R = shares.fits(arrival)
        if not fits_R.any():
            break
        row = int(np.where(fits_R, shares.requests_R, np.iinfo(np.int64).max).argmin())
        shares.add(row, arrival)
        rows.append(row)
    return ranks.ranks[rows].tolist() if rows else []


def place_in_turn(
    ranks: DecodeRanksView, arrivals: Sequence[Arrival], *, turn: int, preempts: bool
) -> list[int]:
    """The same without looking at what ranks hold: the first arrival to rank `turn`, the next to
    the next of those that it fits on. Round-robin, to compare with.
    """
    shares, rows = Shares(ranks, 0, 0, preempts=preempts), list[int]()
    for arrival in arrivals:
        fitting = np.flatnonzero(shares.fits(arrival))
        if not fitting.size:
            break
        row = int(fitting[np.argmin((fitting - turn) % ranks.ranks.size)])
        turn = row + 1
        shares.add(row, arrival)
        rows.append(row)
    return ranks.ranks[rows].tolist() if rows else []


def _num_at_most(ranks: DecodeRanksView, arrivals: Sequence[Arrival], preempts: bool) -> int:
    """Return how many of the first arrivals might fit, were the unit one rank. A long queue is not
    worth a longer look.
    """
    num_slots = int(np.maximum(ranks.num_requests_max - ranks.num_requests, 0).sum())
    taken_R = ranks.num_blocks_used if preempts else ranks.num_blocks_worst
    num_blocks = int(np.maximum(ranks.num_blocks - taken_R, 0).sum())
    for index, arrival in enumerate(arrivals[:num_slots]):
        num_blocks -= arrival.num_blocks if preempts else arrival.num_blocks_worst
        if num_blocks < 0:
            return index
    return min(len(arrivals), num_slots)


def _largest_first(
    ranks: DecodeRanksView, arrivals: Sequence[Arrival], preempts: bool
) -> tuple[Shares, list[int], int | None]:
    """Place all: (the shares after it, rows by arrival, the earliest arrival that did not fit)."""
    shares = Shares(
        ranks, sum(arrival.num_blocks for arrival in arrivals), len(arrivals), preempts=preempts
    )
    rows = [-1] * len(arrivals)
    failed = None
    for index in sorted(range(len(arrivals)), key=lambda index: -arrivals[index].num_blocks):
        row = shares.choose(arrivals[index])
        if row is None:
            failed = index if failed is None else min(index, failed)
        else:
            shares.add(row, arrivals[index])
            rows[index] = row
    return shares, rows, failed


# Choose running requests that change their rank, where placement alone left a decode unit uneven.
#
# Nobody knows how long a request will run, so even perfect placement drifts: the lightest rank
# cannot be filled faster than requests arrive, the heaviest cannot shed one. Moving one costs it
# some steps and the unit its bytes of KV, so:
#
#     trigger   nothing moves while the heaviest rank is within a small factor of the mean
#     choice    from the heaviest rank, the request and the rank whose two larger shares end lowest
#     payment   of the moves found, as many as gain most: steps that all requests save while the gain lasts,
#               less steps that the moved ones stand still
#     budget    at most so many a decision
#
# Knows nothing of the hand-over that carries it out. Shapes: R ranks, S slots of a rank.


@dataclass(frozen=True, slots=True)
class RunningView:
    """What may be moved, by rank (rows of the DecodeRanksView) and slot."""

    num_blocks_RS: Ints
    """0: nobody there, or nobody who can be moved now."""
    num_blocks_worst_RS: Ints


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """When a move pays. The shares of a step's time come from the step model (perf), or from
    measured steps.
    """

    trigger: float = 1.02
    """Largest share of a rank over the mean that is left alone. At 1.01 some five times as many
    requests move for a point of balance (simulated: facts)."""
    num_moves_max: int = 4
    """Most moves of one decision."""
    kv_time_share: float = 0.28
    """Share of a balanced step's time that grows with a rank's KV (facts: 2.9e-8 s a token, 96
    requests of 4.4k tokens).
    """
    request_time_share: float = 0.26
    """The same of its requests, 1.2e-4 s each: half of it on the rank itself, half in the exchange
    all wait for.
    """
    stall_steps: float = 3.0
    """Steps that a moved request stands still: at most, as roles/decode/slots has it."""
    gain_steps: float = 50.0
    """Steps after which the unit would be about as uneven again. A request that moved stays for as
    long.
    """
    num_tokens_left_min: int = 8
    """A request with fewer tokens to go at its longest is left where it is."""


@dataclass(frozen=True, slots=True)
class Move:
    """A request on its way from one rank to another."""

    from_rank: int
    slot: int
    to_rank: int


def terms_of(kv_s: float, request_s: float, step_s: float, known: MoveTerms) -> MoveTerms:
    """`known` with what a mean rank's KV and requests take of a step of `step_s` seconds.

    As it is where steps show no cost of KV (a small model's may not): equal KV is wanted for
    memory's sake, too.
    """
    step_s = max(step_s, kv_s + request_s)
    if step_s <= 0.0 or kv_s <= 0.0:
        return known
    return replace(known, kv_time_share=kv_s / step_s, request_time_share=request_s / step_s)


def is_uneven(ranks: DecodeRanksView, terms: MoveTerms) -> bool:
    """The trigger alone: whether looking at requests is worth while."""
    if ranks.ranks.size < 2:
        return False
    share_R = ranks.num_blocks_used / np.maximum(ranks.num_blocks, 1)
    mean = float(ranks.num_blocks_used.sum()) / max(float(ranks.num_blocks.sum()), 1.0)
    return float(share_R.max()) > terms.trigger * mean


def choose_moves(
    ranks: DecodeRanksView, running: RunningView, terms: MoveTerms, *, preempts: bool
) -> list[Move]:
    """Return moves, best prefix first to last, empty where they do not pay. No request is moved
    twice, and no rank that gave takes: what a request leaves comes free only when it has arrived.
    """
    shares = Shares(ranks, 0, 0, preempts=preempts)
    num_running = int(shares.requests_R.sum())
    is_movable_RS = running.num_blocks_RS > 0
    gives_R = np.zeros(ranks.ranks.size, np.bool_)
    moves: list[Move] = []
    best_gain, num_best = 0.0, 0
    before = _step_time(shares, terms)
    while len(moves) < terms.num_moves_max:
        source = int(shares.kv_R.argmax())
        if shares.kv_R[source] <= terms.trigger:
            break
        found = _best(shares, running, is_movable_RS, gives_R, source)
        if found is None:
            break
        slot, target = found
        request = Arrival(
            int(running.num_blocks_RS[source, slot]), int(running.num_blocks_worst_RS[source, slot])
        )
        shares.add(source, request, -1)
        shares.add(target, request)
        is_movable_RS[source, slot], gives_R[source] = False, True
        moves.append(Move(int(ranks.ranks[source]), slot, int(ranks.ranks[target])))
        gain = (
            before - _step_time(shares, terms)
        ) * terms.gain_steps * num_running - terms.stall_steps * len(moves)
        if gain > best_gain:
            best_gain, num_best = gain, len(moves)
    return moves[:num_best]


def _step_time(shares: Shares, terms: MoveTerms) -> float:
    """What of a step depends on the balance, in parts of a balanced step: its slowest rank and its
    largest batch.
    """
    kv_R, request_R = (
        terms.kv_time_share * shares.kv_R,
        terms.request_time_share / 2 * shares.request_R,
    )
    return float((kv_R + request_R).max() + request_R.max())


def _best(
    shares: Shares, running: RunningView, is_movable_RS: Bools, gives_R: Bools, source: int
) -> tuple[int, int] | None:
    """(slot, target row) after which the larger of both ranks' shares is smallest; None if none is
    better than now.
    """
    slots_C = np.flatnonzero(is_movable_RS[source])
    if not slots_C.size:
        return None
    blocks_C = running.num_blocks_RS[source, slots_C]
    kv_R, request_R = shares.kv_R, shares.request_R
    left_C: Floats = kv_R[source] - blocks_C * shares.per_block_R[source]
    kv_CR = kv_R + blocks_C[:, None] * shares.per_block_R
    score_CR = np.maximum(np.maximum(kv_CR, request_R + shares.per_request_R), left_C[:, None])
    score_CR[:, source] = score_CR[:, gives_R] = np.inf
    # Most pairs fit, so only the best is looked at before the next.
    while True:
        row, target = divmod(int(score_CR.argmin()), score_CR.shape[1])
        if not score_CR[row, target] < kv_R[source]:
            return None
        slot = int(slots_C[row])
        request = Arrival(int(blocks_C[row]), int(running.num_blocks_worst_RS[source, slot]))
        if shares.fits(request)[target]:
            return slot, target
        score_CR[row, target] = np.inf


# Who has to leave a decode unit when a running request needs a block and none is free.
#
# The latest arrived of the tenant that holds most goes first: it has the least computed work behind
# it, and what one tenant's requests grow by is taken from none that holds less. The oldest of all
# always proceeds, so that something finishes. Nothing is lost: the front holds all tokens of the
# others and prefills them again.


def choose_victims(holders: Sequence[HolderView], num_blocks_missing: int) -> list[int]:
    """Return slots to preempt, in turn the latest arrived of whichever tenant still holds most
    blocks, until `num_blocks_missing` blocks come free; those of batches before all others.

    Never all of them: the oldest stays, even if that leaves blocks missing.
    """
    tenant_to_num: Counter[str] = Counter()
    tenant_to_holders: dict[str, list[HolderView]] = {}
    in_order = sorted(holders, key=lambda holder: (is_batch(holder.tenant), holder.arrival))
    for number, holder in enumerate(in_order):
        tenant_to_num[holder.tenant] += holder.num_blocks
        if number:
            tenant_to_holders.setdefault(holder.tenant, []).append(holder)
    victims: list[int] = []
    missing = num_blocks_missing
    while missing > 0 and tenant_to_holders:
        # Of equals the one whose request came last.
        tenant = max(
            tenant_to_holders,
            key=lambda name: (
                is_batch(name),
                tenant_to_num[name],
                tenant_to_holders[name][-1].arrival,
            ),
        )
        victim = tenant_to_holders[tenant].pop()
        if not tenant_to_holders[tenant]:
            del tenant_to_holders[tenant]
        tenant_to_num[tenant] -= victim.num_blocks
        victims.append(victim.slot)
        missing -= victim.num_blocks
    return victims
