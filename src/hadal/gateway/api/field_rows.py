"""Rows of the tables of known fields, and the rows that several APIs share (gateway/api/field_table).

One row is one field, or several with the same answer. A path names a field: `a.b` is field b of
object a, `a[].b` is field b of each object in list a. Sources: the public references and SDK types
of the services that each row names, in November 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


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


def served(
    paths: str, note: str = "", by: str = "OpenAI", *, alias: str = "", unset: tuple[Any, ...] = ()
) -> FieldRow:
    """Return the row of fields that are served. `paths`: separated by blanks, as in all rows."""
    return FieldRow(tuple(paths.split()), Verdict.SERVED, note, by, (), alias, unset)


def refused(paths: str, instead: str, by: str = "OpenAI", unless: tuple[Any, ...] = ()) -> FieldRow:
    """Return the row of fields that are a 400. `unless`: the row's `harmless`."""
    return FieldRow(tuple(paths.split()), Verdict.REFUSED, instead, by, unless)


def inert(paths: str, why: str, by: str = "OpenAI") -> FieldRow:
    """Return the row of fields that change nothing."""
    return FieldRow(tuple(paths.split()), Verdict.INERT, why, by)


LEAVE = "leave it out"
"""Advice for a field that no other one replaces."""

EVERYWHERE = (
    served("model stream temperature top_p seed"),
    served("priority", "from -4 to 4; a higher value starts sooner", "Hadal"),
    served("cache_salt", "KV is reused only between requests with the same salt", "vLLM, SGLang"),
    served(
        "explain_cache",
        "true: usage says why the prompt was not cached; a stream then has usage",
        "Hadal",
    ),
    served("stop_repetition", "false: a reply that repeats itself is not stopped", "Hadal"),
    served("do_sample", "false: temperature is 0", "Zhipu"),
    inert(
        "user safety_identifier user_id end_user_id",
        "end users are not distinguished",
        "OpenAI, Zhipu",
    ),
    inert("metadata", "it is not read (/v1/responses returns it)", "OpenAI, Anthropic"),
    inert("service_tier speed", "there is only one service tier", "OpenAI, Anthropic"),
    inert("store", "only /v1/responses stores replies"),
    inert(
        "prompt_cache_key prompt_cache_retention prompt_cache_options",
        "prefixes are cached by content; caching changes no token",
    ),
    inert(
        "prompt_cache_max_len cache_prompt id_slot n_cache_reuse",
        "caching changes no token",
        "Fireworks, llama.cpp",
    ),
    inert(
        "request_id rid session_id session_params",
        "the server assigns the reply's id",
        "vLLM, SGLang, Zhipu, OpenRouter",
    ),
    inert(
        "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank"
        " disagg_prefill_dp_rank kv_transfer_params ec_transfer_params",
        "the server does routing and KV transfer itself",
        "vLLM, SGLang",
    ),
    inert(
        "extra_key custom_labels trace betas billing_policy",
        "labels and billing change no reply",
        "SGLang, OpenRouter, Anthropic",
    ),
    inert("provider", "there is one provider", "OpenRouter"),
    inert("cache_control", "prefixes are cached by content", "Anthropic, OpenRouter"),
    inert(
        "prediction speculation",
        "predicted text is not used; it would change no token",
        "OpenAI, Fireworks",
    ),
    inert("ngram_corpus_id", "speculative decoding changes no token", "SGLang"),
    inert(
        "backend_sampling sse_ping_interval", "internal options, which change no reply", "llama.cpp"
    ),
    inert(
        "image image_config images_config access_programs",
        "only text is read and generated",
        "OpenAI, OpenRouter, SGLang",
    ),
    refused("extra_body", "put its fields at the top of the body", "OpenAI SDK"),
    refused("models", "send one model", "OpenRouter"),
    refused("route plugins preset transforms fallbacks", LEAVE, "OpenRouter, Anthropic"),
    refused(
        "moderation safety_model sensitive_word_check",
        "check texts in the client",
        "OpenAI, Together, Zhipu",
    ),
    refused("web_search_options", "send a tool that searches", "OpenAI", (None,)),
    refused("enable_search search_options", "send a tool that searches", "DashScope"),
    refused("enable_code_interpreter", "send a tool that runs code", "DashScope"),
    refused("translation_options asr_options skill", "put it into a message", "DashScope"),
    refused(
        "vl_high_resolution_images media_io_kwargs mm_processor_kwargs",
        "send text",
        "DashScope, vLLM",
    ),
    refused("max_dynamic_patch min_dynamic_patch use_audio_in_video", "send text", "SGLang"),
    refused("incremental_output", "streams are always incremental", "DashScope", (True,)),
    refused("result_format", "send 'message', or leave it out", "DashScope", ("message",)),
    refused("audio", "only text is generated"),
    refused("modalities", "only text is generated", "OpenAI", (["text"],)),
    refused(
        "bad_words allowed_token_ids logit_processors logits_processors custom_logit_processor"
        " custom_params vllm_xargs",
        "send logit_bias to /v1/chat/completions",
        "vLLM, SGLang",
    ),
    refused(
        "guided_json guided_choice guided_regex guided_grammar guided_decoding_backend"
        " guided_whitespace_pattern structured_outputs structural_tag regex ebnf json_schema",
        "ask for a JSON schema with response_format",
        "vLLM, SGLang, llama.cpp",
    ),
    refused(
        "grammar grammar_lazy grammar_triggers",
        "ask for a JSON schema with response_format",
        "llama.cpp",
    ),
    refused("use_beam_search", "send n for several texts", "vLLM"),
    refused("length_penalty", "it is for beam search; leave it out", "vLLM", (1,)),
    refused("repetition_detection", "loops are always detected; see stop_repetition", "vLLM"),
    refused("watermarking", LEAVE, "vLLM"),
    refused("stop_regex", "send stop strings", "SGLang"),
    refused(
        "no_stop_trim include_stop_str_in_output",
        "a reply never includes the stop string",
        "vLLM, SGLang",
    ),
    refused(
        "skip_special_tokens spaces_between_special_tokens",
        "a reply's text has no control tokens",
        "vLLM, SGLang",
        (True,),
    ),
    refused(
        "truncate_prompt_tokens truncation_side prompt_truncate_len",
        "shorten the prompt",
        "vLLM, Fireworks",
    ),
    refused(
        "input_ids prompt_embeds",
        "send text, or token ids as a prompt of /v1/completions",
        "vLLM, SGLang",
    ),
    refused(
        "chat_template",
        "the model's own template is used; chat_template_kwargs sets its variables",
        "vLLM",
    ),
    refused("documents", "put documents into a message", "vLLM"),
    refused("task", "put it into a message", "SGLang"),
    refused("lora lora_path", "only the model itself is served", "SGLang, llama.cpp"),
    refused(
        "return_hidden_states return_routed_experts return_meta_info return_cached_tokens_details"
        " return_prompt_text routed_experts_start_len routed_experts_prompt_start",
        "replies do not include it",
        "vLLM, SGLang",
        (0,),
    ),
    refused(
        "return_prompt_token_ids return_tokens",
        "send return_token_ids to /v1/chat/completions",
        "SGLang, llama.cpp",
    ),
    refused(
        "return_tokens_as_token_ids return_token_offsets",
        "send return_token_ids to /v1/chat/completions",
        "vLLM",
    ),
    inert("return_mm_kwargs", "it is for prompts with images", "vLLM"),
    refused("logprob_token_ids", "send top_logprobs to /v1/chat/completions", "vLLM"),
    refused("stream_interval", "each token is streamed when it is generated", "vLLM", (1,)),
    refused("n_probs", "send logprobs and top_logprobs to /v1/chat/completions", "llama.cpp", (0,)),
    refused(
        "post_sampling_probs",
        "log-probabilities are the model's, before sampling options",
        "llama.cpp",
    ),
    refused(
        "response_fields timings_per_token return_progress",
        "replies do not include it",
        "llama.cpp",
    ),
    refused(
        "perf_metrics_in_response raw_output sampling_mask",
        "replies do not include it",
        "Fireworks",
    ),
    refused("max_length", "send max_tokens", "others"),
    refused(
        "repeat_penalty",
        "send repetition_penalty, which looks at the whole text",
        "llama.cpp",
        (1,),
    ),
    inert(
        "repeat_last_n dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"
        " xtc_threshold mirostat_tau mirostat_eta mirostat_lr dynatemp_exponent",
        "they only tune samplers that are rejected",
        "llama.cpp, Fireworks",
    ),
    refused(
        "dry_multiplier xtc_probability mirostat mirostat_target dynatemp_range top_a n_indent min_keep"
        " t_max_predict_ms adaptive_decay",
        "use temperature, top_p or min_p",
        "llama.cpp, Fireworks, OpenRouter",
        (0,),
    ),
    refused("adaptive_target top_n_sigma", "use temperature, top_p or min_p", "llama.cpp", (-1, 0)),
    refused("tfs_z typical_p typ_p", "use top_p or min_p", "llama.cpp, Fireworks", (1,)),
    refused("samplers", "the order is fixed; leave it out", "llama.cpp"),
    inert("n_keep n_discard", "no token of a prompt is ever dropped", "llama.cpp"),
    refused("prompt_cache_isolation_key", "send cache_salt", "Fireworks"),
    refused(
        "compliance inference_geo",
        "leave it out; this server cannot change it",
        "Together, Anthropic",
    ),
)
"""Fields of every API, unless an API's own row says otherwise."""

