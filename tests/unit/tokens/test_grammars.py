"""Texts drawn under a grammar satisfy its schema; a text that it cannot follow gives a named error."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from hadal.core.plans import Grammar
from hadal.runtime.resolve import model_folder
from hadal.tokens import grammars as grammars_module
from hadal.tokens.grammars import (
    CallList,
    Follower,
    Grammars,
    Json,
    TextRows,
    calls_text,
    complaint,
    grammar_text,
)
from hadal.tokens.table import read_token_table
from tests.fresh import fresh
from tests.levels import FULL
from tests.schemas import SCHEMAS

TABLE = read_token_table(model_folder(""))
END, CLOSE = 1, TABLE.control_ids["</think>"]
VOCAB_SIZE = len(TABLE.token_bytes)
FREE = set(range(VOCAB_SIZE)) - {END}
"""Tokens that may be drawn in a reasoning."""
NUM_TEXTS = 20 if FULL else 3
BYTE_TO_ID = {raw: i for i, raw in enumerate(TABLE.token_bytes) if len(raw) == 1}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(lambda: TABLE, VOCAB_SIZE)


def grammar(schema: dict[str, Any] | None, begins_after: int = -1) -> Grammar:
    return Grammar(grammar_text(schema, follows_reasoning=begins_after >= 0), (END,), begins_after)


def ids(text: str) -> list[int]:
    return [BYTE_TO_ID[bytes([byte])] for byte in text.encode()]


def allowed(
    grammars: Grammars, follower: Follower, drafts: list[int] | None = None
) -> list[set[int] | None]:
    """Return the tokens that each row may draw; None: any."""
    drafts = drafts or []
    bits_RW = np.zeros((len(drafts) + 1, grammars.num_words), np.uint32)
    has_mask_R = np.zeros(len(bits_RW), np.bool_)
    grammars.allow([TextRows(follower, 0, drafts)], bits_RW, has_mask_R)
    is_set = np.unpackbits(bits_RW.view(np.uint8), axis=1, bitorder="little")
    return [
        set(row.nonzero()[0].tolist()) if has_mask else None
        for row, has_mask in zip(is_set, has_mask_R, strict=True)
    ]


def text_of(tokens: list[int]) -> str:
    return b"".join(TABLE.token_bytes[token] for token in tokens).decode("utf-8", "replace")


@pytest.mark.promise(
    "The sampler draws only tokens after which the text can still become valid under "
    "the schema, and an end only where the text is complete"
)
@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_drawn_at_random_are_valid(grammars: Grammars, name: str) -> None:
    """Draw allowed tokens at random, the end with probability 0.5."""
    seed = fresh().randrange(1 << 30)
    rng, schema, num_ended = random.Random(seed), SCHEMAS[name], 0
    for _ in range(NUM_TEXTS):
        follower, tokens = Follower(grammar(schema), []), list[int]()
        while len(tokens) < 300:
            (row,) = allowed(grammars, follower)
            assert row, f"{seed}: {text_of(tokens)!r}: {follower.error}"
            token = END if END in row and rng.random() < 0.5 else rng.choice(sorted(row))
            if token == END:
                num_ended += 1
                jsonschema.validate(
                    json.loads(text_of(tokens)), {"type": "object"} if schema is None else schema
                )
                break
            tokens.append(token)
            follower.advance([token])
    if name in ("enum", "integer", "const", "flat"):
        assert num_ended > 0


@pytest.mark.promise(
    "A row after drafts gets the mask of the text with those drafts, and is sampled "
    "only if those drafts were drawn"
)
def test_drafts_leave_no_trace(grammars: Grammars) -> None:
    """Compare rows after drafts with those of a text that has them, after any earlier drafts."""
    rng, schema = random.Random(3), SCHEMAS["order"]
    text = '{"item": "ab", "count": 12, "tags": ["a", "b"], "paid": true}'
    tokens = [*ids(text), END]
    follower = Follower(grammar(schema), [])
    at = 0
    while at < len(tokens):
        drafts = tokens[at : at + rng.randrange(4)]
        if rng.random() < 0.5 and drafts:
            drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB_SIZE)
        rows = allowed(grammars, follower, drafts)
        for number, row in enumerate(rows):
            text_so_far = tokens[: at + number]
            if drafts[:number] != tokens[at : at + number] or END in text_so_far:
                break
            assert [row] == allowed(grammars, Follower(grammar(schema), text_so_far))
            assert row
            assert tokens[at + number] in row
        step = rng.randrange(1, 3)
        follower.advance(tokens[at : at + step])
        at += step
    assert allowed(grammars, follower) == [None]  # The end was drawn: later tokens are ignored.


GREEDY: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "string", "pattern": "a.{50}b"}},
    "required": ["x"],
    "additionalProperties": False,
}
"""Schema under which each drawn letter adds many states to the automata."""


def draw_at_length(grammars: Grammars, num_tokens: int) -> int:
    """Draw letters of texts under GREEDY, one after the other. Return the number of tokens after
    which the texts' shared automata were made anew; fail if `num_tokens` are too few for that.
    """
    rng, first = random.Random(0), None
    for number in range(num_tokens):
        if number % 150 == 0:
            follower = Follower(grammar(GREEDY), ids('{"x":"'))
        (row,) = allowed(grammars, follower)
        assert row, follower.error
        [prototype] = grammars._matchers.values()
        if first is not None and prototype is not first:
            return number
        first = prototype
        letters = [one for one in row if TABLE.token_bytes[one].isalpha()]
        follower.advance([rng.choice(sorted(letters))])
    pytest.fail("the limit was never come to")


def test_texts_of_one_grammar_break_no_limit_of_each_other() -> None:
    grammars = Grammars(lambda: TABLE, VOCAB_SIZE)
    early = Follower(grammar(GREEDY), [])
    tokens = ids('{"x":"' + "ab" * 40)
    for token in tokens[:8]:
        allowed(grammars, early)
        early.advance([token])
    draw_at_length(grammars, 4000)
    for token in tokens[8:]:
        (row,) = allowed(grammars, early)
        assert token in (row or ()), early.error
        early.advance([token])
    assert allowed(grammars, early) == allowed(grammars, Follower(grammar(GREEDY), tokens))


def test_a_limit_behind_a_draft_is_no_limit_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with new automata: a rejected draft that reached a limit has no effect on the text."""
    monkeypatch.setitem(grammars_module._LIMITS, "max_items_in_row", 2000)
    many = {f"p{at}": {"type": "string"} for at in range(600)}
    schema = {"anyOf": [{"type": "integer"}, {"type": "object", "properties": many}]}
    (number,), (brace,) = ids("1"), ids("{")
    free = Grammars(lambda: TABLE, VOCAB_SIZE)
    for drafts in ([brace], [number, number], [number, brace]):
        drafted = Follower(grammar(schema), [])
        rows = allowed(free, drafted, drafts)
        for at, row in enumerate(rows):
            alone = Follower(grammar(schema), drafts[:at])
            assert [row] == allowed(Grammars(lambda: TABLE, VOCAB_SIZE), alone)
        assert drafted.error is None
        drafted.advance([number])
        assert allowed(free, drafted) == allowed(free, Follower(grammar(schema), [number]))


