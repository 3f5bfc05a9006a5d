"""The units as the front knows them: who is up, what was sent to each, what their caches hold, and
which of them a request may go to. Snapshots for the policies are made here.

Counts are the front's own, raised when it sends and lowered when it takes back, so they are never
late; the units' reports are kept for the metrics and as heartbeats.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import msgspec

from hadal.core.cache import NAME_BYTES, num_names
from hadal.core.config import DECODE, PREFILL, ROLES, LimitsConfig
from hadal.core.messages import (
    BLOCK_TOKENS,
    Cached,
    Filled,
    Generation,
    UnitReport,
    UnitUp,
)
from hadal.core.request import State
from hadal.kv.blocks import blocks_for
from hadal.overlap.split import num_pairs_of
from hadal.policy.admission import may_prefill, num_placed_max, slots_beside
from hadal.policy.routing import choose_decode_unit, choose_prefill_unit, usable_blocks
from hadal.policy.views import DecodeUnitView, DownstreamView, PrefillUnitView, ValleyView
from hadal.roles.front.requests import FrontRequests, Record
from hadal.roles.suspects import Absence, Suspects

# What the front knows of the units' caches: which blocks each can take out of its memory, by name.
#
# A summary, kept by the units' Cached messages. It decides where a prompt goes and nothing else:
# what a unit has really got is found out there, so a message that is lost, doubled or late costs
# time and never a token. Blocks on disk are not in it: every unit of a deployment reads the same
# folder, so the disk never makes one unit better than another.
#
# Half of a name is kept, 8 of its 16 bytes: two blocks taken for the same would be a wrong guess
# once in 10^8 years.


_STRIDE = NAME_BYTES // 8


@dataclass(slots=True)
class _Held:
    """One unit that is up."""

    epoch: str
    num_blocks: int
    """Blocks of its pools when there were most: it cannot have more names than that."""
    keys: dict[int, None] = field(default_factory=dict)
    """Names in the order in which they were reported, so that what was reported first is forgotten
    first.
    """


class FrontCache:
    """Units by name; one that is down is not in it. About 100 bytes a block of the units' pools."""

    def __init__(self) -> None:
        self._units: dict[str, _Held] = {}

    def up(self, unit: str, epoch: str, num_blocks: int) -> None:
        """A unit starts, or starts again: what it has, it will report."""
        self._units[unit] = _Held(epoch, num_blocks)

    def down(self, unit: str) -> None:
        """Forget a unit, whose memory is gone."""
        self._units.pop(unit, None)

    def heard(self, message: Cached, num_blocks: int) -> None:
        """Take in a change. What an earlier life of the unit said is dropped; `num_blocks` is the
        unit's by now.
        """
        held = self._units.get(message.unit)
        if held is None or held.epoch != message.epoch:
            return
        held.num_blocks = max(held.num_blocks, num_blocks)
        if message.is_whole:
            held.keys.clear()
        for key in _keys(message.dropped):
            held.keys.pop(key, None)
        held.keys.update(dict.fromkeys(_keys(message.added)))
        # More than its pools can hold: a message that dropped some was lost.
        for key in list(islice(held.keys, max(0, len(held.keys) - held.num_blocks))):
            del held.keys[key]

    def num_names(self, unit: str) -> int:
        """How many blocks the unit is known to have."""
        held = self._units.get(unit)
        return len(held.keys) if held is not None else 0

    def prefixes(self, chain: bytes, units: Iterable[str]) -> dict[str, int]:
        """Unit -> tokens of the longest prefix of the chain's text that it has; units that have
        none are left out.
        """
        keys = _keys(chain)
        if not keys:
            return {}
        unit_to_tokens = {}
        for unit in units:
            held = self._units.get(unit)
            num_blocks = _num_first(keys, held.keys) if held is not None else 0
            if num_blocks:
                unit_to_tokens[unit] = num_blocks * BLOCK_TOKENS
        return unit_to_tokens

    def check(self, unit_to_epoch: Mapping[str, str]) -> list[str]:
        """Problems of the summary; empty when it speaks of the units that are up, and within their
        pools.
        """
        problems = []
        if {unit: held.epoch for unit, held in self._units.items()} != dict(unit_to_epoch):
            problems.append(
                f"the cache's summary is of {sorted(self._units)}, up are {sorted(unit_to_epoch)}"
            )
        for unit, held in self._units.items():
            if len(held.keys) > held.num_blocks:
                problems.append(
                    f"{unit} is said to have {len(held.keys)} named blocks of {held.num_blocks}"
                )
        return problems


