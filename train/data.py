"""Examples as tokens: the chat template rendered, split into prompt and reply, laid end to end.

The prompt and the reply are encoded apart, exactly as a server encodes a prompt and a model answers
it.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2
import torch
from tokenizers import Tokenizer
from torch import Tensor

from evals.tasks import TASKS, Example, sample_split
from train.tokenizer import BOS, CHAT_TEMPLATE, EOS, THINK_END

_TEMPLATE = jinja2.Template(CHAT_TEMPLATE)
PAD_ID = 2
# Harder tasks get more examples, and so do those whose replies are short.
WEIGHTS = {
    "arithmetic": 5,
    "sort": 7,
    "reverse": 4,
    "letters": 3,
    "dates": 3.5,
    "reading": 8,
    "talk": 2,
    "followup": 5,
}


@dataclass(frozen=True)
class Batch:
    """Sequences laid end to end. `targets` is the next token where it is part of a reply, else
    -100.

    `next_tokens` feeds the MTP layer and `mtp_targets` is the token after the next.
    `second_tokens` feeds the layer's second application, whose target `second_targets` is one
    further: the third token from here. None of them looks past the end of its sequence.
    `sequence` numbers the sequence of each token; `examples` are those sequences.
    """

    tokens: Tensor
    positions: Tensor
    bounds: Tensor
    targets: Tensor
    next_tokens: Tensor
    mtp_targets: Tensor
    second_tokens: Tensor
    second_targets: Tensor
    sequence: Tensor
    examples: tuple[Example, ...]


def render_prompt(example: Example) -> str:
    """Return the prompt up to and with `<think>` and the line break after it."""
    return _TEMPLATE.render(
        messages=example.messages, bos_token=BOS, eos_token=EOS, add_generation_prompt=True
    )


def render_reply(example: Example) -> str:
    """Return what the model should write after the prompt."""
    return f"{example.reasoning}\n{THINK_END}\n\n{example.answer}{EOS}"


def encode(tokenizer: Tokenizer, example: Example) -> tuple[list[int], list[int]]:
    """Return (prompt ids, reply ids)."""
    prompt = tokenizer.encode(render_prompt(example), add_special_tokens=False).ids
    return prompt, tokenizer.encode(render_reply(example), add_special_tokens=False).ids


def _ahead(values: list[int], distance: int, fill: int) -> list[int]:
    """Return for each place the value `distance` further on, or `fill` past the end."""
    return (values[distance:] + [fill] * distance)[: len(values)]


def pack(
    encoded: list[tuple[list[int], list[int]]], examples: list[Example], num_tokens: int = 0
) -> Batch:
    """Lay encoded examples end to end; a last sequence of padding fills up to `num_tokens`."""
    short = num_tokens - sum(len(prompt) + len(reply) for prompt, reply in encoded)
    if short > 0:
        encoded = [*encoded, ([PAD_ID] * short, [])]
    rows: dict[str, list[int]] = defaultdict(list)
    bounds = [0]
    for index, (prompt, reply) in enumerate(encoded):
        ids, size = prompt + reply, len(prompt) + len(reply)
        marked = [-100] * len(prompt) + reply
        rows["tokens"] += ids
        rows["positions"] += range(size)
        rows["targets"] += _ahead(marked, 1, -100)
        rows["next_tokens"] += _ahead(ids, 1, 0)
        rows["mtp_targets"] += _ahead(marked, 2, -100)
        rows["second_tokens"] += _ahead(ids, 2, 0)
        rows["second_targets"] += _ahead(marked, 3, -100)
        rows["sequence"] += [index] * size
        bounds.append(bounds[-1] + size)
    return Batch(
        bounds=torch.tensor(bounds),
        examples=tuple(examples),
        **{k: torch.tensor(v) for k, v in rows.items()},
    )


def batches(
    tokenizer: Tokenizer, seed: int, num_tokens: int, want_held_out: bool = False
) -> Iterator[Batch]:
    """Yield batches of exactly `num_tokens` tokens for ever, all tasks mixed, from one side of the
    split.

    One size for all, because the products in bf16 are compiled anew for every shape.
    """
    rng = random.Random(seed)
    weights = [WEIGHTS[task] for task in TASKS]
    encoded, examples, size = [], [], 0
    while True:
        example = sample_split(rng, rng.choices(TASKS, weights)[0], want_held_out)
        prompt, reply = encode(tokenizer, example)
        if size + len(prompt) + len(reply) > num_tokens:
            yield pack(encoded, examples, num_tokens)
            encoded, examples, size = [], [], 0
        encoded.append((prompt, reply))
        examples.append(example)
        size += len(prompt) + len(reply)
