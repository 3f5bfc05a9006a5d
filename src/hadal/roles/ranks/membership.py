"""Who belongs to a unit: its formations, and when a rank is given up. The states are the tables
of roles/ranks/states.

A formation is a set of processes that step together. It is over with the first of them; the
survivors form the next one at once, which holds the experts that went with it, and a replacement
joins by yet another, when no step is in flight. A rank is given up if its process ended, if it is
silent or stuck for `rank_timeout_s` though it could run (policy/suspicion), or if it cannot form.
What others say of a rank is not enough while its heartbeats go on, for it may be the link: then all
form again. The ranks of a host that slows the others (roles/ranks/slow) are given up too, and started
again. They stay out until the host has rested. A unit that has no other ranks takes them at once.

Ranks outlive their leader. A new leader asks ranks that it does not know, but hears heartbeats of,
what they hold. Its first formation has a number above theirs, and the placement that they have.

Knows no plans, blocks or requests: those are the inner leader's, the prefill or decode leader that
plans the unit's steps without knowing of processes. roles/ranks/ranks stands between the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hadal.core.config import RANK_HEARTBEAT_S
from hadal.core.errors import InvariantError
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.ranks import RankForm, RankFormed, RankHeartbeat, RankHeld, RankUp, RankWho
from hadal.core.messages.units import Sighting, Suspect, UnitDown
from hadal.core.placement import Placement, without
from hadal.core.plans import Formed, FormPlan, Held, Member
from hadal.core.seams import Send
from hadal.policy.slow_hosts import SlowHost, may_rest
from hadal.roles.ranks.lost_links import LostLinks, name_peers
from hadal.roles.ranks.notes import Routine
from hadal.roles.ranks.rests import Rests
from hadal.roles.ranks.states import RankState, RankView, UnitPhase, next_phase, next_rank_state
from hadal.roles.suspects import Suspects

SILENT_S = 2.4 * RANK_HEARTBEAT_S
"""Two heartbeats are missing: not enough to give a rank up, enough to believe those who blame
it.
"""
NEWS_S = 1.0
"""How long to wait for the reason, once a step or a formation failed for want of a peer."""
PEER_ERRORS = ("PeerLost", "Aborted")
"""What an error begins with that is no fault of the rank itself: comm/group, model/experts."""
KILL_AGAIN_S = 2.0
TAKEOVER_GRACE_S = 1.0
"""How long ranks that an earlier leader led wait for the others: those that live were asked a
heartbeat ago.
"""
FAILED_FORMS_MAX = 3
"""Formations in a row that may fail because ranks blame each other, before the most blamed one
goes.
"""
_NUM_NOTES = 256


class UnitMembership:
    """Membership of `unit`. `placement` is the full one; a formation without some ranks gets it
    without those.

    `grace_s`: how long the first ranks wait for the others before they form without them; and how
    long a rank may stay unheard of before the supervisor is asked to kill it, if it has one that
    says it is ready.
    """

    def __init__(
        self,
        unit: str,
        num_ranks: int,
        placement: Placement,
        *,
        rank_timeout_s: float = 1.5,
        grace_s: float = 30.0,
        form_timeout_s: float = 60.0,
        drain_timeout_s: float = 5.0,
        slow_host_rest_s: float = 30.0,
    ) -> None:
        if placement.num_ranks != num_ranks:
            raise ValueError(
                f"the placement is for {placement.num_ranks} ranks, and the unit has {num_ranks}."
            )
        self.formation = 0
        self.phase = UnitPhase.WAITING
        self.members: dict[int, str] = {}
        """rank -> epoch, of the newest formation, formed or not."""
        self.notes: deque[str] = deque(maxlen=_NUM_NOTES)
        """What a person should read in the log, in order; the host takes them out."""
        self.num_stale = 0
        self.placement = placement
        """Placement of the newest formation."""
        self._rests = Rests(slow_host_rest_s)
        self._unit = unit
        self._full = placement
        self._rank_timeout_s = rank_timeout_s
        self._grace_s = grace_s
        self._form_timeout_s = form_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._ranks = [RankView() for _ in range(num_ranks)]
        self._suspects = Suspects(rank_timeout_s)
        self._sends: list[Send] = []
        """What was decided to send since `take_sends`."""
        self._lost_links = LostLinks()
        self._answered: dict[int, Formed] = {}
        self._num_failed_forms = 0
        self._first_up_s: float | None = None
        self._begun_s: float | None = None
        """When deadlines were first looked at."""
        self._whole_until_s: float | None = None
        """When the last formation that ran was over; None while one runs."""
        self._phase_s = 0.0
        """When the phase began."""
        self._failed_s: float | None = None
        """The time when the first member failed to form this formation."""
        self._held_formation = 0
        """The highest that an earlier leader gave to a rank of this one. Ours begin above it, for a
        rank takes whatever is not above its own for stale.
        """

    # ---- what others ask ----
    def is_member(self, rank: int, epoch: str) -> bool:
        """Whether this process lives and belongs to the newest formation."""
        return (
            0 <= rank < len(self._ranks)
            and self._ranks[rank].is_living
            and self.members.get(rank) == epoch
        )

    def up_of(self, rank: int) -> RankUp | None:
        """What its present process said of itself."""
        return self._ranks[rank].up

    def pool_of(self, rank: int) -> str:
        up = self._ranks[rank].up
        return up.pool if up is not None else ""

    def adopt(self, placement: Placement) -> None:
        """All ranks did a step with it: from now on formations form with it, and with what is left
        of it.
        """
        if not self.is_running or len(self.members) != len(self._ranks):
            raise InvariantError(
                f"{self._unit}: a placement is adopted by {sorted(self.members)}, {self.phase}."
            )
        self.placement = self._full = placement

    @property
    def living(self) -> list[int]:
        """Members of the newest formation whose processes live, formed or not."""
        return [index for index, epoch in self.members.items() if self.is_member(index, epoch)]

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def is_idle_since(self, sent_s: float, time_s: float) -> bool:
        """Whether a step was sent, and no member's compute thread moved, since `time_s`: something
        went astray.
        """
        return sent_s < time_s and all(
            self._ranks[index].progressed_s < time_s for index in self.members
        )

    @property
    def is_running(self) -> bool:
        """Steps of this formation may be done."""
        return self.phase in (UnitPhase.RUNNING, UnitPhase.DRAINING, UnitPhase.BROKEN)

    # ---- what comes in ----
    def rank_up(self, now_s: float, message: RankUp) -> None:
        """A rank's process says that it is ready."""
        if message.unit != self._unit or not 0 <= message.rank < len(self._ranks):
            self.num_stale += 1
            return
        rank = self._ranks[message.rank]
        if rank.is_living and rank.epoch == message.epoch:
            rank.heard_s = now_s
            return
        if message.epoch in rank.dead:
            self._end_again(now_s, message.rank)
            return
        was_member = rank.is_living and message.rank in self.members
        if rank.state is not RankState.ABSENT:
            rank.num_owed += 1
            rank.dead.append(rank.epoch)
        self._move_rank(message.rank, "announce")
        rank.up, rank.held, rank.num_ops = message, None, -1
        rank.heard_s = rank.moved_s = now_s
        self._first_up_s = now_s if self._first_up_s is None else self._first_up_s
        if was_member:
            self._lost(now_s, [message.rank], "another process has its name")
        elif self.phase is UnitPhase.RUNNING and self._may_join(now_s, rank):
            self._move(now_s, "drain")
        elif self.phase is UnitPhase.WAITING:
            self._form_if_ready(now_s)

    def rank_held(self, now_s: float, message: RankHeld) -> None:
        """A rank that an earlier leader led says who it is, and what it holds."""
        up, plan = message.up, message.plan
        rank = (
            self._ranks[up.rank]
            if up.unit == self._unit and 0 <= up.rank < len(self._ranks)
            else None
        )
        is_new = rank is not None and rank.state is RankState.ABSENT and up.epoch not in rank.dead
        if is_new and plan.formation > self._held_formation:
            self._held_formation = plan.formation  # Before a formation forms with it.
            self._take_placement(plan)
        self.rank_up(now_s, up)
        if rank is not None and is_new:
            rank.held = message.held

    def _take_placement(self, plan: FormPlan) -> None:
        """Go on with the placement that the ranks have, if it is one of all of them and there is
        none of ours yet.
        """
        full = self._full
        if (
            self.formation
            or len(plan.members) < len(self._ranks)
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
        """What its pool held when it was taken over, once."""
        view = self._ranks[rank]
        held, view.held = view.held, None
        return held

    def take_sends(self) -> list[Send]:
        """Messages decided on since the last call.

        They are kept until the leader takes them, because one event may both decide on a formation
        and let the inner leader speak, which has to know of that decision. They go out behind what
        the inner leader said, and before it hears of the new formation: ranks have to be asked to
        form before they hear what the inner leader wants of them in it.
        """
        sends, self._sends = self._sends, []
        return sends

    def unit_down(self, now_s: float, message: UnitDown) -> None:
        """The supervisor says that a rank's process ended, or those of several at once."""
        ends = [self._rank_down(now_s, name) for name in (message.unit, *message.with_it)]
        members = [index for index in ends if index is not None]
        if members:
            self._lost(now_s, members, message.reason)

    def _rank_down(self, now_s: float, name: str) -> int | None:
        """One of them has ended. Returns its number if it was a member of this formation."""
        unit, _, number = name.rpartition(".")
        if unit != self._unit or not number.isdigit() or int(number) >= len(self._ranks):
            self.num_stale += 1
            return None
        index = int(number)
        rank = self._ranks[index]
        if rank.num_owed:
            rank.num_owed -= 1  # Its successor was heard before.
            return None
        if rank.up is not None:
            rank.dead.append(rank.epoch)
        was_member = rank.is_living and index in self.members
        self._move_rank(index, "end")
        rank.up, rank.held, rank.ended_s = None, None, now_s
        return index if was_member else None

    def heartbeat(self, now_s: float, message: RankHeartbeat) -> None:
        """A rank lives, and reports how far it is."""
        if not self._is_heard(now_s, message.rank, message.epoch):
            return
        rank = self._ranks[message.rank]
        if message.num_ops != rank.num_ops:
            rank.progressed_s = now_s
        if message.num_ops != rank.num_ops or not message.is_computing:
            rank.num_ops, rank.moved_s = message.num_ops, now_s
        if message.formation == self.formation and message.lost:
            self.broke(now_s, message.rank, message.lost)

    def formed(self, now_s: float, message: RankFormed) -> None:
        """A member's answer to RankForm."""
        formed = message.formed
        if not self._is_heard(now_s, message.rank, message.epoch):
            return
        if self.phase is not UnitPhase.FORMING or formed.formation != self.formation:
            self.num_stale += 1
            return
        rank = self._ranks[message.rank]
        rank.moved_s = now_s
        self._answered[message.rank] = formed
        if formed.error is None:
            if rank.state is RankState.FORMING:
                self._move_rank(message.rank, "formed")
        elif formed.error.startswith(PEER_ERRORS):
            self._lost_links.add(message.rank, formed.lost, self.members)
            self._failed_s = now_s if self._failed_s is None else self._failed_s
        else:
            self._drop(now_s, message.rank, f"could not join the others ({formed.error})")
            return
        self._see_answers(now_s)

    def broke(self, now_s: float, observer: int, lost: tuple[int, ...]) -> None:
        """A member of the present formation lost peers, or a step of it: no step will succeed any
        more.
        """
        self._lost_links.add(observer, lost, self.members)
        if self.phase in (UnitPhase.RUNNING, UnitPhase.DRAINING):
            self._move(now_s, "break")
            self.notes.append(
                f"rank {observer} lost {name_peers(lost)}: steps wait until it is known who is gone"
            )
        self._believe_observers(now_s)

    def sighted(self, now_s: float, message: Sighting) -> None:
        """What a rank's host sees of it."""
        self._suspects.sighted(now_s, message)

    def tick(self, now_s: float, is_stepping: bool) -> None:
        """Look at every deadline. `is_stepping`: a step is in flight, so a thread that computes has
        to move.
        """
        is_over = self._give_up_frozen(now_s, is_stepping)
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        for index, rank in enumerate(self._ranks):
            if rank.state is RankState.DROPPED and now_s - rank.killed_s > KILL_AGAIN_S:
                self._kill(now_s, index, "was to be ended before, and still runs")
            elif (
                rank.state is RankState.ABSENT
                and now_s - max(self._begun_s, rank.ended_s, rank.killed_s) > self._grace_s
            ):  # One that froze before it was heard here. One that still starts is let be.
                self._kill(
                    now_s, index, f"has not been heard by its leader for {self._grace_s:g} s"
                )
        if is_over:
            self.form(now_s)
        match self.phase:
            case UnitPhase.WAITING:
                self._form_if_ready(now_s)
            case UnitPhase.FORMING:
                self._see_answers(now_s)
            case UnitPhase.BROKEN:
                self._believe_observers(now_s)
                if self.phase is UnitPhase.BROKEN and now_s - self._phase_s >= NEWS_S:
                    self._form_again(now_s)
            case UnitPhase.DRAINING:
                if now_s - self._phase_s >= self._drain_timeout_s:
                    self.form(now_s)
            case UnitPhase.RUNNING:
                if any(self._may_join(now_s, rank) for rank in self._ranks):
                    self._move(now_s, "drain")

    def _give_up_frozen(self, now_s: float, is_stepping: bool) -> bool:
        """Give up those that do nothing though they could; whether one of them was a member."""
        name_to_index, silent = {}, {}
        for index, rank in enumerate(self._ranks):
            if rank.is_living:
                must_move = is_stepping and self.is_running and self.is_member(index, rank.epoch)
                name_to_index[self._name(index)] = index
                silent[self._name(index)] = rank.silent_s(now_s, must_move=must_move)
        is_over = False
        for name in self._suspects.judge(now_s, silent):
            index = name_to_index[name]
            is_over = is_over or index in self.members
            is_silent = silent[name] <= now_s - self._ranks[index].heard_s
            what = "has sent no heartbeat" if is_silent else "has been stuck in one operation"
            self._give_up(
                now_s, index, f"{what} for {silent[name]:.1f} s{self._suspects.why(name)}"
            )
        for name in self._suspects.to_ask(now_s):
            self._sends.append(Send(SUPERVISOR, Suspect(name)))
        return is_over

    def forgive(self, gap_s: float) -> None:
        """The leader itself stood still for so long: what it did not hear is nobody's silence."""
        for rank in self._ranks:
            rank.forgive(gap_s)
        self._phase_s += gap_s
        self._begun_s = None if self._begun_s is None else self._begun_s + gap_s

    # ---- hosts that rest ----
    def hosts(self) -> dict[int, str]:
        """Return the host of each member."""
        ups = {index: self._ranks[index].up for index in self.members}
        return {index: up.host for index, up in ups.items() if up is not None}

    def rest(self, now_s: float, slow: SlowHost) -> None:
        """Go on without the ranks of a slow host until it has rested, if the unit can spare it."""
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
                self._give_up(now_s, index, reason)
        self.form(now_s)

    def _may_join(self, now_s: float, rank: RankView) -> bool:
        """Return whether to take in a rank that is ready. While its host rests, only a unit that has
        members there does.
        """
        if rank.state is not RankState.UP or rank.up is None:
            return False
        host = rank.up.host
        return host not in self._rests.resting(now_s) or host in self.hosts().values()

    # ---- forming ----
    def form(self, now_s: float) -> None:
        """Start the next formation with every rank that lives and may join; with all that live if none
        may.
        """
        living = self._formable(now_s)
        if self._whole_until_s is None:
            self._whole_until_s = now_s
        self.members = {index: self._ranks[index].epoch for index in living}
        self._lost_links.clear()
        self._answered, self._failed_s = {}, None
        self.formation = max(self.formation, self._held_formation) + 1
        if not living:
            self._first_up_s = None
            self._move(now_s, "empty")
            self.notes.append("no rank is left: requests wait until one has started again")
            return
        self._move(now_s, "form")
        absent = [index for index in range(len(self._ranks)) if index not in self.members]
        self.placement = placement = self._full if not absent else without(self._full, absent)
        plan = FormPlan(
            self.formation,
            len(self._ranks),
            tuple(self._member(index) for index in living),
            placement.to_bytes(),
            placement.num_expert_slots,
            placement.weights_bytes(),
        )
        for index in living:
            self._move_rank(index, "form")
            self._sends.append(Send(self._name(index), RankForm(plan)))

    def _formable(self, now_s: float) -> list[int]:
        living = [index for index, rank in enumerate(self._ranks) if rank.is_living]
        ready = [
            index
            for index in living
            if self._ranks[index].state is not RankState.UP
            or self._may_join(now_s, self._ranks[index])
        ]
        return ready or living

    def _form_again(self, now_s: float) -> None:
        """Form without those that others lost and that are silent or stuck."""
        for index in self._lost_links:
            rank = self._ranks[index]
            is_silent = self._suspects.is_frozen(self._name(index), now_s - rank.heard_s, SILENT_S)
            if is_silent or self._suspects.is_frozen(
                self._name(index), now_s - rank.moved_s, self._rank_timeout_s
            ):
                self._give_up(now_s, index, "was lost by others, and is silent or stuck")
        self.form(now_s)

    def _form_if_ready(self, now_s: float) -> None:
        """Form, in phase WAITING, when everybody is there, or some are and the grace is over."""
        num_living = sum(rank.is_living for rank in self._ranks)
        if num_living == 0 or self._first_up_s is None:
            self._first_up_s = None
            return
        grace_s = TAKEOVER_GRACE_S if self._held_formation else self._grace_s
        if num_living == len(self._ranks) or now_s - self._first_up_s >= grace_s:
            self.form(now_s)

    def _see_answers(self, now_s: float) -> None:
        """Go on, in phase FORMING, when everybody answered well, form again when somebody could
        not.
        """
        if self.phase is not UnitPhase.FORMING:
            return
        missing = self.members.keys() - self._answered.keys()
        if not missing and self._failed_s is None:
            self._move(now_s, "formed")
            took_s = now_s - (self._whole_until_s if self._whole_until_s is not None else now_s)
            self._num_failed_forms, self._whole_until_s = 0, None
            num_loaded = sum(formed.num_loaded for formed in self._answered.values())
            self.notes.append(Routine(self._formed_text(took_s, num_loaded)))
        elif self._failed_s is not None and (not missing or now_s - self._failed_s >= NEWS_S):
            self._num_failed_forms += 1
            if self._num_failed_forms >= FAILED_FORMS_MAX:
                self._num_failed_forms = 0
                worst = self._lost_links.most_lost()
                if worst is not None:
                    self._give_up(now_s, worst, "is not reached by the others")
            self._form_again(now_s)
        elif now_s - self._phase_s >= self._form_timeout_s:
            for index in missing:
                self._give_up(
                    now_s, index, "does not answer when the ranks are to connect to each other"
                )
            self.form(now_s)

    def _formed_text(self, took_s: float, num_loaded: int) -> str:
        text = (
            f"formation {self.formation} done in {took_s:.3f} s with ranks"
            f" {', '.join(map(str, self.members))}"
        )
        absent = [str(index) for index in range(len(self._ranks)) if index not in self.members]
        if absent:
            text += f", without {', '.join(absent)}"
        if num_loaded:
            text += (
                f"; {num_loaded} copies of experts were read from the model's files, so that each"
                " expert has a rank"
            )
        return text

    # ---- losing ----
    def _lost(self, now_s: float, members: Sequence[int], reason: str) -> None:
        """Members are gone: this formation is over."""
        numbers = ", ".join(map(str, members))
        is_one = len(members) == 1
        who, them = (f"rank {numbers} is", "it") if is_one else (f"ranks {numbers} are", "them")
        self.notes.append(f"{who} gone ({reason}): the others go on without {them}")
        if self.phase is not UnitPhase.WAITING:
            self.form(now_s)

    def _drop(self, now_s: float, index: int, reason: str) -> None:
        """Give a living rank up, and go on without it."""
        was_member = index in self.members
        self._give_up(now_s, index, reason)
        if was_member and self.phase is not UnitPhase.WAITING:
            self.form(now_s)

    def _give_up(self, now_s: float, index: int, reason: str) -> None:
        rank = self._ranks[index]
        if not rank.is_living:
            return
        self.notes.append(f"rank {index} {reason}: the others go on without it")
        # Given up is not ended: only the supervisor, whose child it is, can say that a process is gone.
        # Until it does the rank stays DROPPED and is killed again, for one that froze may wake, and
        # what it then says is void.
        self._move_rank(index, "drop")
        rank.dead.append(rank.epoch)
        self._kill(now_s, index, reason)

    def _kill(self, now_s: float, index: int, reason: str) -> None:
        self._ranks[index].killed_s = now_s
        self._sends.append(Send(SUPERVISOR, UnitDown(self._name(index), reason)))

    def _believe_observers(self, now_s: float) -> None:
        """Give up, in phase BROKEN, a rank that all others lost and that says nothing itself."""
        for index in self._lost_links:
            rank, observers = self._ranks[index], self._lost_links.observers(index)
            others = {
                other for other, epoch in self.members.items() if self.is_member(other, epoch)
            } - {index}
            is_silent = self._suspects.is_frozen(self._name(index), now_s - rank.heard_s, SILENT_S)
            if rank.is_living and others <= observers and is_silent:
                self._drop(now_s, index, "was lost by all others, and is silent")
                return  # A new formation begins: nobody is blamed any more.

    def _is_heard(self, now_s: float, index: int, epoch: str) -> bool:
        """Note a sign of life; False if it is not of the present process."""
        rank = self._ranks[index] if 0 <= index < len(self._ranks) else None
        if rank is not None and rank.is_living and rank.epoch == epoch:
            rank.heard_s = now_s
            return True
        self.num_stale += 1
        if rank is not None and epoch in rank.dead:
            self._end_again(now_s, index)
        elif rank is not None and rank.state is RankState.ABSENT:
            self._sends.append(Send(self._name(index), RankWho(epoch)))
        return False

    def _end_again(self, now_s: float, index: int) -> None:
        """Somebody speaks who is held for dead, long after: make it so, or it never comes back."""
        rank = self._ranks[index]
        is_long_ago = now_s - max(rank.ended_s, rank.killed_s) > max(
            KILL_AGAIN_S, self._rank_timeout_s
        )
        if rank.state is RankState.ABSENT and is_long_ago:
            self._kill(now_s, index, "was taken for dead, and still speaks")

    # ---- the tables ----
    def _move(self, now_s: float, move: str) -> None:
        following = next_phase(self.phase, move)
        if following is not self.phase or move == "form":
            self._phase_s = now_s
        if self.is_running and move in ("break", "form"):
            self._whole_until_s = now_s if self._whole_until_s is None else self._whole_until_s
        self.phase = following

    def _move_rank(self, index: int, move: str) -> None:
        rank = self._ranks[index]
        rank.state = next_rank_state(rank.state, move)

    def _member(self, index: int) -> Member:
        up = self._ranks[index].up
        assert up is not None
        return Member(index, up.epoch, up.host, up.port)

    def _name(self, index: int) -> str:
        return f"{self._unit}.{index}"

    def check(self) -> list[str]:
        """Problems; empty when states, members and phase agree."""
        problems = []
        for index, rank in enumerate(self._ranks):
            if rank.is_living and rank.up is None:
                problems.append(f"rank {index} is {rank.state} and never announced itself")
            belongs = rank.state in (RankState.FORMING, RankState.MEMBER)
            if belongs != (self.members.get(index) == rank.epoch and rank.is_living):
                problems.append(
                    f"rank {index} is {rank.state}, and the members are {sorted(self.members)}"
                )
        if self.is_running and any(
            self._ranks[index].state is not RankState.MEMBER for index in self.members
        ):
            problems.append(
                f"formation {self.formation} is {self.phase} with a member that did not form"
            )
        if self.phase is UnitPhase.WAITING and any(
            rank.state is RankState.MEMBER for rank in self._ranks
        ):
            problems.append("a member of nothing")
        return problems
