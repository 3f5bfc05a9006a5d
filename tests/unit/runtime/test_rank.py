"""Test a complete rank process: two in one process form a unit and execute a step with the result
of a single rank.
"""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hadal.core.config import Deployment, UnitsConfig
from hadal.core.errors import ConfigError
from hadal.core.placement import spread
from hadal.core.plans import Chunk, Formed, FormPlan, Member, PrefillPlan, Sampling, StepDone
from hadal.model.runner import ModelRunner
from hadal.runtime.parameters import num_moe_layers
from hadal.runtime.process.process import Run
from hadal.runtime.rank.host import make_group
from hadal.runtime.rank.news import News
from hadal.runtime.rank.runner import make_runner
from hadal.runtime.resolve import Resolved, plan
from hadal.runtime.transfer.pool import KvPool, pool_name, remove_shared_memory
from tests.needs import skip_unless
from tests.waiting import join

RUN = f"testrank{os.getpid()}"
PROMPTS = ((5, 6, 7, 8, 9), (11, 12, 13))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    remove_shared_memory(RUN)


def resolved_of(num_ranks: int, transport: str) -> Resolved:
    units = UnitsConfig(ranks=num_ranks, kv_blocks=4, max_requests=2, threads=1)
    decode = UnitsConfig(kv_blocks=4)
    return plan(
        Deployment(device="cpu", transport=transport, chunk_tokens=64, prefill=units, decode=decode)
    )


def chunk(index: int) -> Chunk:
    return Chunk(f"r{index}", PROMPTS[index], 0, (1 + index,), Sampling(temperature=0.0), 0)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run the calls at the same time, each in a thread; return their results. Raise if one hangs."""
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    join(*threads)
    return [results[index] for index in range(len(calls))]


def run_of(deployment: Deployment) -> Run:
    return Run(RUN, deployment, secret=bytes(32))


def first_tokens(num_ranks: int, folder: Path, transport: str = "tcp") -> list[int]:
    """Return the first token of each prompt; prompt i is on rank i % num_ranks, and a rank without
    prompts takes part with an empty plan.
    """
    resolved = resolved_of(num_ranks, transport)
    config, units = resolved.config, resolved.deployment.prefill
    shape = (units.kv_blocks, config.num_hidden_layers, 64, config.entry_dim)
    pools = [
        KvPool.create(pool_name(RUN, f"prefill-0.{rank}", "1"), shape) for rank in range(num_ranks)
    ]
    groups = [
        make_group(run_of(resolved.deployment), rank, f"e{rank}", News(), folder=folder)
        for rank in range(num_ranks)
    ]
    runners: list[ModelRunner] = [
        make_runner(resolved.deployment, config, "prefill", rank, group, pool)[0]
        for rank, (group, pool) in enumerate(zip(groups, pools, strict=True))
    ]
    placement = spread(num_moe_layers(config), config.n_routed_experts, num_ranks)
    members = tuple(
        Member(rank, f"e{rank}", Run.address, getattr(groups[rank], "port", 0))
        for rank in range(num_ranks)
    )
    form = FormPlan(1, num_ranks, members, placement.to_bytes(), placement.num_expert_slots)
    try:
        for formed in together([lambda runner=runner: runner.execute(form) for runner in runners]):
            assert isinstance(formed, Formed)
            assert (formed.error, formed.num_loaded) == (None, 0), (
                "they were loaded with these experts"
            )
        shares = [[i for i in range(2) if i % num_ranks == rank] for rank in range(num_ranks)]
        plans = [PrefillPlan(0, tuple(map(chunk, share))) for share in shares]
        done = together(
            [lambda r=r, p=p: r.execute(p) for r, p in zip(runners, plans, strict=True)]
        )
        assert all(isinstance(one, StepDone) and one.error is None for one in done)
        return [done[i % num_ranks].tokens[i // num_ranks] for i in range(2)]
    finally:
        for runner, pool in zip(runners, pools, strict=True):
            runner.close()
            pool.close()


@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_ranks_put_together_draw_what_one_alone_draws(tmp_path: Path, transport: str) -> None:
    assert first_tokens(2, tmp_path, transport) == first_tokens(1, tmp_path)


@skip_unless(not torch.cuda.is_available(), "nccl can be had here", "a machine without a GPU")
def test_a_transport_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    deployment = Deployment(device="cuda", transport="nccl")
    with pytest.raises(ConfigError, match="'nccl' is not available"):
        make_group(run_of(deployment), 0, "e", News(), folder=tmp_path)
