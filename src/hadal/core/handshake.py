"""Handshake in which two processes of one deployment prove that both hold its secret, without
revealing it.

    connector  nonce ->
               <- nonce, proof          acceptor
    proof ->

A proof is an HMAC, under a key derived from the secret for one purpose, over the prover's side,
both nonces, the port that was connected to, whether records carry tags and the side's claims about
itself. So a proof is worthless on another connection (replay), from the other side (reflection),
for another purpose, or with another claim. The port protects an honest connector from a relay. A
stranger on a dead process's port could forward nonces and proofs to an acceptor elsewhere, but each
side proves the port that it sees, and these differ.

On a loopback address that is enough: only the kernel is between two ends that proved themselves. If
packets leave the host, every record also carries a tag of the session (`Seal`), so that a record
changed, repeated, dropped or reordered on the way is detected. Records can still be read on the
way; preventing that is for TLS, which would belong where a `Seal` is made (`Handshake.seal`).

Sans-IO: the caller supplies nonces from the operating system's generator.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable

from hadal.core.framing import U64, delimited

SECRET_BYTES = 32
MIN_SECRET_BYTES = 16
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16


def is_near(address: str) -> bool:
    """Return True for a loopback address: packets to it stay within this host's kernel."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def key_of(secret: bytes, purpose: str) -> bytes:
    """Return the 32-byte key with which processes that share `secret` prove themselves for one `purpose`."""
    return mac(secret, b"purpose", purpose.encode())


class Handshake:
    """One side of one connection. `port` is the port that was connected to; `nonce` is fresh and
    random.

    `is_sealed`: True if this side takes the other to be on another host; the two sides must agree.
    """

    def __init__(
        self, key: bytes, nonce: bytes, *, is_connector: bool, port: int, is_sealed: bool = False
    ) -> None:
        if len(key) < MIN_SECRET_BYTES or len(nonce) != NONCE_BYTES:
            raise ValueError(
                f"a key of {len(key)} bytes or a nonce of {len(nonce)} bytes has a wrong length."
            )
        self.nonce = nonce
        self.is_sealed = is_sealed
        self._key = key
        self._is_connector = is_connector
        self._port = port
        self._peer_nonce = b""

    @property
    def is_challenged(self) -> bool:
        """True once the other side's nonce has arrived, so that proofs can be made."""
        return bool(self._peer_nonce)

    def challenged(self, nonce: bytes) -> None:
        """Accept the other side's nonce. Raises ValueError if it has another length, equals our
        own, or is a second one.
        """
        if len(nonce) != NONCE_BYTES or nonce == self.nonce or self._peer_nonce:
            raise ValueError("its challenge is invalid or repeated")
        self._peer_nonce = nonce

    def proof(self, *claims: bytes) -> bytes:
        """Return the proof that this side holds the key and makes these `claims`."""
        return self._proof(self._is_connector, claims)

    def is_proof(self, proof: bytes, *claims: bytes) -> bool:
        """Return True if `proof` shows that the other side holds the key and makes these `claims`."""
        return self.is_challenged and hmac.compare_digest(
            proof, self._proof(not self._is_connector, claims)
        )

    def seal(self, *, is_outgoing: bool) -> Seal | None:
        """Return the Seal for the records of one direction; None if the other side is on this host."""
        if not self.is_sealed:
            return None
        is_by_connector = self._is_connector == is_outgoing
        return Seal(mac(self._key, b"seal", b"C" if is_by_connector else b"A", *self._nonces()))

    def _proof(self, is_connector: bool, claims: Iterable[bytes]) -> bytes:
        side = b"connector" if is_connector else b"acceptor"
        port = U64.pack(self._port)
        return mac(
            self._key,
            side,
            *self._nonces(),
            port,
            b"sealed" if self.is_sealed else b"near",
            *claims,
        )

    def _nonces(self) -> tuple[bytes, bytes]:
        return (
            (self.nonce, self._peer_nonce) if self._is_connector else (self._peer_nonce, self.nonce)
        )


class Seal:
    """Tags of the records of one direction, in order: the n-th tag is valid for the n-th record only."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def begin(self) -> hashlib.blake2b:
        """Return a hash that must be fed the next record's bytes; its digest is the tag."""
        digest = hashlib.blake2b(U64.pack(self._count), digest_size=TAG_BYTES, key=self._key)
        self._count += 1
        return digest

    def tag(self, pieces: Iterable[memoryview | bytes]) -> bytes:
        """Return the tag of the next record, made of the bytes of `pieces` in order."""
        digest = self.begin()
        for piece in pieces:
            digest.update(piece)
        return digest.digest()


def mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 over parts, each with its length so that they cannot run into each other."""
    return hmac.digest(key, b"".join(delimited(*parts)), "sha256")
