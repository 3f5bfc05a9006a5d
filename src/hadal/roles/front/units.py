"""The units as the front knows them: who is up, what was sent to each, what their caches hold, and
which of them a request may go to. Snapshots for the policies are made here.

Counts are the front's own, raised when it sends and lowered when it takes back, so they are never
late; the units' reports are kept for the metrics and as heartbeats.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hadal.core.cache import num_names
from hadal.core.config import DECODE, PREFILL, ROLES
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.units import Cached, Filled, UnitReport, UnitUp
from hadal.core.request import State
from hadal.policy.views import DecodeUnitView, DownstreamView, PrefillUnitView
from hadal.roles.front.cache import FrontCache
from hadal.roles.front.record import Record
from hadal.roles.front.unit import Unit, decode_view, prefill_view, prefill_work
from hadal.roles.suspects import Absence, Suspects

_NOTHING: Mapping[str, int] = {}
_SMOOTHING = 0.1
"""Weight of a step's tokens per request: that of its time, which they stand beside (roles/unit)."""
ORPHAN_S = 10.0
"""How long a unit's requests wait for a leader that takes its ranks over."""
LAST_WORDS_S = 1.0
"""How long a leader's reports may still come once it has ended."""


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
                unit.prefill_view = prefill_view(unit)
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
                unit.decode_view = decode_view(unit)
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
            if unit.prefill_view not in (None, prefill_view(unit)):
                problems.append(
                    f"{unit.name} is seen as {unit.prefill_view}, which is no longer so"
                )
            if unit.decode_view not in (None, decode_view(unit)):
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
