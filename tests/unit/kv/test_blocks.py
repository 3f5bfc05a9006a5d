"""Test BlockAllocator against a plain model at random: all or nothing, owners, sharing, caching."""

from __future__ import annotations

from hashlib import blake2b
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.cache import NAME_BYTES, num_names, split
from hadal.core.errors import InvariantError
from hadal.kv.blocks import BlockAllocator, _positions, blocks_for
from tests.fresh import fresh


def chain_of(*texts: object) -> bytes:
    """Return the names of a text with these blocks: equal prefixes have equal names."""
    names, before = b"", b""
    for text in texts:
        before = blake2b(before + repr(text).encode(), digest_size=NAME_BYTES).digest()
        names += before
    return names


def cached(blocks: BlockAllocator, chain: bytes) -> tuple[int, ...]:
    """Let a request compute the chain and release it; return its blocks, which stay cached."""
    held = blocks.allocate(num_names(chain), "computing")
    assert held is not None
    blocks.name(held, chain, 0)
    assert blocks.free(held, "computing") == tuple(b for b in held if b not in blocks.lookup(chain))
    return held


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n) for n in (0, 1, 63, 64, 65, 128)] == [0, 1, 1, 1, 2, 2]


def test_the_scratch_block_is_never_handed_out() -> None:
    blocks = BlockAllocator(5)
    assert blocks.num_usable == 4
    assert sorted(blocks.allocate(4, "a") or ()) == [1, 2, 3, 4]
    assert blocks.allocate(1, "b") is None


def test_a_pool_needs_more_than_the_scratch_block() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockAllocator(1)


def test_too_many_takes_none() -> None:
    blocks = BlockAllocator(4)
    assert blocks.allocate(4, "a") is None
    assert blocks.num_free == 3
    assert blocks.allocate(0, "a") == ()


def test_free_raises_generations_once_each() -> None:
    blocks = BlockAllocator(4)
    held = blocks.allocate(2, "a")
    assert held is not None
    before = blocks.versions(held)
    assert blocks.free(held, "a") == held
    assert blocks.versions(held) == tuple(g + 1 for g in before)
    assert blocks.check() == []


@pytest.mark.parametrize(("block", "owner"), [(1, "b"), (0, "a"), (9, "a"), (-1, "a"), (2, "a")])
def test_freeing_what_is_not_owned_is_a_bug(block: int, owner: str) -> None:
    blocks = BlockAllocator(4)
    assert blocks.allocate(1, "a") == (1,)
    with pytest.raises(InvariantError, match=r"does not own|there are blocks 0 to 3"):
        blocks.free((block,), owner)


@pytest.mark.promise(
    "A named block without owners stays in memory, and is found, until its space is needed."
)
def test_a_named_block_outlives_its_owner_and_is_found() -> None:
    blocks = BlockAllocator(6)
    chain = chain_of("a", "b", "c")
    held = cached(blocks, chain)
    assert blocks.lookup(chain) == held
    assert blocks.lookup(chain_of("a", "b", "x")) == held[:2]
    assert blocks.lookup(chain_of("x", "b", "c")) == ()
    assert (blocks.num_free, blocks.num_used, blocks.num_named, blocks.owners()) == (5, 0, 3, {})
    assert blocks.versions(held) == (0, 0, 0)
    assert blocks.take_changes() == (chain, b"", ())
    assert blocks.take_changes() == (b"", b"", ())


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    blocks = BlockAllocator(6)
    chain = chain_of("a", "b")
    held = cached(blocks, chain)
    blocks.acquire(held, 1)
    blocks.acquire(held, 2)
    assert blocks.owners() == dict.fromkeys(held, (1, 2))
    assert blocks.allocate(4, 3) is None
    assert blocks.free(held, 1) == ()
    assert blocks.num_used == 2
    assert blocks.free(held, 2) == ()
    assert (blocks.num_used, blocks.num_named) == (0, 2)
    assert blocks.check() == []


