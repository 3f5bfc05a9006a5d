"""Structured output: which JSON schemas are supported, and the tokens allowed next in each text.
Wraps llguidance (github.com/guidance-ai/llguidance), which no other module imports.

The gateway turns a schema, or a list of tool calls with a schema each, into the text of a grammar.
It checks that the grammar is supported, with a vocabulary of single bytes. Ranks then follow the
grammar token by token. All limits are counts, not times. Texts of one grammar share automata, which
are slow to make and have a common limit. If automata reach the limit, new ones replace them, so
that a text fails only if it reaches the limit by itself. Independent of requests, slots, threads
and tensors.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from hadal.core.plans import Grammar
from hadal.tokens.bounds import narrowed
from hadal.tokens.escapes import GrammarError
from hadal.tokens.lark import PLAIN, TextGrammar, forms_of_text
from hadal.tokens.table import TokenTable

if TYPE_CHECKING:
    import numpy as np  # Not at run time: the process that checks grammars has little memory.

_LIMITS: dict[str, Any] = {
    # The library's defaults, but less memory. The first three each allow about 20 ms of a core.
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 50_000,  # An object with hundreds of optional properties has thousands.
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,  # Verbose errors would quote the schema and the text.
}
_KEPT = 16
"""Maximum number of grammars with automata in memory, the most recently used ones: a few hundred
KiB each, tens of MiB at their limit.
"""
_SILENT = 0
_NUM_WALKED = 16
_WALKED = (*b'"a0', *range(33, 127))
"""Bytes in the order in which `_walk` tries them."""
_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": r"[ \t]{1,20}|[ \t]?(\r?\n){1,2}[ \t]{0,20}",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""Options of JSON grammars: no part of a schema is ignored or approximated. White space is at most
20 blanks, or one blank, two line breaks and 20 blanks, because a model that was not trained on JSON
draws blanks until it has no tokens left. \\u escapes are not allowed: an escaped property name
would count as another property, and its value would not be checked.
"""
ANY_JSON_OBJECT: dict[str, Any] = {"type": "object"}
_END_OF_BYTES = 256
MARK_IDS = range(257, 265)
"""Token ids that stand for marks (special tokens) when a grammar is checked."""
_NOT_KNOWN = "Unimplemented keys: "
_QUOTED = re.compile(r"\n<non-verbose/>|\n +\d+ \|.*", re.DOTALL)
"""End of a library error message, which quotes lines of the grammar."""


@dataclass(frozen=True)
class Json:
    """Part of a call that is a JSON text of this schema."""

    schema: dict[str, Any] | TextGrammar
    """The text's schema; or the grammar of a text that is an object's only value."""


@dataclass(frozen=True)
class AnyText:
    """Part of a call that is any text, and the text that ends it."""

    mark: str
    """Text that does not occur before `end`."""
    end: str
    least: int = 0
    """Minimum number of characters before `end`."""
    most: int | None = None
    """Maximum number of characters before `end`; None: no limit."""
    bars: str = ""
    """Characters that do not occur before `end`."""
    without: tuple[str, ...] = ()
    """Whole texts that are not allowed."""
    pattern: str = ""
    """Pattern of the whole text before `end`; "": any text."""
    grammar: TextGrammar | None = None
    """Grammar of the whole text before `end`, in its plain form; None: any text."""


@dataclass(frozen=True)
class OneOf:
    """Part of a call that is one of several sequences."""

    options: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Repeated:
    """Part of a call that may be missing, or stand up to `most` times; None: any number."""

    parts: tuple[Part, ...]
    most: int | None = None


Part = str | re.Pattern[str] | int | Json | AnyText | OneOf | Repeated
"""Text, pattern, id of a special token, or a part made of parts."""


