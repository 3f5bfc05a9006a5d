"""Turn a chat's messages into a prompt's ids, with the model's own chat template.

Text from users never becomes a control token. Before the template sees a message, a *shield*
character is put after the first character of every control token in it. The shields are removed
once the rendered text has been split at its control tokens. So a template may trim, split and
compare texts, and only its own control tokens count. A message without control tokens or parts of
them reaches the template unchanged, and its prompt is the one that transformers renders.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from hadal.core.errors import RequestError
from hadal.gateway.text.asks import PLAIN, PastCall, Rendering, Turn
from hadal.gateway.text.dsml import Dsml
from hadal.gateway.text.dsml_chats import form_in, form_of_folder, template_of
from hadal.gateway.text.lengths import check_length, encode_within
from hadal.gateway.text.places import Places, places_of
from hadal.gateway.text.reminders import SAMPLE, in_place, keeps_places
from hadal.gateway.text.shield import Marks, Shield, texts_in
from hadal.gateway.text.template import ConfinedProcess
from hadal.gateway.text.template_files import DEFAULT, WITH_TOOLS, read_templates
from hadal.gateway.text.template_pool import TemplatePool
from hadal.gateway.text.tools import CallFormat, Choosing, format_of
from hadal.gateway.text.vocabulary import Vocabulary
from hadal.tokens.added import read_special_tokens

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_CHARS_PER_CHAR = 8
"""Characters that a template may write per character of a request: JSON escapes need six."""
_CHARS_PER_MESSAGE = 4096
"""Characters that a template may add to each message; more is a runaway template."""
_TOOLS = re.compile(r"\btools\b")
"""Pattern in templates that list tools."""
_SCHEMA = re.compile(r"\banswer_schema\b")
"""Pattern in templates that show the model the schema of its answer."""
_RESERVED = {
    *("messages", "add_generation_prompt", "bos_token", "eos_token", "tools", "documents"),
    "answer_schema",
}
_SAMPLE = PastCall("functions.sample_tool:0", "sample_tool", '{"key": "some value"}')
"""Sample call to find out the form of calls that a template accepts."""
_SAMPLE_TOOL = {
    "type": "function",
    "function": {"name": _SAMPLE.name, "parameters": {"type": "object", "properties": {}}},
}
_REASONING = "reasoning_content"
"""Field of an assistant's message that templates read for its reasoning."""
_SAMPLE_REASONING = "sample-reasoning-0"
"""Reasoning of a sample turn, to find out if a template reads the reasoning of earlier turns."""
_REMINDS = {"system_reminders": True}
"""Option by which a template keeps the places of system messages, in its own form of a reminder."""
_KEEPING = {
    "thinking": True,
    "enable_thinking": True,
    "preserve_thinking": True,
    "clear_thinking": False,
}
"""Options by which templates show earlier reasoning that they omit by default."""


class CallsForm(NamedTuple):
    """Form of a turn with calls that a template accepts."""

    has_content: bool = True
    """True: a turn without text has "" as content; False: None. With False, text before calls is a
    message of its own, because such a template omits calls of a message with text.
    """
    is_parsed: bool = False
    """True: arguments are objects, not texts."""


@dataclass(frozen=True)
class Prompt:
    """Prompt in tokens. `thinks`: the prompt ends inside the reasoning. `has_thought`: it also has
    text of that reasoning, beside its mark. `may_think`: the model itself may begin a reasoning.
    """

    ids: tuple[int, ...]
    thinks: bool = False
    may_think: bool = False
    has_thought: bool = False
    prefix: str = ""
    """Beginning of the reply, which is the end of the prompt."""
    prefix_ids: tuple[int, ...] = ()
    """Tokens of `prefix`."""
    num_public: int = 0
    """Number of first ids that depend only on the leading system messages; their KV is public."""
    find_places: Callable[[], Places] = field(default=Places, compare=False)
    """Function that finds the messages and other parts of a chat in the text of `ids`."""