def test_a_block_is_acquired_once_by_each_if_it_has_a_name_or_an_owner() -> None:
    blocks = BlockAllocator(4)
    held = blocks.allocate(1, 1)
    assert held is not None
    blocks.acquire(held, 2)
    with pytest.raises(InvariantError, match="owns already"):
        blocks.acquire(held, 2)
    blocks.name(held, chain_of("a"), 0)
    blocks.acquire(held, 3)
    for owner in (1, 2, 3):
        assert blocks.free(held, owner) == ()
    assert blocks.check() == []
    with pytest.raises(InvariantError, match="is free"):
        blocks.acquire((held[0] + 1 if held[0] < 3 else 1,), 4)


@pytest.mark.promise(
    "A named block without owners stays in memory, and is found, until its space is needed."
)
def test_eviction_takes_the_end_of_a_text_first() -> None:
    blocks = BlockAllocator(7)
    old, new = chain_of("a", "b", "c"), chain_of("x", "y", "z")
    first = cached(blocks, old)
    cached(blocks, new)
    blocks.take_changes()
    assert blocks.allocate(2, "a") == (first[2], first[1])
    assert (blocks.lookup(old), len(blocks.lookup(new))) == (first[:1], 3)
    assert blocks.versions(first) == (0, 1, 1)
    added, dropped, evicted = blocks.take_changes()
    found = (added, dropped, evicted)
    assert found == (b"", b"".join(reversed([*split(old)][1:])), (first[2], first[1]))
    assert blocks.check() == []


def test_a_use_saves_from_eviction() -> None:
    blocks = BlockAllocator(5)
    old, new = chain_of("a", "b"), chain_of("x", "y")
    held = cached(blocks, old)
    cached(blocks, new)
    blocks.acquire(held, 1)
    blocks.free(held, 1)
    blocks.allocate(2, 2)
    assert (blocks.lookup(old), blocks.lookup(new)) == (held, ())


def test_what_two_compute_at_once_is_named_once() -> None:
    blocks = BlockAllocator(9)
    chain = chain_of("a", "b", "c")
    first, second = blocks.allocate(3, 1), blocks.allocate(3, 2)
    assert first is not None
    assert second is not None
    blocks.name(first[:2], chain, 0)
    blocks.name(second, chain, 0)
    assert blocks.lookup(chain) == (*first[:2], second[2])
    assert blocks.free(first, 1) == (first[2],)
    assert blocks.num_free == 5
    # A block in use follows the cached ones; they can be evicted all the same.
    assert blocks.check() == []
    assert set(first) <= set(blocks.allocate(5, 3) or ())
    assert blocks.lookup(chain) == ()
    assert blocks.free(second, 2) == second[:2]
    assert blocks.check() == []
    # Its name stayed true: once the blocks before it exist again, the block is found.
    again = blocks.allocate(2, 4)
    assert again is not None
    blocks.name(again, chain[: 2 * NAME_BYTES], 0)
    assert blocks.lookup(chain) == (*again, second[2])
    assert blocks.check() == []


def test_a_name_is_for_blocks_in_use_and_for_good() -> None:
    blocks = BlockAllocator(4)
    held = blocks.allocate(1, 1)
    assert held is not None
    blocks.name(held, chain_of("a"), 0)
    blocks.name(held, chain_of("a"), 0)
    with pytest.raises(InvariantError, match="another name"):
        blocks.name(held, chain_of("b"), 0)
    with pytest.raises(InvariantError, match="no owner"):
        blocks.name((2,), chain_of("b"), 0)
    with pytest.raises(ValueError, match="not all in a chain"):
        blocks.name(held, chain_of("a"), 1)


def test_forgotten_names_leave_owned_blocks_to_their_owners() -> None:
    blocks = BlockAllocator(6)
    chain = chain_of("a", "b", "c")
    held = cached(blocks, chain)
    blocks.acquire(held[:1], 1)
    blocks.take_changes()
    blocks.forget_names()
    assert (blocks.num_named, blocks.lookup(chain)) == (0, ())
    added, dropped, evicted = blocks.take_changes()
    found = (added, sorted(split(dropped)), sorted(evicted))
    assert found == (b"", sorted(split(chain)), sorted(held[1:]))
    assert blocks.free(held[:1], 1) == held[:1]
    assert blocks.check() == []


