"""Sampler of a rank: draws the next token of every row of a batch, with per-slot state in arrays.

Independent of requests: a slot gets its sampling parameters at `join`. The draw at output index i
depends only on (seed, i), the row's logits, and the request's own parameters and tokens, so batch
composition, retries, preemption and drafts never change it. The rules of the draw are in
`hadal.reference.sampling`.

Shapes: B slots, R rows of all slots, N drawn tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hadal.core import plans
from hadal.core.drafts import Compared, summed
from hadal.core.plans import NO_TOKEN, Draw, Sampling, Score
from hadal.kernels.sampling import sample
from hadal.model.execute import Recorder
from hadal.model.masks import SlotMasks
from hadal.reference.sampling import (
    DRAWN,
    NOT_FINITE,
    NOTHING_LEFT,
    SLOT,
    TOKEN_VALUE,
    RowMasks,
    SlotTable,
)
from hadal.tokens.grammars import Grammars

_GREEDY_BELOW = 1e-5
"""Temperatures up to this value mean greedy: dividing logits by them could overflow."""
_REASONS = {
    NOT_FINITE: f"{plans.NOT_FINITE}: its logits have infinite values or NaN",
    NOTHING_LEFT: f"{NO_TOKEN}: logit_bias, penalties or min_tokens exclude every token",
}


@dataclass(frozen=True)
class Drawn:
    """Tokens of one step, grouped by pass, then by slot. For a slot in `failed`, its last token of
    the failed pass is invalid, and so are its tokens of later passes.
    """

    tokens: np.ndarray
    num_B: np.ndarray
    """Number of tokens that each slot drew, pass by pass."""
    rows: np.ndarray
    """Row of its pass from which each token was drawn."""
    draws: dict[int, Draw] = field(default_factory=dict)
    """Index into `tokens` -> log-probabilities at that token, if requested."""
    failed: dict[int, str] = field(default_factory=dict)
    """Slot (in prefill: chunk) -> reason why no token could be drawn."""
    scores: dict[int, tuple[Score, ...]] = field(default_factory=dict)
    """Chunk -> log-probabilities and ranks of its prompt tokens, if requested."""
    drafts: Compared = ()


def joined(passes: Sequence[Drawn]) -> Drawn:
    """Join the results of successive passes of one step. `num_B` and `rows` are concatenated; row
    numbers stay those of their pass.
    """
    if len(passes) == 1:
        return passes[0]
    ahead = np.cumsum([0, *(len(each.tokens) for each in passes)]).tolist()
    return Drawn(
        np.concatenate([each.tokens for each in passes]),
        np.concatenate([each.num_B for each in passes]),
        np.concatenate([each.rows for each in passes]),
        {
            first + index: draw
            for first, each in zip(ahead, passes, strict=False)
            for index, draw in each.draws.items()
        },
        # Keep a slot's first failure: its later draws follow an invalid token.
        {slot: reason for each in reversed(passes) for slot, reason in each.failed.items()},
        drafts=summed(each.drafts for each in passes),
    )


NO_ROWS = np.zeros(0, np.int64)
NOTHING_DRAWN = Drawn(NO_ROWS, NO_ROWS, NO_ROWS)


class Sampler:
    """State of `num_slots` slots over a vocabulary."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars` None: no slot can have a grammar."""
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._slots = np.zeros(num_slots, SLOT)
        self._bias: dict[int, np.ndarray] = {}
        self._masks = None if grammars is None else SlotMasks(grammars)
        # The first slot with a penalty makes the table allocate its token counts, for all slots.
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
        """Set the sampling of `slot`. `prompt` matters only with a penalty, `output` with a penalty
        or a grammar. Raises ValueError for a grammar if the sampler was made without `grammars`.
        """
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
        row["index"] = output_index
        row["min_tokens"] = min_tokens
        bias = self._known(sampling.logit_bias)
        is_early = min_tokens > output_index
        forbidden = self._known((token, -np.inf) for token in stop_ids if is_early)
        self._set_bias(slot, np.concatenate([bias, forbidden]), len(forbidden))
        if sampling.presence_penalty or sampling.frequency_penalty or row["repetition"] != 1:
            self._remember(slot, prompt, output)
        self._leave_grammar(slot)
        if sampling.grammar is not None:
            if self._masks is None:
                raise ValueError("a request has a grammar, but this rank has no grammars.")
            self._masks.join(slot, sampling.grammar, output)

    def leave(self, slot: int) -> None:
        """Drop the slot's bias and grammar, if it has any."""
        self._set_bias(slot, self._table.bias[:0])
        self._leave_grammar(slot)

    @property
    def has_grammars(self) -> bool:
        """True if any slot has a grammar."""
        return self._masks is not None and len(self._masks) > 0

    def begin(self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray) -> None:
        """Start computing the rows' grammar masks in the background, during their forward pass.
        Optional: otherwise `wait` starts it.
        """
        if self._masks is not None and self.has_grammars:
            self._masks.begin(slots_B, num_B, fed_R)

    def wait(self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray) -> RowMasks | None:
        """Return the grammar masks of the rows; None if they allow all tokens."""
        if self._masks is None:
            return None
        if not self._masks.has_begun:
            self.begin(slots_B, num_B, fed_R)
        return self._masks.wait()

    def masks(
        self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray, recorder: Recorder
    ) -> RowMasks | None:
        """Return the result of `wait`, and record its time; None if they allow all tokens."""
        if not self.has_grammars:
            return None
        recorder.begin(plans.MASK)
        masks = self.wait(slots_B, num_B, fed_R)
        recorder.end(plans.MASK)
        return masks

    def draw(
        self,
        logits_RV: Tensor,
        slots_B: np.ndarray,
        num_B: np.ndarray | None = None,
        fed_R: np.ndarray | None = None,
        masks: RowMasks | None = None,
    ) -> Drawn:
        """Draw for each slot from its row, or from its `num_B` adjacent rows. `fed_R`: input token
        of each row. A slot's rows are used in order, as long as the drawn token equals the next
        row's input. Advances the slots by their drawn tokens. `masks`: result of `wait` for the
        same rows. Raises ValueError if a slot occurs twice.
        """
        if num_B is None:
            num_B = np.ones(len(slots_B), np.int64)
        if fed_R is None:
            fed_R = num_B  # Any values will do: with one row per slot, no inputs are compared.
        num_drawn_B, at_N, rows_N, best_NK = sample(
            logits_RV, slots_B, num_B, fed_R, self._table, masks
        )
        tokens_N, is_drawn_N = np.ascontiguousarray(rows_N["token"]), rows_N["status"] == DRAWN
        if self._masks is not None and self.has_grammars:
            self._masks.advance(slots_B, num_drawn_B, tokens_N)
        if not is_drawn_N.all() or (self._slots["num_logprobs"][slots_B] >= 0).any():
            slots_N = np.repeat(slots_B, num_drawn_B)
            num_best_N = self._slots["num_logprobs"][slots_N]
            failed = {
                int(slots_N[i]): self._reason(int(slots_N[i]), int(rows_N["status"][i]))
                for i in (~is_drawn_N).nonzero()[0]
            }
            draws = {
                int(i): Draw(
                    float(rows_N["logprob"][i]), tuple(best_NK[i, : num_best_N[i]].tolist())
                )
                for i in (is_drawn_N & (num_best_N >= 0)).nonzero()[0]
            }
            return Drawn(tokens_N, num_drawn_B, at_N, draws, failed)
        return Drawn(tokens_N, num_drawn_B, at_N)

    def _reason(self, slot: int, status: int) -> str:
        """Return the reason why no token could be drawn."""
        why = None if self._masks is None else self._masks.error(slot)
        if status == NOTHING_LEFT and why is not None:
            return f"{NO_TOKEN}: its text can no longer follow its format ({why})"
        return _REASONS[status]

    def _leave_grammar(self, slot: int) -> None:
        if self._masks is not None:
            self._masks.leave(slot)

    def _known(self, bias: Iterable[tuple[int, float]]) -> np.ndarray:
        """Return the pairs with ids within the vocabulary; other ids are never drawn."""
        return np.array([pair for pair in bias if 0 <= pair[0] < self._vocab_size], TOKEN_VALUE)

    def _set_bias(self, slot: int, bias: np.ndarray, num_forbidden: int = 0) -> None:
        """Set a slot's bias. The last `num_forbidden` entries apply only before min_tokens."""
        if not len(bias) and slot not in self._bias:
            return
        self._bias[slot] = bias
        if not len(bias):
            del self._bias[slot]
        self._slots["num_bias"][slot] = len(bias) - num_forbidden
        self._slots["num_forbidden"][slot] = num_forbidden
        begin = 0
        for other, part in self._bias.items():
            self._slots["bias_begin"][other] = begin
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
