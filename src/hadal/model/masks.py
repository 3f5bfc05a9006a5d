"""Masks of the tokens that a step's slots may draw under their requests' grammars. A separate
thread computes them during the forward pass.

    compute  | forward pass of the step's rows                     | wait | draw |
    masks    | advance by the tokens drawn before | masks          |      |

A draft's row gets the mask that follows if the draft is accepted; otherwise that mask is not used.
Shapes: B slots, R rows of all slots, M masks, W words of 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from hadal.core.plans import Grammar
from hadal.reference.sampling import RowMasks
from hadal.tokens.grammars import Follower, Grammars, TextRows


class _DrawnTokens(NamedTuple):
    """Tokens that a step drew, grouped by slot."""

    slots_B: np.ndarray
    num_B: np.ndarray
    tokens_N: np.ndarray


class SlotMasks:
    """Grammars of a table's slots, each with a follower (its state after the output so far). One
    thread calls all methods; from `begin` until `wait` only the mask thread uses the followers.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._followers: dict[int, Follower] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        """Mask thread, started by the first submit."""
        self._asked: Future[RowMasks | None] | None = None
        self._drawn: _DrawnTokens | None = None
        """Drawn tokens by which the followers must still advance."""

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def has_begun(self) -> bool:
        """True if masks that `begin` started were neither waited for nor discarded."""
        return self._asked is not None

    def join(self, slot: int, grammar: Grammar, output: Sequence[int]) -> None:
        """Add a slot that follows the grammar and has this output so far."""
        self._settle()
        self._followers[slot] = Follower(grammar, output)

    def leave(self, slot: int) -> None:
        """Forget the slot, if it has a grammar."""
        self._settle()
        self._followers.pop(slot, None)

    def begin(self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray) -> None:
        """Start to compute the masks of these slots' rows: `num_B` rows per slot, grouped by slot,
        with fed tokens `fed_R`.
        """
        self._drop()
        # Copies, because the table changes before `wait` if the step fails.
        self._asked = self._thread.submit(self._run, slots_B.copy(), num_B.copy(), fed_R.copy())

    def wait(self) -> RowMasks | None:
        """Return the masks that `begin` started; None if they allow all tokens in all rows, or if
        none were started.
        """
        asked, self._asked = self._asked, None
        return None if asked is None else asked.result()

    def advance(self, slots_B: np.ndarray, num_B: np.ndarray, tokens_N: np.ndarray) -> None:
        """Note that these slots drew `num_B` tokens each, grouped by slot."""
        self._settle()
        self._drawn = _DrawnTokens(
            slots_B.copy(), num_B, tokens_N
        )  # Copy the slots, which are a view of the table.

    def error(self, slot: int) -> str | None:
        """Return why the slot's grammar allows no token; None if the grammar is not the reason."""
        return self._followers[slot].error if slot in self._followers else None

    def _settle(self) -> None:
        """Finish the mask thread's work and bring the followers up to date."""
        self._drop()
        self._tell()

    def _tell(self) -> None:
        """Advance the followers by the drawn tokens."""
        if self._drawn is None:
            return
        slots_B, num_B, tokens_N = self._drawn
        self._drawn = None
        tokens, first = tokens_N.tolist(), 0
        for slot, num in zip(slots_B.tolist(), num_B.tolist(), strict=True):
            follower = self._followers.get(slot)
            if follower is not None:
                follower.advance(tokens[first : first + num])
            first += num

    def _drop(self) -> None:
        """Discard masks of a failed step, which never waited for them and drew no tokens."""
        if self._asked is not None:
            self._asked.exception()
            self._asked = None

    def _run(self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray) -> RowMasks | None:
        self._tell()
        fed, first, num_masks = fed_R.tolist(), 0, 0
        all_rows: list[TextRows] = []
        is_held: list[bool] = []
        for slot, num in zip(slots_B.tolist(), num_B.tolist(), strict=True):
            follower, drafts = self._followers.get(slot), fed[first + 1 : first + num]
            if follower is not None and follower.is_free(drafts):
                follower = None
            is_held.append(follower is not None)
            if follower is not None:
                all_rows.append(TextRows(follower, num_masks, drafts))
                num_masks += num
            first += num
        if not all_rows:
            return None
        is_held_R = np.repeat(is_held, num_B)
        of_R = np.where(is_held_R, is_held_R.cumsum() - 1, -1)
        bits_MW = np.zeros((num_masks, self._grammars.num_words), np.uint32)
        has_mask_M = np.zeros(num_masks, np.bool_)
        self._grammars.allow(all_rows, bits_MW, has_mask_M)
        if not has_mask_M.any():
            return None
        if not has_mask_M.all():
            rows = np.flatnonzero(is_held_R)
            of_R[rows] = np.where(has_mask_M, of_R[rows], -1)
        return RowMasks(bits_MW, of_R)
