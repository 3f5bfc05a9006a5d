"""Chat in the terminal with any OpenAI-compatible server: thinking, the answer, and its speed.

Depends on the API and a terminal, not on the engine.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from dataclasses import dataclass, field
from typing import IO, Any

import httpx
import msgspec
from httpx_sse import EventSource
from rich.console import Console

from hadal.apps.terminal.screen import WordWrap, let_any_text_in, turns
from hadal.runtime.process.private import state_folder

_CONNECT_S = 5.0
_SILENCE_S = 120.0
"""Seconds without any byte, even a keep-alive, after which a request fails."""
_THINKING_STYLE = "dim italic"
_BAR = "│ "
"""Start of each line of thinking, which marks it even without colours."""
_HISTORY = "chat_history"
"""Name of the file with typed input, in the user's state folder."""
HELP = """\
/system TEXT   set the system prompt (empty: none); it holds from the next turn on
/temp NUMBER   set the temperature (empty: the model's own)
/clear         forget the conversation
/help          this text
/quit          leave (so does Ctrl-D); Ctrl-C stops an answer, not the chat
Several lines: write \"\"\" before and after them, end all but the last with a \\, or paste them."""


@dataclass
class Answer:
    """One answer with its counts and times."""

    reasoning: str = ""
    content: str = ""
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    stopped: bool = False

    def speed(self, start_s: float) -> str:
        """Return the line printed under an answer: tokens, rate, and time to first token."""
        if self.first_s is None:
            return "no output"
        first_ms = (self.first_s - start_s) * 1e3
        words = [f"{self.num_tokens} tokens"] if self.num_tokens else []
        if self.num_tokens > 1 and self.last_s > self.first_s:
            words.append(f"{(self.num_tokens - 1) / (self.last_s - self.first_s):.0f} tokens/s")
        words.append(f"first token after {first_ms:.0f} ms")
        return ", ".join([*words, *(["stopped"] if self.stopped else [])])


class _Delta(msgspec.Struct):
    reasoning_content: str | None = None
    content: str | None = None


class _EventChoice(msgspec.Struct):
    delta: _Delta | None = None


