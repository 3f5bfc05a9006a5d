"""The way from a chat's messages to a prompt's ids, by the model's own chat template.

What users type never becomes a control token: before the template sees a message, a *shield*
character is put behind the first character of every control token in it, and taken out again once
the rendered text has been cut at its control tokens. So a template may trim, split and compare
texts as it likes, and only its own control tokens count. A message without control tokens reaches
the template as it is, and its prompt is the one that transformers renders.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from hadal.core.errors import RequestError
from hadal.gateway.text.asks import PLAIN, PastCall, Rendering, Turn
from hadal.gateway.text.lengths import check_length, encode_within
from hadal.gateway.text.shield import Marks, Shield, texts_in
from hadal.gateway.text.template import ConfinedProcess
from hadal.gateway.text.template_files import DEFAULT, WITH_TOOLS, read_templates
from hadal.gateway.text.template_pool import TemplatePool
from hadal.gateway.text.tools import Choosing, described, format_of
from hadal.gateway.text.vocabulary import Vocabulary
from hadal.tokens.added import read_special_tokens

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_CHARS_PER_CHAR = 8
"""Characters that a template may write for one of a request's: escapes of JSON are six."""
_CHARS_PER_MESSAGE = 4096
"""What a template may add to each message, besides its own text once; more is a template that runs
away.
"""
_TOOLS = re.compile(r"\btools\b")
"""In a template that lists them."""
_SCHEMA = re.compile(r"\banswer_schema\b")
"""In a template that shows the model what its answer must be."""
_RESERVED = {
    *("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"),
    "answer_schema",
}
_SAMPLE = PastCall("functions.sample_tool:0", "sample_tool", '{"key": "some value"}')
"""A call with which is found out how a template takes calls."""


