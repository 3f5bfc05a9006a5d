"""Bounds of numbers: no text that a schema excludes is allowed."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from hadal.tokens.bounds import narrowed
from hadal.tokens.grammars import complaint, grammar_text

TOKENIZER = LLTokenizer("byte")
BOUNDS = (0, 1, 5, -1, -5, 10, 1000, 0.1, 0.5, 0.001, 5.5, 5.01, 9.999, -0.05, -0.1, -5.5, 1e-5)


def allows(schema: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar_text(schema, follows_reasoning=False), log_level=0)
    tokens = TOKENIZER.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def is_within(schema: dict[str, Any], number: Decimal) -> bool:
    limits = {name: Decimal(str(bound)) for name, bound in schema.items() if name != "type"}
    return (
        limits.get("minimum", number) <= number <= limits.get("maximum", number)
        and limits.get("exclusiveMinimum", number - 1) < number
        and number < limits.get("exclusiveMaximum", number + 1)
    )


def test_no_number_outside_of_its_bounds_is_allowed() -> None:
    rng, num_tried, num_allowed = random.Random(3), 0, 0
    for _ in range(400):
        low, high = sorted(rng.sample(BOUNDS, 2))
        schema: dict[str, Any] = {
            "type": "number",
            rng.choice(("minimum", "exclusiveMinimum")): low,
            rng.choice(("maximum", "exclusiveMaximum")): high,
        }
        middle = Decimal(str(low)) / 2 + Decimal(str(high)) / 2
        for number in (Decimal(str(low)), Decimal(str(high)), middle, Decimal(0)):
            for text in {f"{number:f}", f"{number:f}0", f"-{abs(number):f}"}:
                if text.endswith("0") and "." not in text and text != f"{number:f}":
                    continue  # Another number.
                num_tried += 1
                if allows(schema, text):
                    num_allowed += 1
                    assert is_within(schema, Decimal(text)), (schema, text)
        assert allows(schema, f"{middle:f}"), schema
    assert num_allowed > num_tried // 10


@pytest.mark.parametrize(
    ("low", "high"), [(5, 5.5), (0, 1e-7), (-1, -0.5), (10**6, 10**6 + 0.5), (-0.1, 0)]
)
def test_an_excluded_whole_number_stays_excluded(low: float, high: float) -> None:
    schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for number in (low, high):
        assert not allows(schema, f"{Decimal(str(number)):f}")
    in_parts = {"allOf": [{"type": "number", "exclusiveMinimum": low}, {"exclusiveMaximum": high}]}
    assert not any(allows(in_parts, f"{Decimal(str(number)):f}") for number in (low, high))
    assert complaint(grammar_text(in_parts, follows_reasoning=False)) is None


def test_only_bounds_that_are_misread_move() -> None:
    for low, high in ((0, 1), (0.5, 0.6), (-math.pi, 3)):
        schema = {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
        assert narrowed(schema) == schema
    values = {"enum": [{"exclusiveMinimum": 5}], "properties": {"maximum": {"maximum": 5.5}}}
    assert narrowed(values) == values
