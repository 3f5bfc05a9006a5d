"""Examples as tokens: rendered with the chat template, split into prompt and reply, and
concatenated.

Prompt and reply are encoded separately, as a server encodes a prompt and a model answers it. Batch
`index` of a seed is always the same, so a resumed run continues with the same batches.
"""

import json
import random
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache

import jinja2
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from evals.tasks import Example, sample_split
from evals.words import (
    ALL_LOWER,
    CITIES,
    COUNTED,
    FOODS,
    JOBS,
    MONTHS,
    NAMES,
    WEEKDAYS,
)
from train.tokenizer import (
    BOS,
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    CHAT_TEMPLATE,
    EOS,
    SEPARATOR,
    THINK_END,
)

_ENVIRONMENT = jinja2.Environment()
_ENVIRONMENT.filters["tojson"] = json.dumps
_TEMPLATE = _ENVIRONMENT.from_string(CHAT_TEMPLATE)
PAD_ID = 2
# Relative frequencies of the tasks. Tasks that compute, sort or search a text are learned last; an
# example of tools or schemas has the most tokens.
WEIGHTS = {
    "arithmetic": 16,
    "sort": 20,
    "reverse": 8,
    "letters": 12,
    "dates": 11,
    "reading": 22,
    "talk": 8,
    "followup": 12,
    "decline": 8,
    "tools": 16,
    "schema": 12,
}
LONG_SHARE = 0.07
"""Share of batches that begin with a long prompt, which takes up to nearly all tokens of the batch."""
DIRECT_SHARE = 0.04
"""Share of the examples of the tasks in `_DIRECT` without reasoning, as if a user switched it off."""
_DIRECT = {"talk", "decline", "reading", "schema", "tools"}
SPELLED_SHARE = 0.16
"""Share of the examples in which some words are split into letters, as unknown words are."""
_CONTENT = frozenset(
    (
        *ALL_LOWER,
        *CITIES,
        *COUNTED,
        *FOODS,
        *JOBS,
        *MONTHS,
        *NAMES,
        *WEEKDAYS,
        *map(str.lower, NAMES),
    )
)


@dataclass(frozen=True)
class Batch:
    """Sequences, concatenated. `bounds` has the start of each sequence, and the end. `targets` is the next
    token if it is part of a reply, else -100.

    `next_tokens` feeds the MTP layer and `mtp_targets` is the token after the next. `second_tokens`
    feeds the layer's second application, and `second_targets` is its target, the third token from
    here. Past the end of a sequence, targets are -100 and tokens 0. `sequence` is the number of each
    token's sequence; `examples` has the example of each sequence except padding.
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


def render_prompt(example: Example, direct: bool = False) -> str:
    """Return the prompt up to `<think>` and its line break; if `direct`, up to the end of an empty
    reasoning. A forced call does not appear in the prompt: the server's grammar enforces it.
    """
    text = _TEMPLATE.render(
        messages=example.messages,
        tools=list(example.tools) or None,
        answer_schema=example.schema,
        bos_token=BOS,
        eos_token=EOS,
        add_generation_prompt=True,
    )
    return text + (f"\n{THINK_END}\n\n" if direct else "")


def render_calls(example: Example) -> str:
    """Return the calls as DeepSeek-V3.1 writes them."""
    calls = (
        f"{CALL}{name}{SEPARATOR}{json.dumps(arguments, ensure_ascii=False)}{CALL_END}"
        for name, arguments in example.calls
    )
    return f"{CALLS}{''.join(calls)}{CALLS_END}"


def render_reply(example: Example, direct: bool = False) -> str:
    """Return the reply that the model should write after the prompt."""
    answer = render_calls(example) if example.calls else example.answer
    return ("" if direct else f"{example.reasoning}\n{THINK_END}\n\n") + answer + EOS


def encode(
    tokenizer: Tokenizer, example: Example, direct: bool = False
) -> tuple[list[int], list[int]]:
    """Return (prompt ids, reply ids)."""
    prompt = tokenizer.encode(render_prompt(example, direct), add_special_tokens=False).ids
    return prompt, tokenizer.encode(render_reply(example, direct), add_special_tokens=False).ids


@cache
def _letters(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Return token -> ids of its letters, for every word that is not in the tasks' contents."""
    found = {}
    for piece, token in tokenizer.get_vocab().items():
        word = piece.removeprefix("Ġ")
        if len(word) > 2 and word.isalpha() and word.isascii() and word not in _CONTENT:
            first = piece[: len(piece) - len(word) + 1]
            found[token] = [tokenizer.token_to_id(each) for each in (first, *word[1:])]
    return found


def _some_spelled(rng: random.Random, tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """Return the prompt with some known words split into letters. This teaches the meaning of a
    word from its letters, and so the likely meaning of words outside the vocabulary.
    """
    letters, share = _letters(tokenizer), rng.choice((0.1, 0.3, 0.6))
    return [
        each
        for token in prompt
        for each in (letters[token] if token in letters and rng.random() < share else (token,))
    ]


def _ahead(values: list[int], distance: int, fill: int) -> list[int]:
    """Return for each place the value `distance` places later, or `fill` past the end."""
    return (values[distance:] + [fill] * distance)[: len(values)]


def pack(
    encoded: list[tuple[list[int], list[int]]], examples: list[Example], num_tokens: int = 0
) -> Batch:
    """Concatenate encoded examples; a last sequence of padding fills up to `num_tokens`."""
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


def make_batch(
    tokenizer: Tokenizer, seed: int, index: int, num_tokens: int, want_held_out: bool = False
) -> Batch:
    """Return batch `index`: `num_tokens` tokens of mixed tasks from one side of the split.

    All batches have one size, because bf16 products are recompiled for every shape.
    """
    rng = random.Random(f"{seed} {index} {want_held_out}")
    tasks = list(WEIGHTS)
    encoded: list[tuple[list[int], list[int]]] = []
    examples: list[Example] = []
    left, misses, is_long = num_tokens, 0, rng.random() < LONG_SHARE
    while misses < 6:
        task = rng.choices(tasks, list(WEIGHTS.values()))[0]
        if is_long:
            task = "long"
        example = sample_split(rng, task, want_held_out)
        may_be_direct = task in _DIRECT and not want_held_out
        direct = may_be_direct and rng.random() < DIRECT_SHARE
        prompt, reply = encode(tokenizer, example, direct)
        if rng.random() < SPELLED_SHARE and not want_held_out:
            prompt = _some_spelled(rng, tokenizer, prompt)
        if len(prompt) + len(reply) > left:
            misses += not is_long
            continue
        is_long = False
        encoded.append((prompt, reply))
        examples.append(example)
        left -= len(prompt) + len(reply)
    return pack(encoded, examples, num_tokens)


class _Numbered(Dataset):
    """Batches of a seed by their numbers, without the examples."""

    def __init__(self, tokenizer: Tokenizer, seed: int, num_tokens: int) -> None:
        self._of = tokenizer, seed, num_tokens

    def __getitem__(self, index: int) -> Batch:
        tokenizer, seed, num_tokens = self._of
        return replace(make_batch(tokenizer, seed, index, num_tokens), examples=())


def made_ahead(
    tokenizer: Tokenizer, seed: int, num_tokens: int, numbers: range
) -> DataLoader[Batch]:
    """Return the batches of these numbers. A worker process makes them a few ahead, so that a step
    does not wait for its batch.
    """
    return DataLoader(
        _Numbered(tokenizer, seed, num_tokens),
        batch_size=None,
        sampler=numbers,
        num_workers=1,
        prefetch_factor=4,
    )
