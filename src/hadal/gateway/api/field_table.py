"""Known fields of request bodies, by API: served, refused by name, or without effect.

One row is one field, or several with the same answer. A path names a field: `a.b` is field b of
object a, `a[].b` is field b of each object in list a. docs/api.md is made from these rows (`python
-m tests.suite.fields --write`), and gateway/api/fields applies them to bodies. Sources: the public
references and SDK types of the services that each row names, in November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

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


class Verdict(Enum):
    """Treatment of a field."""

    SERVED = "served"
    REFUSED = "400"
    INERT = "inert"


@dataclass(frozen=True, eq=False)
class FieldRow:
    """Fields with the same treatment."""

    paths: tuple[str, ...]
    verdict: Verdict
    note: str
    """Served: the effect, if the name does not show it. Refused: what to do instead, or the
    reason. Inert: why it changes nothing.
    """
    by: str
    """Services and engines that document the fields."""
    harmless: tuple[Any, ...] = ()
    """Refused: values without effect, which are accepted. null is always one of them; false, "", []
    and {} are too, unless true or null is listed here.
    """
    alias: str = ""
    """Served: the field's own name, if the paths are aliases of it; "" if they are own names."""
    unset: tuple[Any, ...] = ()
    """Values of an alias that count as absent."""


def _served(
    paths: str, note: str = "", by: str = "OpenAI", *, alias: str = "", unset: tuple[Any, ...] = ()
) -> FieldRow:
    return FieldRow(tuple(paths.split()), Verdict.SERVED, note, by, (), alias, unset)


def _refused(
    paths: str, instead: str, by: str = "OpenAI", unless: tuple[Any, ...] = ()
) -> FieldRow:
    return FieldRow(tuple(paths.split()), Verdict.REFUSED, instead, by, unless)


def _inert(paths: str, why: str, by: str = "OpenAI") -> FieldRow:
    return FieldRow(tuple(paths.split()), Verdict.INERT, why, by)


_LEAVE = "leave it out"
_LIMITS_BY = "OpenAI, SGLang, llama.cpp and others"

