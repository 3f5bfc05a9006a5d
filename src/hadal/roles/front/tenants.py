"""Quota use of tenants: tokens of the last minute, cost of the day.

    admitted: the prompt's tokens are drawn from the bucket, and the highest cost is reserved
    -> output tokens are drawn -> Charged: the actual cost replaces the reserved one

A charge is identified by its request's id and counts once: gateways resend the last charges to a
new front, which may have read them from the ledger. A tenant with a daily budget is refused until
its Spent has arrived. Part of the front's state; policy/quotas decides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hadal.core.messages.generation import RateLimits
from hadal.core.messages.requests import Charged, Quota, Quotas, Spent
from hadal.policy.admission import Refusal
from hadal.policy.fairness import is_batch, owner_of
from hadal.policy.quotas import DAY_S, QuotaView, filled, limits_of, refuse, refuse_tokens

RECENT_S = 120.0
"""Seconds for which a charge's id is remembered. Gateways resend charges up to RECENT_S / 2 old."""


@dataclass(slots=True)
class _Bucket:
    num_tokens: float
    at_s: float


@dataclass(frozen=True, slots=True)
class _Reserved:
    tenant: str
    pico_usd: int
    is_for_batch: bool


@dataclass(frozen=True, slots=True)
class _Recent:
    at_s: float
    tenant: str
    day: int
    pico_usd: int
    """0 if the ledger's sum already includes the charge."""


