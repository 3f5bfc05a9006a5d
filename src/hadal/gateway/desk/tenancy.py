"""The API keys in force: their tenants, the tenants' rights, and their quotas at the front.

Depends on headers and keys; the front applies the quotas (policy/quotas).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from hadal.core.errors import ConfigError
from hadal.gateway.desk.auth import OPERATOR, Keys, Tenant, credentials
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.keys import follow
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.edge.errors import ApiError

_CLOCK_S = 1.0
"""Maximum error of the front's Unix time, which separates the days of budgets."""
KeysChanged = Callable[[], Awaitable[Keys | None]]
"""Function that returns the keys if they have changed. Raises ConfigError."""


class Tenancy:
    """A gateway's API keys: finds the tenant of a request, and follows changes of the keys."""

    def __init__(
        self,
        keys: Keys,
        link: FrontLink,
        clock: GatewayClock,
        *,
        has_ledger: bool = False,
        changed: KeysChanged | None = None,
        retain: Callable[[Collection[bytes] | None], None] | None = None,
    ) -> None:
        """`changed`: source of later keys; None: the keys never change. `retain`: called with the
        digests of the accepted keys whenever these change (Keys.digests). Raises ConfigError for a
        budget without a ledger.
        """
        self._has_ledger = has_ledger
        self._check_budgets(keys)
        self.keys = keys
        self._link = link
        self._clock = clock
        self._changed = changed
        self._retain = retain
        self._ahead_s = 0.0
        """Unix time minus `clock.now`, as last sent to the front."""

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant of a request. Raises ApiError 401, 503."""
        return self.keys.check(credentials(headers))

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raise ApiError 401, 403 or 503 unless the request's tenant may operate the server."""
        if OPERATOR not in self.tenant_of(headers).rights:
            raise ApiError(
                403,
                "This API key has no right to operate the server; to grant it, add 'operator'"
                " after the key in the keys file.",
                code="not_an_operator",
            )

    def take(self, keys: Keys) -> None:
        """Replace the accepted keys; running requests continue. Raises ConfigError for a budget
        without a ledger.
        """
        self._check_budgets(keys)
        had_quotas, self.keys = bool(self.keys.quotas), keys
        if self._retain is not None:
            self._retain(keys.digests)
        if keys.quotas or had_quotas:
            self._send_quotas()

    async def follow(self) -> None:
        """Accept the source's keys whenever they change, until cancelled."""
        self.take(self.keys)  # The event loop runs now, so the quotas can be sent to the front.
        if self._changed is not None:
            await follow(self._changed, self.take)

    def keep_time(self) -> None:
        """Send the front the Unix time again if quotas need it and the clock was set."""
        clock = self._clock
        if self.keys.quotas and abs(clock.unix_time() - clock.now() - self._ahead_s) > _CLOCK_S:
            self._send_quotas()

    def _send_quotas(self) -> None:
        unix_s = self._clock.unix_time()
        self._ahead_s = unix_s - self._clock.now()
        self._link.set_quotas(unix_s, self.keys.quotas)

    def _check_budgets(self, keys: Keys) -> None:
        if has_budgets(keys) and not self._has_ledger:
            raise ConfigError("dollars_per_day needs a ledger: set [ledger] url.")


def has_budgets(keys: Keys) -> bool:
    """Return True if a tenant has a daily budget."""
    return any(quota.day_pico_usd for quota in keys.quotas)