_EVERYWHERE = (
    _served("model stream temperature top_p seed"),
    _served("priority", "from -4 to 4; a higher value starts sooner", "Hadal"),
    _served("cache_salt", "KV is reused only between requests with the same salt", "vLLM, SGLang"),
    _served(
        "explain_cache",
        "true: usage says why the prompt was not cached; a stream then has usage",
        "Hadal",
    ),
    _served("stop_repetition", "false: a reply that repeats itself is not stopped", "Hadal"),
    _served("do_sample", "false: temperature is 0", "Zhipu"),
    _inert(
        "user safety_identifier user_id end_user_id",
        "end users are not distinguished",
        "OpenAI, Zhipu",
    ),
    _inert("metadata", "it is not read (/v1/responses returns it)", "OpenAI, Anthropic"),
    _inert("service_tier speed", "there is only one service tier", "OpenAI, Anthropic"),
    _inert("store", "only /v1/responses stores replies"),
    _inert(
        "prompt_cache_key prompt_cache_retention prompt_cache_options",
        "prefixes are cached by content; caching changes no token",
    ),
    _inert(
        "prompt_cache_max_len cache_prompt id_slot n_cache_reuse",
        "caching changes no token",
        "Fireworks, llama.cpp",
    ),
    _inert(
        "request_id rid session_id session_params",
        "the server assigns the reply's id",
        "vLLM, SGLang, Zhipu, OpenRouter",
    ),
    _inert(
        "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank"
        " disagg_prefill_dp_rank kv_transfer_params ec_transfer_params",
        "the server does routing and KV transfer itself",
        "vLLM, SGLang",
    ),
    _inert(
        "extra_key custom_labels trace betas billing_policy",
        "labels and billing change no reply",
        "SGLang, OpenRouter, Anthropic",
    ),
    _inert("provider", "there is one provider", "OpenRouter"),
    _inert("cache_control", "prefixes are cached by content", "Anthropic, OpenRouter"),
    _inert(
        "prediction speculation",
        "predicted text is not used; it would change no token",
        "OpenAI, Fireworks",
    ),
    _inert("ngram_corpus_id", "speculative decoding changes no token", "SGLang"),
    _inert(
        "backend_sampling sse_ping_interval", "internal options, which change no reply", "llama.cpp"
    ),
    _inert(
        "image image_config images_config access_programs",
        "only text is read and generated",
        "OpenAI, OpenRouter, SGLang",
    ),
    _refused("extra_body", "put its fields at the top of the body", "OpenAI SDK"),
    _refused("models", "send one model", "OpenRouter"),
    _refused("route plugins preset transforms fallbacks", _LEAVE, "OpenRouter, Anthropic"),
    _refused(
        "moderation safety_model sensitive_word_check",
        "check texts in the client",
        "OpenAI, Together, Zhipu",
    ),
    _refused("web_search_options", "send a tool that searches", "OpenAI", (None,)),
    _refused("enable_search search_options", "send a tool that searches", "DashScope"),
    _refused("enable_code_interpreter", "send a tool that runs code", "DashScope"),
    _refused("translation_options asr_options skill", "put it into a message", "DashScope"),
    _refused(
        "vl_high_resolution_images media_io_kwargs mm_processor_kwargs",
        "send text",
        "DashScope, vLLM",
    ),
    _refused("max_dynamic_patch min_dynamic_patch use_audio_in_video", "send text", "SGLang"),
    _refused("incremental_output", "streams are always incremental", "DashScope", (True,)),
    _refused("result_format", "send 'message', or leave it out", "DashScope", ("message",)),
    _refused("audio", "only text is generated"),
    _refused("modalities", "only text is generated", "OpenAI", (["text"],)),
    _refused(
        "bad_words allowed_token_ids logit_processors logits_processors custom_logit_processor"
        " custom_params vllm_xargs",
        "send logit_bias to /v1/chat/completions",
        "vLLM, SGLang",
    ),
    _refused(
        "guided_json guided_choice guided_regex guided_grammar guided_decoding_backend"
        " guided_whitespace_pattern structured_outputs structural_tag regex ebnf json_schema",
        "ask for a JSON schema with response_format",
        "vLLM, SGLang, llama.cpp",
    ),
    _refused(
        "grammar grammar_lazy grammar_triggers",
        "ask for a JSON schema with response_format",
        "llama.cpp",
    ),
    _refused("use_beam_search", "send n for several texts", "vLLM"),
    _refused("length_penalty", "it is for beam search; leave it out", "vLLM", (1,)),
    _refused("repetition_detection", "loops are always detected; see stop_repetition", "vLLM"),
    _refused("watermarking", _LEAVE, "vLLM"),
    _refused("stop_regex", "send stop strings", "SGLang"),
    _refused(
        "no_stop_trim include_stop_str_in_output",
        "a reply never includes the stop string",
        "vLLM, SGLang",
    ),
    _refused(
        "skip_special_tokens spaces_between_special_tokens",
        "a reply's text has no control tokens",
        "vLLM, SGLang",
        (True,),
    ),
    _refused(
        "truncate_prompt_tokens truncation_side prompt_truncate_len",
        "shorten the prompt",
        "vLLM, Fireworks",
    ),
    _refused(
        "input_ids prompt_embeds",
        "send text, or token ids as a prompt of /v1/completions",
        "vLLM, SGLang",
    ),
    _refused(
        "chat_template",
        "the model's own template is used; chat_template_kwargs sets its variables",
        "vLLM",
    ),
    _refused("documents", "put documents into a message", "vLLM"),
    _refused("task", "put it into a message", "SGLang"),
    _refused("lora lora_path", "only the model itself is served", "SGLang, llama.cpp"),
    _refused(
        "return_hidden_states return_routed_experts return_meta_info return_cached_tokens_details"
        " return_prompt_text routed_experts_start_len routed_experts_prompt_start",
        "replies do not include it",
        "vLLM, SGLang",
        (0,),
    ),
    _refused(
        "return_prompt_token_ids return_tokens",
        "send return_token_ids to /v1/chat/completions",
        "SGLang, llama.cpp",
    ),
    _refused(
        "return_tokens_as_token_ids return_token_offsets",
        "send return_token_ids to /v1/chat/completions",
        "vLLM",
    ),
    _inert("return_mm_kwargs", "it is for prompts with images", "vLLM"),
    _refused("logprob_token_ids", "send top_logprobs to /v1/chat/completions", "vLLM"),
    _refused("stream_interval", "each token is streamed when it is generated", "vLLM", (1,)),
    _refused(
        "n_probs", "send logprobs and top_logprobs to /v1/chat/completions", "llama.cpp", (0,)
    ),
    _refused(
        "post_sampling_probs",
        "log-probabilities are the model's, before sampling options",
        "llama.cpp",
    ),
    _refused(
        "response_fields timings_per_token return_progress",
        "replies do not include it",
        "llama.cpp",
    ),
    _refused(
        "perf_metrics_in_response raw_output sampling_mask",
        "replies do not include it",
        "Fireworks",
    ),
    _refused("max_length", "send max_tokens", "others"),
    _refused(
        "repeat_penalty",
        "send repetition_penalty, which looks at the whole text",
        "llama.cpp",
        (1,),
    ),
    _inert(
        "repeat_last_n dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
        " xtc_threshold mirostat_tau mirostat_eta mirostat_lr dynatemp_exponent",
        "they only tune samplers that are rejected",
        "llama.cpp, Fireworks",
    ),
    _refused(
        "dry_multiplier xtc_probability mirostat mirostat_target dynatemp_range top_a n_indent min_keep"
        " t_max_predict_ms adaptive_decay",
        "use temperature, top_p or min_p",
        "llama.cpp, Fireworks, OpenRouter",
        (0,),
    ),
    _refused(
        "adaptive_target top_n_sigma", "use temperature, top_p or min_p", "llama.cpp", (-1, 0)
    ),
    _refused("tfs_z typical_p typ_p", "use top_p or min_p", "llama.cpp, Fireworks", (1,)),
    _refused("samplers", "the order is fixed; leave it out", "llama.cpp"),
    _inert("n_keep n_discard", "no token of a prompt is ever dropped", "llama.cpp"),
    _refused("prompt_cache_isolation_key", "send cache_salt", "Fireworks"),
    _refused(
        "compliance inference_geo",
        "leave it out; this server cannot change it",
        "Together, Anthropic",
    ),
)
"""Fields of every API, unless an API's own row says otherwise."""