def test_coming_and_going_between_two_looks_is_no_change() -> None:
    blocks = BlockAllocator(3)
    cached(blocks, chain_of("a", "b"))
    held = blocks.allocate(2, 1)
    assert held is not None
    assert blocks.take_changes() == (b"", b"", (2, 1))


def test_check_sees_a_lost_block() -> None:
    blocks = BlockAllocator(4)
    blocks._free.pop()
    assert blocks.check()


def test_check_sees_a_block_that_is_free_and_owned() -> None:
    blocks = BlockAllocator(4)
    held = blocks.allocate(1, "a")
    assert held is not None
    blocks._free.append(held[0])
    assert any("free and owned" in problem for problem in blocks.check())


def test_check_sees_a_wrong_count_of_followers() -> None:
    blocks = BlockAllocator(4)
    chain = chain_of("a", "b")
    cached(blocks, chain)
    blocks._num_next[chain[:NAME_BYTES]] += 1
    assert blocks.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=60))
def test_any_use_adds_up(uses: list[tuple[int, int]]) -> None:
    blocks = BlockAllocator(8)
    held: dict[int, tuple[int, ...]] = {}
    for owner, count in uses:
        if owner in held:
            blocks.free(held.pop(owner), owner)
        else:
            got = blocks.allocate(count, owner)
            in_use = {block for ids in held.values() for block in ids}
            assert (got is None) == (count > 7 - len(in_use))
            if got is not None:
                assert len(got) == count
                assert not in_use & set(got)
                held[owner] = got
        assert blocks.check() == []
        assert blocks.num_used == sum(map(len, held.values()))


