"""Shape of the next plan, from what earlier steps measured: passes, drafts, resting slots and
micro-batches.

Works on arrays by slot; independent of messages and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hadal.core.arrays import Bools, Ints
from hadal.core.drafts import Compared
from hadal.policy.decode_moves import MoveTerms, terms_of
from hadal.policy.drafts import DraftChooser
from hadal.policy.passes import passes_of
from hadal.policy.rows import resting_rows
from hadal.roles.decode.table import DecodeTable
from hadal.roles.unit.meters import LineMeter, StepMeter
from hadal.roles.unit.schedule import StepScheduler


class PassTimes:
    """Measured seconds of passes of the model, by the number of requests in them."""

    def __init__(self, promise: float, known_terms: MoveTerms) -> None:
        """`promise`: see policy/rows. `known_terms`: when a move pays, until steps are measured."""
        self.known_terms = known_terms
        self._promise = promise
        self._mean = StepMeter()
        self._line = LineMeter()
        self._num_requests_done = 1
        """Requests in the last measured step, on the rank with the most."""

    def add(self, num_requests: int, num_passes: int, seconds: float) -> None:
        """Note a step that took `seconds`; `num_requests`: requests on the rank with the most."""
        pass_s = seconds / num_passes
        self._mean.done(pass_s)
        self._line.add(num_requests, pass_s)
        self._num_requests_done = max(1, num_requests)

    @property
    def mean_s(self) -> float:
        """Smoothed seconds of a pass; 0 while unknown."""
        return self._mean.step_ms / 1e3

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a pass without requests, and seconds per request (LineMeter)."""
        return self._line.line

    def num_wanted(self, num_requests: int) -> int:
        """Return the number of passes of a plan with `num_requests` on the rank with the most."""
        # The last step may have been short because most rows rested.
        growth = max(1.0, num_requests / self._num_requests_done)
        return passes_of(growth * self._mean.step_ms / 1e3)

    def terms(self, kv_s: float, request_s: float) -> MoveTerms:
        """Return the terms on which a move pays. `kv_s`, `request_s`: see `terms_of`."""
        return terms_of(kv_s, request_s, self.mean_s, self.known_terms)

    def choose_resting(self, table: DecodeTable, per_rank: int, step_id: int) -> None:
        """Choose the slots that plan `step_id` leaves out (policy/rows)."""
        slots, rows = table.rows(per_rank)
        rests = resting_rows(rows, self.line, self._promise, step_id)
        table.rests[:] = False
        if rests is not None:
            table.rests[slots] = rests


class SlotDrafts:
    """Numbers of drafts (speculative tokens) that the next plan checks and makes per slot."""

    def __init__(self, chooser: DraftChooser, num_slots: int) -> None:
        self._chooser = chooser
        self._next: int | None = None
        """Drafts per slot of the next plan, which may wait for blocks; None until chosen."""
        self._made: Ints = np.zeros(num_slots, np.int64)
        """Drafts per slot made by the last plan that computes the slot, [slots]."""

    @property
    def counts(self) -> tuple[Sequence[int], Sequence[int]]:
        """Drafts compared and drafts that were right, by place in the draft."""
        return self._chooser.num_tried, self._chooser.num_right

    @property
    def num_passes_max(self) -> int:
        """Maximum number of passes of the next plan; a trial of another number of drafts limits them."""
        return self._chooser.num_passes_left

    def choose(self, num_requests: int) -> int:
        """Return how many drafts the next plan makes per slot; fixed until that plan is made."""
        if self._next is None:
            self._next = self._chooser.choose(num_requests)
        return self._next

    def most_made(self, slots: Bools) -> int:
        """Return the largest number of drafts that one of these slots has to check."""
        return int(self._made[slots].max(initial=0))

    def join(self, slots: Sequence[int]) -> None:
        """Note that slots join: in their first step they have no drafts to check."""
        self._made[slots] = 0

    def num_checked(self, table: DecodeTable, num_passes: int, num_drafts: int) -> Ints:
        """Return how many drafts the next plan may check per slot: the slot's own, and in each
        further pass the drafts of the pass before. Drafts beyond the slot's blocks are not checked;
        a slot with right drafts in flight is longer by then, and checks even fewer.
        """
        room = np.maximum(table.room - 1 - table.length, 0)
        num_checked: Ints = np.minimum(self._made, room)
        num_checked += (num_passes - 1) * np.minimum(num_drafts, room)
        return num_checked

    def planned(self, computed: Bools, num_drafts: int, num_requests: int, num_passes: int) -> None:
        """Note that a plan was made with the last choice, so that the next `choose` decides anew."""
        self._chooser.repeated(num_requests, num_passes - 1)
        self._made[computed] = num_drafts
        self._next = None

    def done(
        self,
        num_requests: int,
        num_drafts: tuple[int, int],
        seconds: Sequence[float],
        compared: Compared,
    ) -> None:
        """Note a done step. `num_drafts`: drafts per slot that it checked, and that it made."""
        self._chooser.done(num_requests, *num_drafts, seconds, compared)

    def reset(self) -> None:
        """Forget the plans in flight: they are void."""
        self._made[:] = 0
        self._next = None


class SecondMicroBatch:
    """Slots of the second micro-batch, by rank. The choice stays while the same slots are computed
    and none joins, because their lengths grow alike.
    """

    def __init__(self, scheduler: StepScheduler, per_rank: int) -> None:
        self._scheduler = scheduler
        self._shape = (-1, per_rank)
        self._slots: tuple[tuple[int, ...], ...] | None = None
        self._computed: Bools = np.zeros(0, np.bool_)
        """Slots computed by the plan for which `_slots` was chosen."""

    def choose(
        self, lengths: Ints, computed: Bools, *, has_joins: bool
    ) -> tuple[tuple[int, ...], ...]:
        """Return each rank's own slots of the second micro-batch."""
        if self._slots is None or has_joins or not np.array_equal(self._computed, computed):
            self._slots, self._computed = self._split(lengths, computed), computed
        return self._slots

    def _split(self, lengths: Ints, computed: Bools) -> tuple[tuple[int, ...], ...]:
        is_second_RS = self._scheduler.second_rows(
            lengths.reshape(self._shape), computed.reshape(self._shape)
        )
        slots = np.nonzero(is_second_RS)[1].tolist()
        ends = np.count_nonzero(is_second_RS, axis=1).cumsum().tolist()
        return tuple(tuple(slots[first:end]) for first, end in pairwise((0, *ends)))

    def reset(self) -> None:
        """Choose anew for the next plan."""
        self._slots = None
