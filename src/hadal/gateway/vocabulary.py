"""A model's tokenizer as the gateway uses it: text to ids, and each id to the bytes it stands for.

Text may hold *control tokens*, the tokenizer's added tokens ("<|User|>", "</think>", end of
sentence). The caller says where they count (`encode_controlled`) and where they are ordinary text
(`encode_plain`). Knows no chat and no stream.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hadal.core import documents
from hadal.core.documents import shown
from hadal.core.errors import CheckpointError
from hadal.gateway import tiktoken
from hadal.gateway.tiktoken import byte_of_char

_MARK = re.compile(r"<.+>|\[.+\]")
"""How added tokens look that steer and are not flagged as special: "<think>", "<｜User｜>",
"[INST]".
"""

MAX_ID = (1 << 22) - 1
"""Highest id of a token; DeepSeek-V3 has 129,280 of them."""


class Vocabulary:
    """Encoder and byte table of one model."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        """`fields` is the content of a tokenizer.json; `source` names it in errors. Raises
        CheckpointError.
        """
        _check_fields(fields, source)
        added = fields.get("added_tokens") or []
        try:
            # Without added tokens the tokenizer has no way to make a control token of what a user
            # typed.
            plain = {
                **fields,
                "added_tokens": [],
                "post_processor": None,
                "truncation": None,
                "padding": None,
            }
            self._plain = Tokenizer.from_str(json.dumps(plain))
            self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
            vocab: dict[str, int] = fields["model"]["vocab"]
            self.token_bytes = _byte_table(vocab, added)
        except Exception as error:  # The tokenizers library raises plain Exception.
            raise CheckpointError(f"{source}: is not a usable tokenizer ({error}).") from error
        self.hidden_ids = frozenset(token["id"] for token in added if token.get("special"))
        """Special tokens: they steer and have no text. Other added tokens, such as "<think>",
        have.
        """
        self._controls = frozenset(self.control_ids.values())
        shaped = {text for text in self.control_ids if _MARK.fullmatch(text)}
        self.marks = frozenset(
            {token["content"] for token in added if token.get("special")} | shaped
        )
        """Texts of the tokens that steer a chat. Other added tokens, such as a run of spaces, are
        ordinary text.
        """
        self.mark_ids = self.hidden_ids | {self.control_ids[text] for text in shaped}
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

        self._longest = max(map(len, self.token_bytes), default=1)

    def __len__(self) -> int:
        return len(self.token_bytes)

    def fewest_tokens(self, text: str) -> int:
        """No encoding of the text is shorter: a bound that costs nothing, to refuse what is far too
        long.
        """
        return -(-len(text) // self._longest)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        if not text:
            return []
        # encode_batch lets go of the GIL, encode does not: a long prompt would stop every stream.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._controls.isdisjoint(ids):
            return ids
        # A vocabulary may list a control token among its ordinary words; a single character never
        # is one.
        singles = (self._plain.encode(char, add_special_tokens=False).ids for char in text)
        return [i for ids in singles for i in ids if i not in self._controls]

    def encode_controlled(self, text: str) -> list[int]:
        """Ids of a text in which control tokens count."""
        ids: list[int] = []
        for piece in self.pieces(text):
            ids.extend([piece] if isinstance(piece, int) else self.encode_plain(piece))
        return ids

    def pieces(self, text: str) -> list[str | int]:
        """Cut a text at its control tokens: stretches of plain text, and ids."""
        if self._split is None:
            return [text]
        pieces: list[str | int] = []
        at = 0
        for match in self._split.finditer(text):
            if match.start() > at:
                pieces.append(text[at : match.start()])
            pieces.append(self.control_ids[match[0]])
            at = match.end()
        if at < len(text):
            pieces.append(text[at:])
        return pieces

    def decode(self, ids: tuple[int, ...] | list[int]) -> str:
        """The text of some ids, control tokens included. An id that no token has stands for
        nothing.
        """
        known = (self.token_bytes[i] for i in ids if i < len(self.token_bytes))
        return b"".join(known).decode("utf-8", "replace")


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read `folder/tokenizer.json`, or `tiktoken.model` where there is none. Raises
    CheckpointError.
    """
    path, other = folder / "tokenizer.json", folder / tiktoken.FILE
    if other.exists() and not path.exists():
        return Vocabulary(tiktoken.tokenizer_fields(folder), str(other))
    return Vocabulary(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the tokenizer's files. Raises CheckpointError."""
    return documents.read_json(
        path, "tokenizer", error=CheckpointError, hint="The model's folder is not complete."
    )


def _check_fields(fields: dict[str, Any], source: str) -> None:
    """Raise CheckpointError for a tokenizer of another kind, and for one that is none."""
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
            f"{source}: decoder is not ByteLevel but {shown(decoder)}; only byte-level tokenizers"
            " are served."
        )
    model = fields.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not all(_is_id(i) for i in vocab.values()):
        raise CheckpointError(
            f"{source}: model.vocab must give every token an id, 0 to {MAX_ID:,}."
        )
    assert isinstance(model, dict)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        # A byte-level token is its bytes alone; and where one cuts what is no prefix, the
        # tokenizers library aborts.
        if model.get(name):
            raise CheckpointError(
                f"{source}: model.{name} is {shown(model[name])}; only byte-level tokenizers are"
                " served, without it."
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
                f"{source}: added_tokens[{index}] is {shown(token)}; content, a text, and id, 0 to"
                f" {MAX_ID:,}, are needed."
            )


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ID


def _byte_table(vocab: dict[str, int], added: list[dict[str, Any]]) -> list[bytes]:
    """Index is id. Ids that no token has, as padding of the vocabulary leaves them, stand for
    nothing.
    """
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