_TEMPLATED = (
    _served("chat_template_kwargs", "variables for the chat template", "vLLM, SGLang, llama.cpp"),
    _served("chat_template_args", "", "TensorRT-LLM", alias="chat_template_kwargs"),
    _served(
        "enable_thinking",
        "true: the model reasons before it answers; false: it does not",
        "DashScope, SiliconFlow",
    ),
    _served(
        "thinking thinking.type",
        "true, false, or a type: enabled, disabled; with adaptive and auto the chat template decides",
        "DeepSeek, Anthropic, Zhipu, Moonshot, Fireworks",
    ),
    _served("thinking.budget_tokens", "maximum number of reasoning tokens", "Anthropic, Fireworks"),
    _served(
        "thinking_budget thinking_token_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens",
        "maximum number of reasoning tokens; -1 for no limit",
        "DashScope, SiliconFlow, vLLM, llama.cpp",
    ),
    _served(
        "reasoning_effort",
        "none, or the amount of reasoning",
        "OpenAI, DeepSeek, vLLM, SGLang, Fireworks",
    ),
    _served("reasoning", "an object with the fields below", "OpenAI, OpenRouter, Together"),
    _served("reasoning.effort", "none, or the amount of reasoning", "OpenAI, OpenRouter"),
    _served(
        "reasoning.enabled",
        "true: the model reasons before it answers; false: it does not",
        "OpenRouter, Together",
    ),
    _served("reasoning.max_tokens", "maximum number of reasoning tokens", "OpenRouter"),
    _inert("reasoning.summary reasoning.generate_summary", "the reply has the full reasoning"),
    _refused("reasoning.context", "send preserve_thinking, or leave it out", "OpenAI", ("auto",)),
    _refused("reasoning.mode", _LEAVE, "OpenAI", ("standard",)),
    _served(
        "thinking.keep thinking.clear_thinking preserve_thinking reasoning_history",
        "variables preserve_thinking and clear_thinking for the chat template: show the reasoning of"
        " all earlier turns, or not",
        "Moonshot, Zhipu, DashScope, Fireworks",
    ),
    _refused("thinking.display", "send include_reasoning", "Anthropic", ("summarized",)),
    _inert("thinking.block_binding", "signatures of thinking blocks are not checked", "Anthropic"),
    _refused(
        "reasoning_budget_message", "no message is inserted when the budget is used up", "llama.cpp"
    ),
    _refused("thinking_forced_open", "send enable_thinking", "llama.cpp"),
    _refused("reasoning_in_content", "reasoning has a separate field", "llama.cpp"),
    _refused(
        "reasoning_format",
        "reasoning has a separate field",
        "llama.cpp",
        ("auto", "deepseek", "parsed"),
    ),
    _refused("separate_reasoning", "reasoning has a separate field", "SGLang", (True,)),
    _refused("stream_reasoning", "reasoning is streamed when it is generated", "SGLang", (True,)),
    _inert("tool_stream", "calls are always streamed when they are generated", "Zhipu, DashScope"),
    _refused("parse_tool_calls", "calls always have a separate field", "llama.cpp", (True,)),
)
"""Fields of every API with a chat template."""

