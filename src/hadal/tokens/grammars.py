"""Texts that must follow a grammar: what of a JSON schema can be followed, and which tokens may
come next in each text. The work is llguidance's (github.com/guidance-ai/llguidance), and nobody else
imports it.

A schema, or a list of calls with a schema for each, becomes a grammar's text at the gateway, which
also finds out what cannot be done with it; each rank follows that text token by token. Whether a
grammar can be followed depends on no vocabulary, so one of single bytes says it. All limits are
counts, so they hold or break the same way wherever a grammar is followed. Knows no requests, slots,
threads or tensors.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
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
    "whitespace_pattern": r"[ \t]{1,20}|[ \t]?(\r?\n){1,2}[ \t]{0,20}",
}
"""Nothing of a schema is left out or taken for something like it. Between what means something there
may be two line breaks and the indentation of five levels: a model that knows no JSON draws all the
blanks it may, until no token is left for its answer.
"""
ANY_JSON_OBJECT: dict[str, Any] = {"type": "object"}
_END_OF_BYTES = 256
MARK_IDS = range(257, 265)
"""What stands for marks where a grammar is looked at that has some."""
_NOT_KNOWN = "Unimplemented keys: "
_QUOTED = re.compile(r"\n<non-verbose/>|\n +1 \|.*", re.DOTALL)
"""Behind an error: the grammar's text."""


@dataclass(frozen=True)
class CallRule:
    """How one tool is called: texts, patterns and marks (by their ids) around its arguments."""

    before: tuple[str | re.Pattern[str] | int, ...]
    arguments: dict[str, Any]
    """Their schema."""
    behind: tuple[str | int, ...]


@dataclass(frozen=True)
class CallList:
    """How calls stand one after the other, between two marks."""

    begin: int
    end: int
    gap: str
    """What may stand between two calls; "" is nothing."""
    calls: tuple[CallRule, ...]
    is_single: bool
    """One call is all."""


def grammar_text(schema: dict[str, Any] | None, *, follows_reasoning: bool) -> str:
    """A grammar of the JSON texts that the schema allows; None: of all JSON objects. Behind a
    reasoning a few line breaks may come first, as models are taught.
    """
    rules = [_content_rule(ANY_JSON_OBJECT if schema is None else schema)]
    return _text("content", rules, follows_reasoning)


def calls_text(
    calls: CallList,
    *,
    content: dict[str, Any] | None = None,
    follows_reasoning: bool = False,
    is_opened: bool = False,
) -> str:
    """A grammar of these calls, or else of JSON texts that the schema `content` allows. `is_opened`:
    it begins with the list's mark, or with a call if that is left out, wherever in a reply it is.
    """
    start, rules = "calls", _call_rules(calls, is_opened)
    if content is not None:
        start, rules = "content | calls", [_content_rule(content), *rules]
    return _text(start, rules, follows_reasoning)


def _text(start: str, rules: Sequence[str], follows_reasoning: bool) -> str:
    if follows_reasoning:
        start, rules = f"BREAKS ({start})", ["BREAKS: /[\\n ]{0,4}/", *rules]
    # Without "no_forcing" only the encoder's own tokens of what must come would be allowed, and a
    # model that writes the same text in others would be led astray.
    return "\n".join(('%llguidance {"no_forcing": true}', f"start: {start}", *rules))


def _content_rule(schema: dict[str, Any]) -> str:
    return f"content: {_json_of(schema)}"


def _call_rules(calls: CallList, is_opened: bool) -> list[str]:
    gap = f"{json.dumps(calls.gap)}? " if calls.gap else ""
    more = "" if calls.is_single else f" ({gap}call)*"
    begin = f"({_part(calls.begin)})?" if is_opened else _part(calls.begin)
    rules = [
        f"calls: {begin} call{more} {_part(calls.end)}",
        "call: " + " | ".join(f"call_{at}" for at in range(len(calls.calls))),
    ]
    # Arguments that may be the same are one rule, which the follower's automata share.
    schema_to_rule: dict[str, str] = {}
    for at, call in enumerate(calls.calls):
        rule = schema_to_rule.setdefault(_json_of(call.arguments), f"arguments_{at}")
        before, behind = (" ".join(map(_part, parts)) for parts in (call.before, call.behind))
        rules.append(f"call_{at}: {before} {rule} {behind}")
    return rules + [f"{rule}: {schema}" for schema, rule in schema_to_rule.items()]


