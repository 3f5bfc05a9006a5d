"""Prefill steps of one rank: one forward pass over chunks of prompts, the first tokens after
complete prompts, and the MTP module's entries.

Independent of requests, the wire and peers. Each chunk that draws a token uses a slot of the sampler
for that step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hadal.core.messages.base import BLOCK_TOKENS
from hadal.core.plans import NO_FOLLOWING, Chunk, PrefillPlan, Score
from hadal.model.batch import PrefillBatch
from hadal.model.deepseek import DeepseekV3
from hadal.model.drafts import PromptTails
from hadal.model.execute import Recorder
from hadal.model.mtp import MtpModule
from hadal.model.sampler import NOTHING_DRAWN, Drawn, Sampler
from hadal.overlap.plan import schedule_named

TAILS = 4
"""Number of prompts with a stored last hidden state, per sampler slot."""


class PrefillSteps:
    """Executor of prefill plans on a model and its cache."""

    def __init__(
        self,
        model: DeepseekV3,
        max_slots: int,
        module: MtpModule | None,
        new_sampler: Callable[[], Sampler],
    ) -> None:
        """`max_slots`: most chunks per step that draw a token. `module` None: write no MTP entries."""
        self._model = model
        self._max_slots = max_slots
        self._module = module
        self._tails = PromptTails(TAILS * max_slots) if module is not None else None
        self._new_sampler = new_sampler
        self._sampler = new_sampler()

    def restart(self) -> None:
        """Make a new sampler, because a failed step may have left state in the old one."""
        self._sampler = self._new_sampler()

    def run(self, plan: PrefillPlan, recorder: Recorder) -> tuple[list[int], Drawn]:
        """Run one step. Return the indices of the chunks that draw a token, and the tokens. Raises
        ValueError if more than `max_slots` chunks draw.
        """
        parts = (plan.chunks, plan.second)[: plan.num_micro_batches]
        wanted = [
            [index for index, chunk in enumerate(part) if chunk.sampling is not None]
            for part in parts
        ]
        if sum(map(len, wanted)) > self._max_slots:
            raise ValueError(
                f"{sum(map(len, wanted))} chunks draw a token; this rank was made for at most"
                f" {self._max_slots}"
            )
        cache, chunks = self._model.cache, [*plan.chunks, *plan.second]
        cache.fetch(plan.fetches)
        keys = [index for index, chunk in enumerate(chunks) if chunk.sampling is not None]
        for slot, key in enumerate(keys):
            self._join(slot, chunks[key])
        slots, ones = np.arange(len(keys)), np.ones(len(keys), np.int64)
        self._sampler.begin(slots, ones, ones)
        tails = self._tails
        scores: dict[int, tuple[Score, ...]] = {}

        def see(part: int, batch: PrefillBatch, hidden_TD: Tensor) -> None:
            first = part * len(plan.chunks)
            scores.update({first + i: of for i, of in self._scores(parts[part], batch, hidden_TD)})
            if tails is not None:
                self._write_entries_of(parts[part], batch, hidden_TD, tails)

        is_seen = tails is not None or any(chunk.num_scores >= 0 for chunk in chunks)
        logits = self._model.prefill_split(
            parts,
            wanted,
            schedule_named(plan.schedule),
            recorder,
            on_hidden=see if is_seen else None,
        )
        # Publish written blocks before the step is reported as done: from then on decode units,
        # prefix look-ups and the disk cache use them.
        written = sorted({block_id for chunk in chunks for block_id in _written_blocks(chunk)})
        if not keys:
            cache.publish(written)
            return [], replace(NOTHING_DRAWN, scores=scores)
        masks = self._sampler.masks(slots, ones, ones, recorder)
        recorder.begin("draw")
        drawn = self._sampler.draw(torch.cat(logits), slots, masks=masks)
        if tails is not None:
            self._write_first_entries([chunks[key] for key in keys], drawn.tokens, tails)
        cache.publish(written)
        for slot in range(len(keys)):
            self._sampler.leave(slot)
        recorder.end("draw")
        failed = {keys[slot]: reason for slot, reason in drawn.failed.items()}
        return keys, replace(drawn, failed=failed, scores=scores)

    def _scores(
        self, chunks: Sequence[Chunk], batch: PrefillBatch, hidden_TD: Tensor
    ) -> Iterator[tuple[int, tuple[Score, ...]]]:
        """Yield (index, scores of its prompt tokens) for each chunk that requests scores."""
        for index, (chunk, span) in enumerate(zip(chunks, batch.spans, strict=True)):
            if chunk.num_scores < 0:
                continue
            tokens = chunk.tokens[1:]
            if chunk.following != NO_FOLLOWING:
                tokens += (chunk.following,)
            rows_TD = hidden_TD[span.first : span.first + len(tokens)]
            num_top = min(chunk.num_scores, self._model.config.vocab_size)
            yield index, self._model.scores(rows_TD, tokens, num_top)

    def _write_entries_of(
        self, chunks: Sequence[Chunk], batch: PrefillBatch, hidden_TD: Tensor, tails: PromptTails
    ) -> None:
        """Write the MTP module's entries of these chunks."""
        assert self._module is not None
        before = [tails.before(chunk) for chunk in chunks]
        self._module.write_entries(batch, hidden_TD, before)
        for chunk, span in zip(chunks, batch.spans, strict=True):
            tails.keep(chunk, hidden_TD[span.first + span.num_tokens - 1])

    def _write_first_entries(
        self, chunks: Sequence[Chunk], tokens: np.ndarray, tails: PromptTails
    ) -> None:
        """Write the MTP entry of each drawn token if the prompt's last block has space for it:
        decode expects it in that block.
        """
        ends = np.array([chunk.start + len(chunk.tokens) for chunk in chunks])
        hidden = torch.stack(tails.behind(chunks))
        rows = np.flatnonzero(ends % BLOCK_TOKENS)
        if not len(rows):
            return
        block_ids = [chunks[row].block_ids for row in rows.tolist()]
        table = np.zeros((len(rows), max(map(len, block_ids))), np.int32)
        for blocks, of_row in zip(table, block_ids, strict=True):
            blocks[: len(of_row)] = of_row
        assert self._module is not None
        self._module.write_rows(
            torch.from_numpy(tokens[rows]),
            torch.from_numpy(ends[rows]),
            torch.from_numpy(table),
            hidden[rows],
        )

    def _join(self, slot: int, chunk: Chunk) -> None:
        assert chunk.sampling is not None
        self._sampler.join(
            slot,
            chunk.sampling,
            chunk.output_index,
            prompt=chunk.prompt,
            output=chunk.output,
            stop_ids=chunk.stop_ids,
            min_tokens=chunk.min_tokens,
        )


def _written_blocks(chunk: Chunk) -> tuple[int, ...]:
    """Return the ids of the blocks that contain the chunk's own tokens."""
    return chunk.block_ids[chunk.start // BLOCK_TOKENS :]