_OLDER = (
    _served(
        "n min_tokens presence_penalty frequency_penalty repetition_penalty logit_bias stop stop_token_ids"
        " top_k min_p ignore_eos",
        "",
        "OpenAI, vLLM, SGLang",
    ),
    _served("n_cmpl", "", "llama.cpp", alias="n"),
    _served("min_new_tokens", "", "SGLang", alias="min_tokens"),
    _served("random_seed", "", "others", alias="seed"),
    _served(
        "return_token_ids",
        "true: include the token ids of the prompt and the reply",
        "vLLM, SGLang",
    ),
    _served("stream_options stream_options.include_usage"),
    _served(
        "stream_options.continuous_usage_stats",
        "with include_usage: each chunk has the usage so far",
        "vLLM, SGLang",
    ),
    _inert("stream_options.include_obfuscation", "chunks are not padded"),
    _served(
        "usage usage.include",
        "in a stream: same as stream_options.include_usage; other replies always have usage",
        "OpenRouter",
    ),
    _served("response_format response_format.type", "text, json_object or json_schema"),
    _served(
        "response_format.schema",
        "a schema, with type json_object or json_schema",
        "llama.cpp, Together, Fireworks",
    ),
    _served(
        "response_format.json_schema response_format.json_schema.name"
        " response_format.json_schema.schema"
    ),
    _inert(
        "response_format.json_schema.description",
        "output is constrained by the schema; the prompt does not include it",
    ),
    _inert("response_format.json_schema.strict", "output always follows the schema"),
    _refused(
        "response_format.grammar response_format.pattern response_format.regex response_format.structures"
        " response_format.triggers response_format.format",
        "ask for a JSON schema",
        "Fireworks, vLLM, SGLang",
    ),
    _served(
        "context_length_exceeded_behavior",
        "if the token limit exceeds the context: truncate lowers it; error returns a 400",
        "Together, Fireworks",
    ),
)
"""Fields of OpenAI's two older APIs."""

_NEWER = (
    _refused("n n_cmpl best_of", "send one request per reply", "OpenAI", (1,)),
    _refused("stop", "send it to /v1/chat/completions"),
    _refused("min_tokens min_new_tokens", "send it to /v1/chat/completions", "vLLM", (0,)),
    _refused(
        "presence_penalty frequency_penalty", "send it to /v1/chat/completions", "OpenAI", (0,)
    ),
    _refused("repetition_penalty", "send it to /v1/chat/completions", "vLLM", (1,)),
    _refused("logit_bias logprobs", "send it to /v1/chat/completions"),
    _refused(
        "stop_token_ids ignore_eos return_token_ids", "send it to /v1/chat/completions", "vLLM"
    ),
    _refused("min_p top_logprobs", "send it to /v1/chat/completions", "vLLM", (0,)),
    _refused(
        "context_length_exceeded_behavior",
        "send it to /v1/chat/completions",
        "Together",
        ("error",),
    ),
    _refused(
        "include_reasoning", "the reply always has the reasoning", "vLLM, OpenRouter", (True,)
    ),
    _refused("reasoning.exclude", "the reply always has the reasoning", "OpenRouter"),
    _refused("functions function_call", "send tools"),
    _refused("prompt_logprobs echo suffix", "send it to /v1/completions", "vLLM"),
    _inert("stream_options usage", "the last event has the usage"),
    _refused("add_generation_prompt", "send it to /v1/chat/completions", "vLLM", (True,)),
    _refused("continue_final_message", "send it to /v1/chat/completions", "vLLM"),
    _refused("add_special_tokens", "the chat template adds them", "vLLM"),
)
"""Fields of the two older APIs that the newer two, responses and messages, do not serve."""

