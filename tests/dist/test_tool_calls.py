"""Tool calls that a server constrains by their schemas: valid under any sampling, and equal with
drafts, over many ranks, after kills and preemption, and in streams.

The model is hadal-tiny. For other families their marks replace some words; the model draws them at
random, and a grammar decides where.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from hadal.gateway.text.tools import FORMATS, ToolFormat
from hadal.runtime.resolve import model_folder
from tests.dist.answers import Asked, ask_all, events_of
from tests.dist.serving import Server, StartServer, kill_at_work, metric
from tests.fresh import fresh
from tests.levels import FULL, MORE
from tests.schemas import SCHEMAS, closed
from tests.waiting import PATIENCE_S

TEMPERATURE = 1.5
DRAWN = {"temperature": TEMPERATURE, "top_p": 1}
"""Sampling of all requests. Among many tokens of similar probability the model's own top_p would
cut beside a border, which rounding moves when a request is recomputed (docs/decisions/005).
"""
NUM_EACH = 20 if FULL else 6 if MORE else 2
NUM_STEPS = {"decode-0": 3, "prefill-0": 0}
"""Unit -> number of steps that the gate allows it before it is killed."""
SERVED = pytest.mark.more(
    "drafts and kills; over ranks and after preemption it is as in test_formats"
)
CHATS = "/v1/chat/completions"
MAX_TOKENS = 240
V31 = FORMATS["deepseek-v3.1"]
OBJECTS = {
    name: schema for name, schema in SCHEMAS.items() if (schema or {}).get("type") == "object"
}
CONTENT = closed(answer={"enum": ["yes", "no"]}, sure={"type": "boolean"})
WAYS: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "function": {"name": "f_0"}}},
    {"tool_choice": "auto"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CONTENT}}},
]


def model_with_marks(folder: Path, format: ToolFormat) -> Path:
    """Write a copy of hadal-tiny that has a family's marks."""
    source = model_folder("")
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        else:
            shutil.copy(path, folder / path.name)
    path = folder / "tokenizer.json"
    fields = json.loads(path.read_text())
    vocab = fields["model"]["vocab"]
    known = {token["content"] for token in fields["added_tokens"]}
    marks = [mark for mark in format.marks if mark not in known]
    plain = [word for word in sorted(vocab, key=lambda word: -int(vocab[word])) if word.isalpha()]
    for mark, word in zip(marks, (w for w in plain if w.isascii()), strict=False):
        token = vocab.pop(word)
        other = {**fields["added_tokens"][0], "id": token, "content": mark}
        fields["added_tokens"].append(other)
    path.write_text(json.dumps(fields))
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    if format.is_fenced:
        fields["chat_template"] += "{# ```json #}"
    path.write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with_marks(tmp_path_factory.mktemp("marks"), V31)


