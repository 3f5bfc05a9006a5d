"""Readiness of the server: can it answer requests, and what does /health report?"""

from __future__ import annotations

from typing import Any

from hadal.core.config import Deployment
from hadal.core.messages.snapshot import FrontSnapshot
from hadal.gateway.desk.health import health_of
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.desk.run_status import RunStatus
from hadal.gateway.edge.errors import overloaded
from hadal.gateway.edge.intake import Patience


class GatewayReadiness:
    """Readiness of the server: "starting" until requests could be served once, and never again."""

    def __init__(
        self,
        deployment: Deployment,
        link: FrontLink,
        run_status: RunStatus,
        patience: Patience,
        *,
        was_ready: bool = False,
    ) -> None:
        """`was_ready`: requests could be served before this process started. If units are down now,
        requests wait at the front until the units return.
        """
        self._deployment = deployment
        self._link = link
        self._run_status = run_status
        self._retry_after_s = patience.retry_after_s
        self._was_ready = was_ready

    def has_begun(self) -> bool:
        """Return True once requests could be served; until then the server is starting."""
        self._was_ready = self._was_ready or self._link.snapshot().can_serve
        return self._was_ready

    def check_open(self) -> None:
        """Raise ApiError 503 while the server is starting or draining."""
        if self._link.draining:
            raise overloaded(
                503,
                "The server is shutting down; try again later.",
                self._retry_after_s,
                "draining",
            )
        if not self.has_begun():
            raise overloaded(
                503, "The server is starting; try again.", self._retry_after_s, "no_units"
            )

    def health(self, snapshot: FrontSnapshot) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the fields of /health for this snapshot of the front."""
        return health_of(
            self._deployment,
            snapshot,
            self._link.gateways,
            has_begun=self.has_begun(),
            is_draining=self._link.draining,
            wrong=self._run_status.wrong_nodes(),
        )
