"""Test tokens of a unit at the front: any cut into messages has the effect of single tokens."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.config import Deployment, LimitsConfig
from hadal.core.messages.generation import Closing, Deliver, Token
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import (
    Cancel,
    Decode,
    KvLease,
    Prefill,
    PrefillDone,
    Pulled,
    Returned,
    Stop,
    UnitReport,
    UnitUp,
)
from hadal.core.plans import Draw
from hadal.core.seams import Send
from hadal.kv.blocks import blocks_for
from hadal.roles.front.front import Front
from tests.columns import Row, tokens_message
from tests.fresh import seeds
from tests.unit.roles.driving import finals, generation, of, sent

LEASE = KvLease("pool", (1,), (0,), 10)
PROMPTS = (10, 60, 61, 62, 63, 64, 125)
"""Prompt lengths: the output begins another block immediately, after a few tokens, or not at all."""
DEPLOYMENT = Deployment(limits=LimitsConfig(max_running=1000))
NOBODY = 1 << 61


def decoding(
    num: int, *, keeps_text: bool = True, is_pulled: bool = True, epoch: str = "f1"
) -> tuple[Front, list[int]]:
    """Return a front with `num` requests in decode, one token each, and their attempt ids."""
    front = Front(DEPLOYMENT, epoch=epoch, max_context=9000, keeps_text=keeps_text)
    front.handle(0.0, UnitUp("prefill-0", "prefill", "p1", 9000, 1000))
    front.handle(0.0, UnitUp("decode-0", "decode", "d1", 9000, 1000))
    attempt_ids = []
    for number in range(num):
        name = f"r{number}"
        asked = generation(name, PROMPTS[number % len(PROMPTS)], max_tokens=4000)
        front.handle(0.0, Submit(asked))
        (decode,) = sent(
            front.handle(0.1, PrefillDone("prefill-0", Token(name, 0, 0, 50), LEASE)), Decode
        )
        attempt_ids.append(decode.generation.attempt_id)
        if is_pulled and number % 3:
            front.handle(0.1, Pulled("decode-0", name, 0))
    return front, attempt_ids


Story = list[tuple[int, int, bool, bool]]
"""Rows of tokens: (request, the row's index less the index that is due, whether the request ends
there, whether log-probabilities are included). Request 0 is unknown to the front.
"""


def rows_of(story: Story, attempt_ids: Sequence[int]) -> tuple[list[Row], dict[int, Draw]]:
    rows: list[Row] = []
    draws = {}
    next_index = Counter(range(len(attempt_ids) + 1))
    for at, (request, shift, ends, is_asked) in enumerate(story):
        attempt_id = attempt_ids[request - 1] if request else NOBODY
        index = next_index[request] + shift
        next_index[request] += shift == 0
        rows.append((attempt_id, index, 100 + at, "stop" if ends else None))
        if is_asked:
            draws[at] = Draw(-float(at), ((at, -0.5),))
    return rows, draws


def outcome(story: Story, cuts: Sequence[int], num: int, *, keeps_text: bool) -> dict[str, Any]:
    """Return a front's state and effects after it received the rows in messages cut at `cuts`."""
    front, attempt_ids = decoding(num, keeps_text=keeps_text)
    rows, draws = rows_of(story, attempt_ids)
    effects = []
    for begin, end in itertools.pairwise([0, *cuts, len(rows)]):
        part = {at - begin: draw for at, draw in draws.items() if begin <= at < end}
        effects += front.handle(0.2, tokens_message("decode-0", rows[begin:end], part))
        assert front.check() == []
    for stop in sent(effects, Stop):
        assert len(set(stop.attempt_ids)) == len(stop.attempt_ids), "each is named once"
    texts: dict[str, list[Token]] = {}
    ends: dict[str, Deliver] = {}
    for deliver in of(effects, Deliver):
        assert deliver.request_id not in ends, "nothing comes behind the end"
        texts.setdefault(deliver.request_id, []).extend(deliver.tokens)
        if deliver.final:
            ends[deliver.request_id] = deliver
    for name, tokens in texts.items():
        first = tokens[0].index
        assert not keeps_text or [t.index for t in tokens] == [*range(first, first + len(tokens))]
        assert [token.finish for token in tokens[:-1]] == [None] * (len(tokens) - 1), name
    units = {name: asdict(unit) for name, unit in front.units.by_name.items()}
    for unit in units.values():
        del unit["tokens_step"]  # Tokens per step depend on the cuts.
        del unit["prefill_view"], unit["decode_view"]
    return {
        "texts": texts,
        "ends": {name: (end.error, end.error_status, end.closing) for name, end in ends.items()},
        "records": {name: asdict(record) for name, record in front.requests.by_id.items()},
        "totals": front.totals,
        "units": units,
        "running": len(front.requests.running),
        "sent": Counter(
            repr(send) for send in of(effects, Send) if not isinstance(send.message, Stop)
        ),
        "stopped": {attempt_id for stop in sent(effects, Stop) for attempt_id in stop.attempt_ids},
    }