def _keys(names: bytes) -> array[int]:
    return array("Q", names)[::_STRIDE]


def _num_first(keys: array[int], known: Mapping[int, None]) -> int:
    """How many of the first keys are known, up to the first that is not."""
    for index, key in enumerate(keys):
        if key not in known:
            return index
    return len(keys)


_NOTHING: Mapping[str, int] = {}
_SMOOTHING = 0.1
"""Weight of a step's tokens per request: that of its time, which they stand beside (roles/unit)."""
ORPHAN_S = 10.0
"""How long a unit's requests wait for a leader that takes its ranks over."""
LAST_WORDS_S = 1.0
"""How long a leader's reports may still come once it has ended."""


@dataclass(slots=True)
class Unit:
    """One unit that is up."""

    name: str
    role: str
    epoch: str
    num_blocks: int
    """Blocks of its living ranks, as `num_requests_max` is of theirs: both follow its reports as
    ranks come and go.
    """
    num_blocks_request: int
    """What one request can hold there at most; 0 while no rank of it lives."""
    num_requests_max: int
    seen_s: float
    fingerprint: str = ""
    """Of its KV (UnitUp): what is prefilled under it is decoded under it."""
    num_requests: int = 0
    num_tokens: int = 0
    """Prefill: tokens sent there whose prompts are not yet prefilled, those out of its cache
    aside.
    """
    num_pairs: int = 0
    """Prefill: (token, position it attends to) pairs of those."""
    num_blocks_used: int = 0
    """Decode: blocks of the requests sent there."""
    tokens_step: float = 1.0
    """Decode: tokens that a step draws for a request, smoothed; more than 1 where it has several passes
    or drafts are right.
    """
    load: UnitReport | None = None
    prefill_view: PrefillUnitView | None = None
    decode_view: DecodeUnitView | None = None
    """The view that the policies saw last, unless something changed since."""
    drain_number: int = 0
    drain_by_s: float | None = None
    """Until when what it holds may stay, while nothing new is sent there (roles/front/front); None:
    it does not drain.
    """
    orphan_s: float | None = None
    """Since when what its ranks hold is kept for a new leader; None: they have one."""

    @property
    def num_ranks(self) -> int:
        """Ranks that live and are led. One that has not reported said that it is up, which it is
        with one at least.
        """
        if self.orphan_s is not None:
            return 0
        return self.load.num_ranks if self.load is not None else 1

    @property
    def is_open(self) -> bool:
        """New requests may be sent there."""
        return self.drain_by_s is None and self.orphan_s is None

    def changed(self) -> None:
        """The unit is not as the policies saw it any more."""
        self.prefill_view = self.decode_view = None


def prefill_work(record: Record) -> tuple[int, int]:
    """Tokens and pairs that its prefill unit computes for a request: what is cached there is
    context only.
    """
    num_tokens = record.num_tokens - record.num_cached
    return num_tokens, num_pairs_of(record.num_cached, num_tokens)


def _decode_view(unit: Unit) -> DecodeUnitView:
    return DecodeUnitView(
        unit.name,
        unit.num_blocks,
        unit.num_blocks_used,
        unit.num_requests,
        unit.num_requests_max,
        unit.num_blocks_request,
    )


def _slots_beside(unit: Unit, num_others: int) -> int:
    load, num_slots = unit.load, unit.num_requests_max
    if load is None:
        return num_slots
    return slots_beside((load.step_s, load.token_s), load.num_ranks, num_others, num_slots)


def _prefill_view(unit: Unit) -> PrefillUnitView:
    """The unit as a request sees it of which it has nothing."""
    load = unit.load
    return PrefillUnitView(
        unit.name,
        unit.num_blocks_request,
        unit.num_tokens,
        unit.num_requests,
        unit.num_requests_max,
        unit.num_pairs,
        unit.num_ranks,
        load.token_s if load else 0.0,
        load.pair_s if load else 0.0,
    )


