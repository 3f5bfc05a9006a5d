"""The way from a chat's messages to a prompt's ids, by the model's own chat template.

What users type never becomes a control token: before the template sees a message, a *shield*
character is put behind every character with which a control token begins, and taken out again once
the rendered text has been cut at its control tokens. So a template may trim, split and compare
texts as it likes, and only its own control tokens count.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hadal.core.documents import MAX_CONFIG_BYTES, read_text, shown
from hadal.core.errors import CheckpointError, RequestError
from hadal.gateway.openai import PastCall, Turn
from hadal.gateway.template import ConfinedProcess
from hadal.gateway.tools import NO_TOOLS, Choosing, described, format_of
from hadal.gateway.vocabulary import Vocabulary
from hadal.tokens.table import read_json

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_SHIELDS = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF8FF))]
"""Noncharacters first, then private use: one that no message contains is taken."""
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
    """The chat template of one model."""

    def __init__(
        self, vocabulary: Vocabulary, template: str, bos: str, eos: str, source: str
    ) -> None:
        """`source` names the template's file. Raises CheckpointError for one that does not
        parse.
        """
        self._vocabulary = vocabulary
        self._bos = bos
        self._eos = eos
        self._template = ConfinedProcess(template, source)
        self._own_chars = len(template)
        self.tools = format_of(vocabulary.control_ids, template)
        """How the model writes calls; None: it does not."""
        self._lists_tools = _TOOLS.search(template) is not None
        self._shows_schema = _SCHEMA.search(template) is not None
        starts = {
            content[0] for content in [*vocabulary.control_ids, THINK_OPEN, THINK_CLOSE] if content
        }
        self._starts = re.compile("[" + "".join(re.escape(char) for char in sorted(starts)) + "]")

    def prompt(
        self,
        turns: Sequence[Turn],
        *,
        max_tokens: int,
        thinking: bool | None = None,
        template_kwargs: dict[str, bool | int | float | str | None] | None = None,
        is_public: bool = False,
        choosing: Choosing = NO_TOOLS,
        prefix: str = "",
        reasoning: str = "",
        opens_reply: bool = True,
        goes_on: bool = False,
        schema: dict[str, Any] | None = None,
        field: str = "messages",
    ) -> Prompt:
        """Render and tokenise. `thinking` False closes the reasoning before it starts; `is_public`
        counts what may be shared with everybody. `reasoning`: what the reply's reasoning begins
        with; a reply that begins with `prefix` has no other. `opens_reply`: the template may say
        whose turn it is; `goes_on`: the prompt ends where the last turn's text does, and the reply
        goes on from there. `schema`: what the answer has to follow, for a template that shows it.
        `field`: by which the turns were given.

        Raises RequestError, also for what is sure to exceed `max_tokens`, which it then does not
        tokenise.
        """
        kwargs = template_kwargs or {}
        self._check(turns, kwargs, choosing)
        given = [each.fields for each in choosing.tools]
        texts = [
            *(text for turn in turns for text in (turn.content, turn.call_id, turn.name)),
            *(text for turn in turns for call in turn.calls for text in astuple(call)),
            *(value for value in kwargs.values() if isinstance(value, str)),
            prefix,
            reasoning,
            json.dumps([given, schema], ensure_ascii=False),
        ]
        shield, end = _unused_chars(texts)
        messages = self._messages(turns, shield)
        if goes_on:
            messages[-1]["content"] += end
        tools = self._listed(self._shielded_in(given, shield), messages)
        values: dict[str, Any] = {
            name: self._shielded(value, shield) if isinstance(value, str) else value
            for name, value in kwargs.items()
        }
        if thinking is not None:
            values["thinking"] = values["enable_thinking"] = thinking
        if schema is not None and self._shows_schema:
            values["answer_schema"] = self._shielded_in(_outline(schema), shield)
        max_chars = 2 * sum(map(len, texts)) + _CHARS_PER_MESSAGE * (len(turns) + 1)
        text = self._render(
            messages, values, max_chars, opens_reply=opens_reply and not goes_on, tools=tools
        )
        if goes_on:
            prefix = _answer_of(turns[-1])
            text, found, _ = text.rpartition(end)
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
        text += self._shielded(reasoning, shield)
        if thinks and (thinking is False or prefix):
            text += f"\n{THINK_CLOSE}\n\n"
            thinks = False
        if not goes_on:
            text += self._shielded(prefix, shield)
        check_length(self._vocabulary.fewest_tokens(text.replace(shield, "")), max_tokens, field)
        tokens = tuple(self._encode(text, shield))
        return Prompt(
            tokens,
            thinks,
            is_open and thinking is not False,
            thinks and bool(reasoning),
            prefix,
            tuple(self._vocabulary.encode_plain(prefix)),
            self._num_public(turns, values, shield, tokens) if is_public else 0,
        )

    def _listed(
        self, tools: list[dict[str, Any]], messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """Tools for the template to list; where it lists none, the system prompt does, and None is
        returned.
        """
        if not tools or self.tools is None or self._lists_tools:
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

    @cached_property
    def _calls_form(self) -> CallsForm:
        """The first in which the template renders a call's name and its arguments as JSON; models
        of one family have been published with templates of several. It is the plain one for a
        template that writes arguments otherwise.
        """
        asked = {"role": "user", "content": "a"}
        for form in itertools.starmap(CallsForm, itertools.product((True, False), (False, True))):
            message = {
                "role": "assistant",
                "content": "" if form.has_content else None,
                "tool_calls": _calls_of([_SAMPLE], {}, is_parsed=form.is_parsed),
            }
            with contextlib.suppress(RequestError):
                text = self._render([asked, message], {}, _CHARS_PER_MESSAGE)
                if _SAMPLE.name in text and _SAMPLE.arguments in text:
                    return form
        return CallsForm()

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

    def _messages(self, turns: Sequence[Turn], shield: str) -> list[dict[str, Any]]:
        """Turns as the template expects them."""
        ids = self._own_ids(turns)
        messages = [message for turn in turns for message in self._messages_of(turn, ids)]
        shielded: list[dict[str, Any]] = self._shielded_in(messages, shield)
        return shielded

    def _messages_of(self, turn: Turn, ids: Mapping[str, str]) -> list[dict[str, Any]]:
        """One of them. `ids`: calls' ids that are others there."""
        message: dict[str, Any] = {"role": turn.role, "content": _answer_of(turn)}
        if turn.name:
            message["name"] = turn.name
        messages = [message]
        if turn.calls:
            has_content, is_parsed = self._calls_form
            if not has_content:
                said, message = message, {**message, "content": None}
                messages = [said, message] if said["content"] else [message]
            message["tool_calls"] = _calls_of(turn.calls, ids, is_parsed=is_parsed)
        if turn.call_id:
            message["tool_call_id"] = ids.get(turn.call_id, turn.call_id)
        return messages

    def _shielded_in(self, value: Any, shield: str) -> Any:
        """Every text in it."""
        if isinstance(value, str):
            return self._shielded(value, shield)
        if isinstance(value, list):
            return [self._shielded_in(each, shield) for each in value]
        if isinstance(value, dict):
            return {
                self._shielded(name, shield): self._shielded_in(each, shield)
                for name, each in value.items()
            }
        return value

    def _num_public(
        self, turns: Sequence[Turn], values: dict[str, Any], shield: str, ids: tuple[int, ...]
    ) -> int:
        """How many of the first ids are also those of the leading system messages by themselves.

        What is rendered of those messages alone says nothing of any other, wherever the template
        puts them; nor do switches of the template that are true or false.
        """
        leading = list(itertools.takewhile(lambda turn: turn.role == "system", turns))
        if not leading:
            return 0
        messages = [
            {"role": turn.role, "content": self._shielded(turn.content, shield)} for turn in leading
        ]
        switches = {name: value for name, value in values.items() if isinstance(value, bool)}
        max_chars = 2 * sum(len(turn.content) for turn in leading) + _CHARS_PER_MESSAGE * (
            len(leading) + 1
        )
        try:
            alone = self._encode(
                self._render(messages, switches, max_chars, opens_reply=False), shield
            )
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
        """End the template's process."""
        self._template.close()

    def _shielded(self, text: str, shield: str) -> str:
        return self._starts.sub(lambda match: match[0] + shield, text)

    def _render(
        self,
        messages: list[dict[str, Any]],
        values: dict[str, Any],
        max_chars: int,
        *,
        opens_reply: bool = True,
        tools: list[Any] | None = None,
    ) -> str:
        own = {
            "add_generation_prompt": opens_reply,
            "bos_token": self._bos,
            "eos_token": self._eos,
            "tools": tools,
        }
        return self._template.render(messages, {**values, **own}, max_chars + self._own_chars)

    def _encode(self, text: str, shield: str) -> list[int]:
        ids: list[int] = []
        for piece in self._vocabulary.pieces(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids.extend(self._vocabulary.encode_plain(piece.replace(shield, "")))
        return ids


def read_chat_format(folder: Path, vocabulary: Vocabulary) -> ChatFormat | None:
    """Read the template from `chat_template.jinja` or from `tokenizer_config.json`; None where there
    is none, as in base models. Raises CheckpointError.
    """
    path = folder / "tokenizer_config.json"
    fields = read_json(path)
    bos, eos = _token_text(fields.get("bos_token")), _token_text(fields.get("eos_token"))
    own = folder / "chat_template.jinja"
    if own.exists():
        text = read_text(own, "chat template", MAX_CONFIG_BYTES, error=CheckpointError)
        return ChatFormat(vocabulary, text, bos, eos, str(own))
    template = fields.get("chat_template")
    if isinstance(template, list):  # Several by name: [{"name": "default", "template": ...}, ...]
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template is {shown(template)}; a text is needed.")
    return ChatFormat(vocabulary, template, bos, eos, str(path))


def raw_prompt(vocabulary: Vocabulary, text: str, bos_id: int | None, *, max_tokens: int) -> Prompt:
    """A prompt of /completions: whoever writes it writes the template too, so control tokens in it
    count.

    Raises RequestError for what is sure to exceed `max_tokens`.
    """
    check_length(max(1, vocabulary.fewest_tokens(text)), max_tokens, "prompt")
    ids = vocabulary.encode_controlled(text)
    if bos_id is not None and ids[:1] != [bos_id]:
        ids.insert(0, bos_id)
    return Prompt(tuple(ids))


def read_bos_id(folder: Path, vocabulary: Vocabulary) -> int | None:
    """The id that begins every raw prompt, where the tokenizer's configuration asks for one
    (`add_bos_token`).
    """
    fields = read_json(folder / "tokenizer_config.json")
    if not fields.get("add_bos_token"):
        return None
    return vocabulary.control_ids.get(_token_text(fields.get("bos_token")))


def check_length(num_tokens: int, max_tokens: int, field: str) -> None:
    """Raise RequestError for a prompt of `num_tokens` or more."""
    if not num_tokens:
        raise RequestError(f"{field} holds no token; send some text.", field)
    if num_tokens > max_tokens:
        raise RequestError(
            f"The prompt has {num_tokens} tokens or more; at most {max_tokens} are allowed. Shorten"
            f" {field}.",
            field,
            "context_length_exceeded",
        )


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


def _unused_chars(texts: list[str]) -> tuple[str, str]:
    unused = (char for char in _SHIELDS if not any(char in text for text in texts))
    with contextlib.suppress(StopIteration):
        return next(unused), next(unused)
    raise RequestError(
        "The messages use every private-use character of Unicode; leave two out.", "messages"
    )


def _token_text(field: Any) -> str:
    """A special token is written as text, or as an object with a `content`."""
    if isinstance(field, dict):
        field = field.get("content")
    return field if isinstance(field, str) else ""
