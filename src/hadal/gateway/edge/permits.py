"""Permits to work on requests, by tenant, for requests with whole bodies.

What one tenant does costs no other tenant a permit. The front counts generations (policy/admission);
this file counts HTTP requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hadal.gateway.edge.errors import overloaded
from hadal.policy.admission import share_of

LEFT_S = 10.0
"""How long generations that were given up still take permits. To begin and to end one costs the
gateway half a millisecond of its one thread: a tenant that does nothing else may have 5 % of it
where there are a thousand permits.
"""


class Permits:
    """HTTP requests that are worked on, from their whole body to the end of their answer."""

    def __init__(self, num_max: int, retry_after_s: float) -> None:
        self._num_max = num_max
        self._retry_after_s = retry_after_s
        self._tenant_to_num: Counter[str] = Counter()
        self._tenant_to_left: Counter[str] = Counter()
        """Generations whose clients went away a moment ago."""

    def __len__(self) -> int:
        return self._tenant_to_num.total()

    def check(self, tenant: str) -> None:
        """Raises ApiError 429 for a tenant that has its share. Asked before a body is read, it
        spares reading it.
        """
        num_held, num_left = self._tenant_to_num[tenant], self._tenant_to_left[tenant]
        if num_held + num_left >= share_of(
            self._num_max, len(self._tenant_to_num.keys() | {tenant})
        ):
            raise overloaded(
                429,
                f"This tenant has {num_held} requests that are worked on, and {num_left}"
                f" generations that it gave up in the last {LEFT_S:g} s count as well; try again.",
                self._retry_after_s,
                "too_many_requests",
            )

    @contextmanager
    def take(self, tenant: str) -> Iterator[None]:
        """Hold a permit. Raises as `check` does."""
        self.check(tenant)
        self._tenant_to_num[tenant] += 1
        try:
            yield
        finally:
            self._tenant_to_num[tenant] -= 1
            if not self._tenant_to_num[tenant]:
                del self._tenant_to_num[tenant]

    def left(self, tenant: str, num: int) -> None:
        """A client went away from so many generations: they take permits for LEFT_S more, so that
        to begin and give up again and again costs the tenant that does it and not the others.
        """
        self._tenant_to_left[tenant] += num
        asyncio.get_running_loop().call_later(LEFT_S, self._forget, tenant, num)

    def _forget(self, tenant: str, num: int) -> None:
        self._tenant_to_left[tenant] -= num
        if not self._tenant_to_left[tenant]:
            del self._tenant_to_left[tenant]
