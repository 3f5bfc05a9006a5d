"""Conversion of a `tiktoken.model`, the vocabulary of Kimi-K2 and Moonlight, to tokenizer.json.

A line of the file is a token's bytes in base64 and its rank, which is its id. Tiktoken repeatedly
joins the two neighbours in a word that together are the token of lowest rank. BPE gives the same
tokens if its merges are all splits of each token into two others, in the order of ranks. (Only one
split of a token can ever occur: when two neighbours are joined to a token, all joins of lower rank
within its bytes have been made.) A word that is a token stays whole, as with `ignore_merges`.

The pattern that cuts a text into words is not in the file but in the model's own code, and is
repeated here. The control tokens of chats are in tokenizer_config.json.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hadal.core.documents import read_json, read_text, shown
from hadal.core.errors import CheckpointError
from hadal.tokens.added import IGNORED

FILE = "tiktoken.model"
_PATTERNS = {
    # Pattern of both tokenization_kimi.py (Kimi-K2) and tokenization_moonshot.py (Moonlight): runs
    # of Han characters, words without them, numbers of up to three digits, signs, white space.
    "TikTokenTokenizer": "|".join(
        (
            r"[\p{Han}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
}
"""`tokenizer_class` -> pattern that cuts a text into words."""
_MAX_ID_DIGITS = 9


def byte_of_char() -> dict[str, int]:
    """Return character -> byte of byte-level BPE (GPT-2): printable bytes have their own character,
    the others those from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def tokenizer_fields(folder: Path, *, with_merges: bool = True) -> dict[str, Any]:
    """Return the content of a tokenizer.json with the same tokens. Takes about 1.5 s for Kimi's
    163,584 tokens, mostly for the merges. Raises CheckpointError, which names the file.
    """
    config_path = folder / "tokenizer_config.json"
    config = read_json(
        config_path,
        "tokenizer",
        error=CheckpointError,
        hint="The model's folder is incomplete.",
        ignored=IGNORED,
    )
    kind = config.get("tokenizer_class")
    pattern = _PATTERNS.get(kind) if isinstance(kind, str) else None
    if pattern is None:
        raise CheckpointError(
            f"{config_path}: tokenizer_class is {shown(kind)}, which is not supported. With"
            f" a {FILE}, {', '.join(map(repr, _PATTERNS))} can be read."
        )
    tokens = _read_tokens(folder / FILE)
    char_of_byte = {byte: char for char, byte in byte_of_char().items()}
    vocab = {token.decode("latin-1").translate(char_of_byte): i for i, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(config, config_path, len(tokens))),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": list(_merges(vocab)) if with_merges else [],
            "ignore_merges": True,
        },
    }


def _read_tokens(path: Path) -> list[bytes]:
    """Return the bytes of every token by rank. Raises CheckpointError."""
    text = read_text(path, "vocabulary", error=CheckpointError)
    tokens: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        encoded, _, rank = line.partition(" ")
        try:
            token = binascii.a2b_base64(encoded, strict_mode=True)
        except ValueError:  # Also raised for text that is not ASCII.
            token = b""
        if not token or rank.strip() != str(len(tokens)):
            raise CheckpointError(
                f"{path}: line {number} is {shown(line)}; it needs a token in base64, a space and the rank"
                f" {len(tokens)}."
            )
        tokens.append(token)
    known = set(tokens)
    if len(known) < len(tokens):
        raise CheckpointError(f"{path}: a token occurs twice; the file is damaged.")
    if missing := [byte for byte in range(256) if bytes([byte]) not in known]:
        raise CheckpointError(
            f"{path}: there is no token for byte {missing[0]}; the file is damaged or cut off."
        )
    return tokens


def _merges(vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield every split of a token into two other tokens. `vocab` must be in the order of ranks."""
    for token in vocab:
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                yield left, right


def _added_tokens(config: dict[str, Any], path: Path, num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the control tokens of chats, with ids after the vocabulary's; other ids stay unused."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise CheckpointError(
            f"{path}: added_tokens_decoder is {shown(added)}; an object is needed."
        )
    for key, token in added.items():
        content = token.get("content") if isinstance(token, dict) else None
        # Check the digits first: Python refuses to convert a number of five thousand digits.
        is_id = key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS
        if not isinstance(content, str) or not content or not is_id or int(key) < num_tokens:
            raise CheckpointError(
                f"{path}: added_tokens_decoder[{shown(key)}] is {shown(token)}; it needs content, a text,"
                f" and an id of at least {num_tokens}, after the tokens of {FILE}."
            )
        yield {
            "id": int(key),
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token.get("special") is not False,
        }
