"""Log-probabilities of a prompt's own tokens equal those of transformers, for all chunk sizes,
ranks, schedules and caches. Replies have the forms that evaluation harnesses and vLLM's clients
read.
"""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
import torch

from hadal.runtime.resolve import model_folder
from tests.dist.answers import events_of
from tests.dist.serving import RANKED, Server, StartServer
from tests.unit.model.checkpoints import dequantise
from tests.waiting import PATIENCE_S

TOLERANCE = 1e-4
OTHER_WAY = pytest.mark.more("tests/unit/roles/prefill has the scores of each chunk")
LENGTHS = (1, 2, 63, 64, 65, 130, 400)
Scores = list[tuple[float, int, list[float]]]
"""Scores of every token after the first: log-probability, rank, the five best log-probabilities."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """hadal-tiny in transformers."""
    from transformers import DeepseekV3ForCausalLM

    folder = tmp_path_factory.mktemp("fp32")
    dequantise(model_folder(""), folder)
    return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def logits_of(theirs: Any, prompt: list[int]) -> torch.Tensor:
    logits: torch.Tensor = theirs(torch.tensor([prompt])).logits[0]
    return logits


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts that are prefixes of the first one, so that a cache would find blocks of them."""
    rng = random.Random(3)
    tokens = [rng.randrange(20, 1500) for _ in range(max(LENGTHS))]
    return [tokens[:length] for length in sorted(LENGTHS, reverse=True)]


@pytest.fixture(scope="module")
def expected(theirs: Any, prompts: list[list[int]]) -> list[Scores]:
    scores: list[Scores] = []
    for prompt in prompts:
        logprobs_TV = logits_of(theirs, prompt).double().log_softmax(-1)
        of_prompt: Scores = []
        for row, token in zip(logprobs_TV, prompt[1:], strict=False):
            rank = 1 + int((row > row[token]).sum())
            of_prompt.append((float(row[token]), rank, row.topk(5)[0].tolist()))
        scores.append(of_prompt)
    return scores


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"model": server.model, "temperature": 0, **fields}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert isinstance(found, dict)
    return found


def close(ours: float, theirs: float) -> bool:
    return abs(ours - theirs) <= TOLERANCE


def assert_scored(server: Server, prompts: list[list[int]], expected: list[Scores]) -> None:
    body = {"prompt": prompts, "max_tokens": 2, "prompt_logprobs": 5}
    for prompt, choice, scores in zip(
        prompts, ask(server, **body)["choices"], expected, strict=True
    ):
        first, *told = choice["prompt_logprobs"]
        assert first is None
        assert len(told) == len(prompt) - 1
        for token, one, (logprob, rank, best) in zip(prompt[1:], told, scores, strict=True):
            assert close(one[str(token)]["logprob"], logprob)
            likelier = sorted((each["rank"], each["logprob"]) for each in one.values())
            assert all(close(ours[1], best[at]) for at, ours in enumerate(likelier[:5]))
            # Two almost equal tokens may change places.
            assert abs(one[str(token)]["rank"] - rank) <= 2


@pytest.mark.promise(
    "Such a prompt is computed completely: its blocks have no names, so none is found "
    "in a cache or left there."
)
@OTHER_WAY
@pytest.mark.slow("transformers is imported, and scores the prompts")
def test_one_rank(server: Server, prompts: list[list[int]], expected: list[Scores]) -> None:
    """Scores each prompt twice: the second request finds no block of the first."""
    for _ in range(2):
        assert_scored(server, prompts, expected)
        plain = ask(server, prompt=prompts[0], max_tokens=1)
        assert plain["choices"][0]["finish_reason"]
    cached = ask(server, prompt=prompts[0], max_tokens=1, prompt_logprobs=1)["usage"]
    assert cached["prompt_cache_hit_tokens"] == 0
    assert ask(server, prompt=prompts[0], max_tokens=1)["usage"]["prompt_cache_hit_tokens"] > 0


@OTHER_WAY
def test_ranks_small_chunks_two_micro_batches_and_drafts(
    borrow: StartServer, prompts: list[list[int]], expected: list[Scores]
) -> None:
    prefill = {**RANKED["prefill"], "min_split_tokens": 2}
    decode = {**RANKED["decode"], "drafts": 1}
    assert_scored(borrow(chunk_tokens=50, prefill=prefill, decode=decode), prompts, expected)


@pytest.mark.promise(
    "With scores, max_tokens: 0 draws one token that is neither shown nor charged."
)
def test_echo_is_what_harnesses_read(server: Server) -> None:
    """The reply has the fields that lm-evaluation-harness reads, for every prompt token and, with
    max_tokens 1, the drawn one.
    """
    text = "Once there was a red fox, é"
    for max_tokens in (1, 0):
        body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        reply = ask(server, **body)
        (choice,) = reply["choices"]
        assert choice["text"].startswith(text)
        assert reply["usage"]["completion_tokens"] == max_tokens
        found = choice["logprobs"]
        num = reply["usage"]["prompt_tokens"]
        assert {len(found[name]) for name in found} == {num + max_tokens}
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        for token, logprob, best in zip(
            *(found[name][1:num] for name in ("tokens", "token_logprobs", "top_logprobs")),
            strict=True,
        ):
            assert best[token] == logprob <= max(best.values())
            assert len(best) <= 2
        for at, token in zip(found["text_offset"], found["tokens"], strict=True):
            assert token.startswith("bytes:") or choice["text"][at:].startswith(token)
    told = ask(server, prompt=text, max_tokens=1, prompt_logprobs=1)["choices"][0]
    logprobs = [next(iter(one.values()))["logprob"] for one in told["prompt_logprobs"][1:]]
    assert found["token_logprobs"][1:] == logprobs


@OTHER_WAY
def test_streams_and_choices(server: Server) -> None:
    body = {"prompt": ["one two", "three"], "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2}
    whole = ask(server, **body, seed=3)["choices"]
    texts, logprobs = [""] * 4, [list[float | None]() for _ in range(4)]
    for event in events_of(server, "/v1/completions", {"temperature": 0, "seed": 3, **body}):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["logprobs"]:
            logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    assert texts == [choice["text"] for choice in whole]
    assert logprobs == [choice["logprobs"]["token_logprobs"] for choice in whole]
