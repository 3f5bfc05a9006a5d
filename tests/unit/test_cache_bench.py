"""The cache replay: its books on traces one can count by hand, the bound above ours, ours above LRU
at tight budgets.

The measured traces are replayed where they are: a slice of each, or all of them with HADAL_LEVEL=all.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.cache_index import fill
from bench.cache_policies import POLICIES, share_of
from bench.cache_replay import QUICK_PROMPTS, SHARES, Outcome, best, disk, infinite, memory
from bench.cache_traces import NAMES_ID, Prompt, Trace, chats, continued_tokens, find
from bench.shared_data import MOONCAKE
from hadal.core.cache import NAME_BYTES, num_names
from hadal.core.messages import BLOCK_TOKENS
from hadal.policy.eviction import Arc, Lru
from tests.levels import FULL
from tests.needs import shared_data

Replay = Callable[..., Outcome]
CHATS = chats(0, num_chats=900)


def of(*prompts: tuple[tuple[int, ...], int]) -> Trace:
    """Prompts of these parts and lengths."""
    return Trace(
        "by hand",
        tuple(Prompt(float(at), length, 100, ids) for at, (ids, length) in enumerate(prompts)),
    )


def test_a_part_has_a_name_for_each_full_block() -> None:
    prompt = Prompt(0.0, 512 + 3 * 64 + 1, 0, (7, 9))
    assert prompt.numbers == [
        *range(7 * NAMES_ID, 8 * NAMES_ID),
        *range(9 * NAMES_ID, 9 * NAMES_ID + 3),
    ]
    assert num_names(prompt.chain) == prompt.num_full == 11
    assert prompt.chain[-NAME_BYTES:] == prompt.numbers[-1].to_bytes(NAME_BYTES, "big")


def test_hits_by_hand() -> None:
    trace = of(((1, 2), 1024), ((1, 2), 1024), ((1, 3, 4), 1300), ((9, 2), 1024))
    # The last position is computed, so the second prompt has to compute its last block; the fourth
    # has another root.
    assert infinite(trace) == [0, 15 * BLOCK_TOKENS, 512, 0]
    assert (
        memory(trace, 1000).num_hit_tokens
        == disk(trace, 1000).num_hit_tokens
        == sum(infinite(trace))
    )
    assert best(trace, 1000) == sum(infinite(trace)) / trace.num_tokens


def test_what_may_go_on_from_an_answer() -> None:
    trace = of(((1, 2), 700), ((1, 3, 4), 1200), ((1, 3), 790))
    # The second holds the first's full part and is longer than it and its answer of 100; the third
    # is too short.
    assert list(continued_tokens(trace.prompts)) == [0, 768, 0]


@pytest.mark.parametrize("replay", [memory, disk])
def test_a_cache_with_room_for_all_finds_all_there_is(replay: Replay) -> None:
    outcome = replay(CHATS, CHATS.num_blocks())
    assert outcome.num_hit_tokens == sum(infinite(CHATS))


@pytest.mark.parametrize("replay", [memory, disk])
@pytest.mark.parametrize("share", SHARES)
def test_ours_beats_lru_on_chats_when_room_is_tight(replay: Replay, share: float) -> None:
    num_blocks = int(share * CHATS.num_blocks())
    ours, lru = replay(CHATS, num_blocks, Arc).share, replay(CHATS, num_blocks, Lru).share
    assert lru < ours <= best(CHATS, num_blocks) <= sum(infinite(CHATS)) / CHATS.num_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_finds_what_is_there_and_no_more_than_can_be(policy: str) -> None:
    trace = CHATS.in_parts()
    num_blocks, most = trace.num_blocks(), sum(infinite(trace)) / trace.num_tokens
    assert share_of(trace, num_blocks, policy) == most
    assert 0 < share_of(trace, num_blocks // 20, policy) <= best(trace, num_blocks // 20) < most


def test_policies_differ_in_what_survives_prompts_that_come_once() -> None:
    text, others = ((1, 2), 1025), [((number, number + 1), 1025) for number in range(10, 50, 2)]

    def found(num_uses: int) -> set[str]:
        """Who has a text still that came so often before the others."""
        trace = of(*[text] * num_uses, *others, text).in_parts()
        before = (num_uses - 1) * 1024 / trace.num_tokens
        return {policy for policy in POLICIES if share_of(trace, 12, policy) > before + 1e-9}

    assert found(1) == set()
    assert found(2) == {"ARC", "LFU", "S3-FIFO 1", "SLRU"}
    assert found(3) == {"ARC", "LFU", "S3-FIFO 1", "S3-FIFO 2", "SLRU"}


@pytest.mark.more("seconds of replays; ours is ahead of LRU on drawn chats as well")
def test_the_measured_traces() -> None:
    """Within a point of a cache that forgets nothing if there is room, ahead of LRU at 10 % and 3 %
    if there is not.
    """
    shared_data(MOONCAKE)
    for whole in find():
        trace = whole if FULL else Trace(whole.name, whole.prompts[: QUICK_PROMPTS // 3])
        if FULL:
            most = sum(infinite(trace)) / trace.num_tokens
            assert memory(trace, trace.num_blocks()).share > most - 0.01
            assert disk(trace, trace.num_blocks()).share > most - 0.01
        for share in SHARES if FULL else SHARES[1:]:
            num_blocks = int(share * trace.num_blocks())
            ours, lru = memory(trace, num_blocks, Arc).share, memory(trace, num_blocks, Lru).share
            assert ours > lru, (trace.name, share, ours, lru)


@pytest.mark.parametrize("name", ["kv/disk_index", "kv/disk_slots", "kv/blocks"])
def test_a_ledger_is_filled_and_emptied(name: str) -> None:
    figures = fill(name, 2000)
    assert figures.num_blocks == 2000
    assert min(figures.insert_us, figures.lookup_us, figures.evict_us) > 0
