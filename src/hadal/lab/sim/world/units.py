"""Units of a simulated world: the server's own leader (scheduler), and a Runner that prices its
steps.

The leader is made as a live one is (roles/leaders), from a deployment with KV pools as large as the
hardware allows. Does not depend on wires or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hadal.core.balance import OFF
from hadal.core.config import DECODE, PREFILL, ROLES, Deployment, num_drafts_max, units_of
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import StepDone
from hadal.core.seams import RankReset
from hadal.lab.perf.step import StepModel
from hadal.lab.sim.runners import DecodeRunner, OutputTokens, PrefillRunner
from hadal.lab.sim.world.clock import SimClock
from hadal.lab.sim.world.disk import View
from hadal.lab.sim.world.process import Process
from hadal.lab.sim.world.requests import FINGERPRINT
from hadal.lab.sim.world.seen import WorldLog
from hadal.perf.shapes import kv_bytes_per_token
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.leaders import make_leader
from hadal.roles.prefill.leader import PrefillLeader

Runner = PrefillRunner | DecodeRunner

HBM_SHARE = 0.9
"""Share of a GPU's memory for weights and KV; the rest is activations and communication buffers."""


def kv_blocks(model: StepModel, num_drafts: int = 0, role: str = DECODE) -> int:
    """Return the blocks of a rank's KV pool: HBM_SHARE of its memory less the weights.
    `num_drafts`: most speculative tokens of a decode step. Raises ValueError if fewer than 2 blocks
    fit.
    """
    # Prefill makes the MTP module's KV too, but has few of its weights and none of its experts.
    weights = model.hbm_bytes(0, num_drafts if role == DECODE else 0)
    free_bytes = HBM_SHARE * model.hardware.hbm_bytes - weights
    num_blocks = int(free_bytes // (BLOCK_TOKENS * token_bytes(model, num_drafts)))
    if num_blocks < 2:
        raise ValueError(
            f"{model.hardware.name} has no memory left for KV with"
            f" {model.num_expert_slots} experts per rank: use units of more ranks."
        )
    return num_blocks


def token_bytes(model: StepModel, num_drafts: int) -> float:
    """Return the KV bytes of a token, including the MTP module's if drafts are made."""
    has_module = num_drafts > 0 and model.model.num_nextn_predict_layers > 0
    return kv_bytes_per_token(model.model, model.model.num_hidden_layers + has_module)


@dataclass(frozen=True)
class UnitDesign:
    """Recipe for the units of a world: their leaders, and the models that price their steps."""

    config: Deployment
    models: Mapping[str, StepModel]
    """Role -> model, with as many ranks as in the deployment; else ValueError is raised."""
    max_context: int
    """Longest prompt and output together, tokens."""
    mtp_accept: float
    """Probability that a draft is accepted if all drafts before it were."""
    stores: bool
    """True if blocks of computed prompts and of generated text are written to disk."""

    def __post_init__(self) -> None:
        for role in ROLES:
            if self.models[role].num_ranks != units_of(self.config, role).ranks:
                raise ValueError(
                    f"the {role} model has {self.models[role].num_ranks} ranks, but the"
                    " deployment has another number."
                )

    @property
    def num_drafts(self) -> int:
        """Maximum number of drafts of a decode step."""
        return num_drafts_max(self.config, self.models[DECODE].model)

    @property
    def unit_to_ranks(self) -> dict[str, int]:
        """Unit -> number of its ranks."""
        return {
            f"{role}-{index}": units.ranks
            for role in ROLES
            for units in (units_of(self.config, role),)
            for index in range(units.units)
        }

    def leader(self, name: str, epoch: str, view: View) -> PrefillLeader | DecodeLeader:
        """Return the leader of a unit. `view`: index of the blocks on disk, for prefill."""
        role = name.partition("-")[0]
        config, model = self.config, self.models[role]
        num_blocks = kv_blocks(model, num_drafts_max(config, model.model), role)
        units = msgspec.structs.replace(units_of(config, role), kv_blocks=num_blocks)
        # A decode unit offers its blocks to prefill only on one host; a fleet has many hosts.
        memory = OFF if role == DECODE else config.cache.memory
        cache = msgspec.structs.replace(
            config.cache, memory=memory, folder=FINGERPRINT if self.stores else ""
        )
        deployment = (
            msgspec.structs.replace(config, cache=cache, prefill=units)
            if role == PREFILL
            else msgspec.structs.replace(config, cache=cache, decode=units)
        )
        shapes = replace(model.model, max_position_embeddings=self.max_context)
        return make_leader(
            deployment, shapes, name, role, epoch, fingerprint=FINGERPRINT, index=view
        )

    def runner(self, role: str, output_tokens: OutputTokens) -> Runner:
        """Return the Runner of a unit."""
        if role == PREFILL:
            return PrefillRunner(self.models[PREFILL], output_tokens)
        return DecodeRunner(
            self.models[DECODE],
            self.config.decode.max_requests,
            output_tokens,
            num_drafts_max=self.num_drafts,
            mtp_accept=self.mtp_accept,
        )


class SimUnit:
    """One life of a unit, from start to death: its living ranks, and the RankResets for its leader.

    `pools`: names of all pools of the world, shared with the other units. `number`: unique to each
    life of any unit.
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
        """Pool name of each rank; "" if the rank is dead."""
        self._lost: set[int] = set()
        """Dead ranks that have not been reported to the leader yet."""
        self._num_pools = 0
        self._formation = 0

    @property
    def num_living(self) -> int:
        return sum(map(bool, self._rank_to_pool))

    def begin(self) -> None:
        """Start all ranks."""
        self.come(range(len(self._rank_to_pool)))

    def lose(self, ranks: Iterable[int]) -> bool:
        """Let ranks die; no step finishes until `form`. Return True if at least one was alive."""
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
        """Resume the unit without the ranks that died: a new formation."""
        if self.is_alive and self._lost:
            self._form(())

    def come(self, ranks: Iterable[int]) -> None:
        """Restart the dead ones of `ranks` with empty pools. Steps in flight become void."""
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
        """End the unit: its leader and all ranks die."""
        self.is_alive = False
        self.process.end()
        self._pools.difference_update(self._rank_to_pool)

    def _form(self, fresh: tuple[int, ...]) -> None:
        self._formation += 1
        lost, self._lost = tuple(sorted(self._lost)), set()
        self.runner.formed(self.num_living)
        self.process.form(RankReset(lost, fresh, tuple(self._rank_to_pool), self._formation))


class LoggedRunner:
    """Runner of a unit that also logs every step."""

    def __init__(
        self, unit: str, role: str, runner: Runner, clock: SimClock, log: WorldLog
    ) -> None:
        self.runner = runner
        self._unit = unit
        self._clock = clock
        self._steps = log.steps[role]
        self._prefill_ranks = log.prefill_ranks

    def run(self, plans: Sequence[Any]) -> StepDone:
        """Run the plans, and log the step: its unit, start, duration and work."""
        done = self.runner.run(plans)
        self._steps.append((self._unit, self._clock.now(), done.elapsed_s, self.runner.work))
        if isinstance(self.runner, PrefillRunner):
            self._prefill_ranks.append(self.runner.ranks)
        return done
