"""Draws the next token of every row of a batch, on the rank. Per-slot state lies in arrays, made
once.

Knows no requests: a slot gets its sampling when a request joins it. The draw at output index i
depends on (seed, i) and the row's logits alone, so batch composition, retries and preemption never
change it. Greedy rows cost one argmax.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hadal.core.plans import NO_TOKEN, Draw, Sampling

# From logits to a token: the pure arithmetic of sampling, a row at a time but vectorised over
# rows. Keeps no state.
#
# Ties are never broken by the order of a sort: a threshold keeps all tokens as likely as the last
# one kept, so a row's draw does not depend on which other rows are in the batch. Shapes: B rows, V
# vocabulary.


_NUM_CANDIDATES = 16
"""Likeliest tokens looked at first; more only if a nucleus reaches beyond them."""


def uniform(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) that depend on (seed, index) alone: splitmix64 (Steele, Lea, Flood 2014) at
    counter `index`.

    Both uint64; the result is float64 with 53 random bits.
    """
    # The seed is mixed first: neighbouring seeds would otherwise be the same stream, shifted.
    with np.errstate(over="ignore"):
        z = _mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + (indices + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        bits: np.ndarray = _mix(z) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor) -> Tensor:
    """Make tokens of prompt and output less likely: divide positive logits, multiply negative ones
    (CTRL, 2019).
    """
    penalty = penalty_B[:, None]
    return torch.where(
        seen_BV, torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty), logits_BV
    )


def penalise_counts(
    logits_BV: Tensor, counts_BV: Tensor, frequency_B: Tensor, presence_B: Tensor
) -> Tensor:
    """Subtract frequency * count and, once it occurred, presence. Counted over the output alone (as
    OpenAI does).
    """
    return logits_BV - frequency_B[:, None] * counts_BV - presence_B[:, None] * (counts_BV > 0)


def draw(
    p_BV: Tensor,
    top_k_B: np.ndarray,
    top_p_B: np.ndarray,
    min_p_B: np.ndarray,
    uniform_B: np.ndarray,
) -> Tensor:
    """Draw a token [B] of what top-k, then top-p of the rest, then min-p leave; 0, 1 and 0 leave
    out nothing.

    `p_BV` are probabilities up to a factor per row. Whole rows are walked only where neither top-k
    nor top-p is set. What is to be done is decided by arrays of the host, so that nothing waits for
    the device.
    """
    is_ranked_B = (top_k_B > 0) | (top_p_B < 1)
    if is_ranked_B.any() and not is_ranked_B.all():
        tokens_B = torch.empty(len(p_BV), dtype=torch.int64, device=p_BV.device)
        for part_B in (is_ranked_B, ~is_ranked_B):
            at_B = torch.from_numpy(part_B).to(p_BV.device)
            settings = (x[part_B] for x in (top_k_B, top_p_B, min_p_B, uniform_B))
            tokens_B[at_B] = draw(p_BV[at_B], *settings)
        return tokens_B
    u_B, least_B = (torch.from_numpy(x).to(p_BV.device) for x in (uniform_B, min_p_B))
    if is_ranked_B.all():
        most_B, mass_B = (torch.from_numpy(x).to(p_BV.device) for x in (top_k_B, top_p_B))
        ids_BW, kept_BW = nucleus(p_BV, most_B, mass_B, least_B)
        return ids_BW.gather(-1, pick(kept_BW, u_B)[:, None])[:, 0]
    if min_p_B.any():
        p_BV = p_BV.where(p_BV >= (least_B * p_BV.amax(-1))[:, None], 0.0)
    return pick(p_BV, u_B)


