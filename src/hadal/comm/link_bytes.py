"""What a rank's tokens cost on the links, within its node and beyond it: the sizes of its messages,
which packing works out anyway.

Sums of sums: a layer adds a few whole numbers and bytes are worked out once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from hadal.comm.layout import MessageLayout
from hadal.core.plans import LinkBytes
from hadal.reference.route import Route


class LinkByteCount:
    """Of one formation. `near`: ranks of this rank's node, side by side, itself among them."""

    def __init__(
        self, layout: MessageLayout, mode: str, rank: int, peers: Sequence[int], near: range
    ) -> None:
        self._layout = layout
        self._mode = mode
        self._rank = rank
        self._near = slice(near.start, near.stop)
        num_near = sum(peer in near for peer in peers)
        self._num_peers = num_near, len(peers) - num_near
        self._clear()

    def _clear(self) -> None:
        self._num_dispatches = 0
        self._near_rows = self._near_pairs = self._rows = self._pairs = 0

    def add(self, way: Route) -> None:
        """A dispatch takes this way, and its combine will come back by it."""
        pairs, rank = way.num_pairs_R, self._rank
        self._num_dispatches += 1
        self._near_pairs += sum(pairs[self._near]) - pairs[rank]
        self._pairs += way.at_TK.numel() - pairs[rank]
        if self._mode == "normal":  # Else a row is a pair.
            rows = way.num_rows_R
            self._near_rows += sum(rows[self._near]) - rows[rank]
            self._rows += sum(rows) - rows[rank]

    def take(self) -> LinkBytes:
        """Everything since the last time."""
        near, far = (num_peers * self._num_dispatches for num_peers in self._num_peers)
        rows, pairs = self._rows - self._near_rows, self._pairs - self._near_pairs
        layout, mode = self._layout, self._mode
        link_bytes = LinkBytes(
            (
                layout.dispatch_bytes(mode, self._near_rows, self._near_pairs, near),
                layout.dispatch_bytes(mode, rows, pairs, far),
            ),
            (layout.combine_bytes(self._near_pairs), layout.combine_bytes(pairs)),
        )
        self._clear()
        return link_bytes
