"""Limit each tenant's HTTP requests in progress, counted from their whole body on.

A tenant's requests take no other tenant's permits. policy/admission limits generations instead.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hadal.gateway.edge.errors import overloaded
from hadal.policy.admission import share_of

LEFT_S = 10.0
"""Seconds for which an abandoned generation still occupies a permit. Starting and ending a
generation costs 0.5 ms of the event loop's thread. With 1,000 permits, a tenant that only starts
and abandons generations takes at most 5 % of that thread.
"""


class Permits:
    """HTTP requests in progress, from their whole body to the end of their answer."""

    def __init__(self, num_max: int, retry_after_s: float) -> None:
        self._num_max = num_max
        self._retry_after_s = retry_after_s
        self._tenant_to_num: Counter[str] = Counter()
        self._tenant_to_left: Counter[str] = Counter()
        """Generations abandoned by their clients in the last LEFT_S, by tenant."""

    def __len__(self) -> int:
        return self._tenant_to_num.total()

    def check(self, tenant: str) -> None:
        """Raise ApiError 429 if the tenant has used up its share. A check before the body is read
        saves reading it.
        """
        num_held, num_left = self._tenant_to_num[tenant], self._tenant_to_left[tenant]
        if num_held + num_left >= share_of(
            self._num_max, len(self._tenant_to_num.keys() | {tenant})
        ):
            raise overloaded(
                429,
                f"This tenant has {num_held} running requests, and {num_left} generations cancelled"
                f" in the last {LEFT_S:g} s count too; try again.",
                self._retry_after_s,
                "too_many_requests",
            )

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """Hold a permit within this context. Raises as `check` does."""
        self.check(tenant)
        self._tenant_to_num[tenant] += 1
        try:
            yield
        finally:
            self._tenant_to_num[tenant] -= 1
            if not self._tenant_to_num[tenant]:
                del self._tenant_to_num[tenant]

    def left(self, tenant: str, num: int) -> None:
        """Let `num` generations abandoned by a client occupy permits for LEFT_S more, so that the
        tenant pays for repeated starting and abandoning, not others.
        """
        self._tenant_to_left[tenant] += num
        asyncio.get_running_loop().call_later(LEFT_S, self._forget, tenant, num)

    def _forget(self, tenant: str, num: int) -> None:
        self._tenant_to_left[tenant] -= num
        if not self._tenant_to_left[tenant]:
            del self._tenant_to_left[tenant]
