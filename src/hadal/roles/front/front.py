"""The front (request router) owns every request from Submit to its last Deliver.

It sends requests through prefill and decode, and keeps all that a stream needs to continue on
another unit: the prompt and every token so far. A lost unit therefore costs a request only time:
RETRYING -> QUEUED, at its old place in the queue, then prefilled again with the tokens already
streamed. Messages of older attempts are answered so that their sender frees them. Independent of
tokenizers, HTTP and processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from hadal.core.config import DECODE, ROLES, Deployment, units_of
from hadal.core.errors import InvariantError
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.fleet import DrainUnit, KeepUnit
from hadal.core.messages.generation import Deliver, Generation, PrefixSources, Token
from hadal.core.messages.requests import Charged, Counted, Quotas, RejectedEarly, Spent, Submit
from hadal.core.messages.snapshot import FrontSnapshot, Totals
from hadal.core.messages.units import (
    Cached,
    Cancel,
    Decode,
    Drain,
    Filled,
    FrontUp,
    LeaderDown,
    Prefill,
    PrefillDone,
    Pulled,
    Release,
    Resume,
    Returned,
    Sighting,
    Stop,
    Suspect,
    Tokens,
    UnitDown,
    UnitReport,
    UnitUp,
)
from hadal.core.plans import NO_TOKEN, NOT_FINITE, Score
from hadal.core.request import State, Transition
from hadal.core.seams import Effect, Event, Send, Tick
from hadal.kv.blocks import blocks_for
from hadal.policy.admission import Refusal, refuse_lengths
from hadal.policy.fairness import (
    INPUT_COST,
    OUTPUT_COST,
    ServiceCounters,
    is_batch,
    tenant_to_requeue,
)
from hadal.roles.front.admission import FrontAdmission
from hadal.roles.front.alarm import Alarm
from hadal.roles.front.fleet import FrontFleet
from hadal.roles.front.names import FrontNames
from hadal.roles.front.record import Record
from hadal.roles.front.requests import FrontRequests
from hadal.roles.front.routing import RequestRouting
from hadal.roles.front.tenants import FrontTenants
from hadal.roles.front.tokens import FrontTokens
from hadal.roles.front.unit import Unit
from hadal.roles.front.units import FrontUnits
from hadal.roles.reasons import BACKOFF_MAX_S, BACKOFF_S, PREEMPTED, answer_to, kind_of

RESERVE_S = 90.0
"""Seconds after a request's end during which its highest possible cost stays reserved. The gateway
sends the actual cost when the HTTP request ends, which a slow reader may delay by up to a minute.
"""
RESUME_BATCH = 64
"""Requests per Resume message."""
CLOSED_STATUS = 499
"""nginx's HTTP status for a client that closed its connection."""
NOT_FINITE_STATUS = 422
"""HTTP status that clients do not retry, since every attempt computes the same numbers."""


