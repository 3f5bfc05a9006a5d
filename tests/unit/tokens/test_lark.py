"""Grammars of clients in their JSON form: they allow the texts of the grammar, and no others."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher

from hadal.tokens import grammars
from hadal.tokens.escapes import GrammarError
from hadal.tokens.grammars import AnyText, CallList, arguments_text, calls_text, forms_of
from hadal.tokens.lark import _LIBRARY, TextGrammar

# As agents send it: lines of a patch, each with a mark.
PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add | delete | update
add: "*** Add File: " filename LF added+
delete: "*** Delete File: " filename LF
update: "*** Update File: " filename LF moved? change?
filename: /(.+)/
added: "+" /(.*)/ LF -> line
moved: "*** Move to: " filename LF
change: (context | changed)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
changed: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF

%import common.LF
"""
PATCH_REGEX = (
    r"\*\*\* Begin Patch\n(\*\*\* Add File: .+\n(\+.*\n)+|\*\*\* Delete File: .+\n"
    r"|\*\*\* Update File: .+\n(\*\*\* Move to: .+\n)?"
    r"((@@|@@ .+|[+\- ].*)\n(?:(@@|@@ .+|[+\- ].*)\n)*(\*\*\* End of File\n)?)?)+"
    r"\*\*\* End Patch\n?"
)
CODE = r"""
start: with_pragma | plain
with_pragma: PRAGMA NEWLINE SOURCE
plain: SOURCE
PRAGMA: /[ \t]*\/\/ @run:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
SUM = """
?start: sum
?sum: product (("+" | "-") product)*   // Each rule may contain the first again.
?product: atom ("*" atom)* -> times
?atom: NUMBER | "(" sum ")" | ESCAPED_STRING
%import common (NUMBER, ESCAPED_STRING)
%import common.WS
%ignore WS
"""
LIST = 'start: "[" (ITEM ",")* ITEM "]"\nITEM: "a".."e" | "\\n"\n%ignore " "'


def allows(grammar: TextGrammar, text: str) -> bool:
    """Return True if arguments with this text are allowed, and may end there. The plain form, if
    the grammar has one, allows the same texts, except for control characters.
    """
    forms = forms_of(grammar.syntax, grammar.definition)
    made = TextGrammar(grammar.name, grammar.syntax, grammar.definition, *forms)
    as_json = json.dumps({grammar.name: text}, ensure_ascii=False)
    is_allowed = _accepts(arguments_text(made), as_json)
    if made.plain and not _CONTROL.search(text):
        whole = AnyText("</end>", "</end>", grammar=made)
        rules = calls_text(CallList(("<",), (">",), "", ((whole,),), is_single=True))
        assert _accepts(rules, f"<{text}</end>>") == is_allowed, text
    return is_allowed


_CONTROL = re.compile(r"[^\n\r\t\f\x08 -\U0010ffff]")


def _accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(grammars._byte_tokenizer(), grammar, log_level=0)
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def lark(definition: str) -> TextGrammar:
    return TextGrammar("input", "lark", definition)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            lark(CODE),
            ['// @run: 1\nlet a = "b\\n";\n', "x", "\t//\r\n\\", "é🙂/\x7f"],
            ["", "a\x01"],
        ),
        (
            lark(SUM),
            ['1 +\n( 2*"a\\"b\n" )', "((((3))))", '"\\\\"', "1.5e3\t-2 "],
            ["1 +", '"a', "(1))", "+1", ""],
        ),
        (lark(LIST), ["[a]", "[a, b ,\n]", "[e]  "], ["[f]", "[a b]", "[]"]),
        (lark('start: "a\\n\\"\\\\/"i "B"'), ['A\n"\\/B'], ['A\n"\\/b', "A"]),
        (lark('start: "<>" "\'`!@%=:;,_-~#&$^"'), ["<>'`!@%=:;,_-~#&$^"], ["<>"]),
        (lark('start: A\nA: /[a-z"]+/ & ~/(?s:.*)b(?s:.*)/'), ['a"c'], ["abc"]),
        (
            lark('start: "\\n" ~("y" | "\\"") "."'),
            ["\nyy.", '\n"".', "\n\\.", "\n."],
            ["\ny.", '\n".', "\n"],
        ),
        (lark('start: TEXT\nTEXT: ~END "END"\nEND: /(?s:.*)END(?s:.*)/'), ["\\\n END"], ["ENDEND"]),
        (lark("start: /(?i)a(?-i:b)[^c]{2}/"), ["Ab\n\t", 'ab""'], ["AB\n\t", "Abc\n"]),
        (lark("start: /(?s:.)./"), ["\nx", '"x'], ["x\n"]),
        (lark('start: pair{2}\npair: "\\x41\\u0042" "]"~1..2'), ["AB]AB]]"], ["AB]"]),
        (lark('start: /[]\\[^"]\\p{L}\\x{e9}\\u00e9/'), ['"àéé', "[béé", "]xéé"], ["a[éé"]),
        (lark("start: [a] /b*?/\na: /\\/\\s\\S\\w\\D/"), ['/\n"_\\bb', ""], ['/""_\\']),
        (
            TextGrammar("input", "regex", r"^(?P<d>\d{1,2})(?:st|nd)?\s+(a/b|[^x]?)$"),
            ["1st\n\t/", '22 "', "3 a/b"],
            ["1st x", "x1st  ", "1st"],
        ),
    ],
)
def test_texts(grammar: TextGrammar, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert allows(grammar, text), text
    for text in bad:
        assert not allows(grammar, text), text


def drawn_patches(rng: random.Random) -> Iterator[str]:
    lines = (
        *("*** Begin Patch", "*** End Patch", "*** End of File", "@@", "@@ def f():"),
        *('*** Add File: a/"b".py', "*** Delete File: c", "*** Update File: \\d", "*** Move to: e"),
        *('+x = "\\n"', "-\tá", " ", "+", "other"),
    )
    while True:
        body = rng.choices(lines[4:13], k=rng.randrange(1, 5))
        text = "\n".join(("*** Begin Patch", rng.choice(lines[5:8]), *body, "*** End Patch"))
        yield text + rng.choice(("", "", "\n", "\nx"))


def test_a_patch_is_allowed_if_it_is_one() -> None:
    rng, found = random.Random(2), {True: 0, False: 0}
    for text, _ in zip(drawn_patches(rng), range(120), strict=False):
        expected = re.fullmatch(PATCH_REGEX, text) is not None
        assert allows(lark(PATCH), text) is expected, text
        found[expected] += 1
    assert min(found.values()) >= 20, found


def test_every_terminal_of_the_library_has_its_form() -> None:
    """The form allows what llguidance's own terminal allows, of many short texts."""
    rng = random.Random(3)
    for name in _LIBRARY:
        grammar = lark(f"start: {name}\n%import common.{name}")
        form = TextGrammar("input", "lark", "", forms_of("lark", grammar.definition)[0])
        for _ in range(20):
            text = "".join(rng.choices('a1_.eE+-"\\\n\r\t\f /*#', k=rng.randrange(1, 4)))
            if rng.random() < 0.5 and name.endswith(("STRING", "COMMENT")):
                text = {"E": f'"{text}"', "C": f"/*{text}*/"}.get(name[0], f"#{text}")
            raw = LLMatcher(grammars._byte_tokenizer(), grammar.definition, log_level=0)
            num = raw.try_consume_tokens(list(text.encode()))
            expected = num == len(text.encode()) and raw.is_accepting()
            made = LLMatcher(grammars._byte_tokenizer(), arguments_text(form), log_level=0)
            data = json.dumps({"input": text}).encode()
            is_allowed = made.try_consume_tokens(list(data)) == len(data) and made.is_accepting()
            assert is_allowed is expected, (name, text)


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ("start: other", 'unknown name: "other"'),
        ("start: /a(/", "unclosed group"),
        ("start: /a(?=b)/", "look-around"),
        ('start: "a" )', "expecting rule"),
        ("", "Empty grammar"),
        (' {"grammars": []}', "begins with a rule"),
        ("start: <[258]>", "<[258]> is not supported"),
        ('start: %json {"type": "object"}', "%json is not supported"),
        ('start: a\na[suffix="x"]: /b*/', "is not supported"),
        ('start: "\\u0001"', "U+0001 is not supported"),
        ("start: /(?x) a/", "flag x is not supported"),
        ("start: a\na: A a | A\nA: /a/ & /[a-z]/", "& is not supported"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_the_parser_s_words(
    definition: str, said: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        forms_of("lark", definition)
    assert said in str(caught.value)
