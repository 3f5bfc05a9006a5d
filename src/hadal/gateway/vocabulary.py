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

from hadal.core.errors import CheckpointError
from hadal.tokens.table import read_fields, token_table


class Vocabulary:
    """Encoder and byte table of one model."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        """`fields` is the content of a tokenizer.json; `source` names it in errors. Raises
        CheckpointError.
        """
        table = token_table(fields, source)
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
        except Exception as error:  # The tokenizers library raises plain Exception.
            raise CheckpointError(f"{source}: is not a usable tokenizer ({error}).") from error
        self.table = table
        self.control_ids, self.token_bytes = table.control_ids, table.token_bytes
        self.hidden_ids, self.marks, self.mark_ids = table.hidden_ids, table.marks, table.mark_ids
        self._controls = frozenset(self.control_ids.values())
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
    """Read the tokenizer of a model's folder. Raises CheckpointError."""
    return Vocabulary(*read_fields(folder))
