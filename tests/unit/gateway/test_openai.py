"""Bodies of requests: which fields are accepted, and the error for each mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from hadal.core.errors import RequestError
from hadal.gateway.api.base import check_ids
from hadal.gateway.api.openai.request import check_num_ids, parse_chat, parse_completion
from hadal.gateway.text.asks import AnswerFormat, SamplingDefaults, Turn, with_defaults
from tests.levels import MORE
from tests.waiting import DEADLINE_S

MESSAGES = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def strict(parameters: dict[str, Any], name: str = "f") -> dict[str, Any]:
    return tool(name, strict=True, parameters=parameters)


OBJECT = {"type": "object"}
GOING_ON = {"continue_final_message": True}
PREFIX = {"role": "assistant", "content": "It is", "prefix": True}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode())


def user(**fields: Any) -> dict[str, Any]:
    """Return the messages of a chat with a single user message."""
    return {"messages": [{"role": "user", **fields}]}


def schema_format(**fields: Any) -> dict[str, Any]:
    own = {"name": "answer", "schema": {"type": "object"}, "strict": True, **fields}
    return {"type": "json_schema", "json_schema": own}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


@pytest.mark.promise(
    "A schema of more than 64 KiB or 64 levels, or one that takes more than 0.25 s of "
    "a core to check, is a 400, too."
)
@pytest.mark.promise("The 400 for a refused field names it and says what to send instead.")
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        (user(), "messages[0].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "hi"}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[0].tool_calls[0]",
        ),
        (user(content="hi", tool_calls=[CALL]), "messages[0].tool_calls"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("f", description=1)]}, "tools[0].function.description"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool("f")], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": tool("g")}, "tool_choice"),
        (user(content=[{"type": "image_url"}]), "messages[0].content[0].type"),
        (user(content=[{"type": "text"}]), "messages[0].content[0].text"),
        ({"messages": MESSAGES * 5000}, "messages"),
        ({"model": None}, "model"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 0.009}, "repetition_penalty"),
        ({"stop_repetition": "no"}, "stop_repetition"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"seed": 2**64}, "seed"),
        ({"priority": 5}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"priority": -5}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": schema_format(name="a b")}, "response_format"),
        ({"response_format": schema_format(schema=None)}, "response_format"),
        ({"response_format": schema_format(schema=True)}, "response_format"),
        ({"response_format": schema_format(schema={"x-guidance": {}})}, "response_format"),
        ({"response_format": schema_format(schema={"enum": ["a" * 70_000]})}, "response_format"),
        ({"response_format": schema_format(schema=nested(70))}, "response_format"),
        ({"response_format": schema_format(), "ignore_eos": True}, "ignore_eos"),
        ({"response_format": schema_format(), "stop_token_ids": [5]}, "stop_token_ids"),
        ({"stop_token_ids": [5], "tools": [tool("f", strict=True)]}, "stop_token_ids"),
        ({"response_format": schema_format(), "min_tokens": 3}, "min_tokens"),
        ({"min_tokens": 3, "tools": [tool("f")], "tool_choice": "required"}, "min_tokens"),
        ({"ignore_eos": True, "tools": [tool("f", strict=True)]}, "ignore_eos"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [tool("f", parameters=nested(70))]}, "tools[0]"),
        ({"functions": [{}]}, "functions"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs[...]"),
        ({"stream": "yes"}, "stream"),
        ({"reasoning_effort": "lower"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "reasoning_effort"),
        (user(content="a", prefix=True), "messages[0].prefix"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        (user(content="a", name="n" * 65), "messages[0].name"),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        (user(content=[{"type": "refusal", "refusal": "no"}]), "messages[0].content[0].type"),
        (GOING_ON | {"add_generation_prompt": True}, "continue_final_message"),
        (GOING_ON | {"messages": [*MESSAGES, PREFIX]}, "continue_final_message"),
        (GOING_ON | {"messages": [*MESSAGES, CALLING]}, "continue_final_message"),
        (GOING_ON | {"response_format": {"type": "json_object"}}, "continue_final_message"),
        ({"tools": [tool("f", strict=1)]}, "tools[0].function.strict"),
        ({"tools": [strict({"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [strict({"x-guidance": {}})]}, "tools[0].function.parameters"),
        ({"tools": [strict({"items": nested(70)})]}, "tools[0]"),
        (
            {"tools": [strict({**OBJECT, "enum": ["a" * 60_000]}, f"f{i}") for i in range(3)]},
            "tools",
        ),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": tool("f")}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "structured_outputs"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"length_penalty": 1.5}, "length_penalty"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_chat_mistakes(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param.partition("[")[0].partition(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "prompt": [1]}, "suffix"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"max_completion_tokens": 0.5}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_completion_mistakes(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"{",
        b'{"model": "m", "messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"model": "\xff"}',
        b'{"x": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "m", "temperature": 1e400}',
        b'{"max_tokens": 99999999999999999999999999999999}',
        b'{"x":' + b"[" * 100_000,
        b'{"x":' * 100_000,
        b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xef\xbb\xbf{}",
        b"\x00",
        b'{"a":1}{"b":2}',
    ],
    ids=range(19),
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(RequestError):
            parse(body)


@pytest.mark.promise("An inert field changes nothing.")
def test_nulls_and_extras_are_taken() -> None:
    nulls = ("temperature", "top_p", "n", "stop", "seed", "stream", "logprobs", "tools")
    parsed = chat(
        **dict.fromkeys((*nulls, "prompt_logprobs")),
        user="u",
        tool_choice="none",
        parallel_tool_calls=True,
        metadata={"a": [1]},
        store=True,
        service_tier="auto",
        verbosity="medium",
        modalities=["text"],
        add_generation_prompt=True,
        continue_final_message=False,
        length_penalty=1.0,
        bad_words=[],
        documents=[],
        prediction={"type": "content", "content": "x"},
        skip_special_tokens=True,
        reasoning_effort="high",
        mirostat=0,
        echo=False,
    )
    assert parsed.ask.n == 1
    assert parsed.ask.temperature is None
    assert not parsed.ask.stream


def test_formats() -> None:
    assert chat(response_format={"type": "text"}).ask.format is None
    assert chat(response_format={"type": "json_object"}).ask.format == AnswerFormat(
        "json_object", None
    )
    schema = {"properties": {"b": {"type": "integer"}, "a": nested(60)}}
    for parsed in (
        chat(response_format=schema_format(schema=schema)),
        completion(response_format=schema_format(schema=schema, strict=None)),
    ):
        assert parsed.ask.format == AnswerFormat("answer", schema)
        assert list(parsed.ask.format.schema["properties"]) == ["b", "a"]


def test_messages() -> None:
    parsed = chat(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}] * 2},
            {"role": "assistant", "content": None, "reasoning_content": "old"},
            {"role": "user", "content": "b", "name": "x"},
        ]
    )
    assert parsed.turns == (
        Turn("system", "d"),
        Turn("user", "aa"),
        Turn("assistant", "", reasoning="old"),
        Turn("user", "b", name="x"),
    )


def test_a_refusal_in_the_history_is_what_the_assistant_said() -> None:
    part = {"type": "refusal", "refusal": "I cannot."}
    for said in ({"content": None, "refusal": "I cannot."}, {"content": [part]}):
        assert chat(messages=[{"role": "assistant", **said}]).turns == (
            Turn("assistant", "I cannot."),
        )


def test_thinking() -> None:
    assert chat(reasoning_effort="high").rendering.thinking is True
    assert chat(reasoning_effort="none").rendering.thinking is False
    assert chat(reasoning_effort="none").rendering.template_kwargs == {}
    told = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "high"}
    for effort, heard in (told | {"max": "max", "ultra": "max"}).items():
        assert chat(reasoning_effort=effort).rendering.template_kwargs == {
            "reasoning_effort": heard
        }
    assert chat().rendering.thinking is None
    assert chat(thinking=True).rendering.thinking is True
    assert chat(thinking={"type": "disabled"}).rendering.thinking is False
    assert chat(chat_template_kwargs={"enable_thinking": False}).rendering.thinking is False
    both = chat(thinking={"type": "enabled"}, chat_template_kwargs={"thinking": False})
    assert both.rendering.thinking is True


def test_sampling() -> None:
    ask = chat(
        temperature=0, top_k=-1, logit_bias={"5": 2.5}, logprobs=True, seed=-1, stop=["a", "a", "b"]
    ).ask
    sampling = with_defaults(ask, SamplingDefaults(0.6, 0.95, 20), seed=-1, index=1)
    assert (sampling.temperature, sampling.top_p) == (0, 0.95)
    assert (sampling.top_k, sampling.num_logprobs) == (0, 0)
    assert (sampling.logit_bias, sampling.seed, ask.stops) == (((5, 2.5),), 0, ("a", "b"))
    assert with_defaults(ask, SamplingDefaults(), seed=-1, index=0).seed == 2**63 - 1


@pytest.mark.promise(
    "temperature, top_p, top_k and the ids that end a reply come from "
    "generation_config.json unless the request sets them"
)
@pytest.mark.parametrize(
    ("fields", "top_k"), [({}, 20), ({"top_k": None}, 20), ({"top_k": 5}, 5), ({"top_k": 0}, 0)]
)
def test_the_models_own_top_k_holds_where_none_is_asked_for(
    fields: dict[str, Any], top_k: int
) -> None:
    own = SamplingDefaults(top_k=20)
    assert with_defaults(chat(**fields).ask, own, seed=0, index=0).top_k == top_k


def test_max_tokens() -> None:
    assert chat(max_tokens=5).ask.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).ask.max_tokens == 7


def test_prompts() -> None:
    assert completion(prompt="a").prompts == ("a",)
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1], [2]]).prompts == ((1,), (2,))


def test_ids_beyond_the_vocabulary() -> None:
    for fields, param in (
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"logit_bias": {"100": 1}}, "logit_bias"),
    ):
        with pytest.raises(RequestError, match="the vocabulary has 100") as caught:
            check_ids(chat(**fields).ask, 100)
        assert caught.value.param == param
        check_ids(chat(**fields).ask, 101)


@pytest.mark.promise(
    "cache_salt in a request (up to 256 characters, as vLLM's) keeps a tenant's own users"
    " apart as well"
)
def test_a_salt_goes_along_and_public_is_for_chats() -> None:
    for salt in (None, "a", "s" * 256, "é"):
        assert (
            chat(cache_salt=salt).ask.cache_salt
            == completion(cache_salt=salt).ask.cache_salt
            == salt
        )
    assert chat(cache_salt="public").ask.cache_salt == "public"
    with pytest.raises(RequestError, match="a plain prompt has none") as caught:
        completion(cache_salt="public")
    assert caught.value.param == "cache_salt"


class Seen(bytes):
    """Body that counts the bytes that are sliced from it."""

    num_bytes = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_bytes += len(found)
        return found


def test_too_many_ids_are_refused_before_they_become_numbers() -> None:
    """Parsing 4 MiB of ids took 0.5 s, in which no other stream got a token."""
    ids = ",".join(["1"] * 2_000_000)
    few = ",".join(["1"] * 200_000)
    lists = ",".join(["[1]"] * 100_000)
    for prompt, said in (
        (f"[{ids}]", "values"),
        (f"[[1, 2], [{ids}]]", "values"),
        (f'"", "stop": [{ids}]', "values"),
        (f"[{few}]", "at most 4000"),
        (f"[[1, 2], [{few}]]", "at most 4000"),
        (f"[{lists}]", "more than 64 entries"),
    ):
        body = Seen(f'{{"model": "m", "prompt": {prompt}}}'.encode())
        with pytest.raises(RequestError, match=said) as caught:
            check_num_ids(body, 4000)
        assert body.num_bytes <= len(body)
        assert caught.value.param == "prompt"
    for prompt in (
        [1] * 4000,
        [[1] * 4000] * 64,
        [[1]] * 64,
        json.dumps({"prompt": [1] * 9000}),
        "1," * 9000,
    ):
        check_num_ids(json.dumps({"model": "m", "prompt": prompt}).encode(), 4000)


def test_ids_that_are_to_be_a_text_are_counted_as_those_of_a_prompt() -> None:
    body = json.dumps({"tokens": [1] * 9000}).encode()
    with pytest.raises(RequestError, match="at most 4000") as caught:
        check_num_ids(body, 4000)
    assert caught.value.param == "tokens"


def test_prompts_that_begin_within_prompts_are_looked_at_once() -> None:
    """Each beginning was once read to the body's end: 128 KB took 0.4 s, and 4 MiB 15 minutes."""
    body = Seen(b'{"prompt":[' * 100_000 + b"," * 9000 + b"]")
    with pytest.raises(RequestError, match="at most 4000"):
        check_num_ids(body, 4000)
    assert 9000 <= body.num_bytes <= len(body)


