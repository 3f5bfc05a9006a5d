"""Fingerprint of KV: a hash of what KV depends on besides its text, such as the model's files, the
block layout and the precision.

Deployments with equal fingerprints may use each other's blocks. In a large checkpoint one page of
every tensor is read, and one of every PIECE_BYTES of a large tensor. So a fine-tune with equal
shapes gets another fingerprint even if it trained one tensor only, and 700 GB take seconds. A few
rows changed by hand may go unnoticed: rename the file. A file up to WHOLE_BYTES is read whole.
"""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from hadal.core.config import Deployment, num_cache_layers
from hadal.core.errors import CheckpointError
from hadal.core.framing import U64, delimited
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig
from hadal.kernels.build import PLAIN, instruction_set, runs_plain
from hadal.kv.names import VERSION
from hadal.runtime.devices import cpu_kind
from hadal.runtime.headers import MAX_HEADER_BYTES, weight_files

FINGERPRINT_BYTES = 16
WHOLE_BYTES = 16 * 1024 * 1024
NUM_SAMPLES = 64
"""Minimum number of samples of a file above WHOLE_BYTES: evenly spread ones are added if needed."""
SAMPLE_BYTES = 4096
PIECE_BYTES = 16 * 1024 * 1024
NUM_THREADS = 16
"""Number of files read at the same time. Over a network, each read takes about a millisecond."""


def fingerprint_of(
    deployment: Deployment, config: ModelConfig, dtype: str, model_digest: str
) -> str:
    """Return the KV fingerprint as hex digits. `dtype` is that of the pools."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    layout = BLOCK_TOKENS, num_cache_layers(deployment, config), config.entry_dim
    _add(
        digest,
        VERSION,
        repr(layout).encode(),
        dtype.encode(),
        deployment.dispatch_format.encode(),
        deployment.compute.encode(),
        deployment.device.encode(),
        model_digest.encode(),
    )
    if deployment.device == "cpu":  # Plain torch and each instruction set round differently.
        computed = PLAIN if runs_plain() else instruction_set()
        _add(digest, computed.encode(), cpu_kind().encode())
    return digest.hexdigest()


def digest_of_model(folder: Path) -> str:
    """Return a digest of config.json and the weights, in hex. Raises CheckpointError."""
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    try:
        _add(digest, (folder / "config.json").read_bytes())
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for of_file in threads.map(_digest_of, weight_files(folder)):
                _add(digest, of_file)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be read ({error.strerror})."
        ) from error
    return digest.hexdigest()


def _add(digest: blake2b, *parts: bytes) -> None:
    """Add parts, delimited so that no two different lists of parts hash equal."""
    for piece in delimited(*parts):
        digest.update(piece)


def _digest_of(path: Path) -> bytes:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        _add(digest, path.name.encode(), U64.pack(size))
        if size <= WHOLE_BYTES:
            _add(digest, path.read_bytes())
            return digest.digest()
        start = os.pread(file.fileno(), 8, 0)
        header_bytes = min(U64.unpack(start)[0], MAX_HEADER_BYTES, size - 8)
        header = os.pread(file.fileno(), header_bytes, 8)
        _add(digest, header)
        for offset in _sample_offsets(header, size):
            _add(digest, os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return digest.digest()


def _sample_offsets(header: bytes, size: int) -> list[int]:
    """Return the offsets to sample: the middle of every piece of every tensor, and further offsets
    spread over the file if those are few.
    """
    data_at = 8 + len(header)
    spans: list[tuple[int, int]] = []
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        # If the header is invalid, the model's loader reports it; samples over the file suffice.
        spans = [
            (data_at + begin, min(data_at + end, size))
            for entry in json.loads(header).values()
            if "data_offsets" in entry
            for begin, end in [entry["data_offsets"]]
            if 0 <= begin < end
        ]
    offsets = {
        max(at, (at + min(at + PIECE_BYTES, end) - SAMPLE_BYTES) // 2)
        for begin, end in spans
        for at in range(begin, end, PIECE_BYTES)
    }
    num_more = max(0, NUM_SAMPLES - len(offsets))
    offsets |= {data_at + index * (size - data_at) // num_more for index in range(num_more)}
    return sorted(offsets)
