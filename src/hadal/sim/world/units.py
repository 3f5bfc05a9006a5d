"""The units of a simulated world: a leader of the class that serves, and a Runner that prices its
steps.

Its leader is made as the live one is (roles/leaders), of a deployment whose KV pools are those of
the hardware. Knows neither wires nor requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hadal.core.balance import OFF
from hadal.core.cache import NAME_BYTES, DiskLocation, num_names, split
from hadal.core.config import DECODE, PREFILL, Deployment, num_drafts_max, units_of
from hadal.core.messages import BLOCK_TOKENS, ReadBlocks, StoreBlocks
from hadal.core.plans import BlocksRead, BlocksStored, StepDone
from hadal.core.seams import RankReset
from hadal.perf.shapes import kv_bytes_per_token
from hadal.perf.step import StepModel
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.leaders import make_leader
from hadal.roles.prefill.leader import PrefillLeader
from hadal.sim.runners import DecodeRunner, OutputTokens, PrefillRunner
from hadal.sim.world.process import Process, SimClock
from hadal.sim.world.seen import FINGERPRINT, WorldLog, block_of, chain_of

# The disk cache of a simulated world: which blocks it has, and what reading and writing them
# takes.
#
#     leader: find (View) -> ReadBlocks --> queue of the rank's node --> BlocksRead
#                            StoreBlocks -> queue of the rank's node --> BlocksStored, found from
#                            then on
#
# What there is is a number for each request: so many first blocks of it. A node's ranks share its
# storage NIC, one read behind the other, and writes beside the reads, for a link carries both ways
# at once. Nothing is read or written: a block's text is its name.


Ints = NDArray[np.int64]

GIB = 2**30
_HERE = DiskLocation(0, 0)
"""The location of every block: nobody looks there."""


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of the storage network, by node. Raises ValueError for a speed that is none."""

    read_bytes_per_s: float = 40.0 * GIB
    """Peak of the KV cache's clients (3FS README), of a NIC of 400 Gb/s that only storage uses
    (arXiv 2505.09343).
    """
    write_bytes_per_s: float = 40.0 * GIB
    """Taken to be the same: the NIC's other direction."""
    latency_s: float = 0.0
    """Time of a read or write beside its bytes; none was published."""
    node_ranks: int = 8
    """Ranks that share a NIC."""

    def __post_init__(self) -> None:
        if (
            min(self.read_bytes_per_s, self.write_bytes_per_s) <= 0.0
            or self.latency_s < 0.0
            or self.node_ranks < 1
        ):
            raise ValueError(
                f"{self}: bytes/s and ranks of a node must be above 0, the latency not below."
            )


class View:
    """A leader's index of what is on disk (kv/disk_index).

    `num_blocks`: by request, shared by all views. What a read did not find is not looked for again
    by this leader.
    """

    def __init__(self, num_blocks: Ints) -> None:
        self._num_blocks = num_blocks
        self._dropped: dict[int, int] = {}
        """Request -> its first block that is gone."""

    def __len__(self) -> int:
        return 0  # Nobody counts them.

    def __contains__(self, name: bytes) -> bool:
        return self.find(name) is not None

    def put(self, names: bytes, locations: Sequence[DiskLocation | None]) -> None:
        """These are on disk, where the blocks before them are, too: there is no telling that some
        in between are not.
        """
        for name, location in zip(split(names), locations, strict=True):
            known = self._known(name)
            if location is None or known is None:
                continue
            number, index = known
            if self._dropped.get(number) == index:
                del self._dropped[number]
            if self._num_blocks[number] == index:
                self._num_blocks[number] = index + 1

    def drop(self, names: bytes) -> None:
        """These cannot be found any more."""
        for name in split(names):
            known = self._known(name)
            if known is not None:
                self._dropped[known[0]] = min(known[1], self._dropped.get(known[0], known[1]))

    def find(self, name: bytes) -> DiskLocation | None:
        """Where a block is."""
        known = self._known(name)
        return _HERE if known is not None and known[1] < self._end_of(known[0]) else None

    def found(self, names: bytes) -> tuple[DiskLocation, ...]:
        """Where those of these blocks are that are here."""
        known = self._known(names[:NAME_BYTES]) if names else None
        end = num_names(names)
        if (
            known is not None
            and names == chain_of(known[0], known[1] + end)[known[1] * NAME_BYTES :]
        ):
            return (_HERE,) * min(
                end, max(0, self._end_of(known[0]) - known[1])
            )  # As always: a part of one text.
        return tuple(location for name in split(names) if (location := self.find(name)) is not None)

    def num_found(self, chain: bytes) -> int:
        """How many of the chain's first blocks are here, up to one that is not."""
        known = self._known(chain[:NAME_BYTES]) if chain else None
        return (
            0 if known is None else min(num_names(chain), max(0, self._end_of(known[0]) - known[1]))
        )

    def lookup(self, chain: bytes) -> tuple[DiskLocation, ...]:
        """The locations of the longest prefix of the chain that is here."""
        return (_HERE,) * self.num_found(chain)

    def _known(self, name: bytes) -> tuple[int, int] | None:
        found = block_of(name)
        return found if found is not None and found[0] < len(self._num_blocks) else None

    def _end_of(self, number: int) -> int:
        """Return the number behind the request's first blocks that are here."""
        num = int(self._num_blocks[number])
        return min(num, self._dropped.get(number, num)) if self._dropped else num