class FrontTenants:
    """Quota use by tenant. `reserve_s`: time after a request's end for which its highest cost stays
    reserved, unless its charge arrives before.
    """

    def __init__(self, reserve_s: float) -> None:
        self._reserve_s = reserve_s
        self._quotas: dict[str, Quota] = {}
        self._clock = 0.0
        """Unix time less the front's time, seconds."""
        self._day = -1
        self._buckets: dict[str, _Bucket] = {}
        self._spent: dict[str, int] = {}
        """Tenant -> cost of the day, pico-dollars, once Spent has arrived."""
        self._reserved: dict[str, _Reserved] = {}
        """Request id -> its reserved cost."""
        self._ended: list[str] = []
        """Requests that ended since the last tick with a cost to release later."""
        self._reserved_until_s: dict[str, float] = {}
        """Request id -> time at which its reserved cost is released, earliest first."""
        self._tenant_to_reserved: dict[str, int] = {}
        """Tenant -> sum of its reserved costs, pico-dollars."""
        self._recent: dict[str, _Recent] = {}
        """Request id -> its charge, oldest first."""

    def set(self, now_s: float, message: Quotas) -> None:
        """Replace the quotas. Tenants that had a quota before keep the use counted so far."""
        self._clock = message.unix_s - now_s
        self._turn_day(now_s)
        self._quotas = {quota.tenant: quota for quota in message.quotas}
        for known in (self._buckets, self._spent):
            for tenant in known.keys() - self._quotas.keys():
                del known[tenant]
        for tenant, quota in self._quotas.items():
            if not quota.day_pico_usd:
                self._spent.pop(tenant, None)

    def unread(self) -> tuple[str, ...]:
        """Return tenants with a daily budget and no spending read from the ledger yet."""
        return tuple(
            tenant
            for tenant, quota in self._quotas.items()
            if quota.day_pico_usd and tenant not in self._spent
        )

    # ---- admission ----
    def refusal(
        self,
        now_s: float,
        tenant: str,
        num_open: int,
        num_wanted: int,
        num_tokens: int,
        most_pico_usd: int,
    ) -> Refusal | None:
        """Return why a tenant's quota refuses a request, or None. Changes nothing."""
        view = self._view(now_s, tenant, num_open)
        return None if view is None else refuse(view, num_wanted, num_tokens, most_pico_usd)

    def counting_refusal(self, now_s: float, tenant: str, num_open: int) -> Refusal | None:
        """Return why a prompt may not be counted; None if it may (tokens left, or no limit)."""
        view = self._view(now_s, tenant, num_open)
        return None if view is None else refuse_tokens(view)

    def limits(self, now_s: float, tenant: str, num_open: int) -> RateLimits | None:
        """Return the limits that a tenant's replies report; None for a tenant without a quota."""
        view = self._view(now_s, tenant, num_open)
        return None if view is None else limits_of(view)

    def begin(
        self, now_s: float, request_id: str, tenant: str, num_tokens: int, most_pico_usd: int
    ) -> None:
        """Draw the tokens of an admitted request, and reserve its highest cost."""
        is_for_batch, tenant = is_batch(tenant), owner_of(tenant)
        self.draw(now_s, tenant, num_tokens)
        if most_pico_usd and request_id not in self._reserved:
            self._reserved[request_id] = _Reserved(tenant, most_pico_usd, is_for_batch)
            self._tenant_to_reserved[tenant] = (
                self._tenant_to_reserved.get(tenant, 0) + most_pico_usd
            )

    def ended(self, request_id: str) -> None:
        """Note that a request has ended: its reserved cost, unless it is of a batch, is released
        `reserve_s` after the next tick.
        """
        reserved = self._reserved.get(request_id)
        # A batch line is charged when its answer is stored, however long the store is unavailable.
        # The process that sends the charge ends with this front, so nothing stays reserved forever.
        if reserved is not None and not reserved.is_for_batch:
            self._ended.append(request_id)

    def draw(self, now_s: float, tenant: str, num_tokens: int) -> None:
        """Draw tokens from a tenant's bucket."""
        tenant = owner_of(tenant)
        quota = self._quotas.get(tenant)
        if quota is not None and quota.tokens_per_minute:
            left = self._num_tokens_left(now_s, quota)
            self._buckets[tenant] = _Bucket(left - num_tokens, now_s)

    # ---- cost ----
    def charged(self, now_s: float, message: Charged) -> None:
        """Count the actual cost of a request, and release its reserved one."""
        self._turn_day(now_s)
        self._release(message.request_id)
        if message.request_id in self._recent:
            return
        self._recent[message.request_id] = _Recent(
            now_s, message.tenant, message.day, message.pico_usd
        )
        if message.tenant in self._spent and message.day == self._day:
            self._spent[message.tenant] += message.pico_usd

    def read(self, now_s: float, message: Spent) -> None:
        """Set what tenants spent today: the ledger's sums, and recent charges that these do not include."""
        self._turn_day(now_s)
        if message.day != self._day:
            return  # It was read before midnight; the caller reads the ledger again.
        read = {
            tenant: pico_usd
            for tenant, pico_usd in message.tenant_to_pico_usd.items()
            if tenant in self._quotas and self._quotas[tenant].day_pico_usd
        }
        self._spent |= self._with_recent(read, set(message.request_ids))
        for request_id in message.request_ids:
            self._release(request_id)
            self._recent.setdefault(request_id, _Recent(now_s, "", self._day, 0))

    def tick(self, now_s: float) -> None:
        """Forget old charges, and release reserved costs that are due."""
        self._turn_day(now_s)
        while self._recent:
            request_id, recent = next(iter(self._recent.items()))
            if recent.at_s > now_s - RECENT_S:
                break
            del self._recent[request_id]
        for request_id in self._ended:
            self._reserved_until_s[request_id] = now_s + self._reserve_s
        self._ended.clear()
        while self._reserved_until_s:
            request_id, until_s = next(iter(self._reserved_until_s.items()))
            if until_s > now_s:
                break
            del self._reserved_until_s[request_id]
            self._release(request_id)

    def check(self) -> list[str]:
        """Return problems; empty if the sums agree."""
        sums: dict[str, int] = {}
        for reserved in self._reserved.values():
            sums[reserved.tenant] = sums.get(reserved.tenant, 0) + reserved.pico_usd
        return (
            [] if sums == self._tenant_to_reserved else ["reserved amounts differ from their sum"]
        )

    def _release(self, request_id: str) -> None:
        reserved = self._reserved.pop(request_id, None)
        if reserved is not None:
            left = self._tenant_to_reserved[reserved.tenant] - reserved.pico_usd
            if left:
                self._tenant_to_reserved[reserved.tenant] = left
            else:
                del self._tenant_to_reserved[reserved.tenant]

    def _with_recent(
        self, tenant_to_pico_usd: dict[str, int], but: Collection[str] = ()
    ) -> dict[str, int]:
        """Return the sums plus today's recent charges, except those of the requests in `but`."""
        sums = dict(tenant_to_pico_usd)
        for request_id, recent in self._recent.items():
            if recent.tenant in sums and recent.day == self._day and request_id not in but:
                sums[recent.tenant] += recent.pico_usd
        return sums

    def _turn_day(self, now_s: float) -> None:
        day = int((now_s + self._clock) // DAY_S)
        if day == self._day:
            return
        # After a clock is set back over midnight, that day's sums are unknown and read again.
        known = self._spent if day > self._day else ()
        self._day = day
        self._spent = self._with_recent(dict.fromkeys(known, 0))

    def _num_tokens_left(self, now_s: float, quota: Quota) -> float:
        bucket = self._buckets.get(quota.tenant)
        if bucket is None:
            return float(quota.tokens_per_minute)
        return filled(quota, bucket.num_tokens, now_s - bucket.at_s)

    def _view(self, now_s: float, tenant: str, num_open: int) -> QuotaView | None:
        is_for_batch, tenant = is_batch(tenant), owner_of(tenant)
        quota = self._quotas.get(tenant)
        if quota is None:
            return None
        unix_s = now_s + self._clock
        is_today = int(unix_s // DAY_S) <= self._day
        spent = self._spent.get(tenant)
        return QuotaView(
            quota,
            num_open,
            self._num_tokens_left(now_s, quota),
            spent if is_today or spent is None else 0,
            self._tenant_to_reserved.get(tenant, 0),
            DAY_S - unix_s % DAY_S,
            is_for_batch,
        )
