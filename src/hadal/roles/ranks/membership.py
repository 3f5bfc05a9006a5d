"""Membership of a unit: its formations, and the decision to give up a rank. The state tables are in
roles/ranks/states.

A formation is a set of processes that step together. It ends when one of them is lost. The
survivors form the next one at once and place the lost rank's experts on themselves. A replacement
joins in a later formation, when no step is in flight. A rank is given up if its process ended, if
it was silent or stuck for `rank_timeout_s` although it could run (policy/suspicion), or if it
cannot form. If others lost it, two missing heartbeats suffice. While its heartbeats arrive, their
reports do not suffice, because the link may be at fault: then all form again. The ranks of a host
that slows the others (roles/ranks/slow) are also given up, and restarted. They stay out until the
host has rested, unless the unit has no other ranks.

Ranks outlive their leader. A new leader receives heartbeats of ranks that it does not know, and
asks what they hold. The number of its first formation is above theirs, and it uses their placement
if that covers all ranks.

Independent of plans, blocks and requests, which belong to the inner leader: the prefill or decode
leader, which plans the unit's steps and knows no processes. roles/ranks/ranks connects the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hadal.core.errors import InvariantError
from hadal.core.messages.ranks import RankForm, RankFormed, RankHeartbeat, RankHeld, RankUp
from hadal.core.messages.units import Sighting, UnitDown
from hadal.core.placement import Placement, without
from hadal.core.plans import FormPlan, Held
from hadal.core.seams import Send
from hadal.policy.slow_hosts import SlowHost, may_rest
from hadal.roles.ranks.formation import Formation, name_peers
from hadal.roles.ranks.notes import Routine
from hadal.roles.ranks.processes import RankProcesses, RankView
from hadal.roles.ranks.slow import Rests
from hadal.roles.ranks.states import RankState, UnitLifecycle, UnitPhase
from hadal.roles.ranks.steps import PEER_ERRORS

NEWS_S = 1.0
"""Seconds to wait for the cause after a step or a formation failed because of a lost peer."""
TAKEOVER_GRACE_S = 1.0
"""Seconds for which an earlier leader's ranks wait for each other. A living rank sends a heartbeat,
and answers RankWho, well within this time.
"""
FAILED_FORMS_MAX = 3
"""Formations in a row that fail for lost peers, after which the most blamed rank is given up."""
FORM_TIMEOUT_S = 60.0
"""Seconds within which a member must answer that it formed."""
DRAIN_TIMEOUT_S = 5.0
"""Seconds that steps in flight get to finish while a rank waits to join."""
_NUM_NOTES = 256


class UnitMembership:
    """Membership of `unit`. `placement` covers all ranks; a formation that lacks some ranks uses it
    without them.

    `grace_s`: seconds for which the first ranks wait for the others before they form without them.
    Also seconds that a rank may have no known process before the supervisor is asked to kill it;
    the supervisor does so if that process has reported ready.
    """

    def __init__(
        self,
        unit: str,
        num_ranks: int,
        placement: Placement,
        *,
        rank_timeout_s: float = 1.5,
        grace_s: float = 30.0,
        slow_host_rest_s: float = 30.0,
    ) -> None:
        if placement.num_ranks != num_ranks:
            raise ValueError(
                f"the placement is for {placement.num_ranks} ranks, and the unit has {num_ranks}."
            )
        self.notes: deque[str] = deque(maxlen=_NUM_NOTES)
        """Sentences for the log, in order; the host removes them."""
        self.num_stale = 0
        self.placement = placement
        """Placement of the newest formation."""
        self._full = placement
        self._grace_s = grace_s
        self._processes = RankProcesses(
            unit, num_ranks, self.notes, rank_timeout_s=rank_timeout_s, grace_s=grace_s
        )
        self._rests = Rests(slow_host_rest_s)
        self._life = UnitLifecycle()
        self._formation = Formation(0, {})
        """The newest formation, before or after all members formed it."""
        self._num_failed_forms = 0
        self._first_up_s: float | None = None
        self._held_formation = 0
        """Highest formation number that an earlier leader gave to one of these ranks. This leader's
        numbers begin above it, because a rank drops any plan with a number up to its own.
        """

    # ---- queries ----
    @property
    def formation(self) -> int:
        """Number of the newest formation, even if members still form it; 0: none yet."""
        return self._formation.number

    @property
    def members(self) -> dict[int, str]:
        """Members of the newest formation: rank -> epoch."""
        return self._formation.members

    @property
    def phase(self) -> UnitPhase:
        return self._life.phase

    @property
    def is_running(self) -> bool:
        """True if ranks may finish steps of this formation."""
        return self._life.is_running

    def is_member(self, rank: int, epoch: str) -> bool:
        """Return whether this process lives and belongs to the newest formation."""
        return self._formation.members.get(rank) == epoch and self._processes[rank].is_living

    def up_of(self, rank: int) -> RankUp | None:
        """Return the RankUp of the rank's present process; None if there is none."""
        return self._processes[rank].up

    def pool_of(self, rank: int) -> str:
        up = self._processes[rank].up
        return up.pool if up is not None else ""

    def adopt(self, placement: Placement) -> None:
        """Use a placement, with which all ranks have done a step, for later formations, even for
        those without some ranks. Raises InvariantError unless the unit runs with all ranks.
        """
        if not self.is_running or len(self.members) != self.num_ranks:
            raise InvariantError(
                f"{self._processes.unit}: a placement is adopted by {sorted(self.members)},"
                f" {self.phase}."
            )
        self.placement = self._full = placement

    @property
    def living(self) -> list[int]:
        """Members of the newest formation with a living process, formed or not."""
        return [index for index, epoch in self.members.items() if self.is_member(index, epoch)]

    @property
    def num_ranks(self) -> int:
        return len(self._processes)

    def is_idle_since(self, sent_s: float, time_s: float) -> bool:
        """Return whether a step sent at `sent_s` is stuck: no member progressed since `time_s`."""
        return sent_s < time_s and all(
            self._processes[index].progressed_s < time_s for index in self.members
        )

    # ---- events ----
    def rank_up(self, now_s: float, message: RankUp, held: Held | None = None) -> None:
        """Handle a ready process of a rank. `held`: its pool's contents from an earlier leader."""
        if not self._processes.has(message.unit, message.rank):
            self.num_stale += 1
            return
        rank = self._processes[message.rank]
        was_member = rank.is_living and message.rank in self.members
        if not self._processes.announce(now_s, message, held):
            return
        self._first_up_s = now_s if self._first_up_s is None else self._first_up_s
        if was_member:
            self._lost(now_s, [message.rank], "another process has its name")
        elif self.phase is UnitPhase.RUNNING and self._may_join(now_s, rank):
            self._life.move(now_s, "drain")
        elif self.phase is UnitPhase.WAITING:
            self._form_if_ready(now_s)

    def rank_held(self, now_s: float, message: RankHeld) -> None:
        """Handle a rank of an earlier leader, with its identity and its pool's contents."""
        up, plan = message.up, message.plan
        is_new = self._processes.is_new(up)
        if is_new and plan.formation > self._held_formation:
            self._held_formation = plan.formation  # Before `rank_up`, which may form.
            self._take_placement(plan)
        self.rank_up(now_s, up, message.held if is_new else None)

    def _take_placement(self, plan: FormPlan) -> None:
        """Adopt the ranks' placement if it covers all of them, has as many expert slots as this
        leader's, and this leader has not formed yet.
        """
        full = self._full
        if (
            self.formation
            or len(plan.members) < self.num_ranks
            or plan.num_expert_slots != full.num_expert_slots
        ):
            return
        self.placement = self._full = Placement.from_bytes(
            plan.slot_to_expert,
            full.num_experts,
            plan.num_ranks,
            plan.num_expert_slots,
            plan.weights,
        )

    def take_held(self, rank: int) -> Held | None:
        """Return what a rank's pool held at the takeover; None on later calls."""
        return self._processes.take_held(rank)

    def take_sends(self) -> list[Send]:
        """Return the messages decided on since the last call.

        They are queued because one event may both decide on a formation and make the inner leader
        send messages. They are sent after those messages, and before the inner leader is informed
        of the new formation: RankForm has to reach a rank before the inner leader's requests in it.
        """
        return self._processes.take_sends()

    def unit_down(self, now_s: float, message: UnitDown) -> None:
        """Handle the supervisor's report that processes of one or several ranks ended."""
        ends = [self._rank_down(now_s, name) for name in (message.unit, *message.with_it)]
        members = [index for index in ends if index is not None]
        if members:
            self._lost(now_s, members, message.reason)

    def _rank_down(self, now_s: float, name: str) -> int | None:
        """Note that a rank's process ended. Return its rank if it was a living member."""
        index = self._processes.rank_named(name)
        if index is None:
            self.num_stale += 1
            return None
        return index if self._processes.ended(now_s, index) and index in self.members else None

    def heartbeat(self, now_s: float, message: RankHeartbeat) -> None:
        """Handle a rank's heartbeat, with its progress and its lost peers."""
        if not self._processes.heartbeat(now_s, message):
            self.num_stale += 1
        elif message.formation == self.formation and message.lost:
            self.broke(now_s, message.rank, message.lost)

    def formed(self, now_s: float, message: RankFormed) -> None:
        """Handle a member's answer to RankForm."""
        formed, index = message.formed, message.rank
        is_current = self._processes.note_alive(now_s, index, message.epoch)
        if (
            not is_current
            or self.phase is not UnitPhase.FORMING
            or formed.formation != self.formation
        ):
            self.num_stale += 1
            return
        rank = self._processes[index]
        rank.moved_s = now_s
        self._formation.answered(index, formed)
        if formed.error is None:
            if rank.state is RankState.FORMING:
                self._processes.move(index, "formed")
        elif formed.error.startswith(PEER_ERRORS):
            self._formation.failed(now_s, index, formed.lost)
        else:
            self._drop(now_s, index, f"could not join the others ({formed.error})")
            return
        self._see_answers(now_s)

    def broke(self, now_s: float, observer: int, lost: tuple[int, ...]) -> None:
        """Note that a member of the present formation lost peers or a step: no further step of the
        formation can succeed.
        """
        self._formation.lost(observer, lost)
        if self.phase in (UnitPhase.RUNNING, UnitPhase.DRAINING):
            self._life.move(now_s, "break")
            self.notes.append(
                f"rank {observer} lost {name_peers(lost)}: steps wait until the lost rank is known"
            )
        self._believe_observers(now_s)

    def sighted(self, now_s: float, message: Sighting) -> None:
        """Note what a rank's host observed of its process."""
        self._processes.sighted(now_s, message)

    def tick(self, now_s: float, is_stepping: bool) -> None:
        """Check every deadline. `is_stepping`: a step is in flight, so ranks must make progress."""
        stepping = set(self.living) if is_stepping and self.is_running else ()
        given_up = self._processes.tick(now_s, stepping)
        if any(index in self.members for index in given_up):
            self.form(now_s)
        match self.phase:
            case UnitPhase.WAITING:
                self._form_if_ready(now_s)
            case UnitPhase.FORMING:
                self._see_answers(now_s)
            case UnitPhase.BROKEN:
                self._believe_observers(now_s)
                if self.phase is UnitPhase.BROKEN and self._life.phase_s(now_s) >= NEWS_S:
                    self._form_again(now_s)
            case UnitPhase.DRAINING:
                if self._life.phase_s(now_s) >= DRAIN_TIMEOUT_S:
                    self.form(now_s)
            case UnitPhase.RUNNING:
                if any(self._may_join(now_s, rank) for rank in self._processes):
                    self._life.move(now_s, "drain")

    def forgive(self, gap_s: float) -> None:
        """Do not count the `gap_s` seconds as silence of ranks: the leader itself did not run."""
        self._processes.forgive(gap_s)
        self._life.forgive(gap_s)

    # ---- hosts that rest ----
    def hosts(self) -> dict[int, str]:
        """Return the host of each member."""
        ups = {index: self._processes[index].up for index in self.members}
        return {index: up.host for index, up in ups.items() if up is not None}

    def rest(self, now_s: float, slow: SlowHost) -> None:
        """Continue without a slow host's ranks until it has rested, if the unit can spare them."""
        resting, hosts = self._rests.resting(now_s), set(self.hosts().values())
        is_spared = may_rest(len(resting - hosts), len(hosts | resting))
        if not self._rests.is_on or self.phase is not UnitPhase.RUNNING or not is_spared:
            return
        rest_s = self._rests.begin(now_s, slow.host)
        reason = (
            f"is on {slow.host}, for which the others wait {slow.share:.0%} of the time; that host rests"
            f" for {rest_s:g} s"
        )
        for index, host in self.hosts().items():
            if host == slow.host:
                self._processes.give_up(now_s, index, reason)
        self.form(now_s)

    def _may_join(self, now_s: float, rank: RankView) -> bool:
        """Return whether a ready rank may join. While its host rests, it may only if the formation
        has members there.
        """
        if rank.state is not RankState.UP or rank.up is None:
            return False
        host = rank.up.host
        return host not in self._rests.resting(now_s) or host in self.hosts().values()

    # ---- forming ----
    def form(self, now_s: float) -> None:
        """Form anew with every living rank that may join, or with all living ranks if none may."""
        living = self._formable(now_s)
        self._formation = Formation(
            max(self.formation, self._held_formation) + 1,
            {index: self._processes[index].epoch for index in living},
        )
        if not living:
            self._first_up_s = None
            self._life.move(now_s, "empty")
            self.notes.append("no rank is left: requests wait until one has started again")
            return
        self._life.move(now_s, "form")
        absent = [index for index in range(self.num_ranks) if index not in self.members]
        self.placement = placement = self._full if not absent else without(self._full, absent)
        plan = FormPlan(
            self.formation,
            self.num_ranks,
            tuple(self._processes.member(index) for index in living),
            placement.to_bytes(),
            placement.num_expert_slots,
            placement.weights_bytes(),
        )
        for index in living:
            self._processes.move(index, "form")
            self._processes.send(index, RankForm(plan))

    def _formable(self, now_s: float) -> list[int]:
        living = self._processes.living
        ready = [
            index
            for index in living
            if self._processes[index].state is not RankState.UP
            or self._may_join(now_s, self._processes[index])
        ]
        return ready or living

    def _form_again(self, now_s: float) -> None:
        """Form without the ranks that others lost and that are silent or stuck."""
        processes = self._processes
        for index in self._formation.blamed:
            if processes.is_silent(now_s, index) or processes.is_stuck(now_s, index):
                processes.give_up(now_s, index, "was lost by others, and is silent or stuck")
        self.form(now_s)

    def _form_if_ready(self, now_s: float) -> None:
        """Form, in phase WAITING, when all ranks are up, or when some are and the grace is over."""
        num_living = len(self._processes.living)
        if num_living == 0 or self._first_up_s is None:
            self._first_up_s = None
            return
        grace_s = TAKEOVER_GRACE_S if self._held_formation else self._grace_s
        if num_living == self.num_ranks or now_s - self._first_up_s >= grace_s:
            self.form(now_s)

    def _see_answers(self, now_s: float) -> None:
        """End phase FORMING if all members formed; form again if one failed or timed out."""
        if self.phase is not UnitPhase.FORMING:
            return
        forming = self._formation
        missing = forming.missing
        if not missing and forming.failed_s is None:
            took_s, self._num_failed_forms = self._life.broken_s(now_s), 0
            self._life.move(now_s, "formed")
            self.notes.append(Routine(self._formed_text(took_s, forming.num_loaded)))
        elif forming.failed_s is not None and (not missing or now_s - forming.failed_s >= NEWS_S):
            self._num_failed_forms += 1
            if self._num_failed_forms >= FAILED_FORMS_MAX:
                self._num_failed_forms = 0
                worst = forming.most_lost()
                if worst is not None:
                    self._processes.give_up(now_s, worst, "cannot be reached by the others")
            self._form_again(now_s)
        elif self._life.phase_s(now_s) >= FORM_TIMEOUT_S:
            for index in missing:
                self._processes.give_up(
                    now_s, index, "did not answer the request to connect to the other ranks"
                )
            self.form(now_s)

    def _formed_text(self, took_s: float, num_loaded: int) -> str:
        text = (
            f"formation {self.formation} done in {took_s:.3f} s with ranks"
            f" {', '.join(map(str, self.members))}"
        )
        absent = [str(index) for index in range(self.num_ranks) if index not in self.members]
        if absent:
            text += f", without {', '.join(absent)}"
        if num_loaded:
            text += (
                f"; {num_loaded} copies of experts were read from the model's files, so that each"
                " expert has a rank"
            )
        return text

    # ---- lost ranks ----
    def _lost(self, now_s: float, members: Sequence[int], reason: str) -> None:
        """End this formation, because members are gone."""
        numbers = ", ".join(map(str, members))
        is_one = len(members) == 1
        who, them = (f"rank {numbers} is", "it") if is_one else (f"ranks {numbers} are", "them")
        self.notes.append(f"{who} gone ({reason}): the others go on without {them}")
        if self.phase is not UnitPhase.WAITING:
            self.form(now_s)

    def _drop(self, now_s: float, index: int, reason: str) -> None:
        """Give up a living rank, and continue without it."""
        was_member = index in self.members
        self._processes.give_up(now_s, index, reason)
        if was_member and self.phase is not UnitPhase.WAITING:
            self.form(now_s)

    def _believe_observers(self, now_s: float) -> None:
        """Give up a rank that is silent and that all other living members lost."""
        for index in self._formation.blamed:
            others = set(self.living) - {index}
            if (
                self._processes[index].is_living
                and others <= self._formation.observers(index)
                and self._processes.is_silent(now_s, index)
            ):
                self._drop(now_s, index, "was lost by all others, and is silent")
                return  # A new formation begins, without any reports of lost ranks yet.

    def check(self) -> list[str]:
        """Return problems; empty when states, members and phase agree."""
        problems = self._processes.check()
        for index, rank in enumerate(self._processes):
            belongs = rank.state in (RankState.FORMING, RankState.MEMBER)
            if belongs != (self.members.get(index) == rank.epoch and rank.is_living):
                problems.append(
                    f"rank {index} is {rank.state}, and the members are {sorted(self.members)}"
                )
        if self.is_running and any(
            self._processes[index].state is not RankState.MEMBER for index in self.members
        ):
            problems.append(
                f"formation {self.formation} is {self.phase} with a member that did not form"
            )
        if self.phase is UnitPhase.WAITING and any(
            rank.state is RankState.MEMBER for rank in self._processes
        ):
            problems.append("a rank is a member, and there is no formation")
        return problems