@pytest.mark.promise("a call that the schema's automata cannot follow any further goes on freely")
@pytest.mark.parametrize("is_opened", [True, False])
def test_a_lenient_grammar_gives_up_at_a_limit(
    monkeypatch: pytest.MonkeyPatch, is_opened: bool
) -> None:
    """The text is free from one place on, the same with drafts and in new automata. The next call is
    constrained again. Without leniency, no token is allowed there.
    """
    monkeypatch.setitem(grammars_module._LIMITS, "max_lexer_states", 400)
    opens, closes = sorted(TABLE.control_ids.values())[2:4]
    long = {"type": "string", "maxLength": 5000}
    arguments = {"type": "object", "properties": {"x": long}, "additionalProperties": False}
    calls = CallList((opens,), (closes,), "", (("f", Json(arguments)),), is_single=False)
    own = {"opens": (opens,), "closes": closes} if is_opened else {}
    lenient = Grammar(calls_text(calls, is_opened=is_opened), (END,), is_lenient=True, **own)
    tokens = [opens, *ids('f{"x":"' + "ab" * 300 + '"}'), closes]
    grammars, follower, at = Grammars(lambda: TABLE, VOCAB_SIZE), Follower(lenient, []), 0
    free: list[bool] = []
    while at < len(tokens):
        rows = allowed(grammars, follower, tokens[at : at + 3])
        changes = len({row is None for row in rows}) > 1
        for number, row in enumerate(rows if changes or at % 60 == 0 else ()):
            anew = Follower(lenient, tokens[: at + number])
            assert [row] == allowed(Grammars(lambda: TABLE, VOCAB_SIZE), anew)
        assert all(
            row is None or token in row for row, token in zip(rows, tokens[at:], strict=False)
        )
        free.append(rows[0] is None)
        follower.advance([tokens[at]])
        at += 1
    begin = free.index(True, 1)
    assert 100 < begin < 600
    assert free == [is_opened, *[False] * (begin - 1), *[True] * (len(free) - begin)]
    assert allowed(grammars, follower) == [None]
    follower.advance([opens])
    assert allowed(grammars, follower) == ([set(ids("f"))] if is_opened else [None])

    strict = Follower(msgspec.structs.replace(lenient, is_lenient=False), tokens[:begin])
    assert allowed(grammars, strict) == [set()]
    assert strict.error is not None