@dataclass(frozen=True)
class CallList:
    """Format of consecutive calls between two marks."""

    begin: tuple[Part, ...]
    end: tuple[Part, ...]
    gap: str
    """Optional text between two calls; "": none."""
    calls: tuple[tuple[Part, ...], ...]
    is_single: bool
    """True if only one call is allowed."""
    free: AnyText | None = None
    """Reply without calls that is also allowed; None: none is."""


def grammar_text(schema: dict[str, Any] | None, *, follows_reasoning: bool) -> str:
    """Return a grammar of the JSON texts that the schema allows (None: all JSON objects). After
    reasoning the text may begin with up to four line breaks or spaces.
    """
    rules = [_content_rule(ANY_JSON_OBJECT if schema is None else schema)]
    return _text("content", rules, follows_reasoning)


def arguments_text(arguments: dict[str, Any] | TextGrammar) -> str:
    """Return a grammar of one tool's arguments."""
    return _text("arguments", [f"arguments: {_arguments_of(arguments)}"], False)


def calls_text(
    calls: CallList,
    *,
    content: dict[str, Any] | None = None,
    follows_reasoning: bool = False,
    is_opened: bool = False,
) -> str:
    """Return a grammar of these calls or, with `content`, of JSON texts that this schema allows.
    `is_opened`: the list's opening mark may be missing, because a mark anywhere in the reply may
    open the calls.
    """
    rules = _CallRules()
    rules.write(calls, is_opened)
    start, written = "calls", rules.lines
    if calls.free is not None:
        start, written = "calls | free", [f"free: {rules.part(calls.free)}", *written]
    if content is not None:
        start, written = f"content | {start}", [_content_rule(content), *written]
    return _text(start, written, follows_reasoning)


def _text(start: str, rules: Sequence[str], follows_reasoning: bool) -> str:
    if follows_reasoning:
        start, rules = f"BREAKS ({start})", ["BREAKS: /[\\n ]{0,4}/", *rules]
    # Without "no_forcing", where only one text may follow, only the encoder's own split of it into
    # tokens would be allowed, which may not be the model's.
    return "\n".join(('%llguidance {"no_forcing": true}', f"start: {start}", *rules))


def _content_rule(schema: dict[str, Any]) -> str:
    return f"content: {_json_of(schema)}"


