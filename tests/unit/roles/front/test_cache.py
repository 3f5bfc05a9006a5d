"""Test the front's summary of the units' caches: by hand, at random, and in a front."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from hadal.core.cache import split
from hadal.core.config import Deployment
from hadal.core.messages.fleet import DrainUnit
from hadal.core.messages.generation import Deliver, PrefixSources, Token
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import (
    Cached,
    Decode,
    Filled,
    KvLease,
    Prefill,
    PrefillDone,
    Pulled,
    Returned,
    UnitDown,
    UnitUp,
)
from hadal.core.seams import Send
from hadal.kv.names import extend, root_of
from hadal.roles.front.cache import FrontCache
from hadal.roles.front.front import Front
from tests.columns import tokens_message
from tests.fresh import fresh
from tests.unit.roles.driving import generation, of, sent

CHAIN = extend(root_of(b"f0"), b"", range(64 * 8), b"salt")
OTHER = extend(root_of(b"f0"), b"", range(64 * 8), b"another salt")


def part(first: int, last: int, chain: bytes = CHAIN) -> bytes:
    return chain[16 * first : 16 * last]


def cache() -> FrontCache:
    made = FrontCache()
    made.up("p0", "e0", 8)
    made.up("p1", "e1", 8)
    return made


def tokens(made: FrontCache, chain: bytes = CHAIN) -> tuple[int, int]:
    """Return the tokens of the chain's prefix that p0 and p1 have cached."""
    found = made.prefixes(chain, ("p0", "p1", "nobody"))
    assert "nobody" not in found
    return found.get("p0", 0), found.get("p1", 0)


def test_the_longest_prefix_of_each_unit() -> None:
    made = cache()
    assert tokens(made) == (0, 0)
    made.update(Cached("p0", "e0", part(0, 2) + part(3, 8), b""), 8)
    made.update(Cached("p1", "e1", part(1, 8), b""), 8)
    assert tokens(made) == (2 * 64, 0), "up to the first that is not there"
    made.update(Cached("p1", "e1", part(0, 1), b""), 8)
    made.update(Cached("p0", "e0", part(2, 3), b""), 8)
    assert tokens(made) == (8 * 64, 8 * 64)
    made.update(Cached("p1", "e1", b"", part(5, 6)), 8)
    assert tokens(made) == (8 * 64, 5 * 64)
    assert tokens(made, part(0, 3)) == (3 * 64, 3 * 64)
    assert tokens(made, b"") == tokens(made, OTHER) == (0, 0)


def test_whole_replaces_and_other_lives_are_not_heard() -> None:
    made = cache()
    made.update(Cached("p0", "e0", part(0, 4), b""), 8)
    made.update(Cached("p0", "e0", part(0, 1), b"", is_whole=True), 8)
    assert (tokens(made)[0], made.num_names("p0")) == (64, 1)
    for unit, epoch in (("p0", "e9"), ("p1", "e0"), ("p2", "e0")):
        made.update(Cached(unit, epoch, CHAIN, b"", is_whole=True), 8)
    assert tokens(made) == (64, 0)
    made.up("p0", "e2", 8)
    assert tokens(made) == (0, 0), "a new life has nothing until it says so"
    made.update(Cached("p0", "e0", CHAIN, b""), 8)
    assert tokens(made) == (0, 0)
    made.down("p1")
    made.down("p1")
    made.update(Cached("p1", "e1", CHAIN, b""), 8)
    assert (tokens(made), made.num_names("p1")) == ((0, 0), 0)


def test_a_unit_never_has_more_than_its_pools_hold() -> None:
    made = cache()
    made.update(Cached("p0", "e0", CHAIN, b""), 8)
    made.update(Cached("p0", "e0", part(0, 3, OTHER), b""), 8)
    assert made.num_names("p0") == 8
    assert tokens(made, OTHER)[0] == 3 * 64, "what was told last is kept"
    assert tokens(made)[0] == 0
    made.update(Cached("p0", "e0", part(0, 3), b""), 11)  # Ranks came back: capacity grew.
    assert (made.num_names("p0"), tokens(made)[0]) == (11, 8 * 64)


def test_check_sees_units_that_are_not_up_and_too_many_names() -> None:
    made = cache()
    assert made.check({"p0": "e0", "p1": "e1"}) == []
    assert made.check({"p0": "e0"})
    assert made.check({"p0": "e0", "p1": "e9"})
    made.update(Cached("p0", "e0", CHAIN, b""), 8)
    made._units["p0"].num_blocks = 7
    assert made.check({"p0": "e0", "p1": "e1"})