class CallsForm(NamedTuple):
    """How a template takes a turn of calls."""

    has_content: bool = True
    """Whether one without text has the empty text for content, else none. Where it has none, what
    is said before calls is a message of its own, for with a text the template leaves calls out.
    """
    is_parsed: bool = False
    """Arguments are objects, not texts."""


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens. `thinks`: the reply starts inside the reasoning; `has_thought`: and the
    prompt ends there. `may_think`: the model may open a reasoning itself.
    """

    ids: tuple[int, ...]
    thinks: bool = False
    may_think: bool = False
    has_thought: bool = False
    prefix: str = ""
    """The beginning of the reply, which is the end of the prompt, and ..."""
    prefix_ids: tuple[int, ...] = ()
    """... its tokens."""
    num_public: int = 0
    """Number of first ids that follow from the leading system messages alone, and are to be shared
    with everybody.
    """


class ChatFormat:
    """The chat templates of one model: one of several by name, as transformers chooses it."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        source: str,
    ) -> None:
        """`templates`: texts by name; `special_tokens`: texts of special tokens by name, which
        templates may show; `source` names the templates' file. Raises CheckpointError for a template
        that does not parse.
        """
        self._vocabulary = vocabulary
        self._special_tokens = dict(special_tokens)
        self.names = tuple(templates)
        """Names of all templates."""
        self._templates = {
            name: _Template(
                TemplatePool(partial(ConfinedProcess, templates[name], source)), templates[name]
            )
            for name in (DEFAULT, WITH_TOOLS)
            if name in templates
        }
        formats = (
            format_of(vocabulary.control_ids, self._templates[name].text)
            for name in (WITH_TOOLS, DEFAULT)
            if name in self._templates
        )
        self.tools = next((each for each in formats if each is not None), None)
        """How the model writes calls; None: it does not."""
        self._marks = Marks(vocabulary, (THINK_OPEN, THINK_CLOSE))
        texts = [each.text for each in self._templates.values()]
        self.has_reasoning = any(THINK_OPEN in text or THINK_CLOSE in text for text in texts)
        """A template knows a mark of reasoning."""

    def prompt(
        self,
        turns: Sequence[Turn],
        rendering: Rendering = PLAIN,
        *,
        max_tokens: int,
        is_public: bool = False,
        schema: dict[str, Any] | None = None,
        field: str = "messages",
    ) -> Prompt:
        """Render and tokenise. `is_public` counts what may be shared with everybody. `schema`: what the
        answer has to follow, for a template that shows it. `field`: by which the turns were given.

        Raises RequestError, also for what is sure to exceed `max_tokens`, which it then does not
        tokenise.
        """
        thinking, kwargs, choosing = (
            rendering.thinking,
            rendering.template_kwargs,
            rendering.choosing,
        )
        prefix, reasoning, goes_on = rendering.prefix, rendering.reasoning, rendering.goes_on
        self._check(turns, kwargs, choosing)
        given = [each.fields for each in choosing.tools]
        texts = [*_texts_of(turns), prefix, reasoning, *texts_in([dict(kwargs), given, schema])]
        template = self._template(has_tools=bool(given))
        shield = self._marks.shield(texts)
        messages = shield.put_in(self._messages(template, turns))
        if goes_on:
            messages[-1]["content"] += shield.end
        tools = self._listed(template, shield.put_in(given), messages)
        values = {name: shield.put_in(value) for name, value in kwargs.items()}
        if thinking is not None:
            values["thinking"] = values["enable_thinking"] = thinking
        if schema is not None and template.shows_schema:
            values["answer_schema"] = shield.put_in(_outline(schema))
        num_chars = sum(map(len, texts)) + len(json.dumps([given, schema], ensure_ascii=False))
        max_chars = _CHARS_PER_CHAR * num_chars + _CHARS_PER_MESSAGE * (len(turns) + 1)
        opens_reply = rendering.opens_reply and not goes_on
        text = shield.found(
            self._render(
                template, messages, values, max_chars, opens_reply=opens_reply, tools=tools
            )
        )
        if goes_on:
            prefix = _answer_of(turns[-1])
            text, found, _ = text.rpartition(shield.end)
            if not found:
                raise RequestError(
                    "continue_final_message: this model's chat template leaves the last message out.",
                    "continue_final_message",
                )
        thinks = not goes_on and text.rstrip().endswith(THINK_OPEN)
        if reasoning and not thinks:
            raise RequestError(
                "reasoning_content: this reply has no reasoning to go on from; send thinking true.",
                "messages",
            )
        is_open = not thinks and not prefix and not text.rstrip().endswith(THINK_CLOSE)
        text += shield.put(reasoning)
        if thinks and (thinking is False or prefix):
            text += f"\n{THINK_CLOSE}\n\n"
            thinks = False
        if not goes_on:
            text += shield.put(prefix)
        tokens = self._tokens(text, shield, max_tokens, field)
        return Prompt(
            tokens,
            thinks,
            is_open and thinking is not False,
            thinks and bool(reasoning),
            prefix,
            tuple(self._vocabulary.encode_plain(prefix)),
            self._num_public(turns, values, shield, tokens) if is_public else 0,
        )

    def _tokens(self, text: str, shield: Shield, max_tokens: int, field: str) -> tuple[int, ...]:
        """Return the ids of a rendered text. Raises RequestError for what is sure to be too long."""
        fewest = self._vocabulary.fewest_tokens(text.replace(shield.char, ""))
        check_length(max(1, fewest) if text else 0, max_tokens, field)
        ids = encode_within(
            lambda piece: self._vocabulary.encode_shielded(piece, shield.char),
            text,
            max_tokens,
            field,
        )
        return tuple(ids)

    def _template(self, *, has_tools: bool) -> _Template:
        """Choose as transformers does (`get_chat_template`). Raises RequestError."""
        if has_tools and WITH_TOOLS in self._templates:
            return self._templates[WITH_TOOLS]
        if DEFAULT in self._templates:
            return self._templates[DEFAULT]
        raise RequestError(
            f"This model has chat templates named {', '.join(sorted(self.names))} and none named"
            f" {DEFAULT}: use /v1/completions, or name one so and start the server again.",
            "messages",
        )

    def _listed(
        self, template: _Template, tools: list[dict[str, Any]], messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """Tools for the template to list; where it lists none, the system prompt does, and None is
        returned.
        """
        if not tools or self.tools is None or template.lists_tools:
            return tools or None
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["content"] += described(self.tools, tools)
        return None

    def _check(self, turns: Sequence[Turn], kwargs: Mapping[str, Any], choosing: Choosing) -> None:
        for name in sorted(_RESERVED & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs: {name} is the server's; leave it out.",
                "chat_template_kwargs",
            )
        calls = any(turn.calls or turn.call_id for turn in turns)
        if (choosing.tools or calls) and self.tools is None:
            raise RequestError(
                "This model was not taught to call tools; leave tools, calls and their results out.",
                "tools",
            )

    def _calls_form(self, template: _Template) -> CallsForm:
        """The first in which the template renders a call's name and its arguments as JSON; models
        of one family have been published with templates of several. It is the plain one for a
        template that writes arguments otherwise.
        """
        if template.calls_form is not None:
            return template.calls_form
        template.calls_form = CallsForm()
        asked = {"role": "user", "content": "a"}
        for form in itertools.starmap(CallsForm, itertools.product((True, False), (False, True))):
            message = {
                "role": "assistant",
                "content": "" if form.has_content else None,
                "tool_calls": _calls_of([_SAMPLE], {}, is_parsed=form.is_parsed),
            }
            with contextlib.suppress(RequestError):
                text = self._render(template, [asked, message], {}, _CHARS_PER_MESSAGE)
                if _SAMPLE.name in text and _SAMPLE.arguments in text:
                    template.calls_form = form
                    break
        return template.calls_form

    def _own_ids(self, turns: Sequence[Turn]) -> dict[str, str]:
        """A call's id -> the one that stands in its head, where a model is taught such ids: a chat
        may have begun elsewhere.
        """
        if self.tools is None or not self.tools.prefix:
            return {}
        calls = [call for turn in turns for call in turn.calls]
        own = ((call, f"{self.tools.prefix}{call.name}:") for call in calls)
        return {
            call.id: f"{begin}{number}"
            for number, (call, begin) in enumerate(own)
            if not call.id.startswith(begin)
        }

    def _messages(self, template: _Template, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Turns as the template expects them."""
        ids = self._own_ids(turns)
        return [message for turn in turns for message in self._messages_of(template, turn, ids)]

    def _messages_of(
        self, template: _Template, turn: Turn, ids: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """One of them. `ids`: calls' ids that are others there."""
        message: dict[str, Any] = {"role": turn.role, "content": _answer_of(turn)}
        if turn.name:
            message["name"] = turn.name
        messages = [message]
        if turn.calls:
            has_content, is_parsed = self._calls_form(template)
            if not has_content:
                said, message = message, {**message, "content": None}
                messages = [said, message] if said["content"] else [message]
            message["tool_calls"] = _calls_of(turn.calls, ids, is_parsed=is_parsed)
        if turn.call_id:
            message["tool_call_id"] = ids.get(turn.call_id, turn.call_id)
        return messages

    def _num_public(
        self, turns: Sequence[Turn], values: dict[str, Any], shield: Shield, ids: tuple[int, ...]
    ) -> int:
        """How many of the first ids are also those of the leading system messages by themselves.

        What is rendered of those messages alone says nothing of any other, wherever the template
        puts them; nor do switches of the template that are true or false.
        """
        leading = list(itertools.takewhile(lambda turn: turn.role == "system", turns))
        if not leading:
            return 0
        messages = [{"role": turn.role, "content": shield.put(turn.content)} for turn in leading]
        switches = {name: value for name, value in values.items() if isinstance(value, bool)}
        num_chars = sum(len(turn.content) for turn in leading)
        max_chars = _CHARS_PER_CHAR * num_chars + _CHARS_PER_MESSAGE * (len(leading) + 1)
        try:
            text = self._render(
                self._template(has_tools=False), messages, switches, max_chars, opens_reply=False
            )
            alone = self._vocabulary.encode_shielded(shield.found(text), shield.char)
        except RequestError as error:
            raise RequestError(
                "cache_salt is 'public', and this model's chat template renders no system messages"
                f" alone ({error}) Take another salt, or none.",
                "cache_salt",
            ) from error
        return sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(alone, ids, strict=False)
            )
        )

    def close(self) -> None:
        """End the templates' processes."""
        for template in self._templates.values():
            template.processes.close()

    def _render(
        self,
        template: _Template,
        messages: list[dict[str, Any]],
        values: dict[str, Any],
        max_chars: int,
        *,
        opens_reply: bool = True,
        tools: list[Any] | None = None,
    ) -> str:
        # As transformers passes them: all are there, and a special token that the model does not
        # have is undefined.
        own = {"add_generation_prompt": opens_reply, "tools": tools, "documents": None}
        return template.processes.render(
            messages, {**self._special_tokens, **values, **own}, max_chars + len(template.text)
        )


