"""A sampler with grammars in its slots: what it draws, when masks are computed, which slots fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hadal.core.plans import NO_TOKEN, Grammar, Sampling
from hadal.model.sampler import Sampler
from hadal.tokens.grammars import Grammars, TextRows, grammar_text
from hadal.tokens.table import TokenTable

END, V = 257, 300
TABLE = TokenTable(
    [*(bytes([byte]) for byte in range(256)), b"<x>", b"<end>"],
    {"<x>": 256, "<end>": END},
    frozenset({256, END}),
    frozenset({"<x>", "<end>"}),
    frozenset({256, END}),
)
LISTS = Grammar(
    grammar_text({"type": "array", "items": {"enum": [1, 23]}}, follows_reasoning=False), (END,)
)


def sampler_of(num_slots: int) -> Sampler:
    return Sampler(num_slots, V, grammars=Grammars(lambda: TABLE, V))


def draw(
    sampler: Sampler, slots: list[int], fed: list[list[int]], seed: int, *, begins: bool = True
) -> tuple[list[list[int]], dict[int, str]]:
    """Return (drawn tokens of each slot, failed slot -> reason). `fed`: input tokens of each slot's rows."""
    slots_B, num_B = np.array(slots), np.array([len(of_slot) for of_slot in fed])
    fed_R = np.array([token for of_slot in fed for token in of_slot])
    logits_RV = torch.randn(len(fed_R), V, generator=torch.Generator().manual_seed(seed))
    if begins:
        sampler.begin(slots_B, num_B, fed_R)
    drawn = sampler.draw(logits_RV, slots_B, num_B, fed_R, sampler.wait(slots_B, num_B, fed_R))
    parts = np.split(drawn.tokens, drawn.num_B.cumsum()[:-1])
    return [part.tolist() for part in parts], drawn.failed


@pytest.mark.promise(
    "If the answer without a schema would satisfy it, the constrained answer has the same tokens."
)
def test_slots_with_a_grammar_and_without_stand_side_by_side() -> None:
    """Mix slots: those without a grammar draw what they draw alone, the others what theirs allows."""
    both, alone = sampler_of(4), Sampler(4, V)
    for slot in range(4):
        grammar = LISTS if slot % 2 else None
        both.join(slot, Sampling(temperature=1.5, seed=slot, grammar=grammar), 0)
        alone.join(slot, Sampling(temperature=1.5, seed=slot), 0)
    texts: dict[int, list[int]] = {slot: [] for slot in range(4)}
    for step in range(30):
        order = np.random.default_rng(step).permutation(4).tolist()
        parts, failed = draw(both, order, [[0]] * 4, step, begins=step % 2 == 0)
        free, _ = draw(alone, order, [[0]] * 4, step)
        assert failed == {}
        for slot, part, of_free in zip(order, parts, free, strict=True):
            texts[slot] += part
            assert slot % 2 or part == of_free
    for slot in (1, 3):
        ended = [*texts[slot], END]
        text = bytes(ended[: ended.index(END)])
        assert text.startswith((b"[", b" ", b"\n", b"\r", b"\t"))
        assert set(text) <= set(b"[]123, \n\r\t")


def test_what_was_begun_and_not_drawn_leaves_no_trace() -> None:
    """Fail a step after its masks were begun: the slots continue, or join again."""
    one, other = sampler_of(1), sampler_of(1)
    for sampler in (one, other):
        sampler.join(0, Sampling(temperature=1.0, grammar=LISTS), 0)
    texts: list[list[int]] = [[], []]
    for step in range(20):
        rows = np.array([0]), np.array([3]), np.array([0, ord("["), ord("1")])
        one.begin(*rows)
        if step == 10:
            one.join(0, Sampling(temperature=1.0, grammar=LISTS), step, output=texts[0])
        for text, sampler in zip(texts, (one, other), strict=True):
            ((token,),), _ = draw(sampler, [0], [[0]], step)
            text.append(token)
    assert texts[0] == texts[1]


def test_nothing_is_drawn_without_a_mask_that_was_begun_and_dropped() -> None:
    sampler, rows = sampler_of(1), (np.array([0]), np.array([1]), np.array([0]))
    sampler.join(0, Sampling(grammar=LISTS), 0)
    sampler.begin(*rows)
    sampler.join(0, Sampling(grammar=LISTS), 0)
    assert sampler.wait(*rows) is not None


def test_a_text_that_cannot_be_followed_fails_with_a_reason_and_alone() -> None:
    sampler = sampler_of(2)
    sampler.join(0, Sampling(grammar=LISTS), 1, output=[ord("x")])
    sampler.join(1, Sampling(grammar=LISTS), 0)
    _, failed = draw(sampler, [0, 1], [[0], [0]], 0)
    assert failed.keys() == {0}
    assert failed[0].startswith(f"{NO_TOKEN}: its text can no longer follow its format")
    sampler.leave(0)
    sampler.leave(1)
    assert not sampler.has_grammars


def test_a_sampler_without_grammars_takes_none() -> None:
    with pytest.raises(ValueError, match="has no grammars"):
        Sampler(1, V).join(0, Sampling(grammar=LISTS), 0)


def test_there_are_no_masks_before_a_constrained_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots with tools draw freely until a call begins: nothing is computed, masked or copied."""
    sampler, plain = sampler_of(2), Grammars.allow
    text = LISTS.text.replace("start: ", "start: <[256]> ")
    calls = Grammar(text, (END,), opens=(256,))
    rows, num_asked = (np.array([0, 1]), np.array([1, 2])), list[int]()

    def allow(grammars: Grammars, all_rows: Sequence[TextRows], *given: Any) -> None:
        num_asked.append(len(all_rows))
        plain(grammars, all_rows, *given)

    monkeypatch.setattr(Grammars, "allow", allow)
    for slot in range(2):
        sampler.join(slot, Sampling(temperature=0, grammar=calls), 0)
    assert sampler.wait(*rows, np.array([0, 0, 65])) is None
    assert num_asked == []
    masks = sampler.wait(*rows, np.array([0, 0, 256]))
    assert masks is not None
    assert masks.of_R.tolist() == [-1, -1, 1]
    drawn = sampler.draw(torch.eye(V)[[65, 256, 65]], *rows, np.array([0, 0, 65]))
    assert drawn.tokens.tolist() == [65, 256]
    masks = sampler.wait(*rows, np.array([65, 256, 65]))
    assert masks is not None
    assert masks.of_R.tolist() == [-1, 0, 1]
    assert num_asked == [1, 1]
