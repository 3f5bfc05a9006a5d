"""The nodes of a cluster as the loop uses them: as many as are needed, and what runs there since
before this supervisor, which it adopts.

How nodes are had and processes started on them is in runtime/nodes.
"""

from __future__ import annotations

import logging
import time

from hadal.core.errors import EXIT_CONFIG
from hadal.core.messages.base import LENDER
from hadal.core.messages.nodes import NodeNews, NodesKept, Printed
from hadal.core.messages.units import Drain
from hadal.runtime.nodes import Elsewhere, LiveNodes
from hadal.runtime.process.logs import about
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.readiness import Readiness
from hadal.runtime.supervisor.run_end import RunEnd
from hadal.runtime.supervisor.status import StatusWriter
from hadal.runtime.topology import GATEWAY
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.supervisor")


class NodeKeeper:
    """Owner of the wish for nodes: the needed ones, and no others."""

    def __init__(
        self,
        nodes: LiveNodes,
        wire: ZmqWire,
        children: Children,
        readiness: Readiness,
        status: StatusWriter,
        end: RunEnd,
        *,
        has_other_keys: bool,
    ) -> None:
        """`has_other_keys`: API keys are others than another supervisor left on the nodes."""
        self._nodes = nodes
        self._wire = wire
        self._children = children
        self._readiness = readiness
        self._status = status
        self._end = end
        self._has_other_keys = has_other_keys

    def hear(self, message: NodeNews | Printed | NodesKept) -> bool:
        """Take in what an agent or the lender reports; True if that is more than a sign of life."""
        has_news = self._nodes.hear(time.monotonic(), message)
        if isinstance(message, NodesKept):
            self._readiness.ready(LENDER)
            self._end_if_superseded(message)
        return has_news

    def look(self) -> None:
        """Have the nodes that are needed, and adopt what runs there."""
        now_s = time.monotonic()
        self._nodes.keep(now_s, self._children.nodes_in_use())
        if self._nodes.tick(now_s):
            self._status.write()
        for process in self._nodes.take_adopted():
            self._adopt(now_s, process)

    def end_if_missing(self) -> None:
        """Log what the lender complains of. While nothing was served yet, nodes that are not to be
        had end the start.
        """
        if complaint := self._nodes.complaint():
            log.error("%s.", complaint)
            if not self._children.has_served:
                self._end.exit(EXIT_CONFIG)

    def _adopt(self, now_s: float, process: Elsewhere) -> None:
        """Take over a process that a node runs since before this supervisor was there."""
        name, epoch_number = process.process.order.name, process.process.order.epoch_number
        child = self._children.by_name.get(name)
        if child is None or not (child.is_wanted or self._end.is_draining):
            process.kill()  # It came too late: another is there, or none is needed.
            return
        child.adopt(now_s, process)
        self._wire.expect(name, epoch_number)
        log.info("%s goes on on node %d", name, process.node, extra=about(name))
        if child.role == GATEWAY and self._has_other_keys:
            log.warning("%s is started again: API keys have changed", name, extra=about(name))
            child.replace()
        if self._end.is_draining:
            child.dismiss()
            if child.role == GATEWAY:
                self._wire.send(name, Drain())
        self._status.write()

    def _end_if_superseded(self, message: NodesKept) -> None:
        """End the run, without its processes, if another supervisor has taken them over."""
        if message.is_superseded and self._end.exit_code is None:
            log.error(
                "another `hadal serve` has taken over what this one ran on the nodes; it ends"
            )
            self._end.supersede()
