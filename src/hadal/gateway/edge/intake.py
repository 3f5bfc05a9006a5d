"""Limits on requests, from their headers on. Depends on tenant names, not on contents."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from hadal.core.config import LimitsConfig
from hadal.gateway.edge.bodies import Bodies, read_body
from hadal.gateway.edge.permits import Permits


@dataclass(frozen=True)
class Patience:
    """Time limits for clients, period of keep-alives, and Retry-After of refusals; in seconds."""

    body_s: float = 30.0
    send_s: float = 30.0
    keep_alive_s: float = 10.0
    retry_after_s: float = 2.0


class Intake:
    """Places for incomplete bodies, and permits for whole requests."""

    def __init__(
        self, limits: LimitsConfig, patience: Patience, bodies: Bodies | None = None
    ) -> None:
        self.patience = patience
        self.bodies = Bodies() if bodies is None else bodies
        self.permits = Permits(limits.max_running + limits.max_queued, patience.retry_after_s)
        self._max_body_bytes = limits.max_body_bytes

    async def body_of(self, request: Request, tenant: str) -> bytes:
        """Read the body, unless the tenant has no free permit. Raises ApiError."""
        self.permits.check(tenant)
        async with self.bodies.wait(tenant, self.patience.body_s):
            return await read_body(request, self._max_body_bytes)