@dataclass
class _Template:
    """One template and what is known of it."""

    processes: TemplatePool
    text: str
    calls_form: CallsForm | None = None
    """How it takes calls; None: not found out yet."""

    @cached_property
    def lists_tools(self) -> bool:
        """The template shows the tools of a request itself."""
        return _TOOLS.search(self.text) is not None

    @cached_property
    def shows_schema(self) -> bool:
        """The template shows the schema of an answer."""
        return _SCHEMA.search(self.text) is not None


def read_chat_format(folder: Path, vocabulary: Vocabulary) -> ChatFormat | None:
    """Read the chat templates of a folder; None where there is none, as in base models. Raises
    CheckpointError.
    """
    templates, source = read_templates(folder)
    if not templates:
        return None
    return ChatFormat(vocabulary, templates, read_special_tokens(folder), source)


def raw_prompt(
    vocabulary: Vocabulary, text: str, *, max_tokens: int, adds_special: bool = True
) -> Prompt:
    """Return a prompt of /completions. Its author writes the template too, so control tokens in it
    count. `adds_special`: with the tokens that the tokenizer puts around every text.

    Raises RequestError for what is sure to exceed `max_tokens`.
    """
    check_length(max(1, vocabulary.fewest_tokens(text)), max_tokens, "prompt")
    ids = encode_within(vocabulary.encode_controlled, text, max_tokens, "prompt")
    return Prompt(tuple(vocabulary.with_special(ids) if adds_special else ids))