class NodeQueues:
    """When the NICs of nodes are done with what they were asked for."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s: dict[tuple[str, int], float] = {}

    def ask(self, now_s: float, node: tuple[str, int], num_bytes: float) -> tuple[float, float]:
        """When so many bytes begin to move, and when they are there."""
        begin_s = max(now_s, self._free_s.get(node, 0.0))
        self._free_s[node] = begin_s + num_bytes / self._bytes_per_s
        return begin_s, self._free_s[node] + self._latency_s


class WorldDisk:
    """Reads and writes of all units. `block_bytes`: of all layers.

    `loads`: asked for every read, how many of its blocks come: (now, unit, effect) -> blocks.
    """

    def __init__(
        self,
        num_blocks: Ints,
        block_bytes: float,
        speed: DiskSpeed,
        loads: Callable[[float, str, ReadBlocks], int] = lambda now_s, unit, effect: len(
            effect.into
        ),
    ) -> None:
        self.num_blocks = num_blocks
        """Blocks of each request."""
        self._block_bytes = block_bytes
        self._node_ranks = speed.node_ranks
        self._reads = NodeQueues(speed.read_bytes_per_s, speed.latency_s)
        self._writes = NodeQueues(speed.write_bytes_per_s, speed.latency_s)
        self._loads = loads

    def view(self) -> View:
        """Make the view of one more leader."""
        return View(self.num_blocks)

    def load(self, now_s: float, unit: str, effect: ReadBlocks) -> tuple[float, float, BlocksRead]:
        """When a read begins and ends, and what comes of it. One that fails does so at its first
        missing block.
        """
        num = self._loads(now_s, unit, effect)
        node = unit, effect.rank // self._node_ranks
        begin_s, end_s = self._reads.ask(now_s, node, num * self._block_bytes)
        error = None if num == len(effect.into) else "input/output error"
        return begin_s, end_s, BlocksRead(effect.read_id, num, 0, error)

    def store(self, now_s: float, unit: str, effect: StoreBlocks) -> tuple[float, BlocksStored]:
        """When a write ends, and what comes of it."""
        num = len(effect.block_ids)
        _, end_s = self._writes.ask(
            now_s, (unit, effect.rank // self._node_ranks), num * self._block_bytes
        )
        return end_s, BlocksStored(effect.store_id, (_HERE,) * num)


Runner = PrefillRunner | DecodeRunner

HBM_SHARE = 0.9
"""Share of a GPU's memory for weights and KV; the rest is activations and communication buffers."""


def kv_blocks(model: StepModel, num_drafts: int = 0, role: str = DECODE) -> int:
    """Blocks of a rank's KV pool: what its memory has beside the weights, where decode makes so
    many drafts at most. Raises ValueError if that is nothing.
    """
    # Prefill hands the module's KV over with the rest and has little of its weights, no experts.
    weights = model.hbm_bytes(0, num_drafts if role == DECODE else 0)
    free_bytes = HBM_SHARE * model.hardware.hbm_bytes - weights
    num_blocks = int(free_bytes // (BLOCK_TOKENS * token_bytes(model, num_drafts)))
    if num_blocks < 2:
        raise ValueError(
            f"{model.hardware.name} has no memory left for KV with {model.num_expert_slots} experts on a"
            " rank: units of more ranks have fewer."
        )
    return num_blocks


def token_bytes(model: StepModel, num_drafts: int) -> float:
    """KV bytes of a token, the MTP module's among them where drafts are made."""
    has_module = num_drafts > 0 and model.model.num_nextn_predict_layers > 0
    return kv_bytes_per_token(model.model, model.model.num_hidden_layers + has_module)


def simulated_leader(
    name: str,
    epoch: str,
    config: Deployment,
    model: StepModel,
    max_context: int,
    view: View,
    *,
    stores: bool,
) -> PrefillLeader | DecodeLeader:
    """Return the leader of a unit as it serves. `view`: what a prefill unit knows to be on disk;
    `stores`: what is computed, and blocks that generated text fills, are written there.
    """
    role = name.partition("-")[0]
    num_blocks = kv_blocks(model, num_drafts_max(config, model.model), role)
    units = msgspec.structs.replace(units_of(config, role), kv_blocks=num_blocks)
    # Decode offers prefill nothing: a fleet is on many hosts.
    memory = OFF if role == DECODE else config.cache.memory
    cache = msgspec.structs.replace(
        config.cache, memory=memory, folder=FINGERPRINT if stores else ""
    )
    deployment = (
        msgspec.structs.replace(config, cache=cache, prefill=units)
        if role == PREFILL
        else msgspec.structs.replace(config, cache=cache, decode=units)
    )
    shapes = replace(model.model, max_position_embeddings=max_context)
    return make_leader(deployment, shapes, name, role, epoch, fingerprint=FINGERPRINT, index=view)


class SimUnit:
    """One life of a unit: which of its ranks live, and what its leader hears of that.

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
        self._formation = 0

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
        self._formation += 1
        lost, self._lost = tuple(sorted(self._lost)), set()
        self.runner.formed(self.num_living)
        self.process.form(RankReset(lost, fresh, tuple(self._rank_to_pool), self._formation))


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
        """Run the plans as the Runner does."""
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
    mtp_accept: float,
) -> Runner:
    """`mtp_accept`: how often a draft is right if those before it were (decode)."""
    if role == PREFILL:
        return PrefillRunner(model, output_tokens)
    return DecodeRunner(
        model,
        config.decode.max_requests,
        output_tokens,
        num_drafts_max=num_drafts_max(config, model.model),
        mtp_accept=mtp_accept,
    )
