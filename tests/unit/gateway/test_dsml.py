"""Calls in DSML, read from tokens: any cut gives the same reply, and no mark reaches a client."""

from __future__ import annotations

import json
import random
from typing import Any

import deepseek_recipe as recipe
import pytest

from hadal.core.messages.generation import Token
from hadal.gateway.text.dsml import FORMS, V4, V32, V41, Dsml
from hadal.gateway.text.dsml_grammar import MARK
from hadal.gateway.text.dsml_reader import TagScanner
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.stream import Assembler, Calls, TextReading
from hadal.gateway.text.tools import Choosing
from hadal.gateway.text.vocabulary import Vocabulary

from .dsml_chats import drawn_chat
from .dsml_replies import SPELLED, TOKEN, Reading, fuzz, leaks, written
from .test_tools import WEATHER

VOCABULARIES = pytest.mark.parametrize("vocabulary", [TOKEN, SPELLED], ids=["token", "spelled"])
EACH_FORM = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
ODD = f'x <{MARK}invoke name="y">\n</b> < " \\ é🙂\n'


@pytest.mark.promise(
    "No mark of DSML reaches content, reasoning, names or arguments, as a token or spelled out."
)
@pytest.mark.slow("2,000 replies, 50 of them cut at every byte")
def test_no_mark_reaches_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    tried = fuzz(2000)
    with capsys.disabled():
        print(f"\nDSML: {tried}")
    assert tried.replies == 2000
    assert tried.with_marks > 1000
    assert tried.calls > 1500
    assert tried.cuts > 10_000
    assert tried.leaks == []
    assert tried.differing == []


@VOCABULARIES
@EACH_FORM
def test_calls_are_set_apart_from_what_is_said_before_them(
    vocabulary: Vocabulary, form: Dsml
) -> None:
    first = {"city": 'Os"lo\n', "days": 3, "more": {"a": [1, "x", None]}, "none": ""}
    text = "<think>Two.</think>\n\nLet me see.\n" + written(form, ("weather", first), ("time", {}))
    found = Reading(vocabulary, form).read(text)
    assert (found.reasoning, found.content) == ("Two.", "Let me see.")
    assert [name for name, _ in found.calls] == ["weather", "time"]
    assert [json.loads(arguments) for _, arguments in found.calls] == [first, {}]
    assert found.finish == "tool_calls"
    assert sorted(found.ids) == found.ids, "V4's prompts have calls by their ids"
    assert len(set(found.ids)) == 2


@VOCABULARIES
@EACH_FORM
def test_calls_of_drawn_chats_are_read_as_they_were_made(
    vocabulary: Vocabulary, form: Dsml
) -> None:
    num_calls = 0
    for seed in range(60):
        for turn in drawn_chat(seed, form).turns:
            calls = [(call.name, json.loads(call.arguments)) for call in turn.calls]
            if calls:
                found = Reading(vocabulary, form).read(turn.content + written(form, *calls))
                assert found.content == turn.content.rstrip("\n")
                assert [(name, json.loads(each)) for name, each in found.calls] == calls
                num_calls += len(calls)
    assert num_calls > 50


def by_recipe(form: Dsml, text: str, rng: random.Random) -> list[Any]:
    """Return the content and the calls that deepseek-recipe reads from a reply cut at random."""
    version = recipe.ModelVersion
    is_v4 = form is V4
    request = recipe.ConversationRequest(
        recipe.Conversation(), version.DeepseekV4Pro if is_v4 else version.DeepseekV41Flash
    )
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "i", "m")
    processor = recipe.StreamProcessor(generator, recipe.ParsingOptions())
    chunks: list[Any] = []
    while text:
        size = rng.randint(1, 9)
        chunks += processor.push(recipe.InferenceChunk.text(text[:size], 1))
        text = text[size:]
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    content, calls = "", list[list[str]]()
    for chunk in chunks:
        for choice in json.loads(chunk.to_json())["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["function"].get("name"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"]["arguments"]
    return [content, [(name, json.loads(arguments)) for name, arguments in calls]]