def _texts_of(turns: Sequence[Turn]) -> Iterator[str]:
    """All texts of a chat."""
    for turn in turns:
        yield from (turn.content, turn.call_id, turn.name)
        for call in turn.calls:
            yield from astuple(call)


def _outline(schema: dict[str, Any]) -> dict[str, Any]:
    """What a template may show of a schema: its fields, and of each its type and what is said of it.
    All of them texts, so that no odd schema makes a template fail.
    """
    fields = schema.get("properties")
    if not isinstance(fields, dict):
        return {}
    return {"properties": {name: _field(field) for name, field in fields.items()}}


def _field(field: Any) -> dict[str, Any]:
    if not isinstance(field, dict):
        return {}
    kept: dict[str, Any] = {}
    for key in ("type", "description"):
        value = field.get(key)
        if isinstance(value, str):
            kept[key] = value
        elif isinstance(value, list):
            kept[key] = [str(each) for each in value]
    for key in ("enum", "anyOf"):
        if isinstance(field.get(key), list):
            values = field[key]
            kept[key] = [_field(each) for each in values] if key == "anyOf" else [*map(str, values)]
    if isinstance(field.get("items"), dict):
        kept["items"] = {"type": "", **_field(field["items"])}
    return kept


def _calls_of(
    calls: Sequence[PastCall], ids: Mapping[str, str], *, is_parsed: bool
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for call in calls:
        arguments: Any = call.arguments
        if is_parsed:
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        function = {"name": call.name, "arguments": arguments}
        found.append({"id": ids.get(call.id, call.id), "type": "function", "function": function})
    return found


def _answer_of(turn: Turn) -> str:
    """What is kept of an earlier turn: of a reply only what follows the reasoning, as DeepSeek-R1
    wants it.
    """
    return turn.content.rpartition(THINK_CLOSE)[2] if turn.role == "assistant" else turn.content
