"""A process with a Runner: it loads the model, or one rank's share of it, and hosts the rank's role,
or the leader of a unit that has no other rank.

A rank of many joins its unit's exchanges and does what the unit's leader says. It listens for its
peers before it says that it is ready; who they are it learns with the first FormPlan. Started by
runtime/unit.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.group import Group
from hadal.comm.mesh.mesh import PURPOSE as MESH_PURPOSE
from hadal.comm.mesh.mesh import MeshGroup
from hadal.comm.torch_group import TorchGroup
from hadal.core.config import DECODE, Deployment, num_cache_layers, num_drafts_max, units_of
from hadal.core.errors import ConfigError
from hadal.core.handshake import key_of
from hadal.core.messages import BLOCK_TOKENS, RankForm
from hadal.core.model_config import ModelConfig, read_model_config
from hadal.core.plans import FormPlan
from hadal.core.seams import Clock, Effect, Event
from hadal.kernels.library import kernel_team, load, prepare
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.experts import ExpertStore
from hadal.model.load import Conversion, load_weights
from hadal.model.membership import Membership
from hadal.model.runner import ModelRunner
from hadal.roles.leaders import first_placement, make_leader, moves_experts
from hadal.roles.ranks.rank import RankProgress, RankRole
from hadal.roles.recording import MadeRank, MadeSoleLeader, RecordedRole
from hadal.runtime.cores import cores_of
from hadal.runtime.devices import take_gpu
from hadal.runtime.finite_check import watch_matrices
from hadal.runtime.host import STEP_DEADLINE_S, SWITCH_INTERVAL_S, UnitHost
from hadal.runtime.memory import max_step_tokens, mode_of
from hadal.runtime.model_files import check_model, watch_model
from hadal.runtime.pinning import PinnedTeam
from hadal.runtime.process.logs import READING, Teller
from hadal.runtime.process.process import LiveClock, Run, new_epoch
from hadal.runtime.recorder import recorded
from hadal.runtime.store.disk import DiskStore, make_store
from hadal.runtime.store.view import make_view
from hadal.runtime.topology import rank_name
from hadal.runtime.transfer.experts import PURPOSE, ExpertTransfer, Stager
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.transfer.kv import KvTransfer, live_transfer
from hadal.runtime.transfer.pool import KvPool, pool_name
from hadal.runtime.wire import ZmqWire, open_wire
from hadal.tokens.grammars import Grammars
from hadal.tokens.table import read_token_table

# The device of a rank's process: taken, checked, and told how exact to be.
#
# KV and activations are FP32 on every device so far, and on a GPU weights, too: then it gives the
# CPU's greedy tokens. Ops on a GPU are plain torch; BF16 and FP8 come with fused kernels, whose
# memory `--dry-run` plans where the checkpoint is FP8.


_WARM_UP = 64
_ONLY = "cuda:0"
"""The one GPU that the process sees."""


def open_device(gpu: int | None) -> str:
    """The device that this rank computes on, "cpu" or "cuda:0": of the node's GPUs number `gpu`.
    Raises ConfigError where torch sees no GPU.
    """
    if gpu is None:
        return "cpu"
    take_gpu(gpu)
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU. Install a torch built"
            " for CUDA and a driver for it, or take device 'cpu'."
        )
    torch.set_float32_matmul_precision("highest")  # TF32 would change tokens.
    # Loads the libraries now: in the first step it could take longer than a rank may stand in one
    # op.
    ones = torch.ones(_WARM_UP, _WARM_UP, device=_ONLY)
    (ones @ ones).softmax(-1).sum().item()
    return _ONLY


# What only a rank's process sees: how far its runner is, and which peers are gone. For its role,
# and for its log.
#
# Knows no steps. A peer's process that is gone gets one line in the log, whoever saw it first: the
# group's thread, a step that failed, or the leader, who goes on without it.


log = logging.getLogger("hadal.rank")

_CONNECTION = "its connection ended, or an exchange with it timed out"


class News:
    """News of one rank. `wake` and `is_stopping` are set once there is a host."""

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.is_stopping: Callable[[], bool] = lambda: False
        self._formation = 0
        self._lock = threading.Lock()
        self._rank_to_epoch: dict[int, str] = {}
        """Members of the newest formation that the leader asked for."""
        self._noted: set[tuple[int, str]] = set()
        """Processes whose loss was noted, by rank and epoch."""
        self._unlogged: list[tuple[int, str]] = []
        """Losses that were noted and are not logged yet: who, and why."""

    def peer_lost(self, peer: int, reason: str = _CONNECTION) -> None:
        """A member is gone, or silent beyond a deadline. From any thread."""
        with self._lock:
            process = (peer, self._rank_to_epoch.get(peer, ""))
            is_new = process[1] != "" and process not in self._noted
            self._noted.add(process)
            if is_new:
                self._unlogged.append((peer, reason))
        if is_new:
            self.wake()

    def forming(self, plan: FormPlan) -> None:
        """The leader starts a formation. A member that is none any more is gone, if nobody here
        saw it before.
        """
        if plan.formation <= self._formation:
            return
        self._formation = plan.formation
        members = {member.rank: member.epoch for member in plan.members}
        for peer, epoch in self._rank_to_epoch.items():
            if members.get(peer) != epoch:
                self.peer_lost(peer, "the leader goes on without it")
        with self._lock:
            self._rank_to_epoch = members
            self._noted &= set(members.items())
        self._say()

    def take(self, runner: ModelRunner) -> RankProgress:
        """The progress of the runner, now. From the host's thread."""
        lost = runner.lost
        for peer in lost:
            self.peer_lost(peer)
        self._say()
        return RankProgress(runner.num_ops, runner.is_computing, lost)

    def _say(self) -> None:
        """Tell the log, from the host's thread: where all end together, it knows that before it
        hears of the peers that ended first, and says nothing.
        """
        with self._lock:
            unsaid, self._unlogged = self._unlogged, []
        for peer, reason in unsaid if not self.is_stopping() else ():
            log.warning("noticed that rank %d is gone: %s", peer, reason)


