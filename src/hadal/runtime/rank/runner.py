"""The Runner of a rank, or of a unit of one rank: weights, KV, experts and grammars put together.

Independent of messages and hosts.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from hadal.comm.expert_comm import ExpertComm
from hadal.comm.group import Group
from hadal.core.config import DECODE, Deployment, num_cache_layers, num_drafts_max, units_of
from hadal.core.model_config import ModelConfig
from hadal.kernels.library import load, prepare
from hadal.model.cache import KvCache
from hadal.model.deepseek import DeepseekV3
from hadal.model.experts import ExpertStore
from hadal.model.load import Conversion, load_weights
from hadal.model.membership import Membership
from hadal.model.runner import ModelRunner
from hadal.roles.leaders import first_placement
from hadal.runtime.memory import max_step_tokens, mode_of
from hadal.runtime.process.logs import READING, Teller
from hadal.runtime.rank.device import ONLY_GPU
from hadal.runtime.transfer.pool import KvPool
from hadal.tokens.grammars import Grammars
from hadal.tokens.table import read_token_table

log = logging.getLogger("hadal.rank")


def conversion(deployment: Deployment) -> Conversion:
    """Return the format of weights in memory: as stored if the kernels can use that, else FP32."""
    is_stored = deployment.device == "cpu" and load() is not None
    return Conversion(
        None if is_stored else torch.float32,
        "cpu" if deployment.device == "cpu" else ONLY_GPU,
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
    """Make the Runner of one rank: the model with this rank's experts of the full placement, and
    its membership in `group`. Return the store of its experts, too. Raises ConfigError.
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
        "weights loaded in %.1f s, %d of %d experts per layer; threads: %d, %s, %s",
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
    """Make the Runner of a unit of one rank, with the whole model. Raises ConfigError."""
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
    """Make the grammars that constrain a rank's requests to their formats (structured output). The
    first such request reads the tokenizer's file.
    """
    folder = Path(deployment.model)
    return Grammars(lambda: read_token_table(folder), config.vocab_size)


def make_cache(
    deployment: Deployment, config: ModelConfig, role: str, pool: KvPool, device: str
) -> KvCache:
    """Make the KV cache of a rank of this role, in its pool."""
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
    """Make the dispatch of tokens to experts for a unit of one rank; None if nothing is rounded.
    Like messages between ranks it works op by op, so that the output does not depend on the number
    of ranks: the fused step adds in another order, and a last bit may round to another FP8 code.
    """
    if deployment.dispatch_format == "fp32" and deployment.compute == "fp32":
        return None
    comm = make_comm(deployment, config, role, None, device)
    comm.install(first_placement(deployment, config, role))
    return comm


def prepare_kernels() -> None:
    """Compile the kernels if need be, and report that to the supervisor as the start's activity."""
    prepare(Teller("compiles the kernels for this machine"))


def make_comm(
    deployment: Deployment, config: ModelConfig, role: str, group: Group | None, device: str
) -> ExpertComm:
    """Make the dispatch of a step's tokens to experts. `group`: None for a unit of one process."""
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
