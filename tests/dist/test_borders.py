"""Tests of tests/dist/borders: the differences that it accepts and rejects."""

from __future__ import annotations

from typing import Any

import pytest

from hadal.runtime.resolve import model_folder
from tests.dist import borders
from tests.dist.borders import COMPLETIONS, beside_a_border

pytestmark = pytest.mark.more("checks the comparison that other tests make")
BODY: dict[str, Any] = {
    "prompt": "What is 12 + 30?",
    "temperature": 1.5,
    "seed": 3,
    "max_tokens": 4,
}


def choice(*tokens: int) -> list[Any]:
    return [{"token_ids": list(tokens)}]


def test_only_tokens_beside_the_draw_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("")
    (generation,) = borders._generations(folder, COMPLETIONS, BODY)
    *_, near = borders.near(folder, generation, [])
    (drawn,) = near
    for one, other in (((drawn,), (drawn + 1,)), ((drawn,), (drawn, drawn)), ((5, 6), (7, 6))):
        assert not beside_a_border(folder, COMPLETIONS, BODY, choice(*one), choice(*other))
    monkeypatch.setattr(borders, "EDGE", 0.4)
    near = next(borders.near(folder, generation, []))
    assert len(near) > 1
    other = min(near - {drawn})
    assert beside_a_border(folder, COMPLETIONS, BODY, choice(drawn, 5), choice(other, 6))


def test_noise_moves_the_border(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("")
    (generation,) = borders._generations(folder, COMPLETIONS, BODY)
    monkeypatch.setattr(borders, "NOISE", 1.0)
    *_, near = borders.near(folder, generation, [])
    assert len(near) > 1
    one, other = sorted(near)[:2]
    assert beside_a_border(folder, COMPLETIONS, BODY, choice(one), choice(other))
    monkeypatch.setattr(borders, "NOISE", 1e-5)
    assert not beside_a_border(folder, COMPLETIONS, BODY, choice(one), choice(other))