class Noticing:
    """A rank's role whose news hear of every formation first."""

    def __init__(self, role: RecordedRole, news: News) -> None:
        self._role = role
        self._news = news

    def handle(self, now_s: float, event: Event) -> list[Effect]:
        """Take in one event and return what to do, in order."""
        if isinstance(event, RankForm):
            self._news.forming(event.plan)
        return self._role.handle(now_s, event)


@dataclass(frozen=True)
class RankProcess:
    """What a process with a Runner is, whether it is one rank of many or a whole unit."""

    run: Run
    unit: str
    role: str
    name: str
    """The process's name on the wire."""
    folder: Path
    life: int
    epoch: str
    device: str
    config: ModelConfig
    pool: KvPool
    clock: Clock

    def wires(self) -> tuple[ZmqWire, KvTransfer]:
        """Make what moves its messages, and KV out of other pools and its own."""
        grants = Grants(self.run.secret, self.name)
        kv_transfer = live_transfer(self.pool, self.run, grants)
        return open_wire(self.run, self.name, self.folder, self.life, grants), kv_transfer

    def pinned_team(self) -> PinnedTeam:
        """Make what places its computing threads."""
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
    life: int = 0,
) -> tuple[UnitHost, list[Effect]]:
    """Load the model, or one rank's part of it, and put the process together; also return its first
    effects. `rank` None: the unit has no other rank, and its leader is in this process. `gpu`: of
    this node; None: it computes on the CPU. Raises ConfigError.
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
        run, unit, role, name, folder, life, epoch, device, config, pool, LiveClock()
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
    """A unit of one rank: its leader plans for the Runner beside it."""
    run, config, role = process.run, process.config, process.role
    runner = make_lone_runner(run.deployment, config, role, process.pool, process.device)
    _freeze()
    wire, kv_transfer = process.wires()
    leader = recorded(
        make_leader(
            run.deployment,
            config,
            process.unit,
            role,
            process.epoch,
            kv_transfer.address,
            fingerprint=run.fingerprint,
        ),
        process.unit,
        MadeSoleLeader(role, process.epoch, kv_transfer.address, run.fingerprint, config),
        run.run_id,
        run.deployment,
    )
    host = UnitHost(
        leader,
        runner,
        wire,
        process.pool,
        process.clock,
        step_deadline_s=STEP_DEADLINE_S,
        make_disk=process.make_disk,
        pinned_team=process.pinned_team(),
        make_view=lambda wake: make_view(run, wake),
        kv_transfer=kv_transfer,
    )
    return host, leader.start(process.clock.now())


def _host_of_many(process: RankProcess, rank: int) -> tuple[UnitHost, list[Effect]]:
    """One rank of a unit: it does what a leader in another process says."""
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
    # Its experts stay where they are, or others may have them: then it needs theirs as well.
    expert_transfer = (
        ExpertTransfer(run.address, key_of(run.secret, PURPOSE), store.expert)
        if moves_experts(units_of(deployment, role))
        else None
    )
    wire, kv_transfer = process.wires()
    expert_port = expert_transfer.port if expert_transfer else 0
    rank_role = recorded(
        RankRole(
            unit, rank, epoch, run.address, group.port, kv_transfer.address, expert_port=expert_port
        ),
        process.name,
        MadeRank(unit, rank, epoch, run.address, group.port, kv_transfer.address, expert_port),
        run.run_id,
        deployment,
    )
    host = UnitHost(
        Noticing(rank_role, news),
        runner,
        wire,
        process.pool,
        process.clock,
        step_deadline_s=STEP_DEADLINE_S,
        news=lambda now_s: rank_role.handle(now_s, news.take(runner)),
        make_stager=(
            (lambda wake: Stager(store.stage, expert_transfer, wake)) if expert_transfer else None
        ),
        make_disk=process.make_disk,
        pinned_team=process.pinned_team(),
        kv_transfer=kv_transfer,
    )
    news.wake, news.is_stopping = host.wake, lambda: host.is_stopping
    return host, rank_role.start(process.clock.now())


def _freeze() -> None:
    """What is there now stays: no collection need look at it again."""
    gc.collect()
    gc.freeze()


def make_group(
    run: Run, rank: int, epoch: str, news: News, *, folder: Path, device: str = "cpu"
) -> MeshGroup | TorchGroup:
    """Get ready for the peers; `folder`: where the unit's ranks meet. Raises ConfigError if there
    is no such transport.

    The mesh tells `news` of a broken connection at once; torch's groups notice a peer only in an
    exchange with it, and an idle unit hears of its loss from the leader.
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
        raise ConfigError(f"transport {deployment.transport!r} cannot be had: {error}") from error


