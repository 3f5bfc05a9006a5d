"""The table of fields is true: each field is served, refused by name, or changes nothing."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import typing
from collections.abc import Iterator
from typing import Any

import anthropic.types.beta.message_create_params as anthropic_message
import msgspec
import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completion
import openai.types.responses.response_create_params as openai_response
import pytest
import typing_extensions

from hadal.core.errors import RequestError
from hadal.gateway.api import fields
from hadal.gateway.api.description import BODY_TO_API
from hadal.gateway.api.field_rows import FieldRow, Verdict
from hadal.gateway.api.field_table import CHAT, COMPLETION, MESSAGE, RESPONSE, rows_of
from hadal.gateway.api.messages.request import CountRequest, parse_messages
from hadal.gateway.api.openai.request import parse_chat, parse_completion
from hadal.gateway.api.responses.request import parse_response, read_response
from tests.suite import fields as pages

TEXT = [{"type": "text", "text": "hi"}]
SCHEMA = {"type": "object"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
API_TO_BODY: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "messages": [
            {"role": "assistant", "content": TEXT, "tool_calls": [CALL]},
            {"role": "tool", "content": "b", "tool_call_id": "c"},
            {"role": "user", "content": "c"},
        ],
    },
    COMPLETION: {"model": "m", "prompt": "hi"},
    RESPONSE: {
        "model": "m",
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hi"}],
                "output": [{"type": "input_text"}],
                "summary": [{"type": "summary_text"}],
                "tools": [{"type": "function", "name": "f"}],
            }
        ],
    },
    MESSAGE: {
        "model": "m",
        "max_tokens": 9,
        "thinking": {"type": "adaptive"},
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}, "content": TEXT}
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": TEXT, "text": "x"}
                ],
            },
        ],
    },
}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
API_TO_MORE: dict[str, dict[str, Any]] = {
    CHAT: {"tools": [FUNCTION]},
    RESPONSE: {
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    },
    MESSAGE: {
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "system": TEXT,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "output_format": {"type": "json_schema", "schema": SCHEMA},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    },
}
MORE: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "stream_options": {},
    "thinking": {"type": "enabled"},
    "reasoning": {},
}
"""Top-level field -> a valid object for it, used if a test sets one of this object's own fields.
API_TO_MORE has precedence.
"""


def parse(api: str, body: dict[str, Any]) -> Any:
    raw = json.dumps(body).encode()
    if api == RESPONSE:
        return parse_response(read_response(raw), {})
    return {CHAT: parse_chat, COMPLETION: parse_completion, MESSAGE: parse_messages}[api](raw)


def body_for(api: str, path: str) -> dict[str, Any]:
    """Return a valid body that contains the object to which the field belongs."""
    body = copy.deepcopy(API_TO_BODY[api])
    first = path.partition(".")[0].removesuffix("[]")
    more = {**MORE, **API_TO_MORE.get(api, {})}
    if first not in body and first in more and first != path:
        body[first] = copy.deepcopy(more[first])
    return body


def with_field(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the body with a field set, in the first object of each list on the path."""
    made = copy.deepcopy(body)
    at: Any = made
    *steps, last = path.split(".")
    for step in steps:
        name = step.removesuffix("[]")
        at = at.setdefault(name, [{}] if step != name else {})
        at = at[0] if step != name else at
    at[last] = value
    return made


def paths_of(*verdicts: Verdict) -> Iterator[tuple[str, str, FieldRow]]:
    for api in API_TO_BODY:
        for path, row in rows_of(api).items():
            if row.verdict in verdicts:
                yield api, path, row


# ---- fields that are refused, and fields without effect ----


