"""A process with a Runner: it loads the model, or one rank's share of it, and hosts the rank's
role. In a unit of one rank, it hosts the unit's leader (scheduler).

In a unit of several ranks, a rank joins the unit's exchanges and follows its leader. It listens for
its peers before it reports readiness; the first FormPlan names them. Started by runtime/unit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hadal.comm.mesh.mesh import PURPOSE as MESH_PURPOSE
from hadal.comm.mesh.mesh import MeshGroup
from hadal.comm.torch_group import TorchGroup
from hadal.core.config import num_cache_layers, units_of
from hadal.core.errors import ConfigError
from hadal.core.handshake import key_of
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.messages.ranks import RankUp
from hadal.core.model_config import ModelConfig, read_model_config
from hadal.core.seams import Clock, Effect
from hadal.kernels.library import kernel_team
from hadal.roles.leaders import make_leader, moves_experts
from hadal.roles.ranks.rank import RankRole
from hadal.roles.recording import MadeRank, MadeSoleLeader
from hadal.runtime.cores import cores_of
from hadal.runtime.finite_check import watch_matrices
from hadal.runtime.host import STEP_DEADLINE_S, SWITCH_INTERVAL_S, UnitHost
from hadal.runtime.model_files import check_model, watch_model
from hadal.runtime.pinning import PinnedTeam
from hadal.runtime.process.clock import LiveClock
from hadal.runtime.process.process import Run, new_epoch
from hadal.runtime.rank.device import open_device
from hadal.runtime.rank.news import News, Noticing
from hadal.runtime.rank.runner import make_lone_runner, make_runner
from hadal.runtime.recorder import recorded
from hadal.runtime.side_work import SideParts
from hadal.runtime.store.disk import DiskStore, make_store
from hadal.runtime.store.view import make_view
from hadal.runtime.topology import rank_name
from hadal.runtime.transfer.experts import PURPOSE, ExpertTransfer
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.transfer.kv import KvWire, open_kv_wire
from hadal.runtime.transfer.pool import KvPool, pool_name
from hadal.runtime.transfer.stager import Stager
from hadal.runtime.wire import ZmqWire, open_wire


@dataclass(frozen=True)
class RankProcess:
    """Facts of a process with a Runner, which is one rank of many or a whole unit."""

    run: Run
    unit: str
    role: str
    name: str
    """The process's name on the wire."""
    folder: Path
    epoch_number: int
    epoch: str
    device: str
    config: ModelConfig
    pool: KvPool
    clock: Clock

    def wires(self) -> tuple[ZmqWire, KvWire]:
        """Make the wire for its messages, and the wire for KV from other pools and from its own."""
        grants = Grants(self.run.secret, self.name)
        kv_wire = open_kv_wire(self.pool, self.run, grants)
        return open_wire(self.run, self.name, self.folder, self.epoch_number, grants), kv_wire

    def pinned_team(self) -> PinnedTeam:
        """Make the binding of its computing threads to cores."""
        return PinnedTeam(partial(cores_of, self.run.deployment, self.name), kernel_team)

    def make_disk(self, wake: Callable[[], None]) -> DiskStore | None:
        return make_store(self.run, self.role, self.pool.blocks, wake)


