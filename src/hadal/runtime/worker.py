"""A unit's process: loads the model, makes its KV pool and its leader, and hosts the leader until
told to end.

python -m hadal.runtime.worker --unit prefill-0 --role prefill --folder RUN_FOLDER
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from pathlib import Path

import torch

from hadal.comm.expert_comm import ExpertComm
from hadal.core.config import Deployment, units_of
from hadal.core.errors import ConfigError
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig, read_model_config
from hadal.core.seams import Effect
from hadal.model.cache import KvCache
from hadal.model.checkpoint import load_weights
from hadal.model.deepseek import DeepseekV3
from hadal.model.runner import ModelRunner
from hadal.roles.leaders import first_placement, make_leader
from hadal.roles.recording import MadeCore
from hadal.runtime.host import STEP_DEADLINE_S, SWITCH_INTERVAL_S, UnitHost, run_host
from hadal.runtime.process.logs import READING, Teller
from hadal.runtime.process.process import LiveClock, Run, enter_child, unit_arguments
from hadal.runtime.rank import ADDRESS, make_comm, open_device, prepare_kernels
from hadal.runtime.recorder import recorded
from hadal.runtime.store.disk import make_store
from hadal.runtime.store.view import make_view
from hadal.runtime.transfer.grants import Grants
from hadal.runtime.transfer.kv import live_wire
from hadal.runtime.transfer.pool import KvPool, pool_name
from hadal.runtime.wire import ZmqWire

log = logging.getLogger("hadal.unit")


def main() -> int:
    """Returns the exit code: 0 when told to end, EXIT_CONFIG when starting again would not help,
    else EXIT_FATAL.
    """
    asked = unit_arguments(__doc__)
    run = enter_child(asked.unit, asked.folder)
    return run_host(lambda: make_host(run, asked.unit, asked.role, asked.folder))


def make_host(run: Run, unit: str, role: str, folder: Path) -> tuple[UnitHost, list[Effect]]:
    """Load the model and put the unit together; also return its first effects. Raises
    ConfigError.
    """
    deployment = run.deployment
    units = units_of(deployment, role)
    torch.set_num_threads(units.threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    started_s = time.monotonic()
    device = open_device(deployment, unit)
    epoch = f"{os.getpid()}-{time.time_ns():x}"
    config = read_model_config(Path(deployment.model))
    shape = (units.kv_blocks, config.num_hidden_layers, BLOCK_TOKENS, config.latent_dim)
    pool = KvPool.create(pool_name(run.run_id, unit, epoch), shape)
    try:
        prepare_kernels()
        weights = load_weights(Path(deployment.model), device=device, advance=Teller(READING))
        cache = KvCache(config, units.kv_blocks, pool.cache, device=device)
        model = DeepseekV3(weights, cache, lone_comm(deployment, config, role, device))
        runner = ModelRunner(model, units.max_requests)
    except ConfigError:
        pool.close()
        raise
    gc.collect()
    gc.freeze()  # What is there now stays: no collection need look at it again.
    log.info(
        "weights loaded in %.1f s; threads: %d, %s",
        time.monotonic() - started_s,
        units.threads,
        device,
    )
    grants = Grants(run.secret, unit)
    kv_wire = live_wire(pool, run, grants, ADDRESS)
    leader = recorded(
        make_leader(
            deployment, config, unit, role, epoch, kv_wire.address, fingerprint=run.fingerprint
        ),
        unit,
        MadeCore(role, epoch, kv_wire.address, run.fingerprint, config),
        run.run_id,
        deployment,
    )
    clock = LiveClock()
    wire = ZmqWire(unit, folder, grants)
    host = UnitHost(
        leader,
        runner,
        wire,
        pool,
        clock,
        step_deadline_s=STEP_DEADLINE_S,
        make_disk=lambda wake: make_store(run, role, pool.blocks, wake),
        make_view=lambda wake: make_view(run, wake),
        kv_wire=kv_wire,
    )
    return host, leader.start(clock.now())


def lone_comm(
    deployment: Deployment, config: ModelConfig, role: str, device: str = "cpu"
) -> ExpertComm | None:
    """What rounds tokens on their way to experts as ranks' messages would, so that the wire's
    format alone decides what comes out, not the number of ranks. None where nothing is rounded.
    """
    if deployment.wire == "fp32":
        return None
    comm = make_comm(deployment, config, role, None, device)
    comm.install(first_placement(deployment, config, role))
    return comm


if __name__ == "__main__":
    sys.exit(main())
