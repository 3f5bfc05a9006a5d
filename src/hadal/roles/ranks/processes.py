"""Processes of a unit's ranks, as its leader sees them: announced, alive, given up, killed.

A rank that is given up may still run: only the supervisor, its parent, can report that a process
has ended. Until then, or until its successor announces itself, the rank stays DROPPED and is killed
again, because a frozen process may resume. Its messages are ignored then.

Independent of formations, which belong to the membership (roles/ranks/membership).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from hadal.core.config import RANK_HEARTBEAT_S
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.ranks import RankForm, RankHeartbeat, RankUp, RankWho
from hadal.core.messages.units import Sighting, Suspect, UnitDown
from hadal.core.plans import Held, Member
from hadal.core.seams import Send
from hadal.roles.ranks.states import RankState, next_rank_state
from hadal.roles.suspects import Suspects

SILENT_S = 2.4 * RANK_HEARTBEAT_S
"""Seconds of silence after two missing heartbeats: too short to give a rank up, enough to accept
other ranks' reports that it is lost.
"""
KILL_AGAIN_S = 2.0
_NUM_DEAD_EPOCHS = 16
_LIVING = (RankState.UP, RankState.FORMING, RankState.MEMBER)


@dataclass(slots=True)
class RankView:
    """State of one rank's present process."""

    state: RankState = RankState.ABSENT
    up: RankUp | None = None
    held: Held | None = None
    """Pool contents from an earlier leader; None: none, or the inner leader has them already."""
    heard_s: float = 0.0
    num_ops: int = -1
    moved_s: float = 0.0
    """Time at which the rank's compute thread last moved or formed, or had nothing to do."""
    progressed_s: float = 0.0
    """Time at which the rank's compute thread last moved."""
    ended_s: float = 0.0
    killed_s: float = 0.0
    """Time at which the supervisor was last asked to kill the process."""
    num_owed: int = 0
    """UnitDowns still expected for earlier processes: a successor announced itself first."""
    dead: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_DEAD_EPOCHS))

    @property
    def epoch(self) -> str:
        return self.up.epoch if self.up is not None else ""

    @property
    def is_living(self) -> bool:
        return self.state in _LIVING

    def silent_s(self, now_s: float, *, must_move: bool) -> float:
        """Return the seconds without a sign of life. `must_move`: the rank takes part in a step, so
        heartbeats without progress do not count.
        """
        return now_s - (min(self.heard_s, self.moved_s) if must_move else self.heard_s)

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s` seconds during which the leader did not run."""
        self.heard_s += gap_s
        self.moved_s += gap_s
        self.progressed_s += gap_s
        self.ended_s += gap_s


class RankProcesses:
    """Processes of a unit's ranks, by rank. Notes for the log go to `notes`.

    `grace_s`: seconds that a rank may have no known process before the supervisor is asked to kill
    it; the supervisor does so if that process has reported ready.
    """

    def __init__(
        self,
        unit: str,
        num_ranks: int,
        notes: deque[str],
        *,
        rank_timeout_s: float,
        grace_s: float,
    ) -> None:
        self.unit = unit
        self._ranks = [RankView() for _ in range(num_ranks)]
        self._notes = notes
        self._rank_timeout_s = rank_timeout_s
        self._grace_s = grace_s
        self._suspects = Suspects(rank_timeout_s)
        self._sends: list[Send] = []
        """Messages decided on since `take_sends`."""
        self._begun_s: float | None = None
        """Time of the first tick."""

    def __getitem__(self, rank: int) -> RankView:
        return self._ranks[rank]

    def __iter__(self) -> Iterator[RankView]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def living(self) -> list[int]:
        return [index for index, rank in enumerate(self._ranks) if rank.is_living]

    def has(self, unit: str, rank: int) -> bool:
        """Return whether rank `rank` of unit `unit` is one of these ranks."""
        return unit == self.unit and 0 <= rank < len(self._ranks)

    def rank_named(self, name: str) -> int | None:
        """Return the rank with this process name; None if it is not a rank of this unit."""
        unit, _, number = name.rpartition(".")
        return int(number) if number.isdigit() and self.has(unit, int(number)) else None

    def name(self, rank: int) -> str:
        """Return a rank's name on the wire."""
        return f"{self.unit}.{rank}"

    def member(self, rank: int) -> Member:
        """Return a living rank's entry for a FormPlan."""
        up = self._ranks[rank].up
        assert up is not None
        return Member(rank, up.epoch, up.host, up.port)

    # ---- messages out ----
    def send(self, rank: int, message: RankForm | RankWho) -> None:
        """Send a message to a rank with the next `take_sends`."""
        self._sends.append(Send(self.name(rank), message))

    def take_sends(self) -> list[Send]:
        """Return the messages decided on since the last call."""
        sends, self._sends = self._sends, []
        return sends

    def take_held(self, rank: int) -> Held | None:
        """Return what a rank's pool held at the takeover; None on later calls."""
        view = self._ranks[rank]
        held, view.held = view.held, None
        return held

    # ---- starts and ends ----
    def is_new(self, up: RankUp) -> bool:
        """Return whether this process of the unit is unknown and its rank has no other process."""
        if not self.has(up.unit, up.rank):
            return False
        rank = self._ranks[up.rank]
        return rank.state is RankState.ABSENT and up.epoch not in rank.dead

    def announce(self, now_s: float, up: RankUp, held: Held | None) -> bool:
        """Register a process that is ready. Returns False if it is already known, alive or dead."""
        rank = self._ranks[up.rank]
        if rank.is_living and rank.epoch == up.epoch:
            rank.heard_s = now_s
            return False
        if up.epoch in rank.dead:
            self._end_again(now_s, up.rank)
            return False
        if rank.state is not RankState.ABSENT:
            rank.num_owed += 1
            rank.dead.append(rank.epoch)
        self.move(up.rank, "announce")
        rank.up, rank.held, rank.num_ops = up, held, -1
        rank.heard_s = rank.moved_s = now_s
        return True

    def ended(self, now_s: float, index: int) -> bool:
        """Note that a rank's process ended. Returns whether it was the present one, and alive."""
        rank = self._ranks[index]
        if rank.num_owed:
            rank.num_owed -= 1  # An earlier process; its successor has already announced itself.
            return False
        if rank.up is not None:
            rank.dead.append(rank.epoch)
        was_living = rank.is_living
        self.move(index, "end")
        rank.up, rank.held, rank.ended_s = None, None, now_s
        return was_living

    def move(self, index: int, move: str) -> None:
        """Change a rank's state. Raises InvariantError for a move that cannot happen."""
        rank = self._ranks[index]
        rank.state = next_rank_state(rank.state, move)

    # ---- signs of life ----
    def note_alive(self, now_s: float, index: int, epoch: str) -> bool:
        """Note a sign of life. Returns False if it is not from the present process."""
        rank = self._ranks[index] if 0 <= index < len(self._ranks) else None
        if rank is not None and rank.is_living and rank.epoch == epoch:
            rank.heard_s = now_s
            return True
        if rank is not None and epoch in rank.dead:
            self._end_again(now_s, index)
        elif rank is not None and rank.state is RankState.ABSENT:
            self.send(index, RankWho(epoch))
        return False

    def heartbeat(self, now_s: float, message: RankHeartbeat) -> bool:
        """Note a heartbeat and its progress. Returns False if it is not from the present process."""
        if not self.note_alive(now_s, message.rank, message.epoch):
            return False
        rank = self._ranks[message.rank]
        if message.num_ops != rank.num_ops:
            rank.progressed_s = now_s
        if message.num_ops != rank.num_ops or not message.is_computing:
            rank.num_ops, rank.moved_s = message.num_ops, now_s
        return True

    def sighted(self, now_s: float, message: Sighting) -> None:
        """Note what a rank's host observed of its process."""
        self._suspects.sighted(now_s, message)

    def forgive(self, gap_s: float) -> None:
        """Do not count `gap_s` seconds during which the leader did not run."""
        for rank in self._ranks:
            rank.forgive(gap_s)
        self._begun_s = None if self._begun_s is None else self._begun_s + gap_s

    def is_silent(self, now_s: float, index: int) -> bool:
        """Return whether a rank misses heartbeats although it could run."""
        silent_s = now_s - self._ranks[index].heard_s
        return self._suspects.is_frozen(self.name(index), silent_s, SILENT_S)

    def is_stuck(self, now_s: float, index: int) -> bool:
        """Return whether a rank's compute thread could run but did not move for `rank_timeout_s`."""
        stuck_s = now_s - self._ranks[index].moved_s
        return self._suspects.is_frozen(self.name(index), stuck_s, self._rank_timeout_s)

    # ---- ends ----
    def tick(self, now_s: float, stepping: Collection[int]) -> list[int]:
        """Give up ranks that could run but do nothing, and kill processes that should have ended.
        Returns the ranks given up. `stepping`: ranks with a step in flight; their compute threads
        must move.
        """
        given_up = self._give_up_frozen(now_s, stepping)
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        for index, rank in enumerate(self._ranks):
            if rank.state is RankState.DROPPED and now_s - rank.killed_s > KILL_AGAIN_S:
                self._kill(now_s, index, "still runs, though it was to be killed before")
            elif (
                rank.state is RankState.ABSENT
                and now_s - max(self._begun_s, rank.ended_s, rank.killed_s) > self._grace_s
            ):  # It froze before its first message here. The supervisor spares one that still starts.
                self._kill(now_s, index, f"has sent its leader no message for {self._grace_s:g} s")
        return given_up

    def _give_up_frozen(self, now_s: float, stepping: Collection[int]) -> list[int]:
        name_to_index, silent = {}, {}
        for index, rank in enumerate(self._ranks):
            if rank.is_living:
                name = self.name(index)
                name_to_index[name] = index
                silent[name] = rank.silent_s(now_s, must_move=index in stepping)
        given_up = []
        for name in self._suspects.judge(now_s, silent):
            index = name_to_index[name]
            given_up.append(index)
            is_silent = silent[name] <= now_s - self._ranks[index].heard_s
            what = "has sent no heartbeat" if is_silent else "has been stuck in one operation"
            self.give_up(now_s, index, f"{what} for {silent[name]:.1f} s{self._suspects.why(name)}")
        for name in self._suspects.to_ask(now_s):
            self._sends.append(Send(SUPERVISOR, Suspect(name)))
        return given_up

    def give_up(self, now_s: float, index: int, reason: str) -> None:
        """Drop a living rank and have its process killed."""
        rank = self._ranks[index]
        if not rank.is_living:
            return
        self._notes.append(f"rank {index} {reason}: the others go on without it")
        self.move(index, "drop")
        rank.dead.append(rank.epoch)
        self._kill(now_s, index, reason)

    def _kill(self, now_s: float, index: int, reason: str) -> None:
        self._ranks[index].killed_s = now_s
        self._sends.append(Send(SUPERVISOR, UnitDown(self.name(index), reason)))

    def _end_again(self, now_s: float, index: int) -> None:
        """Kill a process that sends long after its end; otherwise its rank would never return."""
        rank = self._ranks[index]
        is_long_ago = now_s - max(rank.ended_s, rank.killed_s) > max(
            KILL_AGAIN_S, self._rank_timeout_s
        )
        if rank.state is RankState.ABSENT and is_long_ago:
            self._kill(now_s, index, "was declared dead, but still sends messages")

    def check(self) -> list[str]:
        """Return problems; empty when every living process announced itself."""
        return [
            f"rank {index} is {rank.state} and never announced itself"
            for index, rank in enumerate(self._ranks)
            if rank.is_living and rank.up is None
        ]