@pytest.mark.promise("The 400 for a refused field names it")
@pytest.mark.parametrize("api", API_TO_BODY)
def test_what_is_refused_is_refused_by_name(api: str) -> None:
    for own, path, row in paths_of(Verdict.REFUSED):
        if own != api:
            continue
        body = body_for(api, path)
        with pytest.raises(RequestError) as caught:
            parse(api, with_field(body, path, {"some": "thing"}))
        assert caught.value.param == path.replace("[]", "[0]")
        assert row.note in str(caught.value)
        plain = parse(api, body)
        plain = plain.chat if api == RESPONSE else plain  # A response echoes its request.
        for value in () if path.startswith("tools[].function") else (None, *row.harmless):
            asked = parse(api, with_field(body, path, value))
            asked = asked.chat if api == RESPONSE else asked
            assert repr(asked) == repr(plain), (path, value)


@pytest.mark.promise("An inert field changes nothing.")
@pytest.mark.parametrize("api", API_TO_BODY)
def test_what_is_inert_changes_nothing(api: str, caplog: pytest.LogCaptureFixture) -> None:
    for own, path, _ in paths_of(Verdict.INERT):
        if own != api or path == "metadata":
            continue
        body = body_for(api, path)
        value = True if path.endswith(("strict", "async")) else "some thing"
        asked = [parse(api, each) for each in (body, with_field(body, path, value))]
        if api == RESPONSE:  # A response echoes its request.
            asked = [each.chat for each in asked]
        assert asked[0] == asked[1], path
    assert not caplog.records


# ---- fields that are served ----

BUDGETS = dict.fromkeys(
    (
        "thinking_budget",
        "thinking_token_budget",
        "thinking_budget_tokens",
        "reasoning_budget",
        "reasoning_budget_tokens",
        "thinking.budget_tokens",
        "reasoning.max_tokens",
    ),
    7,
)
VALUES: dict[str, Any] = {
    **BUDGETS,
    **dict.fromkeys(("temperature", "top_p", "min_p"), 0.5),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), 0.5),
    **dict.fromkeys(("top_k", "seed", "random_seed", "n", "n_cmpl", "priority"), 2),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), 2),
    **dict.fromkeys(("stream", "ignore_eos", "return_token_ids", "echo"), True),
    **dict.fromkeys(("store", "do_sample", "stop_repetition", "include_reasoning"), False),
    "explain_cache": True,
    **dict.fromkeys(("add_generation_prompt", "enable_thinking", "reasoning.enabled"), False),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"), 5),
    **dict.fromkeys(("max_new_tokens", "num_predict", "max_tokens_to_sample"), 5),
    "model": "other",
    "cache_salt": "a",
    "stop": "x",
    "stop_sequences": ["x"],
    "stop_token_ids": [3],
    "logit_bias": {"3": 1},
    "chat_template_kwargs": {"a": 1},
    "chat_template_args": {"a": 1},
    "thinking": False,
    "thinking.type": "disabled",
    "thinking.display": "omitted",
    "thinking.keep": "all",
    "thinking.clear_thinking": False,
    "preserve_thinking": True,
    "reasoning_history": "preserved",
    "reasoning_effort": "low",
    "reasoning.effort": "low",
    "reasoning.exclude": True,
    "verbosity": "low",
    "text.verbosity": "low",
    "response_format": {"type": "json_object"},
    "response_format.type": "text",
    "response_format.schema": SCHEMA,
    "response_format.json_schema.name": "b",
    "response_format.json_schema.schema": {"type": "array"},
    "context_length_exceeded_behavior": "truncate",
    "stream_options": {"include_usage": True},
    "usage": {"include": True},
    "reasoning": {"effort": "low"},
    "output_config": {"effort": "low"},
    "response_format.json_schema": {"name": "b", "schema": SCHEMA},
    "reasoning.context": "current_turn",
    "tools[].execution": "client",
    "tools[].environment": {"type": "local"},
    "stream_options.include_usage": True,
    "stream_options.continuous_usage_stats": True,
    "usage.include": True,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "suffix": "x",
    "best_of": None,
    "prompt": "other",
    "instructions": "Be brief.",
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "truncation": "disabled",
    "text.format.name": "b",
    "text.format.schema": {"type": "array"},
    "text": {"format": {"type": "json_object"}},
    "text.format": {"type": "json_object"},
    "output_config.effort": "low",
    "output_config.format": {"type": "json_schema", "schema": {"type": "array"}},
    "output_config.format.schema": {"type": "array"},
    "output_format": {"type": "json_schema", "schema": {"type": "array"}},
    "output_format.schema": {"type": "array"},
    "system": "Be brief.",
    "system[].text": "Be brief.",
    "tools[].name": "g",
    "tools[].function.name": "g",
    "tools[].description": "d",
    "tools[].function.description": "d",
    "tools[].parameters": {"type": "object", "title": "t"},
    "tools[].input_schema": {"type": "object", "title": "t"},
    "tools[].function.parameters": {"type": "object", "title": "t"},
    "tools[].function": {"name": "g"},
    "tools[].strict": True,
    "tools[].function.strict": True,
    "tools[].defer_loading": True,
    "tool_choice.type": "any",
}
"""Field -> a value that changes what the request asks for."""
ELSEWHERE = (
    "messages",
    "input",
    "previous_response_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "top_logprobs",
    "continue_final_message",
    "context_management",
    "thread",
    "tools[].type",
    "tools[].tools",
    "tools[].format",
    "tools[].max_characters",
    "text.format.type",
    "output_config.format.type",
    "output_format.type",
    "best_of",
    "include",
    "truncation",
    "system[].type",
)
"""Fields, or beginnings of their paths, with an effect that the tests of their APIs show."""