@pytest.mark.parametrize("seed", [1, 2, fresh().getrandbits(32)])
def test_lost_doubled_and_late_messages_cost_nothing_but_a_guess(seed: int) -> None:
    """The summary equals the unit's cache after each complete report, and never has more names than the
    unit has blocks, even on a faulty wire.
    """
    random_of = random.Random(seed)
    names = list(split(CHAIN + OTHER))
    made, limit, life = FrontCache(), 10, 0
    there: set[bytes] = set()
    late: list[Cached] = []
    made.up("p0", "life 0", limit)
    num_equal = 0
    for _ in range(2000):
        if random_of.random() < 0.01:
            life, there = life + 1, set()
            made.up("p0", f"life {life}", limit)
        dropped = {name for name in there if random_of.random() < 0.2}
        there -= dropped
        added = set(random_of.sample(names, random_of.randint(0, limit - len(there)))) - there
        there |= added
        message = Cached("p0", f"life {life}", b"".join(sorted(added)), b"".join(sorted(dropped)))
        fate = random_of.random()
        if fate < 0.1:
            late.append(message)
        elif fate > 0.2:  # Between 0.1 and 0.2 the message is lost.
            made.update(message, limit)
        if fate > 0.8:
            made.update(message, limit)
        if late and random_of.random() < 0.1:
            made.update(late.pop(random_of.randrange(len(late))), limit)
        if random_of.random() < 0.1:
            made.update(Cached("p0", f"life {life}", b"".join(there), b"", is_whole=True), limit)
            has = {name for name in names if made.prefixes(name, ("p0",))}
            assert has == there, f"seed {seed}"
            num_equal += 1
        assert made.check({"p0": f"life {life}"}) == [], f"seed {seed}"
    assert num_equal > 100


def test_a_name_takes_little_memory() -> None:
    """A prefill unit of DeepSeek-V3 has about 100,000 blocks; the front holds several units'."""
    made, num_names = FrontCache(), 50_000
    made.up("p0", "e", num_names)
    names = random.Random(1).randbytes(16 * num_names)
    tracemalloc.start()
    try:
        for first in range(0, num_names, 100):
            made.update(Cached("p0", "e", part(first, first + 100, names), b""), num_names)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made.num_names("p0") == num_names
    assert held_bytes / num_names < 150


# ---- a front that routes by the summary ----
def front() -> Front:
    made = Front(Deployment(), epoch="f1", max_context=10_000, fingerprint="f0")
    for name in ("prefill-0", "prefill-1", "decode-0"):
        made.handle(0.0, UnitUp(name, name.split("-")[0], f"{name} e", 100, 8))
    return made


def submit(
    made: Front, name: str, num_prompt: int = 200, salt: bytes = b"s"
) -> tuple[str, Prefill]:
    """Return the prefill unit that got the request, and the message sent to it."""
    effects = made.handle(
        0.0, Submit(msgspec.structs.replace(generation(name, num_prompt, max_tokens=99), salt=salt))
    )
    (send,) = [effect for effect in of(effects, Send) if isinstance(effect.message, Prefill)]
    assert isinstance(send.message, Prefill)
    return send.to, send.message


def done(
    unit: str,
    name: str,
    *,
    attempt: int = 0,
    index: int = 0,
    finish: str | None = None,
    **more: int,
) -> PrefillDone:
    lease = None if finish else KvLease("pool", (1,), (0,), 10)
    return PrefillDone(unit, Token(name, attempt, index, 50, finish), lease, **more)


def test_a_prompt_goes_where_its_prefix_is_and_counts_as_less_work_there() -> None:
    made = front()
    to, first = submit(made, "a")
    assert to == "prefill-0"
    assert len(first.generation.chain) == 3 * 16
    made.handle(0.0, done(to, "a", finish="length"))
    assert made.handle(0.0, Cached("prefill-1", "prefill-1 e", first.generation.chain, b"")) == []
    to, _ = submit(made, "b")
    assert to == "prefill-1"
    unit = made.units.by_name["prefill-1"]
    assert (made.requests.by_id["b"].num_cached, unit.num_tokens) == (192, 8)
    assert submit(made, "c", salt=b"of another tenant")[0] == "prefill-0", "nothing of it is his"
    assert made.check() == []
    made.handle(0.1, done("prefill-1", "b"))
    assert (unit.num_tokens, unit.num_pairs) == (0, 0)
    made.handle(0.2, UnitDown("prefill-1", "killed"))
    assert made.units.cache.num_names("prefill-1") == 0
    assert made.check() == []


def test_a_retry_goes_on_with_the_chain_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    made = front()
    to, first = submit(made, "a", 127)
    assert len(first.generation.chain) == 16
    (decode,) = sent(made.handle(0.1, done(to, "a")), Decode)
    whole = extend(root_of(b"f0"), b"", decode.generation.prompt + decode.generation.output, b"s")
    assert decode.generation.chain == whole
    assert len(whole) == 2 * 16
    made.handle(0.2, Pulled("decode-0", "a", 0))
    for index in range(1, 66):
        made.handle(
            0.3,
            tokens_message("decode-0", [(decode.generation.attempt_id, index, 60 + index, None)]),
        )
    given: list[bytes] = []

    def noted(root: bytes, chain: bytes, *rest: Any) -> bytes:
        given.append(chain)
        return extend(root, chain, *rest)

    monkeypatch.setattr("hadal.roles.front.names.extend", noted)
    (again,) = sent(made.handle(0.4, Returned("decode-0", "a", 0, "preempted")), Prefill)
    text = again.generation.prompt + again.generation.output
    assert again.generation.chain == extend(root_of(b"f0"), b"", text, b"s")
    assert len(again.generation.chain) == 3 * 16
    assert given == [whole], "named once, from where the names ended"