def bodies_of(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    bodies: list[dict[str, Any]] = []
    for number in range(NUM_EACH):
        for way in WAYS:
            functions: list[dict[str, Any]] = [
                {
                    "name": f"f_{place}",
                    "parameters": OBJECTS[rng.choice(sorted(OBJECTS))],
                    "strict": rng.random() < 0.7,
                }
                for place in range(rng.randrange(1, 4))
            ]
            bodies.append(
                {
                    "messages": [{"role": "user", "content": rng.choice(["Hi", "2 + 2?"])}],
                    "tools": [{"type": "function", "function": each} for each in functions],
                    "thinking": rng.random() < 0.3,
                    # In every way two of three requests may run until a call is complete.
                    "max_tokens": 30 if number % 3 == 1 else MAX_TOKENS,
                    "seed": rng.randrange(1 << 30),
                    **DRAWN,
                    "return_token_ids": True,
                    **way,
                    **({"n": 2} if rng.random() < 0.2 else {}),
                    **({"repetition_penalty": 1.2} if rng.random() < 0.2 else {}),
                }
            )
    return bodies


async def post_all(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
        replies = [client.post(path, json={"model": server.model, **body}) for body in bodies]
        found = await asyncio.gather(*replies)
    assert {reply.status_code for reply in found} == {200}, found[0].text
    return [reply.json() for reply in found]


def num_right(bodies: list[dict[str, Any]], answers: list[Any]) -> int:
    """Return the number of complete calls. Raises an error if one of them is invalid or a reply
    breaks its request.
    """
    num = 0
    for body, choices in zip(bodies, answers, strict=True):
        functions = {each["function"]["name"]: each["function"] for each in body["tools"]}
        is_forced = body.get("tool_choice", "auto") != "auto"
        for choice in choices:
            finish, message = choice["finish_reason"], choice["message"]
            calls = message.get("tool_calls", [])
            complete = calls if finish == "tool_calls" else calls[:-1]
            for call in complete:
                function = functions[call["function"]["name"]]
                arguments = json.loads(call["function"]["arguments"])
                jsonschema.validate(arguments, function["parameters"])
                assert isinstance(arguments, dict)
            num += len(complete)
            if finish == "stop":
                assert not is_forced
                assert not calls
                if "response_format" in body:
                    jsonschema.validate(json.loads(message["content"]), CONTENT)
            if is_forced:
                assert finish in ("tool_calls", "length")
                assert finish == "length" or not (message["content"] or "").strip()
            if isinstance(body.get("tool_choice"), dict):
                assert {call["function"]["name"] for call in calls} <= {"f_0"}
            if body.get("parallel_tool_calls") is False:
                assert len(calls) <= 1
    return num


def what_came(choices: Any) -> Any:
    """Return the comparable parts of choices, without call ids, which the gateway draws."""
    return [
        (
            choice["token_ids"],
            choice["message"]["content"],
            choice["message"]["reasoning_content"],
            [call["function"] for call in choice["message"].get("tool_calls", ())],
            choice["finish_reason"],
        )
        for choice in choices
    ]


@pytest.fixture(scope="module")
def requests(folder: Path) -> Asked:
    seed = fresh().randrange(2**31)
    print("requests: seed", seed)
    return Asked(CHATS, bodies_of(seed), what_came, folder)


@pytest.fixture
def marked(borrow: StartServer, folder: Path) -> Server:
    """A server of two one-rank units, without drafts."""
    return borrow(model=str(folder))


@pytest.fixture
def asked(request: pytest.FixtureRequest, requests: Asked) -> Asked:
    """The requests, answered by `marked`."""
    if not requests.answers:
        requests.ask(request.getfixturevalue("marked"))
        assert num_right(requests.bodies, requests.answers) > len(requests.bodies) / 8
    return requests


@pytest.mark.promise(
    "From the control token that begins calls on, a call has the name of an offered tool "
    "and arguments of its schema, with strict and without."
)
@SERVED
@pytest.mark.parametrize("drafts", [1, 3] if FULL else [2])
def test_drafts_change_nothing(
    mortal: StartServer, folder: Path, asked: Asked, drafts: int
) -> None:
    server = mortal(model=str(folder), decode={"drafts": drafts})
    asked.assert_same(server)
    assert metric(server, "hadal_drafts_accepted_total") > 0


@SERVED
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_units_that_are_killed(
    mortal: StartServer, folder: Path, asked: Asked, victim: str
) -> None:
    server = mortal(model=str(folder), decode={"drafts": 2})
    before = metric(server, "hadal_retries_total")
    asked.assert_same(server, lambda: kill_at_work(server, victim, NUM_STEPS[victim]))
    assert metric(server, "hadal_retries_total") > before


def streamed(server: Server, body: dict[str, Any]) -> Any:
    """Return the calls that a reply's deltas add up to, and its finish reason."""
    calls: list[dict[str, str]] = []
    finish = None
    given = {key: value for key, value in body.items() if key != "return_token_ids"}
    for event in events_of(server, CHATS, given):
        (choice,) = event["choices"]
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                calls.append({"name": delta["function"]["name"], "arguments": ""})
            else:
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return calls, finish


@pytest.mark.promise("Calls are streamed, the name first.")
def test_streams(marked: Server, asked: Asked) -> None:
    num = 0
    for body, choices in zip(asked.bodies, asked.answers, strict=True):
        if "n" in body or "tool_calls" not in choices[0]["message"]:
            continue
        _, _, _, functions, finish = what_came(choices)[0]
        calls, ended = streamed(marked, body)
        assert ([dict(each) for each in calls], ended) == (functions, finish)
        num += 1
    assert num


@pytest.mark.promise("Tools that are not called change no token.")
def test_a_reply_without_calls_is_the_free_one(marked: Server) -> None:
    """No grammar constrains the calls of tools that are not strict if min_tokens is sent."""
    bodies = [
        {
            "messages": [{"role": "user", "content": "What is 12 + 30?"}],
            "tools": [{"type": "function", "function": {"name": "f", **more}}],
            "temperature": 0,
            "max_tokens": 300,
            "return_token_ids": True,
            **options,
        }
        for more, options in (({}, {"min_tokens": 1}), ({}, {}), ({"strict": True}, {}))
    ]
    (free,), *held = asyncio.run(ask_all(marked, CHATS, bodies))
    assert "tool_calls" not in free["message"]
    assert held == [[free]] * 2


@SERVED
def test_prefixes(marked: Server) -> None:
    """A structured answer continues from its given beginning, in DeepSeek's form and in vLLM's."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": '{"answer": "y'},
    ]
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": CONTENT}}
    body = {"messages": messages, **DRAWN, "response_format": wanted}
    ways: list[dict[str, Any]] = [
        {"messages": [messages[0], {**messages[1], "prefix": True}]},
        {"continue_final_message": True, "add_generation_prompt": False},
    ]
    for way in ways:
        for seed in range(5):
            ((choice,),) = asyncio.run(ask_all(marked, CHATS, [{**body, **way, "seed": seed}]))
            text = choice["message"]["content"]
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(messages[1]["content"] + text), CONTENT)


@pytest.mark.promise("With strict, a schema that cannot be followed is a 400 that names the tool")
def test_what_cannot_be_followed_is_refused_if_strict(marked: Server) -> None:
    """Without strict the call has any object, and a line of the log names tool and keyword."""
    function = {"name": "mine", "strict": True, "parameters": closed(a={"not": {"type": "null"}})}
    body = {
        "model": marked.model,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    reply = httpx.post(f"{marked.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "tools[0].function.parameters"
    assert "'mine'" in error["message"]
    assert "'not'" in error["message"]
    del function["strict"]
    body |= {**DRAWN, "tool_choice": "required", "max_tokens": MAX_TOKENS, "thinking": False}
    for choices in asyncio.run(ask_all(marked, CHATS, [{**body, "seed": at} for at in range(3)])):
        for call in choices[0]["message"].get("tool_calls", ()):
            assert call["function"]["name"] == "mine"
            if choices[0]["finish_reason"] == "tool_calls":
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert marked.log().count("'not' is not supported: tool='mine'") == 1


NUM_DRAWN = 40 if FULL else 16
SIZE = closed(size={"enum": [1, 2]})


@SERVED
def test_responses_are_a_call_or_an_answer_in_its_format(marked: Server) -> None:
    tool = {"type": "function", "name": "f", "parameters": SIZE, "strict": True}
    format = {"type": "json_schema", "name": "a", "schema": CONTENT, "strict": True}
    body = {"input": "Hi", "tools": [tool], "text": {"format": format}, "store": False}
    body |= {"parallel_tool_calls": False, "reasoning": {"effort": "none"}}
    body |= {**DRAWN, "max_output_tokens": 160}
    found = asyncio.run(post_all(marked, "/v1/responses", [body] * NUM_DRAWN))
    num = 0
    for response in found:
        if response["status"] != "completed":
            continue
        for item in response["output"]:
            if item["type"] == "function_call":
                jsonschema.validate(json.loads(item["arguments"]), SIZE)
            else:
                jsonschema.validate(json.loads(item["content"][0]["text"]), CONTENT)
            num += 1
    assert num > NUM_DRAWN / 4


@SERVED
@pytest.mark.parametrize("prefix", ["", '{"answer": "'])
def test_messages_are_a_call_or_an_answer_in_its_format(marked: Server, prefix: str) -> None:
    """The format applies to the assistant's given text and its continuation together."""
    begun = [{"role": "assistant", "content": prefix}] if prefix else []
    body = {
        "messages": [{"role": "user", "content": "Hi"}, *begun],
        "tools": [{"name": "f", "input_schema": SIZE, "strict": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"format": {"type": "json_schema", "schema": CONTENT}},
        "thinking": {"type": "disabled"},
        **DRAWN,
        "max_tokens": 160,
    }
    found = asyncio.run(post_all(marked, "/v1/messages", [body] * NUM_DRAWN))
    num = 0
    for message in found:
        if message["stop_reason"] == "max_tokens":
            continue
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert not prefix
                jsonschema.validate(block["input"], SIZE)
            else:
                jsonschema.validate(json.loads(prefix + block["text"]), CONTENT)
            num += 1
    assert num > NUM_DRAWN / 4


@SERVED
@pytest.mark.parametrize("name", [pytest.param("deepseek-v3", marks=pytest.mark.full), "kimi-k2"])
def test_other_families(borrow: StartServer, tmp_path: Path, requests: Asked, name: str) -> None:
    server, bodies = borrow(model=str(model_with_marks(tmp_path, FORMATS[name]))), requests.bodies
    assert num_right(bodies, asyncio.run(ask_all(server, CHATS, bodies))) > len(bodies) / 8