def test_a_limit_behind_the_first_byte_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(grammars_module._LIMITS, "max_items_in_row", 2000)
    names = {f"p{at}": {"type": "string"} for at in range(600)}
    assert complaint(grammar({"type": "object", "properties": names}).text) is not None


@pytest.mark.parametrize("num_properties", [100, 600, 1500])
def test_many_optional_properties(grammars: Grammars, num_properties: int) -> None:
    names = {f"p{at}": {"type": "string"} for at in range(num_properties)}
    schema = {"type": "object", "properties": names}
    assert complaint(grammar(schema).text) is None
    follower = Follower(grammar(schema), [])
    for token in ids('{"p1":"x","p2":""}'):
        (row,) = allowed(grammars, follower)
        assert token in (row or ()), follower.error
        follower.advance([token])


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"a":1,"\u0061":"x"}'),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061":"x"}'),
    ],
)
def test_a_name_is_not_hidden_in_escapes(
    grammars: Grammars, schema: dict[str, Any], text: str
) -> None:
    follower, tokens = Follower(grammar(schema), []), ids(text)
    assert not jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    for at, token in enumerate(tokens):
        (row,) = allowed(grammars, follower)
        if token not in (row or ()):
            assert text[:at].endswith("\\")
            return
        follower.advance([token])
    pytest.fail("it was allowed to the end")


@pytest.mark.promise(
    "The sampler draws only tokens after which the text can still become valid under "
    "the schema, and an end only where the text is complete"
)
def test_it_ends_where_the_text_may_end_alone(grammars: Grammars) -> None:
    number = Follower(grammar({"type": "integer"}), [])
    rows = allowed(grammars, number, ids("-1"))
    assert [END in (row or ()) for row in rows] == [False, False, True]
    ended = allowed(grammars, Follower(grammar({"const": 1}), ids("1")))
    assert ended == [{END}]


