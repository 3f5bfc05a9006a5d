"""Proofs that two processes have the same secret: valid between the two, and nowhere else."""

from __future__ import annotations

import os

import pytest

from hadal.core.handshake import NONCE_BYTES, Handshake, key_of

SECRET = bytes(range(32))
KEY = key_of(SECRET, "test")


def pair(
    key: bytes = KEY,
    other: bytes = KEY,
    ports: tuple[int, int] = (7, 7),
    sealed: tuple[bool, bool] = (False, False),
) -> tuple[Handshake, Handshake]:
    connector = Handshake(
        key, os.urandom(NONCE_BYTES), is_connector=True, port=ports[0], is_sealed=sealed[0]
    )
    acceptor = Handshake(
        other, os.urandom(NONCE_BYTES), is_connector=False, port=ports[1], is_sealed=sealed[1]
    )
    connector.challenged(acceptor.nonce)
    acceptor.challenged(connector.nonce)
    return connector, acceptor


def test_who_holds_the_secret_is_believed_what_it_claims_and_nothing_else() -> None:
    connector, acceptor = pair()
    assert acceptor.is_proof(connector.proof(b"I am rank 2"), b"I am rank 2")
    assert connector.is_proof(acceptor.proof(), *())
    assert not acceptor.is_proof(connector.proof(b"I am rank 2"), b"I am rank 3")
    assert not acceptor.is_proof(connector.proof(b"ab", b"c"), b"a", b"bc")
    assert not acceptor.is_proof(b"", b"I am rank 2")


@pytest.mark.parametrize(
    "options",
    [
        {"other": key_of(SECRET, "another purpose")},
        {"other": key_of(bytes(32), "test")},
        {"ports": (7, 8)},
        {"sealed": (True, False)},
    ],
    ids=["purpose", "secret", "port", "seal"],
)
def test_another_secret_purpose_port_or_idea_of_the_way_is_refused(options: dict) -> None:  # type: ignore[type-arg]
    connector, acceptor = pair(**options)
    assert not acceptor.is_proof(connector.proof(b"x"), b"x")
    assert not connector.is_proof(acceptor.proof(b"x"), b"x")


def test_a_proof_is_no_answer_of_the_other_side_and_none_on_another_connection() -> None:
    connector, acceptor = pair()
    assert not connector.is_proof(connector.proof(b"x"), b"x")
    later, _ = pair()
    assert not acceptor.is_proof(later.proof(b"x"), b"x")


@pytest.mark.promise("Processes authenticate each other before they send anything over TCP")
def test_nothing_is_proven_before_a_challenge_and_one_challenge_is_enough() -> None:
    alone = Handshake(KEY, os.urandom(NONCE_BYTES), is_connector=True, port=7)
    assert not alone.is_proof(alone.proof(b"x"), b"x")
    for nonce in (b"short", alone.nonce):
        with pytest.raises(ValueError, match="challenge"):
            alone.challenged(nonce)
    alone.challenged(os.urandom(NONCE_BYTES))
    with pytest.raises(ValueError, match="challenge"):
        alone.challenged(os.urandom(NONCE_BYTES))
    with pytest.raises(ValueError, match="wrong length"):
        Handshake(b"short", os.urandom(NONCE_BYTES), is_connector=True, port=7)


@pytest.mark.promise(
    "mesh, KV and experts over TCP prove the secret in a handshake and tag every record"
)
def test_a_tag_is_right_for_its_record_its_number_its_direction_and_its_connection() -> None:
    connector, acceptor = pair(sealed=(True, True))
    out, into = connector.seal(is_outgoing=True), acceptor.seal(is_outgoing=False)
    back = acceptor.seal(is_outgoing=True)
    assert out is not None
    assert back is not None
    assert into is not None
    first, second = out.tag([b"on", b"e"]), out.tag([b"one"])
    assert first != second
    assert into.tag([b"one"]) == first
    assert into.tag([b"two"]) != second
    assert back.tag([b"one"]) != first
    other = pair(sealed=(True, True))[0].seal(is_outgoing=True)
    assert other is not None
    assert other.tag([b"one"]) != first
    assert pair()[0].seal(is_outgoing=True) is None