_CHAT = (
    _served(
        "messages messages[].role messages[].content messages[].content[].type messages[].content[].text"
        " messages[].content[].refusal messages[].refusal messages[].name messages[].tool_calls"
        " messages[].tool_calls[].id messages[].tool_calls[].type messages[].tool_calls[].function"
        " messages[].tool_calls[].function.name"
        " messages[].tool_calls[].function.arguments messages[].tool_call_id"
    ),
    _served(
        "messages[].prefix messages[].partial",
        "true on the last message: the reply continues it",
        "DeepSeek, Moonshot, DashScope",
    ),
    _served(
        "messages[].reasoning_content messages[].reasoning messages[].reasoning_details"
        " messages[].reasoning_details[].text",
        "reasoning of an earlier turn, for templates that show it; with prefix: the beginning of the"
        " reply's reasoning",
        "DeepSeek, OpenRouter, vLLM",
    ),
    _inert(
        "messages[].reasoning_details[].type messages[].reasoning_details[].summary messages[].reasoning_details[].data"
        " messages[].reasoning_details[].signature messages[].reasoning_details[].id"
        " messages[].reasoning_details[].format messages[].reasoning_details[].index",
        "only the text of a reasoning is read",
        "OpenRouter",
    ),
    _inert(
        "messages[].annotations messages[].metadata messages[].status messages[].id messages[].type"
        " messages[].tool_calls[].index",
        "clients return these fields of earlier replies",
    ),
    _inert(
        "messages[].cache_control messages[].content[].cache_control messages[].content[].prompt_cache_breakpoint"
        " tools[].cache_control",
        "prefixes are cached by content",
        "Anthropic, OpenRouter",
    ),
    _refused("messages[].function_call", "send tool_calls"),
    _refused("messages[].audio", "only text is read"),
    _refused("messages[].tools", "send tools at the top", "SGLang"),
    _refused(
        "messages[].content[].image_url messages[].content[].input_audio messages[].content[].file"
        " messages[].content[].video_url messages[].content[].audio_url",
        "only text is read",
    ),
    _served(
        "max_completion_tokens max_tokens",
        "maximum number of tokens in a reply, including reasoning",
    ),
    _served("max_output_tokens max_new_tokens", "", _LIMITS_BY, alias="max_tokens"),
    _served("n_predict num_predict", "", _LIMITS_BY, alias="max_tokens", unset=(-1, -2)),
    _served("logprobs top_logprobs"),
    _served(
        "tools tools[].type tools[].function tools[].function.name tools[].function.description"
        " tools[].function.parameters tools[].function.strict"
    ),
    _refused(
        "tools[].defer_loading tools[].function.defer_loading",
        "all tools are always offered to the model",
        "vLLM, SGLang",
    ),
    _served("tool_choice parallel_tool_calls"),
    _refused("functions", "send tools"),
    _refused("function_call", "send tool_choice", "OpenAI", ("none", "auto")),
    _served("verbosity", "passed to the chat template as a variable"),
    _served(
        "include_reasoning reasoning.exclude",
        "the reply omits its reasoning",
        "vLLM, OpenRouter",
    ),
    _served("add_generation_prompt continue_final_message", "", "vLLM"),
    _refused("prompt", "send messages", "OpenRouter"),
    _refused("input instructions", "send messages, or ask /v1/responses"),
    _refused("system", "send a message of role system", "Anthropic"),
    _refused("stop_sequences", "send stop", "Anthropic"),
    _refused("text", "send response_format"),
    _refused("add_special_tokens", "the chat template adds them", "vLLM"),
    _refused("echo prompt_logprobs suffix", "send it to /v1/completions", "OpenAI, vLLM"),
    _refused("prefix", "put it into the last message", "others"),
    _refused("best_of", "send n", "OpenAI", (1,)),
)

