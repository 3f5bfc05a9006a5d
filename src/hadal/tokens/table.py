"""A model's tokens from its files: the bytes of each id, and the ids of control tokens.

Independent of encoding and chats; gateway/text/vocabulary encodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hadal.core import documents
from hadal.core.documents import shown
from hadal.core.errors import CheckpointError
from hadal.tokens import tiktoken
from hadal.tokens.added import load_added_tokens
from hadal.tokens.refused import check_files
from hadal.tokens.tiktoken import byte_of_char

_MARK = re.compile(r"<.+>|\[.+\]|｜.+｜")
"""Pattern of control tokens that are not flagged as special: "<think>", "[INST]", "｜DSML｜"."""

MAX_ID = (1 << 22) - 1
"""Highest accepted token id. DeepSeek-V3 has 129,280 tokens."""


@dataclass(frozen=True)
class TokenTable:
    """All tokens of one model."""

    token_bytes: list[bytes]
    """Bytes of each token; the index is its id. Unused ids have no bytes."""
    control_ids: dict[str, int]
    """Text -> id of the added tokens."""
    hidden_ids: frozenset[int]
    """Ids of special tokens, which control the model and have no text. Other added tokens, such as
    "<think>", have text.
    """
    marks: frozenset[str]
    """Texts of tokens that control a chat: special ones, and ones shaped like "<think>". Other
    added tokens, such as a run of spaces, are ordinary text.
    """
    mark_ids: frozenset[int]


def token_table(fields: dict[str, Any], source: str) -> TokenTable:
    """Return the tokens of a tokenizer.json with the content `fields`; `source`: its name for
    errors. Raises CheckpointError.
    """
    _check_fields(fields, source)
    added = fields.get("added_tokens") or []
    control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
    special = [token for token in added if token.get("special")]
    shaped = {text for text in control_ids if _MARK.fullmatch(text)}
    hidden_ids = frozenset(token["id"] for token in special)
    try:
        token_bytes = _byte_table(fields["model"]["vocab"], added)
    except UnicodeEncodeError as error:  # Half of a surrogate pair is not a character.
        raise CheckpointError(f"{source} is not a usable tokenizer ({error}).") from error
    return TokenTable(
        token_bytes,
        control_ids,
        hidden_ids,
        marks=frozenset({token["content"] for token in special} | shaped),
        mark_ids=hidden_ids | {control_ids[text] for text in shaped},
    )


def read_fields(folder: Path, *, with_merges: bool = True) -> tuple[dict[str, Any], str]:
    """Return (fields, path) of `folder/tokenizer.json`, or of `tiktoken.model` converted to it. A
    tokenizer.json gets the added tokens of all files of the folder. A conversion without merges has
    all tokens but cannot encode. Raises CheckpointError.
    """
    path, other = folder / "tokenizer.json", folder / tiktoken.FILE
    if other.exists() and not path.exists():
        return tiktoken.tokenizer_fields(folder, with_merges=with_merges), str(other)
    fields = read_json(path)
    _check_fields(fields, str(path))
    check_files(folder, fields, str(path))
    return {**fields, "added_tokens": load_added_tokens(folder, fields, str(path))}, str(path)


def read_token_table(folder: Path) -> TokenTable:
    """Return the tokens of a model's folder. Raises CheckpointError."""
    return token_table(*read_fields(folder, with_merges=False))


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer file. Raises CheckpointError, also if it is absent."""
    return documents.read_json(
        path, "tokenizer", error=CheckpointError, hint="The model's folder is incomplete."
    )


def _check_fields(fields: dict[str, Any], source: str) -> None:
    """Raise CheckpointError for invalid fields or a tokenizer that is not byte-level BPE."""
    decoder = fields.get("decoder")
    parts = (
        decoder.get("decoders")
        if isinstance(decoder, dict) and decoder.get("type") == "Sequence"
        else [decoder]
    )
    if not isinstance(parts, list) or not any(
        isinstance(part, dict) and part.get("type") == "ByteLevel" for part in parts
    ):
        raise CheckpointError(
            f"{source}: decoder is {shown(decoder)}, not ByteLevel; only byte-level tokenizers"
            " are supported."
        )
    model = fields.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not all(_is_id(i) for i in vocab.values()):
        raise CheckpointError(
            f"{source}: model.vocab must give every token an id, 0 to {MAX_ID:,}."
        )
    assert isinstance(model, dict)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        # Byte-level tokens have no affixes, and the tokenizers library aborts at a missing prefix.
        if model.get(name):
            raise CheckpointError(
                f"{source}: model.{name} is {shown(model[name])}; only byte-level tokenizers without"
                " it are supported."
            )
    added = fields.get("added_tokens") or []
    if not isinstance(added, list):
        raise CheckpointError(f"{source}: added_tokens is {shown(added)}; a list is needed.")
    for index, token in enumerate(added):
        is_token = (
            isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]
        )
        if not is_token or not _is_id(token.get("id")):
            raise CheckpointError(
                f"{source}: added_tokens[{index}] is {shown(token)}; it needs content, a text, and id,"
                f" 0 to {MAX_ID:,}."
            )


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


def _byte_table(vocab: dict[str, int], added: list[dict[str, Any]]) -> list[bytes]:
    """Return the bytes of each token by id; unused ids have none."""
    char_to_byte = byte_of_char()
    size = 1 + max([*vocab.values(), *(token["id"] for token in added)])
    table = [b""] * size
    for token, i in vocab.items():
        if all(char in char_to_byte for char in token):
            table[i] = bytes(char_to_byte[char] for char in token)
        else:
            table[i] = token.encode()
    for entry in added:
        table[entry["id"]] = entry["content"].encode()
    return table