@pytest.mark.parametrize("form", [V4, V41], ids=lambda form: form.name)
def test_replies_are_read_as_the_makers_parser_reads_them(form: Dsml) -> None:
    num_calls = 0
    for seed in range(200):
        for turn in drawn_chat(seed, form).turns:
            calls = [(call.name, json.loads(call.arguments)) for call in turn.calls]
            names = [name for _, arguments in calls for name in arguments]
            # It neither escapes names nor reads those with spaces.
            is_plain = not any(set(name) & set(' "\\') for name in names)
            if calls and is_plain:
                text = turn.content.lstrip("\n") + written(form, *calls)
                found = Reading(TOKEN, form).read(text)
                ours = [found.content, [(name, json.loads(each)) for name, each in found.calls]]
                assert ours == by_recipe(form, text, random.Random(seed))
                num_calls += len(calls)
    assert num_calls > 50


@VOCABULARIES
@EACH_FORM
def test_marks_in_values_and_names_are_removed(vocabulary: Vocabulary, form: Dsml) -> None:
    calls = (("weather", {"a": ODD, "b": [ODD, {ODD: 1}], f"c{MARK}": 1}), (f"ti{MARK}me", {}))
    found = Reading(vocabulary, form).read("Hm." + written(form, *calls))
    assert leaks(found, is_whole=True) == []
    assert found.calls[0][0] == "weather"
    value = json.loads(found.calls[0][1])["a"]
    assert value.startswith("x ")
    assert value.endswith('</b> < " \\ é🙂\n')


@EACH_FORM
def test_a_mark_that_is_spelled_out_makes_no_tag_where_it_is_a_token(form: Dsml) -> None:
    text = written(form, ("weather", {"city": "Oslo"})).replace(MARK, MARK.replace("D", "D\0"))
    found = Reading(TOKEN, form).read("Say: " + text)
    assert found.calls == []
    assert found.finish == "stop"
    assert MARK not in found.content
    assert "Oslo" in found.content


@pytest.mark.parametrize(
    "escape",
    ["\\uff5cDSML｜", "\\uFF5C\\u0044SML\\uff5c", "\\uff5cDSML｜\\ud83d"],
    ids=["mixed", "escaped", "half of a pair"],
)
def test_a_mark_in_escapes_of_json_is_removed(escape: str) -> None:
    for body in (f'["<{escape}invoke>"]', f'{{"<{escape}": 1}}'):
        tag = f'<{MARK}parameter name="a" string="false">{body}</{MARK}parameter>'
        text = written(V32, ("weather", {"a": 0})).replace(
            f'<{MARK}parameter name="a" string="false">0</{MARK}parameter>', tag
        )
        found = Reading(TOKEN, V32).read(text)
        assert leaks(found, is_whole=True) == []
        assert list(json.loads(found.calls[0][1])) == ["a"]
        assert found.calls[0][1].encode()


@VOCABULARIES
@EACH_FORM
def test_without_tools_marks_are_removed_and_the_text_stays(
    vocabulary: Vocabulary, form: Dsml
) -> None:
    text = "Hm." + written(form, ("weather", {"city": "Oslo"}))
    found = Reading(vocabulary, form, has_tools=False).read(text)
    assert (found.calls, found.finish) == ([], "stop")
    assert found.content.split() == ["Hm.", "Oslo"]


@EACH_FORM
def test_a_call_counts_once_its_name_is_complete(form: Dsml) -> None:
    whole = written(form, ("weather", {"city": "Oslo", "days": [1, 2]}))
    name, value = whole.index('weather">') + len('weather">'), whole.index("Oslo") + 2
    cut = Reading(TOKEN, form, "length")
    assert cut.read("Hm." + whole[: name - 1]).calls == []
    assert cut.read("Hm." + whole[: name - 1]).content == "Hm."
    assert cut.read(whole[:name]).calls == [["weather", ""]]
    assert cut.read(whole[:value]).calls == [["weather", '{"city": "Os']]
    ended = Reading(TOKEN, form).read(whole[:value])
    assert ended.calls == [["weather", '{"city": "Os"}']], "the model ended its reply itself"
    assert ended.finish == "tool_calls"


