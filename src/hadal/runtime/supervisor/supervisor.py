"""The supervisor: the main process of `hadal serve`. Starts gateway and units, restarts ended ones,
stops all in order.

It sleeps until the next signal (such as a child's end), message or timer. It has no requests and
computes nothing of the model. This file assembles the parts and has the loop that calls them.

    SIGTERM, Ctrl-C   drain: the gateway finishes its streams and ends, then the units are ended
    a second signal   end everything now
    SIGKILL           the kernel kills every child of this host (runtime/process); on nodes agents
                      end theirs after cluster.lease_s
"""

from __future__ import annotations

import glob
import logging
import time
from pathlib import Path

from hadal.core.errors import ConfigError
from hadal.core.messages.base import NODE_PROVIDER, SUPERVISOR
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.fleet import Demand, Rollout
from hadal.core.messages.gateways import GatewayHeartbeat
from hadal.core.messages.nodes import NodeNews, NodesKept, Printed
from hadal.core.messages.ranks import RankUp
from hadal.core.messages.units import Suspect, UnitDown, UnitUp
from hadal.runtime.agent import Joining
from hadal.runtime.nodes import LiveNodes
from hadal.runtime.process.child import Child
from hadal.runtime.process.forks import API_KEYS, API_KEYS_FILE, Forks, Left
from hadal.runtime.process.logs import LOGS_FOLDER, KeptHandler, KeptLines
from hadal.runtime.process.private import make_private
from hadal.runtime.process.process import RUN_FILE, Run, versions
from hadal.runtime.process.relay import OutputRelay
from hadal.runtime.process.signals import read_signals
from hadal.runtime.process.starting import Starting
from hadal.runtime.supervisor.adoption import NodeKeeper
from hadal.runtime.supervisor.children import Children
from hadal.runtime.supervisor.draining import Draining
from hadal.runtime.supervisor.exits import Exits
from hadal.runtime.supervisor.options import Listeners, Options
from hadal.runtime.supervisor.readiness import Announce, Readiness
from hadal.runtime.supervisor.rollout import Rollouts
from hadal.runtime.supervisor.run_end import RunEnd
from hadal.runtime.supervisor.run_files import RunFiles
from hadal.runtime.supervisor.starter import STOP_S, Starter
from hadal.runtime.supervisor.status import StatusWriter
from hadal.runtime.supervisor.watching import MAX_WAIT_S, Watching
from hadal.runtime.topology import ProcessPlan, launch_plan, rank_name
from hadal.runtime.transfer.pool import PREFIX, SHM_FOLDER, remove_shared_memory
from hadal.runtime.wire import open_wire

EPOCHS_OF_A_TERM = 1 << 20
"""Epoch numbers per supervisor: processes of a later supervisor have higher numbers."""
_LOOK_S = 0.1
"""Longest time between two calls of `_look` while nodes send only heartbeats."""
_WARMING_S = 0.02
"""Time between two checks if units can be forked yet."""


