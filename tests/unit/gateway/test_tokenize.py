"""/tokenize and /detokenize in vLLM's form, and prompts with a suffix."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from hadal.core.config import CacheConfig, LimitsConfig
from hadal.core.errors import RequestError
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.salts import salt_of
from hadal.gateway.desk.service import FIM_MARKS, ServedModel, Service, Work
from hadal.roles.front.names import FrontNames

from .model_folder import BOS
from .scenes import error_of, scene
from .test_tools import VOCABULARY, vocabulary_of
from .world import CHAT

MESSAGES = CHAT["messages"]


@pytest.mark.promise("Paths without /v1 work as well.")
@pytest.mark.promise("They also count texts that are too long for the model")
async def test_tokens_of_prompts_and_chats_and_back(model: ServedModel) -> None:
    async with scene(model, then_stop=False) as it:

        async def ask(path: str, **fields: Any) -> Any:
            reply = await it.client.post(path, json=fields)
            assert reply.status_code == 200, reply.text
            return reply.json()

        for prefix in ("", "/v1"):
            plain = {"add_special_tokens": False, "return_token_strs": True}
            found = await ask(f"{prefix}/tokenize", prompt="2 + 2 é", **plain)
            assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
            assert found["max_model_len"] == model.context_tokens
            with_bos = await ask(f"{prefix}/tokenize", prompt="2 + 2 é")
            assert with_bos["tokens"] == [model.vocabulary.control_ids[BOS], *found["tokens"]]
            text = await ask(f"{prefix}/detokenize", model="small", tokens=found["tokens"])
            assert text == {"prompt": "2 + 2 é"}
        chat = await ask("/tokenize", messages=MESSAGES)
        assert chat["token_strs"] is None
        whole = (await ask("/v1/chat/completions", **CHAT, max_tokens=1))["usage"]
        assert chat["count"] == whole["prompt_tokens"]
        shorter = await ask("/tokenize", messages=MESSAGES, add_generation_prompt=False)
        num = shorter["count"]
        assert 0 < num < chat["count"]
        assert shorter["tokens"] == chat["tokens"][:num]
        assert await ask("/detokenize", tokens=[]) == {"prompt": ""}
        long = await ask("/tokenize", prompt="2 + 2 " * 1_200)
        assert long["max_model_len"] < long["count"] <= 2 * long["max_model_len"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("tokenize", {"prompt": 3}, 400, "prompt"),
        ("tokenize", {"messages": "a"}, 400, "messages"),
        ("tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("detokenize", {}, 400, "tokens"),
        ("detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_mistakes(
    model: ServedModel, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    async with scene(model) as it:
        error = error_of(await it.client.post(f"/v1/{path}", json=fields), status)
        assert error["param"] == param


def completion(model: ServedModel, **fields: Any) -> Work:
    service = Service(model, LimitsConfig(), FrontNames(CacheConfig(), "f0"))
    body = json.dumps({"model": model.name, **fields}).encode()
    try:
        return asyncio.run(service.completion(body, "r", Tenant(salt_of(b"key"))))
    finally:
        service.close()


def test_a_text_with_a_gap(model: ServedModel) -> None:
    """Prompt and suffix are plain text, even if they spell marks."""
    vocabulary = vocabulary_of([*VOCABULARY.control_ids, *FIM_MARKS])
    taught = replace(model, vocabulary=vocabulary, vocab_size=len(vocabulary))
    work = completion(taught, prompt="def <｜fim▁hole｜>", suffix="\n  return x")
    (choice,) = work.choices
    begin, hole, end = (vocabulary.control_ids[mark] for mark in FIM_MARKS)
    before, behind = list("def <｜fim▁hole｜>".encode()), list(b"\n  return x")
    assert list(choice.generation.prompt) == [begin, *before, hole, *behind, end]
    for mark in (begin, hole, end):
        assert choice.generation.prompt.count(mark) == 1
    with pytest.raises(RequestError, match="it has no tokens for filling in the middle") as caught:
        completion(model, prompt="a", suffix="b")
    assert caught.value.param == "suffix"
    assert completion(model, prompt="a", suffix="").num_prompt_tokens


@pytest.mark.promise(
    "Such a prompt is computed completely: its blocks have no names, so none is found "
    "in a cache or left there."
)
@pytest.mark.promise(
    "With scores, max_tokens: 0 draws one token that is neither shown nor charged."
)
def test_a_prompt_that_is_scored_has_no_names(model: ServedModel) -> None:
    """Without names, its blocks are neither found in a cache nor left there."""
    plain, scored = (
        completion(model, prompt=[5] * 200, max_tokens=0, echo=True, **more)
        for more in ({}, {"logprobs": 1})
    )
    assert plain.choices[0].generation.chain
    assert plain.choices[0].generation.max_tokens == 0
    (choice,) = scored.choices
    assert not choice.generation.chain
    assert choice.generation.max_tokens == 1
    assert choice.is_prompt_only
