"""News that only a rank's process has: the progress of its runner, and lost peers. The rank's role
and its log receive them.

Independent of steps. A lost peer process gets one line in the log, from its first observer: the
group's thread, a failed step, or the leader, which goes on without it.
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
        """Rank -> epoch of the members of the newest formation that the leader requested."""
        self._noted: set[tuple[int, str]] = set()
        """Processes with a noted loss, as (rank, epoch)."""
        self._unlogged: list[tuple[int, str]] = []
        """Noted losses that are not logged yet, as (rank, reason)."""

    def peer_lost(self, peer: int, reason: str = _CONNECTION) -> None:
        """Note that a member is gone, or silent beyond a deadline. From any thread."""
        with self._lock:
            process = (peer, self._rank_to_epoch.get(peer, ""))
            is_new = process[1] != "" and process not in self._noted
            self._noted.add(process)
            if is_new:
                self._unlogged.append((peer, reason))
        if is_new:
            self.wake()

    def forming(self, plan: FormPlan) -> None:
        """Note that the leader begins a formation, and the loss of each member left out."""
        if plan.formation <= self._formation:
            return
        self._formation = plan.formation
        members = {member.rank: member.epoch for member in plan.members}
        for peer, epoch in self._rank_to_epoch.items():
            if members.get(peer) != epoch:
                self.peer_lost(peer, "the leader continues without it")
        with self._lock:
            self._rank_to_epoch = members
            self._noted &= set(members.items())
        self._say()

    def take(self, runner: ModelRunner) -> RankProgress:
        """Return the progress of the runner, and note its lost peers. From the host's thread."""
        lost = runner.lost
        for peer in lost:
            self.peer_lost(peer)
        self._say()
        return RankProgress(runner.num_ops, runner.is_computing, lost)

    def _say(self) -> None:
        """Log the noted losses, from the host's thread; none while the host stops, because at the
        end of a run peers end in any order.
        """
        with self._lock:
            unsaid, self._unlogged = self._unlogged, []
        for peer, reason in unsaid if not self.is_stopping() else ():
            log.warning("rank %d is lost: %s", peer, reason)


class Noticing:
    """Wrapper of a rank's role that passes every formation to the news first."""

    def __init__(self, role: RecordedRole, news: News) -> None:
        self._role = role
        self._news = news

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        """Handle one event and return the effects, in order."""
        if isinstance(event, RankForm):
            self._news.forming(event.plan)
        return self._role.handle(now_s, event)