def conversion(deployment: Deployment) -> Conversion:
    """How weights are held: as they are stored where the kernels compute from that, else FP32."""
    is_stored = deployment.device == "cpu" and load() is not None
    return Conversion(
        None if is_stored else torch.float32,
        "cpu" if deployment.device == "cpu" else _ONLY,
        is_rounding_inputs=deployment.compute == "fp8",
    )


def make_runner(
    deployment: Deployment,
    config: ModelConfig,
    role: str,
    rank: int,
    group: Group,
    pool: KvPool,
    device: str = "cpu",
) -> tuple[ModelRunner, ExpertStore]:
    """The model with this rank's experts of the full placement, and its membership in `group`; also
    what keeps those experts. Raises ConfigError.
    """
    units, started_s = units_of(deployment, role), time.monotonic()
    placement = first_placement(deployment, config, role)
    slot_to_expert_LS = placement.slot_to_expert_LRS[:, rank]
    folder = Path(deployment.model)
    prepare_kernels()
    held = conversion(deployment)
    num_drafts = num_drafts_max(deployment, config)
    weights = load_weights(
        folder,
        slot_to_expert_LS=slot_to_expert_LS,
        held=held,
        with_mtp=num_drafts > 0,
        with_mtp_experts=role == DECODE,
        advance=Teller(READING),
        config=config,
    )
    comm = make_comm(deployment, config, role, group, device)
    cache = make_cache(deployment, config, role, pool, device)
    model = DeepseekV3(weights, cache, comm)
    store = ExpertStore(folder, weights, slot_to_expert_LS, held)
    log.info(
        "weights loaded in %.1f s, %d of %d experts of a layer; threads: %d, %s, %s",
        time.monotonic() - started_s,
        placement.num_expert_slots,
        config.n_routed_experts,
        units.threads,
        device,
        deployment.transport,
    )
    membership = Membership(rank, group, comm, store)
    grammars = make_grammars(deployment, config)
    return ModelRunner(model, units.max_requests, membership, num_drafts, grammars), store