class _EventUsage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """Fields read from an event of a stream; servers may leave any of them out."""

    choices: list[_EventChoice] | None = None
    usage: _EventUsage | None = None
    error: Any = None


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters of terminals, except tabs and line feeds."""


class ChatError(Exception):
    """Error: the server is unreachable, refuses, breaks off or answers wrongly; the text is for the
    user.
    """


@dataclass
class Chat:
    """Conversation with its settings."""

    client: httpx.Client
    console: Console
    model: str
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    history: list[dict[str, str]] = field(default_factory=list)
    _shown: WordWrap | None = None
    """Writer of the part being printed: thinking or content; None before a part begins."""

    def turn(self, text: str) -> Answer:
        """Ask, print the answer as it arrives, and add both to the history if it has content.
        Ctrl-C ends only the answer. Raises ChatError.
        """
        messages = [
            *([{"role": "system", "content": self.system}] if self.system else []),
            *self.history,
        ]
        messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        answer = Answer()
        start_s = time.monotonic()
        try:
            self._stream(body, answer)
        except KeyboardInterrupt:
            answer.stopped = (
                True  # Leaving the stream closes the connection, so the server stops generating.
            )
        except httpx.HTTPError as error:
            raise ChatError(f"the connection broke ({error or type(error).__name__})") from error
        finally:
            self._end_part()
        self.console.print(answer.speed(start_s), style="cyan dim", markup=False, highlight=False)
        if answer.content:  # An answer stopped while thinking is not added.
            self.history += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": answer.content},
            ]
        return answer

    def _stream(self, body: dict[str, Any], answer: Answer) -> None:
        with self.client.stream("POST", "/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                raise ChatError(_error_of(reply))
            for sent in EventSource(reply).iter_sse():
                if sent.data == "[DONE]":
                    return
                try:
                    event = msgspec.json.decode(sent.data, type=_Event)
                except msgspec.MsgspecError as error:
                    raise ChatError(f"the server's answer is invalid ({error})") from error
                if event.error is not None:
                    raise ChatError(_said(event.error))
                if event.usage is not None:
                    answer.num_tokens = event.usage.completion_tokens
                for choice in event.choices or ():
                    if choice.delta is not None:
                        self._show(choice.delta, answer)

    def _show(self, delta: _Delta, answer: Answer) -> None:
        reasoning, content = delta.reasoning_content or "", delta.content or ""
        if not reasoning and not content:
            return
        answer.last_s = time.monotonic()
        if answer.first_s is None:
            answer.first_s = answer.last_s
        if reasoning:
            self._part("thinking" if not answer.reasoning else "", _THINKING_STYLE, _BAR).feed(
                reasoning
            )
            answer.reasoning += reasoning
        if content:
            if not answer.content:
                self._end_part()
            self._part("answer" if answer.reasoning and not answer.content else "").feed(content)
            answer.content += content

    def _part(self, title: str, style: str | None = None, margin: str = "") -> WordWrap:
        """Return the current part's writer; for a new part, print its title and make one."""
        if self._shown is None:
            if title:
                self._print(f"{title}\n", "cyan dim")
            width = self.console.width if self.console.is_terminal else None
            self._shown = WordWrap(functools.partial(self._print, style=style), width, margin)
        return self._shown

    def _end_part(self) -> None:
        if self._shown is not None:
            self._shown.end()
            self._shown = None

    def _print(self, text: str, style: str | None = None) -> None:
        """Print a model's text without control characters, so that it cannot steer the terminal."""
        self.console.print(
            _CONTROLS.sub("", text),
            end="",
            style=style,
            markup=False,
            highlight=False,
            emoji=False,
            soft_wrap=True,
        )

    def command(self, line: str) -> bool:
        """Run a line that begins with a slash. Return False to leave."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        said = ""
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            said = HELP
        elif name == "/clear":
            self.history.clear()
            said = "forgotten"
        elif name == "/system":
            self.system = rest
            said = "system prompt set" if rest else "no system prompt"
        elif name == "/temp":
            said = self._set_temperature(rest)
        else:
            said = f"{name}: unknown command; /help lists the commands"
        self.console.print(said, style="cyan", markup=False, highlight=False)
        return True

    def _set_temperature(self, text: str) -> str:
        try:
            value = float(text) if text else None
        except ValueError:
            value = -1.0
        if value is not None and not 0 <= value <= 2:
            return f"{text}: use a number from 0 to 2"
        self.temperature = value
        return "the model's own temperature" if value is None else f"temperature {value:g}"


def chat(
    base_url: str,
    *,
    model: str = "",
    api_key: str = "",
    system: str = "",
    temperature: float | None = None,
    max_tokens: int | None = None,
    console: Console | None = None,
    lines: IO[str] | None = None,
) -> int:
    """Chat until the user leaves; return the exit code. `base_url`: with or without /v1; `lines`:
    input instead of stdin.
    """
    console = console or Console()
    source = lines or sys.stdin
    let_any_text_in(source)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = base_url.rstrip("/").removesuffix("/v1") + "/v1"
    timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
    with httpx.Client(base_url=base_url, headers=headers, timeout=timeout) as client:
        try:
            model = model or first_model(client)
        except ChatError as error:
            console.print(f"hadal chat: {error}", style="red", markup=False, highlight=False)
            return 1
        talk = Chat(client, console, model, system, temperature, max_tokens)
        if source.isatty():
            greeting = f"{model} at {base_url}. /help lists the commands."
            console.print(greeting, style="cyan", markup=False, highlight=False)
        return _loop(talk, source)


def _loop(talk: Chat, source: IO[str]) -> int:
    folder = state_folder()
    failed = False
    for turn in turns(talk.console, source, None if folder is None else folder / _HISTORY):
        text = turn.strip()
        if not text:
            continue
        if text.startswith("/") and "\n" not in text:
            if not talk.command(text):
                break
            continue
        try:
            talk.turn(text)
            failed = False
        except ChatError as error:
            failed = True
            talk.console.print(f"error: {error}", style="red", markup=False, highlight=False)
    return int(failed)


def first_model(client: httpx.Client) -> str:
    """Return the first model that the server lists. Raises ChatError."""
    try:
        reply = client.get("/models")
    except httpx.HTTPError as error:
        raise ChatError(
            f"there is no server at {client.base_url} ({error}). Start one with `hadal"
            " serve`, or give the URL of another with `--url`."
        ) from error
    if reply.status_code != 200:
        raise ChatError(_error_of(reply))
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError(
            f"{client.base_url} lists no model. Check the URL, or name a model with `--model`."
        ) from None


def _said(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _error_of(reply: httpx.Response) -> str:
    if reply.status_code == 401:
        return "401: the server needs a valid API key: set --api-key or HADAL_API_KEY."
    try:
        return f"{reply.status_code}: {reply.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{reply.status_code}: {reply.text[:200]}"
