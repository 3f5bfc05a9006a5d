"""What drawing a step's tokens takes: microseconds by vocabulary, batch and what is asked for.

`python -m bench.sampling [--quick]`. Every figure is the best of many calls. Goes through the
Sampler alone, as the Runner calls it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from bench.kernels import best
from hadal.core.plans import Sampling
from hadal.model.sampler import Sampler

VOCABULARIES = (4_096, 8_192, 129_280)
BATCHES = (1, 8, 32, 64)
KINDS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.6, seed=7),
    "top-k 50": Sampling(top_k=50, seed=7),
    "top-p .9": Sampling(top_p=0.9, seed=7),
    "top-p .9, flat": Sampling(top_p=0.9, seed=7),
    "min-p .05": Sampling(min_p=0.05, seed=7),
    "penalties": Sampling(
        presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.1, seed=7
    ),
    "5 log-probs": Sampling(temperature=0.0, num_logprobs=5),
}
SPREAD, FLAT = 3.0, 0.01
"""Standard deviation of the logits, and of rows that top-p cuts late."""
NUM_PROMPT_TOKENS = 1000


def sampler_of(sampling: Sampling, vocabulary: int, batch: int) -> Sampler:
    """All slots taken by requests of one kind, with a history for the penalties."""
    rng = np.random.default_rng(1)
    sampler = Sampler(batch, vocabulary)
    for slot in range(batch):
        prompt = rng.integers(0, vocabulary, NUM_PROMPT_TOKENS).tolist()
        sampler.join(slot, sampling, 0, prompt=prompt, output=prompt[:100])
    return sampler


def microseconds(sampling: Sampling, spread: float, vocabulary: int, batch: int, s: float) -> float:
    """One step's draw."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits_BV = torch.randn(batch, vocabulary, generator=generator) * spread
    sampler, slots_B = sampler_of(sampling, vocabulary, batch), np.arange(batch)
    return 1e6 * best(lambda: sampler.draw(logits_BV, slots_B), s)


def main(arguments: Sequence[str] = ()) -> None:
    """Print a table of microseconds a step, a line for each kind of request and vocabulary."""
    seconds = 0.05 if "--quick" in arguments else 0.3
    table = Table("sampling", "V", *(f"batch {batch}" for batch in BATCHES), title="us a step")
    for vocabulary in VOCABULARIES:
        for kind, sampling in KINDS.items():
            spread = FLAT if kind.endswith("flat") else SPREAD
            figures = (microseconds(sampling, spread, vocabulary, b, seconds) for b in BATCHES)
            table.add_row(kind, f"{vocabulary:,}", *(f"{us:,.0f}" for us in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