TEMPLATED = (
    served("chat_template_kwargs", "variables for the chat template", "vLLM, SGLang, llama.cpp"),
    served("chat_template_args", "", "TensorRT-LLM", alias="chat_template_kwargs"),
    served(
        "enable_thinking",
        "true: the model reasons before it answers; false: it does not",
        "DashScope, SiliconFlow",
    ),
    served(
        "thinking thinking.type",
        "true, false, or a type: enabled, disabled; with adaptive and auto the chat template decides",
        "DeepSeek, Anthropic, Zhipu, Moonshot, Fireworks",
    ),
    served("thinking.budget_tokens", "maximum number of reasoning tokens", "Anthropic, Fireworks"),
    served(
        "thinking_budget thinking_token_budget thinking_budget_tokens reasoning_budget reasoning_budget_tokens",
        "maximum number of reasoning tokens; -1 for no limit",
        "DashScope, SiliconFlow, vLLM, llama.cpp",
    ),
    served(
        "reasoning_effort",
        "none, or the amount of reasoning",
        "OpenAI, DeepSeek, vLLM, SGLang, Fireworks",
    ),
    served("reasoning", "an object with the fields below", "OpenAI, OpenRouter, Together"),
    served("reasoning.effort", "none, or the amount of reasoning", "OpenAI, OpenRouter"),
    served(
        "reasoning.enabled",
        "true: the model reasons before it answers; false: it does not",
        "OpenRouter, Together",
    ),
    served("reasoning.max_tokens", "maximum number of reasoning tokens", "OpenRouter"),
    inert("reasoning.summary reasoning.generate_summary", "the reply has the full reasoning"),
    refused("reasoning.context", "send preserve_thinking, or leave it out", "OpenAI", ("auto",)),
    refused("reasoning.mode", LEAVE, "OpenAI", ("standard",)),
    served(
        "thinking.keep thinking.clear_thinking preserve_thinking reasoning_history",
        "variables preserve_thinking and clear_thinking for the chat template: show the reasoning of"
        " all earlier turns, or not",
        "Moonshot, Zhipu, DashScope, Fireworks",
    ),
    refused("thinking.display", "send include_reasoning", "Anthropic", ("summarized",)),
    inert("thinking.block_binding", "signatures of thinking blocks are not checked", "Anthropic"),
    refused(
        "reasoning_budget_message", "no message is inserted when the budget is used up", "llama.cpp"
    ),
    refused("thinking_forced_open", "send enable_thinking", "llama.cpp"),
    refused("reasoning_in_content", "reasoning has a separate field", "llama.cpp"),
    refused(
        "reasoning_format",
        "reasoning has a separate field",
        "llama.cpp",
        ("auto", "deepseek", "parsed"),
    ),
    refused("separate_reasoning", "reasoning has a separate field", "SGLang", (True,)),
    refused("stream_reasoning", "reasoning is streamed when it is generated", "SGLang", (True,)),
    inert("tool_stream", "calls are always streamed when they are generated", "Zhipu, DashScope"),
    refused("parse_tool_calls", "calls always have a separate field", "llama.cpp", (True,)),
)
"""Fields of every API with a chat template."""

