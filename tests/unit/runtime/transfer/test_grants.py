"""Test grants: kept for as many leases as may still be pulled, found for a part of a lease too, and
bounded.
"""

from __future__ import annotations

import pytest

from hadal.core.messages.base import FRONT
from hadal.core.messages.pools import Pull
from hadal.core.messages.ranks import RankDo
from hadal.core.messages.units import Filled, KvLease
from hadal.runtime.transfer import grants as grants_module
from hadal.runtime.transfer.grants import Grant, Grants

SECRET = b"a secret of the test ..........."


def pull_of(lease: KvLease) -> RankDo:
    return RankDo(Pull("r", 1, lease, lease.block_ids))


def lease_of(first: int, num_blocks: int, version: int = 0) -> KvLease:
    ids = tuple(range(first, first + num_blocks))
    return KvLease("prefill-0#1", ids, (version,) * num_blocks, 64 * num_blocks)


@pytest.mark.promise(
    "A lease names its reader: a grant (proof of the lease) is sent with the message "
    "that passes a lease on"
)
def test_a_part_of_a_lease_is_pulled_under_the_whole_ones_grant() -> None:
    leader, rank = Grants(SECRET, "decode-0"), Grants(SECRET, "decode-0.1")
    whole = lease_of(10, 6)
    message = pull_of(whole)
    rank.keep(message, leader.to("decode-0.1", message))
    part = KvLease(whole.source, whole.block_ids[2:4], whole.versions[2:4], 128)
    found = rank.of(part)
    assert found.block_ids == whole.block_ids
    assert rank.allows(found, "decode-0.1", part.source, part.block_ids, part.versions)
    assert not rank.allows(found, "decode-0.2", part.source, part.block_ids, part.versions)
    elsewhere = KvLease("decode-0#1", (12,), (0,), 64)
    for other in (lease_of(9, 2), lease_of(15, 2), lease_of(12, 2, version=1), elsewhere):
        assert rank.of(other) == Grant()


def test_what_is_kept_is_bounded_by_leases_and_by_their_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Grants are kept after a pull, as more of a lease may be pulled: for long prompts 8,192 of
    them took 1.3 GB.
    """
    monkeypatch.setattr(grants_module, "MAX_KEPT", 100)
    monkeypatch.setattr(grants_module, "MAX_KEPT_BLOCKS", 1000)
    grants = Grants(SECRET, "decode-0")
    long = [lease_of(1000 * number, 300) for number in range(10)]
    for lease in long + long[-2:]:
        grants.keep(pull_of(lease), b"tag")
    assert [bool(grants.of(lease).tag) for lease in long] == [False] * 7 + [True] * 3
    short = [lease_of(number, 1, version=7) for number in range(200)]
    for lease in short:
        grants.keep(pull_of(lease), b"tag")
    assert sum(bool(grants.of(lease).tag) for lease in short) == 100
    huge = lease_of(0, 5000)
    grants.keep(pull_of(huge), b"tag")
    assert grants.of(huge).tag == b"tag"


def test_a_lease_that_was_never_handed_on_is_not_searched_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search builds no set of other leases' blocks: among 1,500 leases of long prompts that
    took 0.5 s of the pulling thread.
    """
    grants = Grants(SECRET, "decode-0")
    for number in range(500):
        grants.keep(pull_of(lease_of(2048 * number, 2048)), b"tag")
    pairs_of, seen = grants_module._pairs, list[KvLease]()
    monkeypatch.setattr(
        grants_module, "_pairs", lambda lease: (seen.append(lease), pairs_of(lease))[1]
    )
    lease = lease_of(10**8, 1)
    assert grants.of(lease) == Grant()
    assert seen == [lease]


def test_the_front_is_granted_nothing_and_whom_it_hands_a_lease_on_to_is() -> None:
    decode, front, prefill = (Grants(SECRET, name) for name in ("decode-0", FRONT, "prefill-0"))
    lease = lease_of(10, 2)
    filled = Filled("decode-0", "r", 0, b"n" * 32, lease)
    assert decode.to(FRONT, filled) == b""
    prefill.keep(filled, front.to("prefill-0", filled))
    found = prefill.of(lease)
    assert decode.allows(found, "prefill-0", lease.source, lease.block_ids, lease.versions)
    assert not decode.allows(found, "prefill-1", lease.source, lease.block_ids, lease.versions)
