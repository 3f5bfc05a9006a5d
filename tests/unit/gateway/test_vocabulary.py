"""The byte table and both encoders: plain text decodes to itself, controlled text gets the ids of the
tokenizers library; damaged tokenizers are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hadal.core.errors import CheckpointError
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.vocabulary import read_vocabulary

from .model_folder import BOS, EOS, USER, tokenizer_fields


@given(st.text())
def test_plain_text_comes_back(model: ServedModel, text: str) -> None:
    ids = model.vocabulary.encode_plain(text)
    assert model.vocabulary.decode(ids) == text
    assert model.vocabulary.fewest_tokens(text) <= len(ids)


@given(
    st.lists(st.sampled_from([BOS, EOS, USER, "<think>", "a", " b", "🙂", "<", "\n"])).map("".join)
)
def test_controlled_text_is_the_librarys(model: ServedModel, folder: Path, text: str) -> None:
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert (
        model.vocabulary.encode_controlled(text)
        == library.encode(text, add_special_tokens=False).ids
    )


def test_every_byte_has_a_token(model: ServedModel) -> None:
    assert {raw for raw in model.vocabulary.token_bytes if len(raw) == 1} >= {
        bytes([byte]) for byte in range(256)
    }


def test_only_special_tokens_are_hidden(model: ServedModel) -> None:
    controls = model.vocabulary.control_ids
    assert model.vocabulary.hidden_ids == {controls[BOS], controls[EOS]}


def test_a_tokenizer_over_which_its_library_panics_is_refused(tmp_path: Path) -> None:
    """The post-processor appends a token to every text, but does not define that token."""
    template = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    template["single"] = [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "lost", "type_id": 0}},
    ]
    fields = {**tokenizer_fields(), "post_processor": template}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match="is not a usable tokenizer"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"decoder": {"type": "Fuse"}}, "decoder is .*, not ByteLevel"),
        ({"decoder": None}, "decoder is .*, not ByteLevel"),
        ({"model": {"type": "Nothing", "vocab": {}}}, "is not a usable tokenizer"),
        ({"model": {}}, r"model\.vocab must give every token an id"),
        ({"added_tokens": [{"id": 1}]}, r"added_tokens\[0\] is"),
    ],
)
def test_damaged_files(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**tokenizer_fields(), **change}))
    with pytest.raises(CheckpointError, match=error) as caught:
        read_vocabulary(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize("value", [3, True, [], [1]], ids=str)
def test_a_special_token_of_another_type(tmp_path: Path, value: object) -> None:
    """If it were ignored, prompts would begin without this token."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_fields()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": value}))
    with pytest.raises(CheckpointError, match="bos_token is"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_files_that_are_no_json_object(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CheckpointError, match="no such tokenizer file"):
        read_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize("name", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_tokens_with_something_before_or_behind_them_are_refused(tmp_path: Path, name: str) -> None:
    """The tokenizers library strips the prefix or suffix from every merged token, even if the token
    lacks it, and then aborts the process.
    """
    fields = tokenizer_fields()
    fields["model"][name] = "/"
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=f"model.{name} is '/'"):
        read_vocabulary(tmp_path)
