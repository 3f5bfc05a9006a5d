"""Input of a micro-batch's forward pass: packed tokens, their positions, and the location of their
KV.

Shapes: T packed tokens, B decode rows, M blocks of a request, P blocks, L layers, S tokens of a
block, D values of an entry, R rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hadal.core.arrays import Ints
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import Chunk


@dataclass(frozen=True)
class Span:
    """One chunk within the packed tokens."""

    first: int
    """Packed row of the chunk's first token."""
    num_tokens: int
    start: int
    """Position of the chunk's first token = number of earlier tokens, which are in the cache."""
    context_rows: Tensor | None
    """Cache rows of the earlier tokens in layer 0 (see `cache_rows`); None if there are none."""


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of one or several prompts, packed one after the other."""

    cache_PLSD: Tensor
    tokens_T: Tensor
    cos_sin_TR: Tensor
    rows_T: Tensor
    """Cache row of each token's entry (layer 0)."""
    spans: tuple[Span, ...]
    final_chunks: tuple[int, ...]
    """Indices of chunks that need logits after their last token, ascending."""
    final_rows: Tensor
    """Packed row of the last token of each of `final_chunks`."""
    block_table_TM: Tensor
    """Block ids of each token's request, int32, for absorbed attention."""
    lengths_T: Tensor
    """Number of positions that each token sees, itself included, for absorbed attention."""
    is_selecting: bool
    """True if a token sees more positions than it attends to; an indexer then selects them."""

    def write(self, layer_index: int, entries_TD: Tensor) -> None:
        _write(self.cache_PLSD, self.rows_T, layer_index, entries_TD)

    def context(self, span: Span, layer_index: int) -> Tensor:
        """Return the cached entries [start, D] before the span."""
        assert span.context_rows is not None
        return self.cache_PLSD.flatten(0, 2).index_select(
            0, span.context_rows + layer_index * BLOCK_TOKENS
        )


@dataclass(frozen=True)
class DecodeBatch:
    """Batch of one token per row. A request with drafts to verify has several rows."""

    cache_PLSD: Tensor
    tokens_B: Tensor
    cos_sin_BR: Tensor
    rows_B: Tensor
    block_table_BM: Tensor
    lengths_B: Tensor
    """Number of positions that each token sees, itself included."""
    is_selecting: bool
    """True if a token sees more positions than it attends to; an indexer then selects them."""
    first: int = 0
    """First position that is attended to: 1 in an MTP module, which was trained without 0."""

    def write(self, layer_index: int, entries_BD: Tensor) -> None:
        _write(self.cache_PLSD, self.rows_B, layer_index, entries_BD)


def _write(cache_PLSD: Tensor, rows_T: Tensor, layer_index: int, entries_TD: Tensor) -> None:
    cache_PLSD.flatten(0, 2).index_copy_(
        0, rows_T + layer_index * BLOCK_TOKENS, entries_TD.to(cache_PLSD.dtype)
    )


def cache_rows(blocks: np.ndarray, positions: np.ndarray, num_layers: int) -> np.ndarray:
    """Return each position's row in the cache viewed as [P*L*S, D], for layer 0 (layer l: + l*S)."""
    rows: np.ndarray = (
        blocks[positions // BLOCK_TOKENS] * (num_layers * BLOCK_TOKENS) + positions % BLOCK_TOKENS
    )
    return rows


def prefill_batch(
    chunks: Sequence[Chunk],
    wanted: Sequence[int],
    cache_PLSD: Tensor,
    cos_sin: Tensor,
    index_topk: int | None = None,
) -> PrefillBatch:
    """Pack `chunks`; no chunk may be empty. `wanted`: ascending indices of the chunks that need
    logits. `index_topk`: from the model's config; None without an indexer.
    """
    device, num_layers = cache_PLSD.device, cache_PLSD.shape[1]
    spans: list[Span] = []
    rows, positions = [], []
    first = 0
    for chunk in chunks:
        end = chunk.start + len(chunk.tokens)
        chunk_rows = cache_rows(np.asarray(chunk.block_ids), np.arange(end), num_layers)
        context = torch.from_numpy(chunk_rows[: chunk.start]).to(device) if chunk.start else None
        spans.append(Span(first, len(chunk.tokens), chunk.start, context))
        rows.append(chunk_rows[chunk.start :])
        positions.append(np.arange(chunk.start, end))
        first += len(chunk.tokens)
    final_rows = [spans[i].first + spans[i].num_tokens - 1 for i in wanted]
    tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in chunks])
    return PrefillBatch(
        cache_PLSD=cache_PLSD,
        tokens_T=torch.from_numpy(tokens).to(device),
        cos_sin_TR=cos_sin[torch.from_numpy(np.concatenate(positions)).to(device)],
        rows_T=torch.from_numpy(np.concatenate(rows)).to(device),
        spans=tuple(spans),
        final_chunks=tuple(wanted),
        final_rows=torch.tensor(final_rows, dtype=torch.int64, device=device),
        block_table_TM=torch.from_numpy(_block_table(chunks)).to(device),
        lengths_T=torch.from_numpy(np.concatenate(positions) + 1).to(device),
        is_selecting=index_topk is not None
        and any(span.start + span.num_tokens > index_topk for span in spans),
    )


def _block_table(chunks: Sequence[Chunk]) -> np.ndarray:
    """Return [T, M] int32: blocks of each token's chunk, padded with the scratch block."""
    width = max(len(chunk.block_ids) for chunk in chunks)
    table = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in zip(table, chunks, strict=True):
        row[: len(chunk.block_ids)] = chunk.block_ids
    return table.repeat([len(chunk.tokens) for chunk in chunks], axis=0)


def decode_batch(
    tokens_B: Tensor,
    positions_B: Tensor,
    block_table_BM: Tensor,
    cache_PLSD: Tensor,
    cos_sin: Tensor,
    index_topk: int | None = None,
    first: int = 0,
) -> DecodeBatch:
    """Compute cache rows and seen positions of these tokens. Each row of `block_table_BM` must
    contain the block of its token.
    """
    positions_B = positions_B.long()
    block_B = block_table_BM.gather(1, (positions_B // BLOCK_TOKENS)[:, None])[:, 0].long()
    return DecodeBatch(
        cache_PLSD=cache_PLSD,
        tokens_B=tokens_B,
        cos_sin_BR=cos_sin[positions_B],
        rows_B=block_B * (cache_PLSD.shape[1] * BLOCK_TOKENS) + positions_B % BLOCK_TOKENS,
        block_table_BM=block_table_BM,
        lengths_B=positions_B + 1,
        is_selecting=index_topk is not None and int(positions_B.max()) >= index_topk,
        first=first,
    )


def take(values: Tensor, *index: Ints) -> Tensor:
    """Return values[index]. Use numpy on a CPU: on a busy machine torch's threads need milliseconds
    to wake, even to copy 50 KB (LOG.md, drafts).
    """
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy()[index])
    return values[tuple(torch.from_numpy(rows).to(values.device) for rows in index)]


def put(values: Tensor, new: Tensor | float, *index: Ints) -> None:
    """Assign values[index] = new; see `take`."""
    if values.device.type == "cpu":
        values.numpy()[index] = new.numpy() if isinstance(new, Tensor) else new
    else:
        values[tuple(torch.from_numpy(rows).to(values.device) for rows in index)] = new


def likeliest(logits_NV: Tensor) -> Ints:
    """Return each row's most likely token, [N]."""
    if logits_NV.device.type == "cpu":
        found: Ints = logits_NV.numpy().argmax(-1)
        return found
    return logits_NV.argmax(-1).cpu().numpy()
