"""Endless repetition is distinguished from text that repeats something for a while."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from hadal.core.messages.generation import Token
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.repetition import MAX_PERIOD, MIN_TIMES, MIN_TOKENS, repeated_period
from hadal.gateway.text.stream import Assembler, TextReading

from .scenes import scene


def slow_period(tokens: Sequence[int]) -> int:
    """Return the period by definition, comparing token by token; 0 if there is none."""
    for period in range(1, MAX_PERIOD + 1):
        run = max(MIN_TOKENS, MIN_TIMES * period)
        last = range(len(tokens) - run + period, len(tokens))
        if len(tokens) >= run and all(tokens[i] == tokens[i - period] for i in last):
            return period
    return 0


@pytest.mark.parametrize("period", [1, 2, 3, 31, 32, 33, 63, 64, 65, 100])
def test_circles_of_every_size(period: int) -> None:
    draw = random.Random(period)
    for cut in (-1, 0, 1, 40):
        circle = [draw.randrange(1000) for _ in range(period)]
        run = max(MIN_TOKENS, MIN_TIMES * period) + cut
        tokens = [draw.randrange(1000) for _ in range(50)] + list(
            itertools.islice(itertools.cycle(circle), run)
        )
        assert repeated_period(tokens) == slow_period(tokens)
        assert bool(repeated_period(tokens)) == (cut >= 0 and period <= MAX_PERIOD)


def test_what_people_ask_for_goes_through() -> None:
    counting = [token for number in range(1000) for token in (*map(int, str(number)), 999)]
    a_word_200_times = [5] * 200
    a_table = [token for row in range(200) for token in (1, row, 2, row * row % 97, 3)]
    for tokens in (counting, a_word_200_times, a_table):
        assert not any(repeated_period(tokens[:end]) for end in range(0, len(tokens), 64))


@pytest.mark.promise(
    "A reply that repeats itself without end is stopped with finish_reason: length; "
    "stop_repetition: false turns this off."
)
def test_a_text_in_circles_is_stopped_however_its_tokens_come(model: ServedModel) -> None:
    ids = model.vocabulary.encode_plain("The answer ")
    tokens = [Token("r", 0, i, ids[i % len(ids)]) for i in range(4000)]
    ends = set()
    for size in (1, 7, 4000):
        assembler, piece = (
            Assembler(model.vocabulary, TextReading(sections=True, stop_repetition=True)),
            Piece(),
        )
        for at in range(0, 4000, size):
            piece.add(assembler.push(tokens[at : at + size]))
        ends.add((assembler.num_tokens, piece.finish, piece.content, assembler.period))
    ((num_tokens, finish, _, period),) = ends
    assert (finish, period) == ("length", len(ids))
    assert MIN_TOKENS <= num_tokens <= MIN_TOKENS + 64


@pytest.mark.promise(
    "A reply that repeats itself without end is stopped with finish_reason: length; "
    "stop_repetition: false turns this off."
)
async def test_the_units_stop_too_and_it_can_be_turned_off(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with scene(model, text="a", then_stop=False) as it:

        async def num_tokens(**fields: object) -> int:
            reply = (await it.chat(max_tokens=1500, **fields)).json()
            assert reply["choices"][0]["finish_reason"] == "length"
            return int(reply["usage"]["completion_tokens"])

        with caplog.at_level("INFO", "hadal.gateway"):
            assert await num_tokens() <= MIN_TOKENS + 64
        assert "without end and is stopped after 512" in caplog.text
        await it.settle()
        assert await num_tokens(stop_repetition=False) == 1500
        assert await num_tokens(ignore_eos=True) == 1500
        assert await num_tokens(min_tokens=1400) > 1400
