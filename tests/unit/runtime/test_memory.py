"""Test the memory plan: parameters are counted as the loader makes them, pools sized as the file
asks, and mistakes named.
"""

import dataclasses
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hadal.core.config import Deployment, UnitsConfig
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig, parse_model_config, read_model_config
from hadal.model.cache import block_bytes
from hadal.model.load import load_weights
from hadal.reference.params import ModelWeights
from hadal.runtime.headers import stored_weights
from hadal.runtime.memory import RankMemory, plan_memory, with_blocks
from hadal.runtime.parameters import count_parameters, num_moe_layers
from hadal.runtime.resolve import model_folder
from tests.unit.kernels.shapes import odd_config, random_weights

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


@pytest.fixture
def v3() -> ModelConfig:
    return parse_model_config(V3, "config.json")


def test_deepseek_v3_has_671_billion_parameters_of_which_37_for_a_token(v3: ModelConfig) -> None:
    """Source: its technical report (arXiv 2412.19437, abstract)."""
    total, active = count_parameters(v3)
    assert round(total / 1e9) == 671
    assert 37 <= active / 1e9 < 38


@pytest.mark.parametrize(
    "make",
    [
        lambda: load_weights(model_folder("")),
        lambda: random_weights(odd_config(index_n_heads=5, index_head_dim=7, index_topk=9)),
    ],
    ids=["shipped", "with an indexer"],
)
def test_every_tensor_is_counted(make: Callable[[], ModelWeights]) -> None:
    weights = make()
    assert count_parameters(weights.config)[0] == elements(weights) - weights.cos_sin.numel()


