"""Training tasks of hadal-tiny: equal for equal seeds, without held-out content, and with calls
that the gateway reads as intended.
"""

import json
import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.calling import _UNITS, _calculator, _converter, _reckon, _units
from evals.followup import _after_count
from evals.foreign import foreign_examples
from evals.frames import Frames
from evals.numbers import SUMS
from evals.smalltalk import DECLINES
from evals.tasks import (
    _CONTENT_ONE_IN,
    ALL_TASKS,
    Example,
    _num_pieces,
    is_correct,
    sample,
    sample_split,
    side,
)
from evals.texts import _FACTS
from evals.wordings import Source, is_frame_held_out, is_one_in
from evals.words import with_articles
from hadal.apps.console import tools

_SLOT = re.compile(r"\{\w*\}")
NUM = 250


def trained(seed: int, num: int) -> list[Example]:
    rng = random.Random(seed)
    return [sample_split(rng, task, False) for task in ALL_TASKS for _ in range(num)]


@pytest.mark.parametrize("task", ALL_TASKS)
def test_a_seed_makes_the_same_examples(task: str) -> None:
    first, again = ([sample(random.Random(seed), task) for seed in range(20)] for _ in range(2))
    assert first == again
    assert len({repr(example.messages) for example in first}) > 10


def test_a_text_is_read_from_what_is_asked_to_the_sentence_that_tells_it() -> None:
    rng = random.Random(4)
    num_persons = 0
    for _ in range(NUM):
        example = sample(rng, "reading")
        first, *read = example.reasoning.split("\n")
        sought = first.removeprefix("read: ")
        kind, given = sought.split(" ")[0], sought.split(", ")[1:]
        kinds = {known.kind for known in _FACTS.values()}
        assert kind in {*kinds, "count", "colour", "owner"}, sought
        question = example.messages[-1]["content"].lower()
        for each in given:
            assert each.lower() in question, (sought, question)
        if read[-1].split(" = ")[-1] == example.answer and " = " in read[-1]:
            read.pop()  # This line turns a number in words into digits.
        num_persons += any(re.search(r" (He|She) is \w+\. .* (yes|no)$", line) for line in read)
        assert all(line.endswith(" no") for line in read[:-1])
        assert read[-1].endswith(" yes") or read[-1] == "That is not in the text."
        if read[-1].endswith(" yes"):
            for each in given:
                assert re.search(f", {each}( as [a-z]+)? yes", read[-1]), (sought, read[-1])
    assert num_persons > 10


def test_numbers_are_compared_with_three_digits_each() -> None:
    rng = random.Random(5)
    num_padded = 0
    for _ in range(NUM):
        example = sample(rng, "sort")
        if example.answer.replace(", ", "").isdigit():
            numbers = re.findall(r"\d+", example.reasoning)
            assert {*map(len, numbers)} == {3}, example.reasoning
            num_padded += any(number.startswith("0") for number in numbers)
    assert num_padded > 10


def test_a_content_is_held_out_whichever_task_asks_it() -> None:
    """Check second turns, too: a sum, a count or a call in one must not be held out."""
    rng = random.Random(6)
    num_seen: Counter[str] = Counter()
    for _ in range(NUM * 4):
        example = sample_split(rng, rng.choice(("followup", "tools")), False)
        keys = [f"tool {call}" for call in example.calls]
        if found := re.match(r"sum: (\d+) ([-+*/]) (\d+)\n", example.reasoning):
            keys.append("".join(found.groups()))
        if found := re.match(r"count ([a-z]): ([a-z0-9 ]+)$", example.reasoning):
            keys.append(f"count {found[1]} {re.sub('[0-9 ]', '', found[2])}")
        assert not any(is_one_in(key, 20) for key in keys), (keys, example)
        num_seen.update(key.split(" ")[0] for key in keys)
    assert num_seen["tool"] > 50
    assert num_seen["count"] > 20
    assert num_seen.total() > 150


