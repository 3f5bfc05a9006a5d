"""Conversations as a browser stores them, and streamed answers. Values only: no page, no socket.

    turn      a question, and one answer or, if tools were called, several
    answer    thinking, text, calls with their results, token counts and times

A conversation is JSON in the browser's own storage; the server stores none of it.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_TITLE_CHARS = 48


class ToolRun(msgspec.Struct):
    """Tool call of the model."""

    id: str = ""
    name: str = ""
    arguments: str = ""
    """Arguments as JSON text; incomplete while the answer streams."""
    result: str | None = None
    """Result of the tool; None if the tool has not run."""
    is_error: bool = False


class ChatAnswer(msgspec.Struct):
    """One answer of the model; incomplete while it streams."""

    thinking: str = ""
    content: str = ""
    calls: list[ToolRun] = []
    finish: str = ""
    """Finish reason of the API, or "stopped" (by the user or a closed page); empty without one."""
    error: str = ""
    num_prompt: int = 0
    num_hit: int = 0
    """Prompt tokens found in a cache."""
    num_tokens: int = 0
    first_s: float = 0.0
    """Seconds from the request to the first token."""
    thought_s: float = 0.0
    took_s: float = 0.0
    """Seconds from the first token to the last."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second after the first token; 0 if unknown."""
        return (
            (self.num_tokens - 1) / self.took_s if self.num_tokens > 1 and self.took_s > 0 else 0.0
        )

    def take(self, event: dict[str, Any], elapsed_s: float) -> bool:
        """Apply an event of the stream, `elapsed_s` after the request. Return whether it had text
        or a call.
        """
        if usage := event.get("usage"):
            self.num_prompt = usage.get("prompt_tokens", 0)
            self.num_tokens = usage.get("completion_tokens", 0)
            self.num_hit = usage.get("prompt_cache_hit_tokens", 0)
        has_text = False
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            thinking, content = delta.get("reasoning_content") or "", delta.get("content") or ""
            calls = delta.get("tool_calls") or ()
            if thinking or content or calls:
                has_text = True
                self.first_s = self.first_s or elapsed_s
                self.took_s = elapsed_s - self.first_s
            self.thinking += thinking
            if thinking:
                self.thought_s = self.took_s
            self.content += content
            for part in calls:
                self._take_call(part)
            self.finish = choice.get("finish_reason") or self.finish
        return has_text

    def _take_call(self, part: dict[str, Any]) -> None:
        index = part.get("index", 0)
        while len(self.calls) <= index:
            self.calls.append(ToolRun())
        call, function = self.calls[index], part.get("function") or {}
        call.id = part.get("id") or call.id
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""

    @property
    def wants_results(self) -> bool:
        """True if the model waits for results of its calls."""
        return self.finish == "tool_calls" and bool(self.calls)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages for the next request; none without content or tool results."""
        done = [call for call in self.calls if call.result is not None]
        if not self.content and not done:
            return []
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if done:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in done
            ]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": call.result} for call in done
        ]
        return [message, *results]


class ChatTurn(msgspec.Struct):
    """Question and its answers."""

    asked: str
    answers: list[ChatAnswer] = []


class Conversation(msgspec.Struct):
    """One conversation of a browser."""

    id: str
    title: str = ""
    system: str = ""
    temperature: float | None = None
    """Sampling temperature; None: the model's default."""
    has_tools: bool = True
    turns: list[ChatTurn] = []
    changed_ms: int = 0
    """Time of the last change, Unix ms."""

    def ask(self, text: str) -> ChatTurn:
        """Start a turn with a question."""
        self.turns.append(ChatTurn(text))
        if not self.title:
            words = " ".join(text.split())
            is_long = len(words) > MAX_TITLE_CHARS
            self.title = words[: MAX_TITLE_CHARS - 1] + "…" if is_long else words
        return self.turns[-1]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages for the next request."""
        sent: list[dict[str, Any]] = []
        if self.system.strip():
            sent.append({"role": "system", "content": self.system})
        for turn in self.turns:
            answers = [message for answer in turn.answers for message in answer.messages()]
            if answers or turn is self.turns[-1]:  # Unanswered questions are left out.
                sent += [{"role": "user", "content": turn.asked}, *answers]
        return sent

    def body(self, model: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the request body for the next answer. `tools`: tools that the model can call."""
        body: dict[str, Any] = {
            "model": model,
            "messages": self.messages(),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if tools and self.has_tools:
            body["tools"] = tools
        return body


class KeptChat(msgspec.Struct):
    """Entry in the list of stored conversations, without the turns."""

    id: str
    title: str = ""
    changed_ms: float = 0


_decode = msgspec.json.Decoder(Conversation).decode


def to_json(conversation: Conversation) -> str:
    """Return the text that the browser stores."""
    return msgspec.json.encode(conversation).decode()


def read_list(found: object) -> list[KeptChat]:
    """Parse the browser's list of conversations, newest first; empty if it is invalid."""
    try:
        chats = msgspec.convert(found, list[KeptChat])
    except msgspec.ValidationError:
        return []
    for chat in chats:  # A lone surrogate cannot be shown.
        chat.title = chat.title.encode("utf-8", "replace").decode()
    return sorted(chats, key=lambda one: -one.changed_ms)


def read(chat_id: str, text: str) -> Conversation | None:
    """Parse a stored conversation; None if it is invalid. An answer without an end is marked as
    stopped, because its page closed.
    """
    try:
        found = _decode(text.encode())
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return None
    found.id = chat_id
    for turn in found.turns:
        for answer in turn.answers:
            if not answer.finish and not answer.error:
                answer.finish = "stopped"
    return found
