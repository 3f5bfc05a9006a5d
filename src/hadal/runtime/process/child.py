"""One process of a run as its supervisor sees it: how it starts, what it says, how it ends, when it
may start again, and whether it is frozen.

Knows what a node's phase and a Sighting are, and no other role or message.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec

from hadal.core.messages import Sighting
from hadal.core.overview import FleetSeen
from hadal.progress import PERIOD_S, Bar
from hadal.roles.nodes import NodePhase
from hadal.roles.suspects import Absence, Suspects
from hadal.runtime.process.forks import Output, Started
from hadal.runtime.process.logs import (
    TEXT,
    Doing,
    KeptLines,
    as_line,
    doing_of,
    write_line,
    written_by,
)
from hadal.runtime.process.private import append_private

# What runs, as `status.json` in the run folder: for operators, scripts and tests. Written by the
# supervisor alone.


STATUS_FILE = "status.json"
FLEET_FILE = "fleet.json"
"""Beside it, where there is a fleet: what it decides, and what for."""


@dataclass(frozen=True)
class ProcessStatus:
    """One child. `pid` 0: it does not run."""

    role: str
    phase: str
    pid: int
    num_starts: int
    last_end: str = ""
    """How it ended last; empty if it never did."""
    host: str = ""
    """Where it was started last; empty: on the supervisor's own host."""
    cores: tuple[int, ...] = ()
    """Logical cores that its computing threads take, one each, while nobody else wants them; empty:
    none.
    """


@dataclass(frozen=True)
class ProcessEnd:
    """One end of a process, and why."""

    unix_s: float
    name: str
    reason: str
    is_asked: bool
    """It was told to end: nothing is wrong."""


@dataclass(frozen=True)
class NodeStatus:
    """One node of a cluster. `host` is empty before an agent spoke there."""

    number: int
    phase: str
    host: str


@dataclass(frozen=True)
class RolloutStatus:
    """How far the last rollout is."""

    number: int
    """Of this run, from 1."""
    model: str
    """Folder of what the new units serve."""
    num_units: int
    """All that were to be replaced."""
    num_left: int
    """Those that are not replaced yet, by ones that are up."""
    num_failed: int = 0
    """Starts in a row that came to nothing: while there are any, no other unit is replaced."""


@dataclass(frozen=True)
class Status:
    """One run. `ready`: every process is."""

    url: str
    run_id: str
    supervisor_pid: int
    ready: bool
    draining: bool
    elapsed_s: float
    """Time since the supervisor began."""
    processes: dict[str, ProcessStatus]
    nodes: tuple[NodeStatus, ...] = ()
    """Of the cluster, if there is one."""
    nodes_wrong: str = ""
    """Why nodes that are wanted are not there, or none could be had now; empty if all is well."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of what it runs on."""
    rollout: RolloutStatus | None = None
    """None: there was none."""
    console_url: str = ""
    """Of the pages; empty: there are none."""
    ends: tuple[ProcessEnd, ...] = ()
    """The last ends of processes, the latest last."""


def wrong_nodes(status: Status) -> list[str]:
    """What is wrong with the nodes of a cluster, a sentence each."""
    said = [
        f"node {node.number} ({node.host}) is lost."
        for node in status.nodes
        if node.phase == NodePhase.LOST
    ]
    return [*said, f"{status.nodes_wrong}."] if status.nodes_wrong else said


def write_status(folder: Path, status: Status) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    path = folder / f"{STATUS_FILE}.new"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
    path.rename(folder / STATUS_FILE)


def write_fleet(folder: Path, seen: FleetSeen) -> None:
    """The same for what the fleet decides."""
    path = folder / f"{FLEET_FILE}.new"
    path.write_bytes(msgspec.json.encode(seen))
    path.rename(folder / FLEET_FILE)


def read_fleet(folder: Path) -> FleetSeen | None:
    """Return what the fleet was last, None if there is none."""
    try:
        return msgspec.json.decode((folder / FLEET_FILE).read_bytes(), type=FleetSeen)
    except FileNotFoundError:
        return None


def read_status(folder: Path) -> Status | None:
    """Return the last status written, None if there is none yet."""
    try:
        return msgspec.json.decode((folder / STATUS_FILE).read_bytes(), type=Status)
    except FileNotFoundError:
        return None