class _CallRules:
    """Writer of the rules for calls. Equal JSON schemas share a rule, and so automata."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._text_to_rule: dict[str, str] = {}

    def write(self, calls: CallList, is_opened: bool) -> None:
        """Write the rule `calls`."""
        gap = f"{json.dumps(calls.gap)}? " if calls.gap else ""
        more = "" if calls.is_single else f" ({gap}call)*"
        begin = self._all(calls.begin)
        begin = f"({begin})?" if is_opened else begin
        self.lines += [
            f"calls: {begin} call{more} {self._all(calls.end)}",
            "call: " + " | ".join(f"call_{at}" for at in range(len(calls.calls))),
        ]
        self.lines += [f"call_{at}: {self._all(parts)}" for at, parts in enumerate(calls.calls)]

    def _all(self, parts: Sequence[Part]) -> str:
        return " ".join(map(self.part, parts))

    def part(self, part: Part) -> str:
        """Return the text of a part, and write the rules that it needs."""
        if isinstance(part, int):
            return f"<[{part}]>"
        if isinstance(part, str):
            return json.dumps(part)
        if isinstance(part, re.Pattern):
            return f"/{part.pattern}/"
        if isinstance(part, Json):
            return self._named(_arguments_of(part.schema), "arguments")
        if isinstance(part, AnyText):
            return self._named(_any_text(part), "TEXT" if part.grammar is None else "text")
        if isinstance(part, OneOf):
            return f"({' | '.join(map(self._all, part.options))})"
        return f"({self._all(part.parts)}){'?' if part.most == 1 else '*'}"

    def _named(self, text: str, kind: str) -> str:
        """Return the name of the rule with this text."""
        if text not in self._text_to_rule:
            self._text_to_rule[text] = name = f"{kind}_{len(self._text_to_rule)}"
            self.lines.append(f"{name}: {text}")
        return self._text_to_rule[text]


def _any_text(part: AnyText) -> str:
    """Return the pattern of a text and its end."""
    char = f"[^{pattern_of(part.bars)}]" if part.bars else "(?s:.)"
    most = "" if part.most is None else part.most
    count = f"{{{part.least},{most}}}" if part.least or part.most is not None else "*"
    terms = [f"/{char}{count}/", f"~/(?s:.*){pattern_of(part.mark)}(?s:.*)/"]
    if part.pattern:
        terms.append(f"/{part.pattern}/")
    if part.without:
        terms.append(f"~/(?:{'|'.join(map(pattern_of, part.without))})/")
    if part.grammar is not None:
        terms.append(PLAIN)
    whole = f"({' & '.join(terms)})" + (f" {json.dumps(part.end)}" if part.end else "")
    if part.grammar is None:
        return whole
    return f"%lark {{\nstart: TEXT\nTEXT: {whole}\n{part.grammar.plain}\n}}"


def pattern_of(text: str) -> str:
    """Return the pattern of a text, for use within slashes."""
    return re.sub(r"[][\\.+*?(){}|^$/&~-]", r"\\\g<0>", text).replace("\n", "\\n")


def _arguments_of(arguments: dict[str, Any] | TextGrammar) -> str:
    if not isinstance(arguments, TextGrammar):
        return _json_of(arguments)
    gap, name = f"({_OPTIONS['whitespace_pattern']})?", re.escape(json.dumps(arguments.name))
    begin, end = rf"/\{{{gap}{name}{gap}:{gap}\"/", rf"/\"{gap}\}}/"
    return f"{begin} %lark {{\n{arguments.escaped}\n}} {end}"


def forms_of(syntax: str, definition: str) -> tuple[str, str]:
    """Return the Lark grammar of the JSON form of texts that a client's grammar allows (tokens/lark
    has the syntaxes), and the definition of their plain form, "" if there is none. Raises
    GrammarError with llguidance's words. Malicious grammars may take longer than the limits.
    """
    is_regex = syntax == "regex"
    as_grammar = LLMatcher.grammar_from_regex if is_regex else LLMatcher.grammar_from_lark
    if not is_regex and definition.lstrip().startswith("{"):  # llguidance would read it as JSON.
        raise GrammarError("a Lark grammar begins with a rule")
    if (said := complaint(as_grammar(definition))) is not None:
        raise GrammarError(said)
    return forms_of_text(syntax, definition, _starts)


def _starts(regex: str) -> frozenset[str]:
    """Return the ASCII characters with which a match of a regex may begin."""
    limits = LLParserLimits(**_LIMITS)
    grammar = LLMatcher.grammar_from_regex(regex)
    mask = LLMatcher(_byte_tokenizer(), grammar, log_level=_SILENT, limits=limits).compute_bitmask()
    return frozenset(chr(byte) for byte in range(128) if mask[byte // 8] >> byte % 8 & 1)


def _json_of(schema: dict[str, Any]) -> str:
    given = {**narrowed(schema), "x-guidance": _OPTIONS}
    return f"%json {json.dumps(given, ensure_ascii=False)}"


def complaint(text: str, prefix: str = "") -> str | None:
    """Return why this grammar is not supported, or None if it is. Its marks are MARK_IDS, and its
    texts must be able to begin with `prefix`. Malicious schemas may take longer than the limits.
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
        if num_read < len(begun) and not matcher.is_error():
            return f"the prefix does not match the schema from byte {num_read} on"
    _walk(matcher)
    return _in_our_words(matcher.get_error()) if matcher.is_error() else None


