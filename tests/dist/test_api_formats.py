"""/v1/messages and /v1/responses of a running server give the tokens of /v1/chat/completions, count
the same usage, charge the same, and free their blocks if the client disconnects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.dist import gate
from tests.dist.keyed import AUDITOR, with_keys
from tests.dist.serving import Server, StartServer
from tests.dist.test_ledger_serving import rows, wait_for_rows
from tests.dist.test_openai_client import is_empty
from tests.unit.gateway.event_streams import message_of, named_events, parsed, response_of
from tests.unit.gateway.test_tools import BOS, CONTROLS, EOS, LISTING, V31_TEMPLATE, tokenizer_of
from tests.unit.model.test_family import write_checkpoint
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_until

LIVE = pytest.mark.more("tests/unit/gateway has it without a server")
SYSTEM, ASKED, SAID, AGAIN = "Answer briefly.", "What is 12 + 30?", "It is 42.", "And 5 + 6?"
NUM_TOKENS = 48


@pytest.fixture
def model(server: Server) -> str:
    return server.model


@pytest.fixture
def claude(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=f"{server.url}/anthropic", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def gpt(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.promise(
    "A greedy conversation gives the same tokens in all formats, streamed or whole, "
    "with thinking and without"
)
@pytest.mark.parametrize("thinks", [False, pytest.param(True, marks=LIVE)])
def test_the_same_conversation_gives_the_same_tokens(
    server: Server, model: str, claude: Anthropic, gpt: OpenAI, thinks: bool
) -> None:
    history = [("user", ASKED), ("assistant", SAID), ("user", AGAIN)]
    messages: Any = [{"role": role, "content": text} for role, text in history]
    switch: Any = {"type": "enabled" if thinks else "disabled"}
    if thinks:
        switch["budget_tokens"] = 1024
    chat = gpt.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, *messages],
        temperature=0,
        max_tokens=NUM_TOKENS,
        extra_body={"thinking": {"type": switch["type"]}},
    )
    choice, usage = chat.choices[0], chat.usage
    assert usage is not None
    reasoning, content = choice.message.reasoning_content or "", choice.message.content or ""  # type: ignore[attr-defined]
    assert reasoning or content
    greedy: Any = {"extra_body": {"temperature": 0}}

    asked: Any = {
        **{"model": model, "max_tokens": NUM_TOKENS, "system": SYSTEM, "messages": messages},
        "thinking": switch,
    }
    counted = claude.messages.count_tokens(
        **{name: value for name, value in asked.items() if name != "max_tokens"}
    )
    assert counted.input_tokens == usage.prompt_tokens
    whole = claude.messages.create(**asked, **greedy)
    with claude.messages.stream(**asked, **greedy) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        texts = {"thinking": "", "text": ""}
        for block in message.content:
            texts[block.type] += getattr(block, block.type)
        assert (texts["thinking"], texts["text"]) == (reasoning, content)
        seen = message.usage
        assert seen.input_tokens + (seen.cache_read_input_tokens or 0) == usage.prompt_tokens
        assert seen.output_tokens == usage.completion_tokens
        ends = {"end_turn": "stop", "max_tokens": "length"}
        assert ends[message.stop_reason or ""] == choice.finish_reason

    items: Any = {
        **{"model": model, "max_output_tokens": NUM_TOKENS, "temperature": 0},
        **{"instructions": SYSTEM, "input": messages},
    }
    if not thinks:
        items["reasoning"] = {"effort": "none"}
    whole_response = gpt.responses.create(**items)
    with gpt.responses.stream(**items) as events:
        for event in events:
            last = event
    for response in (whole_response, last.response):  # type: ignore[union-attr]
        found = {"reasoning": "", "message": ""}
        for item in response.output:
            found[item.type] += "".join(part.text for part in item.content)
        assert (found["reasoning"], found["message"]) == (reasoning, content)
        assert response.usage.total_tokens == usage.total_tokens
        assert (response.status == "incomplete") == (choice.finish_reason == "length")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": ASKED}], "max_tokens": 3000}),
        pytest.param("/v1/responses", {"input": ASKED, "max_output_tokens": 3000}, marks=LIVE),
    ],
)
def test_a_client_that_leaves_frees_its_blocks(
    server: Server, model: str, path: str, fields: dict[str, Any]
) -> None:
    wait_until(lambda: is_empty(server), "the server is idle")
    server.gate.hold(gate.DECODE, after=3)
    body = {"model": model, "stream": True, "temperature": 2, **fields}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=DEADLINE_S) as reply:
        assert reply.status_code == 200
        next(reply.iter_bytes())
    server.gate.open()
    wait_until(lambda: is_empty(server), "the blocks of the request are free")


@pytest.fixture
def twofold(mortal: StartServer) -> Server:
    """A server with two gateways and keys."""
    keys = with_keys("sk-one name=one", "sk-two name=two", "sk-four name=four")
    return mortal("--gateways", "2", *keys)


@LIVE
def test_what_they_cost_is_written_down(twofold: Server) -> None:
    """The ledger charges each tenant exactly the tokens that the reply's usage reports."""
    server, path = twofold, twofold.folder.parent / "ledger.sqlite"
    messages: Any = [{"role": "user", "content": ASKED}]
    model = "hadal-tiny"
    with Anthropic(base_url=server.url, api_key="sk-one", max_retries=0) as client:
        seen = client.messages.create(model=model, max_tokens=20, messages=messages).usage
    with OpenAI(base_url=f"{server.url}/v1", api_key="sk-two", max_retries=0) as other:
        response = other.responses.create(model=model, input=ASKED, max_output_tokens=10)
        assert response.usage is not None
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="sk-one", max_retries=0) as wrong,
        pytest.raises(openai.NotFoundError),
    ):
        wrong.responses.retrieve(response.id)
    with (
        Anthropic(base_url=server.url, api_key="sk-three", max_retries=0) as unknown,
        pytest.raises(anthropic.AuthenticationError),
    ):
        unknown.messages.create(model=model, max_tokens=20, messages=messages)
    wait_for_rows(path, 2)
    facts = rows(path, "SELECT tenant, tokens_hit + tokens_miss, tokens_out FROM hadal_requests")
    assert sorted(facts) == [
        ("one", seen.input_tokens + (seen.cache_read_input_tokens or 0), seen.output_tokens),
        ("two", response.usage.input_tokens, response.usage.output_tokens),
    ]

    def scraped() -> str:
        headers = server.headers(AUDITOR)
        return httpx.get(f"{server.url}/metrics", headers=headers, timeout=DEADLINE_S).text

    for name in ("messages", "responses"):
        line = f'endpoint="{name}",gateway="[^"]+",status="200"}} 1.0'
        wait_until(lambda line=line: re.search(line, scraped()), f"{name} are counted")