def test_hits_are_what_the_first_token_s_unit_says() -> None:
    made = front()
    to, _ = submit(made, "a")
    effects = made.handle(0.1, done(to, "a", num_cached=128))
    assert [(d.num_cached, d.final) for d in of(effects, Deliver)] == [(128, False)]
    assert (made.totals.tokens_hit, made.totals.tokens_miss) == (128, 72)
    (again,) = sent(made.handle(0.2, Returned("decode-0", "a", 0, "preempted")), Prefill)
    assert again.generation.output == (50,)
    unit = made.requests.by_id["a"].prefill_unit or ""
    effects = made.handle(0.3, done(unit, "a", attempt=1, index=1, num_cached=192))
    assert [d.num_cached for d in of(effects, Deliver)] == [0], "a retry is nobody's news"
    assert (made.totals.tokens_hit, made.totals.tokens_miss) == (128, 72)


def test_the_first_token_says_where_more_of_the_prompt_is() -> None:
    made = front()
    to, first = submit(made, "a")
    effects = made.handle(0.1, done(to, "a", num_cached=128, num_recomputed=64))
    assert [each.sources for each in of(effects, Deliver)] == [PrefixSources(num_recomputed=64)]
    to, _ = submit(made, "b")
    assert [each.sources for each in of(made.handle(0.1, done(to, "b")), Deliver)] == [None]
    # The unit with two blocks of the prompt has much work.
    made.handle(0.2, Cached("prefill-0", "prefill-0 e", first.generation.chain[:32], b""))
    assert submit(made, "long", 1500, salt=b"x")[0] == "prefill-0"
    assert submit(made, "c")[0] == "prefill-1"
    (deliver,) = of(made.handle(0.3, done("prefill-1", "c", finish="stop")), Deliver)
    assert deliver.sources == PrefixSources(num_elsewhere=128)


def test_hits_of_one_token_and_never_more_than_the_prompt() -> None:
    made = front()
    to, _ = submit(made, "a", 70)
    (deliver,) = of(made.handle(0.1, done(to, "a", finish="stop", num_cached=999)), Deliver)
    assert (deliver.final, deliver.num_cached) == (True, 70)
    assert (made.totals.tokens_hit, made.totals.tokens_miss) == (70, 0)
    # An attempt lost before its first token reported no counts: the next attempt's are reported.
    to, _ = submit(made, "b", 70)
    effects = made.handle(0.2, Returned(to, "b", 0, "rank lost"))
    (send,) = [effect for effect in of(effects, Send) if isinstance(effect.message, Prefill)]
    (deliver,) = of(made.handle(0.3, done(send.to, "b", attempt=1, num_cached=64)), Deliver)
    assert deliver.num_cached == 64
    assert made.check() == []


# ---- blocks that decode filled ----
def filled(num_before: int = 3, num_new: int = 2, unit: str = "decode-0") -> Filled:
    lease = KvLease("pool", tuple(range(1, 1 + num_new)), (0,) * num_new, 64 * num_new)
    return Filled(unit, "a", 0, part(0, num_before + num_new), lease)


def takers(made: Front, message: Filled) -> list[str]:
    """Return the units that the message was passed on to, unchanged."""
    sends = of(made.handle(0.0, message), Send)
    assert [send.message for send in sends] == [message] * len(sends)
    return [send.to for send in sends]


def test_what_decode_filled_goes_where_most_of_its_text_is() -> None:
    made = front()
    assert takers(made, filled(0, 2)) == ["prefill-0"], "a prompt of no block is anywhere"
    assert takers(made, filled()) == []
    made.handle(0.0, Cached("prefill-0", "prefill-0 e", part(0, 2), b""))
    assert takers(made, filled()) == [], "one block before is missing"
    made.handle(0.0, Cached("prefill-1", "prefill-1 e", part(0, 3), b""))
    assert takers(made, filled()) == ["prefill-1"]
    made.handle(0.0, Cached("prefill-0", "prefill-0 e", part(2, 4), b""))
    assert takers(made, filled()) == ["prefill-0"]
    made.handle(0.0, Cached("prefill-1", "prefill-1 e", part(3, 5), b""))
    assert takers(made, filled()) == [], "all of it is there"
    assert made.check() == []


@pytest.mark.parametrize("why", ["dead", "drained", "other weights", "decode is dead"])
def test_what_decode_filled_goes_to_no_unit_that_cannot_use_it(why: str) -> None:
    made = front()
    made.handle(0.0, Cached("prefill-1", "prefill-1 e", part(0, 3), b""))
    match why:
        case "dead":
            made.handle(0.0, UnitDown("prefill-1", "killed"))
        case "drained":
            made.handle(0.0, DrainUnit("prefill-1", 9.0, 1))
        case "other weights":
            up = UnitUp("decode-0", "decode", "e2", 100, 8, fingerprint="f1")
            made.handle(0.0, up)
        case _:
            made.handle(0.0, UnitDown("decode-0", "killed"))
    assert takers(made, filled()) == []