def test_a_reasoning_that_something_must_follow_does_not_end_the_reply(grammars: Grammars) -> None:
    text = grammar_text({"const": 1}, follows_reasoning=True)
    follower = Follower(Grammar(text, (END,), begins_after=CLOSE), ids("so"))
    rows = allowed(grammars, follower, [*ids("a"), CLOSE, *ids("1")])
    assert rows[:2] == [FREE, FREE]
    assert END not in rows[2]
    assert rows[3] == {END}
    barred = Grammar(text, (END,), begins_after=CLOSE, barred=(5, 7))
    (row,) = allowed(grammars, Follower(barred, ids("so")))
    assert row == FREE - {5, 7}


def test_a_model_may_open_its_reasoning_itself(grammars: Grammars) -> None:
    """Let the first token begin a reasoning or the text; with drafts the rows are the same."""
    opens = 5
    text = Grammar(
        grammar_text({"const": 1}, follows_reasoning=True),
        (END,),
        begins_after=CLOSE,
        begins_with=opens,
    )
    held = Grammar(grammar_text({"const": 1}, follows_reasoning=True), (END,))
    (first,) = allowed(grammars, Follower(held, []))
    thought = [opens, *ids("so"), CLOSE, *ids("1")]
    for drafts in (thought, ids("1"), [*ids("1"), END]):
        rows = allowed(grammars, Follower(text, []), drafts)
        assert rows[0] == (first or set()) | {opens}
        for number in range(len(drafts) + (drafts[-1] != END)):
            assert allowed(grammars, Follower(text, drafts[:number])) == [rows[number]]
    rows = allowed(grammars, Follower(text, []), thought)
    assert rows[1:4] == [FREE] * 3
    assert rows[4] == first
    assert rows[5] == {END}


@pytest.mark.promise("Drafts, schemas and tool calls do not change the effect of a budget.")
@pytest.mark.parametrize("opens", [-1, 5])
@pytest.mark.parametrize("schema", [None, {"const": 1}])
def test_a_reasoning_ends_within_its_budget(
    grammars: Grammars, schema: dict[str, Any] | None, opens: int
) -> None:
    """Check the budget with drafts and without, before free text and before a schema."""
    text = "" if schema is None else grammar_text(schema, follows_reasoning=True)
    within: set[int] | None = None if schema is None else FREE
    for budget in (0, 1, 3):
        bounded = Grammar(text, (END,), CLOSE, begins_with=opens, budget=budget)
        begun = [] if opens < 0 else [opens]
        thought = [*begun, *ids("abc")[:budget], CLOSE, *ids("1")]
        rows = allowed(grammars, Follower(bounded, []), thought)
        first = len(begun)
        assert rows[first : first + budget] == [within] * budget
        assert rows[first + budget] == {CLOSE}
        assert rows[-1] == (None if schema is None else {END})
        for number in range(len(thought) + 1):
            assert allowed(grammars, Follower(bounded, thought[:number])) == [rows[number]]
        wrong = [*begun, *ids("abcabc")[: budget + 2]]
        rows = allowed(grammars, Follower(bounded, []), wrong)
        assert rows[first + budget] == {CLOSE}, "a draft that goes on is not drawn"


def test_calls_end_a_bounded_reasoning_as_its_mark_does(grammars: Grammars) -> None:
    calls = Grammar(
        grammar_text({"const": 1}, follows_reasoning=False),
        (END,),
        CLOSE,
        opens=(5,),
        closes=7,
        budget=2,
    )
    assert allowed(grammars, Follower(calls, ids("ab"))) == [{CLOSE}]
    assert allowed(grammars, Follower(calls, [*ids("ab"), CLOSE, *ids("abc")])) == [None]
    assert allowed(grammars, Follower(calls, [*ids("a")])) == [None]


