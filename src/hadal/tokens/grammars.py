"""Texts that must follow a grammar: what of a JSON schema can be followed, and which tokens may
come next in each text. The work is llguidance's (github.com/guidance-ai/llguidance), and nobody else
imports it.

A schema becomes a grammar's text at the gateway, which also finds out what cannot be done with it;
each rank follows that text token by token. Whether a grammar can be followed depends on no
vocabulary, so one of single bytes says it. All limits are counts, so they hold or break the same way
wherever a grammar is followed. Knows no requests, slots, threads or tensors.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from hadal.core.plans import Grammar
from hadal.tokens.table import TokenTable

if TYPE_CHECKING:
    import numpy as np  # The gateway looks at grammars in a process that counts its memory.

_LIMITS: dict[str, Any] = {
    # The library's own, which are about 20 ms of a core for each of the first three; less memory.
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # They would quote the schema and the text.
}
_KEPT = 16
"""Grammars whose automata are kept for the next request with the same: some hundred KiB each, and
tens of MiB at their limit.
"""
_SILENT = 0
_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": r"[ \t\n\r]{1,32}",
}
"""Nothing of a schema is left out or taken for something like it. Between what means something there
may be a line break and some indentation: a model that knows no JSON would go on with nothing else.
"""
_ANY_JSON_OBJECT = {"type": "object"}
_END_OF_BYTES = 256
_NOT_KNOWN = "Unimplemented keys: "
_QUOTED = re.compile(r"\n<non-verbose/>|\n +1 \|.*", re.DOTALL)
"""Behind an error: the grammar's text."""


def grammar_text(schema: dict[str, Any] | None, *, follows_reasoning: bool) -> str:
    """A grammar of the JSON texts that the schema allows; None: of all JSON objects. Behind a
    reasoning a few line breaks may come first, as models are taught.
    """
    json_schema = {**(_ANY_JSON_OBJECT if schema is None else schema), "x-guidance": _OPTIONS}
    # Without "no_forcing" only the encoder's own tokens of what must come would be allowed, and a
    # model that writes the same text in others would be led astray.
    return "\n".join(
        (
            '%llguidance {"no_forcing": true}',
            "start: BREAKS json" if follows_reasoning else "start: json",
            *(["BREAKS: /[\\n ]{0,4}/"] if follows_reasoning else []),
            f"json: %json {json.dumps(json_schema, ensure_ascii=False)}",
        )
    )