def elements(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, tuple):
        return sum(map(elements, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, ModelConfig):
        return sum(elements(getattr(value, f.name)) for f in dataclasses.fields(value))
    return 0


def test_a_module_that_drafts_is_counted() -> None:
    """The MTP module is held in FP32: all of it on a decode rank, and the part that writes its KV
    on a prefill rank. Every block has one layer more.
    """
    folder = model_folder("")
    config = read_model_config(folder)
    module = load_weights(folder, with_mtp=True).mtp
    assert module is not None
    plans = [
        plan_memory(
            Deployment(device="cpu", decode=UnitsConfig(drafts=drafts)), config, is_plain=True
        )
        for drafts in (0, 1)
    ]
    decode, prefill = (
        [getattr(each, role).weight_bytes for each in plans] for role in ("decode", "prefill")
    )
    assert decode[1] - decode[0] == 4 * elements(module)
    assert 0 < prefill[1] - prefill[0] < (decode[1] - decode[0]) / 10
    per_slot = 4 * BLOCK_TOKENS * config.hidden_size
    assert plans[1].decode.kept_bytes == per_slot * UnitsConfig().max_requests
    assert plans[0].decode.kept_bytes == plans[1].prefill.kept_bytes == 0
    num_layers = config.num_hidden_layers
    assert plans[1].block_bytes * num_layers == plans[0].block_bytes * (num_layers + 1)
    mapped = [
        plan_memory(Deployment(device="cpu", decode=UnitsConfig(drafts=drafts)), config, "F8_E4M3")
        for drafts in (0, 1)
    ]
    assert mapped[1].weight_bytes > mapped[0].weight_bytes


def test_pools_are_what_the_memory_holds() -> None:
    config = read_model_config(model_folder(""))
    plan = plan_memory(
        Deployment(prefill=UnitsConfig(kv_memory_mb=100), decode=UnitsConfig(units=2)), config
    )
    assert plan.block_bytes == block_bytes(config)
    assert plan.prefill.kv_blocks == 100 * 2**20 // plan.block_bytes
    assert plan.decode.kv_blocks == 256 * 2**20 // plan.block_bytes
    assert plan.kv_bytes == plan.block_bytes * (plan.prefill.kv_blocks + 2 * plan.decode.kv_blocks)
    assert plan.warnings == ()


def test_one_whole_context_always_fits(v3: ModelConfig) -> None:
    plan = plan_memory(Deployment(), v3)
    assert plan.decode.kv_blocks == plan.prefill.kv_blocks == 163840 // 64 + 1


def test_fewer_blocks_are_taken_as_asked_with_a_warning() -> None:
    config = read_model_config(model_folder(""))
    deployment = Deployment(decode=UnitsConfig(kv_blocks=5))
    plan = plan_memory(deployment, config)
    assert plan.decode.kv_blocks == 5
    assert "decode.kv_blocks = 5 holds 256 tokens" in plan.warnings[0]
    assert with_blocks(deployment, plan).decode.kv_blocks == 5
    assert with_blocks(deployment, plan).prefill.kv_blocks == plan.prefill.kv_blocks


def test_a_pool_of_only_the_scratch_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode\.kv_blocks is 1"):
        plan_memory(
            Deployment(decode=UnitsConfig(kv_blocks=1)), read_model_config(model_folder(""))
        )


def write(path: Path, header: dict[str, Any]) -> None:
    """Write a file of this header and, for its tensors, a hole."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    ends = [entry["data_offsets"][1] for entry in header.values() if "data_offsets" in entry]
    os.truncate(path, 8 + len(text) + max(ends, default=0))


def test_the_precision_is_that_of_most_bytes(tmp_path: Path) -> None:
    write(
        tmp_path / "a.safetensors",
        {
            "__metadata__": {"format": "pt"},
            "big": {"dtype": "F8_E4M3", "shape": [100], "data_offsets": [0, 100]},
            "small": {"dtype": "F32", "shape": [4], "data_offsets": [100, 116]},
        },
    )
    found = stored_weights(tmp_path)
    assert found is not None
    assert found.precision == "F8_E4M3"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"123",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 9) + b'{"a": [1]}',
        struct.pack("<Q", 49) + b'{"a": {"dtype": "F32", "data_offsets": [0, 900]}}' + bytes(899),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        stored_weights(tmp_path)


@pytest.mark.promise(
    "A rank loads its replicas, attention, the shared expert, embedding and head, nothing else."
)
def test_a_rank_holds_its_share_of_the_experts_and_all_else() -> None:
    config = read_model_config(model_folder(""))
    whole = plan_memory(Deployment(device="cpu"), config)
    split = plan_memory(
        Deployment(device="cpu", decode=UnitsConfig(ranks=4, redundant_experts=32)), config
    )
    assert split.decode.num_slots == 72
    assert split.decode.fixed_bytes == whole.decode.fixed_bytes
    assert split.decode.expert_bytes == whole.decode.expert_bytes * 72 // 256
    assert whole.weight_bytes == whole.decode.weight_bytes == split.weight_bytes, "mapped once"
    assert 1.0 < whole.weight_bytes / whole.num_parameters < 2.0
    in_fp32 = plan_memory(Deployment(device="cpu"), config, "F32")
    assert in_fp32.weight_bytes == in_fp32.decode.weight_bytes == 4 * whole.num_parameters
    odd = dataclasses.replace(config, weight_block_size=(64, 128))
    for converted in (
        plan_memory(Deployment(device="cpu"), config, is_plain=True),
        plan_memory(Deployment(device="cpu"), odd, "F8_E4M3"),
    ):
        assert converted.weight_bytes == 2 * 4 * whole.num_parameters, "each rank's own, in FP32"
    assert whole.decode.comm_bytes == 0 < split.decode.comm_bytes
    assert split.kv_bytes == split.prefill.kv_bytes + 4 * split.decode.kv_bytes
    own = 4 * (split.decode.total_bytes - split.decode.weight_bytes)
    own += split.prefill.total_bytes - split.prefill.weight_bytes
    assert split.total_bytes == split.weight_bytes + own


def test_a_layer_is_in_memory_twice_while_replicas_move() -> None:
    config = read_model_config(model_folder(""))

    def decode(**fields: Any) -> RankMemory:
        return plan_memory(Deployment(device="cpu", decode=UnitsConfig(**fields)), config).decode

    moving, fixed = (
        decode(ranks=4, redundant_experts=32),
        decode(ranks=4, redundant_experts=32, expert_balance="off"),
    )
    assert moving.staged_bytes * num_moe_layers(config) == moving.expert_bytes
    assert fixed.staged_bytes == decode().staged_bytes == 0
    assert moving.total_bytes - moving.staged_bytes == fixed.total_bytes


@pytest.mark.promise(
    "A rank of a unit over nodes reserves memory for its part of a lost node's experts"
)
def test_there_is_room_for_the_experts_of_a_lost_node(v3: ModelConfig) -> None:
    """DeepSeek's units: 8 of 32 ranks hold 72 of 288 replicas of a layer, 8 of 144 hold 16."""

    def plan_of(**fields: Any) -> RankMemory:
        return plan_memory(Deployment(device="cpu", decode=UnitsConfig(**fields)), v3).decode

    prefill = plan_of(ranks=32, ranks_per_node=8, redundant_experts=32)
    decode = plan_of(ranks=144, ranks_per_node=8, redundant_experts=32)
    assert prefill.spare_bytes * 9 == prefill.expert_bytes * 3
    assert decode.spare_bytes * 2 == decode.expert_bytes
    assert plan_of(ranks=8, ranks_per_node=8).spare_bytes == 0, "it is lost with its node"


def test_what_a_rank_serves_with_comes_before_room_for_a_lost_node(v3: ModelConfig) -> None:
    """If one of two nodes is lost, the other needs memory for twice its experts. That reserve is cut,
    with a warning; only what a rank serves with must fit.
    """
    units = UnitsConfig(ranks=16, ranks_per_node=8)
    asked = Deployment(device="cuda", prefill=units, decode=units)
    whole = plan_memory(asked, v3).prefill
    assert whole.spare_bytes == whole.expert_bytes
    for share in (0.5, 0.01):
        fits = whole.total_bytes - (1 - share) * whole.spare_bytes
        plan = plan_memory(msgspec.structs.replace(asked, device_memory_gb=fits / 1e9), v3)
        assert plan.prefill.spare_bytes == pytest.approx(share * whole.spare_bytes, abs=8)
        (told,) = [text for text in plan.warnings if text.startswith("prefill: a rank has memory")]
        assert "the unit restarts" in told
    too_small = whole.total_bytes - whole.spare_bytes - whole.kv_bytes // 2
    with pytest.raises(ConfigError, match=r"Lower prefill\.kv_memory_mb"):
        plan_memory(msgspec.structs.replace(asked, device_memory_gb=too_small / 1e9), v3)


def test_experts_that_do_not_divide_say_which_number_would(v3: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"Set prefill\.redundant_experts to 0 or 32"):
        plan_memory(
            Deployment(device="cpu", prefill=UnitsConfig(ranks=32, redundant_experts=20)), v3
        )


@pytest.mark.promise(
    "A deployment that does not fit is refused before anything is loaded, and the "
    "error says what would make it fit."
)
def test_a_rank_that_does_not_fit_its_gpu_says_by_how_much() -> None:
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    v3 = parse_model_config({**V3, "quantization_config": quantized}, "config.json")

    def deployment(**prefill: Any) -> Deployment:
        return Deployment(
            device="cuda",
            transport="nccl",
            dispatch_format="fp8",
            device_memory_gb=80,
            prefill=UnitsConfig(**prefill),
            decode=UnitsConfig(ranks=32),
        )

    fitting = {"ranks": 32, "redundant_experts": 32}
    assert plan_memory(deployment(**fitting), v3).prefill.total_bytes < 80e9
    with pytest.raises(
        ConfigError, match=r"a prefill rank needs .*Lower prefill\.kv_memory_mb by \d+"
    ):
        plan_memory(deployment(**fitting, kv_memory_mb=60_000), v3)
    with pytest.raises(ConfigError, match=r"not fit even without KV: raise prefill\.ranks"):
        plan_memory(deployment(ranks=4), v3)


def test_stored_weights_are_the_sum_of_all_headers(tmp_path: Path) -> None:
    assert stored_weights(tmp_path) is None
    for number, dtype in enumerate(("F8_E4M3", "BF16", "BF16")):
        entry = {"dtype": dtype, "shape": [10], "data_offsets": [0, 10 + number]}
        write(tmp_path / f"{number}.safetensors", {"__metadata__": {"a": "b"}, "x": entry})
    stored = stored_weights(tmp_path)
    assert stored is not None
    assert (stored.num_files, stored.dtype_to_bytes) == (3, {"F8_E4M3": 10, "BF16": 23})
    assert (stored.num_bytes, stored.precision) == (33, "BF16")
    total = sum(path.stat().st_size for path in model_folder("").glob("*.safetensors"))
    shipped = stored_weights(model_folder(""))
    assert shipped is not None
    assert total * 0.9 < shipped.num_bytes < total, "headers are the rest"
