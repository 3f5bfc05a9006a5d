"""Nodes provided to a run: requests groups of nodes from the node provider, and tracks them.

Independent of processes and agents: runtime/nodes runs processes on the nodes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence

from hadal.core.messages.base import NODE_PROVIDER
from hadal.core.messages.nodes import KeepNodes, NodesKept
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.nodes")

_ASK_S = 1.0
"""Time between repeats of the request to the node provider."""
_SLOW_S = 5.0
"""Time without news after which the node provider counts as silent: it then waits for Ray."""
_SILENT = (
    "Ray does not answer: running processes go on, but no further node can be used until it answers"
)
Group = tuple[int, ...]
"""Nodes that are provided together or not at all."""


class ProvidedNodes:
    """Groups of nodes that are wanted, and the state of each as the node provider reports it."""

    def __init__(self, groups: Sequence[Group], wire: ZmqWire, *, adopts: bool) -> None:
        """`adopts`: another supervisor already has all groups."""
        self._groups = groups
        self._wire = wire
        self._kept: frozenset[Group] = frozenset(groups if adopts else ())
        self._found_s: dict[Group, float] = {}
        """Group -> time since which it is found; each of its nodes should have an agent."""
        self._complaint = self._reported = ""
        """Current complaint, and the one at the last call of `complaint`."""
        self._asked_s, self._heard_s = -math.inf, math.inf
        self._is_silent = False

    def __contains__(self, node: int) -> bool:
        """Return whether a node is wanted."""
        return any(node in group for group in self._kept)

    @property
    def wrong(self) -> str:
        """Complaint for an operator about provided nodes; empty if there is none."""
        return _SILENT if self._is_silent else self._complaint

    def found(self) -> Iterator[tuple[int, float]]:
        """Yield (node, time since which it is found)."""
        for group, found_s in self._found_s.items():
            for number in group:
                yield number, found_s

    def handle(self, now_s: float, message: NodesKept) -> None:
        """Apply a report of the node provider."""
        self._complaint, self._heard_s = message.complaint, now_s
        before_s = self._found_s
        self._found_s = {group: before_s.get(group, now_s) for group in message.found}

    def keep(self, now_s: float, nodes: Collection[int]) -> list[int]:
        """Request the groups of these nodes, release all others, and return the released nodes."""
        kept = frozenset(group for group in self._groups if not set(group).isdisjoint(nodes))
        if kept == self._kept and now_s - self._asked_s < _ASK_S:
            return []
        released = self._kept - kept
        for group in released:
            self._found_s.pop(group, None)
        self._kept, self._asked_s = kept, now_s
        self._wire.send(NODE_PROVIDER, KeepNodes(tuple(sorted(kept))))
        return [number for group in released for number in group]

    def tick(self, now_s: float) -> None:
        """Check whether the node provider is silent."""
        was_silent, self._is_silent = self._is_silent, now_s - self._heard_s > _SLOW_S
        if self._is_silent and not was_silent:
            log.error("%s.", _SILENT)

    def complain(self, complaint: str) -> None:
        """Add a complaint about unusable nodes, unless the node provider has reported one."""
        self._complaint = self._complaint or complaint

    def complaint(self) -> str:
        """Return why nodes are missing, at the first call after they went missing; else empty."""
        reported, self._reported = self._reported, self._complaint
        return self._complaint if bool(reported) != bool(self._complaint) else ""
