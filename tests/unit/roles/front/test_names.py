"""Test FrontNames: a chain grows with its text and is never rebuilt."""

from __future__ import annotations

import msgspec
import pytest

from hadal.core.cache import split
from hadal.core.config import CacheConfig
from hadal.kv.names import PUBLIC, extend, root_of
from hadal.roles.front.names import FrontNames
from tests.unit.roles.driving import generation

NAMES = FrontNames(CacheConfig(), "f0")
ROOT = root_of(b"f0")


@pytest.mark.promise(
    "Equal names mean equal text from the first token on, for one model and one tenant."
)
def test_a_chain_names_the_full_blocks_and_grows_with_the_output() -> None:
    request = msgspec.structs.replace(generation(prompt=130), salt=b"s")
    named = NAMES.named(request)
    assert named.chain == extend(ROOT, b"", request.prompt, b"s")
    assert NAMES.named(named) is named, "nothing is to be done"
    assert NAMES.named(named, [7] * 61) is named
    longer = NAMES.named(named, [7] * 62)
    assert longer.chain == extend(ROOT, b"", request.prompt + (7,) * 62, b"s")
    assert (longer.prompt, longer.output) == (request.prompt, ())


def test_what_is_named_is_not_named_again() -> None:
    """A chain is continued if it was made under this fingerprint, otherwise it is made anew."""
    marked = msgspec.structs.replace(generation(prompt=128), chain=b"m" * 16, fingerprint="f0")
    names = list(split(NAMES.named(marked).chain))
    assert names[0] == b"m" * 16
    plain = NAMES.named(generation(prompt=128))
    assert names[1] != list(split(plain.chain))[1]
    assert NAMES.named(msgspec.structs.replace(marked, fingerprint="f1")).chain == plain.chain


def test_public_blocks_are_everybodys() -> None:
    chains = [
        list(
            split(
                NAMES.named(
                    msgspec.structs.replace(generation(prompt=256), salt=salt, num_public=191)
                ).chain
            )
        )
        for salt in (b"one", b"two")
    ]
    assert (
        chains[0][:2]
        == chains[1][:2]
        == list(split(extend(ROOT, b"", generation(prompt=128).prompt, PUBLIC)))
    )
    assert not set(chains[0][2:]) & set(chains[1][2:]), "the third is public but for a token"


def test_without_a_cache_there_are_no_names() -> None:
    request = generation(prompt=130)
    none = FrontNames(CacheConfig(memory="off"), "f0").named(request, [1] * 99)
    assert (none.chain, none.fingerprint) == (b"", "f0")
    disk_only = FrontNames(CacheConfig(memory="off", folder="there"), "f0")
    assert disk_only.named(request).chain == NAMES.named(request).chain != b""


@pytest.mark.promise(
    "Equal names mean equal text from the first token on, for one model and one tenant."
)
def test_another_fingerprint_is_another_name() -> None:
    request = NAMES.named(generation(prompt=64))
    again = NAMES.named(request, fingerprint="f1")
    assert again == FrontNames(CacheConfig(), "f1").named(generation(prompt=64))
    assert again.chain == extend(root_of(b"f1"), b"", request.prompt, b"") != request.chain
    assert NAMES.named(again) == request
