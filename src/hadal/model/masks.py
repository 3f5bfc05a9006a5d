"""Which tokens the slots of a step may draw, where their requests' grammars say so: found out by a
thread of its own while the step computes.

    compute  | forward pass of the step's rows                     | wait | draw |
    masks    | read what was drawn before | masks, drafts included |      |

A draft is a token that its row was fed: what may be drawn behind it is found out as if it had been
drawn, and asked for only if it is. Shapes: B slots, R rows of all of them, M masks, W words.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from hadal.core.plans import Grammar
from hadal.reference.sampling import RowMasks
from hadal.tokens.grammars import Follower, Grammars, TextRows


class SlotMasks:
    """The grammars of a table's slots. All methods are called from one thread."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._followers: dict[int, Follower] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        """Without work it has no thread yet."""
        self._asked: Future[RowMasks] | None = None

    def __len__(self) -> int:
        return len(self._followers)

    def join(self, slot: int, grammar: Grammar, output: Sequence[int]) -> None:
        """The slot's text follows the grammar, and has this output so far."""
        self._drop()
        self._followers[slot] = Follower(grammar, output)

    def leave(self, slot: int) -> None:
        """Forget the slot, if it has a grammar."""
        self._drop()
        self._followers.pop(slot, None)

    def begin(self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray) -> None:
        """Start to find out what the rows of these slots may draw, `num_B` of each side by side,
        which were fed `fed_R`.
        """
        self._drop()
        fed, first, num_masks = fed_R.tolist(), 0, 0
        all_rows: list[TextRows] = []
        is_held_B = np.zeros(len(slots_B), np.bool_)
        for at, (slot, num) in enumerate(zip(slots_B.tolist(), num_B.tolist(), strict=True)):
            follower = self._followers.get(slot)
            if follower is not None:
                is_held_B[at] = True
                all_rows.append(TextRows(follower, num_masks, fed[first + 1 : first + num]))
                num_masks += num
            first += num
        is_held_R = is_held_B.repeat(num_B)
        of_R = np.where(is_held_R, is_held_R.cumsum() - 1, -1)
        if all_rows:
            self._asked = self._thread.submit(self._run, all_rows, num_masks, of_R)

    def wait(self) -> RowMasks | None:
        """What was begun; None where no slot of it has a grammar."""
        asked, self._asked = self._asked, None
        return None if asked is None else asked.result()

    def advance(self, slot: int, tokens: Sequence[int]) -> None:
        """The slot drew these."""
        if slot in self._followers:
            self._followers[slot].advance(tokens)

    def error(self, slot: int) -> str | None:
        """Why nothing can be drawn for the slot, if it is its grammar's fault."""
        return self._followers[slot].error if slot in self._followers else None

    def _drop(self) -> None:
        """A step that failed did not ask for what it began; it moved no text."""
        if self._asked is not None:
            self._asked.exception()
            self._asked = None

    def _run(self, all_rows: list[TextRows], num_masks: int, of_R: np.ndarray) -> RowMasks:
        bits_MW = np.zeros((num_masks, self._grammars.num_words), np.uint32)
        has_mask_M = np.zeros(num_masks, np.bool_)
        self._grammars.allow(all_rows, bits_MW, has_mask_M)
        rows = np.flatnonzero(of_R >= 0)
        of_R[rows] = np.where(has_mask_M[of_R[rows]], of_R[rows], -1)
        return RowMasks(bits_MW, of_R)
