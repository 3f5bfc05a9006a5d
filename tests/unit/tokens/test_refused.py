"""Unsupported tokenizer files: the error names the file, the field and its value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hadal.core.errors import CheckpointError
from hadal.tokens.table import read_fields

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FIELDS: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    "pre_tokenizer": LEVEL,
    "decoder": LEVEL,
    "added_tokens": [],
}


def read(folder: Path, config: dict[str, Any], fields: dict[str, Any] | None = None) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(fields or FIELDS))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    read_fields(folder)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30},
        {"tokenizer_class": "Qwen2Tokenizer", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
        {"split_special_tokens": False, "fast_tokenizer_files": ["tokenizer.json"]},
    ],
)
def test_files_that_are_followed(tmp_path: Path, config: dict[str, Any]) -> None:
    read(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"tokenizer_class": "Qwen2TokenizerFast"}, "tokenizer_class is 'Qwen2TokenizerFast'"),
        ({"split_special_tokens": True}, "split_special_tokens is True"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex is True"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "fast_tokenizer_files is"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder\['x'\]"),
        ({"added_tokens_decoder": {"1": {"content": 1}}}, r"added_tokens_decoder\['1'\] is"),
        ({"bos_token": {"content": "a", "lstrip": 1}}, "bos_token: lstrip is 1"),
        ({"extra_special_tokens": "a"}, "extra_special_tokens is 'a'; a list or an object"),
    ],
)
def test_fields_that_are_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {words}"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {**FIELDS["model"], "dropout": 0.1}}, "model.dropout is 0.1"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre_tokenizer has a Metaspace"),
    ],
)
def test_parts_that_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: {words}"):
        read(tmp_path, {}, {**FIELDS, **change})


def test_the_class_of_config_json_counts_where_the_tokenizers_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(CheckpointError, match=r"config\.json: tokenizer_class is 'GPT2Tokenizer'"):
        read(tmp_path, {})
    (tmp_path / "config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "model_type": "glm4_moe_lite"})
    )
    read(tmp_path, {})