class FrontUnits:
    """Units by name; one that is down is not in it."""

    def __init__(self, unit_timeout_s: float, heartbeat_s: float, fingerprint: str = "") -> None:
        """A unit that gives no sign for `unit_timeout_s` though it could run is frozen. `heartbeat_s`:
        from one call of the front to the next, at most. `fingerprint`: of units that say none.
        """
        self.by_name: dict[str, Unit] = {}
        self.suspects = Suspects(unit_timeout_s)
        self._absence = Absence(heartbeat_s)
        self.cache = FrontCache()
        self._role_to_units: dict[str, list[Unit]] = {role: [] for role in ROLES}
        self._fingerprint = fingerprint
        self._fingerprint_to_num: dict[str, int] = {}
        """How many units of each are up, in the order in which the first of them came."""

    def of_role(self, role: str) -> list[Unit]:
        """The role's units, in the order in which they came up."""
        return self._role_to_units[role]

    def add(self, message: UnitUp, now_s: float) -> None:
        self.remove(message.unit)
        unit = self.by_name[message.unit] = Unit(
            message.unit,
            message.role,
            message.epoch,
            message.num_blocks,
            message.num_blocks_request or message.num_blocks,
            message.num_requests_max,
            now_s,
            self.fingerprint_of(message),
        )
        self._role_to_units[unit.role].append(unit)
        self._fingerprint_to_num[unit.fingerprint] = (
            self._fingerprint_to_num.get(unit.fingerprint, 0) + 1
        )
        self.cache.up(message.unit, message.epoch, message.num_blocks)

    def remove(self, name: str) -> None:
        """A unit is down, and what it had with it."""
        unit = self.by_name.pop(name, None)
        if unit is not None:
            self._role_to_units[unit.role].remove(unit)
            self._fingerprint_to_num[unit.fingerprint] -= 1
            if not self._fingerprint_to_num[unit.fingerprint]:
                del self._fingerprint_to_num[unit.fingerprint]
        self.cache.down(name)

    def fingerprint_of(self, message: UnitUp) -> str:
        """That of a unit's KV."""
        return message.fingerprint or self._fingerprint

    def serving(self) -> list[str]:
        """Fingerprints that a prompt may be bound to, the best first; empty: it has to wait.

        With one there is no choice. With two, new weights are taking the place of old ones, and a
        prompt goes where a unit of each role takes requests: to the weights that came last, as long
        as they have room. What is prefilled under others would lead nowhere.
        """
        if len(self._fingerprint_to_num) < 2:
            return [*self._fingerprint_to_num]
        prefill, decode = (
            {unit.fingerprint for unit in self.of_role(role) if unit.is_open}
            for role in (PREFILL, DECODE)
        )
        return [one for one in reversed(self._fingerprint_to_num) if one in prefill & decode]

    def orphaned(self, unit: Unit, now_s: float) -> None:
        """A unit's leader is gone. Said again, it changes nothing."""
        unit.changed()
        unit.orphan_s = now_s if unit.orphan_s is None else unit.orphan_s

    def succeeded(self, unit: Unit, message: UnitUp, now_s: float) -> None:
        """A unit has a new leader, and what was sent there still counts."""
        unit.changed()
        unit.epoch, unit.orphan_s, unit.seen_s, unit.load = message.epoch, None, now_s, None
        unit.num_blocks, unit.num_requests_max = message.num_blocks, message.num_requests_max
        unit.num_blocks_request = message.num_blocks_request or message.num_blocks
        self.cache.up(message.unit, message.epoch, message.num_blocks)

    def late_orphans(self, now_s: float) -> list[str]:
        """Units that nobody took over in time."""
        units = self.by_name.values()
        return [
            unit.name
            for unit in units
            if unit.orphan_s is not None and unit.orphan_s + ORPHAN_S <= now_s
        ]

    def heard(self, unit: Unit, load: UnitReport, now_s: float) -> None:
        """A heartbeat: what the unit can hold changes when a rank is lost or comes back."""
        unit.seen_s = now_s
        unit.changed()
        if unit.orphan_s is not None and unit.orphan_s + LAST_WORDS_S < now_s:
            unit.orphan_s = None  # The one that ended led before: its successor was heard first.
        unit.load = load
        unit.num_blocks, unit.num_requests_max = load.num_blocks, load.num_requests_max
        unit.num_blocks_request = load.num_blocks_request or load.num_blocks

    def cached(self, message: Cached) -> None:
        """What it can take out of its memory changed."""
        if message.unit in self.by_name:
            self.cache.heard(message, self.by_name[message.unit].num_blocks)

    def taker_of(self, message: Filled) -> str | None:
        """Return the prefill unit that has most of the text before these blocks. None if none has all
        of it, or one has the blocks, too.
        """
        filler = self.by_name.get(message.unit)
        names = [
            unit.name
            for unit in self.of_role(PREFILL)
            if filler is not None and unit.is_open and unit.fingerprint == filler.fingerprint
        ]
        found = self.cache.prefixes(message.chain, names)
        taker = max(names, key=lambda name: found.get(name, 0), default="")
        num_all = num_names(message.chain)
        num_found = found.get(taker, 0) // BLOCK_TOKENS
        is_behind = num_all - len(message.lease.block_ids) <= num_found < num_all
        return taker if taker and is_behind else None

    def loads(self) -> dict[str, UnitReport]:
        """Unit -> its last report, for those that have reported."""
        return {unit.name: unit.load for unit in self.by_name.values() if unit.load is not None}

    def called(self, now_s: float) -> None:
        """The front was called at this time; comes before anything else."""
        if missed_s := self._absence.called(now_s):
            for unit in self.by_name.values():
                unit.seen_s += missed_s

    def frozen(self, now_s: float) -> list[tuple[str, str]]:
        """Units that sent no heartbeat for too long and could have, and what to say of each."""
        silent = {
            unit.name: now_s - unit.seen_s
            for unit in self.by_name.values()
            if unit.orphan_s is None
        }
        return [
            (name, f"has sent no heartbeat for {silent[name]:.1f} s{self.suspects.why(name)}")
            for name in self.suspects.judge(now_s, silent)
        ]

    def capacity_tokens(self) -> int | None:
        """Tokens of KV of one request that both roles have a unit for; None if no rank of a role is
        up.
        """
        num_blocks = min(
            max(
                [unit.num_blocks_request for unit in self.of_role(role) if unit.drain_by_s is None],
                default=0,
            )
            for role in ROLES
        )
        return num_blocks * BLOCK_TOKENS or None

    # ---- what was sent to them ----
    def sent_to_prefill(self, name: str, record: Record) -> None:
        unit, (num_tokens, num_pairs) = self.by_name[name], prefill_work(record)
        unit.changed()
        unit.num_requests += 1
        unit.num_tokens += num_tokens
        unit.num_pairs += num_pairs

    def left_prefill(self, name: str, record: Record) -> None:
        unit = self.by_name.get(name)
        if unit is not None:
            num_tokens, num_pairs = prefill_work(record)
            unit.changed()
            unit.num_requests -= 1
            unit.num_tokens -= num_tokens
            unit.num_pairs -= num_pairs

    def sent_to_decode(self, name: str, num_blocks: int) -> None:
        unit = self.by_name[name]
        unit.changed()
        unit.num_requests += 1
        unit.num_blocks_used += num_blocks

    def grew(self, name: str, num_blocks: int) -> None:
        """Requests of a decode unit have more blocks."""
        unit = self.by_name.get(name)
        if unit is not None and num_blocks:
            unit.changed()
            unit.num_blocks_used += num_blocks

    def drew(self, name: str, num_tokens: int, num_requests: int) -> None:
        """A step of a decode unit drew so many tokens for so many requests."""
        unit = self.by_name.get(name)
        if unit is not None and num_requests:
            unit.tokens_step += _SMOOTHING * (num_tokens / num_requests - unit.tokens_step)

    def left_decode(self, name: str, num_blocks: int) -> None:
        unit = self.by_name.get(name)
        if unit is not None:
            unit.changed()
            unit.num_requests -= 1
            unit.num_blocks_used -= num_blocks

    # ---- what the policies see ----
    def decode_step_s(self) -> float:
        """How long a step of the slowest decode unit takes; 0 while none has measured any."""
        loads = [unit.load for unit in self.of_role(DECODE) if unit.load is not None]
        return max([load.step_ms + load.overhead_ms for load in loads], default=0.0) * 1e-3

    def open_prefill_units(self) -> list[str]:
        """Those that take one more request."""
        return [
            u.name
            for u in self.of_role(PREFILL)
            if u.is_open and u.num_requests < u.num_requests_max
        ]

    def prefill_views(
        self, fingerprint: str, unit_to_cached: Mapping[str, int] = _NOTHING
    ) -> list[PrefillUnitView]:
        """The prefill units as a request of a fingerprint sees them of which they have so many
        positions already.
        """
        views = []
        for unit in self.of_role(PREFILL):
            if unit.drain_by_s is not None or unit.fingerprint != fingerprint:
                continue
            if unit.prefill_view is None:
                unit.prefill_view = _prefill_view(unit)
            views.append(unit.prefill_view)
        if not unit_to_cached:
            return views
        return [
            replace(view, num_cached=unit_to_cached[view.unit])
            if view.unit in unit_to_cached
            else view
            for view in views
        ]

    def has_open_decode(self, fingerprint: str) -> bool:
        return any(
            unit.is_open and unit.fingerprint == fingerprint for unit in self.of_role(DECODE)
        )

    def decode_views(self, fingerprint: str) -> list[DecodeUnitView]:
        """The decode units that take what was prefilled under a fingerprint. Where all of them
        drain, these do: nobody else could go on with its KV, and a part of an answer by other
        weights is no answer of either.
        """
        led = [
            unit
            for unit in self.of_role(DECODE)
            if unit.orphan_s is None and unit.fingerprint == fingerprint
        ]
        units = [unit for unit in led if unit.drain_by_s is None] or led
        for unit in units:
            if unit.decode_view is None:
                unit.decode_view = _decode_view(unit)
        return [unit.decode_view for unit in units if unit.decode_view is not None]

    def downstream(
        self,
        fingerprint: str,
        num_requests: int,
        num_blocks_used: int,
        num_transferring: int,
    ) -> DownstreamView:
        """The decode units of a fingerprint, with what is bound to it. One that drains or has no
        leader has room for what it holds and for nothing else.
        """
        units = [unit for unit in self.of_role(DECODE) if unit.fingerprint == fingerprint]
        return DownstreamView(
            sum([unit.num_requests_max if unit.is_open else unit.num_requests for unit in units]),
            sum([unit.num_blocks if unit.is_open else unit.num_blocks_used for unit in units]),
            num_requests,
            num_blocks_used,
            num_transferring,
        )

    def check(self, placed: Sequence[Record]) -> list[str]:
        """Problems of the counts; empty when they are what the `placed` requests add up to."""
        problems = []
        to_prefill: defaultdict[str | None, list[Record]] = defaultdict(list)
        to_decode: defaultdict[str | None, list[Record]] = defaultdict(list)
        for record in placed:
            to_decode[record.decode_unit].append(record)
            if record.state is State.PREFILLING:
                to_prefill[record.prefill_unit].append(record)
        for unit in self.by_name.values():
            if unit.prefill_view not in (None, _prefill_view(unit)):
                problems.append(
                    f"{unit.name} is seen as {unit.prefill_view}, which is no longer so"
                )
            if unit.decode_view not in (None, _decode_view(unit)):
                problems.append(f"{unit.name} is seen as {unit.decode_view}, which is no longer so")
            if not any(other is unit for other in self.of_role(unit.role)):
                problems.append(f"{unit.name} is not among the units of its role")
            if unit.role == PREFILL:
                records = to_prefill[unit.name]
                works = [prefill_work(record) for record in records]
                counted = [unit.num_tokens, unit.num_pairs]
                true = [
                    sum(num_tokens for num_tokens, _ in works),
                    sum(num_pairs for _, num_pairs in works),
                ]
            else:
                records = to_decode[unit.name]
                counted, true = (
                    [unit.num_blocks_used],
                    [sum(record.num_blocks for record in records)],
                )
            if unit.num_requests != len(records) or counted != true:
                problems.append(
                    f"{unit.name} counts {unit.num_requests}, {counted}, not {len(records)}, {true}"
                )
        owners = {
            name
            for record in placed
            for name in (record.prefill_unit, record.decode_unit)
            if name is not None
        }
        if owners - self.by_name.keys():
            problems.append(f"requests are on {owners - self.by_name.keys()}, which are down")
        problems += [
            f"{record.request_id} is on {owner.name}, which has other weights"
            for record in placed
            for name in (record.prefill_unit, record.decode_unit)
            if (owner := self.by_name.get(name or "")) is not None
            and owner.fingerprint != record.fingerprint
        ]
        if self._fingerprint_to_num != Counter(u.fingerprint for u in self.by_name.values()):
            problems.append("the counts of fingerprints are wrong")
        return problems + self.cache.check(
            {unit.name: unit.epoch for unit in self.by_name.values()}
        )