@pytest.mark.parametrize("api", API_TO_BODY)
def test_what_is_served_asks_for_something(api: str) -> None:
    for own, path, _ in paths_of(Verdict.SERVED):
        if own != api or path.startswith(ELSEWHERE):
            continue
        body = body_for(api, path)
        value = VALUES[path]
        if path == "logprobs" and api == CHAT:
            value = True
        if path == "suffix":
            assert parse(api, {**body, path: value}).suffix == value
            continue
        if path == "max_tokens" and api == MESSAGE:
            assert parse(api, {**body, path: 7}).ask.max_tokens == 7
            continue
        if path == "response_format.schema":
            body["response_format"] = {"type": "json_object"}
        if path.startswith("max_") or path.endswith("predict"):
            body.pop("max_tokens", None)
            found = parse(api, {**body, path: value})
            ask = found.chat.ask if api == RESPONSE else found.ask
            assert ask.max_tokens == 5
            if path.endswith("predict") and api != MESSAGE:
                ask = parse(api, {**body, path: -1})
                assert (ask.chat.ask if api == RESPONSE else ask.ask).max_tokens is None
            continue
        assert parse(api, body) != parse(api, with_field(body, path, value)), path


def struct_paths(kind: Any, where: str = "") -> Iterator[str]:
    """Yield the paths of the fields that a struct reads, nested objects included."""
    for name, hint in typing.get_type_hints(kind).items():
        if name not in kind.__struct_fields__:
            continue
        path = f"{where}.{name}" if where else name
        yield path
        for inner, is_listed in _structs_in(hint):
            if inner is not kind:
                yield from struct_paths(inner, f"{path}[]" if is_listed else path)