class Readers:
    """Requests as a leader runs them, and the content that a block must keep while it can be read."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.blocks = BlockAllocator(24)
        self.content: dict[int, tuple[int, bytes]] = {}
        """Block -> (generation, name) when it was last named, for every block that was ever named.
        """
        self.known: set[bytes] = set()
        self.running: dict[int, tuple[list[int], bytes, int]] = {}
        """Key -> (blocks, chain, number of complete blocks)."""

    def start(self, key: int) -> None:
        chain = chain_of(*(self.random.randrange(2) for _ in range(self.random.randrange(1, 9))))
        found = self.blocks.lookup(chain)
        for block, name in zip(found, split(chain), strict=False):
            assert self.content[block] == (self.blocks.versions((block,))[0], name)
        self.blocks.acquire(found, key)
        new = self.blocks.allocate(num_names(chain) - len(found), key)
        if new is None:
            assert num_names(chain) - len(found) > self.blocks.num_free
            assert self.blocks.free(found, key) == ()
        else:
            assert not set(new) & {b for ids, _, _ in self.running.values() for b in ids}
            self.running[key] = ([*found, *new], chain, len(found))

    def step(self, key: int) -> None:
        ids, chain, done = self.running[key]
        more = min(len(ids), done + self.random.randrange(1, 4))
        self.blocks.name(ids[done:more], chain, done)
        for block, name in zip(ids[done:more], [*split(chain)][done:more], strict=True):
            if self.blocks._name_to_block[name] == block:  # Otherwise another block has the name.
                self.content[block] = (self.blocks.versions((block,))[0], name)
        self.running[key] = (ids, chain, more)

    def end(self, key: int) -> None:
        ids, _, _ = self.running.pop(key)
        before = self.blocks.versions(ids)
        gone = self.blocks.free(ids, key)
        after = self.blocks.versions(ids)
        assert [b for b, g, h in zip(ids, before, after, strict=True) if g != h] == list(gone)

    def look(self) -> None:
        """Check that the reported changes lead to the present names."""
        added, dropped, _ = self.blocks.take_changes()
        assert not set(split(added)) & self.known
        assert set(split(dropped)) <= self.known
        self.known = (self.known | set(split(added))) - set(split(dropped))
        assert self.known == self.blocks._name_to_block.keys()


@pytest.mark.promise(
    "Only full blocks have names; a shared block is never written; a prompt's last "
    "position is always computed"
)
@pytest.mark.parametrize("seed", [1, 2, 3392532310, fresh().getrandbits(32)])
def test_no_reader_ever_sees_a_block_change(seed: int) -> None:
    print(f"seed {seed}")
    random = Random(seed)
    readers = Readers(random)
    for key in range(1500):
        readers.start(key)
        if readers.running and random.random() < 0.8:
            readers.step(random.choice(list(readers.running)))
        while readers.running and random.random() < 0.5:
            readers.end(random.choice(list(readers.running)))
        if random.random() < 0.3:
            readers.look()
        assert readers.blocks.check() == []
    for key in list(readers.running):
        readers.end(key)
    assert readers.blocks.num_used == 0
    assert readers.blocks.check() == []


def test_owners_are_told_apart_from_those_who_only_say_so() -> None:
    blocks = BlockAllocator(8)
    held, other = blocks.allocate(3, ("a", 0)), blocks.allocate(2, ("b", 0))
    assert held is not None
    assert other is not None
    blocks.acquire(held[:1], "c")
    true = [(("a", 0), held), (("b", 0), other), ("c", held[:1])]
    assert blocks.is_owned_as(true)
    for index in range(3):
        assert not blocks.is_owned_as(true[:index] + true[index + 1 :]), "one is missing"
    assert not blocks.is_owned_as([*true[:2], ("c", held[1:2])]), "another's block"
    # One block appears twice.
    assert not blocks.is_owned_as([(("a", 0), (held[0], held[0], held[1])), *true[1:]])
    assert not blocks.is_owned_as([*true, ("c", ())]), "an owner twice"


def test_a_ledger_goes_on_where_another_one_ended() -> None:
    blocks = BlockAllocator(8)
    assert sorted(blocks.take_over({2: 4, 3: 1}, {"a": (2, 5)})) == [1, 3, 4, 6, 7]
    assert blocks.check() == []
    assert (blocks.num_used, blocks.num_free) == (2, 5)
    assert blocks.versions((2, 5, 3, 7)) == (4, 0, 2, 1)
    assert blocks.free((2, 5), "a") == (2, 5)
    assert blocks.versions((2, 5)) == (5, 1)
    assert blocks.allocate(7, "b") is not None
    with pytest.raises(InvariantError, match="in use"):
        blocks.take_over({}, {})


def test_no_block_is_taken_over_by_two() -> None:
    with pytest.raises(InvariantError, match="takes over block 5"):
        BlockAllocator(8).take_over({}, {"a": (2, 5), "b": (5,)})


def test_named_blocks_are_found_again_under_another_ledger() -> None:
    one = BlockAllocator(8)
    chain = b"".join(bytes([number]) * NAME_BYTES for number in (1, 2, 3))
    blocks = one.allocate(3, "a")
    assert blocks is not None
    one.name(blocks, chain, 0)
    found = one.named_as(split(chain))
    other = BlockAllocator(8)
    num_gone = len(other.take_over({}, {}, found))
    assert num_gone == 4
    assert other.check() == []
    assert other.lookup(chain) == blocks
    assert other.take_changes()[0] == chain
    assert (other.num_used, other.num_free, other.num_named) == (0, 7, 3)
    other.acquire(blocks[:2], "b")
    assert other.check() == []
    assert len(other.allocate(5, "c") or ()) == 5, "what follows goes first"
    assert other.lookup(chain) == blocks[:2]
    assert other.check() == []


def test_an_owned_block_has_no_name_from_another_ledger() -> None:
    blocks = BlockAllocator(8)
    name = bytes([1]) * NAME_BYTES
    blocks.take_over({}, {"a": (5,)}, {5: (name, b""), 6: (bytes([2]) * NAME_BYTES, name)})
    assert (blocks.num_named, blocks.num_used) == (1, 1)
    assert blocks.check() == []


def test_every_name_of_long_chains_is_looked_at_once() -> None:
    """Computed straight from the definition, two chains of 50,000 blocks took minutes (quadratic)."""
    rng = Random(1)
    chain = {number: number - 1 for number in (*range(1, 50_001), *range(100_000, 150_000))}
    numbers = list(chain)
    rng.shuffle(numbers)
    name_to_before = {number.to_bytes(4): chain[number].to_bytes(4) for number in numbers}
    positions = _positions(name_to_before)
    assert positions == {n.to_bytes(4): n - 1 if n <= 50_000 else n - 100_000 for n in numbers}