def complaint(text: str) -> str | None:
    """Why this grammar cannot be followed; None if it can. May take as long as the limits let it,
    and more for schemas that are made for it.
    """
    limits = LLParserLimits(**_LIMITS)
    is_error, said = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    if is_error:
        return _in_our_words(said[0])
    matcher = LLMatcher(_byte_tokenizer(), text, log_level=_SILENT, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return _in_our_words(matcher.get_error()) if matcher.is_error() else None


def _in_our_words(said: str) -> str:
    said = _QUOTED.sub("", said).rpartition("failed to compile JSON schema: ")[2].strip()
    if said.startswith(_NOT_KNOWN):
        keys, _ = json.JSONDecoder().raw_decode(said.removeprefix(_NOT_KNOWN))
        return f"{', '.join(map(repr, keys))} {'is' if len(keys) == 1 else 'are'} not supported"
    if said.startswith("oneOf constraints"):
        return "'oneOf' is not supported where more than one of its schemas may hold; use 'anyOf'"
    if said.startswith("Unknown format: "):
        return f"'format' {said.removeprefix('Unknown format: ')!r} is not supported"
    if said.startswith("regex parse error"):
        return f"'pattern' is not supported: {said.rpartition('error: ')[2]}"
    if said.startswith("Resource "):
        return "'$ref' is supported within the schema only"
    if said.startswith("NoExtension"):
        return "no text satisfies it"
    return said[:500]


class _AsWrapped:
    """What llguidance asks of a tokenizer. It encodes nothing, as no text is forced."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _byte_tokenizer() -> LLTokenizer:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    wrapped = TokenizerWrapper(_AsWrapped(tokens, [_END_OF_BYTES], _END_OF_BYTES))
    return LLTokenizer(wrapped, eos_token=_END_OF_BYTES)


class Follower:
    """How far one text is in its grammar."""

    def __init__(self, grammar: Grammar, tokens: Sequence[int]) -> None:
        """`tokens` are there already. Costs nothing before the first mask is wanted."""
        self.error: str | None = None
        """Why it cannot be followed any further; nothing is allowed then."""
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._unread = list(tokens)
        self._has_begun, self._has_ended = grammar.begins_after < 0, False

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were drawn."""
        self._unread.extend(tokens)

    def _read(self, make: Callable[[Grammar], LLMatcher]) -> LLMatcher:
        """Take in what was drawn."""
        if self._matcher is None:
            self._matcher = make(self._grammar)
        tokens, self._unread = self._unread, []
        begin, ends = self._grammar.begins_after, self._grammar.end_ids
        for at, token in enumerate(tokens):
            if token in ends:
                self._has_ended = True
                del tokens[at:]
                break
        if not self._has_begun and begin in tokens:
            self._has_begun = True
            del tokens[: tokens.index(begin) + 1]
        if self._has_begun:
            self._matcher.consume_tokens(tokens)
        return self._matcher

    def _bounds(self, drafts: Sequence[int]) -> tuple[int, int]:
        """Rows from .. to - 1 have a mask; row i comes behind `drafts[:i]`. What is drawn behind an
        end, before it is known to be one, is for nobody.
        """
        end = 0 if self._has_ended else len(drafts) + 1
        for at, token in enumerate(drafts):
            if token in self._grammar.end_ids:
                end = min(end, at + 1)
        if self._has_begun:
            return 0, end
        begin = self._grammar.begins_after
        return (drafts.index(begin) + 1 if begin in drafts else end), end

    def _look(self) -> bool:
        """Whether it can still be followed."""
        assert self._matcher is not None
        if self._matcher.is_error() and self.error is None:
            self.error = _in_our_words(self._matcher.get_error())
        return self.error is None


class TextRows(NamedTuple):
    """TextRows that a text draws from, one after the other as long as what is drawn is what was
    drafted.
    """

    follower: Follower
    first: int
    """Number of the first row; the others follow."""
    drafts: Sequence[int]
    """What the second row was fed, the third, and so on."""


class Grammars:
    """Grammars over the tokens of one model. One thread at a time."""

    def __init__(
        self, read: Callable[[], TokenTable], vocab_size: int, num_threads: int = 1
    ) -> None:
        """`read` gives the tokens, of which the model has `vocab_size`, when the first grammar
        comes.
        """
        self._read = read
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._executor: LLExecutor | None = None
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        """By the tokens that end a text: a model has one such list."""
        self._matchers: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @property
    def num_words(self) -> int:
        """Words of 32 bits of a mask."""
        return -(-self._vocab_size // 32)

    def allow(
        self, all_rows: Sequence[TextRows], bits_RW: np.ndarray, has_mask_R: np.ndarray
    ) -> None:
        """Write what each row may draw into `bits_RW`, uint32, all zero before; and to
        `has_mask_R`, bool, which rows do not draw as they like. The texts stay where they are.
        """
        if self._executor is None:
            self._executor = LLExecutor(num_threads=self._num_threads)
        alone: list[tuple[LLMatcher, int]] = []
        with_drafts: list[tuple[LLMatcher, int, list[int]]] = []
        for rows in all_rows:
            matcher = rows.follower._read(self._matcher)
            begin, end = rows.follower._bounds(rows.drafts)
            if begin >= end:
                continue
            first, drafts = rows.first + begin, list(rows.drafts[begin : end - 1])
            has_mask_R[first : first + len(drafts) + 1] = True
            if not rows.follower._look():
                continue
            if drafts:
                with_drafts.append((matcher, first, drafts))
            else:
                alone.append((matcher, first))
        into = bits_RW.ctypes.data, 4 * self.num_words, len(bits_RW)
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *into)
        if with_drafts:
            # A draft that is not allowed is not drawn: the rows behind it stay without any token.
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *into)
        for rows in all_rows:
            if not rows.follower._look():
                bits_RW[rows.first : rows.first + len(rows.drafts) + 1] = 0

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """One at its beginning, which shares what was found out with the others of its grammar."""
        matcher = self._matchers.pop(grammar, None)
        if matcher is None:
            limits = LLParserLimits(**_LIMITS)
            tokenizer = self._tokenizer(grammar.end_ids)
            matcher = LLMatcher(tokenizer, grammar.text, log_level=_SILENT, limits=limits)
        self._matchers[grammar] = matcher
        if len(self._matchers) > _KEPT:
            self._matchers.popitem(last=False)
        return matcher.deep_copy()

    def _tokenizer(self, end_ids: tuple[int, ...]) -> LLTokenizer:
        if end_ids not in self._tokenizers:
            table = self._read()
            tokens = [*table.token_bytes, *[b""] * (self._vocab_size - len(table.token_bytes))]
            special = sorted({*table.mark_ids, *end_ids})
            wrapped = TokenizerWrapper(_AsWrapped(tokens[: self._vocab_size], special, end_ids[0]))
            self._tokenizers[end_ids] = LLTokenizer(
                wrapped,
                n_vocab=self._vocab_size,
                eos_token=list(end_ids),
                slices=LLTokenizer.json_slices(),
            )
        return self._tokenizers[end_ids]
