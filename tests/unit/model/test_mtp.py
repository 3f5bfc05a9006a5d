"""The MTP module against transformers' and against the plain twin; acceptance against a count by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hadal.core.plans import Chunk
from hadal.model.cache import KvCache
from hadal.model.checkpoint import load_weights
from hadal.model.deepseek import DeepseekV3
from hadal.model.mtp import MtpModule, acceptance
from hadal.reference.model import forward, no_latents
from hadal.reference.model import mtp as reference_mtp
from hadal.reference.params import Matrix, ModelWeights
from tests.unit.model.checkpoints import CONFIGS, Peer, save_random
from tests.unit.model.test_deepseek import TOLERANCE, difference, random_tokens

BLOCKS = (2, 1, 3)


@pytest.fixture(scope="module")
def mtp_peer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, ModelWeights]:
    """transformers' model and MTP module, and our weights of both. It makes the module as layer 0:
    all must be MoE.
    """
    from transformers.modeling_layers import MtpModel

    folder = tmp_path_factory.mktemp("mtp")
    main = save_random(folder, {**CONFIGS["all_moe"], "num_mtp_layers": 1}, seed=8)
    module = MtpModel(main, 1).eval()
    torch.manual_seed(9)
    for key, parameter in module.layers.named_parameters():
        parameter.data.uniform_(0.5, 1.5) if "norm" in key else parameter.data.normal_(0, 0.15)
    module.layers[0].mtp_block.mlp.gate.e_score_correction_bias.normal_(0, 0.2)
    add_module(folder, module.layers[0].state_dict())
    return main, module, load_weights(folder, with_mtp=True)


def add_module(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write the module's tensors under the names of DeepSeek's checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for key, tensor in state.items():
        name = key.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if name == "mlp.experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip(("gate", "up"), both.chunk(2), strict=True):
                    tensors[f"model.layers.{layers}.mlp.experts.{expert}.{part}_proj.weight"] = (
                        half.clone()
                    )
        elif name == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                tensors[f"model.layers.{layers}.mlp.experts.{expert}.down_proj.weight"] = (
                    down.clone()
                )
        else:
            tensors[f"model.layers.{layers}.{name}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def their_drafts(main: Any, module: Any, tokens: list[int]) -> torch.Tensor:
    from transformers.cache_utils import MtpCache

    hidden = main.model(torch.tensor([tokens[:-1]])).last_hidden_state
    positions = torch.arange(1, len(tokens))[None]
    drafted = module.forward_layer(
        0, hidden, positions, MtpCache(config=module.config), input_ids=torch.tensor([tokens[1:]])
    )
    logits: torch.Tensor = module._project_to_logits(drafted)[0]
    return logits


def test_parity(mtp_peer: tuple[Any, Any, ModelWeights]) -> None:
    main, module, weights = mtp_peer
    tokens = random_tokens(Peer(Path(), main, weights), 140)
    theirs = their_drafts(main, module, tokens)
    _, hidden = forward(weights, torch.tensor(tokens[:-1]), no_latents(weights))
    assert difference(reference_mtp(weights, hidden, torch.tensor(tokens[1:])), theirs) <= TOLERANCE
    ours = MtpModule(weights, 4).draft([Chunk("d", tuple(tokens[1:]), 0, BLOCKS, None, 0)], hidden)
    assert difference(ours, theirs) <= TOLERANCE


def test_draft_in_chunks(mtp_peer: tuple[Any, Any, ModelWeights]) -> None:
    main, _, weights = mtp_peer
    tokens = random_tokens(Peer(Path(), main, weights), 130)
    _, hidden = forward(weights, torch.tensor(tokens[:-1]), no_latents(weights))
    expected = reference_mtp(weights, hidden, torch.tensor(tokens[1:]))
    module, shifted = MtpModule(weights, 4), tokens[1:]
    parts = [
        module.draft(
            [Chunk("d", tuple(shifted[a:b]), a, BLOCKS[: -(-b // 64)], None, 0)], hidden[a:b]
        )
        for a, b in ((0, 50), (50, 51), (51, 129))
    ]
    assert difference(torch.cat(parts), expected) <= TOLERANCE


def test_acceptance(mtp_peer: tuple[Any, Any, ModelWeights]) -> None:
    main, _, weights = mtp_peer
    # A head that ignores most of the vocabulary makes some drafts right.
    head = weights.head.values.clone()
    head[3:] = 0.0
    weights = ModelWeights(**{**vars(weights), "head": Matrix(head)})
    tokens = random_tokens(Peer(Path(), main, weights), 90)
    logits, hidden = forward(weights, torch.tensor(tokens), no_latents(weights))
    drafts = reference_mtp(weights, hidden[:-1], torch.tensor(tokens[1:])).argmax(-1).tolist()
    chosen = logits.argmax(-1).tolist()
    right = [drafts[i - 2] == chosen[i - 1] for i in range(20, 90)]
    model = DeepseekV3(weights, KvCache(weights.config, 4))
    assert 5 < sum(right) < 65
    assert acceptance(model, MtpModule(weights, 4), tokens, 20) == (sum(right), 70)
    with pytest.raises(ValueError, match="first"):
        acceptance(model, MtpModule(weights, 4), tokens, 1)


def test_without_the_module(plain: Peer) -> None:
    with pytest.raises(ValueError, match="MTP"):
        MtpModule(plain.weights, 4)
    with pytest.raises(ValueError, match="MTP"):
        reference_mtp(plain.weights, torch.zeros(1, 64), torch.tensor([1]))