def _structs_in(hint: Any, *, is_listed: bool = False) -> Iterator[tuple[Any, bool]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint, is_listed
    origin = typing.get_origin(hint)
    for argument in () if origin is dict else typing.get_args(hint):
        yield from _structs_in(argument, is_listed=is_listed or origin is list)


@pytest.mark.parametrize("kind", BODY_TO_API)
def test_what_is_read_stands_in_the_table(kind: type[msgspec.Struct]) -> None:
    rows = rows_of(BODY_TO_API[kind])
    read = set(struct_paths(kind))
    whole = {path for path, row in rows.items() if row.verdict is not Verdict.SERVED}
    left_out = {path for path in read if path not in rows and path.partition(".")[0] not in whole}
    assert not left_out
    if kind is not CountRequest:
        served = {
            path for path, row in rows.items() if row.verdict is Verdict.SERVED and not row.alias
        }
        top = {path for path in served if "." not in path}
        assert top <= read, "served, and not read"


# ---- other services' fields ----


def typed_paths(kind: Any, where: str = "", depth: int = 3) -> Iterator[str]:
    """Yield the paths of the fields of an SDK's typed dictionary, down to `depth` levels below
    it, but none inside messages, input, tools and fallbacks.
    """
    for name, hint in typing_extensions.get_type_hints(kind).items():
        path = f"{where}.{name}" if where else name
        yield path
        if depth and path not in ("messages", "input", "tools", "fallbacks"):
            for inner, is_listed in _typed_in(hint):
                yield from typed_paths(inner, f"{path}[]" if is_listed else path, depth - 1)


def _typed_in(hint: Any, *, is_listed: bool = False) -> Iterator[tuple[Any, bool]]:
    if typing_extensions.is_typeddict(hint):
        yield hint, is_listed
    origin = typing.get_origin(hint)
    if origin in (dict, typing.Literal):
        return
    for argument in typing.get_args(hint):
        listed = is_listed or (
            origin is not None and origin not in (typing.Union,) and "Iterable" in repr(origin)
        )
        yield from _typed_in(argument, is_listed=listed or origin is list)


FREE_FORM = ("metadata", "logit_bias", "tool_choice", "citations", "thread", ".keep.")
"""Substrings of paths that need no row of their own in the table: special code reads the object
that contains the field, or no code reads it.
"""


@pytest.mark.parametrize(
    ("api", "kind"),
    [
        (CHAT, openai_chat.CompletionCreateParamsBase),
        (COMPLETION, openai_completion.CompletionCreateParamsBase),
        (RESPONSE, openai_response.ResponseCreateParamsBase),
        (MESSAGE, anthropic_message.MessageCreateParamsBase),
    ],
)
def test_the_sdks_fields_stand_in_the_table(api: str, kind: Any) -> None:
    rows = rows_of(api)

    def is_known(path: str) -> bool:
        begun = list(itertools.accumulate(path.split("."), lambda a, b: f"{a}.{b}"))
        ends = [rows.get(each.removesuffix("[]")) for each in begun]
        if any(row is not None and row.verdict is not Verdict.SERVED for row in ends):
            return True  # An object's verdict covers all its fields.
        return path in rows or any(step in path for step in FREE_FORM)

    assert [path for path in dict.fromkeys(typed_paths(kind)) if not is_known(path)] == []


OTHERS: dict[str, str] = {
    "DeepSeek": "thinking reasoning_effort frequency_penalty presence_penalty response_format stop stream"
    " stream_options tools tool_choice logprobs top_logprobs max_tokens",
    "vLLM": "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids ignore_eos"
    " include_stop_str_in_output min_tokens skip_special_tokens spaces_between_special_tokens"
    " truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words"
    " echo add_generation_prompt continue_final_message add_special_tokens documents chat_template"
    " chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id"
    " session_id return_tokens_as_token_ids return_token_ids return_token_offsets return_prompt_text"
    " return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection"
    " stream_interval thinking_token_budget include_reasoning watermarking routed_experts_prompt_start"
    " guided_json guided_regex guided_choice guided_grammar",
    "SGLang": "return_hidden_states return_routed_experts routed_experts_start_len"
    " return_cached_tokens_details return_prompt_token_ids return_meta_info task regex ebnf stop_regex"
    " no_stop_trim lora_path session_params separate_reasoning stream_reasoning max_dynamic_patch"
    " min_dynamic_patch use_audio_in_video images_config custom_logit_processor custom_params input_ids"
    " rid extra_key ngram_corpus_id bootstrap_host bootstrap_port bootstrap_room routed_dp_rank"
    " disagg_prefill_dp_rank data_parallel_rank custom_labels json_schema max_new_tokens min_new_tokens",
    "llama.cpp": "dynatemp_range dynatemp_exponent n_predict n_indent n_keep n_discard n_cmpl n_cache_reuse"
    " typical_p repeat_penalty repeat_last_n dry_multiplier dry_base dry_allowed_length"
    " dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau"
    " mirostat_eta grammar json_schema n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens"
    " samplers timings_per_token return_progress sse_ping_interval post_sampling_probs response_fields lora"
    " reasoning_format reasoning_budget thinking_budget_tokens parse_tool_calls top_n_sigma",
    "Together": "context_length_exceeded_behavior safety_model repetition_penalty reasoning compliance echo",
    "Fireworks": "prompt_truncate_len context_length_exceeded_behavior perf_metrics_in_response raw_output"
    " speculation prompt_cache_isolation_key prompt_cache_max_len mirostat_target mirostat_lr typical_p"
    " reasoning_history thinking sampling_mask prediction",
    "SiliconFlow": "enable_thinking thinking_budget min_p top_k frequency_penalty n response_format",
    "DashScope": "enable_thinking thinking_budget preserve_thinking enable_search search_options"
    " enable_code_interpreter vl_high_resolution_images translation_options asr_options result_format"
    " incremental_output modalities audio tool_stream parallel_tool_calls skill",
    "OpenRouter": "models route provider plugins transforms preset reasoning include_reasoning usage top_a"
    " session_id trace image_config cache_control verbosity prediction",
    "Moonshot": "thinking prompt_cache_key safety_identifier max_completion_tokens",
    "Zhipu": "do_sample request_id user_id tool_stream thinking sensitive_word_check",
}
"""Service or engine -> fields of its chat requests, from its reference."""


@pytest.mark.parametrize("service", OTHERS)
def test_other_services_fields_stand_in_the_tables(service: str) -> None:
    for api in API_TO_BODY:
        rows = rows_of(api)
        assert [name for name in OTHERS[service].split() if name not in rows] == [], api


# ---- fields that the table does not have ----


@pytest.mark.promise("Unknown fields change nothing either, and the log names each once.")
@pytest.mark.parametrize("api", API_TO_BODY)
def test_a_field_in_no_table_is_logged_once_by_name(
    api: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    body = API_TO_BODY[api]
    listed = {CHAT: "messages", RESPONSE: "input", MESSAGE: "messages"}
    odd = {"no_such_field": "private"}
    more: dict[str, Any] = {**body, **odd}
    if api in listed:
        more[listed[api]] = [{**entry, **odd} for entry in body[listed[api]]]
    for _ in range(2):
        found, plain = parse(api, more), parse(api, body)
        assert (found.chat, plain.chat)[0] == plain.chat if api == RESPONSE else found == plain
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 + (api in listed)
    assert all("no_such_field" in line and "private" not in line for line in said)
    if api in listed:
        assert f"{listed[api]}[].no_such_field" in said[1] or f"{listed[api]}[]" in said[0]


def test_clients_cannot_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    caplog.set_level(logging.WARNING)
    names = {f"field_{number}": 1 for number in range(2 * fields.MAX_LOGGED)}
    parse(CHAT, {**API_TO_BODY[CHAT], **names, "a\n" * 500: 1})
    assert len(caplog.records) == fields.MAX_LOGGED
    assert all("\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n_predict": 5, "max_tokens": 6}, "n_predict"),
        ({"n_predict": 5, "max_new_tokens": 6}, "max_new_tokens"),
        ({"n_predict": 0.5}, "n_predict"),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, "enable_thinking"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "thinking_token_budget"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format"),
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format"),
        (
            {"messages": [{"role": "user", "content": "a", "tools": [FUNCTION]}]},
            "messages[0].tools",
        ),
    ],
)
def test_fields_that_say_different_things(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(CHAT, {**API_TO_BODY[CHAT], **more})
    assert caught.value.param == param
    assert param.partition("[")[0] in str(caught.value)


def test_the_page_has_the_tables_of_today() -> None:
    text = pages.PAGE.read_text(encoding="utf-8")
    assert pages.written(text) == text, "python -m tests.suite.fields --write"