OLDER = (
    served(
        "n min_tokens presence_penalty frequency_penalty repetition_penalty logit_bias stop stop_token_ids"
        " top_k min_p ignore_eos",
        "",
        "OpenAI, vLLM, SGLang",
    ),
    served("n_cmpl", "", "llama.cpp", alias="n"),
    served("min_new_tokens", "", "SGLang", alias="min_tokens"),
    served("random_seed", "", "others", alias="seed"),
    served(
        "return_token_ids",
        "true: include the token ids of the prompt and the reply",
        "vLLM, SGLang",
    ),
    served("stream_options stream_options.include_usage"),
    served(
        "stream_options.continuous_usage_stats",
        "with include_usage: each chunk has the usage so far",
        "vLLM, SGLang",
    ),
    inert("stream_options.include_obfuscation", "chunks are not padded"),
    served(
        "usage usage.include",
        "in a stream: same as stream_options.include_usage; other replies always have usage",
        "OpenRouter",
    ),
    served("response_format response_format.type", "text, json_object or json_schema"),
    served(
        "response_format.schema",
        "a schema, with type json_object or json_schema",
        "llama.cpp, Together, Fireworks",
    ),
    served(
        "response_format.json_schema response_format.json_schema.name"
        " response_format.json_schema.schema"
    ),
    inert(
        "response_format.json_schema.description",
        "output is constrained by the schema; the prompt does not include it",
    ),
    inert("response_format.json_schema.strict", "output always follows the schema"),
    refused(
        "response_format.grammar response_format.pattern response_format.regex response_format.structures"
        " response_format.triggers response_format.format",
        "ask for a JSON schema",
        "Fireworks, vLLM, SGLang",
    ),
    served(
        "context_length_exceeded_behavior",
        "if the token limit exceeds the context: truncate lowers it; error returns a 400",
        "Together, Fireworks",
    ),
)
"""Fields of OpenAI's two older APIs."""

