"""A small Kimi-K2 is served from its folder: config.json, FP8 weights, tiktoken.model, chat
template and generation config.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import tiktoken

from hadal.model.load import load_weights
from hadal.reference.forward import generate
from tests.dist.serving import StartServer
from tests.unit.gateway.test_family_chats import TEMPLATES
from tests.unit.gateway.test_tiktoken import PATTERN, some_tokens, write_folder
from tests.unit.model.test_family import quantise, write_checkpoint
from tests.waiting import PATIENCE_S

ASKED = "2 + 2? 世界 🙂"
NAMES = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")


@pytest.mark.more("unit tests hold its configuration, weights, tokens and template")
@pytest.mark.slow("a checkpoint is written and quantised")
def test_a_small_kimi_is_served(tmp_path: Path, borrow: StartServer) -> None:
    tokens = some_tokens()
    named = {content: len(tokens) + 2 + i for i, content in enumerate(NAMES)}
    write_folder(tmp_path)
    config = {
        "tokenizer_class": "TikTokenTokenizer",
        "added_tokens_decoder": {str(i): {"content": text} for text, i in named.items()},
        "chat_template": TEMPLATES["Kimi-K2"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    end = named["<|im_end|>"]
    write_checkpoint(tmp_path, "Kimi-K2", vocab_size=len(tokens) + 20, eos_token_id=len(tokens))
    quantise(tmp_path, pow2=False)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": end, "do_sample": False})
    )
    server = borrow("--model", str(tmp_path), "--model-name", "kimi")
    asked = {
        "model": "kimi",
        "messages": [{"role": "user", "content": ASKED}],
        "max_tokens": 40,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S).json()
    prompt = tiktoken.Encoding(
        "kimi",
        pat_str=PATTERN,
        mergeable_ranks={token: i for i, token in enumerate(tokens)},
        special_tokens=named,
    ).encode(
        "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
        f"<|im_user|>user<|im_middle|>{ASKED}<|im_end|><|im_assistant|>assistant<|im_middle|>",
        allowed_special="all",
    )
    assert reply["usage"]["prompt_tokens"] == len(prompt)
    expected = generate(load_weights(tmp_path), prompt, 40, {end})
    assert reply["choices"][0]["token_ids"] == expected
