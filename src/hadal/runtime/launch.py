"""The supervisor: the main process of `hadal serve`. Starts gateway and units, restarts what ends,
stops all in order.

It sleeps until a signal (a child's end is one), a message or a timer comes. It holds no request and
does no work of the model: whether requests survive a crash is the front's business, who is told
UnitDown at once, or LeaderDown where ranks wait for another leader.

    SIGTERM, Ctrl-C   drain: the gateway finishes its streams and ends, then the units are ended
    the same again    end everything now
    SIGKILL           the kernel kills every child of this host (runtime/process); on nodes agents
                      end theirs after cluster.lease_s
"""

from __future__ import annotations

import dataclasses
import glob
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hadal.core.balance import OFF
from hadal.core.config import ROLES, Deployment
from hadal.core.errors import EXIT_CONFIG, ConfigError
from hadal.core.handshake import MIN_SECRET_BYTES, SECRET_BYTES
from hadal.core.messages import (
    FRONT,
    LENDER,
    SUPERVISOR,
    Demand,
    Drain,
    GatewayHeartbeat,
    LeaderDown,
    NodeNews,
    NodesKept,
    Printed,
    RankUp,
    Rollout,
    Sighting,
    Suspect,
    UnitDown,
    UnitUp,
)
from hadal.policy.suspicion import start_is_over
from hadal.roles.fleet import make_fleet
from hadal.roles.recording import MadeFleet
from hadal.runtime.agent import Joining
from hadal.runtime.cores import allowed_cores, cores_of
from hadal.runtime.fleet import FleetExecutor
from hadal.runtime.listener import open_listener, url_of
from hadal.runtime.nodes import Elsewhere, LiveNodes, address_here, is_same, kept_run
from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.forks import (
    API_KEYS,
    API_KEYS_FILE,
    Forks,
    Left,
    environment,
    reap_others,
    start_here,
)
from hadal.runtime.process.logs import LOGS_FOLDER, TEXT, KeptHandler, KeptLines, about
from hadal.runtime.process.private import make_private, read_private
from hadal.runtime.process.process import (
    FOLDER_PREFIX,
    HAS_SERVED,
    LISTEN_FD,
    RUN_FILE,
    Run,
    is_heard,
    life_arguments,
    messages_digest,
    raise_descriptor_limit,
    read_signals,
    remove_stale_folders,
    rollout_arguments,
    signal_pipe,
    versions,
    write_run,
)
from hadal.runtime.process.starting import Starting
from hadal.runtime.process.status import (
    ProcessEnd,
    RolloutStatus,
    Status,
    write_fleet,
    write_status,
)
from hadal.runtime.process.watch import ProcessState, Watch, look_at
from hadal.runtime.recorder import recorded
from hadal.runtime.resolve import Resolved
from hadal.runtime.topology import (
    CONSOLE,
    GATEWAY,
    ProcessPlan,
    gateway_names,
    judge_of,
    launch_plan,
    rank_name,
    unit_and_rank,
    wire_name,
)
from hadal.runtime.transfer.pool import (
    PREFIX,
    SHM_FOLDER,
    remove_shared_memory,
    remove_stale_shared_memory,
)
from hadal.runtime.wire import address_path, open_wire, socket_path

log = logging.getLogger("hadal.supervisor")

EXIT_GAVE_UP = 1
LIVES_OF_A_TERM = 1 << 20
"""Processes of a later supervisor are of later lives than all of an earlier one."""
TAKEOVERS_MAX = 2
"""Starts of a leader in vain, before the ranks that wait for it are ended, for it may be what they
hold.
"""
_MAX_WAIT_S = 0.5
HERE = (GATEWAY, LENDER, CONSOLE)
"""Roles of processes that run beside the supervisor, wherever units do."""
_CONSOLE_S = 20.0
"""The pages' process starts when all others are ready, so that it takes no processor from them, or
after this time.
"""
_NUM_ENDS = 50
"""Ends of processes that are remembered to be shown."""
_LOOK_S = 0.1
"""How often it looks at all that there is, though nodes said nothing but that they are there."""
_WARMING_S = 0.02
"""How often it is looked whether units can be forked yet."""
_STOP_S = 4.0
SAME_SIGNAL_S = 0.2
"""What ends a group of processes reaches some of them twice, as make passes on what it is sent: a
second signal so soon is the first one.
"""
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Options:
    """How to run it, as opposed to what to run."""

    run_folder: Path | None = None
    """None: a temporary one, removed at the end."""
    log_dir: Path | None = None
    """None: every process writes to this one's stderr, under its name."""
    log_level: str = "info"
    log_format: str = TEXT
    api_keys: tuple[str, ...] = ()
    has_bar: bool = False
    """Show the start as a bar at the foot of the terminal; else the log tells of it."""
    secret_file: Path | None = None
    """What the deployment's processes prove themselves by, where several hosts need the same; None:
    drawn at start.
    """
    api_keys_file: Path | None = None
    """With more keys than `api_keys`; the gateway with the front follows it."""