def nucleus(
    p_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (ids [B, W] ascending, their probabilities [B, W] or 0): all tokens that stay are
    among the W.

    Ascending, so that a draw is the same as over the whole row, whatever W is. Every row has top-k
    or top-p set.
    """
    vocabulary = p_BV.shape[-1]
    limit_B = torch.where(top_k_B > 0, top_k_B.clamp(max=vocabulary), vocabulary)
    total_B = p_BV.sum(-1, dtype=torch.float64)
    width = min(vocabulary, max(_NUM_CANDIDATES, int(top_k_B.max()) + 1))
    while True:
        largest_BW, ids_BW = p_BV.topk(width, dim=-1)
        is_within_BW = torch.arange(width, device=p_BV.device) < limit_B[:, None]
        sums_BW = largest_BW.where(is_within_BW, 0.0).cumsum(-1, dtype=torch.float64)
        wanted_B = top_p_B * torch.where(top_k_B > 0, sums_BW[:, -1], total_B)
        # A token is in the nucleus if those before it do not reach the wanted mass; the first
        # always is.
        is_inside_BW = is_within_BW & (
            (sums_BW - largest_BW < wanted_B[:, None]) | (top_p_B >= 1)[:, None]
        )
        last_B = is_inside_BW.sum(-1).clamp(min=1) - 1
        threshold_B = largest_BW.gather(-1, last_B[:, None])[:, 0]
        # The last one kept may have equals beyond the candidates, or not be reached yet; 0 is
        # nobody's equal.
        is_open_B = (threshold_B <= largest_BW[:, -1]) & (threshold_B > 0)
        if width == vocabulary or not bool(is_open_B.any()):
            break
        width = min(vocabulary, width * 8)
    threshold_B = torch.maximum(threshold_B, min_p_B * largest_BW[:, 0])
    kept_BW = largest_BW.where(largest_BW >= threshold_B[:, None], 0.0)
    ids_BW, order_BW = ids_BW.sort(-1)
    return ids_BW, kept_BW.gather(-1, order_BW)


def pick(p_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Invert the cumulative distribution at `uniform_B`: tokens [B]. A token of probability 0 is
    never picked.
    """
    sums_BV = p_BV.cumsum(-1, dtype=torch.float64)
    target_B1 = (uniform_B * sums_BV[:, -1])[:, None]
    index_B = torch.searchsorted(sums_BV, target_B1, right=True)[:, 0]
    # Rounding may put the target on the total itself: then the last token of positive probability.
    last_B = torch.searchsorted(sums_BV, sums_BV[:, -1:].contiguous())[:, 0]
    return torch.minimum(index_B, last_B)


_GREEDY_BELOW = 1e-5
"""A temperature this low is greedy: dividing by it would overflow."""
_OWN = f"{NO_TOKEN}: logit_bias, penalties, and stop ids before min_tokens leave none"
_CACHED_VALUES = 2**19
"""Values of the rows that are drawn together on a CPU: 2 MiB stay in its cache (twice as fast at
V3's size).
"""


@dataclass(frozen=True)
class Drawn:
    """One step's tokens. A row in `failed` has no valid token."""

    tokens: np.ndarray
    draws: dict[int, Draw] = field(default_factory=dict)
    """slot -> log-probabilities, where asked for."""
    failed: dict[int, str] = field(default_factory=dict)
    """slot -> why nothing could be drawn."""


class Sampler:
    """State of `num_slots` slots over a vocabulary."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        is_cpu = self._device.type == "cpu"
        self._rows_at_once = max(1, _CACHED_VALUES // vocab_size) if is_cpu else num_slots
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._repetition = np.ones(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.uint64)
        self._output_index = np.zeros(num_slots, np.int64)
        self._min_tokens = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._is_plain = np.ones(num_slots, np.bool_)

        self._bias: dict[int, tuple[Tensor, Tensor]] = {}
        self._stop_ids: dict[int, Tensor] = {}
        # [slots, V], made when the first slot with a penalty joins.
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None

    @torch.inference_mode()
    def join(
        self,
        slot: int,
        sampling: Sampling,
        output_index: int,
        *,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """Set how `slot` is drawn from now on. `prompt` and `output` matter only with a penalty."""
        self._temperature[slot] = (
            sampling.temperature if sampling.temperature > _GREEDY_BELOW else 0.0
        )
        self._top_k[slot] = max(sampling.top_k, 0)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._presence[slot] = sampling.presence_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._repetition[slot] = sampling.repetition_penalty
        self._seed[slot] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._output_index[slot] = output_index
        self._min_tokens[slot] = min_tokens
        self._num_logprobs[slot] = sampling.num_logprobs
        self._bias.pop(slot, None)
        self._stop_ids.pop(slot, None)
        if sampling.logit_bias:
            # An id outside the vocabulary is never drawn anyway.
            pairs = [
                (token, value)
                for token, value in sampling.logit_bias
                if 0 <= token < self._vocab_size
            ]
            self._bias[slot] = (
                self._ids([token for token, _ in pairs]),
                self._floats([value for _, value in pairs]),
            )
        if min_tokens > output_index:
            self._stop_ids[slot] = self._ids(
                [token for token in stop_ids if 0 <= token < self._vocab_size]
            )
        if self._has_penalty(slot):
            self._remember(slot, prompt, output)
        self._set_plain(slot)

    def leave(self, slot: int) -> None:
        """Forget what only some slots have."""
        self._bias.pop(slot, None)
        self._stop_ids.pop(slot, None)
        self._is_plain[slot] = True

    @torch.inference_mode()
    def draw(self, logits_BV: Tensor, slots_B: np.ndarray) -> Drawn:
        """Draw one token for each row; row i belongs to `slots_B[i]`. Advances the slots that
        drew.
        """
        logits_BV = logits_BV.float()
        best_B, tokens_B = logits_BV.max(-1)
        own_B = np.zeros(len(slots_B), np.bool_)  # Rows that the request's own numbers spoil.
        special_B = ~self._is_plain[slots_B]
        if special_B.any():
            special = np.flatnonzero(special_B)
            for first in range(0, len(special), self._rows_at_once):
                rows = special[first : first + self._rows_at_once]
                row_index = torch.from_numpy(rows).to(logits_BV.device)
                picked, usable = self._draw_special(logits_BV[row_index], slots_B[rows])
                tokens_B[row_index] = picked
                own_B[rows] = ~usable.cpu().numpy()
        tokens: np.ndarray = tokens_B.cpu().numpy()
        finite_B = torch.isfinite(best_B).cpu().numpy()
        failed = {int(slots_B[row]): _OWN for row in np.flatnonzero(own_B & finite_B)}
        failed |= {
            int(slots_B[row]): "its logits are not finite" for row in np.flatnonzero(~finite_B)
        }
        finite_B &= ~own_B
        draws = self._logprobs(logits_BV, tokens_B, slots_B) if special_B.any() else {}
        self._advance(slots_B[finite_B], tokens[finite_B])
        return Drawn(
            tokens, {slot: draw for slot, draw in draws.items() if slot not in failed}, failed
        )

    def _draw_special(self, logits_BV: Tensor, slots_B: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens [B] and whether any could be drawn [B]; `logits_BV` is a copy."""
        logits_BV = self._adjust(logits_BV, slots_B)
        best_B, tokens_B = logits_BV.max(-1)
        random = np.flatnonzero(self._temperature[slots_B] > 0)
        if len(random):
            # All of them, where none is greedy: nothing is picked then.
            rows = (
                slice(None)
                if len(random) == len(slots_B)
                else torch.from_numpy(random).to(logits_BV.device)
            )
            slots = slots_B[random]
            scaled = (logits_BV[rows] - best_B[rows][:, None]) / self._floats(
                self._temperature[slots]
            )[:, None]
            u = uniform(self._seed[slots], self._output_index[slots].astype(np.uint64))
            tokens_B[rows] = draw(
                scaled.exp(), self._top_k[slots], self._top_p[slots], self._min_p[slots], u
            )
        return tokens_B, torch.isfinite(best_B)

    def _adjust(self, logits_BV: Tensor, slots_B: np.ndarray) -> Tensor:
        """Bias, penalties, forbidden stop ids: in this order, as vLLM and transformers apply
        them.
        """
        for row, slot in enumerate(slots_B.tolist()):
            if slot in self._bias:
                logits_BV[row].index_add_(0, *self._bias[slot])
        repeated = np.flatnonzero(self._repetition[slots_B] != 1)
        if len(repeated):
            assert self._seen is not None
            rows, slots = self._ids(repeated), slots_B[repeated]
            seen = self._seen[self._ids(slots)]
            logits_BV[rows] = penalise_repetition(
                logits_BV[rows], seen, self._floats(self._repetition[slots])
            )
        counted = np.flatnonzero((self._frequency[slots_B] != 0) | (self._presence[slots_B] != 0))
        if len(counted):
            assert self._counts is not None
            rows, slots = self._ids(counted), slots_B[counted]
            logits_BV[rows] = penalise_counts(
                logits_BV[rows],
                self._counts[self._ids(slots)],
                self._floats(self._frequency[slots]),
                self._floats(self._presence[slots]),
            )
        for row, slot in enumerate(slots_B.tolist()):
            if slot in self._stop_ids:
                logits_BV[row, self._stop_ids[slot]] = float("-inf")
        return logits_BV

    def _logprobs(
        self, logits_BV: Tensor, tokens_B: Tensor, slots_B: np.ndarray
    ) -> dict[int, Draw]:
        """Return log-probabilities of the model's own distribution: before bias, penalties and
        temperature.
        """
        asked = np.flatnonzero(self._num_logprobs[slots_B] >= 0)
        if not len(asked):
            return {}
        rows = self._ids(asked)
        logprobs = logits_BV[rows].log_softmax(-1)
        chosen = logprobs.gather(-1, tokens_B[rows, None])[:, 0].tolist()
        num_best = self._num_logprobs[slots_B[asked]]
        best, best_ids = (
            x.tolist() for x in logprobs.topk(min(int(num_best.max()), self._vocab_size), dim=-1)
        )
        return {
            int(slots_B[row]): Draw(
                chosen[i], tuple(zip(best_ids[i], best[i], strict=True))[: num_best[i]]
            )
            for i, row in enumerate(asked)
        }

    def _advance(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self._output_index[slots] += 1
        for slot in [
            slot for slot in self._stop_ids if self._output_index[slot] >= self._min_tokens[slot]
        ]:
            del self._stop_ids[slot]
            self._set_plain(slot)
        if self._counts is None:
            return
        assert self._seen is not None
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if self._has_penalty(slot):
                self._counts[slot, token] += 1
                self._seen[slot, token] = True

    def _set_plain(self, slot: int) -> None:
        self._is_plain[slot] = (
            self._temperature[slot] == 0
            and self._num_logprobs[slot] < 0
            and not self._has_penalty(slot)
            and slot not in self._bias
            and slot not in self._stop_ids
        )

    def _has_penalty(self, slot: int) -> bool:
        return bool(
            self._presence[slot] != 0 or self._frequency[slot] != 0 or self._repetition[slot] != 1
        )

    def _remember(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self._counts is None:
            shape = (len(self._temperature), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        assert self._seen is not None
        counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=self._vocab_size)[
            : self._vocab_size
        ]
        self._counts[slot] = torch.from_numpy(counts).to(self._device)
        self._seen[slot] = False
        self._seen[slot, self._ids([*prompt, *output])] = True

    def _ids(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(self._device)

    def _floats(self, values: Sequence[float] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.float32)).to(self._device)
