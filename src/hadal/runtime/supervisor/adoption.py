"""The nodes of a cluster, for the supervisor's loop: requests the needed ones, and adopts processes
that an earlier supervisor started there.

runtime/nodes acquires the nodes and starts processes on them.
"""

from __future__ import annotations

import logging
import time

from hadal.core.errors import EXIT_CONFIG
from hadal.core.messages.base import NODE_PROVIDER
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
    """Owner of the request for nodes, which names exactly the needed ones."""

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
        """`has_other_keys`: the API keys differ from the earlier supervisor's keys on the nodes."""
        self._nodes = nodes
        self._wire = wire
        self._children = children
        self._readiness = readiness
        self._status = status
        self._end = end
        self._has_other_keys = has_other_keys

    def handle(self, message: NodeNews | Printed | NodesKept) -> bool:
        """Handle a report of an agent or the node provider. Return True if it is more than a heartbeat."""
        has_news = self._nodes.handle(time.monotonic(), message)
        if isinstance(message, NodesKept):
            self._readiness.ready(NODE_PROVIDER)
            self._end_if_superseded(message)
        return has_news

    def look(self) -> None:
        """Request the needed nodes, and adopt the processes that run there already."""
        now_s = time.monotonic()
        self._nodes.keep(now_s, self._children.nodes_in_use())
        if self._nodes.tick(now_s):
            self._status.write()
        for process in self._nodes.take_adopted():
            self._adopt(now_s, process)

    def end_if_missing(self) -> None:
        """Log the complaint about nodes. If nothing was served yet, missing nodes end the start."""
        if complaint := self._nodes.complaint():
            log.error("%s.", complaint)
            if not self._children.has_served:
                self._end.exit(EXIT_CONFIG)

    def _adopt(self, now_s: float, process: Elsewhere) -> None:
        """Take over a process that an earlier supervisor started on a node."""
        name, epoch_number = process.process.order.name, process.process.order.epoch_number
        child = self._children.by_name.get(name)
        if child is None or not (child.is_wanted or self._end.is_draining):
            process.kill()  # No process of this name is wanted any more.
            return
        child.adopt(now_s, process)
        self._wire.expect(name, epoch_number)
        log.info("%s keeps running on node %d", name, process.node, extra=about(name))
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
                "another `hadal serve` has taken over the processes on the nodes; this one ends"
            )
            self._end.supersede()
