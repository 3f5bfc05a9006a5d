"""The drain: running streams finish before the server ends.

Sends Drain, and no other message. Ends no unit: units are ended after the loop.
"""

from __future__ import annotations

import logging
import signal
import socket
import time

from hadal.core.messages.base import FRONT
from hadal.core.messages.units import Drain
from hadal.runtime.process.child import ProcessPhase
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.rollout import Rollouts
from hadal.runtime.supervisor.run_end import RunEnd
from hadal.runtime.supervisor.status import StatusWriter
from hadal.runtime.topology import GATEWAY
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.supervisor")

SAME_SIGNAL_S = 0.2
"""Signals closer together than this count as one: a signal to a group of processes may arrive
twice, because make, for example, passes it on.
"""


class Draining:
    """Reaction to signals that end the run."""

    def __init__(
        self,
        wire: ZmqWire,
        listener: socket.socket,
        timeout_s: float,
        children: Children,
        rollouts: Rollouts,
        status: StatusWriter,
        end: RunEnd,
    ) -> None:
        """`listener`: the gateways' socket. `timeout_s`: longest time for streams to finish."""
        self._wire = wire
        self._listener = listener
        self._timeout_s = timeout_s
        self._children = children
        self._rollouts = rollouts
        self._status = status
        self._end = end

    def signalled(self, number: int) -> None:
        """Begin to drain; at a second signal, end without waiting for streams."""
        if number == signal.SIGCHLD:
            return
        now_s = time.monotonic()
        if self._end.drain_until_s is not None:
            if now_s < self._end.drain_until_s - self._timeout_s + SAME_SIGNAL_S:
                return
            log.warning("ending now, without waiting for streams")
            self._end.exit_at_once(128 + number)
            return
        self._end.drain(now_s + self._timeout_s)
        fronting = self._children.by_name[GATEWAY]
        if fronting.phase is not ProcessPhase.READY and not self._children.other_gateways():
            self._end.exit(0)  # There is no stream to finish.
            return
        self._rollouts.stop()  # The present units are enough for the running streams.
        log.info(
            "ending: running streams have %.0f s to finish; the same signal again ends them now",
            self._timeout_s,
        )
        for child in self._children.later_gateways:
            child.dismiss()
            if child.phase is ProcessPhase.READY:
                self._wire.send(child.name, Drain())
            else:
                child.signal(signal.SIGTERM)
        if fronting.phase is ProcessPhase.READY:
            self.drain_front()
        self._status.write()

    def drain_front(self) -> None:
        """Drain the gateway with the front. If it is being restarted, call this as soon as it is
        ready: streams of other gateways go on under it.
        """
        self._wire.send(FRONT, Drain())
        if not self._children.other_gateways():  # Else a gateway may still be restarted.
            # The gateway has the last copy: when it closes that, connections are refused.
            self._listener.close()

    def end_if_due(self) -> None:
        """End the run if streams have taken too long."""
        until_s = self._end.drain_until_s
        if until_s is not None and time.monotonic() > until_s:
            log.warning("streams still run after %.0f s; ending them", self._timeout_s)
            self._end.exit(0)