class ChatFormat:
    """Chat templates of one model; a request's template is chosen by name, as in transformers."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        source: str,
    ) -> None:
        """`templates`: name -> text. `special_tokens`: name -> text, which templates may show.
        `source`: the templates' file, for errors. Raises CheckpointError for an invalid template.
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
        formats: Iterator[CallFormat | None] = (
            form_in(self._templates[name].text)
            or format_of(vocabulary.control_ids, self._templates[name].text)
            for name in (WITH_TOOLS, DEFAULT)
            if name in self._templates
        )
        self.tools = next((each for each in formats if each is not None), None)
        """Format of the model's calls; None: the model cannot call tools."""
        self._marks = Marks(vocabulary, (THINK_OPEN, THINK_CLOSE))
        texts = [each.text for each in self._templates.values()]
        self.has_reasoning = any(THINK_OPEN in text or THINK_CLOSE in text for text in texts)
        """True if a template contains a mark of reasoning."""

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
        """Render and tokenise. `is_public`: count the ids that may be shared with all tenants.
        `schema`: the answer's schema, for a template that shows it. `field`: the request field with
        the turns.

        Raises RequestError, before tokenising if the prompt is sure to exceed `max_tokens`.
        """
        thinking, kwargs, choosing = (
            rendering.thinking,
            rendering.template_kwargs,
            rendering.choosing,
        )
        prefix, reasoning, goes_on = rendering.prefix, rendering.reasoning, rendering.goes_on
        self._check(turns, kwargs, choosing)
        given = [each.fields for each in choosing.listing]
        template, asked = self._template(has_tools=bool(given)), turns
        if rendering.keeps_places and any(turn.role == "system" for turn in turns[1:]):
            kwargs = {**kwargs, **_REMINDS}
            turns = turns if self._keeps_places(template) else in_place(turns)
        turns = self._readable(template, turns)
        texts = [*_texts_of(turns), prefix, reasoning, *texts_in([dict(kwargs), given, schema])]
        shield = self._marks.shield(texts)
        messages = shield.put_in(self._messages(template, turns))
        if goes_on:
            messages[-1]["content"] += shield.end
        tools = self._listed(template, shield.put_in(given), messages)
        values = _values_of(template, shield, kwargs, thinking, schema)
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
                    "continue_final_message: this model's chat template omits the last message.",
                    "continue_final_message",
                )
        thinks = not goes_on and text.rstrip().endswith(THINK_OPEN)
        if reasoning and not thinks:
            raise RequestError(
                "reasoning_content: this reply has no reasoning to continue; send thinking true.",
                "messages",
            )
        is_open = not thinks and not prefix and not text.rstrip().endswith(THINK_CLOSE)
        text += shield.put(reasoning)
        is_closed = thinking is False and not rendering.may_stay_open
        if thinks and (is_closed or prefix):
            text += THINK_CLOSE if isinstance(self.tools, Dsml) else f"\n{THINK_CLOSE}\n\n"
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
            partial(_places, text, shield, asked, choosing),
        )

    def _tokens(self, text: str, shield: Shield, max_tokens: int, field: str) -> tuple[int, ...]:
        """Return the ids of a rendered text. Raises RequestError if it is sure to be too long."""
        fewest = self._vocabulary.fewest_tokens(shield.removed_from(text))
        check_length(max(1, fewest) if text else 0, max_tokens, field)
        ids = encode_within(
            lambda piece: self._vocabulary.encode_shielded(piece, shield.char),
            text,
            max_tokens,
            field,
        )
        return tuple(ids)

    def _template(self, *, has_tools: bool) -> _Template:
        """Choose the template as transformers does (`get_chat_template`). Raises RequestError."""
        if has_tools and WITH_TOOLS in self._templates:
            return self._templates[WITH_TOOLS]
        if DEFAULT in self._templates:
            return self._templates[DEFAULT]
        raise RequestError(
            f"This model has chat templates named {', '.join(sorted(self.names))} and none named"
            f" {DEFAULT}: use /v1/completions, or rename one of them to it and restart the server.",
            "messages",
        )

    def _listed(
        self, template: _Template, tools: list[dict[str, Any]], messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """Return the tools for the template to list. If the template lists none, describe them in
        the system prompt and return None.
        """
        if not tools or self.tools is None or template.lists_tools:
            return tools or None
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": ""})
        messages[0]["content"] += self.tools.describe(tools)
        return None

    def _check(self, turns: Sequence[Turn], kwargs: Mapping[str, Any], choosing: Choosing) -> None:
        for name in sorted(_RESERVED & kwargs.keys()):
            raise RequestError(
                f"chat_template_kwargs: {name} is set by the server; leave it out.",
                "chat_template_kwargs",
            )
        calls = any(turn.calls or turn.call_id for turn in turns)
        if (choosing.tools or calls) and self.tools is None:
            raise RequestError(
                "This model does not support tools; leave out tools, calls and their results.",
                "tools",
            )

    def _calls_form(self, template: _Template) -> CallsForm:
        """Return the first form in which the template renders a call's name and its arguments as
        JSON, or the default form if there is none. Templates differ even within a model family.
        """
        if template.calls_form is not None:
            return template.calls_form
        template.calls_form = CallsForm()
        shows = self.tools.has_call if self.tools is not None else str.__contains__
        asked = {"role": "user", "content": "a"}
        for form in itertools.starmap(CallsForm, itertools.product((True, False), (False, True))):
            message = {
                "role": "assistant",
                "content": "" if form.has_content else None,
                "tool_calls": _calls_of([_SAMPLE], {}, is_parsed=form.is_parsed),
            }
            with contextlib.suppress(RequestError):
                text = self._render(template, [asked, message], {}, _CHARS_PER_MESSAGE)
                if _SAMPLE.name in text and shows(text, _SAMPLE.arguments):
                    template.calls_form = form
                    break
        return template.calls_form

    def _readable(self, template: _Template, turns: Sequence[Turn]) -> Sequence[Turn]:
        """Return the turns without reasoning if the template does not read it; it then affects
        nothing. A template that reads it decides by its own rule which turns' reasoning it shows.
        """
        if not any(turn.reasoning for turn in turns) or self._reads_reasoning(template):
            return turns
        return [replace(turn, reasoning="") for turn in turns]

    def reads_reasoning(self, *, has_tools: bool = False) -> bool:
        """Return True if the template for such a request reads the reasoning of earlier turns.
        Raises RequestError.
        """
        return self._reads_reasoning(self._template(has_tools=has_tools))

    def _reads_reasoning(self, template: _Template) -> bool:
        """Return True if the template renders an assistant's reasoning in a sample conversation.
        Templates show it in all turns, only after the last message of a user, only beside calls,
        only with tools, or only with an option.
        """
        if template.reads_reasoning is None:
            samples = itertools.product(self._sample_chats(template), ({}, _KEEPING))
            template.reads_reasoning = any(
                self._shows_reasoning(template, turns, values) for turns, values in samples
            )
        return template.reads_reasoning

    def _shows_reasoning(
        self, template: _Template, turns: Sequence[Turn], values: dict[str, Any]
    ) -> bool:
        tools = [_SAMPLE_TOOL] if self.tools is not None else None
        max_chars = _CHARS_PER_MESSAGE * len(turns)
        with contextlib.suppress(RequestError):
            messages = self._messages(template, turns)
            text = self._render(template, messages, values, max_chars, tools=tools)
            return _SAMPLE_REASONING in text
        return False

    def _sample_chats(self, template: _Template) -> Iterator[Sequence[Turn]]:
        """Yield conversations with a reasoning, for `_reads_reasoning`."""
        asked, answer = Turn("user", "a"), Turn("assistant", "b", reasoning=_SAMPLE_REASONING)
        if self.tools is not None:
            called = Turn("assistant", "", (_SAMPLE,), reasoning=_SAMPLE_REASONING)
            yield asked, called, Turn("tool", "c", call_id=_SAMPLE.id)
        yield asked, answer
        yield asked, answer, asked

    def _keeps_places(self, template: _Template) -> bool:
        """Return True if the template shows a system message where it stands in the chat."""
        if template.keeps_places is None:
            template.keeps_places = False
            with contextlib.suppress(RequestError):
                text = self._render(template, [*map(dict, SAMPLE)], _REMINDS, _CHARS_PER_MESSAGE)
                template.keeps_places = keeps_places(text)
        return template.keeps_places

    def _own_ids(self, turns: Sequence[Turn]) -> dict[str, str]:
        """Return call id -> id in the model's own form, for calls with other ids (a chat may have
        begun on another server). Empty for models without a form of their own.
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
        """Return the turns in the form that the template expects."""
        ids = self._own_ids(turns)
        return [message for turn in turns for message in self._messages_of(template, turn, ids)]

    def _messages_of(
        self, template: _Template, turn: Turn, ids: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Return the messages of one turn. `ids`: call id -> its id in the model's form."""
        message: dict[str, Any] = {"role": turn.role, "content": _answer_of(turn)}
        if turn.name:
            message["name"] = turn.name
        if turn.reasoning:  # Named as transformers does, in its order.
            message = {"thinking": turn.reasoning, **message, _REASONING: turn.reasoning}
        messages = [message]
        if turn.calls:
            has_content, is_parsed = self._calls_form(template)
            if not has_content:
                said, message = message, {**message, "content": None}
                if said["content"] and turn.reasoning:  # It precedes the text.
                    del message["thinking"], message[_REASONING]
                messages = [said, message] if said["content"] else [message]
            message["tool_calls"] = _calls_of(turn.calls, ids, is_parsed=is_parsed)
        if turn.call_id:
            message["tool_call_id"] = ids.get(turn.call_id, turn.call_id)
        return messages

    def _num_public(
        self, turns: Sequence[Turn], values: dict[str, Any], shield: Shield, ids: tuple[int, ...]
    ) -> int:
        """Return the number of first ids equal to those of the leading system messages alone.

        Rendering those messages alone cannot include other messages, wherever the template puts
        them. Of the template's options only booleans are passed, because they contain no text.
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
                "cache_salt is 'public', but this model's chat template cannot render system"
                f" messages alone ({error}) Send another salt, or none.",
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
        # Passed as transformers does: all three are defined, but a special token that the model
        # lacks is undefined.
        own = {"add_generation_prompt": opens_reply, "tools": tools, "documents": None}
        return template.processes.render(
            messages, {**self._special_tokens, **values, **own}, max_chars + len(template.text)
        )


@dataclass
class _Template:
    """One template and its known properties."""

    processes: TemplatePool
    text: str
    calls_form: CallsForm | None = None
    """Accepted form of calls; None: not determined yet."""
    reads_reasoning: bool | None = None
    """True if it reads the reasoning of earlier turns; None: not determined yet."""
    keeps_places: bool | None = None
    """True: it shows a system message where it stands; None: not determined yet."""

    @cached_property
    def lists_tools(self) -> bool:
        """Return True if the template lists a request's tools itself."""
        return _TOOLS.search(self.text) is not None

    @cached_property
    def shows_schema(self) -> bool:
        """Return True if the template shows the schema of an answer."""
        return _SCHEMA.search(self.text) is not None

    @cached_property
    def shows_whole_schema(self) -> bool:
        """Return True if the template shows the whole schema of an answer, as V4's does."""
        return "response_schema" in self.text


def _values_of(
    template: _Template,
    shield: Shield,
    kwargs: Mapping[str, Any],
    thinking: bool | None,
    schema: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the template's variables."""
    values = {name: shield.put_in(value) for name, value in kwargs.items()}
    if thinking is not None:
        values["thinking"] = values["enable_thinking"] = thinking
    if schema is not None and template.shows_schema:
        values["answer_schema"] = shield.put_in(_outline(schema))
    if schema is not None and template.shows_whole_schema:
        values["response_schema"] = shield.put_in(schema)
    return values


def read_chat_format(folder: Path, vocabulary: Vocabulary) -> ChatFormat | None:
    """Read the chat templates of a folder; None if there is none, as in base models. Raises
    CheckpointError.
    """
    templates, source = read_templates(folder)
    if not templates:
        form = form_of_folder(folder, vocabulary.control_ids)
        if form is None:
            return None
        templates, source = {DEFAULT: template_of(form)}, f"the chats of {form.name}"
    return ChatFormat(vocabulary, templates, read_special_tokens(folder), source)


def raw_prompt(
    vocabulary: Vocabulary, text: str, *, max_tokens: int, adds_special: bool = True
) -> Prompt:
    """Return a prompt of /completions. Control tokens in the text keep their function, because its
    author writes the template too. `adds_special`: add the tokenizer's tokens around every text.

    Raises RequestError for a prompt that is sure to exceed `max_tokens`.
    """
    check_length(max(1, vocabulary.fewest_tokens(text)), max_tokens, "prompt")
    ids = encode_within(vocabulary.encode_controlled, text, max_tokens, "prompt")
    return Prompt(tuple(vocabulary.with_special(ids) if adds_special else ids))


def _places(text: str, shield: Shield, turns: Sequence[Turn], choosing: Choosing) -> Places:
    """Return the parts of a rendered chat."""
    shown = [
        replace(turn, content=_answer_of(turn)) if THINK_CLOSE in turn.content else turn
        for turn in turns
    ]
    return places_of(shield.removed_from(text), shown, [tool.name for tool in choosing.listing])


def _texts_of(turns: Sequence[Turn]) -> Iterator[str]:
    """Yield all texts of a chat."""
    for turn in turns:
        yield from (turn.content, turn.call_id, turn.name, turn.reasoning)
        for call in turn.calls:
            yield from astuple(call)


def _outline(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that a template may show: its fields, with types and
    descriptions. All values are texts, so an odd schema cannot make a template fail.
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
    """Return a turn's text without reasoning, as DeepSeek-R1 requires for earlier replies."""
    return turn.content.rpartition(THINK_CLOSE)[2] if turn.role == "assistant" else turn.content
