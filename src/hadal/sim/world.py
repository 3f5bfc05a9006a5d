"""A fleet at work in simulated time: one front, units of many ranks, all of them the roles that serve, priced steps.

    requests -> front <-> prefill-0 .. decode-0 ..      every arrow a wire with a delay; KV over the ranks' NICs

The same requests, deployment and models make the same run. What is simulated is what costs time: steps (sim/runners),
messages, KV on its way. Text is not: a prompt is a range of its length, and tokens are counted where they would be
delivered. There are no faults here, and no disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hadal.core.balance import OFF
from hadal.core.config import DECODE, PREFILL, ROLES, Deployment, units_of
from hadal.core.messages import BLOCK_TOKENS, Generation, Submit
from hadal.core.plans import Sampling
from hadal.core.seams import Deliver, Pull, RankReset
from hadal.core.wire import AnyMessage
from hadal.perf.shapes import kv_bytes_per_token
from hadal.perf.step import StepModel
from hadal.roles.decode import DecodeLeader
from hadal.roles.front import Front
from hadal.roles.prefill import PrefillLeader
from hadal.sim.clock import SimClock
from hadal.sim.process import Process, Role
from hadal.sim.runners import STOP_ID, DecodeRunner, PrefillRunner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HBM_SHARE = 0.9
"""Of a GPU's memory for weights and KV; the rest is activations and communication buffers."""


@dataclass(frozen=True)
class Requests:
    """What users ask for, in the order of arrival."""

    arrival_s: Floats
    tokens_in: Ints
    tokens_out: Ints
    """At which length the model draws its stop id."""

    def __post_init__(self) -> None:
        if not len(self.arrival_s) == len(self.tokens_in) == len(self.tokens_out):
            raise ValueError("requests need as many arrivals as lengths.")
        if (np.diff(self.arrival_s) < 0).any() or (np.concatenate([self.tokens_in, self.tokens_out]) < 1).any():
            raise ValueError("requests must come in the order of arrival, with at least one token in and out.")

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True)
class Seen:
    """What became of the requests, by request; NaN: it did not come to that."""

    first_token_s: Floats
    end_s: Floats
    is_failed: NDArray[np.bool_]


