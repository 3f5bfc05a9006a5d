"""Units in the front's table: units that are up, work sent to each, summaries of their caches, and
the units that a request may go to. Snapshots for the policies are made here.

The front counts work itself, when it sends it and when it releases it, so counts are never late.
Reports of the units provide heartbeats, capacities, measured speeds and metrics.
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
"""Weight of the latest step in `tokens_step`, equal to that of step times (StepMeter)."""
ORPHAN_S = 10.0
"""Seconds for which a unit's requests wait for a new leader of its ranks."""
LAST_WORDS_S = 1.0
"""Seconds for which reports of an ended leader may still arrive."""


class FrontUnits:
    """Units that are up, by name."""

    def __init__(self, unit_timeout_s: float, heartbeat_s: float, fingerprint: str = "") -> None:
        """Treat a unit as frozen if it sends no heartbeat for `unit_timeout_s` although it could
        run. `heartbeat_s`: longest time between two calls of the front. `fingerprint`: KV
        fingerprint of units that report none.
        """
        self.by_name: dict[str, Unit] = {}
        self.suspects = Suspects(unit_timeout_s)
        self._absence = Absence(heartbeat_s)
        self.cache = FrontCache()
        self._role_to_units: dict[str, list[Unit]] = {role: [] for role in ROLES}
        self._fingerprint = fingerprint
        self._fingerprint_to_num: dict[str, int] = {}
        """Fingerprint -> number of its units that are up; fingerprints in order of appearance."""

    def of_role(self, role: str) -> list[Unit]:
        """Return the role's units, in the order in which they came up."""
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
        """Remove a unit that is down, and its cache summary."""
        unit = self.by_name.pop(name, None)
        if unit is not None:
            self._role_to_units[unit.role].remove(unit)
            self._fingerprint_to_num[unit.fingerprint] -= 1
            if not self._fingerprint_to_num[unit.fingerprint]:
                del self._fingerprint_to_num[unit.fingerprint]
        self.cache.down(name)

    def fingerprint_of(self, message: UnitUp) -> str:
        """Return the fingerprint of a unit's KV."""
        return message.fingerprint or self._fingerprint

    def serving(self) -> list[str]:
        """Return fingerprints that a prompt may be bound to, best first; empty if it must wait.

        With one fingerprint there is no choice. With two, new weights are replacing old ones. Only
        a fingerprint with an open unit of each role can serve a prompt; the newest is best as long
        as it has capacity. KV prefilled under any other could not be decoded.
        """
        if len(self._fingerprint_to_num) < 2:
            return [*self._fingerprint_to_num]
        prefill, decode = (
            {unit.fingerprint for unit in self.of_role(role) if unit.is_open}
            for role in (PREFILL, DECODE)
        )
        return [one for one in reversed(self._fingerprint_to_num) if one in prefill & decode]

    def orphaned(self, unit: Unit, now_s: float) -> None:
        """Note that a unit's leader is gone. A repeated call changes nothing."""
        unit.changed()
        unit.orphan_s = now_s if unit.orphan_s is None else unit.orphan_s

    def succeeded(self, unit: Unit, message: UnitUp, now_s: float) -> None:
        """Note a unit's new leader; counts of work sent to the unit stay."""
        unit.changed()
        unit.epoch, unit.orphan_s, unit.seen_s, unit.load = message.epoch, None, now_s, None
        unit.num_blocks, unit.num_requests_max = message.num_blocks, message.num_requests_max
        unit.num_blocks_request = message.num_blocks_request or message.num_blocks
        self.cache.up(message.unit, message.epoch, message.num_blocks)

    def late_orphans(self, now_s: float) -> list[str]:
        """Return units that no new leader took over in time."""
        units = self.by_name.values()
        return [
            unit.name
            for unit in units
            if unit.orphan_s is not None and unit.orphan_s + ORPHAN_S <= now_s
        ]

    def update(self, unit: Unit, load: UnitReport, now_s: float) -> None:
        """Apply a heartbeat. A unit's capacity changes when a rank is lost or returns."""
        unit.seen_s = now_s
        unit.changed()
        if unit.orphan_s is not None and unit.orphan_s + LAST_WORDS_S < now_s:
            unit.orphan_s = None  # LeaderDown came after its successor's UnitUp.
        unit.load = load
        unit.num_blocks, unit.num_requests_max = load.num_blocks, load.num_requests_max
        unit.num_blocks_request = load.num_blocks_request or load.num_blocks

    def cached(self, message: Cached) -> None:
        """Apply a change of the blocks that a unit has cached in memory."""
        if message.unit in self.by_name:
            self.cache.update(message, self.by_name[message.unit].num_blocks)

    def taker_of(self, message: Filled) -> str | None:
        """Return the prefill unit with most of the text before these blocks. None if no unit has
        all of that text, or if one already has the blocks as well.
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
        """Return unit -> its last report, for units that have reported."""
        return {unit.name: unit.load for unit in self.by_name.values() if unit.load is not None}

    def called(self, now_s: float) -> None:
        """Note a call of the front, before its events; pauses of the front are not silence of
        units.
        """
        if missed_s := self._absence.called(now_s):
            for unit in self.by_name.values():
                unit.seen_s += missed_s

    def frozen(self, now_s: float) -> list[tuple[str, str]]:
        """Return (unit, reason) of units that sent no heartbeat for too long although they could run."""
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
        """Return the most tokens of KV that one request can have on units of both roles; None if a
        role has no living rank on a unit that does not drain.
        """
        num_blocks = min(
            max(
                [unit.num_blocks_request for unit in self.of_role(role) if unit.drain_by_s is None],
                default=0,
            )
            for role in ROLES
        )
        return num_blocks * BLOCK_TOKENS or None

    # ---- work sent to units ----
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
        """Add blocks that requests of a decode unit have grown by."""
        unit = self.by_name.get(name)
        if unit is not None and num_blocks:
            unit.changed()
            unit.num_blocks_used += num_blocks

    def drew(self, name: str, num_tokens: int, num_requests: int) -> None:
        """Update a decode unit's tokens per request from one step."""
        unit = self.by_name.get(name)
        if unit is not None and num_requests:
            unit.tokens_step += _SMOOTHING * (num_tokens / num_requests - unit.tokens_step)

    def left_decode(self, name: str, num_blocks: int) -> None:
        unit = self.by_name.get(name)
        if unit is not None:
            unit.changed()
            unit.num_requests -= 1
            unit.num_blocks_used -= num_blocks

    # ---- views for policies ----
    def decode_step_s(self) -> float:
        """Return the step time of the slowest decode unit, seconds; 0 if none has been measured."""
        loads = [unit.load for unit in self.of_role(DECODE) if unit.load is not None]
        return max([load.step_ms + load.overhead_ms for load in loads], default=0.0) * 1e-3

    def open_prefill_units(self) -> list[str]:
        """Return prefill units that take one more request."""
        return [
            u.name
            for u in self.of_role(PREFILL)
            if u.is_open and u.num_requests < u.num_requests_max
        ]

    def prefill_views(
        self, fingerprint: str, unit_to_cached: Mapping[str, int] = _NOTHING
    ) -> list[PrefillUnitView]:
        """Return views of a fingerprint's prefill units that do not drain. `unit_to_cached`:
        positions of the request in each unit's cache.
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
        """Return views of decode units that can use KV prefilled under a fingerprint. If all of
        them drain, return those: no other unit can use the KV, and an answer must not mix two
        weights.
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
        """Return sums over a fingerprint's decode units, with the given counts of requests bound to
        it. A unit that drains or has no leader has no capacity beyond its current requests.
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
        """Return problems of the counts; empty if they match the `placed` requests."""
        problems = []
        to_prefill: defaultdict[str | None, list[Record]] = defaultdict(list)
        to_decode: defaultdict[str | None, list[Record]] = defaultdict(list)
        for record in placed:
            to_decode[record.decode_unit].append(record)
            if record.state is State.PREFILLING:
                to_prefill[record.prefill_unit].append(record)
        for unit in self.by_name.values():
            if unit.prefill_view not in (None, prefill_view(unit)):
                problems.append(f"the prefill view of {unit.name} is outdated: {unit.prefill_view}")
            if unit.decode_view not in (None, decode_view(unit)):
                problems.append(f"the decode view of {unit.name} is outdated: {unit.decode_view}")
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
