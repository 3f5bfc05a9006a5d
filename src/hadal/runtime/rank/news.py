"""What only a rank's process sees: how far its runner is, and which peers are gone. For its role,
and for its log.

Knows no steps. A peer's process that is gone gets one line in the log, whichever saw it first: the
group's thread, a step that failed, or the leader, which goes on without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from hadal.core.messages.ranks import RankForm
from hadal.core.plans import FormPlan
from hadal.core.seams import Effect, Event
from hadal.model.runner import ModelRunner
from hadal.roles.ranks.rank import RankProgress
from hadal.roles.recording import RecordedRole

log = logging.getLogger("hadal.rank")

_CONNECTION = "its connection ended, or an exchange with it timed out"


class News:
    """News of one rank. `wake` and `is_stopping` are set once there is a host."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.is_stopping: Callable[[], bool] = lambda: False
        self._formation = 0
        self._lock = threading.Lock()
        self._rank_to_epoch: dict[int, str] = {}
        """Members of the newest formation that the leader asked for."""
        self._noted: set[tuple[int, str]] = set()
        """Processes whose loss was noted, by rank and epoch."""
        self._unlogged: list[tuple[int, str]] = []
        """Losses that were noted and are not logged yet: who, and why."""

    def peer_lost(self, peer: int, reason: str = _CONNECTION) -> None:
        """A member is gone, or silent beyond a deadline. From any thread."""
        with self._lock:
            process = (peer, self._rank_to_epoch.get(peer, ""))
            is_new = process[1] != "" and process not in self._noted
            self._noted.add(process)
            if is_new:
                self._unlogged.append((peer, reason))
        if is_new:
            self.wake()

    def forming(self, plan: FormPlan) -> None:
        """The leader starts a formation. A member that is none any more is gone, if nobody here
        saw it before.
        """
        if plan.formation <= self._formation:
            return
        self._formation = plan.formation
        members = {member.rank: member.epoch for member in plan.members}
        for peer, epoch in self._rank_to_epoch.items():
            if members.get(peer) != epoch:
                self.peer_lost(peer, "the leader goes on without it")
        with self._lock:
            self._rank_to_epoch = members
            self._noted &= set(members.items())
        self._say()

    def take(self, runner: ModelRunner) -> RankProgress:
        """The progress of the runner, now. From the host's thread."""
        lost = runner.lost
        for peer in lost:
            self.peer_lost(peer)
        self._say()
        return RankProgress(runner.num_ops, runner.is_computing, lost)

    def _say(self) -> None:
        """Tell the log, from the host's thread: where all end together, it knows that before it
        hears of the peers that ended first, and says nothing.
        """
        with self._lock:
            unsaid, self._unlogged = self._unlogged, []
        for peer, reason in unsaid if not self.is_stopping() else ():
            log.warning("noticed that rank %d is gone: %s", peer, reason)


class Noticing:
    """A rank's role whose news hear of every formation first."""

    def __init__(self, role: RecordedRole, news: News) -> None:
        self._role = role
        self._news = news

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event and return what to do, in order."""
        if isinstance(event, RankForm):
            self._news.forming(event.plan)
        return self._role.handle(now_s, event)
