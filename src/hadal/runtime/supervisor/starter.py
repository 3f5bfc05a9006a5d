"""Start and end of the processes of a run, here or on a node, and removal of the files they leave.

process/backoff decides when a child may start again. Other parts decide which children are ended.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection, Mapping

from hadal.core.messages.base import NODE_PROVIDER
from hadal.runtime.addresses import address_path, socket_path
from hadal.runtime.nodes import LiveNodes
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.forks import Forks, Left, environment, start_here
from hadal.runtime.process.process import HAS_SERVED, LISTEN_FD, epoch_arguments
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.options import Listeners
from hadal.runtime.supervisor.run_files import RunFiles
from hadal.runtime.topology import CONSOLE, GATEWAY, wire_name
from hadal.runtime.transfer.pool import remove_shared_memory
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.supervisor")

STOP_S = 4.0
"""Time from SIGTERM to SIGKILL when the run ends."""
WITHOUT_TORCH = (GATEWAY, NODE_PROVIDER, CONSOLE)
"""Roles that start while the fork server still imports torch; their processes do not need it."""


class Starter:
    """Owner of the fork server, and the only part that starts processes."""

    def __init__(
        self,
        files: RunFiles,
        wire: ZmqWire,
        children: Children,
        listeners: Listeners,
        keys: Mapping[str, str],
        forks: Forks,
        left: Left,
    ) -> None:
        """`keys`: environment of gateways, with the API keys. `left`: files that a fork server
        removes if the supervisor is killed.
        """
        self._run_id = files.run.run_id
        self._folder = files.folder
        self._wire = wire
        self._children = children
        self._listeners = listeners
        self._keys = dict(keys)
        self._environment = environment()
        self._forks = forks
        self._left = left

    @property
    def is_warming(self) -> bool:
        """True while units are not started, because the fork server is not ready yet."""
        return self._forks.is_warming

    @property
    def forks_pid(self) -> int:
        """Process id of the fork server; 0 if none was started."""
        return self._forks.pid

    def start_due(self) -> bool:
        """Start all processes that are due. Return True if at least one was started."""
        now_s = time.monotonic()
        due = [
            child
            for child in self._children.all
            if child.phase is ProcessPhase.WAITING and child.backoff.start_at_s <= now_s
        ]
        return any([self._start(now_s, child) for child in due])

    def _start(self, now_s: float, child: Child) -> bool:
        """Start a process on its host. Return False if the host is not ready or the start fails."""
        has_served = self._children.has_served
        more = (HAS_SERVED,) if child.role == GATEWAY and has_served else ()
        nodes = self._children.nodes
        if nodes is not None and not self._children.is_here(child):
            return self._start_on(nodes, now_s, child, more)
        if self._forks.is_warming and child.role not in WITHOUT_TORCH:
            return False  # Gateways import other modules, and need not wait for torch.
        return self._start_here(now_s, child, more)

    def _start_on(
        self, nodes: LiveNodes, now_s: float, child: Child, more: tuple[str, ...]
    ) -> bool:
        plan = self._children.plans[child.name]
        node = nodes.node_for(plan)
        if node is None or nodes.is_adopting:
            return False
        child.start(
            now_s,
            lambda arguments, epoch_number: nodes.start(
                plan, node, (*arguments, *more), epoch_number
            ),
        )
        self._wire.expect(child.name, child.epoch_number)
        return True

    def _start_here(self, now_s: float, child: Child, more: tuple[str, ...]) -> bool:
        threads = self._children.plans[child.name].threads
        environment = {**self._environment, "OMP_NUM_THREADS": str(threads)}
        fds: tuple[int, ...] = ()
        if child.role == GATEWAY:
            fds = (self._listeners.gateway.fileno(),)
            environment[LISTEN_FD] = str(fds[0])
        elif child.role == CONSOLE and self._listeners.pages is not None:
            fds = (self._listeners.pages.fileno(),)
            environment[LISTEN_FD] = str(fds[0])
        # The node provider gives the keys to nodes with gateways.
        if child.role in (GATEWAY, NODE_PROVIDER):
            environment |= self._keys
        # The console uses none of the imported modules: a fork would hold torch's memory in vain.
        forks = self._forks if child.role != CONSOLE else None
        try:
            child.start(
                now_s,
                lambda arguments, epoch_number: start_here(
                    child.name,
                    [*arguments, *epoch_arguments(self._folder, epoch_number), *more],
                    environment,
                    fds,
                    forks,
                ),
            )
        except OSError as error:
            again_s = child.backoff.delay(now_s)
            log.warning("%s cannot be started (%s); retrying in %g s", child.name, error, again_s)
            return False
        self._wire.expect(wire_name(child.name), child.epoch_number)
        return True

    def renew_code(self) -> None:
        """Have processes started from now on run the code that is installed now."""
        self._forks.close()  # It has imported the code that was installed at its own start.
        self._forks = Forks(self._environment)
        self._forks.clear_after(self._left)
        if self._children.nodes is not None:
            self._children.nodes.renew_code()

    def clear_after(self, child: Child) -> None:
        """Remove the files that a dead process leaves."""
        name = wire_name(child.name)
        self._wire.forget(name)
        if not self._children.is_here(child):
            return  # The agent of its node does that.
        socket_path(self._folder, name).unlink(missing_ok=True)
        address_path(self._folder, name).unlink(missing_ok=True)
        if not self._children.ranks_of(
            child.name
        ):  # A leader has no pool, but its ranks' names begin with its own.
            remove_shared_memory(self._run_id, child.name)

    def end(self, children: Collection[Child], deadline_s: float) -> None:
        """End these children, and kill the ones that still run at the deadline."""
        for child in children:
            child.signal(signal.SIGTERM)
        for child in children:
            if not child.wait(deadline_s - time.monotonic()):
                child.signal(signal.SIGKILL)
                child.wait(STOP_S)

    def close(self) -> None:
        """End the fork server: nothing is started any more."""
        self._forks.close()