@dataclass(frozen=True)
class RequestRouting:
    """Where a request of the front may go: its tables put before the policies, one request at a
    time. Looks, and changes neither table. The front applies what comes of it.
    """

    requests: FrontRequests
    units: FrontUnits
    limits: LimitsConfig
    max_context: int

    def num_free(self) -> int:
        """How many more requests units could work on, as far as they are not too long."""
        num_free = 0
        for fingerprint in self.units.serving():
            num_placed = self.requests.placed_under(fingerprint).num_requests
            view = self.units.downstream(fingerprint, num_placed, 0, 0)
            num_free += max(0, num_placed_max(view.num_slots) - num_placed)
        return max(0, min(self.limits.max_running - self.requests.num_placed, num_free))

    def valley(self, is_draining: bool) -> ValleyView:
        """What a batch's next request would lie beside."""
        requests, prefill = self.requests, self.units.of_role(PREFILL)
        decode = [unit for unit in self.units.of_role(DECODE) if unit.is_open]
        num_others = requests.num_placed - requests.num_placed_of_batches
        return ValleyView(
            is_draining,
            requests.num_waiting,
            requests.num_placed,
            requests.num_placed_of_batches,
            requests.counts[State.PREFILLING],
            sum(unit.num_ranks for unit in prefill if unit.is_open),
            sum(unit.num_requests_max for unit in decode),
            sum(_slots_beside(unit, -(-num_others // len(decode))) for unit in decode),
            requests.num_blocks_placed,
            sum(unit.num_blocks for unit in decode),
        )

    def has_room(self, generation: Generation) -> bool:
        """Whether a new request could start now; else it has to wait."""
        num_tokens = len(generation.prompt) + len(generation.output)
        return self._has_room(num_tokens, generation.tenant, self.units.serving())

    def fingerprints(self, record: Record) -> list[str]:
        """Those of the weights that may take a request: one that has tokens stays with those that
        made them, while they serve.
        """
        serving = self.units.serving()
        is_bound = record.num_output and record.fingerprint in serving
        return [record.fingerprint] if is_bound else serving

    def _has_room(
        self,
        num_tokens: int,
        tenant: str,
        fingerprints: Sequence[str],
        without: Sequence[Record] = (),
    ) -> bool:
        """Whether a request could start under one of these if those `without` were on no units."""
        prefilling = Counter(one.prefill_unit for one in without if one.state is State.PREFILLING)
        return any(
            self._may_prefill(num_tokens, tenant, fingerprint, without)
            and choose_prefill_unit(
                [
                    replace(view, num_requests=view.num_requests - prefilling[view.unit])
                    if prefilling[view.unit]
                    else view
                    for view in self.units.prefill_views(fingerprint)
                ],
                blocks_for(num_tokens),
                num_tokens,
            )
            is not None
            for fingerprint in fingerprints
        )

    def in_the_way(self, record: Record) -> list[Record]:
        """Requests of batches without which it could start now, the latest and no more than that
        takes; none where it could not even without all of them.
        """
        has_room = partial(
            self._has_room, record.num_tokens, record.generation.tenant, self.fingerprints(record)
        )
        placed = [
            one
            for one in reversed(self.requests.placed_of_batches())
            if one.decode_unit is None
            or ((unit := self.units.by_name.get(one.decode_unit)) is not None and unit.is_open)
        ]
        if not placed or not has_room(placed):
            return []
        chosen: list[Record] = []
        for one in placed:
            chosen.append(one)
            if has_room(chosen):
                break
        for one in chosen[:-1]:  # One may hold nothing of what is needed.
            others = [other for other in chosen if other is not one]
            if has_room(others):
                chosen = others
        return chosen

    def prefill_unit(self, record: Record) -> tuple[str, int] | None:
        """The prefill unit of its fingerprint that it starts on now, and how many of its positions
        that has already; None if it waits.
        """
        num_tokens, fingerprint = record.num_tokens, record.fingerprint
        tenant, has_place = record.generation.tenant, record.num_blocks_taken > 0
        if not self._may_prefill(num_tokens, tenant, fingerprint, has_place=has_place):
            return None
        unit_to_cached: dict[str, int] = {}
        if record.generation.chain:
            # Only where it could go now: one that waits for room asks again at every event.
            open_units = self.units.open_prefill_units()
            unit_to_cached = self.units.cache.prefixes(record.generation.chain, open_units)
            # The last position is computed in any case, and a block is taken whole or not at all.
            most = usable_blocks(num_tokens) * BLOCK_TOKENS
            unit_to_cached = {
                unit: min(num_cached, most) for unit, num_cached in unit_to_cached.items()
            }
        views = self.units.prefill_views(fingerprint, unit_to_cached)
        unit = choose_prefill_unit(views, blocks_for(num_tokens), num_tokens)
        return None if unit is None else (unit, unit_to_cached.get(unit, 0))

    def decode_unit(self, record: Record) -> str | None:
        """The decode unit for its KV; None if it fits into none."""
        num_blocks_max = blocks_for(
            len(record.generation.prompt) + record.generation.max_tokens - 1
        )
        views = self.units.decode_views(record.fingerprint)
        return choose_decode_unit(views, record.num_blocks, num_blocks_max)

    def fit(self, record: Record) -> str | None:
        """Cap its output, once, by the context and by what one request can hold in the units; why
        it can have none.
        """
        if record.is_fitted or (capacity_tokens := self.units.capacity_tokens()) is None:
            return None
        record.is_fitted = True
        generation = record.generation
        num_prompt = len(generation.prompt)
        # The last token of an output has no KV, so capacity + 1 tokens can be known.
        longest = min(self.max_context, capacity_tokens + 1) - num_prompt
        if longest <= record.num_output:
            return f"the prompt has {num_prompt} tokens; a unit holds {capacity_tokens} at most."
        if longest < generation.max_tokens:
            record.generation = msgspec.structs.replace(generation, max_tokens=longest)
        return None

    def _may_prefill(
        self,
        num_tokens: int,
        tenant: str,
        fingerprint: str,
        without: Sequence[Record] = (),
        *,
        has_place: bool = False,
    ) -> bool:
        if self.requests.num_placed - len(without) >= self.limits.max_running:
            return False
        if not self.units.has_open_decode(fingerprint):
            return False
        view = self._downstream(tenant, fingerprint, without, has_place=has_place)
        return may_prefill(view, blocks_for(num_tokens + 1))

    def _downstream(
        self,
        tenant: str,
        fingerprint: str,
        without: Sequence[Record] = (),
        *,
        has_place: bool = False,
    ) -> DownstreamView:
        requests, placed = self.requests, self.requests.placed_under(fingerprint)
        left = [one for one in without if one.fingerprint == fingerprint]
        view = self.units.downstream(
            fingerprint,
            placed.num_requests - len(left),
            placed.num_blocks - sum(one.num_blocks for one in left),
            placed.num_transferring - sum(one.state is State.TRANSFERRING for one in left),
        )
        return replace(view, has_place=has_place or requests.has_fewer(tenant, fingerprint))
