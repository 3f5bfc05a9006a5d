"""Chats of several turns with the shipped model. Every prompt contains the earlier turns, as
clients send it.

Prompt k of a chat is prompt k-1, its greedy answer and a new question, in token ids, so the tokens
that the cache must find are known exactly. Half of the chats keep the whole answer in their
history. The others keep only the text after its reasoning, as DeepSeek-R1's template does. Chats
share system prompts, and first prompts end at or beside block borders.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import httpx
import torch

from evals.run import held_out_examples
from hadal.core.messages.base import BLOCK_TOKENS
from hadal.gateway.text.vocabulary import Vocabulary, read_vocabulary
from hadal.model.load import load_weights
from hadal.reference.params import ModelWeights
from hadal.runtime.resolve import model_folder
from tests.dist.oracle import FULL, Case, plain_answer
from tests.waiting import PATIENCE_S

MAX_TOKENS = 80
NUM_TURNS = 4
EVERYDAY_SEED = 7
SYSTEM_TOKENS = (150, 64, 20)
"""Lengths of the system prompts that chats share, in tokens."""
FIRST = (
    (64, 2),
    (0, 0),
    (63, 2),
    (192, 0),
    (65, 2),
    (128, 1),
    (448, 1),
    (0, 0),
    (127, 1),
    (129, 1),
)
"""(tokens, index of the system prompt) of each chat's first prompt, in rotation. 0 tokens: only the
system prompt and a question, without text that fills it up to a length.
"""
QUESTION_TOKENS = 32
"""Longest question in a prompt of a given length, in tokens."""
MAX_QUESTION_TOKENS = 128

Chat = list[Case]
"""Turns of one chat."""


@dataclass(frozen=True)
class Answer:
    """The server's answer to one turn."""

    tokens: tuple[int, ...]
    hit: int
    """Prompt tokens read from the cache, as the reply's usage reports."""
    miss: int


class ChatMaker:
    """Maker of chats, answered with `weights`. Equal seeds and numbers of chats give equal chats."""

    def __init__(self, seed: int, weights: ModelWeights | None = None) -> None:
        folder = model_folder("")
        self._rng = random.Random(seed)
        self._vocabulary: Vocabulary = read_vocabulary(folder)
        torch.set_num_threads(1)  # Two threads would wait for each other on a busy machine.
        self._weights = weights or load_weights(folder)
        examples = held_out_examples(24, seed)
        self._questions = [example.messages[-1]["content"] for example in examples]
        self._systems = [self.text_ids(size) for size in SYSTEM_TOKENS]
        self._eos = self._weights.config.eos_token_ids[0]
        self._user = self._ids("<｜User｜>")
        self._assistant = self._ids("<｜Assistant｜><think>\n")
        self._bos = self._ids("<｜begin▁of▁sentence｜>")
        self._think_close = self._ids("</think>")[0]

    def text_ids(self, num_tokens: int) -> tuple[int, ...]:
        """Return `num_tokens` tokens of plain text."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += self._vocabulary.encode_plain(self._rng.choice(self._questions) + " ")
        return tuple(ids[: max(0, num_tokens)])

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        """Return a prompt of `num_tokens` tokens that other calls are unlikely to return."""
        asked = (*self._question(QUESTION_TOKENS), *self._assistant)
        return (*self._bos, *self.text_ids(num_tokens - len(asked) - len(self._bos)), *asked)

    def chats(
        self, num_chats: int, num_turns: int = NUM_TURNS, max_tokens: int = MAX_TOKENS
    ) -> list[Chat]:
        """Return chats with the answers of the plain single-request loop. With one seed, fewer chats
        are the first ones of more, and so are turns if no chat has more than NUM_TURNS.
        """
        return [self._chat(number, num_turns, max_tokens) for number in range(num_chats)]

    def answer(self, prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> Case:
        """Return the prompt with the plain loop's answer."""
        return Case(prompt, plain_answer(self._weights, prompt, max_tokens))

    def _chat(self, number: int, num_turns: int, max_tokens: int) -> Chat:
        num_tokens, system = FIRST[number % len(FIRST)]
        start = (*self._bos, *self._systems[system])
        asked = (
            *self._question(QUESTION_TOKENS if num_tokens else MAX_QUESTION_TOKENS),
            *self._assistant,
        )
        prompt = (*start, *self.text_ids(num_tokens - len(start) - len(asked)), *asked)
        questions = [self._question() for _ in range(max(NUM_TURNS, num_turns))]
        turns: Chat = []
        for question in questions[:num_turns]:
            turns.append(self.answer(prompt, max_tokens))
            history = self._history(turns[-1], keeps_all=number % 2 == 0)
            prompt = (*history, *question, *self._assistant)
        return turns

    def _history(self, turn: Case, keeps_all: bool) -> tuple[int, ...]:
        output = turn.output if turn.output[-1] == self._eos else (*turn.output, self._eos)
        if keeps_all or self._think_close not in output:
            return (*turn.prompt, *output)
        answer = output[output.index(self._think_close) + 1 :]
        return (*turn.prompt[: 1 - len(self._assistant)], *answer)

    def _question(self, max_tokens: int = MAX_QUESTION_TOKENS) -> tuple[int, ...]:
        while True:
            ids = (*self._user, *self._vocabulary.encode_plain(self._rng.choice(self._questions)))
            if len(ids) <= max_tokens:
                return ids

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._vocabulary.encode_controlled(text))


