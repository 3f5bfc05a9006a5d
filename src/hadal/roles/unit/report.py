"""Reports of a unit, field by field: the only place that fills a UnitReport in.

    leader's figures --build--> UnitReport --with_ranks--> with the figures of ranks that are processes
                                           --with_overhead--> as its host sends it

The leader notes its figures as they change. The other two parts are added afterwards: a leader
has no record of how its ranks share their experts, and only a host has a clock. Independent of
timers: roles/unit/reporter decides when a report is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hadal.core.messages.units import UnitReport
from hadal.core.plans import NO_LINK_BYTES, LinkBytes, StepDone
from hadal.roles.ranks.pools import RankPools
from hadal.roles.unit.meters import BalanceMeter, StepMeter


@dataclass(frozen=True, slots=True)
class UnitIdentity:
    """Process of a unit's leader, as named in messages."""

    unit: str
    role: str
    epoch: str
    fingerprint: str = ""
    """KV fingerprint of the unit (UnitUp)."""


class ReportBuilder:
    """Figures of a unit that its leader notes, and the report made from them."""

    def __init__(
        self,
        identity: UnitIdentity,
        pools: RankPools,
        num_requests_max: int,
        cache_totals: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """`num_requests_max`: per rank. `cache_totals`: returns the counts of the unit's KV cache
        by the names in core/cache; called for each report.
        """
        self._identity = identity
        self._pools = pools
        self._num_requests_max = num_requests_max
        self._cache_totals = cache_totals
        self._steps = StepMeter()
        self._balance = BalanceMeter()
        self._rates_s = (0.0, 0.0)
        self._pass_s = 0.0
        self._link_bytes = NO_LINK_BYTES
        self._num_requests_moved = 0
        self._num_drafts = 0
        self._drafts_tried: Sequence[int] = ()
        self._drafts_accepted: Sequence[int] = ()

    # ---- figures ----
    def stepped(self, done: StepDone) -> None:
        """Note that a step ended, with or without an error."""
        self._steps.done(done.elapsed_s)
        self.copied(done.link_bytes)

    def copied(self, link_bytes: LinkBytes) -> None:
        """Add bytes that travelled between ranks."""
        self._link_bytes = self._link_bytes.plus(link_bytes)

    def balanced(self, balance: Mapping[str, float]) -> None:
        """Note how balanced the ranks are in a plan, by objective (core/balance)."""
        self._balance.add(balance)

    def reset(self) -> None:
        """Forget the balance: other ranks share the work now."""
        self._balance.reset()

    def measured(self, token_s: float, pair_s: float, *, step_s: float) -> None:
        """Note measured seconds; 0 if unknown. Prefill: of a token and of a (token, position) pair.
        Decode: per request in a pass (`token_s`), and of a pass without requests (`step_s`).
        """
        self._rates_s, self._pass_s = (token_s, pair_s), step_s

    def moved(self, num_requests: int) -> None:
        """Note how many requests have moved from rank to rank since the start."""
        self._num_requests_moved = num_requests

    def drafts(self, num_drafts: int) -> None:
        """Note how many drafts the last plan makes per request."""
        self._num_drafts = num_drafts

    def drafted(self, num_tried: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Note how many drafts were compared and how many were right, by place in the draft."""
        self._drafts_tried, self._drafts_accepted = num_tried, num_accepted

    # ---- reports ----
    @property
    def num_requests_max(self) -> int:
        """Maximum number of requests on the living ranks."""
        return self._num_requests_max * self._pools.num_living

    def build(self, num_requests: int, num_tokens_waiting: int, idle_s: float) -> UnitReport:
        """Return the leader's report."""
        pools = self._pools
        return UnitReport(
            self._identity.unit,
            self._identity.epoch,
            pools.num_usable,
            pools.num_used,
            num_requests,
            self.num_requests_max,
            num_tokens_waiting,
            self._steps.num_steps,
            self._steps.step_ms,
            num_ranks=pools.num_living,
            formation=pools.formation,
            num_blocks_request=pools.num_blocks_request,
            token_s=self._rates_s[0],
            pair_s=self._rates_s[1],
            balance=dict(self._balance.smoothed),
            num_requests_moved=self._num_requests_moved,
            cache=self._cache_totals(),
            idle_s=idle_s,
            step_s=self._pass_s,
            num_drafts=self._num_drafts,
            drafts_tried=tuple(self._drafts_tried),
            drafts_accepted=tuple(self._drafts_accepted),
            link_bytes=self._link_bytes,
        )


@dataclass(frozen=True, slots=True)
class ExpertFigures:
    """Part of a report that the balancer of experts measures."""

    balance: dict[str, float]
    num_replicas_moved: int = 0
    num_layers_flipped: int = 0


def with_ranks(
    report: UnitReport, num_ranks: int, living: Collection[int], experts: ExpertFigures
) -> UnitReport:
    """Return the report with the figures of ranks that are processes: the living of `num_ranks`,
    and their experts.
    """
    return msgspec.structs.replace(
        report,
        num_ranks=len(living),
        absent=tuple(rank for rank in range(num_ranks) if rank not in living),
        balance={**report.balance, **experts.balance},
        num_replicas_moved=experts.num_replicas_moved,
        num_layers_flipped=experts.num_layers_flipped,
    )


def with_overhead(report: UnitReport, overhead_ms: float) -> UnitReport:
    """Return the report with the time per step during which its host measured the Runner idle."""
    return msgspec.structs.replace(report, overhead_ms=overhead_ms)
