"""Turn the bodies of requests into generations, within the deployment's limits, without HTTP.

Depends on the model's tokenizer, template and context, the deployment's limits, and block names.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from hadal.core.config import LimitsConfig
from hadal.core.documents import shown
from hadal.core.errors import CheckpointError, RequestError
from hadal.core.messages.generation import Generation
from hadal.core.model_config import read_model_config
from hadal.core.plans import Grammar
from hadal.gateway.api.base import MAX_TOP_K, check_ids
from hadal.gateway.api.decoding import decode
from hadal.gateway.api.field_table import TOKENIZE
from hadal.gateway.api.fields import check_fields, log_once
from hadal.gateway.api.openai.request import (
    DetokenizeRequest,
    TokenizeRequest,
    check_num_ids,
    parse_chat,
    parse_completion,
    with_model,
)
from hadal.gateway.api.shapes import Detokenized, OriginalCount, TokenCount, Tokenized
from hadal.gateway.desk.auth import PRIORITY, Tenant
from hadal.gateway.desk.explanations import CacheExplainer, PromptTrace
from hadal.gateway.desk.lanes import Lane, Lanes
from hadal.gateway.desk.salts import salt_within
from hadal.gateway.edge.errors import ApiError
from hadal.gateway.text.asks import (
    PUBLIC,
    AnswerFormat,
    ChatAsk,
    CommonFields,
    CompletionAsk,
    SamplingDefaults,
    Turn,
    with_defaults,
)
from hadal.gateway.text.chat import (
    THINK_CLOSE,
    THINK_OPEN,
    ChatFormat,
    Prompt,
    raw_prompt,
    read_chat_format,
)
from hadal.gateway.text.dsml import Dsml
from hadal.gateway.text.edits import AppliedEdit, EditedPrompt, edit_prompt
from hadal.gateway.text.formats import Formats
from hadal.gateway.text.lengths import check_length, encode_within
from hadal.gateway.text.piece import ScoredPrompt
from hadal.gateway.text.stream import Assembler, Calls, TextReading
from hadal.gateway.text.vocabulary import Vocabulary, read_vocabulary
from hadal.roles.front.names import FrontNames
from hadal.tokens.table import MAX_ID, read_json

T = TypeVar("T")

FIM_MARKS = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
"""Control tokens of fill-in-the-middle: before the prefix, before the suffix, and at the end where
the model writes the middle (DeepSeek-V3's technical report, 3.1).
"""
COUNTED_CONTEXTS = 2
"""Longest prompt that is only counted, as a multiple of the model's context."""
EDITED_CONTEXTS = 16
"""Longest prompt before its edits, as a multiple of the model's context: clients send the whole
conversation in each request.
"""
OFF_LOOP_BYTES = 1024
"""Largest completion body that is parsed and tokenised on the event loop. Larger ones, chats, and
answers with a format use a thread. A tokenizer takes 1 to 2 ms for a body of this size.
"""


@dataclass(frozen=True)
class ServedModel:
    """Model facts that the gateway needs, without weights."""

    name: str
    vocabulary: Vocabulary
    chat: ChatFormat | None
    """Chat templates; None: the model has none and only completes texts."""
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    sampling: SamplingDefaults


def read_served_model(folder: Path, name: str, accepted: Collection[str] = ()) -> ServedModel:
    """Read tokenizer, template and defaults of a model folder. Raises CheckpointError.

    `accepted`: see `read_model_config`.
    """
    config = read_model_config(folder, accepted)
    vocabulary = read_vocabulary(folder)
    eos_ids, sampling, max_length = _read_defaults(folder / "generation_config.json", accepted)
    return ServedModel(
        name=name,
        vocabulary=vocabulary,
        chat=read_chat_format(folder, vocabulary),
        context_tokens=min(config.max_position_embeddings, max_length),
        vocab_size=config.vocab_size,
        # As in transformers, ids in generation_config.json replace config.json's. If it has none,
        # config.json's are used; transformers then uses no ids. Ids beyond the vocabulary are left
        # out: the model has no logit for them, and a grammar's mask no bit.
        eos_ids=tuple(
            each
            for each in dict.fromkeys(eos_ids or config.eos_token_ids)
            if each < config.vocab_size
        ),
        sampling=sampling,
    )


def _read_defaults(
    path: Path, accepted: Collection[str]
) -> tuple[tuple[int, ...], SamplingDefaults, int]:
    """Return generation_config.json's ids that end a reply, its sampling defaults, and the maximum
    tokens of a prompt and its reply together. The file may be missing, and null counts as absent.
    Raises CheckpointError.
    """
    read = read_json(path) if path.exists() else {}
    # A key in `accepted` counts as absent.
    fields = {key: read[key] for key in read if f"{path.stem}.{key}" not in accepted}
    eos = fields.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(type(i) is int and 0 <= i <= MAX_ID for i in eos_ids):
        raise CheckpointError(
            f"{path}: eos_token_id is {shown(eos)}; a token id or a list of them is needed."
        )
    samples = fields.get("do_sample")
    if not isinstance(samples, bool | None):
        raise CheckpointError(f"{path}: do_sample is {shown(samples)}; true or false is needed.")
    top_k = fields.get("top_k")
    if top_k is not None and (type(top_k) is not int or not -1 <= top_k <= MAX_TOP_K):
        raise CheckpointError(
            f"{path}: top_k is {shown(top_k)}; a whole number is needed, 0 for all tokens."
        )
    max_length = fields.get("max_length")
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise CheckpointError(
            f"{path}: max_length is {shown(max_length)}; a number of tokens is needed."
        )
    temperature = _default(fields, "temperature", path, 2.0)
    sampling = SamplingDefaults(
        # do_sample false: the model is meant to be greedy, even if the file sets a temperature.
        temperature=0.0 if samples is False else temperature,
        top_p=_default(fields, "top_p", path, 1.0),
        top_k=max(0, top_k or 0),
    )
    return eos_ids, sampling, sys.maxsize if max_length is None else max_length


def _default(fields: dict[str, Any], name: str, path: Path, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise CheckpointError(
            f"{path}: {name} is {shown(value)}; a number from 0 to {high:g} is needed."
        )
    return float(value)


@dataclass(frozen=True)
class Choice:
    """One of a request's replies: the generation to run, and the assembler of its text."""

    generation: Generation
    assembler: Assembler
    prefix: str = ""
    """Text shown before the reply."""
    scored: ScoredPrompt | None = None
    """The prompt, if it is shown with its tokens' log-probabilities; they come before the reply."""
    is_prompt_only: bool = False
    """True if only the prompt is shown: the one token drawn to score the prompt is hidden."""
    trace: PromptTrace | None = None
    """Trace of the prompt, to explain what of it was cached; only of a prompt's first choice."""


@dataclass(frozen=True)
class Work:
    """Request with a valid body, before admission."""

    ask: CommonFields
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    edits: tuple[AppliedEdit, ...] | None = field(default=None, kw_only=True)
    """Edits of the conversation; None: the client did not mention any."""


def _scored(work: Work, asked: CompletionAsk) -> Work:
    """Return the work with its prompts marked for scoring (log-probabilities of their tokens)."""
    choices = tuple(
        dataclasses.replace(
            choice,
            prefix="",
            scored=ScoredPrompt(
                choice.prefix,
                choice.generation.prompt,
                asked.has_echoed_logprobs,
                asked.has_prompt_logprobs,
            ),
            is_prompt_only=asked.ask.max_tokens == 0,
        )
        for choice in work.choices
    )
    return dataclasses.replace(work, choices=choices)


class Service:
    """Parser and checker of request bodies, which makes Work from them."""

    def __init__(
        self,
        model: ServedModel,
        limits: LimitsConfig,
        names: FrontNames,
        random_bytes: Callable[[int], bytes] = os.urandom,
        explainer: CacheExplainer | None = None,
    ) -> None:
        """`explainer`: None: misses of the cache are not explained."""
        self.model = model
        self.explainer = explainer
        self.limits = limits
        self._names = names
        self._formats = Formats(log_once)
        self._random_bytes = random_bytes
        # Few threads: prompts wait for each other and leave CPU cores to the ranks.
        self._lanes = Lanes()
        self._has_tags = model.chat is not None and isinstance(model.chat.tools, Dsml)
        context = model.context_tokens
        self._max_counted_tokens = COUNTED_CONTEXTS * context
        self._max_prompt_tokens = min(limits.max_prompt_tokens or context - 1, context - 1)

    async def chat(
        self,
        body: bytes,
        request_id: str,
        tenant: Tenant,
        parse: Callable[[bytes], ChatAsk] = parse_chat,
        num_more_bytes: int = 0,
    ) -> Work:
        """Parse and check a chat, and return its work. `tenant` is the caller, `parse` reads the
        bodies of an endpoint, and `num_more_bytes` is the size of other data that `parse` reads.
        Raises RequestError, ApiError.
        """
        # Always off the loop: the template's process may use all the time that its limits allow.
        num_bytes = len(body) + num_more_bytes
        begun = await self.off_loop(
            tenant, lambda: self._chat(parse(body), request_id, tenant), num_bytes
        )
        if isinstance(begun, Work):
            return begun
        return await self._run(self._lanes.grammars, tenant, begun)

    async def count(
        self, body: bytes, tenant: Tenant, parse: Callable[[bytes], ChatAsk]
    ) -> TokenCount:
        """Return the number of tokens in a chat's prompt. Raises RequestError, ApiError."""

        def number() -> TokenCount:
            parsed = parse(body)
            self._check(parsed.ask, tenant)
            edited = self._edited(parsed, self._max_counted_tokens)
            original = OriginalCount(edited.num_original_tokens)
            return TokenCount(len(edited.prompt.ids), None if edited.applied is None else original)

        return await self.off_loop(tenant, number, len(body))

    async def completion(self, body: bytes, request_id: str, tenant: Tenant) -> Work:
        """Parse and check a completion, and return its work. Raises RequestError, ApiError."""
        if len(body) <= OFF_LOOP_BYTES:
            parsed = self._parse_completion(body)
            if parsed.ask.format is None:  # Checking a schema takes unbounded time.
                return self._completion(parsed, request_id, tenant)

        def read() -> CompletionAsk:
            parsed = self._parse_completion(body)
            self._check(parsed.ask, tenant)
            return parsed

        parsed = await self.off_loop(tenant, read, len(body))
        prompts = [  # Each prompt is a turn of its own: other tenants run in between.
            await self.off_loop(tenant, partial(self._given, parsed, given), len(body))
            for given in parsed.prompts
        ]
        finish = partial(self._completed, parsed, prompts, request_id, tenant)
        if parsed.ask.format is None:
            return await self.off_loop(tenant, finish, len(body))
        return await self._run(self._lanes.grammars, tenant, finish)

    async def tokenize(self, body: bytes, tenant: Tenant) -> Tokenized:
        """Return the tokens of a prompt or a chat, as vLLM does. Raises RequestError, ApiError."""
        return await self.off_loop(tenant, lambda: self._tokenize(body, tenant), len(body))

    async def detokenize(self, body: bytes, tenant: Tenant) -> Detokenized:
        """Return the text of token ids. Raises RequestError, ApiError."""
        return await self.off_loop(tenant, lambda: self._detokenize(body, tenant), len(body))

    async def off_loop(self, tenant: Tenant, make: Callable[[], T], num_bytes: int) -> T:
        """Run `make` in the thread for short or for long bodies, depending on `num_bytes`. A tenant
        has one call at a time in each thread, so tenants take turns. Raises ApiError 504 after
        limits.request_timeout_s.
        """
        return await self._run(self._lanes.for_bytes(num_bytes), tenant, make)

    async def _run(self, lane: Lane, tenant: Tenant, make: Callable[[], T]) -> T:
        timeout_s = self.limits.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await lane.run(tenant.name, make)
        except TimeoutError:
            raise ApiError(
                504,
                f"The request was not processed within {timeout_s:g} s: many are queued before it. Try again.",
                code="request_timeout",
            ) from None

    def close(self) -> None:
        """End the tokenising threads, and the process that checks formats."""
        self._lanes.close()
        self._formats.close()

    def _chat(self, parsed: ChatAsk, request_id: str, tenant: Tenant) -> Work | Callable[[], Work]:
        """Return the work, or a function that makes it, to be run in the grammars lane."""
        self._check(parsed.ask, tenant)
        edited = self._edited(parsed, self._max_prompt_tokens)
        chat = self.model.chat
        calls, choosing = None, parsed.rendering.choosing
        if chat is not None and chat.tools and choosing.tools:
            calls = Calls(chat.tools, choosing)
        self._check_thinking(parsed)
        finish = partial(
            self._work,
            parsed.ask,
            [(edited.prompt, "")],
            request_id,
            tenant,
            sections=True,
            calls=calls,
            budget=parsed.budget,
        )

        def finish_edited() -> Work:
            return dataclasses.replace(finish(), edits=edited.applied)

        return finish_edited() if calls is None and parsed.ask.format is None else finish_edited

    def _check_thinking(self, parsed: ChatAsk) -> None:
        """Raise RequestError if this model does not support the requested thinking or budget."""
        chat, ends = self.model.chat, THINK_CLOSE in self.model.vocabulary.control_ids
        if parsed.switch_field and chat is not None and not chat.has_reasoning:
            raise RequestError(
                f"{parsed.switch_field} is not supported for this model: its chat template has no"
                " reasoning. Leave it out.",
                parsed.switch_field,
            )
        if parsed.budget is not None and not (chat is not None and chat.has_reasoning and ends):
            raise RequestError(
                f"{parsed.budget_field} is not supported for this model: its chat template has no"
                f" {THINK_CLOSE} as a single token. Leave it out, and send max_tokens.",
                parsed.budget_field,
            )

    def _edited(self, parsed: ChatAsk, max_tokens: int) -> EditedPrompt:
        """Return a chat as tokens, after its edits. Raises RequestError, also for far more than
        `max_tokens`, or than EDITED_CONTEXTS allow before edits.
        """
        edits = parsed.edits or ()
        if edits:
            max_tokens = max(max_tokens, EDITED_CONTEXTS * self.model.context_tokens)

        def render(turns: tuple[Turn, ...]) -> Prompt:
            return self._prompt(dataclasses.replace(parsed, turns=turns), max_tokens)

        edited = edit_prompt(parsed.turns, edits, render)
        return dataclasses.replace(edited, applied=None) if parsed.edits is None else edited

    def _prompt(self, parsed: ChatAsk, max_tokens: int) -> Prompt:
        """Return a chat as tokens. Raises RequestError, also for far more than `max_tokens`."""
        chat = self.model.chat
        if chat is None:
            raise RequestError(
                "This model has no chat template. Use /v1/completions, or put a"
                " chat_template.jinja beside its weights and start the server again.",
                parsed.ask.prompt_name,
            )
        return chat.prompt(
            parsed.turns,
            parsed.rendering,
            max_tokens=max_tokens,
            is_public=parsed.ask.cache_salt == PUBLIC,
            schema=_schema_of(parsed.ask.format),
            field=parsed.ask.prompt_name,
        )

    def _tokenize(self, body: bytes, tenant: Tenant) -> Tokenized:
        check_fields(body, TOKENIZE)
        asked = decode(body, TokenizeRequest)
        name = self.model.name if asked.model is None else asked.model
        self._check_model(name, tenant)
        if (asked.messages is None) == (asked.prompt is None):
            raise RequestError("Send either prompt or messages.", "prompt")
        # Clients ask this to learn if a prompt is too long, so allow more than the context.
        most = self._max_counted_tokens
        if asked.prompt is None:
            if asked.add_special_tokens:
                raise RequestError(
                    "add_special_tokens is not supported for a chat: its template adds them. Leave it out.",
                    "add_special_tokens",
                )
            ids = self._prompt(parse_chat(with_model(body, name), TOKENIZE), most).ids
        else:
            ids = raw_prompt(
                self.model.vocabulary,
                asked.prompt,
                max_tokens=most,
                adds_special=asked.add_special_tokens is not False,
            ).ids
        decode_id = self.model.vocabulary.decode
        texts = [decode_id((i,)) for i in ids] if asked.return_token_strs else None
        return Tokenized(len(ids), self.model.context_tokens, list(ids), texts)

    def _detokenize(self, body: bytes, tenant: Tenant) -> Detokenized:
        check_num_ids(body, self._max_prompt_tokens)
        asked = decode(body, DetokenizeRequest)
        self._check_model(self.model.name if asked.model is None else asked.model, tenant)
        if asked.tokens:
            self._check_prompt_ids(tuple(asked.tokens), "tokens")
        return Detokenized(self.model.vocabulary.decode(asked.tokens))

    def _parse_completion(self, body: bytes) -> CompletionAsk:
        check_num_ids(body, self._max_prompt_tokens)
        return parse_completion(body)

    def _completion(self, parsed: CompletionAsk, request_id: str, tenant: Tenant) -> Work:
        self._check(parsed.ask, tenant)
        prompts = [self._given(parsed, given) for given in parsed.prompts]
        return self._completed(parsed, prompts, request_id, tenant)

    def _given(self, parsed: CompletionAsk, given: str | tuple[int, ...]) -> tuple[Prompt, str]:
        """Return one of the prompts, and its text if the reply begins with it."""
        vocabulary = self.model.vocabulary
        if isinstance(given, str) and parsed.suffix is not None:
            prompt, text = self._infill(given, parsed.suffix), given
        elif isinstance(given, str):
            prompt = raw_prompt(vocabulary, given, max_tokens=self._max_prompt_tokens)
            text = given
        else:
            self._check_prompt_ids(given)
            prompt, text = Prompt(given), vocabulary.decode(given) if parsed.echo else ""
        return prompt, text if parsed.echo else ""

    def _completed(
        self,
        parsed: CompletionAsk,
        prompts: list[tuple[Prompt, str]],
        request_id: str,
        tenant: Tenant,
    ) -> Work:
        work = self._work(parsed.ask, prompts, request_id, tenant, sections=False)
        return _scored(work, parsed) if parsed.ask.sampling.num_prompt_logprobs >= 0 else work

    def _infill(self, before: str, behind: str) -> Prompt:
        """Return the prompt for a fill-in-the-middle model; the texts before and behind the gap
        contain no control tokens. Raises RequestError if the model has no such tokens.
        """
        vocabulary = self.model.vocabulary
        ids = [vocabulary.control_ids.get(mark) for mark in FIM_MARKS]
        if None in ids:
            raise RequestError(
                "suffix is not supported for this model: it has no tokens for filling in the middle. Leave it out.",
                "suffix",
            )
        num_tokens = vocabulary.fewest_tokens(before) + vocabulary.fewest_tokens(behind)
        check_length(num_tokens, self._max_prompt_tokens, "prompt")
        begin, hole, end = (mark for mark in ids if mark is not None)
        most = self._max_prompt_tokens
        texts = [
            encode_within(vocabulary.encode_plain, text, most, "prompt")
            for text in (before, behind)
        ]
        whole = vocabulary.with_special([begin, *texts[0], hole, *texts[1], end])
        return Prompt(tuple(whole))

    def _check_model(self, name: str, tenant: Tenant) -> None:
        if name != self.model.name or not tenant.may_ask(name):
            raise ApiError(
                404,
                f"The model {name[:100]!r} does not exist; {self.model.name!r} is served."
                if tenant.may_ask(self.model.name)
                else f"This API key has no access to the model {name[:100]!r}.",
                param="model",
                code="model_not_found",
            )

    def _check(self, ask: CommonFields, tenant: Tenant) -> None:
        self._check_model(ask.model, tenant)
        if ask.priority > 0 and PRIORITY not in tenant.rights:
            raise ApiError(
                403,
                f"priority is {ask.priority}: this API key has no right to a higher priority."
                " Leave it out, or send 0 or less.",
                param="priority",
                code="priority_not_allowed",
            )
        if ask.explains_cache and self.explainer is None:
            raise RequestError(
                "explain_cache is not served: this server keeps no prompts (explain_cache_mb is 0)."
                " Leave it out.",
                "explain_cache",
            )
        limits = self.limits
        if ask.n > limits.max_n:
            raise RequestError(f"n is {ask.n}; at most {limits.max_n} choices are allowed.", "n")
        most = 0 if ask.ends_with_room else limits.max_output_tokens
        if most and (ask.max_tokens or 0) > most:
            raise RequestError(
                f"{ask.max_name} is {ask.max_tokens}; at most {most} are allowed.",
                ask.max_name,
            )
        check_ids(ask, self.model.vocab_size)

    def _check_prompt_ids(self, ids: tuple[int, ...], field: str = "prompt") -> None:
        if max(ids) >= self.model.vocab_size:
            size = self.model.vocab_size
            raise RequestError(
                f"{field}: {max(ids)} is not a token id; the vocabulary has {size} tokens.", field
            )

    def _work(
        self,
        ask: CommonFields,
        prompts: list[tuple[Prompt, str]],
        request_id: str,
        tenant: Tenant,
        *,
        sections: bool,
        calls: Calls | None = None,
        budget: int | None = None,
    ) -> Work:
        """Make the work. `sections`: the reply is a chat's and separates its reasoning. `calls`:
        tool calls that the reply may contain. `budget`: most tokens of reasoning.
        """
        for prompt, _ in prompts:
            check_length(len(prompt.ids), self._max_prompt_tokens, ask.prompt_name)
        seed = (
            int.from_bytes(self._random_bytes(8), "little") >> 1 if ask.seed is None else ask.seed
        )
        choices: list[Choice] = []
        for prompt, prefix in prompts:
            names = b"", ""
            reading = TextReading(
                sections=sections,
                thinks=prompt.thinks,
                has_thought=prompt.has_thought,
                stops=ask.stops,
                min_tokens=ask.min_tokens,
                logprobs=ask.sampling.num_logprobs >= 0,
                token_ids=ask.return_token_ids,
                stop_repetition=ask.stop_repetition,
                calls=calls,
                is_held=ask.format is not None,
                has_tags=sections and self._has_tags,
            )
            grammar = self._grammar(ask, prompt, calls, budget)
            # Sampling depends on seed and index: a prompt's replies are as if it were sent alone.
            for index in range(ask.n):
                generation = self._generation(
                    ask, prompt, f"{request_id}-{len(choices)}", seed, index, tenant, names
                )
                if grammar is not None:
                    sampling = replace(generation.sampling, grammar=grammar)
                    generation = replace(generation, sampling=sampling)
                # Block names are computed here, because long prompts are off the event loop here.
                # Choices of one prompt share names.
                generation = self._names.named(generation)
                names = generation.chain, generation.fingerprint
                assembler = Assembler(self.model.vocabulary, reading)
                trace = None
                if index == 0 and self.explainer is not None:
                    trace = self.explainer.trace(request_id, tenant, generation, prompt)
                choices.append(Choice(generation, assembler, prefix, trace=trace))
        return Work(ask, tuple(choices), sum(len(prompt.ids) for prompt, _ in prompts))

    def _grammar(
        self, ask: CommonFields, prompt: Prompt, calls: Calls | None, budget: int | None
    ) -> Grammar | None:
        """Return the grammar that constrains the answer or ends its reasoning; None: neither."""
        control_ids = self.model.vocabulary.control_ids
        begins = calls.format.opens(control_ids) if calls is not None else ()
        is_held = calls is not None and (
            calls.choosing.is_demanded or (begins != () and self._may_hold(ask))
        )
        opens, closes = control_ids.get(THINK_OPEN, -1), control_ids.get(THINK_CLOSE, -1)
        may_think = prompt.may_think and opens >= 0 and closes >= 0
        has_budget = budget is not None and (prompt.thinks or may_think)
        bounded = Grammar(
            "",
            self.model.eos_ids,
            closes,
            begins_with=-1 if prompt.thinks else opens,
            budget=-1 if budget is None else budget,
        )
        if ask.format is None and not is_held:
            return bounded if has_budget else None
        # If the answer may be any text, the grammar constrains only the calls, from their mark on.
        is_opened = (
            calls is not None
            and ask.format is None
            and not calls.choosing.is_forced
            and begins != ()
        )
        thinks = (prompt.thinks or may_think) and not is_opened
        begins_after = closes if thinks else -1
        if not self.model.eos_ids or (thinks and begins_after < 0):
            what, param = "tools that are strict or required are", "tools"
            if ask.format is not None:
                what, param = f"{ask.format.field} is", ask.format.field
            raise RequestError(
                f"{what} not supported for this model: it has no token that ends"
                f" {'its reasoning; send thinking false' if self.model.eos_ids else 'a text'}.",
                param,
            )
        begins_with = opens if thinks and not prompt.thinks else -1
        grammar = Grammar("", self.model.eos_ids, begins_after, begins_with=begins_with)
        if has_budget:
            grammar = bounded
        if calls is None:
            assert ask.format is not None
            text = self._formats.text(ask.format, follows_reasoning=thinks, prefix=prompt.prefix)
            return replace(grammar, text=text, prefix=prompt.prefix_ids)
        format = None if calls.choosing.is_forced else ask.format
        text = self._formats.calls_text(
            calls,
            control_ids,
            format,
            follows_reasoning=thinks,
            is_opened=is_opened,
            prefix=prompt.prefix if format is not None else "",
        )
        is_lenient = format is None and not any(tool.is_strict for tool in calls.choosing.callable)
        if is_opened:
            end = calls.format.closes(control_ids)
            return replace(grammar, text=text, opens=begins, closes=end, is_lenient=is_lenient)
        # The reply's parser recognises a call by its marks, in reasoning too (gateway/text/stream).
        # So the marks are barred in reasoning.
        prefix = prompt.prefix_ids if format is not None else ()
        return replace(grammar, text=text, prefix=prefix, barred=begins, is_lenient=is_lenient)

    def _may_hold(self, ask: CommonFields) -> bool:
        """Return True if a grammar may constrain calls that the client leaves to the model. With an
        option that ends or extends a reply elsewhere, they stay free.
        """
        has_such = ask.ignore_eos or ask.min_tokens or ask.stop_token_ids
        return bool(self.model.eos_ids) and not has_such

    def _generation(
        self,
        ask: CommonFields,
        prompt: Prompt,
        request_id: str,
        seed: int,
        index: int,
        tenant: Tenant,
        names: tuple[bytes, str],
    ) -> Generation:
        """Return one choice's generation. `names`: the prompt's block names and their fingerprint;
        empty if they are not computed yet. Raises RequestError.
        """
        limits = self.limits
        room = self.model.context_tokens - len(prompt.ids)
        max_tokens, most = ask.max_tokens, min(room, limits.max_output_tokens or room)
        if max_tokens is None:
            max_tokens = min(limits.default_output_tokens or most, most)
        elif ask.ends_with_room:
            max_tokens = min(max_tokens, most)
        elif max_tokens > room:
            context, num_prompt = self.model.context_tokens, len(prompt.ids)
            raise RequestError(
                f"This model's maximum context length is {context} tokens. However, you requested"
                f" {num_prompt + max_tokens} tokens ({num_prompt} in the prompt, {max_tokens} in"
                f" the completion). Lower {ask.max_name}, or shorten the prompt.",
                ask.max_name,
                "context_length_exceeded",
            )
        if not max_tokens and ask.sampling.num_prompt_logprobs >= 0:
            max_tokens = 1  # The prompt is only computed if a token is drawn.
        eos_ids = () if ask.ignore_eos else self.model.eos_ids
        return Generation(
            request_id=request_id,
            prompt=prompt.ids,
            output=(),
            max_tokens=max_tokens,
            stop_ids=tuple(dict.fromkeys((*eos_ids, *ask.stop_token_ids))),
            min_tokens=min(ask.min_tokens, max_tokens),
            sampling=with_defaults(ask, self.model.sampling, seed, index),
            attempt=0,
            priority=ask.priority,
            salt=(
                tenant.salt
                if ask.cache_salt in (None, PUBLIC)
                else salt_within(tenant.salt, ask.cache_salt)
            ),
            num_public=prompt.num_public,
            chain=names[0],
            tenant=tenant.name,
            fingerprint=names[1],
            weight=tenant.weight,
        )


def _schema_of(wanted: AnswerFormat | None) -> dict[str, Any] | None:
    """Return the schema of the answer; for "json_object" it only requires an object."""
    if wanted is None:
        return None
    return {"type": "object"} if wanted.schema is None else wanted.schema
