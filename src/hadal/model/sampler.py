"""Draws the next token of every row of a batch, on the rank. Per-slot state lies in arrays, made
once.

Knows no requests: a slot gets its sampling when a request joins it. The draw at output index i
depends on (seed, i) and the row's logits alone, so batch composition, retries and preemption never
change it. What is drawn is `hadal.reference.sampling`'s to say.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hadal.core.plans import NO_TOKEN, Draw, Sampling
from hadal.kernels.sampling import sample
from hadal.reference.sampling import DRAWN, NOT_FINITE, NOTHING_LEFT, SLOT, TOKEN_VALUE, SlotTable

_GREEDY_BELOW = 1e-5
"""A temperature this low is greedy: dividing by it would overflow."""
_REASONS = {
    NOT_FINITE: "its logits are not finite",
    NOTHING_LEFT: f"{NO_TOKEN}: logit_bias, penalties, and stop ids before min_tokens leave none",
}


@dataclass(frozen=True)
class Drawn:
    """One step's tokens. A row in `failed` has no valid token."""

    tokens: np.ndarray
    draws: dict[int, Draw] = field(default_factory=dict)
    """row -> log-probabilities, where asked for."""
    failed: dict[int, str] = field(default_factory=dict)
    """slot -> why nothing could be drawn."""


class Sampler:
    """State of `num_slots` slots over a vocabulary."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._slots = np.zeros(num_slots, SLOT)
        self._output_index = np.zeros(num_slots, np.int64)
        self._bias: dict[int, np.ndarray] = {}
        self._bias_later: dict[int, tuple[int, np.ndarray]] = {}
        """slot -> from which output index on its stop ids may be drawn, and its bias then."""
        # Its counts, for all slots, are made when the first one with a penalty joins.
        self._table = SlotTable(self._slots, np.empty(0, TOKEN_VALUE))

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
        is_greedy = sampling.temperature <= _GREEDY_BELOW
        row = self._slots[slot]
        row["temperature"] = 0.0 if is_greedy else sampling.temperature
        row["top_k"] = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        row["top_p"] = sampling.top_p
        row["min_p"] = sampling.min_p
        row["presence"] = sampling.presence_penalty
        row["frequency"] = sampling.frequency_penalty
        row["repetition"] = sampling.repetition_penalty
        row["seed"] = sampling.seed & 0xFFFF_FFFF_FFFF_FFFF
        row["num_logprobs"] = min(sampling.num_logprobs, self._vocab_size)
        self._output_index[slot] = output_index
        self.leave(slot)
        bias = self._known(sampling.logit_bias)
        if min_tokens > output_index:
            self._bias_later[slot] = min_tokens, bias
            forbidden = self._known((token, -np.inf) for token in stop_ids)
            bias = np.concatenate([bias, forbidden])
        self._set_bias(slot, bias)
        if sampling.presence_penalty or sampling.frequency_penalty or row["repetition"] != 1:
            self._remember(slot, prompt, output)

    def leave(self, slot: int) -> None:
        """Forget what only some slots have."""
        self._bias_later.pop(slot, None)
        self._set_bias(slot, self._table.bias[:0])

    def draw(self, logits_BV: Tensor, slots_B: np.ndarray) -> Drawn:
        """Draw one token for each row; row i belongs to `slots_B[i]`. Advances the slots that
        drew.
        """
        rows_B, best_BN = sample(logits_BV, slots_B, self._output_index[slots_B], self._table)
        tokens_B, is_drawn_B = rows_B["token"], rows_B["status"] == DRAWN
        failed = {
            int(slots_B[row]): _REASONS[int(rows_B["status"][row])]
            for row in (~is_drawn_B).nonzero()[0]
        }
        num_best_B = self._slots["num_logprobs"][slots_B]
        draws = {
            int(row): Draw(
                float(rows_B["logprob"][row]), tuple(best_BN[row, : num_best_B[row]].tolist())
            )
            for row in (is_drawn_B & (num_best_B >= 0)).nonzero()[0]
        }
        self._advance(slots_B[is_drawn_B], tokens_B[is_drawn_B])
        return Drawn(tokens_B, draws, failed)

    def _advance(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self._output_index[slots] += 1
        for slot, (min_tokens, bias) in list(self._bias_later.items()):
            if self._output_index[slot] >= min_tokens:
                del self._bias_later[slot]
                self._set_bias(slot, bias)
        counts_SV, seen_SV = self._table.counts_SV, self._table.seen_SV
        if counts_SV is not None and seen_SV is not None:
            # Of slots without a penalty, too: nobody reads theirs.
            at = self._ids(slots), self._ids(tokens)
            counts_SV[at] += 1
            seen_SV[at] = True

    def _known(self, bias: Iterable[tuple[int, float]]) -> np.ndarray:
        """Without the ids that are outside the vocabulary, and never drawn anyway."""
        return np.array([pair for pair in bias if 0 <= pair[0] < self._vocab_size], TOKEN_VALUE)

    def _set_bias(self, slot: int, bias: np.ndarray) -> None:
        if not len(bias) and slot not in self._bias:
            return
        self._bias[slot] = bias
        if not len(bias):
            del self._bias[slot]
            self._slots["num_bias"][slot] = 0
        begin = 0
        for other, part in self._bias.items():
            self._slots["bias_begin"][other], self._slots["num_bias"][other] = begin, len(part)
            begin += len(part)
        self._table.bias = np.concatenate([bias[:0], *self._bias.values()])

    def _remember(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        table = self._table
        if table.counts_SV is None or table.seen_SV is None:
            shape = (len(self._slots), self._vocab_size)
            table.counts_SV = torch.zeros(shape, dtype=torch.int32, device=self._device)
            table.seen_SV = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=self._vocab_size)
        table.counts_SV[slot] = torch.from_numpy(counts[: self._vocab_size]).to(self._device)
        table.seen_SV[slot] = False
        table.seen_SV[slot, self._ids([*prompt, *output])] = True

    def _ids(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64)).to(self._device)
