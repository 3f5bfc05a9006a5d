"""Binding of each thread of a kernel team to its own core, except while other processes use the cores.

    team's threads    a core each ------| unbound |- a core each ------------
    others' work      ..............|####### on these cores #######|.........

A team's threads wait for each other dozens of times in a step (kernels/cpu/team.h). If two of them
share a core, they take turns, and the kernel moves neither, because both sleep often: a step then
takes twice as long beside an idle core. But if other processes use these cores, a bound thread waits
for them. So threads are unbound then, and the kernel places them, until the others use less.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from hadal.runtime.core_use import CoreUse
from hadal.runtime.cores import allowed_cores

log = logging.getLogger("hadal.pinning")

LOOK_S = 0.5
"""Time between two measurements of other processes' use of the threads' cores."""
TAKEN = 0.4
"""Share of the cores' time, used by other processes, above which threads run unbound. On two cores
the share is 0.15 beside 32 long answers, and 0.5 beside 8 short chats or two spinning processes.
"""
_TASKS = Path("/proc/self/task")


class Team(Protocol):
    """A kernel team (kernels/library): the thread that calls it and its own threads."""

    @property
    def threads(self) -> Sequence[int]:
        """Ids of the team's threads except the caller's (proc(5))."""

    def set_pinned(self, is_pinned: bool) -> None:
        """Set whether each of its threads has its own core."""


class PinnedTeam:
    """Binding of one team. Make it in a thread that stays unbound and so shows the usable cores."""

    def __init__(
        self, choose: Callable[[Sequence[int]], Sequence[int]], make_team: Callable[[], Team | None]
    ) -> None:
        """`choose` picks the cores, one per thread, from the process's allowed cores; it may pick
        none. `make_team` returns the team of the calling thread, or None if it has none.
        """
        self._choose = choose
        self._make_team = make_team
        self._maker = threading.get_native_id()
        self._lock = threading.Lock()
        self._team: Team | None = None
        self._threads: tuple[int, ...] = ()
        """Ids of the team's threads, the caller's first; empty before `enter`."""
        self._allowed: tuple[int, ...] = ()
        self._is_pinned = False
        self._next_s = 0.0
        self._use = CoreUse()

    def enter(self, now_s: float) -> None:
        """Make the calling thread the team's computing thread."""
        team = self._make_team()
        if team is not None and team.threads:
            with self._lock:
                self._team, self._threads = team, (threading.get_native_id(), *team.threads)
                self._look(now_s)

    def look(self, now_s: float) -> None:
        """Bind or unbind the threads, if a measurement is due."""
        if now_s >= self._next_s and self._threads:
            with self._lock:
                self._look(now_s)

    def _look(self, now_s: float) -> None:
        self._next_s = now_s + LOOK_S
        allowed = allowed_cores(self._maker)
        cores = self._choose(allowed)[: len(self._threads)]
        taken = self._use.by_others(now_s, cores) if len(cores) == len(self._threads) else None
        is_changed, self._allowed = allowed != self._allowed, allowed
        if taken is None or taken > TAKEN:
            if self._is_pinned or is_changed:
                self._let_go()
        elif not self._is_pinned or is_changed:
            self._pin(cores)
        else:
            self._free_started()

    def _pin(self, cores: Sequence[int]) -> None:
        """Bind each thread to a core, if the kernel permits it."""
        try:
            for thread, core in zip(self._threads, cores, strict=True):
                os.sched_setaffinity(thread, {core})
        except OSError as error:  # Forbidden here, or the permitted cores have changed.
            log.debug("threads cannot be bound to cores %s: %s", cores, error)
            self._let_go()
            return
        log.debug("computes on cores %s", cores)
        self._tell(True)

    def _let_go(self) -> None:
        """Let the threads run anywhere."""
        for thread in self._threads:
            self._set_free(thread)
        log.debug("computes on any core")
        self._tell(False)

    def _free_started(self) -> None:
        """Unbind threads that a bound thread started: they inherit its core."""
        for name in os.listdir(_TASKS):
            thread = int(name)
            if thread not in self._threads:
                with contextlib.suppress(OSError):
                    if len(os.sched_getaffinity(thread)) == 1:
                        self._set_free(thread)

    def _set_free(self, thread: int) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(thread, self._allowed)

    def _tell(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        if self._team is not None:
            self._team.set_pinned(is_pinned)
