"""Transfer of expert weights from one rank's memory to another's, over TCP. Every rank serves its
experts to the other processes of the run (runtime/transfer/peers moves the frames).

    AskExpert  ->
               <-  ExpertHead, the bytes of its tensors; None if the expert is not held

The weights of (layer, expert) are constants of the model. The bytes of any holder are right, in any
formation of either side, so both sides are independent of formations, placements and plans. If a
rank of another deployment reuses a port, the handshake fails.

Each expert takes a connection of its own: none stays open, and a failure leaves nothing behind. The
client accepts only the types and shapes that it expects, so no answer is too big. It fills its
tensors in place and trusts them once the checksum is right. Device memory is copied through the
host's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from hadal.core.plans import Source
from hadal.runtime.transfer.peers import BadPeer, Channel, PeerLink, PeerServer, deadline_of
from hadal.runtime.worker import SHARE, Pace

log = logging.getLogger(__name__)
PURPOSE = "experts 4"
"""Purpose of the key (core/handshake.key_of)."""
PIECE_BYTES = 1 << 20
"""Bytes sent or received between two checks of the clock."""
_MAX_LINKS = 1024
"""Maximum number of peers with a remembered link. A link holds the time of its peer's last failure."""


class Weights(Protocol):
    """An expert's weights: its tensors, in the order in which they are sent."""

    @property
    def parts(self) -> tuple[Tensor, ...]: ...


Held = Callable[[int, int], Weights | None]
"""(MoE layer, expert) -> its weights, None if this rank does not hold it. From any thread."""


class AskExpert(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Request for the weights of one expert."""

    layer: int
    expert: int


class ExpertHead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Header of an answer. The bytes of the expert's tensors follow, in pieces of PIECE_BYTES."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Type and shape of each tensor: values and scales of gate, up and down."""
    digest: int
    """XXH3 of the bytes."""


_ASKS = msgspec.msgpack.Decoder(AskExpert)
_ANSWERS: msgspec.msgpack.Decoder[ExpertHead | None] = msgspec.msgpack.Decoder(ExpertHead | None)
"""Decoder of answers; None: the peer does not hold the expert."""


class ExpertServer:
    """Server on `port` that sends experts to other ranks, in threads of its own, until closed."""

    def __init__(self, host: str, key: bytes, held: Held, share: float = SHARE) -> None:
        """`share`: largest share of a core for all connections together."""
        self._held = held
        self._digests: dict[tuple[int, int], int] = {}
        """(layer, expert) -> XXH3 of its bytes, computed once: the bytes are constants."""
        self._pace = Pace(share)
        self._peers = PeerServer(
            host, key, "experts", "a rank's experts", _ASKS, self._answer, in_background=True
        )
        self.port = self._peers.port
        self.close = self._peers.close
        self._peers.start()

    def _answer(self, channel: Channel, ask: AskExpert) -> None:
        self._rest()  # The work of this thread counts against the share from here on.
        found = self._held(ask.layer, ask.expert)
        if found is None:
            channel.send_frame(None)
            return
        parts = [_bytes_of(_on_host(tensor)) for tensor in found.parts]
        digest = self._digest(ask, parts)
        channel.send_frame(_head(found, digest))
        for part in parts:
            for piece in _pieces(part):
                channel.send((piece,))
                self._rest()

    def _digest(self, ask: AskExpert, parts: list[memoryview]) -> int:
        known = self._digests.get((ask.layer, ask.expert))
        if known is not None:
            return known
        digest = xxhash.xxh3_64()
        for part in parts:
            for piece in _pieces(part):
                digest.update(piece)
                self._rest()
        self._digests[ask.layer, ask.expert] = digest.intdigest()
        return digest.intdigest()

    def _rest(self) -> None:
        owed_s = self._pace.owed_s()
        if owed_s:
            self._peers.closing.wait(owed_s)


class ExpertClient:
    """Client that fetches experts from other ranks' servers, one at a time, in one thread."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._links: dict[tuple[str, int], PeerLink] = {}

    def fetch(
        self,
        layer: int,
        source: Source,
        into: Weights,
        rest: Callable[[], None] = lambda: None,
    ) -> bool:
        """Fill `into` with the expert. Return False if the source does not deliver it; then the
        tensors' content is void. `rest` is called between pieces; its exceptions are passed on.
        """
        link = self._link(source.host, source.port) if source.port else None
        if link is None or link.is_shunned:
            return False
        deadline_s = deadline_of(sum(part.nbytes for part in into.parts))

        def receive(channel: Channel) -> bool:
            return _receive(channel, AskExpert(layer, source.expert), into, rest, deadline_s)

        try:
            return link.ask(receive, deadline_s, tries=1)
        except (OSError, BadPeer) as error:
            log.warning(
                "expert %d of MoE layer %d could not be pulled from %s:%d; it is read from the"
                " model's files: %s",
                source.expert,
                layer,
                source.host,
                source.port,
                str(error) or type(error).__name__,
            )
            # Do not wait again for each further expert of this peer: the files have them.
            link.shun()
            return False
        finally:
            link.close()

    def _link(self, host: str, port: int) -> PeerLink:
        link = self._links.get((host, port))
        if link is None:
            if len(self._links) >= _MAX_LINKS:
                self._links.clear()
            link = self._links[host, port] = PeerLink(host, port, self._key)
        return link


def _receive(
    channel: Channel,
    ask: AskExpert,
    into: Weights,
    rest: Callable[[], None],
    deadline_s: float,
) -> bool:
    channel.send_frame(ask, deadline_s=deadline_s)
    head = channel.receive_frame(_ANSWERS, deadline_s)
    if head is None:
        return False
    if head != _head(into, head.digest):
        raise BadPeer(f"it holds {head}, not {_head(into, head.digest)}")
    digest = xxhash.xxh3_64()
    for tensor in into.parts:
        is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        host = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        for piece in _pieces(_bytes_of(host)):
            channel.fill(piece, deadline_s=deadline_s)
            digest.update(piece)
            rest()
        if not is_direct:
            _from_host(host, tensor)
    if digest.intdigest() != head.digest:
        raise BadPeer("its bytes do not match their checksum")
    return True


class ExpertTransfer:
    """Expert server and client of one rank: for its own stager and those of other ranks."""

    def __init__(self, host: str, key: bytes, held: Held) -> None:
        self._server = ExpertServer(host, key, held)
        self._client = ExpertClient(key)
        self.fetch = self._client.fetch

    @property
    def port(self) -> int:
        return self._server.port

    def close(self, timeout_s: float) -> bool:
        return self._server.close(timeout_s)


def _pieces(view: memoryview) -> Iterator[memoryview]:
    return (view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES))


def _head(weights: Weights, digest: int) -> ExpertHead:
    parts = ((str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in weights.parts)
    return ExpertHead(tuple(parts), digest)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, shared with it."""
    array: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array.data


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    with torch.cuda.stream(_beside(tensor.device)):
        return tensor.to("cpu").contiguous()


def _from_host(host: Tensor, into: Tensor) -> None:
    if into.device.type != "cuda":
        into.copy_(host)
        return
    stream = _beside(into.device)
    with torch.cuda.stream(stream):
        into.copy_(host)
    stream.synchronize()  # The next computation with `into` runs on another stream.


def _beside(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that waits for all work queued on the default stream so far, because it may
    use the same memory. Work queued later does not wait for the returned stream.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    return stream
