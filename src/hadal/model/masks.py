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
from typing import NamedTuple

import numpy as np

from hadal.core.plans import Grammar
from hadal.reference.sampling import RowMasks
from hadal.tokens.grammars import Follower, Grammars, TextRows


class _DrawnTokens(NamedTuple):
    """Tokens that a step drew, those of each slot side by side."""

    slots_B: np.ndarray
    num_B: np.ndarray
    tokens_N: np.ndarray


class SlotMasks:
    """The grammars of a table's slots. Its methods are called from one thread. The followers are the
    other thread's from `begin` until `wait`, and that one's otherwise.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._followers: dict[int, Follower] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        """Without work it has no thread yet."""
        self._asked: Future[RowMasks | None] | None = None
        self._drawn: _DrawnTokens | None = None
        """What the followers were not told yet: that, too, is done while the step computes."""

    def __len__(self) -> int:
        return len(self._followers)

    @property
    def has_begun(self) -> bool:
        """Whether masks are being found out that nobody waited for yet."""
        return self._asked is not None

    def join(self, slot: int, grammar: Grammar, output: Sequence[int]) -> None:
        """The slot's text follows the grammar, and has this output so far."""
        self._settle()
        self._followers[slot] = Follower(grammar, output)

    def leave(self, slot: int) -> None:
        """Forget the slot, if it has a grammar."""
        self._settle()
        self._followers.pop(slot, None)

    def begin(self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray) -> None:
        """Start to find out what the rows of these slots may draw: `num_B` of each, side by side,
        that were fed `fed_R`.
        """
        self._drop()
        # Copies: if the step fails, its table changes before anybody waits.
        self._asked = self._thread.submit(self._run, slots_B.copy(), num_B.copy(), fed_R.copy())

    def wait(self) -> RowMasks | None:
        """What was begun; None where no slot of it has a grammar."""
        asked, self._asked = self._asked, None
        return None if asked is None else asked.result()

    def advance(self, slots_B: np.ndarray, num_B: np.ndarray, tokens_N: np.ndarray) -> None:
        """These slots drew `num_B` tokens each, side by side."""
        self._settle()
        self._drawn = _DrawnTokens(
            slots_B.copy(), num_B, tokens_N
        )  # The slots are a view of the table's.

    def error(self, slot: int) -> str | None:
        """Why nothing can be drawn for the slot, if it is its grammar's fault."""
        return self._followers[slot].error if slot in self._followers else None

    def _settle(self) -> None:
        """Have the followers be where their texts are."""
        self._drop()
        self._tell()

    def _tell(self) -> None:
        """Have the followers read what was drawn."""
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
        """A step that failed did not ask for what it began; it moved no text."""
        if self._asked is not None:
            self._asked.exception()
            self._asked = None

    def _run(self, slots_B: np.ndarray, num_B: np.ndarray, fed_R: np.ndarray) -> RowMasks | None:
        self._tell()
        fed, first, num_masks = fed_R.tolist(), 0, 0
        all_rows: list[TextRows] = []
        is_held: list[bool] = []
        for slot, num in zip(slots_B.tolist(), num_B.tolist(), strict=True):
            follower = self._followers.get(slot)
            is_held.append(follower is not None)
            if follower is not None:
                all_rows.append(TextRows(follower, num_masks, fed[first + 1 : first + num]))
                num_masks += num
            first += num
        if not all_rows:
            return None
        is_held_R = np.repeat(is_held, num_B)
        of_R = np.where(is_held_R, is_held_R.cumsum() - 1, -1)
        bits_MW = np.zeros((num_masks, self._grammars.num_words), np.uint32)
        has_mask_M = np.zeros(num_masks, np.bool_)
        self._grammars.allow(all_rows, bits_MW, has_mask_M)
        if not has_mask_M.all():
            rows = np.flatnonzero(is_held_R)
            of_R[rows] = np.where(has_mask_M, of_R[rows], -1)
        return RowMasks(bits_MW, of_R)