def everyday_chats(
    num_chats: int, seed: int, num_turns: int = NUM_TURNS, weights: ModelWeights | None = None
) -> list[Chat]:
    """Return chats for `seed` at full sizes, else for EVERYDAY_SEED, which all files share so that
    the plain loop answers them once.
    """
    return ChatMaker(seed if FULL else EVERYDAY_SEED, weights).chats(num_chats, num_turns)


class Named:
    """Prediction of the blocks a cache can have: the full blocks of the texts passed to `add`."""

    def __init__(self) -> None:
        self._prefixes: set[tuple[int, ...]] = set()

    def add(self, tokens: tuple[int, ...]) -> None:
        """Record that all of these tokens have KV."""
        self._prefixes |= {
            tokens[:end] for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        }

    def hit(self, prompt: tuple[int, ...]) -> int:
        """Return the number of a prompt's tokens that can be found: whole blocks from the start,
        never the last position.
        """
        end = 0
        while end + BLOCK_TOKENS < len(prompt) and prompt[: end + BLOCK_TOKENS] in self._prefixes:
            end += BLOCK_TOKENS
        return end


def with_kv(case: Case) -> tuple[int, ...]:
    """Return the tokens that have KV after decode: all but the last one, which was only drawn."""
    return (*case.prompt, *case.output[:-1])


async def ask(
    client: httpx.AsyncClient,
    model: str,
    case: Case,
    max_tokens: int = MAX_TOKENS,
    *,
    cache_salt: str = "",
) -> Answer:
    """Send one turn, greedy. Raises httpx.HTTPError if the server is gone."""
    body = {
        "model": model,
        "prompt": list(case.prompt),
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_token_ids": True,
        **({"cache_salt": cache_salt} if cache_salt else {}),
    }
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    fields = reply.json()
    usage = fields["usage"]
    answer = Answer(
        tuple(fields["choices"][0]["token_ids"]),
        usage["prompt_cache_hit_tokens"],
        usage["prompt_cache_miss_tokens"],
    )
    assert usage["prompt_tokens"] == len(case.prompt)
    assert usage["prompt_tokens_details"]["cached_tokens"] == answer.hit
    return answer


def client_for(url: str, concurrency: int, key: str = "") -> httpx.AsyncClient:
    """Return a client that sends `key` as the API key and allows `concurrency` requests at once."""
    limits = httpx.Limits(max_connections=concurrency + 4)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, headers=headers)


def talk(
    url: str,
    model: str,
    chats: Sequence[Chat],
    *,
    concurrency: int = 12,
    key: str = "",
    max_tokens: int = MAX_TOKENS,
    while_running: Callable[[], Awaitable[None]] | None = None,
) -> list[list[Answer]]:
    """Return the answers to all turns of each chat. A chat's turns are sent in order, `concurrency`
    chats at once, while `while_running` runs beside them.
    """

    async def run() -> list[list[Answer]]:
        gate = asyncio.Semaphore(concurrency)
        async with client_for(url, concurrency, key) as client:

            async def hold(chat: Chat) -> list[Answer]:
                async with gate:
                    return [await ask(client, model, case, max_tokens) for case in chat]

            disturbance = (
                asyncio.ensure_future(while_running()) if while_running is not None else None
            )
            answers = await asyncio.gather(*(hold(chat) for chat in chats))
            if disturbance is not None:
                await disturbance
            return list(answers)

    return asyncio.run(run())


def wrong(chats: Sequence[Chat], answers: Sequence[Sequence[Answer]]) -> list[str]:
    """Return errors in tokens and in the usage of prompts, with enough detail to repeat them."""
    found = []
    for number, (chat, replies) in enumerate(zip(chats, answers, strict=True)):
        for turn, (case, answer) in enumerate(zip(chat, replies, strict=True)):
            where = f"chat {number} turn {turn}, prompt of {len(case.prompt)} tokens"
            if answer.tokens != case.output:
                pairs = enumerate(zip(case.output, answer.tokens, strict=False))
                first = next((i for i, (a, b) in pairs if a != b), "length")
                found.append(
                    f"{where}: {answer.hit} cached, first difference at output {first} of"
                    f" {len(case.output)}"
                )
            if answer.hit + answer.miss != len(case.prompt):
                found.append(f"{where}: {answer.hit} hit + {answer.miss} missed")
            if answer.hit % BLOCK_TOKENS or not 0 <= answer.hit < len(case.prompt):
                found.append(
                    f"{where}: a hit of {answer.hit} is no number of full blocks before the last"
                    " position"
                )
    return found


def num_hit(answers: Sequence[Sequence[Answer]]) -> int:
    """Return the prompt tokens of all answers that came from the cache."""
    return sum(answer.hit for replies in answers for answer in replies)
