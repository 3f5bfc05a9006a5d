"""How two processes of one deployment prove to each other that both hold its secret, without saying
it.

    connector  nonce ->
               <- nonce, proof          acceptor
    proof ->

A proof is an HMAC, under a key derived from the secret for one purpose, over who speaks, both
nonces, the port that was connected to and whatever the side claims of itself. So a proof is worth
nothing on another connection (replay), from the other side (reflection), for another purpose, or
with another claim. The port keeps an honest connector from being led on: a stranger who sits on a
port that a dead process had can pass nonces and proofs between it and an acceptor elsewhere, but
both prove the port that they see, and these differ.

On a loopback address that is enough: nobody but the kernel is between two ends that proved
themselves. Where packets leave the host, every record carries a tag of the session as well
(`Seal`), so that nobody on the way can change, repeat, drop or reorder one unnoticed. Nobody is
kept from reading them: that is for TLS, whose place is where a `Seal` is made (`Handshake.seal`).

Sans-IO: nonces come from the caller, who has the operating system's generator.
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
    """Whether packets to this address stay on this host, where nobody but the kernel is between two
    ends.
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def key_of(secret: bytes, purpose: str) -> bytes:
    """The 32 bytes under which processes that share `secret` prove themselves when they speak of
    `purpose`.
    """
    return mac(secret, b"purpose", purpose.encode())


class Handshake:
    """One side of one connection. `port` is the one that was connected to; `nonce` is fresh and
    random.

    `is_sealed` says whether this side takes the other to be on another host: the two must agree.
    """

    def __init__(
        self, key: bytes, nonce: bytes, *, is_connector: bool, port: int, is_sealed: bool = False
    ) -> None:
        if len(key) < MIN_SECRET_BYTES or len(nonce) != NONCE_BYTES:
            raise ValueError(
                f"a key of {len(key)} bytes and a nonce of {len(nonce)} are no handshake."
            )
        self.nonce = nonce
        self.is_sealed = is_sealed
        self._key = key
        self._is_connector = is_connector
        self._port = port
        self._peer_nonce = b""

    @property
    def is_challenged(self) -> bool:
        """The other side's nonce is here, so proofs can be made."""
        return bool(self._peer_nonce)

    def challenged(self, nonce: bytes) -> None:
        """Take in the other side's nonce. Raises ValueError if it is none, is our own, or is the
        second one.
        """
        if len(nonce) != NONCE_BYTES or nonce == self.nonce or self._peer_nonce:
            raise ValueError("it does not challenge as this protocol does")
        self._peer_nonce = nonce

    def proof(self, *claims: bytes) -> bytes:
        """What shows that this side holds the key, and says `claims`."""
        return self._proof(self._is_connector, claims)

    def is_proof(self, proof: bytes, *claims: bytes) -> bool:
        """Whether `proof` shows that the other side holds the key, and says `claims`."""
        return self.is_challenged and hmac.compare_digest(
            proof, self._proof(not self._is_connector, claims)
        )

    def seal(self, *, is_outgoing: bool) -> Seal | None:
        """What tags the records of one direction; None where the other side is on this host."""
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
    """Tags of the records that go one way, in order: the n-th tag is right for the n-th record and
    for no other.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def begin(self) -> hashlib.blake2b:
        """What takes in the bytes of the next record; its digest is the tag."""
        digest = hashlib.blake2b(U64.pack(self._count), digest_size=TAG_BYTES, key=self._key)
        self._count += 1
        return digest

    def tag(self, pieces: Iterable[memoryview | bytes]) -> bytes:
        """The tag of the next record, whose bytes are `pieces` in order."""
        digest = self.begin()
        for piece in pieces:
            digest.update(piece)
        return digest.digest()


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts that cannot run into each other."""
    return hmac.digest(key, b"".join(delimited(*parts)), "sha256")
