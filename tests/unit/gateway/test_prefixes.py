"""The nearest kept prompt, compared with a search of all prompts."""

from __future__ import annotations

from itertools import takewhile
from random import Random

import pytest

from hadal.gateway.desk.prefixes import (
    KeptPrompt,
    PrefixIndex,
    num_common_tokens,
    packed,
    unpacked,
)


def kept(ids: tuple[int, ...], salt: bytes = b"s", at_s: float = 0.0) -> KeptPrompt:
    return KeptPrompt(packed(ids), b"key", salt, "f0", at_s)


def num_equal(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def test_tokens_are_packed_in_their_order() -> None:
    rng = Random(1)
    prompts = [
        tuple(rng.choices((0, 1, 255, 256, 129_279), k=rng.randrange(6))) for _ in range(200)
    ]
    assert sorted(prompts) == sorted(prompts, key=packed)
    assert all(unpacked(packed(ids)) == list(ids) for ids in prompts)


@pytest.mark.parametrize("num_tokens", [1, 5, 63, 64, 1000, 5000])
def test_the_first_difference_is_found_at_every_place(num_tokens: int) -> None:
    ids = tuple(range(num_tokens))
    for at in {0, 1, num_tokens // 2, num_tokens - 1} & set(range(num_tokens)):
        other = (*ids[:at], 77_777, *ids[at + 1 :])
        assert num_common_tokens(packed(ids), packed(other)) == at
    assert num_common_tokens(packed(ids), packed((*ids, 3))) == num_tokens


@pytest.mark.parametrize("seed", range(30))
def test_the_nearest_prompt_is_the_one_that_a_search_of_all_finds(seed: int) -> None:
    rng = Random(seed)
    index = PrefixIndex()
    prompts: dict[bytes, list[tuple[int, ...]]] = {b"one": [], b"two": []}
    present: list[KeptPrompt] = []
    for _ in range(120):
        salt = rng.choice([*prompts])
        ids = tuple(rng.choices(range(3), k=rng.randrange(1, 12)))
        nearest, num_common = index.nearest(salt, packed(ids))
        assert num_common == max((num_equal(ids, other) for other in prompts[salt]), default=0)
        assert (nearest is None) == (not prompts[salt])
        if nearest is not None:
            assert nearest.salt == salt
            assert num_equal(ids, tuple(unpacked(nearest.ids))) == num_common
        prompt = kept(ids, salt)
        stored, replaced = index.add(prompt)
        covers = [each for each in present if each.salt == salt and each.ids != prompt.ids]
        is_covered = any(each.ids.startswith(prompt.ids) for each in covers)
        assert (stored is not prompt) == is_covered, "the beginning of a kept prompt adds nothing"
        assert stored.salt == salt
        assert stored.ids.startswith(prompt.ids)
        if replaced is not None:
            present.remove(replaced)
            prompts[salt].remove(tuple(unpacked(replaced.ids)))
        if not is_covered:
            present.append(prompt)
            prompts[salt].append(ids)
        if present and rng.random() < 0.3:
            gone = present.pop(rng.randrange(len(present)))
            index.remove(gone)
            prompts[gone.salt].remove(tuple(unpacked(gone.ids)))
        assert len(index) == len(present)


def test_a_conversation_takes_the_memory_of_its_last_turn() -> None:
    index = PrefixIndex()
    first, second = kept((1, 2)), kept((1, 2, 3))
    assert index.add(first) == (first, None)
    assert index.add(second) == (second, first)
    assert index.add(first) == (second, None)
    again = kept((1, 2, 3))
    assert index.add(again) == (again, second), "its weights may be others"
    assert len(index) == 1
