"""Choose running requests to move to another rank, where placement alone left a decode unit uneven.

Request lengths are unknown, so even perfect placement drifts: the lightest rank fills no faster
than requests arrive, and the heaviest cannot shed one. A move costs the request some steps and the
unit its KV bytes, so:

    trigger   nothing moves while the heaviest rank is within a small factor of the mean
    choice    a request of the heaviest rank and a target, so that the larger of their shares is lowest
    payment   the prefix of moves that gains most: steps saved for all requests, less stalled steps of moved ones
    budget    a maximum number of moves per decision

Independent of the KV transfer that carries a move out. Shapes: R ranks, S slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hadal.core.arrays import Bools, Floats, Ints
from hadal.policy.decode_balance import Arrival, Shares
from hadal.policy.views import DecodeRanksView


@dataclass(frozen=True, slots=True)
class RunningView:
    """Requests that may be moved, by rank (rows of the DecodeRanksView) and slot."""

    num_blocks_RS: Ints
    """KV blocks of each slot's request; 0 if the slot is empty or its request cannot be moved now."""
    num_blocks_worst_RS: Ints


@dataclass(frozen=True, slots=True)
class MoveTerms:
    """Terms on which a move pays. The shares of a step's time come from the step model (perf), or
    from measured steps.
    """

    trigger: float = 1.02
    """Largest KV share of a rank over the mean that is tolerated. At 1.01 about five times as many
    requests move per point of balance (simulated).
    """
    num_moves_max: int = 4
    """Maximum number of moves of one decision."""
    kv_time_share: float = 0.28
    """Share of a balanced step's time that grows with a rank's KV (simulated step: 2.9e-8 s per
    token, 96 requests of 4.4k tokens).
    """
    request_time_share: float = 0.26
    """Share of a balanced step's time that grows with a rank's requests (simulated step: 1.2e-4 s
    each): half of it on the rank itself, half in the exchange that all ranks wait for.
    """
    stall_steps: float = 3.0
    """Steps that a moved request stands still, at most (roles/decode/moving)."""
    gain_steps: float = 50.0
    """Steps until the unit is about as uneven again. A moved request does not move again before."""
    num_tokens_left_min: int = 8
    """Minimum number of tokens that a request may still generate, at its longest, to be moved."""


@dataclass(frozen=True, slots=True)
class Move:
    """Move of a request from one rank to another."""

    from_rank: int
    slot: int
    to_rank: int


def terms_of(kv_s: float, request_s: float, step_s: float, known: MoveTerms) -> MoveTerms:
    """Return `known` with measured shares: `kv_s` and `request_s`, seconds that a mean rank's KV
    and requests take in a step of `step_s`. If KV took no measurable time, as in a small model,
    return `known` itself: equal KV also saves memory.
    """
    step_s = max(step_s, kv_s + request_s)
    if step_s <= 0.0 or kv_s <= 0.0:
        return known
    return replace(known, kv_time_share=kv_s / step_s, request_time_share=request_s / step_s)


def is_uneven(ranks: DecodeRanksView, terms: MoveTerms) -> bool:
    """Return True if the trigger is exceeded, so that choosing moves is worthwhile."""
    if ranks.ranks.size < 2:
        return False
    share_R = ranks.num_blocks_used / np.maximum(ranks.num_blocks, 1)
    mean = float(ranks.num_blocks_used.sum()) / max(float(ranks.num_blocks.sum()), 1.0)
    return float(share_R.max()) > terms.trigger * mean


def choose_moves(
    ranks: DecodeRanksView, running: RunningView, terms: MoveTerms, *, preempts: bool
) -> list[Move]:
    """Return the best prefix of the moves found, empty if none pays. No request moves twice, and no rank
    that gave a request takes one: its blocks are freed only when the request has arrived elsewhere.
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
    """Return the part of a step's time that depends on balance, relative to a balanced step: the
    slowest rank's time, plus the exchange's for the rank with most requests.
    """
    kv_R, request_R = (
        terms.kv_time_share * shares.kv_R,
        terms.request_time_share / 2 * shares.request_R,
    )
    return float((kv_R + request_R).max() + request_R.max())


def _best(
    shares: Shares, running: RunningView, is_movable_RS: Bools, gives_R: Bools, source: int
) -> tuple[int, int] | None:
    """Return (slot, target row) of the move that leaves the smallest maximum of both ranks' shares;
    None if no move gets below the source's present KV share.
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
    # Most pairs fit, so fits are checked lazily, best pair first.
    while True:
        row, target = divmod(int(score_CR.argmin()), score_CR.shape[1])
        if not score_CR[row, target] < kv_R[source]:
            return None
        slot = int(slots_C[row])
        request = Arrival(int(blocks_C[row]), int(running.num_blocks_worst_RS[source, slot]))
        if shares.fits(request)[target]:
            return slot, target
        score_CR[row, target] = np.inf