NEWER = (
    refused("n n_cmpl best_of", "send one request per reply", "OpenAI", (1,)),
    refused("stop", "send it to /v1/chat/completions"),
    refused("min_tokens min_new_tokens", "send it to /v1/chat/completions", "vLLM", (0,)),
    refused(
        "presence_penalty frequency_penalty", "send it to /v1/chat/completions", "OpenAI", (0,)
    ),
    refused("repetition_penalty", "send it to /v1/chat/completions", "vLLM", (1,)),
    refused("logit_bias logprobs", "send it to /v1/chat/completions"),
    refused(
        "stop_token_ids ignore_eos return_token_ids", "send it to /v1/chat/completions", "vLLM"
    ),
    refused("min_p top_logprobs", "send it to /v1/chat/completions", "vLLM", (0,)),
    refused(
        "context_length_exceeded_behavior",
        "send it to /v1/chat/completions",
        "Together",
        ("error",),
    ),
    refused("include_reasoning", "the reply always has the reasoning", "vLLM, OpenRouter", (True,)),
    refused("reasoning.exclude", "the reply always has the reasoning", "OpenRouter"),
    refused("functions function_call", "send tools"),
    refused("prompt_logprobs echo suffix", "send it to /v1/completions", "vLLM"),
    inert("stream_options usage", "the last event has the usage"),
    refused("add_generation_prompt", "send it to /v1/chat/completions", "vLLM", (True,)),
    refused("continue_final_message", "send it to /v1/chat/completions", "vLLM"),
    refused("add_special_tokens", "the chat template adds them", "vLLM"),
)
"""Fields of the two older APIs that the newer two, responses and messages, do not serve."""