def _part(part: str | re.Pattern[str] | int) -> str:
    if isinstance(part, int):
        return f"<[{part}]>"
    return json.dumps(part) if isinstance(part, str) else f"/{part.pattern}/"


def _json_of(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _OPTIONS}, ensure_ascii=False)}"


def complaint(text: str, prefix: str = "") -> str | None:
    """Why this grammar cannot be followed, its marks being MARK_IDS and its text beginning with
    `prefix`; None if it can. May take as long as the limits let it, and more for schemas that are
    made for it.
    """
    limits = LLParserLimits(**_LIMITS)
    is_error, said = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    if is_error:
        return _in_our_words(said[0])
    matcher = LLMatcher(_byte_tokenizer(), text, log_level=_SILENT, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    begun = prefix.encode("utf-8", "surrogatepass")
    if begun and not matcher.is_error():
        num_read = matcher.try_consume_tokens(list(begun))
        if num_read < len(begun):
            return f"prefix is no beginning of such an answer, from byte {num_read} on"
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
    special = [_END_OF_BYTES, *MARK_IDS]
    tokens = [*(bytes([byte]) for byte in range(256)), *(b"<%d>" % mark for mark in special)]
    wrapped = TokenizerWrapper(_AsWrapped(tokens, special, _END_OF_BYTES))
    return LLTokenizer(wrapped, eos_token=_END_OF_BYTES)


class Place(Enum):
    """Where in its reply a text is."""

    REASONING = auto()
    FREE = auto()
    """Between stretches: any token may come."""
    HELD = auto()
    ENDED = auto()


class Follower:
    """How far one text is in its grammar."""

    def __init__(self, grammar: Grammar, tokens: Sequence[int]) -> None:
        """`tokens` are there already. Costs nothing before the first mask is wanted."""
        self.error: str | None = None
        """Why it cannot be followed any further; nothing is allowed then."""
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        """The matcher of the present stretch; None outside of one."""
        self._unread = list(tokens)
        self._at = Place.FREE if grammar.opens else Place.HELD
        if grammar.begins_after >= 0:
            self._at = Place.REASONING

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were drawn."""
        self._unread.extend(tokens)

    def _next(self, at: Place, token: int) -> Place:
        """Where it is behind this token."""
        grammar = self._grammar
        if token in grammar.end_ids or at is Place.ENDED:
            return Place.ENDED
        if at is Place.REASONING:
            return Place.HELD if token == grammar.begins_after else at
        if at is Place.FREE:
            return Place.HELD if token in grammar.opens else at
        return Place.FREE if token == grammar.closes else at

    def _read_one(self) -> tuple[LLMatcher, int] | None:
        """What was drawn, if that is one token more of a stretch: the caller has it consumed."""
        if len(self._unread) != 1 or self._at is not Place.HELD or self._matcher is None:
            return None
        token = self._unread[0]
        if token in self._grammar.end_ids or token == self._grammar.closes:
            return None
        self._unread = []
        return self._matcher, token

    def _read(self, make: Callable[[Grammar], LLMatcher]) -> None:
        """Take in what was drawn."""
        if not self._unread and self._matcher is not None:
            return
        tokens, self._unread = self._unread, []
        held: list[int] = []
        """Not consumed yet."""
        for token in tokens:
            before, self._at = self._at, self._next(self._at, token)
            if self._at is Place.HELD and before is not Place.REASONING:
                held.append(token)
            elif before is Place.HELD and self._at is Place.FREE:
                self._matcher, held = None, []
        if self._at is Place.HELD:
            if self._matcher is None:
                self._matcher = make(self._grammar)
            if held:
                self._matcher.consume_tokens(held)
            self._look(self._matcher)

    def _num_reasoning(self, drafts: Sequence[int]) -> int:
        """In how many rows the reply is in a reasoning, which something must follow. The rows are the
        first one and one behind each draft.
        """
        if self._at is not Place.REASONING:
            return 0
        for index, token in enumerate(drafts):
            if self._next(self._at, token) is not Place.REASONING:
                return index + 1
        return len(drafts) + 1

    def _look(self, matcher: LLMatcher) -> bool:
        """Whether it can still be followed."""
        if self.error is None and matcher.is_error():
            self.error = _in_our_words(matcher.get_error())
        return self.error is None

    def _stretches(
        self, drafts: Sequence[int], make: Callable[[Grammar], LLMatcher]
    ) -> Iterator[tuple[LLMatcher, int, list[int], int]]:
        """Yield (matcher, row, drafts, first) of each stretch. The matcher stands at row `row`; each
        of these drafts takes it one row further. Rows from `first` on are held to it. Row i is what
        comes behind `drafts[:i]`. What is drawn behind an end, before it is known to be one, is for
        nobody.
        """
        if not drafts:  # Most steps, of most deployments.
            if self._at is Place.HELD:
                assert self._matcher is not None
                yield self._matcher, 0, [], 0
            return
        at, matcher = self._at, self._matcher
        row, first, of_it = 0, 0, list[int]()
        for index, token in enumerate(drafts):
            before, at = at, self._next(at, token)
            if before is Place.HELD and at is Place.HELD:
                of_it.append(token)
            elif before is Place.HELD:
                assert matcher is not None
                yield matcher, row, of_it, first
                matcher = None
            elif at is Place.HELD:
                matcher, first = make(self._grammar), index + 1
                row, of_it = (index, [token]) if before is Place.FREE else (first, [])
        if at is Place.HELD:
            assert matcher is not None
            yield matcher, row, of_it, first


class TextRows(NamedTuple):
    """Rows that a text draws from, one after the other as long as what is drawn is what was
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
        # One call for all texts, without the interpreter: most have one token more.
        drawn: list[tuple[LLMatcher, int]] = []
        for follower, _, _ in all_rows:
            one = follower._read_one()
            if one is None:
                follower._read(self._matcher)
            else:
                drawn.append(one)
        are_right = not drawn or all(self._executor.consume_token_par(drawn))
        alone: list[tuple[LLMatcher, int]] = []
        with_drafts: list[tuple[LLMatcher, int, list[int]]] = []
        held: list[tuple[Follower, LLMatcher, int, int]] = []
        for follower, first, drafts in all_rows:
            if num := follower._num_reasoning(drafts):
                has_mask_R[first : first + num] = True
                bits_RW[first : first + num] = 0xFFFFFFFF
                for token in (*follower._grammar.end_ids, *follower._grammar.barred):
                    bits_RW[first : first + num, token // 32] &= 0xFFFFFFFF ^ (1 << token % 32)
            for matcher, row, of_it, begin in follower._stretches(drafts, self._matcher):
                end = first + row + len(of_it) + 1
                has_mask_R[first + begin : end] = True
                if follower.error is not None or not (are_right or follower._look(matcher)):
                    continue
                held.append((follower, matcher, first + begin, end))
                if of_it:
                    with_drafts.append((matcher, first + row, of_it))
                else:
                    alone.append((matcher, first + row))
        into = bits_RW.ctypes.data, 4 * self.num_words, len(bits_RW)
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, *into)
        if with_drafts:
            # A draft that is not allowed is not drawn: the rows behind it stay without any token.
            self._executor.unsafe_compute_mask_ptr_with_draft_token(with_drafts, *into)
        for follower, matcher, begin, end in held:
            if matcher.is_error():
                follower._look(matcher)
                bits_RW[begin:end] = 0

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
        own = matcher.deep_copy()
        if grammar.prefix:
            own.consume_tokens(list(grammar.prefix))
        return own

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
