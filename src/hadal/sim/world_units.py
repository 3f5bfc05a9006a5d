"""The units of a simulated world: a leader of the class that serves, and a Runner that prices its
steps.

What a deployment says of a unit is said to its leader here, as runtime/leader does live. Knows
neither wires nor requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from hadal.core.balance import OFF
from hadal.core.config import PREFILL, Deployment, units_of
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.plans import StepDone
from hadal.core.seams import RankReset
from hadal.kv.disk_index import DiskIndex
from hadal.perf.shapes import kv_bytes_per_token
from hadal.perf.step import StepModel
from hadal.roles.decode import DecodeLeader
from hadal.roles.prefill import PrefillLeader
from hadal.sim.clock import SimClock
from hadal.sim.process import Process
from hadal.sim.runners import DecodeRunner, OutputTokens, PrefillRunner
from hadal.sim.world_disk import View
from hadal.sim.world_seen import WorldLog

Runner = PrefillRunner | DecodeRunner

HBM_SHARE = 0.9
"""Of a GPU's memory for weights and KV; the rest is activations and communication buffers."""
FINGERPRINT = "simulated"
"""Of what decode names, where it writes to disk."""


def kv_blocks(model: StepModel) -> int:
    """Blocks of a rank's KV pool: what its memory has beside the weights. Raises ValueError if that
    is nothing.
    """
    free_bytes = HBM_SHARE * model.hardware.hbm_bytes - model.hbm_bytes(0)
    num_blocks = int(free_bytes // (BLOCK_TOKENS * kv_bytes_per_token(model.model)))
    if num_blocks < 2:
        raise ValueError(
            f"{model.hardware.name} has no memory left for KV with {model.num_slots} experts on a"
            " rank: units of more ranks have fewer."
        )
    return num_blocks


def prefill_leader(
    name: str, epoch: str, config: Deployment, model: StepModel, view: View, *, stores: bool
) -> PrefillLeader:
    """`view`: of the disk; `stores`: what is computed is written there."""
    units = units_of(config, PREFILL)
    leader = PrefillLeader(
        name,
        epoch,
        "",
        kv_blocks(model),
        chunk_tokens=config.chunk_tokens,
        num_requests_max=units.max_requests,
        num_waiting_max=units.max_waiting,
        lease_s=config.lease_s,
        heartbeat_s=config.heartbeat_s,
        num_ranks=units.ranks,
        overlap=units.overlap,
        min_split_tokens=units.min_split_tokens,
        num_layers=model.model.num_hidden_layers,
        num_moe_layers=model.num_moe_layers,
        request_balance=units.request_balance,
        keeps_blocks=config.cache.memory != OFF,
        has_disk=stores,
        recompute=config.cache.recompute,
        early_pull=config.early_pull,
    )
    leader.cache.stores.index = cast(DiskIndex, view)
    return leader


def decode_leader(
    name: str, epoch: str, config: Deployment, model: StepModel, max_context: int, *, stores: bool
) -> DecodeLeader:
    """`stores`: blocks that generated text fills are written to disk."""
    units = config.decode
    return DecodeLeader(
        name,
        epoch,
        kv_blocks(model),
        num_slots=units.max_requests,
        num_waiting_max=units.max_waiting,
        max_context=max_context,
        heartbeat_s=config.heartbeat_s,
        num_ranks=units.ranks,
        overlap=units.overlap,
        min_split_tokens=units.min_split_tokens,
        num_layers=model.model.num_hidden_layers,
        num_moe_layers=model.num_moe_layers,
        request_balance=units.request_balance,
        lease_s=config.lease_s,
        fingerprint=FINGERPRINT if stores else "",
    )


class SimUnit:
    """One life of a unit: which of its ranks live, and what its leader is told of that.

    `pools`: names of all pools there are, shared with the other units; `number`: new for each life
    of any unit.
    """

    def __init__(
        self,
        name: str,
        number: int,
        process: Process,
        runner: Runner,
        num_ranks: int,
        pools: set[str],
    ) -> None:
        self.name = name
        self.process = process
        self.runner = runner
        self.is_alive = True
        self._number = number
        self._pools = pools
        self._rank_to_pool = [""] * num_ranks
        """"": dead."""
        self._lost: set[int] = set()
        """Dead, and the leader does not know."""
        self._num_pools = 0
        self._generation = 0

    @property
    def num_living(self) -> int:
        return sum(map(bool, self._rank_to_pool))

    def begin(self) -> None:
        """All ranks are there."""
        self.come(range(len(self._rank_to_pool)))

    def lose(self, ranks: Iterable[int]) -> bool:
        """These die, and no step is done until `form`. Returns whether one of them lived."""
        dying = [rank for rank in ranks if self._rank_to_pool[rank]]
        if not dying or not self.is_alive:
            return False
        for rank in dying:
            self._pools.discard(self._rank_to_pool[rank])
            self._rank_to_pool[rank] = ""
        self._lost.update(dying)
        self.process.break_off(dying)
        return True

    def form(self) -> None:
        """Go on without those who died."""
        if self.is_alive and self._lost:
            self._form(())

    def come(self, ranks: Iterable[int]) -> None:
        """Ranks that are dead are back, with empty pools; what steps were in flight is done
        again.
        """
        fresh = tuple(rank for rank in ranks if not self._rank_to_pool[rank])
        if not fresh or not self.is_alive:
            return
        for rank in fresh:
            self._num_pools += 1
            self._rank_to_pool[rank] = f"{self.name}.{rank}.{self._number}.{self._num_pools}"
            self._pools.add(self._rank_to_pool[rank])
        self.process.break_off(())
        self._form(fresh)

    def end(self) -> None:
        """The leader dies, and its ranks with it."""
        self.is_alive = False
        self.process.end()
        self._pools.difference_update(self._rank_to_pool)

    def _form(self, fresh: tuple[int, ...]) -> None:
        self._generation += 1
        lost, self._lost = tuple(sorted(self._lost)), set()
        self.runner.formed(self.num_living)
        self.process.form(RankReset(lost, fresh, tuple(self._rank_to_pool), self._generation))


class LoggedRunner:
    """A unit's Runner, and a line in the log for every step."""

    def __init__(
        self, unit: str, role: str, runner: Runner, clock: SimClock, log: WorldLog
    ) -> None:
        self.runner = runner
        self._unit = unit
        self._clock = clock
        self._steps = log.steps[role]
        self._prefill_ranks = log.prefill_ranks

    def run(self, plans: Sequence[Any]) -> StepDone:
        """As the Runner does."""
        done = self.runner.run(plans)
        self._steps.append((self._unit, self._clock.now(), done.elapsed_s, self.runner.work))
        if isinstance(self.runner, PrefillRunner):
            self._prefill_ranks.append(self.runner.ranks)
        return done


def runner_of(
    role: str,
    model: StepModel,
    config: Deployment,
    output_tokens: OutputTokens,
    drafts: tuple[int, float],
) -> Runner:
    """`drafts`: how many in a step, and how often one is accepted (decode)."""
    if role == PREFILL:
        return PrefillRunner(model, output_tokens)
    return DecodeRunner(
        model, config.decode.max_requests, output_tokens, mtp_tokens=drafts[0], mtp_accept=drafts[1]
    )