def kv_blocks(model: StepModel) -> int:
    """Blocks of a rank's KV pool: what its memory has beside the weights. Raises ValueError if that is nothing."""
    free_bytes = HBM_SHARE * model.hardware.hbm_bytes - model.hbm_bytes(0)
    num_blocks = int(free_bytes // (BLOCK_TOKENS * kv_bytes_per_token(model.model)))
    if num_blocks < 2:
        raise ValueError(f"{model.hardware.name} has no memory left for KV with {model.num_slots} experts on a rank.")
    return num_blocks


class FleetWorld:
    """One run. `models`: by role, whose ranks must be the deployment's. `max_context`: longest prompt and output.

    `wire_s`: a message's way. `look_s`: how long a process collects what arrives. `mtp_tokens`, `mtp_accept`: drafts in
    decode (sim/runners).
    """

    def __init__(
        self, config: Deployment, models: dict[str, StepModel], requests: Requests, *, max_context: int = 65_536,
        wire_s: float = 0.0005, look_s: float = 0.005, mtp_tokens: int = 0, mtp_accept: float = 0.0,
    ) -> None:  # fmt: skip
        for role in ROLES:
            if models[role].num_ranks != units_of(config, role).ranks:
                raise ValueError(f"the {role} model has {models[role].num_ranks} ranks, the deployment another number.")
        self.clock = SimClock()
        self.requests = requests
        self.processes: dict[str, Process] = {}
        size = len(requests)
        self.seen = Seen(np.full(size, np.nan), np.full(size, np.nan), np.zeros(size, np.bool_))
        self._config = config
        self._models = models
        self._max_context = max_context
        self._wire_s = wire_s
        self._look_s = look_s
        self._drafts = mtp_tokens, mtp_accept
        self._nic_free_s: dict[tuple[str, int], float] = {}
        """When a rank's NIC is done with what it pulls."""
        self._next = 0
        self.front = Front(config, epoch="front-0", max_context=max_context, keeps_text=False)
        self._start("front", self.front)
        for role in ROLES:
            for index in range(units_of(config, role).units):
                self._start_unit(f"{role}-{index}", role)
        if size:
            self.clock.at(float(requests.arrival_s[0]), self._submit)

    def run(self, until_s: float) -> None:
        """Let time pass."""
        self.clock.run(until_s)

    def check(self) -> list[str]:
        """Problems of all ledgers; empty when everything adds up."""
        problems = self.front.check()
        for name, process in self.processes.items():
            if isinstance(process.role, PrefillLeader | DecodeLeader):
                problems += [f"{name}: {problem}" for problem in process.role.audit()]
        return problems

    # ---- processes ----
    def _start(self, name: str, role: Role, runner: PrefillRunner | DecodeRunner | None = None) -> Process:
        process = self.processes[name] = Process(
            name, role, self.clock, self._send, look_s=self._look_s, runner=runner, deliver=self._deliver,
            pull_s=lambda effect: self._pull_s(name, effect),
        )  # fmt: skip
        process.start()
        return process

    def _start_unit(self, name: str, role: str) -> None:
        units, config, model = units_of(self._config, role), self._config, self._models[role]
        num_blocks, num_layers = kv_blocks(model), model.model.num_hidden_layers
        leader: PrefillLeader | DecodeLeader
        runner: PrefillRunner | DecodeRunner
        if role == PREFILL:
            leader = PrefillLeader(
                name, f"{name}-epoch", "", num_blocks, chunk_tokens=config.chunk_tokens,
                num_requests_max=units.max_requests, num_waiting_max=units.max_waiting, lease_s=config.lease_s,
                heartbeat_s=config.heartbeat_s, num_ranks=units.ranks, overlap=units.overlap,
                min_split_tokens=units.min_split_tokens, num_layers=num_layers, num_moe_layers=model.num_moe_layers,
                request_balance=units.request_balance, keeps_blocks=config.cache.memory != OFF,
                early_pull=config.early_pull,
            )  # fmt: skip
            runner = PrefillRunner(model, self._output_tokens)
        else:
            leader = DecodeLeader(
                name, f"{name}-epoch", num_blocks, num_slots=units.max_requests, num_waiting_max=units.max_waiting,
                max_context=self._max_context, heartbeat_s=config.heartbeat_s, num_ranks=units.ranks,
                overlap=units.overlap, min_split_tokens=units.min_split_tokens, num_layers=num_layers,
                num_moe_layers=model.num_moe_layers, request_balance=units.request_balance, lease_s=config.lease_s,
            )  # fmt: skip
            runner = DecodeRunner(
                model, units.max_requests, self._output_tokens, mtp_tokens=self._drafts[0], mtp_accept=self._drafts[1]
            )
        process = self._start(name, leader, runner)
        ranks = tuple(range(units.ranks))
        pools = tuple(f"{name}.{rank}" for rank in ranks)
        process.handle(RankReset((), ranks, pools, generation=1))

    # ---- wires ----
    def _send(self, to: str, message: AnyMessage) -> None:
        process = self.processes.get(to)
        if process is not None:  # There is no supervisor.
            self.clock.after(self._wire_s, lambda: process.post(message))

    def _pull_s(self, name: str, effect: Pull) -> float:
        """Until a copy has arrived: one behind the other over the NIC of the rank that pulls."""
        model = self._models[DECODE]
        num_bytes = effect.lease.num_tokens * kv_bytes_per_token(model.model)
        now_s, key = self.clock.now(), (name, effect.rank)
        free_s = max(self._nic_free_s.get(key, 0.0), now_s) + num_bytes / model.hardware.nic_bytes_per_s
        self._nic_free_s[key] = free_s
        return free_s - now_s + self._wire_s

    # ---- requests ----
    def _output_tokens(self, number: int) -> int:
        return int(self.requests.tokens_out[number])

    def _submit(self) -> None:
        number, requests = self._next, self.requests
        self._next += 1
        prompt = cast("tuple[int, ...]", range(int(requests.tokens_in[number])))
        most = self._max_context - len(prompt)
        self.processes["front"].handle(Submit(Generation(
            str(number), prompt, (), max(most, 1), (STOP_ID,), 0, Sampling(seed=number), 0
        )))  # fmt: skip
        if self._next < len(requests):
            self.clock.at(float(requests.arrival_s[self._next]), self._submit)

    def _deliver(self, deliver: Deliver) -> None:
        number, now_s = int(deliver.request_id), self.clock.now()
        if deliver.tokens and np.isnan(self.seen.first_token_s[number]):
            self.seen.first_token_s[number] = now_s
        if deliver.final:
            self.seen.end_s[number] = now_s
            self.seen.is_failed[number] = deliver.error is not None