EXITS_MAX = 20
EXITS_WINDOW_S = 60.0
"""More exits than this in the window, and starting it again is no help."""
FAILED_STARTS_MAX = 3
"""Exits in a row before it was ever ready."""
START_TIMEOUT_S = 600.0
"""A process that is not ready by then is killed. Generous: a big checkpoint is read from a disk."""
RESTART_TIMEOUT_S = 60.0
"""Time that one which was ready before has at least, and at least RESTART_FACTOR times what it took
then.
"""
RESTART_FACTOR = 4.0
_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 10.0
"""A process that lived this long starts its back-off anew."""
PUT_OFF_S = 15.0
"""How long a process that should be given up rests while the others serve, before it is tried
again. Each time that it was not ready in between it rests twice as long, up to PUT_OFF_MAX_S.
"""
PUT_OFF_MAX_S = 240.0


class ProcessPhase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """The process is to be started again."""
    RESTING = "resting"
    """The process is not wanted now; it may be later."""
    ENDED = "ended"


class Child:
    """A named process. The supervisor's loop calls `poll` and `start`; nothing here waits except
    `wait`.
    """

    def __init__(
        self,
        name: str,
        role: str,
        arguments: Sequence[str],
        log_path: Path | None,
        log_format: str = TEXT,
        kept: KeptLines | None = None,
        first_life: int = 1,
    ) -> None:
        """`arguments`: a module and what it is given. Output goes to `log_path`, or to the
        supervisor's stderr; `kept` gets it as well. `first_life`: number of its first start; the
        following count on.
        """
        self.name = name
        self.role = role
        self.phase = ProcessPhase.WAITING
        self.num_starts = 0
        self.life = first_life - 1
        """Of its last start."""
        self.is_adopted = False
        """Another supervisor started what runs now."""
        self.start_at_s = 0.0
        """When WAITING: not before."""
        self.started_s = 0.0
        self.moved_s = 0.0
        """When its present start was last heard to come nearer to its end."""
        self.doing: Doing | None = None
        """What it said it does; None since it was started."""
        self.ready_s = 0.0
        self.last_end = ""
        """How it ended last, as its supervisor says it."""
        self.more_arguments: tuple[str, ...] = ()
        """What it is given beside its arguments from its next start on."""
        self._arguments = tuple(arguments)
        self._log_path = log_path
        self._log_format = log_format
        self._kept = kept
        self._process: Started | None = None
        self._exits_s: deque[float] = deque(maxlen=EXITS_MAX + 1)
        self._failed_starts = 0
        self._backoff = 0
        self._put_off_s = PUT_OFF_S
        self._is_replaced = False
        self._is_wanted = True
        self._start_took_s = 0.0
        """The longest start that ended well; 0 before there was one."""

    def start(
        self,
        now_s: float,
        start: Callable[[tuple[str, ...], int], Started],
    ) -> None:
        """Start the process by `start`, which is given its arguments and the number of this
        life.
        """
        self.life += 1
        self._begin(now_s, start((*self._arguments, *self.more_arguments), self.life))

    def adopt(self, now_s: float, process: Started) -> None:
        """Take over a process that another supervisor started. Whether it works it says again."""
        self._begin(now_s, process)
        self.is_adopted = True

    def _begin(self, now_s: float, process: Started) -> None:
        self.num_starts += 1
        self._process = process
        self.is_adopted = False
        self.phase = ProcessPhase.STARTING
        self._is_replaced = False
        self.started_s = self.moved_s = now_s
        self.doing = None
        assert process.stdout is not None
        threading.Thread(
            target=self._relay, args=(process.stdout,), name=f"log-{self.name}", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """0 while it does not run."""
        return self._process.pid if self._process else 0

    def is_ready(self, now_s: float) -> None:
        """The process works: from now on its end is a crash, not a failed start."""
        if self.phase is ProcessPhase.STARTING:
            self.phase = ProcessPhase.READY
            self.ready_s = now_s
            self._start_took_s = max(self._start_took_s, now_s - self.started_s)
            self._failed_starts = 0
            self._put_off_s = PUT_OFF_S

    @property
    def start_timeout_s(self) -> float:
        """How long the present start may take, on a processor, without a word of how far it is. One
        that freezes must not be waited for as for a first, cold one.
        """
        if not self._start_took_s:
            return START_TIMEOUT_S
        return min(START_TIMEOUT_S, max(RESTART_TIMEOUT_S, RESTART_FACTOR * self._start_took_s))

    def status(self, host: str = "", cores: tuple[int, ...] = ()) -> ProcessStatus:
        return ProcessStatus(
            self.role, self.phase.value, self.pid, self.num_starts, self.last_end, host, cores
        )

    def poll(self, now_s: float) -> int | None:
        """Return the exit code if it has just ended (negative: by that signal), else None. Plans
        the next start.
        """
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            return None
        self._process = None
        self.start_at_s = now_s
        if not self._is_wanted:
            self.phase = ProcessPhase.RESTING
            self._failed_starts = self._backoff = 0
            return code
        if not self._is_replaced:
            self._exits_s.append(now_s)
            if self.phase is ProcessPhase.STARTING:
                self._failed_starts += 1
            self._backoff = 0 if now_s - self.started_s > _STEADY_S else self._backoff + 1
            self.start_at_s += _BACKOFF_S[min(max(self._backoff - 1, 0), len(_BACKOFF_S) - 1)]
        self.phase = ProcessPhase.WAITING
        return code

    @property
    def num_failed_starts(self) -> int:
        """Starts in a row of which none got ready."""
        return self._failed_starts

    def why_give_up(self, now_s: float) -> str | None:
        """Return why it should not be started again, None if it may be."""
        if self._failed_starts >= FAILED_STARTS_MAX:
            return f"{self.name} ended {self._failed_starts} times before it was ready"
        recent = [at_s for at_s in self._exits_s if now_s - at_s < EXITS_WINDOW_S]
        if len(recent) > EXITS_MAX:
            return f"{self.name} ended {len(recent)} times in {EXITS_WINDOW_S:.0f} s"
        return None

    def delay(self, now_s: float) -> float:
        """It could not be started now, for want of memory or descriptors. Plans the next try, and
        returns in how long.
        """
        self._backoff += 1
        wait_s = _BACKOFF_S[min(self._backoff, len(_BACKOFF_S) - 1)]
        self.start_at_s = now_s + wait_s
        return wait_s

    def put_off(self, now_s: float) -> float:
        """Let it rest instead of giving it up, and count its exits anew. Returns for how long."""
        rest_s, self._put_off_s = self._put_off_s, min(2.0 * self._put_off_s, PUT_OFF_MAX_S)
        self.start_at_s = now_s + rest_s
        self._failed_starts = 0
        self._exits_s.clear()
        return rest_s

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def replace(self) -> None:
        """Kill it so that another starts at once: not its own fault, so it does not count as a
        crash.
        """
        if self._process is not None:
            self.excuse()
            self._process.kill()

    def excuse(self) -> None:
        """What ends it now is not its own fault."""
        self._is_replaced = True

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be started again when it ends."""
        return self._is_wanted

    def dismiss(self) -> None:
        """The process need not run. If it does, it runs until it ends, and is not started again."""
        self._is_wanted = False
        if self.phase is ProcessPhase.WAITING:
            self.phase = ProcessPhase.RESTING

    def want(self, now_s: float) -> None:
        """The process is to run: at once if it does not, else again when it has ended."""
        self._is_wanted = True
        if self.phase is ProcessPhase.RESTING:
            self.phase = ProcessPhase.WAITING
            self.start_at_s = max(self.start_at_s, now_s)

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end. False if it still runs after `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        self._process = None
        self.phase = ProcessPhase.ENDED
        return True

    def _relay(self, output: Output) -> None:
        """Copy its output line by line. In a thread, so that a slow terminal never stops the
        supervisor.
        """
        file = None
        if self._log_path is not None:
            try:
                file = append_private(self._log_path)
            except OSError as error:
                # It is read all the same: whoever writes and is not read stands still.
                log.warning(
                    "%s: what %s says is not kept there (%s)", self._log_path, self.name, error
                )
        with output as lines, file or contextlib.nullcontext():
            for line in lines:
                if (doing := doing_of(line)) is not None:
                    self.doing, self.moved_s = doing, time.monotonic()
                    continue
                whole = as_line(self.name, self._log_format, line, time.time())
                if self._kept is not None:
                    self._kept.write(whole)
                if file is None:
                    write_line(whole)
                    continue
                with contextlib.suppress(OSError):  # The disk is full: the child goes on.
                    file.write(whole)
        if self._kept is not None:
            self._kept.close()


# What those see who wait for processes that start: how many are ready, and what the others do.
#
# At the first start a bar at the foot of the terminal, where there is one; else, and whenever a
# process starts again, a line of the log every 10 s.


log = logging.getLogger(__name__)

_MOST_NAMED = 4
_OF_A_START = 0.9
"""Share of a process's start that is over when it has done all that it tells of."""


class Starting:
    """Looks at the supervisor's children."""

    def __init__(self, children: Collection[Child], *, has_bar: bool) -> None:
        self._children = children
        self._stack = ExitStack()
        self._has_bar = has_bar
        self._bar: Bar | None = None
        self._logged_s: float | None = None
        """When that was last logged; None while nobody starts."""

    def look(self, now_s: float) -> None:
        """Show how far they are. Called a few times a second."""
        starting = [child for child in self._children if child.phase is ProcessPhase.STARTING]
        if self._has_bar:
            if self._bar is None:
                self._bar = self._stack.enter_context(Bar("hadal serve", 1.0))
                self._stack.enter_context(written_by(self._bar.print_above))
            self._bar.update(self._text(starting), done=self._share())
        elif not starting:
            self._logged_s = None
        elif self._logged_s is None:
            self._logged_s = now_s
        elif now_s - self._logged_s >= PERIOD_S:
            self._logged_s = now_s
            log.info("%s", self._text(starting))

    def close(self) -> None:
        """The bar is not needed any more."""
        self._has_bar = False
        self._stack.close()

    def _text(self, starting: list[Child]) -> str:
        wanted = [child for child in self._children if child.is_wanted]
        num_ready = sum(child.phase is ProcessPhase.READY for child in wanted)
        named = [f"{child.name} {child.doing or 'starts'}" for child in starting[:_MOST_NAMED]]
        if len(starting) > _MOST_NAMED:
            named.append(f"{len(starting) - _MOST_NAMED} more start")
        return "; ".join([f"{num_ready} of {len(wanted)} processes are ready", *named])

    def _share(self) -> float:
        """Share of the whole start that is over."""
        shares = []
        for child in self._children:
            if child.is_wanted:
                of_reported = (
                    child.doing.done / child.doing.total
                    if child.doing and child.doing.total
                    else 0.0
                )
                shares.append(
                    1.0 if child.phase is ProcessPhase.READY else _OF_A_START * of_reported
                )
        return sum(shares) / len(shares) if shares else 1.0


# The supervisor's watch over processes that tell it again and again that they work: which of them
# are frozen? It is the judge and the host in one, so what it suspects it looks at itself, in /proc:
# whether the process could run. Elsewhere than on Linux nothing is seen.


_PROC = Path("/proc")
_STOPPED = ("T", "t")


@dataclass(frozen=True)
class Sight:
    """Seconds count from the process's start, over all threads that it has now."""

    waited_s: float
    """A thread was ready to run and had no processor (proc(5), schedstat)."""
    is_stopped: bool


def look_at(pid: int) -> Sight:
    """See how a process fares. One that is gone has waited for nothing."""
    waited_ns = 0
    try:
        is_stopped = _state(_PROC / str(pid) / "stat") in _STOPPED
        for thread in os.scandir(_PROC / str(pid) / "task"):
            waited_ns += _waited_ns(Path(thread.path) / "schedstat")
    except OSError:
        return Sight(0.0, is_stopped=False)
    return Sight(waited_ns / 1e9, is_stopped)


def _state(path: Path) -> str:
    """The letter behind the command, which stands in brackets and may hold any character."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]


def _waited_ns(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii").split()[1])
    except (
        OSError,
        IndexError,
        ValueError,
    ):  # The thread has ended, or this kernel does not count it.
        return 0


class Watch:
    """Times are of whatever clock the caller reads, in seconds."""

    def __init__(self, timeout_s: float, period_s: float, sight_of: Callable[[str], Sight]) -> None:
        """A process may be silent for `timeout_s` in which it could run; `frozen` is called every
        `period_s` at least, unless this process stands still itself. `sight_of`: how one fares, by
        its name.
        """
        self._absence = Absence(period_s)
        self._sight_of = sight_of
        self._suspects = Suspects(timeout_s)
        self._name_to_heard_s: dict[str, float] = {}

    def heard(self, now_s: float, name: str) -> None:
        """The process of this name spoke."""
        self._name_to_heard_s[name] = now_s

    def frozen(self, now_s: float, names: Collection[str]) -> list[str]:
        """Which of these, each heard once at least, are frozen. To be called after all that they
        said was heard.
        """
        missed_s = self._absence.called(now_s)
        for name, heard_s in self._name_to_heard_s.items():
            self._name_to_heard_s[name] = min(now_s, heard_s + missed_s)
        frozen = self._suspects.judge(
            now_s, {name: now_s - self._name_to_heard_s[name] for name in names}
        )
        for name in self._suspects.to_ask(now_s):
            sight = self._sight_of(name)
            self._suspects.sighted(now_s, Sighting(name, sight.waited_s, sight.is_stopped))
        return frozen

    def why(self, name: str) -> str:
        """What was seen of one that is frozen, for the log; empty if nothing is to be said."""
        return self._suspects.why(name)