Announce = Callable[[Status], None]
"""Called once when everything was started and once when everything is ready."""


def serve(
    resolved: Resolved,
    options: Options,
    announce: Announce,
    forks: Forks,
) -> int:
    """Run until told to stop. Returns the exit code. Raises ConfigError if it cannot even start.

    `forks` was started before, so that it imports torch while the deployment is read.
    """
    raise_descriptor_limit()
    for name in remove_stale_shared_memory():
        log.info("removed %s, left by a run that is gone", name)
    remove_stale_folders()
    host, port = resolved.deployment.host, resolved.deployment.port
    with (
        open_listener(host, port) as listener,
        _console_listener(resolved.deployment) as pages,
        _run_folder(options.run_folder) as folder,
        signal_pipe(_SIGNALS) as fd,
    ):
        supervisor = Supervisor(resolved, options, folder, listener, pages, announce, forks)
        try:
            return supervisor.run(fd)
        finally:
            supervisor.close()


class Supervisor:
    """One run: its children, its wire and what it is waiting for."""

    def __init__(
        self,
        resolved: Resolved,
        options: Options,
        folder: Path,
        listener: socket.socket,
        pages: socket.socket | None,
        announce: Announce,
        forks: Forks,
    ) -> None:
        """`pages`: where the console listens; None: there is none."""
        self._told, left = _run(resolved, options)
        """What processes read at their start."""
        self._has_other_keys = left is not None and left.api_keys != ",".join(options.api_keys)
        """Than what another supervisor left on the nodes."""
        self._run_id, self._deployment = self._told.run_id, self._told.deployment
        self._folder = folder
        self._listener = listener
        self._announce = announce
        self._versions = versions()
        self._url = url_of(listener, resolved.deployment.host)
        self._pages = pages
        self._started_s = time.monotonic()
        self._was_started = False
        self._was_ready = False
        self._has_served = left is not None
        """Requests could be answered once: from then on they wait for what is missing, and nothing
        that cannot start ends the server.
        """
        self._looked_s = 0.0
        """When it last looked at all that there is."""
        self._ended_ranks: dict[tuple[str, str], list[str]] = {}
        """Whose ends their leaders are to hear of, by unit and reason."""
        self._exit_code: int | None = None
        self._is_superseded = False
        self._drain_until_s: float | None = None
        self._kill_at_once = False
        write_run(folder, self._told)
        self._environment = environment()
        self._keys = {
            API_KEYS: ",".join(options.api_keys),
            API_KEYS_FILE: str(options.api_keys_file or ""),
        }
        self._forks = forks
        # What units on nodes leave, their agents remove, which may share this host.
        spans_hosts = self._deployment.cluster.spans_hosts
        patterns = [] if spans_hosts else [f"{SHM_FOLDER}/{PREFIX}{self._run_id}.*"]
        secret = [f"{glob.escape(str(folder))}/{RUN_FILE}"] if options.run_folder else []
        self._left = Left([*patterns, *secret], [] if options.run_folder else [str(folder)])
        forks.clear_after(self._left)
        self._wire = open_wire(self._told, SUPERVISOR, folder, life=self._told.term)
        if options.log_dir is not None:
            _make_log_dir(options.log_dir)
        kept_in = folder / LOGS_FOLDER
        make_private(kept_in)
        self._kept = KeptHandler(KeptLines(kept_in, SUPERVISOR), SUPERVISOR, options.log_format)
        logging.getLogger().addHandler(self._kept)
        self._plans = {plan.name: plan for plan in launch_plan(self._deployment)}
        first_life = (self._told.term - 1) * LIVES_OF_A_TERM + 1
        self._children = {
            plan.name: _child(plan, options, kept_in, first_life) for plan in self._plans.values()
        }
        if pages is not None:
            self._children[CONSOLE].start_at_s = self._started_s + _CONSOLE_S
        self._nodes = self._live_nodes(adopts=left is not None)
        self._cores = {} if self._nodes else self._cores_here()
        self._starting = Starting(self._children.values(), has_bar=options.has_bar)
        self._gateways = Watch(self._deployment.gateway_timeout_s, _MAX_WAIT_S, self._state_of)
        self._fleet: FleetExecutor | None = None
        self._num_reviews = 0
        """Decisions of the fleet that were written down."""
        self._is_unwritten = False
        """What was to be written last is not, and ..."""
        self._is_run_old = False
        """... run.json says what the run was before its last rollout ended."""
        self._ends: deque[ProcessEnd] = deque(maxlen=_NUM_ENDS)
        self._rollout: RolloutStatus | None = None
        self._last_rollout = Rollout()
        """The last."""

    def run(self, signals_fd: int) -> int:
        """Supervise until stopped or given up. Returns the exit code."""
        self._wire.wake_on(signals_fd)
        try:
            return self._run(signals_fd)
        finally:
            self._wire.wake_on_no_more(signals_fd)

    def _run(self, signals_fd: int) -> int:
        self._make_fleet_if_due()
        self._start_due()
        while self._exit_code is None:
            messages = self._wire.receive(self._wait_s())
            numbers = read_signals(signals_fd)
            for number in numbers:
                self._stop_signal(number)
            has_news = bool(numbers) or not messages
            for message in messages:
                has_news |= not isinstance(message, NodeNews | Printed | NodesKept)
                if isinstance(message, UnitUp):
                    self._ready(message.unit)
                    self._tell_fleet(message)
                elif isinstance(message, Demand):
                    self._tell_fleet(message)
                elif isinstance(message, Rollout):
                    self._roll_out(message)
                elif isinstance(message, RankUp):
                    self._ready(rank_name(message.unit, message.rank))
                elif isinstance(message, Suspect):
                    self._see(message.process)
                elif isinstance(message, UnitDown):
                    self._given_up(message)
                elif isinstance(message, GatewayHeartbeat):
                    self._gateway_spoke(message)
                elif (
                    isinstance(message, NodeNews | Printed | NodesKept) and self._nodes is not None
                ):
                    has_news |= self._nodes.hear(time.monotonic(), message)
                    if isinstance(message, NodesKept):
                        self._ready(LENDER)
                        self._end_if_superseded(message)
            if not has_news and time.monotonic() - self._looked_s < _LOOK_S:
                continue  # Beats of hundreds of nodes: nothing to do about them yet.
            self._looked_s = time.monotonic()
            if self._nodes is not None:
                self._look_at_nodes(self._nodes)
            self._reap()
            self._kill_late_starters()
            self._kill_hung_gateways()
            self._starting.look(time.monotonic())
            if self._exit_code is None:
                if self._fleet is not None:
                    self._fleet.tick(time.monotonic())
                    self._write_fleet(self._fleet)
                self._look_at_rollout()
                self._start_due()
                self._end_drain_if_due()
        return self._exit_code

    def close(self) -> None:
        """End every child, politely first unless in a hurry, and remove all that they leave."""
        logging.getLogger().removeHandler(self._kept)
        self._kept.close()
        self._starting.close()
        deadline_s = time.monotonic() + (0.0 if self._kill_at_once else _STOP_S)
        lenders = [child for child in self._children.values() if child.role == LENDER]
        others = [child for child in self._children.values() if child not in lenders]
        if self._is_superseded:  # What is on the nodes is another's.
            others = [child for child in others if self._is_here(child)]
        self._end(others, deadline_s)
        if self._nodes is not None:
            if not self._is_superseded:
                self._nodes.close()
            self._end(lenders, time.monotonic() + _STOP_S)
        self._forks.close()
        self._wire.close()
        if self._nodes is None:
            remove_shared_memory(self._run_id)
        self._write_status()

    def _end(self, children: Collection[Child], deadline_s: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        for child in children:
            if not child.wait(deadline_s - time.monotonic()):
                child.signal(signal.SIGKILL)
                child.wait(_STOP_S)

    def _cores_here(self) -> dict[str, tuple[int, ...]]:
        """By process, the cores of this host that its computing threads take."""
        allowed = allowed_cores()
        return {name: cores_of(self._deployment, name, allowed) for name in self._plans}

    def status(self) -> Status:
        """Who runs, under which pid, since when."""
        now_s = time.monotonic()
        return Status(
            url=self._url,
            run_id=self._run_id,
            supervisor_pid=os.getpid(),
            ready=self._is_ready(),
            draining=self._drain_until_s is not None,
            elapsed_s=now_s - self._started_s,
            processes={
                child.name: child.status(
                    self._nodes.host_of(child.name) if self._nodes else "",
                    self._cores.get(child.name, ()),
                )
                for child in self._children.values()
            },
            nodes=self._nodes.status() if self._nodes else (),
            nodes_wrong=self._nodes.wrong if self._nodes else "",
            versions=self._versions,
            rollout=self._rollout,
            console_url=url_of(self._pages, self._deployment.host) if self._pages else "",
            ends=tuple(self._ends),
        )

    def _is_ready(self) -> bool:
        """Whether all that requests need is; the pages are not among it."""
        return all(
            child.phase is ProcessPhase.READY
            for child in self._children.values()
            if child.is_wanted and child.role != CONSOLE
        )

    def _can_serve(self) -> bool:
        """Whether a unit of each role works."""
        units = [child for child in self._children.values() if unit_and_rank(child.name)[1] is None]
        return {unit.role for unit in units if unit.phase is ProcessPhase.READY}.issuperset(ROLES)

    def _live_nodes(self, *, adopts: bool) -> LiveNodes | None:
        """The nodes that units run on; None: they run here."""
        if not self._deployment.cluster.spans_hosts:
            return None
        plans = self._plans.values()
        return LiveNodes(
            *(self._deployment, plans, self._folder, self._wire, self._versions),
            adopts=adopts,
        )

    def _make_fleet(self) -> FleetExecutor:
        now_s = time.monotonic()
        made = MadeFleet(time.time() - now_s)
        fleet = recorded(
            make_fleet(self._deployment, made.day_s),
            SUPERVISOR,
            made,
            self._run_id,
            self._deployment,
        )
        return FleetExecutor(fleet, self._children, self._wire.send, now_s)

    def _tell_fleet(self, message: Demand | UnitUp) -> None:
        if self._fleet is not None:
            self._fleet.tell(time.monotonic(), message)

    def _roll_out(self, message: Rollout) -> None:
        """Begin to replace all units; what an earlier rollout has not replaced yet, too. From now
        on there is a fleet, be their number fixed.
        """
        now_s = time.monotonic()
        if self._drain_until_s is not None:
            return
        if self._fleet is None:
            self._fleet = self._make_fleet()
        if not message.model:
            message = self._last_rollout  # What the last one brought goes on being served.
        told = dataclasses.replace(self._told, rollout=message)
        try:
            write_run(self._folder, told)
        except OSError as error:
            log.error("nothing is rolled out: %s cannot be written to (%s)", self._folder, error)
            return
        self._last_rollout, self._told = message, told
        self._forks.close()  # It has imported the code that was there when the server started.
        self._forks = Forks(self._environment)
        self._forks.clear_after(self._left)
        if self._nodes is not None:
            self._nodes.renew_code()
        number = self._rollout.number + 1 if self._rollout is not None else 1
        model = message.model or self._deployment.model
        log.info("replacing all units by ones that serve %s", model)
        self._fleet.roll_out(now_s, message, rollout_arguments(message, messages_digest()))
        self._rollout = RolloutStatus(
            number, model, self._fleet.num_unreplaced, self._fleet.num_unreplaced
        )
        self._write_status()

    def _look_at_rollout(self) -> None:
        """Notice how far it is, and its end."""
        if self._rollout is None or self._fleet is None or not self._rollout.num_left:
            return
        num_left, num_failed = self._fleet.num_unreplaced, self._fleet.num_failed
        if (num_left, num_failed) == (self._rollout.num_left, self._rollout.num_failed):
            return
        self._rollout = dataclasses.replace(self._rollout, num_left=num_left, num_failed=num_failed)
        if not num_left:
            self._end_rollout()
        self._write_status()

    def _end_rollout(self) -> None:
        """From now on the run is of what the new units serve."""
        new = self._last_rollout
        self._told = dataclasses.replace(self._told, rollout=None)
        if new.model:
            self._deployment = msgspec.structs.replace(self._deployment, model=new.model)
            self._told = dataclasses.replace(
                self._told,
                deployment=self._deployment,
                model_digest=new.model_digest,
                fingerprint=new.fingerprint,
            )
        self._is_run_old = True

    def _start_due(self) -> None:
        now_s = time.monotonic()
        due = [
            c
            for c in self._children.values()
            if c.phase is ProcessPhase.WAITING and c.start_at_s <= now_s
        ]
        if any([self._start(now_s, child) for child in due]):
            self._write_status()
        if not self._was_started and all(
            child.phase is not ProcessPhase.WAITING or child.role == CONSOLE
            for child in self._children.values()
        ):
            self._was_started = True
            self._announce(self.status())

    def _start(self, now_s: float, child: Child) -> bool:
        """Start a process where it is to run; False if that is not there, or not able to yet."""
        plan = self._plans[child.name]
        more = (HAS_SERVED,) if child.role == GATEWAY and self._has_served else ()
        if self._nodes is not None and not self._is_here(child):
            nodes, node = self._nodes, self._nodes.node_for(plan)
            if node is None or nodes.is_adopting:
                return False
            child.start(
                now_s,
                lambda arguments, life: nodes.start(plan, node, (*arguments, *more), life),
            )
            self._wire.expect(child.name, child.life)
            return True
        if self._forks.is_warming and child.role not in HERE:
            return False  # Gateways import other things, and need not wait for torch.
        environment = {**self._environment, "OMP_NUM_THREADS": str(plan.threads)}
        fds: tuple[int, ...] = ()
        if child.role == GATEWAY:
            fds = (self._listener.fileno(),)
            environment[LISTEN_FD] = str(fds[0])
        elif child.role == CONSOLE and self._pages is not None:
            fds = (self._pages.fileno(),)
            environment[LISTEN_FD] = str(fds[0])
        if child.role in (GATEWAY, LENDER):  # The lender gives the keys to nodes with gateways.
            environment |= self._keys
        # The pages share nothing with what is warm: a fork would hold torch's memory for nothing.
        forks = self._forks if child.role != CONSOLE else None
        try:
            child.start(
                now_s,
                lambda arguments, life: start_here(
                    child.name,
                    [*arguments, *life_arguments(self._folder, life), *more],
                    environment,
                    fds,
                    forks,
                ),
            )
        except OSError as error:
            again_s = child.delay(now_s)
            log.warning("%s cannot be started (%s); again in %g s", child.name, error, again_s)
            return False
        self._wire.expect(wire_name(child.name), child.life)
        return True

    def _look_at_nodes(self, nodes: LiveNodes) -> None:
        """Have the nodes that are needed, and no others. While nothing was served yet, nodes that
        are not to be had end the start.
        """
        now_s = time.monotonic()
        wanted = [c for c in self._children.values() if c.is_wanted or c.pid]
        numbers = {self._plans[child.name].node for child in wanted}
        nodes.keep(now_s, {number for number in numbers if number is not None})
        if nodes.tick(now_s):
            self._write_status()
        for process in nodes.take_adopted():
            self._adopt(now_s, process)
        self._make_fleet_if_due()
        self._resume_rollout_if_due(nodes)
        if complaint := nodes.complaint():
            log.error("%s.", complaint)
            if not self._has_served:
                self._exit_code = EXIT_CONFIG

    def _adopt(self, now_s: float, process: Elsewhere) -> None:
        """A node runs it since before this supervisor was there."""
        name, life = process.process.order.name, process.process.order.life
        child = self._children.get(name)
        if child is None or not (child.is_wanted or self._drain_until_s is not None):
            process.kill()  # It came too late: another is there, or none is needed.
            return
        child.adopt(now_s, process)
        self._wire.expect(name, life)
        log.info("%s goes on on node %d", name, process.node, extra=about(name))
        if child.role == GATEWAY and self._has_other_keys:
            log.warning("%s is started again: API keys have changed", name, extra=about(name))
            child.replace()
        if self._drain_until_s is not None:
            child.dismiss()
            if child.role == GATEWAY:
                self._wire.send(name, Drain())
        self._write_status()

    def _resume_rollout_if_due(self, nodes: LiveNodes) -> None:
        """Go on with what the supervisor before had begun, once it is known what runs."""
        begun = self._told.rollout if self._rollout is None else None
        if begun is not None and not nodes.is_adopting and self._drain_until_s is None:
            log.info("going on with the rollout that the supervisor before had begun")
            self._roll_out(begun)

    def _make_fleet_if_due(self) -> None:
        """The fleet decides from when it is known what runs."""
        is_known = self._nodes is None or not self._nodes.is_adopting
        is_due = is_known and self._drain_until_s is None
        if is_due and self._fleet is None and self._deployment.fleet.is_on:
            self._fleet = self._make_fleet()

    def _end_if_superseded(self, message: NodesKept) -> None:
        """Another supervisor has what runs: end without it."""
        if message.is_superseded and self._exit_code is None:
            log.error(
                "another `hadal serve` has taken over what this one ran on the nodes; it ends"
            )
            self._exit_code, self._kill_at_once = EXIT_GAVE_UP, True
            self._is_superseded = True

    def _is_here(self, child: Child) -> bool:
        """Whether it runs on this host, where it does."""
        return self._nodes is None or self._plans[child.name].node is None

    def _ready(self, name: str) -> None:
        child = self._children.get(name)
        if child is None or child.phase is not ProcessPhase.STARTING:
            return
        child.is_ready(time.monotonic())
        log.info(
            "%s is ready after %.1f s", name, child.ready_s - child.started_s, extra=about(name)
        )
        if name == GATEWAY and self._drain_until_s is not None:
            self._drain_front()
        self._has_served = self._has_served or self._can_serve()
        if self._is_ready() and not self._was_ready:
            self._was_ready = True
            if self._pages is not None:
                pages = self._children[CONSOLE]
                pages.start_at_s = min(pages.start_at_s, time.monotonic())
            self._starting.close()
            self._announce(self.status())
        self._write_status()

    def _unit_works(self, unit: str) -> None:
        """The front heard so, as every new one does; what was adopted need not say it again."""
        plan = self._plans.get(unit)
        for name in (unit, *plan.ready_after) if plan is not None else ():
            if self._children[name].is_adopted:
                self._ready(name)

    def _reap(self) -> None:
        self._reap_each()
        for (unit, reason), (first, *others) in self._ended_ranks.items():
            self._wire.send(unit, UnitDown(first, reason, tuple(others)))
        self._ended_ranks.clear()

    def _reap_each(self) -> None:
        here = [child for child in self._children.values() if self._is_here(child)]
        reap_others({self._forks.pid, *(child.pid for child in here)})
        for child in self._children.values():
            now_s = time.monotonic()
            lost = self._nodes.why_lost(child.name) if self._nodes else ""
            if lost:
                child.excuse()
            code = child.poll(now_s)
            if code is None:
                continue
            child.last_end = reason = lost or _how(code)
            self._ends.append(ProcessEnd(time.time(), child.name, reason, not child.is_wanted))
            if (
                child.name == GATEWAY
                and self._drain_until_s is not None
                and not (code and self._other_gateways())
            ):
                log.log(
                    logging.INFO if code == 0 else logging.WARNING,
                    "the gateway has ended: %s",
                    reason,
                )
                child.phase = ProcessPhase.ENDED
                self._exit_code = 0
                continue
            self._clear_after(child)
            why = child.why_give_up(now_s)
            if code == EXIT_CONFIG and child.ready_s < child.started_s:
                why = f"{child.name} cannot start"
            if why is None and self._has_successor(child):
                self._wire.send(FRONT, LeaderDown(child.name, reason))
                log.warning(
                    "%s ended: %s; its ranks wait for another",
                    child.name,
                    reason,
                    extra=about(child.name),
                )
                self._write_status()
                continue
            self._tell(child, reason)
            is_asked = self._fleet is not None and self._tell_end(self._fleet, child, now_s, reason)
            level = logging.INFO if is_asked else logging.WARNING
            log.log(level, "%s ended: %s", child.name, reason, extra=about(child.name))
            if why is not None and (self._has_served or self._can_spare(child)):
                rest_s = child.put_off(now_s)
                log.error(
                    "%s (%s): %s; it is started again in %.0f s",
                    why,
                    reason,
                    "the others go on without it"
                    if self._can_serve()
                    else "nothing is served until it is back",
                    rest_s,
                    extra=about(child.name),
                )
            elif why is not None:
                log.error("%s (%s): the server ends", why, reason, extra=about(child.name))
                self._exit_code = EXIT_CONFIG if code == EXIT_CONFIG else EXIT_GAVE_UP
            self._write_status()

    def _tell_end(self, fleet: FleetExecutor, child: Child, now_s: float, reason: str) -> bool:
        """Tell of a unit's end; True if it, or the unit that it is a rank of, is not wanted."""
        if child.name in fleet.units:
            return fleet.ended(now_s, child.name, reason)
        return not child.is_wanted

    def _ranks_of(self, unit: str) -> list[Child]:
        """The ranks of a unit of many; empty for one that is a process by itself."""
        return [self._children[name] for name in self._plans[unit].ready_after]

    def _has_successor(self, child: Child) -> bool:
        """Whether it led ranks that live, and the next one may take them over: not if that was
        tried in vain.
        """
        ranks_live = any(rank.phase is ProcessPhase.READY for rank in self._ranks_of(child.name))
        return child.is_wanted and ranks_live and child.num_failed_starts < TAKEOVERS_MAX

    def _can_spare(self, child: Child) -> bool:
        """Whether it is a rank of a unit that works, with other ranks that do, a unit beside others
        of a fleet, or has the pages.
        """
        if child.role == CONSOLE:
            return True
        unit, rank = unit_and_rank(child.name)
        if rank is None and self._fleet is not None and unit in self._fleet.units:
            return self._fleet.has_other(unit)
        if rank is None or self._children[unit].phase is not ProcessPhase.READY:
            return False
        return any(
            other.phase is ProcessPhase.READY
            for other in self._ranks_of(unit)
            if other is not child
        )

    def _clear_after(self, child: Child) -> None:
        """Remove what a dead process cannot."""
        name = wire_name(child.name)
        self._wire.forget(name)
        if not self._is_here(child):
            return  # Its node does.
        socket_path(self._folder, name).unlink(missing_ok=True)
        address_path(self._folder, name).unlink(missing_ok=True)
        if not self._ranks_of(
            child.name
        ):  # A leader has none; its ranks' names begin with its own.
            remove_shared_memory(self._run_id, child.name)

    def _tell(self, child: Child, reason: str) -> None:
        """Say that a process is gone to whom it concerns: of a unit the front, of a rank its
        leader.
        """
        unit, rank = unit_and_rank(child.name)
        if child.name == GATEWAY or child.role in (LENDER, CONSOLE):
            return  # The next one's first message says it.
        if rank is not None:
            self._ended_ranks.setdefault((unit, reason), []).append(child.name)
            return
        self._wire.send(FRONT, UnitDown(child.name, reason))
        for other in self._ranks_of(unit):
            if other.pid:
                log.warning(
                    "%s ends with its leader, which none takes over from",
                    other.name,
                    extra=about(other.name),
                )
            other.replace()

    def _see(self, name: str) -> None:
        """Tell a judge how one of its processes fares: of a unit the front, of a rank its
        leader.
        """
        child = self._children.get(name)
        if child is None or not child.pid:
            return
        if self._nodes is not None and not self._is_here(child):
            self._nodes.see(name)
            return
        state = look_at(child.pid)
        self._wire.send(judge_of(name), Sighting(name, state.waited_s, state.is_stopped))

    def _given_up(self, message: UnitDown) -> None:
        """Kill a unit that the front, or a rank that its leader, finds silent or stuck. A stopped
        one dies as well.
        """
        child = self._children.get(message.unit)
        if child is None or child.phase is not ProcessPhase.READY:
            return
        is_unit = unit_and_rank(message.unit)[1] is None
        if is_unit and time.monotonic() - child.ready_s < self._deployment.unit_timeout_s:
            return  # It cannot have been silent that long: its predecessor was meant.
        log.warning(
            "%s %s; its process is ended and started again",
            child.name,
            message.reason,
            extra=about(child.name),
        )
        child.signal(signal.SIGKILL)

    def _kill_late_starters(self) -> None:
        now_s = time.monotonic()
        for child in self._children.values():
            if child.phase is not ProcessPhase.STARTING:
                continue
            elapsed_s = now_s - self._begun_s(child, now_s)
            if elapsed_s <= child.start_timeout_s:
                continue
            waited_s = self._waited_s(child)
            if start_is_over(elapsed_s, waited_s, child.start_timeout_s):
                log.error(
                    "%s is not ready and came no nearer to it for %.0f s (%.0f s of them without a"
                    " processor); its process is ended and started again",
                    child.name,
                    elapsed_s,
                    min(waited_s, elapsed_s),
                    extra=about(child.name),
                )
                child.signal(signal.SIGKILL)

    def _waited_s(self, child: Child) -> float:
        """How long its threads were ready to run and had no processor, by what its host sees."""
        if self._nodes is not None and not self._is_here(child):
            return self._nodes.waited_s(child.name)
        return look_at(child.pid).waited_s

    def _begun_s(self, child: Child, now_s: float) -> float:
        """The time since which one that starts came no nearer to being ready, though it could: a
        leader cannot before a rank.
        """
        ranks = self._ranks_of(child.name)
        ready_s = [rank.ready_s for rank in ranks if rank.phase is ProcessPhase.READY]
        return max(child.moved_s, min(ready_s, default=now_s)) if ranks else child.moved_s

    def _gateway_spoke(self, heartbeat: GatewayHeartbeat) -> None:
        child = self._children.get(heartbeat.gateway)
        if child is not None and heartbeat.pid == child.pid:  # Else its predecessor's last words.
            self._gateways.heard(time.monotonic(), heartbeat.gateway)
            self._ready(heartbeat.gateway)
            for unit in heartbeat.units:
                self._unit_works(unit)

    def _kill_hung_gateways(self) -> None:
        """Kill gateways and a console whose event loop stands still, or that are stopped. All that
        they said was heard before.
        """
        names = [*gateway_names(self._deployment), CONSOLE]
        gateways = [self._children[name] for name in names if name in self._children]
        now_s = time.monotonic()
        working = {child.name: child.pid for child in gateways if child.phase is ProcessPhase.READY}
        for name in self._gateways.frozen(now_s, working):
            log.warning(
                "%s (pid %d) has not moved for %.1f s%s; its process is ended and started again",
                name,
                working[name],
                self._deployment.gateway_timeout_s,
                self._gateways.why(name),
            )
            self._children[name].signal(signal.SIGKILL)
            self._gateways.heard(now_s, name)  # It is killed once.

    def _state_of(self, name: str) -> ProcessState:
        """How a gateway's process fares, as far as its host says it."""
        child = self._children[name]
        if self._nodes is not None and not self._is_here(child):
            return ProcessState(self._nodes.waited_s(name), is_stopped=False)
        return look_at(child.pid)

    def _stop_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        timeout_s, now_s = self._deployment.drain_timeout_s, time.monotonic()
        if self._drain_until_s is not None:
            if now_s < self._drain_until_s - timeout_s + SAME_SIGNAL_S:
                return
            log.warning("ending at once")
            self._kill_at_once = True
            self._exit_code = 128 + number
            return
        self._drain_until_s = now_s + timeout_s
        fronting = self._children[GATEWAY]
        if fronting.phase is not ProcessPhase.READY and not self._other_gateways():
            self._exit_code = 0  # There is no stream to finish.
            return
        self._fleet = None  # What is there is enough for what runs.
        log.info(
            "ending: running streams have %.0f s to finish; the same signal again ends them now",
            timeout_s,
        )
        for name in gateway_names(self._deployment)[1:]:
            child = self._children[name]
            child.dismiss()
            if child.phase is ProcessPhase.READY:
                self._wire.send(child.name, Drain())
            else:
                child.signal(signal.SIGTERM)
        if fronting.phase is ProcessPhase.READY:
            self._drain_front()
        self._write_status()

    def _drain_front(self) -> None:
        """Where the gateway with it is being started again, as soon as it is there: others' streams
        go on under it.
        """
        self._wire.send(FRONT, Drain())
        if not self._other_gateways():  # Else another may have to be started.
            # The gateway's copy is the last: when it closes it, connections are refused.
            self._listener.close()

    def _other_gateways(self) -> list[Child]:
        """Those that work, beside the one with the front."""
        others = (self._children[name] for name in gateway_names(self._deployment)[1:])
        return [child for child in others if child.phase is ProcessPhase.READY]

    def _end_drain_if_due(self) -> None:
        if self._drain_until_s is not None and time.monotonic() > self._drain_until_s:
            log.warning(
                "streams still run after %.0f s; ending them", self._deployment.drain_timeout_s
            )
            self._exit_code = 0

    def _wait_s(self) -> float:
        if self._forks.is_warming:
            return _WARMING_S
        # One of a node is started at the next look, every _LOOK_S.
        waits = [
            child.start_at_s
            for child in self._children.values()
            if child.phase is ProcessPhase.WAITING and self._is_here(child)
        ]
        if self._drain_until_s is not None:
            waits.append(self._drain_until_s)
        most_s = _MAX_WAIT_S if self._nodes is None else _LOOK_S
        return min(most_s, max(0.0, min(waits) - time.monotonic())) if waits else most_s

    def _write_fleet(self, fleet: FleetExecutor) -> None:
        """Once for each decision."""
        if fleet.num_reviews != self._num_reviews:
            self._num_reviews = fleet.num_reviews
            seen = fleet.seen(time.monotonic())
            self._write(lambda: write_fleet(self._folder, seen))

    def _write_status(self) -> None:
        if self._is_run_old:
            self._is_run_old = not self._write(lambda: write_run(self._folder, self._told))
        self._write(lambda: write_status(self._folder, self.status()))

    def _write(self, write: Callable[[], None]) -> bool:
        """Write what others read: a full disk must not end what serves. It is said once. Returns whether
        it could be.
        """
        try:
            write()
        except OSError as error:
            if not self._is_unwritten:
                log.warning("what is told in %s is old (%s)", self._folder, error)
            self._is_unwritten = True
        else:
            self._is_unwritten = False
        return not self._is_unwritten


def _run(resolved: Resolved, options: Options) -> tuple[Run, Joining | None]:
    """A new run or, where nodes run what a supervisor before this one left, the same again, and what it
    told them. Raises ConfigError.
    """
    deployment = resolved.deployment
    address = address_here(deployment.cluster)
    secret = _secret(options.secret_file)
    run = Run(
        secrets.token_hex(4),
        deployment,
        options.log_level,
        options.log_format,
        resolved.fingerprint,
        resolved.model_digest,
        address,
        secret,
    )
    kept = kept_run(deployment.cluster) if deployment.cluster.spans_hosts else None
    if kept is None:
        return run, None
    term = kept.run.term + 1
    is_ours = options.secret_file is None or kept.run.secret == secret
    if not is_ours or not is_same(kept.run.deployment, deployment):
        return dataclasses.replace(run, term=term), None
    log.info("taking over what another supervisor left on the nodes")
    taken_over = dataclasses.replace(
        kept.run,
        log_level=run.log_level,
        log_format=run.log_format,
        address=address,
        term=term,
    )
    return taken_over, kept


@contextmanager
def _console_listener(deployment: Deployment) -> Iterator[socket.socket | None]:
    """Where the pages are served, None without any. A port that is in use never keeps a server from
    starting: another is taken.
    """
    if deployment.console.mode == OFF:
        yield None
        return
    host, port = deployment.host, deployment.console.port
    try:
        listener = open_listener(host, port)
    except ConfigError:
        listener = open_listener(host, 0)
        log.warning("port %d is in use; the console is at %s", port, url_of(listener, host))
    with listener:
        yield listener


def _child(plan: ProcessPlan, options: Options, kept_in: Path, first_life: int) -> Child:
    return Child(
        plan.name,
        plan.role,
        [plan.module, *plan.arguments],
        None if options.log_dir is None else options.log_dir / f"{plan.name}.log",
        options.log_format,
        KeptLines(kept_in, plan.name),
        first_life,
    )


def _make_log_dir(path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"--log-dir {path}: cannot be made ({error.strerror}).") from error


def _secret(path: Path | None) -> bytes:
    """The deployment's secret, read or drawn. Raises ConfigError."""
    if path is None:
        return secrets.token_bytes(SECRET_BYTES)
    found = read_private(path, "the secret")
    if len(found) < MIN_SECRET_BYTES:
        raise ConfigError(f"{path}: a secret has {MIN_SECRET_BYTES} bytes at least.")
    return found


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGBUS:
        return (
            "killed by SIGBUS: a file that it had mapped became shorter; the model's, it is likely"
        )
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _clear_run(folder: Path) -> None:
    """Remove a run's sockets and its secrets: run.json has the secret and may have the ledger's
    password. status.json and the logs stay.
    """
    for left in (*folder.glob("*.sock"), *folder.glob(RUN_FILE)):
        left.unlink()


@contextmanager
def _run_folder(asked: Path | None) -> Iterator[Path]:
    """Make the folder of sockets and status files, for this user alone."""
    if asked is not None:
        make_private(asked)
        if is_heard(asked / f"{SUPERVISOR}.sock"):
            raise ConfigError(f"{asked}: another `hadal serve` uses this run folder. Take another.")
        _clear_run(asked)
        shutil.rmtree(asked / LOGS_FOLDER, ignore_errors=True)
        folder = asked.absolute()
        try:
            yield folder
        finally:
            with suppress(OSError):
                _clear_run(folder)
        return
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
