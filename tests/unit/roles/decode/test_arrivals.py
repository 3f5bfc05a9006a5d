"""Test by hand how KV arrives at a decode unit: pulls, releases, and ends during a request's copy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hadal.core.messages.pools import Pull
from hadal.core.messages.units import Cancel, Decode, FrontUp, Pulled, Returned, UnitUp
from hadal.core.plans import KvPulled
from hadal.core.seams import RankReset
from hadal.roles.decode.leader import DecodeLeader
from tests.unit.roles.driving import decode, decode_leader, decode_plans, of, sent


def leader(num_blocks: int = 20, num_ranks: int = 1, **options: Any) -> DecodeLeader:
    fields = {"num_slots": 3, "num_waiting_max": 3, "heartbeat_s": 100.0}
    unit = decode_leader(num_blocks, num_ranks, **fields | options)
    unit.start(0.0)
    return unit


def pulled(unit: DecodeLeader, name: str = "a") -> list[Any]:
    return unit.handle(1.0, KvPulled(name, 0, None))


def test_kv_of_other_weights_is_not_pulled() -> None:
    unit = leader(fingerprint="f")
    assert [up.fingerprint for up in sent(unit.handle(0.0, FrontUp("f1")), UnitUp)] == ["f", "f"]

    def under(fingerprint: str, message: Decode) -> Decode:
        generation = msgspec.structs.replace(message.generation, fingerprint=fingerprint)
        return Decode(generation, message.lease)

    effects = unit.handle(0.0, under("g", decode()))
    assert sent(effects, Returned) == [Returned("decode-0", "a", 0, "other weights")]
    assert of(effects, Pull) == []
    assert len(of(unit.handle(0.0, under("f", decode())), Pull)) == 1


def test_all_of_a_prompt_is_pulled_at_once_and_its_request_joins() -> None:
    unit = leader()
    message = decode(prompt=300)
    (pull,) = of(unit.handle(0.0, message), Pull)
    assert (pull.lease, pull.into) == (message.lease, unit.table.blocks_of(0))
    assert of(unit.handle(0.1, message), Pull) == []  # A repeated message starts no second pull.
    effects = pulled(unit)
    assert sent(effects, Pulled) == [Pulled("decode-0", "a", 0)]
    (join,) = decode_plans(effects)[0].joins
    assert (join.num_tokens, join.output_index, join.is_pulled) == (300, 1, True)
    assert join.block_ids == unit.table.blocks_of(0)


def test_room_is_taken_for_the_whole_prompt_and_its_first_step() -> None:
    unit = leader()
    (pull,) = of(unit.handle(0.0, decode(prompt=320)), Pull)
    assert (len(pull.into), unit.blocks.num_used, unit.num_requests) == (5, 6, 1)
    assert unit.audit() == []


@pytest.mark.parametrize("event", [Cancel("a", 0), FrontUp("new")])
def test_what_ends_a_request_frees_its_blocks_when_the_copy_has_ended(
    event: Cancel | FrontUp,
) -> None:
    unit = leader()
    unit.handle(0.0, decode(prompt=300))
    unit.handle(0.1, event)
    assert (unit.num_requests, unit.blocks.num_used) == (1, 5)
    effects = pulled(unit)
    assert of(effects, Pull) == []
    assert [*sent(effects, Returned), *sent(effects, Pulled)] == []
    assert (unit.num_requests, unit.blocks.num_used) == (0, 0)


def test_a_queued_request_gets_the_slot_when_the_copy_into_it_has_ended() -> None:
    unit = leader(num_slots=1)
    unit.handle(0.0, decode("a"))
    assert of(unit.handle(0.1, decode("b")), Pull) == []
    assert of(unit.handle(0.1, Cancel("a", 0)), Pull) == []
    assert [pull.request_id for pull in of(pulled(unit, "a"), Pull)] == ["b"]


def test_a_lost_rank_gives_its_arrivals_back() -> None:
    unit = leader(num_ranks=2)
    unit.handle(0.0, RankReset((), (0, 1), ("p0", "p1"), 1))
    for rank, name in enumerate("ab"):
        (pull,) = of(unit.handle(0.0, decode(name)), Pull)
        assert pull.rank == rank
    effects = unit.handle(0.1, RankReset((0,), (), ("", "p1"), 2))
    assert sent(effects, Returned) == [Returned("decode-0", "a", 0, "rank lost")]
    assert unit.slots.key_to_slot.keys() == {("b", 0)}
