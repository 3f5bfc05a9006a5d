"""What KV depends on besides its text, in one word: the model's files, the layout of a block, the
precision.

Equal fingerprints mean that a block of one deployment may be used by the other. Of a large
checkpoint a page out of every tensor is read, and one of every PIECE_BYTES of a large tensor, so a
fine-tune of equal shapes has another fingerprint even if it trained one tensor alone, and 700 GB
take seconds. A few rows changed by hand may pass: rename the file. A file up to WHOLE_BYTES is read
whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from hadal.core.config import Deployment
from hadal.core.errors import CheckpointError
from hadal.core.messages import BLOCK_TOKENS
from hadal.core.model_config import ModelConfig
from hadal.kv.names import VERSION

FINGERPRINT_BYTES = 16
KERNELS = "HADAL_KERNELS"
"""Environment variable: plain torch and the compiled kernels round differently
(kernels/library).
"""
WHOLE_BYTES = 16 * 1024 * 1024
NUM_SAMPLES = 64
"""Of a larger file at least: over all of it, where it has not as many tensors."""
SAMPLE_BYTES = 4096
PIECE_BYTES = 16 * 1024 * 1024
NUM_THREADS = 16
"""They wait for reads: a disk answers as many at once, and one over a network takes a millisecond
for each.
"""
_HEADER_MAX_BYTES = 100_000_000
"""The format's own limit (safetensors)."""


def fingerprint_of(deployment: Deployment, config: ModelConfig, dtype: str) -> str:
    """Hex digits; empty where the cache is off and nobody asks. `dtype`: of the pools.

    Raises CheckpointError if a file of the model cannot be read.
    """
    if not deployment.cache.is_on:
        return ""
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    layout = BLOCK_TOKENS, config.num_hidden_layers, config.latent_dim
    _add(
        digest,
        VERSION,
        repr(layout).encode(),
        dtype.encode(),
        deployment.wire.encode(),
        deployment.device.encode(),
    )
    _add(digest, os.environ.get(KERNELS, "").encode())
    folder = Path(deployment.model)
    try:
        _add(digest, (folder / "config.json").read_bytes())
        files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for of_file in threads.map(_digest_of, files):
                _add(digest, of_file)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder}: cannot be read ({error.strerror})."
        ) from error
    return digest.hexdigest()


def _add(digest: blake2b, *parts: bytes) -> None:
    """Each with its length: what is at the end of one cannot be taken for the beginning of the
    next.
    """
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)


def _digest_of(path: Path) -> bytes:
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        _add(digest, path.name.encode(), struct.pack("<Q", size))
        if size <= WHOLE_BYTES:
            _add(digest, path.read_bytes())
            return digest.digest()
        start = os.pread(file.fileno(), 8, 0)
        header_bytes = min(struct.unpack("<Q", start)[0], _HEADER_MAX_BYTES, size - 8)
        header = os.pread(file.fileno(), header_bytes, 8)
        _add(digest, header)
        for offset in _sample_offsets(header, size):
            _add(digest, os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return digest.digest()


def _sample_offsets(header: bytes, size: int) -> list[int]:
    """Where to look: in the middle of every piece of every tensor, and over the file where there
    are few of them.
    """
    data_at = 8 + len(header)
    spans: list[tuple[int, int]] = []
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        # Where it is no header, the model's loader will say so, and samples over the whole do.
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