_COMPLETION = (
    _served("prompt suffix echo logprobs"),
    _served("prompt_logprobs", "not with stream", "vLLM"),
    _served("best_of", "must equal n"),
    _served("max_tokens", "0: nothing is generated; default: up to the model's context"),
    _served(
        "max_completion_tokens max_output_tokens max_new_tokens", "", _LIMITS_BY, alias="max_tokens"
    ),
    _served("n_predict num_predict", "", _LIMITS_BY, alias="max_tokens", unset=(-1, -2)),
    _refused(
        "add_special_tokens",
        "the tokenizer decides whether a begin token is added",
        "vLLM",
        (True,),
    ),
    _refused("add_generation_prompt", "send a chat", "vLLM", (True,)),
    _refused("continue_final_message messages", "send a chat", "vLLM"),
    _refused("tools functions", "send a chat"),
    _refused("tool_choice function_call", "send a chat", "OpenAI", ("none", "auto")),
    _refused("parallel_tool_calls", "send a chat", "OpenAI", (True,)),
    _refused("top_logprobs", "send a number as logprobs", "OpenAI", (0,)),
    _refused("verbosity", "send a chat", "OpenAI", ("medium",)),
    _refused(
        "thinking enable_thinking reasoning reasoning_effort preserve_thinking reasoning_history"
        " reasoning_in_content thinking_forced_open",
        "send a chat; completions have no separate reasoning",
        "DashScope, SiliconFlow, OpenAI, Fireworks",
    ),
    _refused(
        "thinking_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens"
        " thinking_token_budget",
        "send a chat; completions have no separate reasoning",
        "DashScope, vLLM, llama.cpp",
        (-1,),
    ),
    _inert(
        "reasoning_format stream_reasoning parse_tool_calls tool_stream reasoning_budget_message",
        "completions have no separate reasoning or calls",
        "llama.cpp, SGLang, Zhipu",
    ),
    _refused(
        "include_reasoning separate_reasoning",
        "completions have no separate reasoning",
        "vLLM, SGLang",
        (True,),
    ),
    _refused("chat_template_kwargs", "send a chat", "vLLM"),
    _refused("input_prefix input_suffix input_extra", "send prompt and suffix", "llama.cpp"),
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
    _served(
        "input input[].type input[].role input[].content input[].content[].type input[].content[].text"
        " input[].content[].refusal input[].call_id input[].name input[].namespace input[].arguments"
        " input[].input input[].output input[].output[].type input[].output[].text"
        " input[].output[].refusal input[].output[].stdout input[].output[].stderr"
        " input[].output[].outcome input[].action input[].operation input[].id"
    ),
    _served(
        "input[].content[].encrypted_content",
        "of an agent_message, which is read as the user's: its text",
        "Codex",
    ),
    _served(
        "input[].encrypted_content",
        "read if this server wrote it; of another server: ignored and counted",
    ),
    _served(
        "input[].tools input[].tools[].type input[].tools[].name input[].tools[].description"
        " input[].tools[].parameters input[].tools[].strict input[].tools[].tools"
        " input[].tools[].format input[].tools[].format.type input[].tools[].format.syntax"
        " input[].tools[].format.definition input[].tools[].execution input[].tools[].environment"
        " input[].tools[].defer_loading",
        "tools of an additional_tools or tool_search_output item: offered from there on",
        "OpenAI (Codex)",
    ),
    _inert("input[].tools[].output_schema input[].tools[].async", "the model reads any output"),
    _served(
        "input[].summary input[].summary[].type input[].summary[].text input[].summary[].refusal"
        " input[].status input[].execution input[].author input[].recipient",
        "listed with the input, but not part of the prompt",
    ),
    _inert(
        "input[].environment input[].max_output_length input[].created_by",
        "they tell how the client ran a call",
    ),
    _served(
        "reasoning.context",
        "current_turn: reasoning before the last user message is left out; all_turns: as"
        " preserve_thinking; otherwise the chat template decides",
    ),
    _inert(
        "input[].phase input[].caller input[].async input[].content[].annotations"
        " input[].content[].logprobs input[].content[].prompt_cache_breakpoint input[].output[].prompt_cache_breakpoint"
        " input[].internal_chat_message_metadata_passthrough",
        "clients return these fields of earlier replies",
    ),
    _served("instructions previous_response_id metadata tool_choice parallel_tool_calls"),
    _served("store", "false: the response is not kept"),
    _served("max_output_tokens", "maximum number of tokens in a reply, including reasoning"),
    _served(
        "max_tokens max_completion_tokens max_new_tokens", "", _LIMITS_BY, alias="max_output_tokens"
    ),
    _served("n_predict num_predict", "", _LIMITS_BY, alias="max_output_tokens", unset=(-1, -2)),
    _served(
        "tools tools[].type tools[].name tools[].description tools[].parameters tools[].strict",
        "functions; tools that only a provider can run are ignored and logged",
    ),
    _served("tools[].tools", "functions and custom tools of a namespace", "OpenAI (Codex)"),
    _served(
        "tools[].format tools[].format.type tools[].format.syntax tools[].format.definition",
        "a custom tool's input follows this grammar, which is also part of the prompt",
    ),
    _served(
        "tools[].defer_loading",
        "true beside a tool_search of the client: offered once the search found it",
    ),
    _served("tools[].execution", "of a tool_search: client; one of a provider is ignored"),
    _served("tools[].environment", "of a shell: local; one in a provider's container is ignored"),
    _inert("tools[].output_schema tools[].async", "the model reads any output"),
    _served(
        "tools[].allowed_callers input[].tools[].allowed_callers",
        "a list with direct, because the model calls directly",
    ),
    _inert(
        " ".join(f"tools[].{name} input[].tools[].{name}" for name in _HOSTED.split()),
        "they belong to tools that are ignored",
    ),
    _served("text text.format text.format.type text.format.name text.format.schema"),
    _inert(
        "text.format.description",
        "output is constrained by the schema; the prompt does not include it",
    ),
    _inert("text.format.strict", "output always follows the schema"),
    _served("text.verbosity", "passed to the chat template as a variable"),
    _served(
        "include",
        "reasoning.encrypted_content: reasoning items have a form to send back; details of ignored tools"
        " change nothing",
    ),
    _served("truncation", "disabled"),
    _served("top_k", "", "vLLM"),
    _inert("client_metadata", "labels change no reply", "OpenAI (Codex)"),
    _refused("background", "read the stream, or wait for the reply"),
    _inert("background_options", "they belong to background, which returns a 400"),
    _refused("conversation", "send previous_response_id"),
    _refused("prompt", "send the text itself"),
    _refused("context_management", "shorten the input in the client"),
    _refused("max_tool_calls", "this server runs no tools"),
    _refused("messages", "send input"),
    _refused("response_format", "send text.format"),
    _refused("verbosity", "send text.verbosity", "OpenAI", ("medium",)),
    _refused("stop_sequences system", "send instructions", "Anthropic"),
    *_NEWER,
)

