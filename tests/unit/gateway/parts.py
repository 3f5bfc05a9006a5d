"""A gateway made of the real parts, around a front link that the test provides."""

from hadal.core.config import Deployment
from hadal.gateway.desk.auth import Keys
from hadal.gateway.desk.cache_pages import PATH as CACHE_PATH
from hadal.gateway.desk.cache_pages import CachePages
from hadal.gateway.desk.clock import GatewayClock
from hadal.gateway.desk.desk import Desk
from hadal.gateway.desk.front_pages import COUNTS, pages_of
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.host import Host
from hadal.gateway.desk.kept import PATH, Responses, kept_responses
from hadal.gateway.desk.link import FrontLink
from hadal.gateway.desk.metrics import Metrics
from hadal.gateway.desk.readiness import GatewayReadiness
from hadal.gateway.desk.run_status import RunStatus
from hadal.gateway.desk.service import Service
from hadal.gateway.desk.tenancy import Tenancy
from hadal.gateway.edge.intake import Intake, Patience
from hadal.gateway.edge.streams import Streams
from hadal.runtime.topology import GATEWAY, gateway_names


def gateway_with(
    link: FrontLink,
    service: Service,
    deployment: Deployment,
    clock: GatewayClock,
    *,
    label: str = "",
    has_ledger: bool = False,
    keys: Keys | None = None,
    patience: Patience | None = None,
    bound_host: str = "",
    was_ready: bool = False,
) -> Gateway:
    """Return a gateway that charges nothing. `label`: its name in the metrics."""
    patience, names = patience or Patience(), tuple(gateway_names(deployment))
    metrics = Metrics(link.snapshot, gateway=label)
    run_status = RunStatus()
    gateway = Gateway(
        deployment=deployment,
        clock=clock,
        created=1,
        service=service,
        link=link,
        intake=Intake(service.limits, patience),
        tenancy=Tenancy(
            keys or Keys(),
            link,
            clock,
            has_ledger=has_ledger,
            retain=service.explainer.retain if service.explainer is not None else None,
        ),
        readiness=GatewayReadiness(deployment, link, run_status, patience, was_ready=was_ready),
        desk=Desk(service, link, metrics, None, clock, patience),
        metrics=metrics,
        responses=Responses(kept_responses(deployment.gateway, clock.now), link, GATEWAY, names),
        streams=Streams(clock.now),
        cache_pages=CachePages(service.explainer, link, GATEWAY),
        bound_host=bound_host,
    )
    link.pages.table[PATH] = gateway.responses.page
    link.pages.table[CACHE_PATH] = gateway.cache_pages.page
    if isinstance(link, Host):
        link.pages.table |= pages_of(gateway, link, run_status)
    else:
        link.pages.table[COUNTS] = metrics.counted
    return gateway