def assert_cuts_do_not_matter(
    story: Story, cuts: Sequence[int], num: int, *, keeps_text: bool
) -> None:
    one_by_one = outcome(story, range(1, len(story)), num, keeps_text=keeps_text)
    cut = outcome(story, cuts, num, keeps_text=keeps_text)
    for part, value in one_by_one.items():
        assert cut[part] == value, part


SHIFTS = [0] * 12 + [-1, -2, 1, 2]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(SHIFTS),
            st.sampled_from([False] * 9 + [True]),
            st.booleans(),
        ),
        min_size=1,
        max_size=40,
    ),
    st.sets(st.integers(1, 39)),
    st.booleans(),
)
def test_any_cuts_of_any_rows_are_as_one_by_one(
    story: Story, cuts: set[int], keeps_text: bool
) -> None:
    """Rows may be repeated, leave out indices, or follow an end."""
    assert_cuts_do_not_matter(
        story, sorted(cut for cut in cuts if cut < len(story)), 4, keeps_text=keeps_text
    )


@pytest.mark.parametrize("seed", seeds(1, 2))
@pytest.mark.parametrize("keeps_text", [True, False])
def test_large_messages_are_as_one_by_one(seed: int, keeps_text: bool) -> None:
    """Test steps of one to four tokens a request, for many requests, some of them in any order."""
    rng = Random(seed)
    story: Story = []
    cuts = []
    for _ in range(rng.randrange(5, 30)):
        step = []
        for request in range(61):
            for _ in range(rng.randrange(5) if request else rng.random() < 0.1):
                shift = rng.choice(SHIFTS) if rng.random() < 0.01 else 0
                step.append((request, shift, rng.random() < 0.01, rng.random() < 0.2))
        if rng.random() < 0.5:
            rng.shuffle(step)
        story += step
        cuts.append(len(story))
    assert_cuts_do_not_matter(story, cuts[:-1], 60, keeps_text=keeps_text)


def test_several_tokens_are_one_delivery_with_all_that_was_asked_for() -> None:
    front, (a, b) = decoding(2)
    rows: list[Row] = [(b, 1, 71, None), (a, 1, 61, None), (b, 2, 72, None), (b, 3, 73, "length")]
    draws = {0: Draw(-0.1, ()), 2: Draw(-0.2, ((72, -0.2),)), 3: Draw(-0.3, ())}
    effects = front.handle(0.3, tokens_message("decode-0", rows, draws))
    assert of(effects, Deliver) == [
        Deliver("r0", (Token("r0", 0, 1, 61),)),
        Deliver(
            "r1",
            (
                Token("r1", 0, 1, 71, None, -0.1, ()),
                Token("r1", 0, 2, 72, None, -0.2, ((72, -0.2),)),
                Token("r1", 0, 3, 73, "length", -0.3, ()),
            ),
            True,
            closing=Closing("prefill-0", "decode-0", 0),
        ),
    ]
    assert (front.totals.tokens_out, front.totals.finished) == (6, 1)
    assert front.check() == []


def test_what_comes_behind_an_end_or_a_gap_is_nobody_s() -> None:
    """The request with a gap continues from the tokens before the gap, once."""
    front, (a, b) = decoding(2)
    rows: list[Row] = [
        (a, 1, 61, "stop"),
        (b, 1, 71, None),
        (b, 3, 73, None),
        (a, 2, 62, None),
        (b, 2, 72, None),
        (b, 4, 74, "stop"),
    ]
    effects = front.handle(0.3, tokens_message("decode-0", rows))
    assert [
        (deliver.request_id, [token.token for token in deliver.tokens], deliver.final)
        for deliver in of(effects, Deliver)
    ] == [("r1", [71], False), ("r0", [61], True)]
    assert sent(effects, Cancel) == [Cancel("r1", 0)]
    assert sent(effects, Stop) == [Stop((a, b))]
    (again,) = sent(effects, Prefill)
    assert (again.generation.output, again.generation.attempt) == ((50, 71), 1)
    assert (front.totals.tokens_out, front.totals.retries) == (4, 1)
    assert front.check() == []


