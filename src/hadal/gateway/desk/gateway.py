"""Parts of a gateway that its endpoints share; gateway/assembly makes them."""

from __future__ import annotations

from dataclasses import dataclass

from hadal.core.config import Deployment
from hadal.gateway.desk.cache_pages import CachePages
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.desk import Desk
from hadal.gateway.desk.kept import Responses
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.desk.metrics import Metrics
from hadal.gateway.desk.readiness import GatewayReadiness
from hadal.gateway.desk.service import Service
from hadal.gateway.desk.tenancy import Tenancy
from hadal.gateway.edge.intake import Intake
from hadal.gateway.edge.streams import Streams


@dataclass(frozen=True)
class Gateway:
    """One gateway of a deployment."""

    deployment: Deployment
    clock: GatewayClock
    created: int
    """Unix time at start, seconds."""
    service: Service
    link: FrontLink
    intake: Intake
    tenancy: Tenancy
    readiness: GatewayReadiness
    desk: Desk
    metrics: Metrics
    responses: Responses
    streams: Streams
    cache_pages: CachePages
    bound_host: str = ""
    """Address of the listening socket; "": unknown, and any Host header is accepted."""
