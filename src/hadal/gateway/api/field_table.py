"""Known fields of request bodies, by API: served, refused by name, or without effect.

docs/api.md is made from these rows (`python -m tests.suite.fields --write`), and gateway/api/fields
applies them to bodies. gateway/api/field_rows says what a row is, and has the rows that several
APIs share.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hadal.gateway.api.field_rows import (
    EVERYWHERE,
    LEAVE,
    NEWER,
    OLDER,
    TEMPLATED,
    FieldRow,
    inert,
    refused,
    served,
)

CHAT, COMPLETION, RESPONSE, MESSAGE = "chat", "completion", "response", "message"
TOKENIZE = "tokenize"
API_TO_PATH = {
    CHAT: "/v1/chat/completions",
    COMPLETION: "/v1/completions",
    RESPONSE: "/v1/responses",
    MESSAGE: "/v1/messages",
    TOKENIZE: "/v1/tokenize",
}
"""API -> path of its endpoint. /v1/messages/count_tokens has the fields of /v1/messages."""

_LIMITS_BY = "OpenAI, SGLang, llama.cpp and others"
_CHAT = (
    served(
        "messages messages[].role messages[].content messages[].content[].type messages[].content[].text"
        " messages[].content[].refusal messages[].refusal messages[].name messages[].tool_calls"
        " messages[].tool_calls[].id messages[].tool_calls[].type messages[].tool_calls[].function"
        " messages[].tool_calls[].function.name"
        " messages[].tool_calls[].function.arguments messages[].tool_call_id"
    ),
    served(
        "messages[].prefix messages[].partial",
        "true on the last message: the reply continues it",
        "DeepSeek, Moonshot, DashScope",
    ),
    served(
        "messages[].reasoning_content messages[].reasoning messages[].reasoning_details"
        " messages[].reasoning_details[].text",
        "reasoning of an earlier turn, for templates that show it; with prefix: the beginning of the"
        " reply's reasoning",
        "DeepSeek, OpenRouter, vLLM",
    ),
    inert(
        "messages[].reasoning_details[].type messages[].reasoning_details[].summary messages[].reasoning_details[].data"
        " messages[].reasoning_details[].signature messages[].reasoning_details[].id"
        " messages[].reasoning_details[].format messages[].reasoning_details[].index",
        "only the text of a reasoning is read",
        "OpenRouter",
    ),
    inert(
        "messages[].annotations messages[].metadata messages[].status messages[].id messages[].type"
        " messages[].tool_calls[].index",
        "clients return these fields of earlier replies",
    ),
    inert(
        "messages[].cache_control messages[].content[].cache_control messages[].content[].prompt_cache_breakpoint"
        " tools[].cache_control",
        "prefixes are cached by content",
        "Anthropic, OpenRouter",
    ),
    refused("messages[].function_call", "send tool_calls"),
    refused("messages[].audio", "only text is read"),
    refused("messages[].tools", "send tools at the top", "SGLang"),
    refused(
        "messages[].content[].image_url messages[].content[].input_audio messages[].content[].file"
        " messages[].content[].video_url messages[].content[].audio_url",
        "only text is read",
    ),
    served(
        "max_completion_tokens max_tokens",
        "maximum number of tokens in a reply, including reasoning",
    ),
    served("max_output_tokens max_new_tokens", "", _LIMITS_BY, alias="max_tokens"),
    served("n_predict num_predict", "", _LIMITS_BY, alias="max_tokens", unset=(-1, -2)),
    served("logprobs top_logprobs"),
    served(
        "tools tools[].type tools[].function tools[].function.name tools[].function.description"
        " tools[].function.parameters tools[].function.strict"
    ),
    refused(
        "tools[].defer_loading tools[].function.defer_loading",
        "all tools are always offered to the model",
        "vLLM, SGLang",
    ),
    served("tool_choice parallel_tool_calls"),
    refused("functions", "send tools"),
    refused("function_call", "send tool_choice", "OpenAI", ("none", "auto")),
    served("verbosity", "passed to the chat template as a variable"),
    served(
        "include_reasoning reasoning.exclude",
        "the reply omits its reasoning",
        "vLLM, OpenRouter",
    ),
    served("add_generation_prompt continue_final_message", "", "vLLM"),
    refused("prompt", "send messages", "OpenRouter"),
    refused("input instructions", "send messages, or ask /v1/responses"),
    refused("system", "send a message of role system", "Anthropic"),
    refused("stop_sequences", "send stop", "Anthropic"),
    refused("text", "send response_format"),
    refused("add_special_tokens", "the chat template adds them", "vLLM"),
    refused("echo prompt_logprobs suffix", "send it to /v1/completions", "OpenAI, vLLM"),
    refused("prefix", "put it into the last message", "others"),
    refused("best_of", "send n", "OpenAI", (1,)),
)

_COMPLETION = (
    served("prompt suffix echo logprobs"),
    served("prompt_logprobs", "not with stream", "vLLM"),
    served("best_of", "must equal n"),
    served("max_tokens", "0: nothing is generated; default: up to the model's context"),
    served(
        "max_completion_tokens max_output_tokens max_new_tokens", "", _LIMITS_BY, alias="max_tokens"
    ),
    served("n_predict num_predict", "", _LIMITS_BY, alias="max_tokens", unset=(-1, -2)),
    refused(
        "add_special_tokens",
        "the tokenizer decides whether a begin token is added",
        "vLLM",
        (True,),
    ),
    refused("add_generation_prompt", "send a chat", "vLLM", (True,)),
    refused("continue_final_message messages", "send a chat", "vLLM"),
    refused("tools functions", "send a chat"),
    refused("tool_choice function_call", "send a chat", "OpenAI", ("none", "auto")),
    refused("parallel_tool_calls", "send a chat", "OpenAI", (True,)),
    refused("top_logprobs", "send a number as logprobs", "OpenAI", (0,)),
    refused("verbosity", "send a chat", "OpenAI", ("medium",)),
    refused(
        "thinking enable_thinking reasoning reasoning_effort preserve_thinking reasoning_history"
        " reasoning_in_content thinking_forced_open",
        "send a chat; completions have no separate reasoning",
        "DashScope, SiliconFlow, OpenAI, Fireworks",
    ),
    refused(
        "thinking_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens"
        " thinking_token_budget",
        "send a chat; completions have no separate reasoning",
        "DashScope, vLLM, llama.cpp",
        (-1,),
    ),
    inert(
        "reasoning_format stream_reasoning parse_tool_calls tool_stream reasoning_budget_message",
        "completions have no separate reasoning or calls",
        "llama.cpp, SGLang, Zhipu",
    ),
    refused(
        "include_reasoning separate_reasoning",
        "completions have no separate reasoning",
        "vLLM, SGLang",
        (True,),
    ),
    refused("chat_template_kwargs", "send a chat", "vLLM"),
    refused("input_prefix input_suffix input_extra", "send prompt and suffix", "llama.cpp"),
)

_HOSTED = (
    "external_web_access filters user_location search_context_size search_content_types "
    "vector_store_ids max_num_results ranking_options container server_label server_url "
    "server_description connector_id headers authorization allowed_tools "
    "require_approval action background input_fidelity input_image_mask model "
    "moderation output_compression output_format partial_images quality size "
    "return_token_budget image_settings tunnel_id complexity frame_count frame_duration_ms svg"
)
"""Fields of tools that only a provider can run."""

_RESPONSE = (
    served(
        "input input[].type input[].role input[].content input[].content[].type input[].content[].text"
        " input[].content[].refusal input[].call_id input[].name input[].namespace input[].arguments"
        " input[].input input[].output input[].output[].type input[].output[].text"
        " input[].output[].refusal input[].output[].stdout input[].output[].stderr"
        " input[].output[].outcome input[].action input[].operation input[].id"
    ),
    served(
        "input[].content[].encrypted_content",
        "of an agent_message, which is read as the user's: its text",
        "Codex",
    ),
    served(
        "input[].encrypted_content",
        "read if this server wrote it; of another server: ignored and counted",
    ),
    served(
        "input[].tools input[].tools[].type input[].tools[].name input[].tools[].description"
        " input[].tools[].parameters input[].tools[].strict input[].tools[].tools"
        " input[].tools[].format input[].tools[].format.type input[].tools[].format.syntax"
        " input[].tools[].format.definition input[].tools[].execution input[].tools[].environment"
        " input[].tools[].defer_loading",
        "tools of an additional_tools or tool_search_output item: offered from there on",
        "OpenAI (Codex)",
    ),
    inert("input[].tools[].output_schema input[].tools[].async", "the model reads any output"),
    served(
        "input[].summary input[].summary[].type input[].summary[].text input[].summary[].refusal"
        " input[].status input[].execution input[].author input[].recipient",
        "listed with the input, but not part of the prompt",
    ),
    inert(
        "input[].environment input[].max_output_length input[].created_by",
        "they tell how the client ran a call",
    ),
    served(
        "reasoning.context",
        "current_turn: reasoning before the last user message is left out; all_turns: as"
        " preserve_thinking; otherwise the chat template decides",
    ),
    inert(
        "input[].phase input[].caller input[].async input[].content[].annotations"
        " input[].content[].logprobs input[].content[].prompt_cache_breakpoint input[].output[].prompt_cache_breakpoint"
        " input[].internal_chat_message_metadata_passthrough",
        "clients return these fields of earlier replies",
    ),
    served("instructions previous_response_id metadata tool_choice parallel_tool_calls"),
    served("store", "false: the response is not kept"),
    served("max_output_tokens", "maximum number of tokens in a reply, including reasoning"),
    served(
        "max_tokens max_completion_tokens max_new_tokens", "", _LIMITS_BY, alias="max_output_tokens"
    ),
    served("n_predict num_predict", "", _LIMITS_BY, alias="max_output_tokens", unset=(-1, -2)),
    served(
        "tools tools[].type tools[].name tools[].description tools[].parameters tools[].strict",
        "functions; tools that only a provider can run are ignored and logged",
    ),
    served("tools[].tools", "functions and custom tools of a namespace", "OpenAI (Codex)"),
    served(
        "tools[].format tools[].format.type tools[].format.syntax tools[].format.definition",
        "a custom tool's input follows this grammar, which is also part of the prompt",
    ),
    served(
        "tools[].defer_loading",
        "true beside a tool_search of the client: offered once the search found it",
    ),
    served("tools[].execution", "of a tool_search: client; one of a provider is ignored"),
    served("tools[].environment", "of a shell: local; one in a provider's container is ignored"),
    inert("tools[].output_schema tools[].async", "the model reads any output"),
    served(
        "tools[].allowed_callers input[].tools[].allowed_callers",
        "a list with direct, because the model calls directly",
    ),
    inert(
        " ".join(f"tools[].{name} input[].tools[].{name}" for name in _HOSTED.split()),
        "they belong to tools that are ignored",
    ),
    served("text text.format text.format.type text.format.name text.format.schema"),
    inert(
        "text.format.description",
        "output is constrained by the schema; the prompt does not include it",
    ),
    inert("text.format.strict", "output always follows the schema"),
    served("text.verbosity", "passed to the chat template as a variable"),
    served(
        "include",
        "reasoning.encrypted_content: reasoning items have a form to send back; details of ignored tools"
        " change nothing",
    ),
    served("truncation", "disabled"),
    served("top_k", "", "vLLM"),
    inert("client_metadata", "labels change no reply", "OpenAI (Codex)"),
    refused("background", "read the stream, or wait for the reply"),
    inert("background_options", "they belong to background, which returns a 400"),
    refused("conversation", "send previous_response_id"),
    refused("prompt", "send the text itself"),
    refused("context_management", "shorten the input in the client"),
    refused("max_tool_calls", "this server runs no tools"),
    refused("messages", "send input"),
    refused("response_format", "send text.format"),
    refused("verbosity", "send text.verbosity", "OpenAI", ("medium",)),
    refused("stop_sequences system", "send instructions", "Anthropic"),
    *NEWER,
)

_MESSAGE = (
    served(
        "messages messages[].role messages[].content messages[].content[].type messages[].content[].text"
        " messages[].content[].id messages[].content[].name messages[].content[].input"
        " messages[].content[].tool_use_id messages[].content[].content messages[].content[].is_error"
        " messages[].content[].content[].type messages[].content[].content[].text"
        " messages[].content[].content[].tool_name system system[].type system[].text"
        " messages[].output_config messages[].output_config.effort",
        "",
        "Anthropic",
    ),
    served(
        "messages[].content[].thinking messages[].content[].signature",
        "reasoning of an earlier turn, for chat templates that show it; without its text, that in a"
        " signature of this server; other signatures are not read",
        "Anthropic",
    ),
    inert(
        "messages[].content[].data",
        "only the server that redacted a reasoning can read it",
        "Anthropic",
    ),
    served(
        "messages[].content[].tool messages[].content[].tool.type messages[].content[].tool.name"
        " messages[].content[].tool.definition messages[].content[].tool.definition.name"
        " messages[].content[].tool.definition.type messages[].content[].tool.definition.strict"
        " messages[].content[].tool.definition.description"
        " messages[].content[].tool.definition.input_schema"
        " messages[].content[].tool.definition.defer_loading"
        " messages[].content[].tool.definition.max_characters",
        "tool of a tool_addition or tool_removal in a system message",
        "Anthropic",
    ),
    served(
        "messages[].clear_at",
        "next_user_message: a system message is not shown once a message of the user follows",
        "Anthropic",
    ),
    inert(
        "messages[].content[].cache_control messages[].content[].content[].cache_control system[].cache_control"
        " messages[].content[].tool.definition.cache_control"
        " tools[].cache_control",
        "prefixes are cached by content",
        "Anthropic",
    ),
    inert(
        "messages[].content[].caller messages[].content[].citations messages[].content[].content[].citations"
        " system[].citations messages[].content[].toolset messages[].content[].toolset_name",
        "clients return these fields of earlier replies",
        "Anthropic",
    ),
    refused(
        "system[].clear_at messages[].content[].clear_at",
        "send it beside the role of a system message",
        "Anthropic",
    ),
    served("max_tokens", "maximum number of tokens in a reply, including reasoning", "Anthropic"),
    served(
        "max_completion_tokens max_output_tokens max_new_tokens max_tokens_to_sample",
        "",
        _LIMITS_BY,
        alias="max_tokens",
    ),
    served("n_predict num_predict", "", _LIMITS_BY, alias="max_tokens", unset=(-1, -2)),
    served("top_k stop_sequences", "", "Anthropic"),
    served(
        "tools tools[].name tools[].description tools[].input_schema tools[].type tools[].strict",
        "",
        "Anthropic",
    ),
    served(
        "tools[].defer_loading",
        "true: the tool is offered after a tool_reference or tool_addition that names it",
        "Anthropic",
    ),
    served("tools[].max_characters", "of the text editor: it is part of the prompt", "Anthropic"),
    inert(
        "tools[].eager_input_streaming messages[].content[].tool.definition.eager_input_streaming",
        "calls are always streamed when they are generated",
        "Anthropic",
    ),
    refused(
        "tools[].allowed_callers messages[].content[].tool.definition.allowed_callers",
        "the model calls directly",
        "Anthropic",
        (["direct"],),
    ),
    refused(
        "tools[].input_examples messages[].content[].tool.definition.input_examples",
        "put examples into the description",
        "Anthropic",
    ),
    served(
        "tool_choice tool_choice.type tool_choice.name tool_choice.disable_parallel_tool_use",
        "",
        "Anthropic",
    ),
    served(
        "thinking.display",
        "omitted: thinking blocks have no text; with other values they have the full reasoning",
        "Anthropic",
    ),
    served(
        "output_config output_config.effort output_config.format output_config.format.type output_config.format.schema",
        "",
        "Anthropic",
    ),
    served(
        "output_format output_format.type output_format.schema",
        "same as output_config.format",
        "Anthropic",
    ),
    refused("output_config.task_budget", "send max_tokens", "Anthropic"),
    served(
        "context_management context_management.edits context_management.edits[].type"
        " context_management.edits[].keep context_management.edits[].keep.type"
        " context_management.edits[].keep.value context_management.edits[].trigger"
        " context_management.edits[].trigger.type context_management.edits[].trigger.value"
        " context_management.edits[].clear_at_least context_management.edits[].clear_at_least.type"
        " context_management.edits[].clear_at_least.value"
        " context_management.edits[].clear_tool_inputs context_management.edits[].exclude_tools"
        " context_management.edits[].instructions"
        " context_management.edits[].pause_after_compaction",
        "edits of type clear_thinking_20251015 and clear_tool_uses_20250919; others return a 400",
        "Anthropic",
    ),
    served(
        "thread",
        "rejected with a code after which clients send the whole conversation",
        "Anthropic",
    ),
    inert(
        "diagnostics user_profile_id workspace_id fallback_credit_token",
        "they change no reply",
        "Anthropic",
    ),
    refused("container mcp_servers", "this server runs no tools", "Anthropic"),
    refused("compaction", "shorten the conversation in the client", "Anthropic"),
    refused("response_format text", "send output_config.format"),
    refused("parallel_tool_calls", "send tool_choice.disable_parallel_tool_use", "OpenAI", (True,)),
    refused("verbosity", LEAVE, "OpenAI", ("medium",)),
    refused("input instructions prompt", "send messages and system"),
    *(row for row in NEWER if "stop" not in row.paths),
    refused("stop", "send stop_sequences"),
)

_TOKENIZE = (
    served("prompt messages add_special_tokens return_token_strs", "", "vLLM"),
    inert("mm_processor_kwargs media_io_kwargs", "prompts are text only", "vLLM"),
)

_API_TO_ROWS = {
    CHAT: (*EVERYWHERE, *TEMPLATED, *OLDER, *_CHAT),
    COMPLETION: (*EVERYWHERE, *OLDER, *_COMPLETION),
    RESPONSE: (*EVERYWHERE, *TEMPLATED, *_RESPONSE),
    MESSAGE: (*EVERYWHERE, *TEMPLATED, *_MESSAGE),
    TOKENIZE: (*EVERYWHERE, *TEMPLATED, *OLDER, *_CHAT, *_TOKENIZE),
}


@cache
def rows_of(api: str) -> Mapping[str, FieldRow]:
    """Return path -> row for an API; of several rows with one path the last counts."""
    return {path: row for row in _API_TO_ROWS[api] for path in row.paths}