def test_a_duplicate_in_the_middle_is_dropped() -> None:
    front, (a,) = decoding(1)
    rows: list[Row] = [(a, index, 60 + index, None) for index in (1, 2, 1, 2, 3, 0, 4)]
    (deliver,) = of(front.handle(0.3, tokens_message("decode-0", rows)), Deliver)
    assert [token.token for token in deliver.tokens] == [61, 62, 63, 64]
    assert front.check() == []


def test_a_message_grows_a_request_by_all_the_blocks_that_it_fills() -> None:
    front, (a, _, _, _, _, b) = decoding(6)
    rows: list[Row] = [(a, index, 7, None) for index in range(1, 200)]
    rows += [(b, index, 7, None) for index in range(1, 3)]  # 64 tokens and one: two blocks.
    before = front.units.by_name["decode-0"].num_blocks_used
    front.handle(0.3, tokens_message("decode-0", rows))
    grown = blocks_for(10 + 200 + 1) - 1
    assert front.units.by_name["decode-0"].num_blocks_used == before + grown
    assert front.check() == []


def test_what_a_full_unit_would_do_counts_all_tokens_of_a_step() -> None:
    """The fleet grows by tokens per second; with speculative drafts a step's time is not a token's."""
    front, attempt_ids = decoding(2)
    front.handle(0.2, UnitReport("decode-0", "d1", 9000, 0, 2, 1000, 0, step_ms=20.0))

    def most() -> float:
        (facts,) = [unit for unit in front.fleet.demand().units if unit.unit == "decode-0"]
        return facts.tokens_per_s_max

    assert most() == pytest.approx(50_000.0)
    for step in range(100):
        rows: list[Row] = [
            (one, 1 + 2 * step + more, 7, None) for one in attempt_ids for more in range(2)
        ]
        front.handle(0.3, tokens_message("decode-0", rows))
    assert most() == pytest.approx(100_000.0, rel=1e-3)


def test_without_text_only_ends_are_told_and_everything_is_counted() -> None:
    made, (a, b) = decoding(2, keeps_text=False)
    found = of(
        made.handle(0.3, tokens_message("decode-0", [(a, 1, 0, None), (b, 1, 0, None)])), Deliver
    )
    assert found == []
    effects = made.handle(0.4, tokens_message("decode-0", [(b, 2, 7, "length"), (a, 2, 0, None)]))
    assert finals(effects) == [("r1", None)]
    assert made.totals.tokens_out == 6
    assert made.check() == []


def test_without_text_a_lost_request_goes_on_as_long_as_it_was() -> None:
    made, (a,) = decoding(1, keeps_text=False)
    made.handle(0.3, tokens_message("decode-0", [(a, 1, 0, None)]))
    (again,) = sent(made.handle(0.4, Returned("decode-0", "r0", 0, "preempted")), Prefill)
    assert (len(again.generation.output), again.generation.attempt) == (2, 1)
    effects = made.handle(0.5, tokens_message("decode-0", [(a, 2, 0, "stop")]))
    assert of(effects, Deliver) == [], "of the attempt before"
    assert made.check() == []


def test_tokens_under_another_front_s_attempt_ids_are_nobody_s() -> None:
    """A unit may have attempts of a dead front beside those of its successor."""
    made, mine = decoding(2, epoch="f1")
    _, others = decoding(2, epoch="f2")
    assert not set(mine) & set(others)
    assert max(*mine, *others) < 1 << 62
    effects = made.handle(
        0.3, tokens_message("decode-0", [(attempt_id, 1, 61, None) for attempt_id in others])
    )
    # No text is delivered, and the unit may free what it holds for these attempts.
    assert effects == [Send("decode-0", Stop(tuple(others)))]
    assert made.totals.tokens_out == 2
    assert made.check() == []


def test_tokens_that_nobody_waits_for_are_stopped_where_they_come_from() -> None:
    made, (known,) = decoding(1)
    for stranger in (known + (1 << 30), known + 1, 1 << 62):
        late = tokens_message("decode-0", [(stranger, 1, 61, None)])
        assert of(made.handle(0.3, late), Send) == [Send("decode-0", Stop((stranger,)))]
        found = of(made.handle(0.3, tokens_message("decode-0", [(stranger, 1, 61, "stop")])), Send)
        assert found == []
    (stop,) = sent(made.handle(0.3, tokens_message("decode-1", [(known, 1, 61, None)])), Stop)
    assert stop.attempt_ids == (known,), "another unit's"
    assert made.check() == []


def test_tokens_before_the_word_that_kv_was_pulled_say_it() -> None:
    made, (a,) = decoding(1, is_pulled=False)
    effects = made.handle(0.3, tokens_message("decode-0", [(a, 1, 61, None)]))
    assert [token.token for deliver in of(effects, Deliver) for token in deliver.tokens] == [61]
    assert made.check() == []
