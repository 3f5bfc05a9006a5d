"""Recording of a role: how it was made, and every call with its events and effects.

    frame := length (4 bytes, big endian), msgpack        file := frame of an Opening, frames of Calls

The length is big endian, unlike core/framing's, so that files of earlier versions are recognised.

A role is a function of its events and their times, so a recording suffices to repeat all decisions.
Times are from the host's monotonic clock. runtime/recorder reads and writes the files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from hadal.core.config import Deployment
from hadal.core.errors import HadalError
from hadal.core.model_config import ModelConfig
from hadal.core.seams import Effect, Event, OfferNodes, StartUnit, StopUnit, WithdrawNodes
from hadal.roles.ranks.rank import RankProgress

VERSION = 6
AnyEvent = Event | RankProgress
AnyEffect = Effect | StartUnit | StopUnit | OfferNodes | WithdrawNodes
_LENGTH = struct.Struct(">I")
_MAX_OPENING_BYTES = 1 << 24


class RecordingError(HadalError, ValueError):
    """Error for data that is no recording, or one of another version."""


class RecordedRole(Protocol):
    """Role that can be recorded and replayed."""

    @property
    def start(self) -> Callable[..., list[Any]]: ...

    @property
    def handle(self) -> Callable[..., list[Any]]: ...


# ---- arguments of each role, besides the deployment ----
class MadeFront(msgspec.Struct, frozen=True, tag=True, array_like=True):
    epoch: str
    max_context: int
    fingerprint: str


class MadeSoleLeader(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Arguments of the leader of a unit that is one process."""

    role: str
    epoch: str
    pool: str
    fingerprint: str
    model: ModelConfig


class MadeLeader(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Arguments of the leader of a unit of many ranks."""

    role: str
    epoch: str
    fingerprint: str
    model: ModelConfig


class MadeRank(msgspec.Struct, frozen=True, tag=True, array_like=True):
    unit: str
    rank: int
    epoch: str
    host: str
    port: int
    pool: str
    expert_port: int


class MadeFleet(msgspec.Struct, frozen=True, tag=True, array_like=True):
    day_s: float


Made = MadeFront | MadeSoleLeader | MadeLeader | MadeRank | MadeFleet


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """Head of a recording."""

    version: int
    run_id: str
    process: str
    """Name of the process on the wire."""
    made: Made
    deployment: Deployment


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call of a role; without events, the call of `start`."""

    now_s: float
    events: tuple[AnyEvent, ...]
    effects: tuple[AnyEffect, ...]
    error: str = ""
    """Error that the role raised instead of returning effects."""


@dataclass(frozen=True)
class Recording:
    """One process from its start to its end, or to the point where the file breaks off."""

    opening: Opening
    calls: tuple[Call, ...]

    @property
    def process(self) -> str:
        return self.opening.process


def _plain(value: object) -> object:
    """Return a plain value for numpy values and ranges: plans that never leave their process have
    them instead of ints and tuples.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    raise NotImplementedError(f"{type(value).__name__} cannot be recorded.")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_opening_decoder = msgspec.msgpack.Decoder(Opening)
_call_decoder = msgspec.msgpack.Decoder(Call)


def encode(value: Any) -> bytes:
    """Return any event, effect or call as msgpack."""
    return _encoder.encode(value)


def frame(value: Opening | Call) -> bytes:
    """Return an opening or a call as a frame of a file."""
    body = encode(value)
    return _LENGTH.pack(len(body)) + body


def canonical(call: Call) -> bytes:
    """Encode a call as it decodes, so that equal calls have equal bytes: in a field of floats, 0
    and 0.0 are the same, and lists are tuples.
    """
    return encode(_call_decoder.decode(encode(call)))


def parse(data: bytes) -> Recording:
    """Parse a file's bytes, dropping a truncated last frame (`kill -9`). Raises RecordingError."""
    bodies = _frames(data)
    if not bodies:
        is_cut_off = len(data) < _LENGTH.size or _LENGTH.unpack_from(data)[0] <= _MAX_OPENING_BYTES
        raise RecordingError(
            "it is empty: the process ended before its role began."
            if is_cut_off
            else "it is not a recording."
        )
    try:
        opening = _opening_decoder.decode(bodies[0])
        if opening.version != VERSION:
            raise RecordingError(
                f"its version is {opening.version}; this Hadal reads {VERSION}: record again."
            )
        return Recording(opening, tuple(_call_decoder.decode(body) for body in bodies[1:]))
    except msgspec.MsgspecError as error:
        raise RecordingError(f"it is not a recording, or of another version ({error}).") from error


def _frames(data: bytes) -> Sequence[bytes]:
    bodies, at = [], 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if at > len(data):
            break
        bodies.append(data[at - length : at])
    return bodies