def make_lone_runner(
    deployment: Deployment, config: ModelConfig, role: str, pool: KvPool, device: str = "cpu"
) -> ModelRunner:
    """The whole model, of a unit of one rank. Raises ConfigError."""
    units, started_s = units_of(deployment, role), time.monotonic()
    prepare_kernels()
    num_drafts = num_drafts_max(deployment, config)
    weights = load_weights(
        Path(deployment.model),
        held=conversion(deployment),
        with_mtp=num_drafts > 0,
        with_mtp_experts=role == DECODE,
        advance=Teller(READING),
        config=config,
    )
    cache = make_cache(deployment, config, role, pool, device)
    model = DeepseekV3(weights, cache, lone_comm(deployment, config, role, device))
    log.info(
        "weights loaded in %.1f s; threads: %d, %s",
        time.monotonic() - started_s,
        units.threads,
        device,
    )
    grammars = make_grammars(deployment, config)
    return ModelRunner(model, units.max_requests, num_drafts_max=num_drafts, grammars=grammars)


def make_grammars(deployment: Deployment, config: ModelConfig) -> Grammars:
    """What holds a rank's requests to their formats. It reads the tokenizer's file with the first
    of them.
    """
    folder = Path(deployment.model)
    return Grammars(lambda: read_token_table(folder), config.vocab_size)


def make_cache(
    deployment: Deployment, config: ModelConfig, role: str, pool: KvPool, device: str
) -> KvCache:
    """The KV of a rank of this role, in its pool."""
    return KvCache(
        config,
        units_of(deployment, role).kv_blocks,
        pool.cache,
        num_layers=num_cache_layers(deployment, config),
        device=device,
    )


def lone_comm(
    deployment: Deployment, config: ModelConfig, role: str, device: str = "cpu"
) -> ExpertComm | None:
    """What takes tokens to experts as ranks' messages would, op by op, so that what is rounded
    decides what comes out, not the number of ranks: the fused step adds in another order, and a
    last bit may round to another code. None where nothing is rounded.
    """
    if deployment.dispatch_format == "fp32" and deployment.compute == "fp32":
        return None
    comm = make_comm(deployment, config, role, None, device)
    comm.install(first_placement(deployment, config, role))
    return comm


def prepare_kernels() -> None:
    """Compile them now where they are not yet, with the supervisor knowing what this start waits
    for.
    """
    prepare(Teller("compiles the kernels for this machine"))


def make_comm(
    deployment: Deployment, config: ModelConfig, role: str, group: Group | None, device: str
) -> ExpertComm:
    """What a step's tokens go through on their way to experts; `group` None: of a unit that is one
    process.
    """
    units = units_of(deployment, role)
    return ExpertComm(
        group,
        hidden_size=config.hidden_size,
        top_k=config.num_experts_per_tok,
        dispatch_format=deployment.dispatch_format,
        mode=mode_of(role, units),
        max_tokens=max_step_tokens(role, deployment, config),
        device=device,
        near=None if group is None else units.beside(group.rank),
    )
