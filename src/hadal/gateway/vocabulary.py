"""A tokenizer.json as the gateway uses it: text to ids, and each id to the bytes it stands for.

Text may hold *control tokens*, the tokenizer's added tokens ("<|User|>", "</think>", end of sentence). The caller says
where they count (`encode_controlled`) and where they are ordinary text (`encode_plain`). Knows no chat and no stream.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hadal.core.errors import CheckpointError


class Vocabulary:
    """Encoder and byte table of one model."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        """`fields` is the content of a tokenizer.json; `source` names it in errors. Raises CheckpointError."""
        if not _is_byte_level(fields):
            raise CheckpointError(f"{source}: decoder is not ByteLevel; only byte-level tokenizers are served.")
        added = fields.get("added_tokens") or []
        try:
            # Without added tokens the tokenizer has no way to make a control token of what a user typed.
            plain = {**fields, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            self._plain = Tokenizer.from_str(json.dumps(plain))
            self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in added}
            vocab: dict[str, int] = fields["model"]["vocab"]
            self.token_bytes = _byte_table(vocab, added)
        except Exception as error:  # The tokenizers library raises plain Exception.
            raise CheckpointError(f"{source}: is not a usable tokenizer ({error}).") from error
        self.hidden_ids = frozenset(token["id"] for token in added if token.get("special"))
        """Special tokens: they steer and have no text. Other added tokens, such as "<think>", have."""
        self._controls = frozenset(self.control_ids.values())
        longest_first = sorted(self.control_ids, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

        self._longest = max(map(len, self.token_bytes), default=1)

    def __len__(self) -> int:
        return len(self.token_bytes)

    def fewest_tokens(self, text: str) -> int:
        """No encoding of the text is shorter: a bound that costs nothing, to refuse what is far too long."""
        return -(-len(text) // self._longest)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        if not text:
            return []
        # encode_batch lets go of the GIL, encode does not: a long prompt would stop every stream.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._controls.isdisjoint(ids):
            return ids
        # A vocabulary may list a control token among its ordinary words; a single character never is one.
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
                pieces.append(text[at:match.start()])
            pieces.append(self.control_ids[match[0]])
            at = match.end()
        if at < len(text):
            pieces.append(text[at:])
        return pieces

    def decode(self, ids: tuple[int, ...] | list[int]) -> str:
        """The text of some ids, control tokens included."""
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read `folder/tokenizer.json`. Raises CheckpointError."""
    path = folder / "tokenizer.json"
    return Vocabulary(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object. Raises CheckpointError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; the model's folder is not complete.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: must hold one JSON object.")
    return fields


def _is_byte_level(fields: dict[str, Any]) -> bool:
    decoder = fields.get("decoder") or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_table(vocab: dict[str, int], added: list[dict[str, Any]]) -> list[bytes]:
    """Index is id. Ids that no token has, as padding of the vocabulary leaves them, stand for nothing."""
    byte_of_char = _byte_of_char()
    size = 1 + max([*vocab.values(), *(token["id"] for token in added)])
    table = [b""] * size
    for token, i in vocab.items():
        if all(char in byte_of_char for char in token):
            table[i] = bytes(byte_of_char[char] for char in token)
        else:
            table[i] = token.encode()
    for entry in added:
        table[entry["id"]] = entry["content"].encode()
    return table