@pytest.mark.parametrize("run", [" " * 20, "\t" * 20, "\n\n" + " " * 20, " \r\n\r\n"])
def test_a_text_is_not_made_of_blanks(grammars: Grammars, run: str) -> None:
    """Forbid one more blank after each of these runs: a model that does not know JSON would add
    blanks for ever.
    """
    follower = Follower(grammar({"type": "object"}), ids("{" + run[:-1]))
    rows = allowed(grammars, follower, ids(run[-1]))
    own = BYTE_TO_ID[run[-1].encode()]
    assert [own in (row or set()) for row in rows] == [True, False]


def test_what_is_indented_as_usual_is_allowed(grammars: Grammars) -> None:
    value = {"a": [{"b": {"c": [1, 2]}}], "d": {}}
    for indent in (None, 1, 2, 4, "\t"):
        text = json.dumps(value, indent=indent)
        for written in (text, text.replace("\n", "\r\n"), text.replace(",", ", ")):
            tokens = ids(written)
            rows = allowed(grammars, Follower(grammar({"type": "object"}), []), tokens)
            assert all(token in (row or ()) for token, row in zip(tokens, rows, strict=False))
            assert END in (rows[-1] or ())


def test_a_token_need_not_be_the_encoders_own(grammars: Grammars) -> None:
    """Allow forced text in any tokens: "number" is one, and so is "n"."""
    schema = {"type": "object", "properties": {"number": {}}, "required": ["number"]}
    (row,) = allowed(grammars, Follower(grammar(schema), ids('{"')))
    words = {TABLE.token_bytes[token] for token in row or ()}
    assert {b"n", b"number"} <= words


@pytest.mark.promise("Reasoning is not constrained: the format begins after </think>.")
def test_a_reasoning_comes_first(grammars: Grammars) -> None:
    asked = grammar({"type": "object"}, CLOSE)
    rows = allowed(grammars, Follower(asked, []), [50, CLOSE, *ids("\n{")])
    assert rows[:2] == [FREE, FREE]
    assert all(row is not None for row in rows[2:])
    begun, words = allowed(grammars, Follower(asked, [50, END + 1, CLOSE])), {b"{", b"\n\n", b" "}
    assert begun[0] is not None
    assert words <= {TABLE.token_bytes[token] for token in begun[0]}
    assert allowed(grammars, Follower(asked, [50, END])) == [None]
    assert allowed(grammars, Follower(asked, [50]), [END, CLOSE]) == [FREE, None, None]


def test_what_was_never_allowed_ends_it_with_a_reason(grammars: Grammars) -> None:
    follower = Follower(grammar({"type": "object"}), ids("[]"))
    assert allowed(grammars, follower, [50]) == [set(), set()]
    assert follower.error


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_can_be_followed_is_not_complained_of(name: str) -> None:
    for follows_reasoning in (False, True):
        assert complaint(grammar_text(SCHEMAS[name], follows_reasoning=follows_reasoning)) is None


@pytest.mark.promise(
    "What cannot be followed is a 400 before anything is computed, and its message names "
    "the keyword"
)
@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"type": "string"}}, "'not' is not supported"),
        ({"properties": {"a": {"if": {}, "then": {}}}}, "'if', 'then' are not supported"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' is not supported"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "'oneOf' is not supported if"),
        ({"type": "string", "format": "rhyme"}, "'format' 'rhyme' is not supported"),
        ({"type": "string", "pattern": "(?=a)b"}, "'pattern' is not supported: look-around"),
        ({"$ref": "https://example.org/s"}, "'$ref' must refer to a part of the same schema"),
        ({"$ref": "#"}, "no text can satisfy the schema"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable schema"),
    ],
)
def test_what_cannot_be_followed_is_named(schema: dict[str, Any], said: str) -> None:
    why = complaint(grammar_text(schema, follows_reasoning=False))
    assert why is not None
    assert said in why
    assert "x-guidance" not in why


def test_nothing_of_the_grammar_is_in_what_is_said_of_a_schema() -> None:
    said = complaint(grammar_text({"type": "strin"}, follows_reasoning=True))
    assert said == "Invalid type: strin"