def make_host(
    run: Run,
    unit: str,
    role: str,
    rank: int | None,
    gpu: int | None,
    folder: Path,
    epoch_number: int = 0,
) -> tuple[UnitHost, list[Effect]]:
    """Load the model, or one rank's part of it, and assemble the process. Return its host and first
    effects. `rank`: None if the unit has no other rank; then its leader is in this process. `gpu`:
    number of a GPU of this node; None: the CPU. Raises ConfigError.
    """
    deployment = run.deployment
    units = units_of(deployment, role)
    torch.set_num_threads(units.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    epoch = new_epoch()
    name = unit if rank is None else rank_name(unit, rank)
    device = open_device(gpu)
    config = read_model_config(Path(deployment.model), deployment.accept_config)
    watch_model(Path(deployment.model))
    check_model(run)
    num_layers = num_cache_layers(deployment, config)
    shape = (units.kv_blocks, num_layers, BLOCK_TOKENS, config.entry_dim)
    pool = KvPool.create(pool_name(run.run_id, name, epoch), shape)
    process = RankProcess(
        run, unit, role, name, folder, epoch_number, epoch, device, config, pool, LiveClock()
    )
    try:
        made = _host_alone(process) if rank is None else _host_of_many(process, rank)
    except ConfigError:
        pool.close()
        raise
    watch_matrices(
        Path(deployment.model),
        config,
        part=rank or 0,
        num_parts=units.ranks,
        with_mtp=num_layers > config.num_hidden_layers,
    )
    return made


def _host_alone(process: RankProcess) -> tuple[UnitHost, list[Effect]]:
    """Make the host of a unit of one rank: its leader plans for the Runner in this process."""
    run, config, role = process.run, process.config, process.role
    runner = make_lone_runner(run.deployment, config, role, process.pool, process.device)
    _freeze()
    wire, kv_wire = process.wires()
    leader = recorded(
        make_leader(
            run.deployment,
            config,
            process.unit,
            role,
            process.epoch,
            kv_wire.address,
            fingerprint=run.fingerprint,
        ),
        process.unit,
        MadeSoleLeader(role, process.epoch, kv_wire.address, run.fingerprint, config),
        run.run_id,
        run.deployment,
    )
    host = UnitHost(
        leader,
        runner,
        wire,
        SideParts(
            process.pool,
            kv_wire,
            make_disk=process.make_disk,
            make_view=lambda wake: make_view(run, wake),
        ),
        process.clock,
        step_deadline_s=STEP_DEADLINE_S,
        pinned_team=process.pinned_team(),
    )
    return host, leader.start(process.clock.now())


def _host_of_many(process: RankProcess, rank: int) -> tuple[UnitHost, list[Effect]]:
    """Make the host of one rank of a unit: it follows a leader in another process."""
    run, unit, epoch = process.run, process.unit, process.epoch
    deployment, role, device = run.deployment, process.role, process.device
    news = News()
    group = make_group(
        run, rank, epoch, news, folder=process.folder / "groups" / unit, device=device
    )
    try:
        runner, store = make_runner(
            deployment, process.config, role, rank, group, process.pool, device
        )
    except ConfigError:
        group.close()
        raise
    _freeze()
    # If experts move between ranks, this rank serves its own and fetches those of others.
    expert_transfer = (
        ExpertTransfer(run.address, key_of(run.secret, PURPOSE), store.expert)
        if moves_experts(units_of(deployment, role))
        else None
    )
    wire, kv_wire = process.wires()
    expert_port = expert_transfer.port if expert_transfer else 0
    facts = unit, rank, epoch, run.address, group.port, kv_wire.address, expert_port
    rank_role = recorded(
        RankRole(RankUp(*facts)),
        process.name,
        MadeRank(*facts),
        run.run_id,
        deployment,
    )
    host = UnitHost(
        Noticing(rank_role, news),
        runner,
        wire,
        SideParts(
            process.pool,
            kv_wire,
            (lambda wake: Stager(store.stage, expert_transfer, wake)) if expert_transfer else None,
            process.make_disk,
        ),
        process.clock,
        step_deadline_s=STEP_DEADLINE_S,
        news=lambda now_s: rank_role.handle(now_s, news.take(runner)),
        pinned_team=process.pinned_team(),
    )
    news.wake, news.is_stopping = host.wake, lambda: host.is_stopping
    return host, rank_role.start(process.clock.now())


def make_group(
    run: Run, rank: int, epoch: str, news: News, *, folder: Path, device: str = "cpu"
) -> MeshGroup | TorchGroup:
    """Make the group for exchanges with the peers. `folder`: place where the ranks of a TorchGroup
    find each other. Raises ConfigError if the transport is not available.

    The mesh reports a broken connection to `news` immediately. Torch's groups notice a lost peer
    only in an exchange with it; an idle rank gets the news from the leader.
    """
    deployment, deadline_s = run.deployment, run.deployment.collective_timeout_s
    if deployment.transport == "tcp":
        key = key_of(run.secret, MESH_PURPOSE)
        return MeshGroup(
            rank, epoch, host=run.address, deadline_s=deadline_s, on_lost=news.peer_lost, key=key
        )
    try:
        return TorchGroup(
            rank,
            backend=deployment.transport,
            folder=folder,
            deadline_s=deadline_s,
            device=device,
            host=run.address,
        )
    except ValueError as error:
        raise ConfigError(
            f"transport {deployment.transport!r} is not available: {error}"
        ) from error


def _freeze() -> None:
    """Exclude all present objects from garbage collection: they stay for the process's life."""
    gc.collect()
    gc.freeze()