_MESSAGE = (
    _served(
        "messages messages[].role messages[].content messages[].content[].type messages[].content[].text"
        " messages[].content[].id messages[].content[].name messages[].content[].input"
        " messages[].content[].tool_use_id messages[].content[].content messages[].content[].is_error"
        " messages[].content[].content[].type messages[].content[].content[].text"
        " messages[].content[].content[].tool_name system system[].type system[].text"
        " messages[].output_config messages[].output_config.effort",
        "",
        "Anthropic",
    ),
    _served(
        "messages[].content[].thinking messages[].content[].signature",
        "reasoning of an earlier turn, for chat templates that show it; without its text, that in a"
        " signature of this server; other signatures are not read",
        "Anthropic",
    ),
    _inert(
        "messages[].content[].data",
        "only the server that redacted a reasoning can read it",
        "Anthropic",
    ),
    _served(
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
    _served(
        "messages[].clear_at",
        "next_user_message: a system message is not shown once a message of the user follows",
        "Anthropic",
    ),
    _inert(
        "messages[].content[].cache_control messages[].content[].content[].cache_control system[].cache_control"
        " messages[].content[].tool.definition.cache_control"
        " tools[].cache_control",
        "prefixes are cached by content",
        "Anthropic",
    ),
    _inert(
        "messages[].content[].caller messages[].content[].citations messages[].content[].content[].citations"
        " system[].citations messages[].content[].toolset messages[].content[].toolset_name",
        "clients return these fields of earlier replies",
        "Anthropic",
    ),
    _refused(
        "system[].clear_at messages[].content[].clear_at",
        "send it beside the role of a system message",
        "Anthropic",
    ),
    _served("max_tokens", "maximum number of tokens in a reply, including reasoning", "Anthropic"),
    _served(
        "max_completion_tokens max_output_tokens max_new_tokens max_tokens_to_sample",
        "",
        _LIMITS_BY,
        alias="max_tokens",
    ),
    _served("n_predict num_predict", "", _LIMITS_BY, alias="max_tokens", unset=(-1, -2)),
    _served("top_k stop_sequences", "", "Anthropic"),
    _served(
        "tools tools[].name tools[].description tools[].input_schema tools[].type tools[].strict",
        "",
        "Anthropic",
    ),
    _served(
        "tools[].defer_loading",
        "true: the tool is offered after a tool_reference or tool_addition that names it",
        "Anthropic",
    ),
    _served("tools[].max_characters", "of the text editor: it is part of the prompt", "Anthropic"),
    _inert(
        "tools[].eager_input_streaming messages[].content[].tool.definition.eager_input_streaming",
        "calls are always streamed when they are generated",
        "Anthropic",
    ),
    _refused(
        "tools[].allowed_callers messages[].content[].tool.definition.allowed_callers",
        "the model calls directly",
        "Anthropic",
        (["direct"],),
    ),
    _refused(
        "tools[].input_examples messages[].content[].tool.definition.input_examples",
        "put examples into the description",
        "Anthropic",
    ),
    _served(
        "tool_choice tool_choice.type tool_choice.name tool_choice.disable_parallel_tool_use",
        "",
        "Anthropic",
    ),
    _served(
        "thinking.display",
        "omitted: thinking blocks have no text; with other values they have the full reasoning",
        "Anthropic",
    ),
    _served(
        "output_config output_config.effort output_config.format output_config.format.type output_config.format.schema",
        "",
        "Anthropic",
    ),
    _served(
        "output_format output_format.type output_format.schema",
        "same as output_config.format",
        "Anthropic",
    ),
    _refused("output_config.task_budget", "send max_tokens", "Anthropic"),
    _served(
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
    _served(
        "thread",
        "rejected with a code after which clients send the whole conversation",
        "Anthropic",
    ),
    _inert(
        "diagnostics user_profile_id workspace_id fallback_credit_token",
        "they change no reply",
        "Anthropic",
    ),
    _refused("container mcp_servers", "this server runs no tools", "Anthropic"),
    _refused("compaction", "shorten the conversation in the client", "Anthropic"),
    _refused("response_format text", "send output_config.format"),
    _refused(
        "parallel_tool_calls", "send tool_choice.disable_parallel_tool_use", "OpenAI", (True,)
    ),
    _refused("verbosity", _LEAVE, "OpenAI", ("medium",)),
    _refused("input instructions prompt", "send messages and system"),
    *(row for row in _NEWER if "stop" not in row.paths),
    _refused("stop", "send stop_sequences"),
)

_TOKENIZE = (
    _served("prompt messages add_special_tokens return_token_strs", "", "vLLM"),
    _inert("mm_processor_kwargs media_io_kwargs", "prompts are text only", "vLLM"),
)

_API_TO_ROWS = {
    CHAT: (*_EVERYWHERE, *_TEMPLATED, *_OLDER, *_CHAT),
    COMPLETION: (*_EVERYWHERE, *_OLDER, *_COMPLETION),
    RESPONSE: (*_EVERYWHERE, *_TEMPLATED, *_RESPONSE),
    MESSAGE: (*_EVERYWHERE, *_TEMPLATED, *_MESSAGE),
    TOKENIZE: (*_EVERYWHERE, *_TEMPLATED, *_OLDER, *_CHAT, *_TOKENIZE),
}


@cache
def rows_of(api: str) -> Mapping[str, FieldRow]:
    """Return path -> row for an API; of several rows with one path the last counts."""
    return {path: row for row in _API_TO_ROWS[api] for path in row.paths}