@pytest.mark.promise("With several gateways, each finds the responses that another one keeps.")
@pytest.mark.promise(
    "If that gateway does not answer, the reply is a 503, and the client may retry."
)
@LIVE
def test_any_gateway_goes_on_from_a_response_of_any_other(twofold: Server) -> None:
    """Either gateway continues a response that the other one stores. If the storing gateway was
    killed and restarted, its responses are reported as lost.
    """
    server, url, headers = twofold, twofold.url, twofold.headers("sk-four")
    made: dict[str, str] = {}

    def post(previous: str = "") -> httpx.Response:
        """Send a request on a new connection, which either gateway may accept."""
        body: dict[str, Any] = {"model": "hadal-tiny", "input": ASKED, "max_output_tokens": 3}
        if previous:
            body["previous_response_id"] = previous
        return httpx.post(f"{url}/v1/responses", json=body, headers=headers, timeout=PATIENCE_S)

    def responded() -> bool:
        response_id = post().json()["id"]
        made[response_id.split("_")[1]] = response_id
        return len(made) == 2

    wait_until(responded, "both have answered")
    for response_id in made.values():
        servers = set()

        def gone_on(response_id: str = response_id, servers: set[str] = servers) -> bool:
            reply = post(response_id)
            assert reply.status_code == 200, reply.text
            servers.add(reply.json()["id"].split("_")[1])
            kept = httpx.get(
                f"{url}/v1/responses/{response_id}", headers=headers, timeout=DEADLINE_S
            )
            assert kept.json()["id"] == response_id
            return len(servers) == 2

        wait_until(gone_on, "both have gone on from it")
    old_pid = server.kill("gateway-1")
    server.wait_restarted("gateway-1", old_pid)
    lost = wait_until(
        lambda: (reply := post(made["1"])).status_code != 503 and reply, "it is answered"
    )
    assert lost.status_code == 400
    assert lost.json()["error"]["code"] == "previous_response_not_found"
    assert post(made["0"]).status_code == 200