def test_training_uses_nothing_that_is_held_out() -> None:
    examples = trained(1, NUM // 5)
    assert {side(example) for example in examples} == {"train"}
    used = {frame for example in examples for frame in example.frames}
    rng = random.Random(2)
    held: set[str] = set()
    for task in (task for task in ALL_TASKS if task != "long"):
        for _ in range(NUM):
            held |= set(sample(rng, task).held_frames)
    assert len(held) > 100
    assert held & used == set()


def test_no_text_of_training_is_a_wording_of_a_frame_that_is_held_out() -> None:
    """Search the texts themselves, independently of the examples' own lists."""
    frames = [
        frame
        for op in "+-*/"
        for kind in ("nouns", "orders", "questions", "stories")
        for frame in SUMS[op][kind]
        if is_frame_held_out(frame)
    ]
    patterns = {}
    for frame in frames:
        text = re.sub(r"\\\[(.*?)\\\]", lambda m: f"(?:{m[1]})", re.escape(frame))
        text = text.replace(r"\|", "|")
        pattern = re.sub(r"\\\{\w+\\\}", "[0-9A-Za-z -]+?", text)
        if sum(char.isalpha() for char in _SLOT.sub("", re.sub(r"\[.*?\]", "", frame))) >= 8:
            patterns[frame] = re.compile(pattern, re.IGNORECASE)
    assert len(patterns) > 8
    rng = random.Random(3)
    questions = [
        sample_split(rng, "arithmetic", False).messages[-1]["content"] for _ in range(3 * NUM)
    ]
    found = {f: q for f, p in patterns.items() for q in questions if p.search(q)}
    assert found == {}
    # Control: the patterns do find their frames.
    asked = [sample(rng, "arithmetic") for _ in range(8 * NUM)]
    seen = {f for e in asked for f, p in patterns.items() if p.search(e.messages[-1]["content"])}
    assert len(seen) > len(patterns) // 3


def test_every_kind_of_side_is_asked() -> None:
    rng = random.Random(4)
    sides = [side(sample_split(rng, "letters", True)) for _ in range(300)]
    assert set(sides) == {"frames", "wordings", "contents"}


@given(st.integers(0, 2**32))
def test_a_source_for_training_draws_no_frame_that_is_held_out(seed: int) -> None:
    frames = Frames("\n".join(f"the {word} of things and more" for word in "abcdefghijklmnop"))
    source = Source(seed, trained_only=True)
    for _ in range(20):
        source.frame(frames)
    assert source.held_frames == []
    assert not any(is_frame_held_out(frame) for frame in source.frames)


def test_replies_are_judged() -> None:
    rng = random.Random(5)
    for task in ALL_TASKS:
        example = sample(rng, task)
        assert is_correct(example, f"because\n</think>\n\n{example.answer}", example.calls)
        assert not is_correct(example, f"{example.answer} or so", (("another", {}),))


def test_schema_answers_follow_their_schema() -> None:
    from jsonschema import validate

    rng = random.Random(6)
    for _ in range(NUM):
        example = sample(rng, "schema")
        if example.schema is not None:
            validate(json.loads(example.answer), example.schema)


def test_calls_follow_the_tools_that_are_offered() -> None:
    from jsonschema import validate

    rng = random.Random(7)
    num_calls = 0
    for _ in range(NUM):
        example = sample(rng, "tools")
        offered = {tool["function"]["name"]: tool["function"] for tool in example.tools}
        assert len(offered) == len(example.tools)
        for name, arguments in example.calls:
            validate(arguments, offered[name]["parameters"])
            num_calls += 1
    assert num_calls > NUM // 3


def test_the_probe_is_none_of_what_is_taught() -> None:
    probe = {example.messages[-1]["content"].lower() for example in foreign_examples()}
    assert len(probe) >= 110
    taught = {example.messages[-1]["content"].lower() for example in trained(8, NUM // 5)}
    assert probe & taught == set()


def test_a_second_word_is_asked_about_as_it_is_counted() -> None:
    """Ask in any case of letters: "Rare" has two r, so counting is done in lower case."""
    rng = random.Random(9)
    for _ in range(NUM):
        first, then = _after_count(Source(rng.getrandbits(64)))
        _, letter, word = then.key.split(" ")
        assert word == word.lower()
        assert then.answer == str(word.lower().count(letter))
        assert first.subject[0] == first.subject[0].lower()


def test_a_frame_that_stands_twice_is_refused() -> None:
    assert Frames("one\n\n  two") == ("one", "two")
    with pytest.raises(ValueError, match="stands twice"):
        Frames("one\ntwo\none")


def test_drafts_that_were_dropped_leave_nothing_behind() -> None:
    frames = Frames("\n".join(f"the {word} of a great many things" for word in "abcdefghijklmnop"))
    source = Source(3)
    drawn: list[str] = []
    found = source.until(
        lambda: source.frame(frames), lambda text: drawn.append(text) or "k" in text[:6]
    )
    assert len(drawn) > 1
    assert source.frames == [found]
    with source.aside():
        for _ in range(40):
            source.wording(source.frame(frames))
    assert set(source.held_frames) <= {found}
    assert source.held_wordings == []


def test_english_is_whole() -> None:
    """Check grammar: no wrong article, no sign within words, no contraction without its beginning."""
    rng = random.Random(10)
    for task in ("arithmetic", "schema", "dates"):
        for _ in range(2 * NUM):
            text = sample(rng, task).messages[-1]["content"]
            assert not re.search(r"\ba [aeiou][a-z]{2,}", text), text
            assert not re.search(r"[a-z]{3,}x(one|two|three|four|five|six|ten)", text), text
            assert not re.search(r"\bI '(m|d)\b|does \w+\?|do \d+ \?", text), text
    assert (
        with_articles("A owl is a 8 year old, a 80, a cat")
        == "An owl is an 8 year old, an 80, a cat"
    )


def test_what_a_text_does_not_say_is_not_in_it_under_another_name() -> None:
    rng = random.Random(11)
    missing = 0
    for _ in range(8 * NUM):
        example = sample(rng, "schema")
        nulls = {key for key, value in json.loads(example.answer).items() if value is None}
        missing += len(nulls)
        assert not nulls & {"date", "when", "location", "total"}
    assert missing > 50


def test_training_sees_long_conversations_that_fit() -> None:
    rng = random.Random(12)
    sizes = []
    for _ in range(60):
        example = sample_split(rng, "long", False)
        sizes.append(sum(_num_pieces(message) for message in example.messages))
        assert len(example.keys) <= 1
    assert max(sizes) <= 3900
    histories = [sample_split(rng, "long", False) for _ in range(60)]
    assert max(len(example.messages) for example in histories) > 80


def test_what_is_held_out_is_so_in_every_task() -> None:
    keys = {key for example in trained(13, NUM // 5) for key in example.keys}
    assert not any(is_one_in(key, _CONTENT_ONE_IN) for key in keys)
    assert any(re.fullmatch(r"\d+[-+*/]\d+", key) for key in keys)


def test_many_questions_need_none_of_the_tools() -> None:
    rng = random.Random(15)
    examples = [sample(rng, "tools") for _ in range(4 * NUM)]
    untooled = [e for e in examples if not e.calls and e.messages[-1]["role"] == "user"]
    assert len(untooled) > NUM
    assert any(re.search(r"\d{4}", e.messages[-1]["content"]) for e in untooled)
    declined = [e for e in untooled if e.answer in DECLINES]
    assert len(declined) > 50
    for example in declined:
        names = {re.sub("[^a-z]", "", t["function"]["name"].lower()) for t in example.tools}
        assert not names & {"bookflight", "getstockprice", "translate", "searchweb", "deletefile"}


def test_sums_are_called_for_as_they_stand() -> None:
    rng = random.Random(16)
    num = 0
    for _ in range(NUM):
        source = Source(rng.getrandbits(64))
        question, _, (_, arguments), _ = _reckon(source, _calculator(source))
        text = json.dumps(arguments)
        a, b = re.findall(r"\d+(?:\.\d+)?", question)[:2]
        if "+" in text or "add" in text:
            given = re.findall(r"(?<!\w)\d+(?:\.\d+)?", text)
            assert [float(each) for each in given] == [float(a), float(b)]
            num += 1
    assert num > 20


def test_the_units_of_the_pages_are_taught() -> None:
    rows = [unit for quantity in _UNITS.values() for unit in quantity]
    assert sorted(unit[0] for unit in rows if unit[0] != "-") == sorted(tools._UNITS)
    for name, *words in (unit for unit in rows if unit[0] != "-"):
        for word in words:
            assert tools.convert({"value": 7, "from": word, "to": name}) == "7"
    rng = random.Random(17)
    mapped = 0
    for _ in range(4 * NUM):
        source = Source(rng.getrandbits(64))
        offer = _converter(source)
        u, v = _units(source, offer)
        given = offer.arguments("3", u, v)
        properties = offer.fields["function"]["parameters"]["properties"]
        for key, value in given.items():
            assert value in properties[key].get("enum", [value])
        mapped += u not in given.values()
    assert mapped > NUM // 2