@EACH_FORM
def test_text_beside_calls_is_content(form: Dsml) -> None:
    call = written(form, ("weather", {"city": "Oslo"}))
    end = f"</{MARK}{form.gap}invoke>\n"
    found = Reading(TOKEN, form).read(f"One.{call.replace(end, end + 'Two.' + chr(10))}\nThree.")
    assert found.content == "One.\nTwo.\nThree."
    assert found.calls == [["weather", '{"city": "Oslo"}']]


@EACH_FORM
def test_a_call_ends_the_reply_if_only_one_is_allowed(form: Dsml) -> None:
    text = written(form, ("weather", {"city": "Oslo"}), ("time", {})) + "Done."
    found = Reading(TOKEN, form, is_parallel=False).read(text)
    assert found.calls == [["weather", '{"city": "Oslo"}']]
    assert (found.content, found.finish) == ("", "tool_calls")


@EACH_FORM
def test_arguments_as_one_object_of_json_are_read(form: Dsml) -> None:
    begin, end = f"<{MARK}{form.gap}invoke", f"</{MARK}{form.gap}invoke>"
    call = f'<{MARK}{form.block}>\n{begin} name="f">\n{{"a": [1]}}\n{end}\n</{MARK}{form.block}>'
    assert Reading(TOKEN, form).read(call).calls == [["f", '{"a": [1]}']]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("Oslo", "Oslo"), ("NaN", "NaN"), (' {"a": 1}\n', {"a": 1}), ("", ""), ("1e400", "1e400")],
)
def test_a_value_that_is_not_json_becomes_a_text(value: str, expected: Any) -> None:
    text = written(V32, ("f", {"a": 7})).replace(">7<", f">{value}<")
    ((_, arguments),) = Reading(TOKEN, V32).read(text).calls
    found = json.loads(arguments)["a"]
    assert found == expected or found == float("inf") == float(expected)


def test_calls_in_reasoning_end_it() -> None:
    text = "<think>Hm." + written(V4, ("weather", {"city": "Oslo"}))
    found = Reading(TOKEN, V4).read(text)
    assert (found.reasoning, found.content) == ("Hm.", "")
    assert found.calls == [["weather", '{"city": "Oslo"}']]


@EACH_FORM
def test_tokens_of_calls_have_no_log_probabilities_in_the_content(form: Dsml) -> None:
    ids = TOKEN.encode_controlled("Hi <b>." + written(form, ("weather", {"city": "Oslo"})))
    reading = TextReading(sections=True, logprobs=True, calls=Calls(form, Choosing((WEATHER,))))
    assembler, piece = Assembler(TOKEN, reading), Piece()
    for i, token in enumerate(ids):
        piece.add(assembler.push([Token("r", 0, i, token)]))
    piece.add(assembler.end("stop"))
    assert TOKEN.decode([each.token for each in piece.content_tokens]) == piece.content == "Hi <b>."


@EACH_FORM
def test_a_stop_string_ends_the_text_before_calls(form: Dsml) -> None:
    ids = TOKEN.encode_controlled("Hi there." + written(form, ("weather", {})))
    calls = Calls(form, Choosing((WEATHER,)))
    for stop, content, num_calls in (("there", "Hi ", 0), (".\n\nNo", "Hi there.", 1)):
        assembler = Assembler(TOKEN, TextReading(sections=True, stops=(stop,), calls=calls))
        piece = assembler.push(Token("r", 0, i, token) for i, token in enumerate(ids))
        piece.add(assembler.end("stop"))
        assert piece.content == content
        assert sum(bool(delta.id) for delta in piece.calls) == num_calls


def test_many_line_breaks_cost_little() -> None:
    """A model may draw them until a limit ends its reply. A search from each of them would take an
    hour.
    """
    scanner = TagScanner(is_token=True, holds_breaks=True)
    breaks = "\n" * 400_000
    assert scanner.feed(breaks) == []
    assert scanner.feed("x") == [f"{breaks}x"]