class Front:
    """Request router of one deployment. `epoch` is new at every start. `max_context` is the model's
    limit for prompt and output together. `fingerprint` identifies the KV of units that report none,
    and is used until a unit is up (UnitUp). Without `keeps_text`, tokens are counted and not
    stored: for simulations without text.
    """

    def __init__(
        self,
        config: Deployment,
        *,
        epoch: str,
        max_context: int,
        fingerprint: str = "",
        keeps_text: bool = True,
    ) -> None:
        self._out: list[Effect] = []
        self._keeps_text = keeps_text
        self.requests = FrontRequests(counters=ServiceCounters(config.limits.burst_tokens))
        self.units = FrontUnits(config.unit_timeout_s, config.heartbeat_s, fingerprint)
        self.names = FrontNames(config.cache, fingerprint)
        self.totals = Totals()
        self.routing = RequestRouting(self.requests, self.units, config.limits, max_context)
        self.tenants = FrontTenants(RESERVE_S)
        self.admission = FrontAdmission(self.requests, self.tenants, self.routing, self.totals)
        self.tokens = FrontTokens(
            self.requests, self.units, self.tenants, self.totals, epoch=epoch, keeps_text=keeps_text
        )
        self.fleet = FrontFleet(
            self.requests,
            self.units,
            self.totals,
            epoch,
            config.heartbeat_s,
            self._out,
            is_followed=config.fleet.is_on,
        )
        self._config = config
        self._epoch = epoch
        self._alarm = Alarm(config.heartbeat_s)

    @property
    def idle(self) -> bool:
        """True if no request is open: each has had its last Deliver."""
        return not self.requests.by_id

    def start(self, now_s: float) -> list[Effect]:
        """Return the first effects. FrontUp makes units that outlived the previous front free
        everything that they hold for it.
        """
        self._out[:] = [
            Send(f"{role}-{index}", FrontUp(self._epoch))
            for role in ROLES
            for index in range(self._config.num_units_max(role))
        ]
        self._out += self._alarm.set(now_s, self.requests.next_retry_s)
        return [*self._out]

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        """Process events in order, and return the effects in order."""
        self._out.clear()
        self.units.called(now_s)
        for event in events:
            self._take(now_s, event)
            self._place(now_s)
        self._out += self._alarm.set(now_s, self.requests.next_retry_s)
        return [*self._out]

    def _take(self, now_s: float, event: Event) -> None:
        match event:
            case Tokens():
                self._tokens(now_s, event)
            case UnitReport():
                self._load(now_s, event)
            case Cached():
                self.units.cached(event)
            case Submit():
                self._submit(now_s, event)
            case Charged():
                self.tenants.charged(now_s, event)
            case Counted(tenant, num_tokens):
                self.tenants.draw(now_s, tenant, num_tokens)
            case Quotas():
                self.tenants.set(now_s, event)
            case Spent():
                self.tenants.read(now_s, event)
            case RejectedEarly(num_generations, num_tokens):
                self.admission.count_rejected(num_generations, num_tokens)
            case PrefillDone():
                self._prefill_done(now_s, event)
            case Pulled(unit, request_id, attempt):
                self._pulled(unit, request_id, attempt)
            case Filled():
                if (taker := self.units.taker_of(event)) is not None:
                    self._send(taker, event)
            case Returned():
                self._returned(now_s, event)
            case Cancel(request_id):
                record = self.requests.by_id.get(request_id)
                if record is not None:
                    self._fail(record, "cancelled: the client went away", CLOSED_STATUS)
            case UnitUp():
                self._unit_up(now_s, event)
            case Sighting():
                self.units.suspects.sighted(now_s, event)
            case UnitDown(unit, reason):
                self._unit_down(now_s, unit, reason)
            case LeaderDown(unit, reason):
                self._leader_down(now_s, unit, reason)
            case Drain():
                self.admission.drain()
            case DrainUnit() | KeepUnit():
                self.fleet.handle(now_s, event)
            case Tick():
                self._tick(now_s)
            case _:
                raise InvariantError(f"the front cannot handle {type(event).__name__}")

    # ---- new requests ----
    def _submit(self, now_s: float, submit: Submit) -> None:
        generation = submit.generation
        request_id = generation.request_id
        if request_id in self.requests.by_id:
            raise InvariantError(f"the request id {request_id} is in use.")
        self.totals.submitted += 1
        error = refuse_lengths(
            len(generation.prompt),
            len(generation.output),
            generation.max_tokens,
            self.routing.max_context,
        )
        if error is not None:
            self.totals.refused += 1
            self._out.append(Deliver(request_id, (), True, error, 400))
            return
        refusal = None if submit.is_admitted else self.admission.submit_refusal(now_s, submit)
        if refusal is not None:
            # A quota refusal is no unserved demand: more units would not help.
            self.admission.count_refused(1, len(generation.prompt) if refusal.is_for_room else 0)
            self._out.append(refused(request_id, refusal))
            return
        self.totals.tokens_in += len(generation.prompt)
        generation = msgspec.structs.replace(generation, arrived_s=now_s)
        self.requests.add(
            generation, self._config.limits.request_timeout_s, keeps_text=self._keeps_text
        )
        tenant = generation.tenant
        self.tenants.begin(now_s, request_id, tenant, len(generation.prompt), submit.most_pico_usd)
        limits = self.tenants.limits(now_s, tenant, self.requests.tenant_to_open[tenant])
        if limits is not None:
            self._out.append(Deliver(request_id, (), limits=limits))

    def unread(self) -> tuple[str, ...]:
        """Return tenants with a daily budget but no Spent yet: their requests are refused until then."""
        return self.tenants.unread()

    # ---- forward: queue -> prefill -> decode -> end ----
    def _place(self, now_s: float) -> None:
        """Send queued requests to prefill, in order, while prefill and decode have capacity."""
        while (record := self.requests.next_queued(now_s)) is not None:
            if (error := self.routing.fit(record)) is not None:
                self._fail(record, error, 400)
                continue
            if is_batch(record.generation.tenant) and self.admission.batch_refusal() is not None:
                return  # Batches are last in the order: nothing else is queued behind one.
            chosen = self._choose_prefill(record)
            if chosen is None:
                if self._give_way(now_s, record):
                    continue
                return  # Requests behind it wait too: none overtakes.
            self.requests.move(record, Transition.PLACE)
            unit, record.num_cached, record.num_elsewhere = chosen
            self.requests.charge_prompt(record)
            record.prefill_unit = unit
            record.last_units = unit, ""
            self.units.sent_to_prefill(unit, record)
            self._send(unit, Prefill(self._current(record)))

    def _give_way(self, now_s: float, record: Record) -> bool:
        """Preempt requests so that an interactive one can start. Choose batch requests if
        preempting them suffices, else one request of a tenant above its share. Return True if any
        was preempted.
        """
        tenant = record.generation.tenant
        if is_batch(tenant) or not self.requests.has_others_placed(tenant):
            return False
        giving = self.routing.in_the_way(record)
        is_enough = record.num_blocks_taken >= blocks_for(record.num_tokens + 1)
        if not giving and not is_enough:
            one = self._beyond_share(now_s, record, lambda r: r.fingerprint == record.fingerprint)
            giving = [] if one is None else [one]
        for one in giving:
            self._put_back(one)
            record.num_blocks_taken += one.num_blocks
        return bool(giving)

    def _take_slot(self, now_s: float, record: Record, unit: Unit) -> None:
        """Preempt a running request if the unit has no slot for a prefilled one: the latest batch
        request, else one of a tenant above its share. The slot is free immediately, or two steps
        later if a plan in flight computes the preempted request.
        """
        tenant, requests = record.generation.tenant, self.requests
        if unit.num_requests <= unit.num_requests_max or is_batch(tenant):
            return

        def is_running(other: Record) -> bool:
            return other.state is State.DECODING and other.decode_unit == unit.name

        one = next(filter(is_running, reversed(requests.placed_of_batches())), None)
        if one is None and requests.has_others_placed(tenant):
            one = self._beyond_share(now_s, record, is_running)
        if one is not None:
            self._put_back(one)

    def _put_back(self, record: Record) -> None:
        self._let_go(record)
        self._requeue(record)
        self.totals.requeued += 1

    def _beyond_share(
        self, now_s: float, record: Record, may_go: Callable[[Record], bool]
    ) -> Record | None:
        """Return the request to preempt for this one, of a tenant above its share, or None."""
        requests, totals = self.requests, self.totals
        asking = requests.tenant_view(record.generation.tenant)
        if record.state is not State.QUEUED:
            asking = replace(asking, num_placed=asking.num_placed - 1)
        others = [
            requests.tenant_view(tenant)
            for tenant in requests.tenant_to_placed
            if tenant != asking.tenant and not is_batch(tenant)
        ]
        tokens_each = totals.tokens_out / max(1, totals.finished)
        cost = INPUT_COST * len(record.generation.prompt) + OUTPUT_COST * tokens_each
        ends_per_step = self.admission.ends_per_s(now_s) * self.units.decode_step_s()
        tenant = tenant_to_requeue(asking, others, cost / record.share_weight, ends_per_step)
        return None if tenant is None else requests.last_of(tenant, may_go)

    def _choose_prefill(self, record: Record) -> tuple[str, int, int] | None:
        """Bind a request to the first fingerprint with a prefill unit that can start it now. Return
        that unit, the positions it has cached and the most of another unit, or None.
        """
        for fingerprint in self.routing.fingerprints(record):
            record.bind(fingerprint)
            self._name(record)
            chosen = self.routing.prefill_unit(record)
            if chosen is not None:
                return chosen
        return None

    def _name(self, record: Record) -> None:
        record.generation = self.names.named(record.generation, record.output, record.fingerprint)

    def _current(self, record: Record) -> Generation:
        self._name(record)
        output = tuple(record.output) if self._keeps_text else range(record.num_output)
        return msgspec.structs.replace(record.generation, output=output, attempt=record.attempt)

    def _prefill_done(self, now_s: float, done: PrefillDone) -> None:
        token = done.token
        record = self._record(token.request_id, token.attempt)
        if record is None or record.prefill_unit != done.unit:
            if done.lease is not None:
                self._send(done.unit, Release(token.request_id, token.attempt))
            return
        if record.state is not State.PREFILLING:
            return  # A duplicate message.
        if token.index != record.num_output:
            self._let_go(record)
            self._retry(
                now_s, record, f"{done.unit} drew token {token.index}, not {record.num_output}"
            )
            return
        self.units.left_prefill(done.unit, record)
        num_cached = self._count_hits(record, done.num_cached)
        sources = _sources_of(record, done)
        self.totals.tokens_out += 1
        if self._keeps_text:
            record.output.append(token.token)
        self.requests.grow(record)
        self.tenants.draw(now_s, record.generation.tenant, 1)
        if done.lease is None:
            record.prefill_unit = None
            self._let_go(record)
            self._finish(now_s, record, (token,), num_cached, done.scores, sources)
            return
        self._out.append(
            Deliver(
                record.request_id,
                (token,),
                num_cached=num_cached,
                scores=done.scores,
                sources=sources,
            )
        )
        self.requests.move(record, Transition.FIRST_TOKEN)
        unit = self.routing.decode_unit(record)
        if unit is None:
            self._let_go(record)
            self._retry(now_s, record, "no decode unit", is_counted=False, delay_s=BACKOFF_S)
            return
        record.decode_unit = unit
        record.last_units = record.last_units[0], unit
        self.units.sent_to_decode(unit, record.num_blocks)
        attempt_id = self.requests.running.enter(record)
        generation = msgspec.structs.replace(self._current(record), attempt_id=attempt_id)
        service = self.requests.counters[generation.tenant]
        self._send(unit, Decode(generation, done.lease, service))
        # Decode is sent before Cancel: a unit gives a freed slot to a request that it has queued.
        self._take_slot(now_s, record, self.units.by_name[unit])

    def _count_hits(self, record: Record, num_cached: int) -> int:
        """Count and return the prompt tokens found in the cache; 0 if a token was drawn before,
        since an earlier attempt was counted then.
        """
        if record.num_output > len(record.generation.output):
            return 0
        num_prompt = len(record.generation.prompt)
        num_hit = min(num_cached, num_prompt)
        self.totals.tokens_hit += num_hit
        self.totals.tokens_miss += num_prompt - num_hit
        return num_hit

    def _pulled(self, unit: str, request_id: str, attempt: int) -> None:
        record = self._record(request_id, attempt)
        if record is None or record.decode_unit != unit:
            self._send(unit, Cancel(request_id, attempt))
        elif record.state is State.TRANSFERRING:
            assert record.prefill_unit is not None
            self._send(record.prefill_unit, Release(request_id, attempt))
            record.prefill_unit = None
            self.requests.running.pulled(record)
            self.requests.move(record, Transition.PULLED)

    def _tokens(self, now_s: float, message: Tokens) -> None:
        for record in self.tokens.early(message):
            self._pulled(message.unit, record.request_id, record.attempt)
        came = self.tokens.take(now_s, message)
        self._out += came.delivers
        for record, tokens in came.ended:
            self._finish(now_s, record, tokens)
        for record in came.gaps:
            self._let_go(record)
            self._retry(now_s, record, f"{message.unit} left out a token after {record.num_output}")
        if came.unknown:
            self._send(message.unit, Stop(came.unknown))

    def _finish(
        self,
        now_s: float,
        record: Record,
        tokens: tuple[Token, ...],
        num_cached: int = 0,
        scores: tuple[Score, ...] = (),
        sources: PrefixSources | None = None,
    ) -> None:
        self.requests.move(record, Transition.FINISH)
        self.tenants.ended(record.request_id)
        self.totals.finished += 1
        self.admission.ended(now_s)
        self._out.append(
            Deliver(
                record.request_id,
                tokens,
                True,
                num_cached=num_cached,
                closing=record.closing,
                scores=scores,
                sources=sources,
            )
        )

    # ---- back: requests lost, returned or failed ----
    def _returned(self, now_s: float, returned: Returned) -> None:
        record = self._record(returned.request_id, returned.attempt)
        if record is None or returned.unit not in (record.prefill_unit, record.decode_unit):
            return  # The unit holds nothing of the current attempt, and has freed the returned one.
        self._let_go(record, lost=returned.unit)
        is_final, is_counted, delay_s = answer_to(returned.reason, record.num_retries)
        if is_final:
            if kind_of(returned.reason) == NOT_FINITE:
                self._fail(
                    record,
                    f"the model's weights are damaged or overflow on {returned.unit}"
                    f" ({returned.reason}). The same request fails again; tell the server's operator.",
                    NOT_FINITE_STATUS,
                )
            elif kind_of(returned.reason) == NO_TOKEN:
                self._fail(
                    record, f"no token can be drawn for this request ({returned.reason}).", 422
                )
            else:
                self._fail(
                    record, f"the request does not fit in {returned.unit} ({returned.reason}).", 400
                )
            return
        self.totals.preemptions += kind_of(returned.reason) == PREEMPTED
        self._retry(
            now_s,
            record,
            f"{returned.unit}: {returned.reason}",
            is_counted=is_counted,
            delay_s=delay_s,
        )

    def _let_go(self, record: Record, lost: str | None = None) -> None:
        """Release a request on its units. `lost` is a unit that has released it already."""
        prefill_unit, decode_unit = record.prefill_unit, record.decode_unit
        self.requests.running.leave(record)
        record.prefill_unit = record.decode_unit = None
        if prefill_unit is not None:
            if record.state is State.PREFILLING:
                self.units.left_prefill(prefill_unit, record)
            if prefill_unit != lost:
                self._send(prefill_unit, Release(record.request_id, record.attempt))
        if decode_unit is not None:
            self.units.left_decode(decode_unit, record.num_blocks)
            if decode_unit != lost:
                self._send(decode_unit, Cancel(record.request_id, record.attempt))

    def _retry(
        self,
        now_s: float,
        record: Record,
        reason: str,
        *,
        is_counted: bool = True,
        delay_s: float = 0.0,
    ) -> None:
        """Requeue a request as a new attempt at its old place; end it after max_retries retries."""
        self.totals.retries += 1
        record.num_retries += is_counted
        if record.num_retries > self._config.limits.max_retries:
            self._fail(
                record,
                f"given up after {self._config.limits.max_retries} retries; the last: {reason}.",
                503,
            )
            return
        if delay_s:
            record.not_before_s = now_s + delay_s
            self._alarm.retry_at(record.not_before_s)
        self._requeue(record)

    def _requeue(self, record: Record) -> None:
        """Requeue a request that its units have released, as a new attempt."""
        self.requests.move(record, Transition.LOSE)
        record.attempt += 1
        self.requests.move(record, Transition.REQUEUE)

    def _fail(self, record: Record, error: str, status: int) -> None:
        """End a request with an error."""
        self._let_go(record)
        self.requests.move(record, Transition.CANCEL)
        self.tenants.ended(record.request_id)
        if status == CLOSED_STATUS:
            self.totals.cancelled += 1
        else:
            self.totals.failed += 1
        retry_after_s = BACKOFF_MAX_S if status == 503 else None
        closing = record.closing
        self._out.append(
            Deliver(record.request_id, (), True, error, status, retry_after_s, closing=closing)
        )

    # ---- units start and end ----
    def _load(self, now_s: float, load: UnitReport) -> None:
        unit = self.units.by_name.get(load.unit)
        if unit is None or unit.epoch != load.epoch:
            # The unit has not sent UnitUp, or this is a late report of an ended process. FrontUp
            # makes the unit answer with UnitUp.
            self._send(load.unit, FrontUp(self._epoch))
            return
        self.units.update(unit, load, now_s)

    def _unit_up(self, now_s: float, message: UnitUp) -> None:
        unit = self.units.by_name.get(message.unit)
        if unit is not None and unit.epoch == message.epoch:
            unit.seen_s = now_s
            return
        # Sent before any work: a unit frees everything at the first FrontUp of a new front, so a
        # later FrontUp would lose work that this front has sent.
        self._send(message.unit, FrontUp(self._epoch))
        is_successor = unit is not None and (unit.orphan_s is not None or bool(message.held))
        if (
            unit is not None
            and is_successor
            and unit.fingerprint == self.units.fingerprint_of(message)
        ):
            self.units.succeeded(unit, message, now_s)
            self._resume(now_s, message)
            return
        if unit is not None:
            self._unit_down(now_s, message.unit, "restarted")
        self.units.add(message, now_s)
        self._choose_names()
        if message.held:
            self._send(message.unit, Resume((), is_last=True))

    def _resume(self, now_s: float, message: UnitUp) -> None:
        """Resume attempts that a unit's ranks hold under a new leader, each from its last delivered
        token. Retry the unit's other requests.
        """
        held, going = set(message.held), []
        for record in self.requests.on_unit(message.unit):
            if (
                record.state is State.DECODING
                and (attempt_id := self.requests.running.attempt_id_of(record)) in held
            ):
                self.requests.running.sync(record)
                going.append(msgspec.structs.replace(self._current(record), attempt_id=attempt_id))
            else:
                self._let_go(record, lost=message.unit)
                self._retry(now_s, record, f"{message.unit}: its leader was lost")
        for first in range(0, max(len(going), 1), RESUME_BATCH):
            part = tuple(going[first : first + RESUME_BATCH])
            self._send(message.unit, Resume(part, is_last=first + RESUME_BATCH >= len(going)))

    def _leader_down(self, now_s: float, name: str, reason: str) -> None:
        """Handle the loss of a leader while its ranks live and await a successor. Decode requests
        wait for it, since their KV is still there; other requests are retried, which is as fast.
        """
        unit = self.units.by_name.get(name)
        if unit is None or unit.role != DECODE:
            self._unit_down(now_s, name, reason)
            return
        self.units.orphaned(unit, now_s)
        for record in self.requests.on_unit(name):
            if record.state is not State.DECODING:
                self._let_go(record, lost=name)
                self._retry(now_s, record, f"{name}: {reason}")

    def _unit_down(self, now_s: float, name: str, reason: str) -> None:
        """Remove a lost unit and retry its requests: on other units, or on its next process."""
        self.units.remove(name)
        self._choose_names()
        for record in self.requests.on_unit(name):
            self._let_go(record, lost=name)
            self._retry(now_s, record, f"{name}: {reason}")

    def _choose_names(self) -> None:
        """Name arriving prompts under the fingerprint that would serve them now, so that the
        gateway can compute the names outside the front's thread.
        """
        self.names.fingerprint = next(iter(self.units.serving()), self.names.fingerprint)

    # ---- time ----
    def _tick(self, now_s: float) -> None:
        self.tenants.tick(now_s)
        for record in self.requests.overdue(now_s):
            timeout_s = self._config.limits.request_timeout_s
            if record.state is State.QUEUED:
                self._fail(record, f"no unit could take the request within {timeout_s:g} s.", 503)
            else:
                self._fail(record, f"the request waited {timeout_s:g} s for a token.", 504)
        for name, reason in self.units.frozen(now_s):
            self._send(SUPERVISOR, UnitDown(name, reason))
            # With more than one rank the leader is a separate process, so its ranks may live.
            if units_of(self._config, self.units.by_name[name].role).ranks > 1:
                self._leader_down(now_s, name, reason)
            else:
                self._unit_down(now_s, name, reason)
        for name in self.units.late_orphans(now_s):
            self._unit_down(now_s, name, "no new leader took over its ranks")
        for name in self.units.suspects.to_ask(now_s):
            self._send(SUPERVISOR, Suspect(name))
        for name in self.fleet.overdue(now_s):
            for record in self.requests.on_unit(name):
                self._let_go(record)
                self._retry(now_s, record, f"{name} is drained", is_counted=False)
        self.fleet.report(now_s)

    # ---- views ----
    def _record(self, request_id: str, attempt: int) -> Record | None:
        """Return the open request if `attempt` is its current attempt, else None."""
        record = self.requests.by_id.get(request_id)
        return record if record is not None and record.attempt == attempt else None

    def _send(self, to: str, message: AnyMessage) -> None:
        self._out.append(Send(to, message))

    def snapshot(self) -> FrontSnapshot:
        """Return the state shown by /metrics and /health."""
        states = {state.value: count for state, count in self.requests.counts.items()}
        roles = {
            role: {unit.name: unit.num_ranks for unit in self.units.of_role(role)} for role in ROLES
        }
        return FrontSnapshot(
            self.admission.is_draining,
            states,
            self.units.loads(),
            roles,
            msgspec.structs.replace(self.totals),
            {unit.name: unit.fingerprint for unit in self.units.by_name.values()},
            self.names.fingerprint,
        )

    def check(self) -> list[str]:
        """Return problems of the front's tables; empty if requests, units and sums agree."""
        return [
            *self.requests.check(),
            *self.units.check(list(self.requests.placed())),
            *self.tenants.check(),
        ]


def _sources_of(record: Record, done: PrefillDone) -> PrefixSources | None:
    """Return the places of a prompt's unused KV; None if there is none."""
    num_elsewhere = record.num_elsewhere if record.num_elsewhere > done.num_cached else 0
    if not (done.num_recomputed or num_elsewhere):
        return None
    return PrefixSources(done.num_recomputed, num_elsewhere)


def refused(request_id: str, refusal: Refusal) -> Deliver:
    """Return the only delivery of a rejected generation."""
    return Deliver(
        request_id,
        (),
        True,
        refusal.reason,
        refusal.status,
        refusal.retry_after_s or None,
        limits=refusal.limits,
        error_code=refusal.code,
    )
