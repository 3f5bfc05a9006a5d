"""Prompts for the cache replay as names of their 64-token blocks: Mooncake's traces where they are,
or generated ones.

Mooncake names blocks of 512 tokens; equal numbers mean equal text from the first token on. Each
becomes 8 names here, and the last one of a prompt, which is seldom full, as many as are full. Of
generated text the traces have the length only: the next turn holds it, but under numbers that say
nothing of where they come from (see `continued_tokens`).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from bench.balance_loads import BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from bench.shared_data import shared_data
from hadal.core.cache import NAME_BYTES
from hadal.core.messages import BLOCK_TOKENS
from hadal.sim.plan.traffic import mooncake_rows

TRACES = ("mooncake_conversation.jsonl.gz", "mooncake_synthetic.jsonl.gz")
NAMES_ID = TRACE_BLOCK_TOKENS // BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: what it would look up, and what it leaves behind."""

    at_s: float
    num_tokens: int
    num_output: int
    """Tokens it generated."""
    ids: tuple[int, ...]
    """Of its text's parts."""
    names_id: int = NAMES_ID
    """Blocks of a part."""

    @property
    def block_tokens(self) -> int:
        return TRACE_BLOCK_TOKENS // self.names_id

    @property
    def num_full(self) -> int:
        """Full blocks: these have names."""
        return self.num_tokens // self.block_tokens

    @property
    def num_usable(self) -> int:
        """Blocks that can be found rather than computed: the last position never is."""
        return (self.num_tokens - 1) // self.block_tokens

    @property
    def numbers(self) -> list[int]:
        """Of its full blocks, unique in the trace."""
        return [part * self.names_id + i for part in self.ids for i in range(self.names_id)][
            : self.num_full
        ]

    @property
    def chain(self) -> bytes:
        """The names of its full blocks."""
        return b"".join([number.to_bytes(NAME_BYTES, "big") for number in self.numbers])


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts in the order they arrive."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    def num_blocks(self) -> int:
        """The working set: different blocks in all."""
        return len({number for prompt in self.prompts for number in prompt.numbers})

    def halves(self) -> tuple[Trace, Trace]:
        """Two traces, each of which begins with nothing."""
        middle = len(self.prompts) // 2
        first, second = self.prompts[:middle], self.prompts[middle:]
        return Trace(f"{self.name} 1", first), Trace(f"{self.name} 2", second)

    def in_parts(self) -> Trace:
        """The same with a part as the block."""
        return Trace(self.name, tuple(replace(prompt, names_id=1) for prompt in self.prompts))


def read(path: Path) -> Trace:
    """One of Mooncake's."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        prompts = tuple(Prompt(*row) for row in mooncake_rows(lines))
    return Trace(path.name.split(".")[0].removeprefix("mooncake_"), prompts)


def find() -> list[Trace]:
    """Mooncake's traces, as far as they are here."""
    folder = shared_data()
    return (
        []
        if folder is None
        else [read(folder / name) for name in TRACES if (folder / name).is_file()]
    )


def chats(seed: int, num_chats: int = 1500, share_going_on: float = 0.3) -> Trace:
    """Conversations that all begin with one system prompt: most end after a turn, the others go on
    three times in four, after pauses that are lognormal around two minutes. Two begin every second,
    and with the last one the trace ends.
    """
    random = Random(seed)
    events: list[tuple[float, int, Prompt]] = []
    next_id = 1
    for chat in range(num_chats):
        at_s, ids, goes_on = chat * 0.5, [0], random.random() < share_going_on
        while True:
            num_new = 1 + min(30, int(random.lognormvariate(1.2, 0.8)))
            ids += range(next_id, next_id + num_new)
            next_id += num_new
            events.append(
                (at_s, chat, Prompt(at_s, len(ids) * TRACE_BLOCK_TOKENS, 300, tuple(ids)))
            )
            at_s += random.lognormvariate(4.8, 0.9)
            if not goes_on or random.random() > 0.75 or at_s > num_chats * 0.5:
                break
    return Trace("chats", tuple(prompt for _, _, prompt in sorted(events, key=_order)))


def continued_tokens(prompts: Iterable[Prompt]) -> Iterator[int]:
    """By prompt: how far it may repeat an earlier prompt and the answer to it, in tokens of full
    blocks.

    The most there can be: a prompt that has all full parts of an earlier one and is longer than
    that and its answer.
    """
    end_to_length: dict[int, int] = {}
    for prompt in prompts:
        num_parts = prompt.num_tokens // TRACE_BLOCK_TOKENS
        longest = max((end_to_length.get(part, 0) for part in prompt.ids[:num_parts]), default=0)
        yield longest // BLOCK_TOKENS * BLOCK_TOKENS if longest <= prompt.num_tokens else 0
        if num_parts:
            end_to_length[prompt.ids[num_parts - 1]] = prompt.num_tokens + prompt.num_output


def _order(event: tuple[float, int, Prompt]) -> tuple[float, int]:
    return event[:2]
