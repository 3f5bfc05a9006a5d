"""Test sizes of KV pools: a share of the memory that weights leave, bounded by memory, /dev/shm and
use; every report has the same number.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import hadal.runtime.host_limits as host_limits
import hadal.runtime.resolve as resolve_module
from hadal.cli import app
from hadal.core.config import ClusterConfig, Deployment, FleetConfig, UnitsConfig
from hadal.core.errors import ConfigError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.runtime.banner import Banner
from hadal.runtime.plan_rows import pools_text, print_plan
from hadal.runtime.pool_sizes import MOST_BYTES, NUM_SCRATCH_BLOCKS, Room, pool_blocks
from hadal.runtime.process.status import Status
from hadal.runtime.resolve import plan, resolve, why_not_run

BLOCK_BYTES = 1 << 20
CONTEXT_BLOCKS = 8
LEAST = NUM_SCRATCH_BLOCKS + CONTEXT_BLOCKS
CONTEXT_TOKENS = CONTEXT_BLOCKS * BLOCK_TOKENS
MANY = 1 << 16
"""Requests per rank: so high that the contexts of all requests never limit a pool here."""


def units(**fields: Any) -> UnitsConfig:
    return UnitsConfig(**{"max_requests": MANY, **fields})


def blocks(
    free_mb: int | None, shm_mb: int = 1 << 20, beside_mb: int = 0, **fields: Any
) -> tuple[int, int]:
    """Return the blocks of a prefill and of a decode rank; a block is 1 MiB."""
    fields = {"device": "cpu", "prefill": units(), "decode": units(), **fields}
    room = None if free_mb is None else Room(free_mb << 20, shm_mb << 20)
    found = pool_blocks(Deployment(**fields), BLOCK_BYTES, CONTEXT_TOKENS, beside_mb << 20, room)
    return found["prefill"], found["decode"]


@pytest.mark.promise(
    "By default the KV pools of a host take a quarter of the memory that weights leave"
)
def test_pools_share_a_quarter_of_what_the_weights_leave() -> None:
    assert blocks(4096) == (512, 512)
    assert blocks(8192, beside_mb=4096) == (512, 512)


def test_ranks_and_units_share_what_their_role_has() -> None:
    assert blocks(4096, decode=units(units=2, ranks=4)) == (512, 64)
    growing = FleetConfig(mode="auto", prefill_max=4)
    assert blocks(4096, fleet=growing) == (128, 512)


def test_no_pool_holds_more_than_its_requests_can_fill() -> None:
    """Memory that one role cannot use goes to the other one."""
    few = units(max_requests=4)
    full = NUM_SCRATCH_BLOCKS + 4 * CONTEXT_BLOCKS
    assert blocks(4096, decode=few) == (1024 - full, full)
    assert blocks(4096, prefill=few) == (full, 1024 - full)
    assert blocks(4096, prefill=few, decode=few) == (full, full)


def test_a_rank_reserves_its_pool_within_seconds() -> None:
    assert blocks(1 << 20) == (MOST_BYTES // BLOCK_BYTES,) * 2


@pytest.mark.parametrize("free_mb", [0, 1, 100, 4096])
def test_one_whole_context_fits_however_little_there_is(free_mb: int) -> None:
    assert blocks(free_mb, beside_mb=4096) == (LEAST, LEAST)
    assert blocks(free_mb, shm_mb=0) == (LEAST, LEAST)


def test_shared_memory_bounds_pools_as_memory_does() -> None:
    """A container has 64 MiB of shared memory by default."""
    assert blocks(4096, shm_mb=64) == (16, 16)
    assert blocks(4096, shm_mb=1024) == (256, 256)


@pytest.mark.parametrize("named", [{"kv_blocks": 40}, {"kv_memory_mb": 40}])
def test_a_named_size_is_taken_and_the_other_role_has_the_rest(named: dict[str, int]) -> None:
    assert blocks(40 + 2048, decode=units(**named)) == (512, 40)
    assert blocks(1 << 20, shm_mb=40 + 64, decode=units(**named)) == (32, 40)
    assert blocks(0, prefill=units(**named), decode=units(**named)) == (40, 40)


def test_a_named_size_holds_one_whole_context_unless_it_is_in_blocks() -> None:
    assert blocks(4096, prefill=units(kv_memory_mb=0), decode=units(kv_blocks=2)) == (LEAST, 2)


@pytest.mark.parametrize(
    "fields", [{"device": "cuda"}, {"cluster": ClusterConfig(on="ray")}], ids=["gpu", "cluster"]
)
def test_memory_elsewhere_is_not_this_hosts(fields: dict[str, Any]) -> None:
    assert blocks(1 << 20, **fields) == blocks(1, **fields) == (256, 256)


def test_where_memory_is_not_known_sizes_are_fixed() -> None:
    assert blocks(None) == (256, 256)


def test_a_little_more_or_less_memory_gives_the_same_pools() -> None:
    assert blocks(5000) == blocks(5050) != blocks(6000)


def free_here(monkeypatch: pytest.MonkeyPatch, free_bytes: int, shm_bytes: int = 1 << 40) -> None:
    """Let this machine have that much free memory."""
    monkeypatch.setattr(resolve_module, "available_bytes", lambda: free_bytes)
    monkeypatch.setattr(resolve_module, "memory_bytes", lambda: free_bytes)
    monkeypatch.setattr(resolve_module, "free_shm_bytes", lambda: shm_bytes)


@pytest.mark.parametrize("free_mb", [60, 200, 1000, 100_000])
@pytest.mark.needs("compiler")
def test_the_default_is_never_refused(free_mb: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights have 23 MB; a context of 4,096 tokens has 6.7 MB of KV."""
    free_here(monkeypatch, free_mb << 20)
    resolved = resolve(Deployment())
    assert why_not_run(resolved) == []
    assert resolved.memory.warnings == ()


