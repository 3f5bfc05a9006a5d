"""A small model folder without weights, with all files that a gateway reads. Its tokenizer is
trained when it is first needed.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
VOCAB_SIZE = 512
CONTEXT = 4096
TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}" + USER + "{{ m['content'] }}"
    "{% else %}" + ASSISTANT + "{{ m['content'] | trim }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "<think>\n{% endif %}"
)
_CORPUS = [
    "The answer is four. To add two numbers, write them below each other.",
    "Naïve café, résumé; 你好，世界 — こんにちは 🙂🙃 done.\n\nNext line.",
    "abc abd abe 0 1 2 3 4 5 6 7 8 9 10 <think> </think> stop stopping stopped",
]


def tokenizer_fields(*, think_tokens: bool = True) -> dict:
    """Return the content of a tokenizer.json. Without `think_tokens`, "<think>" is no token of its
    own.
    """
    return json.loads(_tokenizer_json(think_tokens))


@cache
def _tokenizer_json(think_tokens: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    ordinary = [USER, ASSISTANT, *(["<think>", "</think>"] if think_tokens else [])]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer.to_str()


def write_model_folder(
    folder: Path, *, think_tokens: bool = True, template: str = TEMPLATE
) -> Path:
    """Write config.json, tokenizer.json, tokenizer_config.json and generation_config.json of a
    small DeepSeek-V3 architecture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "deepseek_v3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "num_attention_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_tokenizer_json(think_tokens))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": BOS},
                "eos_token": EOS,
                "chat_template": template,
            }
        )
    )
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.95}))
    return folder
