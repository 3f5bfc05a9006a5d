"""A model's tokenizer as the gateway uses it: text to ids, and each id to the bytes it stands for.

Text may hold *control tokens*, the tokenizer's added tokens ("<|User|>", "</think>", end of
sentence). The caller chooses: they keep their function (`encode_controlled`), or are ordinary text
(`encode_plain`). Independent of chats and streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from hadal.core.errors import CheckpointError
from hadal.tokens.added import FLAGS, AddedToken
from hadal.tokens.split import Splitter
from hadal.tokens.table import read_fields, token_table

_COMPOSED = 4
"""Maximum number of characters that Unicode composes into one (U+1F82)."""
_SAMPLES = ("Hadal 0", "a", "e f")
"""Texts that show which tokens a post-processor adds."""
_PANIC = "PanicException"
"""Name of pyo3's exception class, which cannot be imported from any module."""


class Vocabulary:
    """Encoder and byte table of one model."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        """`fields`: of tokenizer.json; `source`: its name in errors. Raises CheckpointError."""
        table = token_table(fields, source)
        given = {**fields, "added_tokens": [], "truncation": None, "padding": None}
        try:
            # Added tokens are found here (`_pieces`), so that a control token typed by a user stays
            # text. The library normalises and encodes the text between them.
            self._words = Tokenizer.from_str(json.dumps(given))
            self._normalizer = self._words.normalizer
            self._words.normalizer = None
            self._around = self._added_around()
            self._all, self._ordinary = (
                self._splitters(fields, left_out) for left_out in (frozenset[str](), table.marks)
            )
        except BaseException as error:
            # The tokenizers library raises plain Exception. Its panics derive from BaseException.
            if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
                raise
            raise CheckpointError(f"{source} is not a usable tokenizer ({error}).") from error
        self.table = table
        self.control_ids, self.token_bytes = table.control_ids, table.token_bytes
        self.hidden_ids, self.marks, self.mark_ids = table.hidden_ids, table.marks, table.mark_ids
        self._longest = max(map(len, self.token_bytes), default=1)
        self._longest *= _chars_of_one(fields)

    def __len__(self) -> int:
        return len(self.token_bytes)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the text's number of tokens, without encoding it; 0 if the
        tokenizer may drop characters.
        """
        return -(-len(text) // self._longest) if self._longest else 0

    def encode_plain(self, text: str) -> list[int]:
        """Return ids of a text that has no control tokens: what looks like one is ordinary text."""
        return [
            each
            for piece in self._pieces(text, self._ordinary, "")
            for each in ([piece] if isinstance(piece, int) else self._plain_ids(piece))
        ]

    def encode_controlled(self, text: str, *, adds_special: bool = False) -> list[int]:
        """Return ids of a text with control tokens, like the tokenizers library. `adds_special`:
        add the tokens that the tokenizer's post-processor puts around a text.
        """
        ids = self._ids(text)
        return self.with_special(ids) if adds_special else ids

    def encode_shielded(self, text: str, shield: str) -> list[int]:
        """Return ids of a text without its shields. A control token with a shield after its first
        character is ordinary text.
        """
        return self._ids(text, shield)

    def with_special(self, ids: Iterable[int]) -> list[int]:
        """Return the ids with the post-processor's tokens around them."""
        before, behind = self._around
        return [*before, *ids, *behind]

    def normalized(self, text: str) -> str:
        """Return the text as the model's tokenizer reads it."""
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    def _ids(self, text: str, shield: str = "") -> list[int]:
        ids: list[int] = []
        for piece in self._pieces(text, self._all, shield):
            if isinstance(piece, int):
                ids.append(piece)
            elif shield and shield in piece:
                ids += self._plain_ids(piece.replace(shield, ""))
            else:
                ids += self._word_ids(piece)
        return ids

    def _pieces(
        self, text: str, splitters: tuple[Splitter, Splitter], shield: str
    ) -> Iterator[str | int]:
        """Split a text at added tokens, and normalise the text between them. Some tokens are
        matched before normalising, the others after it.
        """
        before, behind = splitters
        for piece in before.split(text, shield):
            if isinstance(piece, int):
                yield piece
            elif shield and shield in piece:  # A normaliser might drop a shield.
                parts = map(self.normalized, piece.split(shield))
                yield from behind.split(shield.join(parts), shield)
            else:
                yield from behind.split(self.normalized(piece), shield)

    def _plain_ids(self, text: str) -> list[int]:
        """Return ids of a normalised text without control tokens. If the vocabulary lists one among
        its ordinary words too, the text is encoded character by character, which avoids it.
        """
        ids = self._word_ids(text)
        if self.mark_ids.isdisjoint(ids):
            return ids
        singles = (self._words.encode(char, add_special_tokens=False).ids for char in text)
        return [i for ids in singles for i in ids if i not in self.mark_ids]

    def _word_ids(self, text: str) -> list[int]:
        """Return ids of a normalised text without added tokens."""
        if not text:
            return []
        # encode_batch releases the GIL, encode does not: a long prompt would stall all streams.
        ids: list[int] = self._words.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _splitters(
        self, fields: dict[str, Any], left_out: frozenset[str]
    ) -> tuple[Splitter, Splitter]:
        """Return the splitters at added tokens that apply before and after a text is normalised."""
        before: dict[str, tuple[int, AddedToken]] = {}
        behind: dict[str, tuple[int, AddedToken]] = {}
        for entry in fields.get("added_tokens") or []:
            flags = {name: bool(entry.get(name)) for name in FLAGS}
            token = AddedToken(entry["content"], **flags)
            if token.content in left_out:
                continue
            pattern = self.normalized(token.content) if token.normalized else token.content
            if not pattern:  # The library would then split texts within characters.
                raise ValueError(f"nothing is left of {token.content!r} when it is normalised")
            (behind if token.normalized else before)[pattern] = entry["id"], token
        return Splitter(before), Splitter(behind)

    def _added_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that the post-processor puts before and after every text."""
        found = {self._around_of(text) for text in _SAMPLES} - {None}
        if len(found) != 1:
            raise ValueError("its post_processor does more than add tokens around a text")
        ((before, behind),) = (each for each in found if each is not None)
        return [*before], [*behind]

    def _around_of(self, text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the ids around one text; None if the text has no tokens."""
        alone: list[int] = self._words.encode(text, add_special_tokens=False).ids
        ids: list[int] = self._words.encode(text, add_special_tokens=True).ids
        for at in range(len(ids) - len(alone) + 1):
            if alone and ids[at : at + len(alone)] == alone:
                return tuple(ids[:at]), tuple(ids[at + len(alone) :])
        return None

    def decode(self, ids: tuple[int, ...] | list[int]) -> str:
        """Return the text of ids, including control tokens. Unknown ids have no text."""
        known = (self.token_bytes[i] for i in ids if i < len(self.token_bytes))
        return b"".join(known).decode("utf-8", "replace")


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read the tokenizer of a model's folder. Raises CheckpointError."""
    return Vocabulary(*read_fields(folder))


def _chars_of_one(fields: dict[str, Any]) -> int:
    """Return the most text characters that may become one character of a token; 0: no limit."""
    added = fields.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return 0
    normalizer = fields.get("normalizer")
    if normalizer is None or normalizer == {"type": "Sequence", "normalizers": []}:
        return 1
    is_composing = normalizer.get("type") in ("NFC", "NFD", "NFKC", "NFKD")
    return _COMPOSED if is_composing else 0
