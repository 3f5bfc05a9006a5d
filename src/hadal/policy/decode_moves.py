"""Choose running requests that change their rank, where placement alone left a decode unit uneven.

Nobody knows how long a request will run, so even perfect placement drifts: the lightest rank cannot
be filled faster than requests arrive, the heaviest cannot shed one. Moving one costs it some steps
and the unit its bytes of KV, so:

    trigger   nothing moves while the heaviest rank is within a small factor of the mean
    choice    from the heaviest rank, the request and the rank whose two larger shares end lowest
    payment   of the moves found, as many as gain most: steps that all requests save while the gain lasts,
              less steps that the moved ones stand still
    budget    at most so many a decision

Knows nothing of the hand-over that carries it out. Shapes: R ranks, S slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hadal.core.arrays import Bools, Floats, Ints
from hadal.policy.decode_balance import Arrival, Shares
from hadal.policy.views import DecodeRanksView


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