class Supervisor:
    """Parts of one run, and the loop that calls them."""

    def __init__(
        self,
        run: Run,
        adopted: Joining | None,
        options: Options,
        folder: Path,
        listeners: Listeners,
        announce: Announce,
        forks: Forks,
    ) -> None:
        """`adopted`: parameters that an earlier supervisor of this run gave to its agents; None:
        there was none. `forks`: the fork server, already started.
        """
        started_s, found, deployment = time.monotonic(), versions(), run.deployment
        files = RunFiles(folder, run)
        left = _left(run, options, folder)
        forks.clear_after(left)
        self._run_id = run.run_id
        self._wire = wire = open_wire(run, SUPERVISOR, folder, epoch_number=run.term)
        if options.log_dir is not None:
            _make_log_dir(options.log_dir)
        kept_in = folder / LOGS_FOLDER
        make_private(kept_in)
        self._kept = KeptHandler(KeptLines(kept_in, SUPERVISOR), SUPERVISOR, options.log_format)
        logging.getLogger().addHandler(self._kept)
        plans = launch_plan(deployment)
        first_epoch_number = (run.term - 1) * EPOCHS_OF_A_TERM + 1
        made = [_child(plan, options, kept_in, first_epoch_number) for plan in plans]
        nodes = None
        if deployment.cluster.spans_hosts:
            adopts = adopted is not None
            nodes = LiveNodes(deployment, plans, folder, wire, found, adopts=adopts)
        self._children = children = Children(
            deployment, plans, made, nodes, has_served=adopted is not None
        )
        self._end = end = RunEnd()
        self._status = status = StatusWriter(files, children, end, listeners, found, started_s)
        keys = ",".join(options.api_keys)
        environment = {API_KEYS: keys, API_KEYS_FILE: str(options.api_keys_file or "")}
        self._starter = Starter(files, wire, children, listeners, environment, forks, left)
        self._rollouts = Rollouts(files, wire, children, self._starter, status, end)
        timeout_s = deployment.drain_timeout_s
        self._draining = Draining(
            wire,
            listeners.gateway,
            timeout_s,
            children,
            self._rollouts,
            status,
            end,
        )
        progress = Starting(children.all, has_bar=options.has_bar)
        self._readiness = Readiness(
            children,
            self._draining,
            status,
            end,
            progress,
            announce,
            started_s,
        )
        self._exits = Exits(wire, children, self._starter, self._rollouts, status, end)
        self._watching = Watching(deployment, wire, children, self._readiness)
        self._keeper: NodeKeeper | None = None
        if nodes is not None:
            self._keeper = NodeKeeper(
                nodes,
                wire,
                children,
                self._readiness,
                status,
                end,
                has_other_keys=adopted is not None and adopted.api_keys != keys,
            )
        self._looked_s = 0.0
        """Time of the last `_look`, which calls all parts."""

    def run(self, signals_fd: int) -> int:
        """Supervise until stopped or given up. Return the exit code."""
        self._wire.wake_on(signals_fd)
        try:
            return self._run(signals_fd)
        finally:
            self._wire.wake_on_no_more(signals_fd)

    def _run(self, signals_fd: int) -> int:
        self._rollouts.make_fleet_if_due()
        self._start_due()
        while self._end.exit_code is None:
            messages = self._wire.receive(self._wait_s())
            numbers = read_signals(signals_fd)
            for number in numbers:
                self._draining.signalled(number)
            has_news = bool(numbers) or not messages
            for message in messages:
                has_news |= self._handle(message)
            if not has_news and time.monotonic() - self._looked_s < _LOOK_S:
                continue  # Only heartbeats, perhaps of hundreds of nodes: no look is due yet.
            self._looked_s = time.monotonic()
            self._look()
        return self._end.exit_code

    def _handle(self, message: AnyMessage) -> bool:
        """Pass a message to its part. Return True if `_look` should call all parts."""
        match message:
            case UnitUp():
                self._readiness.ready(message.unit)
                self._rollouts.tell(message)
            case Demand():
                self._rollouts.tell(message)
            case Rollout():
                self._rollouts.roll_out(message)
            case RankUp():
                self._readiness.ready(rank_name(message.unit, message.rank))
            case Suspect():
                self._watching.see(message.process)
            case UnitDown():
                self._watching.given_up(message)
            case GatewayHeartbeat():
                self._watching.gateway_spoke(message)
            case NodeNews() | Printed() | NodesKept():
                return self._keeper is not None and self._keeper.handle(message)
        return True

    def _look(self) -> None:
        """Have each part do what is due. Order matters: ends are handled before starts."""
        if self._keeper is not None:
            self._keeper.look()
            self._rollouts.make_fleet_if_due()
            self._rollouts.resume_if_due()
            self._keeper.end_if_missing()
        self._exits.reap()
        self._watching.kill_late_starters()
        self._watching.kill_hung_gateways()
        self._readiness.look()
        if self._end.exit_code is None:
            self._rollouts.look()
            self._start_due()
            self._draining.end_if_due()

    def _start_due(self) -> None:
        if self._starter.start_due():
            self._status.write()
        self._readiness.announce_start_if_due()

    def _wait_s(self) -> float:
        if self._starter.is_warming:
            return _WARMING_S
        # Processes of nodes are started at the next `_look`, every _LOOK_S.
        waits = self._children.start_times_s()
        if self._end.drain_until_s is not None:
            waits.append(self._end.drain_until_s)
        most_s = MAX_WAIT_S if self._keeper is None else _LOOK_S
        return min(most_s, max(0.0, min(waits) - time.monotonic())) if waits else most_s

    def close(self) -> None:
        """End every child: SIGTERM, then SIGKILL after STOP_S or at once. Remove their files."""
        logging.getLogger().removeHandler(self._kept)
        self._kept.close()
        self._readiness.close()
        deadline_s = time.monotonic() + (0.0 if self._end.is_at_once else STOP_S)
        providers = [child for child in self._children.all if child.role == NODE_PROVIDER]
        others = [child for child in self._children.all if child not in providers]
        if self._end.is_superseded:  # Another supervisor owns the processes on the nodes.
            others = [child for child in others if self._children.is_here(child)]
        self._starter.end(others, deadline_s)
        nodes = self._children.nodes
        if nodes is not None:
            if not self._end.is_superseded:
                nodes.close()
            self._starter.end(providers, time.monotonic() + STOP_S)
        self._starter.close()
        self._wire.close()
        if nodes is None:
            remove_shared_memory(self._run_id)
        self._status.write()


def _left(run: Run, options: Options, folder: Path) -> Left:
    """Return the files to remove if the supervisor is killed. Agents remove the files of units on
    nodes; they may share this host.
    """
    spans_hosts = run.deployment.cluster.spans_hosts
    patterns = [] if spans_hosts else [f"{SHM_FOLDER}/{PREFIX}{run.run_id}.*"]
    secret = [f"{glob.escape(str(folder))}/{RUN_FILE}"] if options.run_folder else []
    return Left([*patterns, *secret], [] if options.run_folder else [str(folder)])


def _child(plan: ProcessPlan, options: Options, kept_in: Path, first_epoch_number: int) -> Child:
    return Child(
        plan.name,
        plan.role,
        [plan.module, *plan.arguments],
        OutputRelay(
            plan.name,
            None if options.log_dir is None else options.log_dir / f"{plan.name}.log",
            options.log_format,
            KeptLines(kept_in, plan.name),
        ),
        first_epoch_number,
    )


def _make_log_dir(path: Path) -> None:
    """Create the folder for log files. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--log-dir {path}: cannot be made ({error.strerror}).") from error