def test_shared_memory_of_a_container_is_enough_for_the_model_that_ships(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free_here(monkeypatch, 8 << 30, 64 << 20)
    memory = resolve(Deployment()).memory
    assert memory.kv_bytes <= 32 << 20
    assert memory.decode.kv_tokens >= 4096


@pytest.mark.parametrize(
    ("group", "file"),
    [("0::/", "memory.max"), ("4:memory:/", "memory/memory.limit_in_bytes")],
    ids=["v2", "v1"],
)
def test_the_limit_of_a_control_group_counts(
    group: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_limits, "_GROUPS", tmp_path)
    monkeypatch.setattr(host_limits, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host_limits, "_meminfo", lambda name: 64 << 30)
    monkeypatch.setattr(resolve_module, "free_shm_bytes", lambda: 64 << 30)
    (tmp_path / "own").write_text(f"{group}\n")
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{1 << 30}\n")
    memory = plan(Deployment()).memory
    assert memory.kv_bytes <= (1 << 30) // 4
    path.write_text("max\n" if file == "memory.max" else f"{1 << 62}\n")
    assert plan(Deployment()).memory.kv_bytes > memory.kv_bytes


@pytest.mark.promise("hadal serve --dry-run, hadal model and the start print the same sizes")
def test_the_same_size_is_told_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    free_here(monkeypatch, 1 << 30)
    resolved = resolve(Deployment())
    memory = resolved.memory
    told = pools_text(memory)
    assert f"prefill {memory.prefill.kv_blocks} blocks ({memory.prefill.kv_tokens} tokens)" in told
    status = Status("http://here", "run", 1, False, False, 1.0, {})
    assert ("", told) in Banner(resolved, needs_key=False).rows(status)
    file = io.StringIO()
    print_plan(resolved, [], Console(file=file, soft_wrap=True))
    runner = CliRunner()
    dry = runner.invoke(app, ["serve", "--dry-run"], env={"HADAL_MODEL": ""}).stdout
    for rank in (memory.prefill, memory.decode):
        words = f"{rank.kv_blocks} blocks, {rank.kv_tokens} tokens"
        assert words in dry
        assert words in file.getvalue()
    text = runner.invoke(app, ["model"], env={"HADAL_MODEL": ""}).stdout
    assert told in text
    values = json.loads(runner.invoke(app, ["model", "--json"], env={"HADAL_MODEL": ""}).stdout)
    laptop = next(fit for fit in values["deployments"] if fit["deployment"] == "laptop")
    assert laptop["kv_tokens"]["decode"] == memory.decode.kv_tokens
    assert resolved.deployment.decode.kv_blocks == memory.decode.kv_blocks


@pytest.mark.promise(
    "The size is decided once, at the start, so a restarted unit has the same size."
)
def test_a_decided_size_stays_whatever_is_free_later(monkeypatch: pytest.MonkeyPatch) -> None:
    free_here(monkeypatch, 1 << 30)
    resolved = resolve(Deployment())
    free_here(monkeypatch, 4 << 30)
    again = plan(resolved.deployment)
    assert again.deployment == resolved.deployment
    assert again.memory.kv_bytes == resolved.memory.kv_bytes
    asked = msgspec.structs.replace(resolved.deployment.decode, kv_blocks=0)
    assert plan(msgspec.structs.replace(resolved.deployment, decode=asked)) != resolved


def test_a_word_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_memory_mb"):
        UnitsConfig(kv_memory_mb="most")
