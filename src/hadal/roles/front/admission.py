"""Admission of generations to the front: refusals by quota, queue and drain, and the refused
demand.

Fills the snapshots for `policy/admission`, which decides with `policy/quotas`. Sends nothing, and
does not queue admitted requests.
"""

from __future__ import annotations

from hadal.core.messages.requests import Submit
from hadal.core.messages.snapshot import Totals
from hadal.policy.admission import Refusal, admit, admit_batch
from hadal.policy.fairness import is_batch
from hadal.policy.views import AdmissionView
from hadal.roles.front.requests import FrontRequests
from hadal.roles.front.routing import RequestRouting
from hadal.roles.front.tenants import FrontTenants
from hadal.roles.unit.meters import RateMeter


class FrontAdmission:
    """Admission decisions from the front's tables; the only one that it changes is `totals`."""

    def __init__(
        self,
        requests: FrontRequests,
        tenants: FrontTenants,
        routing: RequestRouting,
        totals: Totals,
    ) -> None:
        self.is_draining = False
        """True while the front shuts down: it admits no more requests."""
        self._finished = RateMeter()
        """Rate of finished requests, which is the speed of the queue."""
        self._requests = requests
        self._tenants = tenants
        self._routing = routing
        self._totals = totals

    def drain(self) -> None:
        """Admit no more requests: the front shuts down."""
        self.is_draining = True

    def ended(self, now_s: float) -> None:
        """Count a request that finished."""
        self._finished.count(now_s)

    def ends_per_s(self, now_s: float) -> float:
        """Return how many requests finish per second."""
        return self._finished.per_s(now_s)

    def refusal(
        self,
        now_s: float,
        tenant: str,
        num_wanted: int,
        num_tokens: int = 0,
        most_pico_usd: int = 0,
    ) -> Refusal | None:
        """Return why a tenant's next `num_wanted` generations are all refused; None if they are
        admitted. Changes nothing. A check before submission avoids starting some generations and
        then aborting all. `num_tokens`: total of their prompts, 0 before these are read;
        `most_pico_usd`: total of their highest costs.
        """
        return self._quota_refusal(
            now_s, tenant, num_wanted, num_tokens, most_pico_usd
        ) or self._admit(
            now_s, tenant, num_wanted, 0 if self._requests.num_waiting else self._routing.num_free()
        )

    def submit_refusal(self, now_s: float, submit: Submit) -> Refusal | None:
        """Return why a generation not checked by `refusal` is refused; None if it is admitted."""
        generation = submit.generation
        # A free place matters only if nothing may be queued (max_queued is 0): only then call
        # has_room.
        may_hold_none = self._routing.limits.max_queued == self._requests.num_waiting == 0
        is_placeable = may_hold_none and self._routing.has_room(generation)
        return self._quota_refusal(
            now_s, generation.tenant, 1, len(generation.prompt), submit.most_pico_usd
        ) or self._admit(now_s, generation.tenant, 1, int(is_placeable))

    def counting_refusal(self, now_s: float, tenant: str) -> Refusal | None:
        """Return why a request to count a prompt's tokens is refused; None if its tenant has tokens
        left or no limit on them. Changes nothing.
        """
        return self._tenants.counting_refusal(now_s, tenant, self._requests.tenant_to_open[tenant])

    def batch_refusal(self) -> Refusal | None:
        """Return why a batch's next request is refused; None if it may start now."""
        return admit_batch(self._routing.spare(self.is_draining))

    def count_rejected(self, num_generations: int, num_tokens: int) -> None:
        """Count generations that were rejected before they were submitted."""
        totals = self._totals
        num_let_in = totals.submitted - totals.refused
        totals.submitted += num_generations
        # Prompts that were not read count with the mean length of admitted ones.
        self.count_refused(
            num_generations, num_tokens or num_generations * totals.tokens_in // max(1, num_let_in)
        )

    def count_refused(self, num_generations: int, num_tokens: int) -> None:
        """Count refused generations, and the tokens of their prompts as unserved demand."""
        self._totals.refused += num_generations
        if not self.is_draining:  # A drain refuses without a lack of capacity.
            self._totals.tokens_refused += num_tokens

    def _quota_refusal(
        self, now_s: float, tenant: str, num_wanted: int, num_tokens: int, most_pico_usd: int
    ) -> Refusal | None:
        num_open = self._requests.tenant_to_open[tenant]
        return self._tenants.refusal(now_s, tenant, num_open, num_wanted, num_tokens, most_pico_usd)

    def _admit(
        self, now_s: float, tenant: str, num_wanted: int, num_placeable: int
    ) -> Refusal | None:
        if is_batch(tenant):
            return self.batch_refusal()
        return admit(
            AdmissionView(
                self.is_draining,
                num_placeable,
                self._requests.num_queued_of(tenant),
                self._routing.limits.max_queued,
                self._finished.per_s(now_s),
                num_wanted,
                self._requests.num_tenants_with(tenant),
            )
        )