def _walk(matcher: LLMatcher) -> None:
    """Advance by up to _NUM_WALKED bytes: many limits are reached only after a bracket or quote."""
    for _ in range(_NUM_WALKED):
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        allowed = [byte for byte in _WALKED if mask and mask[byte // 8] >> byte % 8 & 1]
        if not allowed or not matcher.consume_token(allowed[0]):
            return


def _in_our_words(said: str) -> str:
    said = _QUOTED.sub("", said).rpartition("failed to compile JSON schema: ")[2].strip()
    if said.startswith(_NOT_KNOWN):
        keys, _ = json.JSONDecoder().raw_decode(said.removeprefix(_NOT_KNOWN))
        return f"{', '.join(map(repr, keys))} {'is' if len(keys) == 1 else 'are'} not supported"
    if said.startswith("oneOf constraints"):
        return "'oneOf' is not supported if several of its schemas can match a value; use 'anyOf'"
    if said.startswith("Unknown format: "):
        return f"'format' {said.removeprefix('Unknown format: ')!r} is not supported"
    if said.startswith("regex parse error"):
        return f"'pattern' is not supported: {said.rpartition('error: ')[2]}"
    if said.startswith("Resource "):
        return "'$ref' must refer to a part of the same schema"
    if said.startswith("NoExtension"):
        return "no text can satisfy the schema"
    return said[:500]


class _AsWrapped:
    """Tokenizer for llguidance. It encodes by bytes, which suffices because no text is forced."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], end_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _byte_tokenizer() -> LLTokenizer:
    special = [_END_OF_BYTES, *MARK_IDS]
    tokens = [*(bytes([byte]) for byte in range(256)), *(b"<%d>" % mark for mark in special)]
    wrapped = TokenizerWrapper(_AsWrapped(tokens, special, _END_OF_BYTES))
    return LLTokenizer(wrapped, eos_token=_END_OF_BYTES)


class Place(Enum):
    """Place of the next token within its reply; HELD: within a constrained stretch."""

    START = auto()
    """Before the first token, which begins the reasoning or the text."""
    REASONING = auto()
    FREE = auto()
    """Between constrained stretches: any token is allowed."""
    HELD = auto()
    ENDED = auto()


_REASONED = (Place.START, Place.REASONING)
"""Places before and within the reasoning."""


class Follower:
    """State of one text in its grammar."""

    def __init__(self, grammar: Grammar, tokens: Sequence[int]) -> None:
        """Start after `tokens`. The first mask consumes them; a Follower costs nothing before."""
        self.error: str | None = None
        """Reason why the grammar cannot follow the constrained text; None: it can."""
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        """Matcher of the current constrained stretch; None outside of one."""
        self._stretch: list[int] = []
        """Tokens of the current constrained stretch that the matcher has consumed."""
        self._turns = frozenset((*grammar.opens, *grammar.end_ids))
        """Tokens that change the place of a free text."""
        self._unread = list(tokens)
        self._num_reasoned = 0
        """Number of reasoning tokens so far."""
        self._behind = Place.HELD if grammar.text and not grammar.opens else Place.FREE
        """Place after the reasoning."""
        self._at = self._behind
        if grammar.begins_after >= 0:
            self._at = Place.REASONING if grammar.begins_with < 0 else Place.START

    def advance(self, tokens: Sequence[int]) -> None:
        """Append drawn tokens."""
        self._unread.extend(tokens)

    def is_free(self, drafts: Sequence[int]) -> bool:
        """Return True if the text is free up to its end and after each of the drafts: no row needs a
        mask. A quick answer for texts with tools, which are mostly free.
        """
        if self._at is not Place.FREE or not self._turns.isdisjoint((*self._unread, *drafts)):
            return False
        self._unread.clear()
        return True

    def _is_text(self, at: Place) -> bool:
        """Return True if the next token at this place may belong to the constrained text."""
        return at is Place.HELD or (at is Place.START and self._behind is Place.HELD)

    def _next(self, at: Place, token: int) -> Place:
        """Return the place after this token."""
        grammar = self._grammar
        if at is Place.START:
            if token == grammar.begins_with:
                return Place.REASONING
            at = self._behind
        if token in grammar.end_ids or at is Place.ENDED:
            return Place.ENDED
        if at is Place.REASONING:
            if token in grammar.opens:
                return Place.HELD
            return self._behind if token == grammar.begins_after else at
        if at is Place.FREE:
            return Place.HELD if token in grammar.opens else at
        return Place.FREE if token == grammar.closes else at

    def _read(self, make: Callable[[Grammar], LLMatcher]) -> None:
        """Process the tokens drawn since the last call. `make`: returns a grammar's new matcher."""
        if not self._unread and self._matcher is not None:
            return
        tokens, self._unread = self._unread, []
        if self._at is Place.HELD and self._matcher is not None and len(tokens) == 1:
            (token,) = tokens
            if self._next(Place.HELD, token) is Place.HELD:
                self._matcher.consume_token(token)
                self._stretch.append(token)
                return
        held: list[int] = []
        """Tokens that the matcher has not consumed yet."""
        for token in tokens:
            before, self._at = self._at, self._next(self._at, token)
            self._num_reasoned += before is self._at is Place.REASONING
            if self._at is Place.HELD and not self._ends_reasoning(before, token):
                held.append(token)
            elif before is Place.HELD and self._at is Place.FREE:
                self._matcher, self._stretch, held = None, [], []
                self.error = None if self._grammar.is_lenient else self.error
        if self._is_text(self._at):
            if self._matcher is None:
                self._matcher = make(self._grammar)
            if held:
                self._matcher.consume_tokens(held)
                self._stretch += held

    def _ends_reasoning(self, before: Place, token: int) -> bool:
        """Return True if this token, which led into the constrained text, ended the reasoning."""
        return before is Place.REASONING and token not in self._grammar.opens

    def _reasoning(self, drafts: Sequence[int]) -> tuple[slice, slice]:
        """Return (rows within the reasoning, those of them that must draw its end). Row 0 draws the
        next token; each draft adds one row.
        """
        none = slice(0)
        if self._at not in _REASONED:
            return none, none
        num = [*accumulate(drafts, self._next, initial=self._at)].count(Place.REASONING)
        if not num:
            return none, none
        first, budget = int(self._at is Place.START), self._grammar.budget
        if budget < 0:
            return slice(first, first + num), none
        left = max(0, budget - self._num_reasoned)
        return slice(first, first + num), slice(first + min(left, num), first + num)

    def _write_reasoning(
        self, drafts: Sequence[int], bits_RW: np.ndarray, has_mask_R: np.ndarray
    ) -> None:
        """Write the masks of rows within the reasoning: if a constrained text must follow, without
        tokens that end the reply; after the budget, with only the mark that ends the reasoning.
        """
        rows, over = self._reasoning(drafts)
        grammar = self._grammar
        if rows.stop and self._behind is Place.HELD:
            has_mask_R[rows] = True
            bits_RW[rows] = 0xFFFFFFFF
            for token in (*grammar.end_ids, *grammar.barred):
                bits_RW[rows, token // 32] &= 0xFFFFFFFF ^ (1 << token % 32)
        if over.start is not None and over.stop > over.start:
            has_mask_R[over] = True
            bits_RW[over] = 0
            bits_RW[over, grammar.begins_after // 32] = 1 << grammar.begins_after % 32

    @property
    def is_given_up(self) -> bool:
        """True if the constrained text became free, because the grammar cannot follow it."""
        return self.error is not None and self._grammar.is_lenient

    def _is_lost(self) -> bool:
        """Return True if the automata reached a limit, or a drawn token is not allowed."""
        return self._matcher is not None and self._matcher.is_error()

    def _fail(self, matcher: LLMatcher) -> None:
        """Record the error of a text that even new automata of its own cannot follow."""
        self.error = self.error or _in_our_words(matcher.get_error())

    def _stretches(
        self, drafts: Sequence[int], make: Callable[[Grammar], LLMatcher]
    ) -> Iterator[_HeldRows]:
        """Yield the rows of each constrained stretch; row i follows `drafts[:i]`. Rows after an end
        token do not matter: their tokens are discarded.
        """
        if not drafts:
            if self._is_text(self._at):
                assert self._matcher is not None
                yield _HeldRows(self._matcher, 0, [], 0)
            return
        at, matcher = self._at, self._matcher
        row, first, of_it = 0, 0, list[int]()
        for index, token in enumerate(drafts):
            before, at = at, self._next(at, token)
            if self._is_text(before) and at is Place.HELD:
                of_it.append(token)
            elif self._is_text(before):
                assert matcher is not None
                yield _HeldRows(matcher, row, of_it, first)
                matcher = None
            elif at is Place.HELD:
                matcher, first = make(self._grammar), index + 1
                is_mark = self._ends_reasoning(before, token)
                row, of_it = (first, []) if is_mark else (index, [token])
        if at is Place.HELD:
            assert matcher is not None
            yield _HeldRows(matcher, row, of_it, first)


class _HeldRows(NamedTuple):
    """Rows of one constrained stretch of a text."""

    matcher: LLMatcher
    """Matcher in the state of row `row`; each draft advances it by one row."""
    row: int
    drafts: list[int]
    first: int
    """First row of the stretch."""


class TextRows(NamedTuple):
    """Consecutive rows from which a text draws as long as the drawn tokens equal the drafts."""

    follower: Follower
    first: int
    """Index of the text's first row."""
    drafts: Sequence[int]
    """Drafts (speculative tokens): the inputs of the second row, the third, and so on."""


def _write(matcher: LLMatcher, drafts: Sequence[int], at: int, num_bytes: int) -> None:
    """Write the masks of a stretch's rows, of `num_bytes` each, from the address `at` on. Restores
    the matcher's state.
    """
    matcher.unsafe_compute_mask_ptr(at, num_bytes)
    num = 0
    # A draft that is not allowed is never drawn, so the rows after it need no allowed tokens.
    while num < len(drafts) and matcher.try_consume_tokens([drafts[num]]):
        num += 1
        matcher.unsafe_compute_mask_ptr(at + num * num_bytes, num_bytes)
    if num:
        matcher.rollback(num)


class Grammars:
    """Grammars over the tokens of one model. Not thread-safe."""

    def __init__(self, read: Callable[[], TokenTable], vocab_size: int) -> None:
        """`read` returns the tokens; it is called when a grammar with new end tokens is used.
        `vocab_size`: the model's number of tokens.
        """
        self._read = read
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        """Tokens that end a text -> tokenizer; mostly a single entry."""
        self._matchers: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self._vocab_size // 32)

    def allow(
        self, all_rows: Sequence[TextRows], bits_RW: np.ndarray, has_mask_R: np.ndarray
    ) -> None:
        """Write the tokens allowed in each row into `bits_RW` (uint32, zero before), and mark the
        constrained rows in `has_mask_R` (bool). Drafts do not change the state of a text.
        """
        # One text at a time: the library's calls for many texts wake its own threads, which takes
        # several times as long as the masks.
        assert bits_RW.shape[1:] == (self.num_words,)
        assert bits_RW.dtype.itemsize == 4
        assert bits_RW.flags.c_contiguous
        base, num_bytes = bits_RW.ctypes.data, 4 * self.num_words
        renewed: set[Grammar] = set()
        for follower, first, drafts in all_rows:
            assert first + len(drafts) < len(bits_RW), "the library writes to addresses"
            follower._read(self._matcher)
            if follower.error is None and follower._is_lost():
                self._renew(follower, renewed)
            matcher = follower._matcher
            if not drafts and follower._at is Place.HELD and follower.error is None:
                # Fast path for most texts of most steps; the code below gives the same result.
                assert matcher is not None
                has_mask_R[first] = True
                matcher.unsafe_compute_mask_ptr(base + first * num_bytes, num_bytes)
                if matcher.is_error():
                    stretch = _HeldRows(matcher, 0, [], 0)
                    num_held = self._row_by_row(follower, first, stretch, bits_RW, renewed)
                    has_mask_R[first] = num_held > 0
                continue
            follower._write_reasoning(drafts, bits_RW[first:], has_mask_R[first:])
            for stretch in follower._stretches(drafts, self._matcher):
                matcher, row, of_it, begin = stretch
                end = first + row + len(of_it) + 1
                if follower.is_given_up and matcher is follower._matcher:
                    continue
                has_mask_R[first + begin : end] = True
                if follower.error is not None and not follower.is_given_up:
                    continue
                _write(matcher, of_it, base + (first + row) * num_bytes, num_bytes)
                if matcher.is_error():
                    num_held = self._row_by_row(follower, first, stretch, bits_RW, renewed)
                    has_mask_R[first + row + num_held : end] = False
                if follower._at is Place.START and not begin and follower.error is None:
                    token = follower._grammar.begins_with
                    bits_RW[first, token // 32] |= 1 << token % 32

    def _row_by_row(
        self,
        follower: Follower,
        first: int,
        stretch: _HeldRows,
        bits_RW: np.ndarray,
        renewed: set[Grammar],
    ) -> int:
        """Write the masks of a stretch in which the automata reached a limit, with new automata if
        needed, so that neither drafts nor other texts make a text fail. Return the number of rows
        with a mask: all of them, except that a lenient grammar leaves rows that it cannot follow
        free.
        """
        matcher, row, drafts, begin = stretch
        bits_RW[first + begin : first + row + len(drafts) + 1] = 0
        is_own = matcher is follower._matcher
        tokens = follower._stretch if is_own else []
        num_bytes = 4 * self.num_words
        num_held = len(drafts) + 1
        for number in range(num_held):
            here = [*tokens, *drafts[:number]]
            at = bits_RW.ctypes.data + (first + row + number) * num_bytes
            if number and not matcher.is_error():
                matcher.consume_token(drafts[number - 1])
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(at, num_bytes)
            if matcher.is_error():
                matcher = self._anew(follower._grammar, here, renewed)
                matcher.unsafe_compute_mask_ptr(at, num_bytes)
            if matcher.is_error():
                # After a draft that is not allowed, or the text reaches a limit by itself.
                bits_RW[first + row + number] = 0
                if is_own and not number:
                    follower._fail(matcher)
                num_held = number if follower._grammar.is_lenient else num_held
                break
        if is_own and follower.error is None:
            self._renew(follower, renewed)
        return num_held

    def _renew(self, follower: Follower, renewed: set[Grammar]) -> None:
        """Give a text new automata; if these reach a limit too, record the error."""
        follower._matcher = self._anew(follower._grammar, follower._stretch, renewed)
        if follower._matcher.is_error():
            follower._fail(follower._matcher)

    def _anew(self, grammar: Grammar, tokens: list[int], renewed: set[Grammar]) -> LLMatcher:
        """Return a matcher after these tokens of a stretch, with new automata. `renewed`: grammars
        with automata renewed in this call of `allow`, which are used again if they have not failed.
        """
        if grammar in renewed and not (matcher := self._at(grammar, tokens)).is_error():
            return matcher
        renewed.add(grammar)
        self._matchers.pop(grammar, None)
        return self._at(grammar, tokens)

    def _at(self, grammar: Grammar, tokens: list[int]) -> LLMatcher:
        matcher = self._matcher(grammar)
        if tokens and not matcher.is_error():
            matcher.consume_tokens(tokens)
        return matcher

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher at the beginning of the grammar; a grammar's matchers share automata."""
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