# ---- tools, with random weights ----


TOOL = {
    "name": "weather",
    "description": "The weather there",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FUNCTION = {
    **{"name": "weather", "description": "The weather there"},
    "parameters": TOOL["input_schema"],
}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small DeepSeek-V3.1 with random weights and the tokens and template of its family."""
    folder = tmp_path_factory.mktemp("caller")
    fields = tokenizer_of(CONTROLS)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": LISTING + V31_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_checkpoint(
        *(folder, "DeepSeek-V3.1"),
        **{"vocab_size": 320, "eos_token_id": 257, "bos_token_id": 256},
        **{"max_position_embeddings": 4096, "quantization_config": None},
    )
    return folder


@LIVE
def test_forced_calls_are_the_same_in_all_formats(borrow: StartServer, caller: Path) -> None:
    """The random model's arguments are nonsense, but equal in all formats. A tool's result then
    gives the same prompt length and answer in chats and responses.
    """
    server = borrow("--model", str(caller), "--model-name", "caller")
    url, common = server.url, {"model": "caller", "temperature": 0}

    def post(path: str, **fields: Any) -> httpx.Response:
        reply = httpx.post(f"{url}{path}", json={**common, **fields}, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        return reply

    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Oslo?"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 30,
    }
    choice = post("/v1/chat/completions", **chat).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    arguments = call["function"]["arguments"]
    assert call["function"]["name"] == "weather"
    assert arguments

    messages: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Oslo?"}],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "weather"},
        "max_tokens": 30,
    }
    whole = post("/v1/messages", **messages).json()
    streamed = message_of(named_events(post("/v1/messages", **messages, stream=True).content))
    for message in (whole, streamed):
        block = message["content"][0]
        assert (block["type"], block["name"]) == ("tool_use", "weather")
        assert block["input"] == parsed(arguments)

    items: dict[str, Any] = {
        "input": "Oslo?",
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 30,
    }
    response = post("/v1/responses", **items).json()
    events = named_events(post("/v1/responses", **items, stream=True).content)
    for each in (response, response_of(events)):
        item = each["output"][0]
        assert (item["type"], item["name"]) == ("function_call", "weather")
        assert item["arguments"] == arguments

    result, more = "rain<｜tool▁calls▁begin｜>", {"max_tokens": 12}
    last = post(
        "/v1/chat/completions",
        messages=[
            *chat["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ],
        **more,
    ).json()
    call_id = response["output"][0]["call_id"]
    output = {"type": "function_call_output", "call_id": call_id, "output": result}
    gone_on = post(
        *("/v1/responses",),
        **{"input": [output], "previous_response_id": response["id"], "max_output_tokens": 12},
    ).json()
    assert gone_on["usage"]["input_tokens"] == last["usage"]["prompt_tokens"]
    (said,) = gone_on["output"]
    assert said["content"][0]["text"] == last["choices"][0]["message"]["content"]