def test_small_fields_are_not_read_when_they_are_long() -> None:
    for name, value in (
        ("stop_token_ids", [1] * 200_000),
        ("logit_bias", {str(i): 1 for i in range(40_000)}),
    ):
        with pytest.raises(RequestError, match="shorten it") as caught:
            completion(**{name: value})
        assert caught.value.param == name


READ_AT_ONCE = """
import sys, threading
from hadal.gateway.api.messages.request import MessagesRequest
from hadal.gateway.api.decoding import decode
from hadal.gateway.api.openai.request import ChatRequest, CompletionRequest
from hadal.gateway.api.responses.request import ResponsesRequest

sys.setswitchinterval(1e-6)
BODY = b'{"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}],' \\
    b'"input": "x", "max_tokens": 3, "seed": 5, "temperature": 1.0}'
num_read = 0

def read(kind, together):
    global num_read
    together.wait()
    decode(BODY, kind)
    num_read += 1

for kind in (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest):
    together = threading.Barrier(4)
    threads = [threading.Thread(target=read, args=(kind, together)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(num_read)
"""


@pytest.mark.campaign("threads meet in the wrong moment now and then")
@pytest.mark.parametrize("_", range(8 if MORE else 2))
def test_the_first_bodies_of_a_kind_are_read_by_several_threads(_: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", READ_AT_ONCE], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (ended.returncode, ended.stdout) == (0, "16\n"), ended.stderr


def test_a_prefix_may_have_a_reasoning() -> None:
    thought = {"reasoning_content": "Two and"}
    found = chat(messages=[*MESSAGES, {**PREFIX, **thought}])
    assert (found.rendering.prefix, found.rendering.reasoning) == ("It is", "Two and")
    found = chat(messages=[*MESSAGES, {"role": "assistant", "content": "a", **thought}])
    assert (found.rendering.prefix, found.rendering.reasoning) == ("", ""), (
        "what a client got and sends back"
    )
