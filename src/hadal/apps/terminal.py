"""A terminal for a chat: text that comes in pieces broken between words, and what is typed, with a
history.

Knows a screen and a keyboard, nothing of a conversation. Where standard input is a pipe every line
is a turn; where output is one, lines stay as long as they are.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import msgspec
from httpx_sse import EventSource
from rich.cells import cell_len
from rich.console import Console

from hadal.core.errors import ConfigError
from hadal.runtime.process.private import make_private, state_folder, take_from_others

try:  # Not every Python was built with it. Its import gives `input` arrow keys and a history.
    import readline
except ImportError:
    readline = None  # type: ignore[assignment]

QUOTES = '"""'
"""Marks around a turn of several lines, as in Python; a backslash at a line's end goes on with the
next one as well.
"""
MAX_HISTORY_LINES = 1000
MAX_TURN_CHARS = 4 << 20
"""Longest turn of several lines: a server takes no longer body."""
_BLANKS = " \t"


class WordWrap:
    """Text in pieces, broken into lines of `width` cells between words; what does not fit on a line
    is cut.

    A word is written when its end has come, so the last one waits for the next piece or for
    `flush`. Characters two cells wide are words by themselves: Chinese has no spaces. `width` None
    breaks nothing and keeps nothing back.
    """

    def __init__(self, write: Callable[[str], object], width: int | None, margin: str = "") -> None:
        """`margin` stands at the beginning of every line and counts for its width."""
        self._write = write
        self._width = None if width is None else max(2, width - cell_len(margin))
        self._margin = margin
        self._column = 0
        self._is_new = True
        self._blanks = self._word = ""

    def feed(self, text: str) -> None:
        """Take the next piece."""
        for character in text:
            if character == "\n":
                self.flush()
                self._begin()
                self._write("\n")
                self._is_new = True
            elif character in _BLANKS:
                self._end_word()
                self._blanks += character
            else:
                if cell_len(character) > 1:
                    self._end_word()
                self._word += character
                if cell_len(character) > 1 or (
                    self._width is not None and cell_len(self._word) >= self._width
                ):
                    self._end_word()
        if self._width is None:
            self.flush()

    def flush(self) -> None:
        """Write what waits for the end of its word."""
        self._end_word()
        if self._blanks and (
            self._width is None or self._column + len(self._blanks) <= self._width
        ):
            self._put(self._blanks)
        self._blanks = ""

    def end(self) -> None:
        """Write what is left, and end the line if there is one."""
        self.flush()
        if not self._is_new:
            self._write("\n")
            self._is_new = True

    def _end_word(self) -> None:
        if not self._word:
            return
        if (
            self._width is not None
            and self._column + cell_len(self._blanks + self._word) > self._width
        ):
            if self._column:
                self._write("\n")
                self._is_new = True
            self._blanks = ""
        self._put(self._blanks + self._word)
        self._blanks = self._word = ""

    def _put(self, text: str) -> None:
        self._begin()
        self._write(text)
        self._column += cell_len(text)

    def _begin(self) -> None:
        if self._is_new:
            self._write(self._margin)
            self._is_new, self._column = False, 0


def turns(console: Console, source: IO[str], history: Path | None) -> Iterator[str]:
    """What the user says, turn by turn. At a terminal Ctrl-C drops what is being typed and Ctrl-D
    ends; what was typed is kept in `history`, for its owner alone.
    """
    if not source.isatty():
        yield from _joined(iter(source))
        return
    with _remembered(console, history):
        while True:
            lines = _joined(_typed(console))
            try:
                yield next(lines)
            except KeyboardInterrupt:
                console.print()
            except (EOFError, StopIteration):
                console.print()
                return


def _typed(console: Console) -> Iterator[str]:
    """Lines from the keyboard; the first has another prompt than those that go on with it."""
    console.print()
    prompt = ">"
    while True:
        # Between \1 and \2 stands what has no width, so that readline knows where the cursor is.
        yield input(f"\1\33[1;32m\2{prompt}\1\33[0m\2 " if console.color_system else f"{prompt} ")
        prompt = "."


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Lines as turns: those between quotes, or after a backslash, are one. An end inside of one
    ends it.
    """
    for line in lines:
        turn = line.rstrip("\n")
        if turn.lstrip().startswith(QUOTES):
            yield _quoted(turn.lstrip().removeprefix(QUOTES), lines)
            continue
        while turn.endswith("\\") and len(turn) < MAX_TURN_CHARS:
            more = next(lines, None)
            turn = turn.removesuffix("\\") + ("" if more is None else "\n" + more.rstrip("\n"))
        yield turn


def _quoted(turn: str, lines: Iterator[str]) -> str:
    while not turn.rstrip().endswith(QUOTES) and len(turn) < MAX_TURN_CHARS:
        more = next(lines, None)
        if more is None:
            return turn
        turn += "\n" + more.rstrip("\n")
    return turn.rstrip().removesuffix(QUOTES).strip("\n")


@contextlib.contextmanager
def _remembered(console: Console, path: Path | None) -> Iterator[None]:
    """Give the arrow keys what was typed in earlier chats, and write down what was typed in this
    one.
    """
    if readline is None or path is None:
        yield
        return
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # Pasted lines are one turn.
    readline.set_history_length(MAX_HISTORY_LINES)
    trouble = ""
    try:
        make_private(path.parent)
        path.touch(mode=0o600)
        take_from_others(path)
        readline.read_history_file(path)
    except (OSError, ConfigError) as error:
        trouble = getattr(error, "strerror", None) or str(error)
    try:
        yield
    finally:
        if not trouble:
            try:
                readline.write_history_file(path)
            except OSError as error:
                trouble = error.strerror or str(error)
        if trouble:
            console.print(
                f"no history is kept: {path}: {trouble}", style="dim", markup=False, highlight=False
            )


def let_any_text_in(source: IO[str]) -> None:
    """Whatever is piped in can be sent: bytes that are no UTF-8 become question marks."""
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="replace")


# A chat in the terminal with any OpenAI-compatible server: thinking behind a bar, the answer, how
# fast it came.
#
# Knows the API and a terminal, nothing of the engine. With standard input from a pipe every line is
# a turn.


_CONNECT_S = 5.0
_SILENCE_S = 120.0
"""A server that says nothing for so long, not even a keep-alive, is given up."""
_THINKING_STYLE = "dim italic"
_BAR = "│ "
"""What a line of thinking begins with: it tells thinking from the answer without colours as well.
"""
_HISTORY = "chat_history"
"""Name of the file, in the user's state folder, that keeps what was typed."""
HELP = """\
/system TEXT   set the system prompt (empty: none); it holds from the next turn on
/temp NUMBER   set the temperature (empty: the model's own)
/clear         forget the conversation
/help          this text
/quit          leave (so does Ctrl-D); Ctrl-C stops an answer, not the chat
Several lines: between \"\"\" and \"\"\", or each but the last with a \\ at its end, or pasted."""


@dataclass
class Answer:
    """One answer as it came in."""

    reasoning: str = ""
    content: str = ""
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    stopped: bool = False

    def speed(self, start_s: float) -> str:
        """What is printed under an answer."""
        if self.first_s is None:
            return "nothing came"
        first_ms = (self.first_s - start_s) * 1e3
        words = [f"{self.num_tokens} tokens"] if self.num_tokens else []
        if self.num_tokens > 1 and self.last_s > self.first_s:
            words.append(f"{(self.num_tokens - 1) / (self.last_s - self.first_s):.0f} tokens/s")
        words.append(f"first after {first_ms:.0f} ms")
        return ", ".join([*words, *(["stopped"] if self.stopped else [])])


class _Delta(msgspec.Struct):
    reasoning_content: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """What is read of a stream's event, whoever serves it."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that tell a terminal something; all but tabs and line feeds."""


class ChatError(Exception):
    """The server cannot be reached or refuses; the text is for the user."""


@dataclass
class Chat:
    """A conversation and its settings."""

    client: httpx.Client
    console: Console
    model: str
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    history: list[dict[str, str]] = field(default_factory=list)
    _shown: WordWrap | None = None
    """The part of an answer that is being written, thinking or content."""

    def turn(self, text: str) -> Answer:
        """Ask, print the answer as it comes, remember it. Raises ChatError; Ctrl-C ends the answer
        only.
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
                True  # Leaving the stream closes the connection, and the server stops its work.
            )
        except httpx.HTTPError as error:
            raise ChatError(f"the connection broke ({error or type(error).__name__})") from error
        finally:
            self._end_part()
        self.console.print(answer.speed(start_s), style="cyan dim", markup=False, highlight=False)
        if answer.content:  # An answer that was stopped while thinking leaves no turn behind.
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
                    raise ChatError(f"the server sent what is no answer ({error})") from error
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
        """Return what the next piece is written to. A part begins with its title."""
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
        """What a model wrote is shown, and tells the terminal nothing."""
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
        """Carry out a line that begins with a slash. False: leave."""
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
            said = f"{name}: no such command; /help lists them"
        self.console.print(said, style="cyan", markup=False, highlight=False)
        return True

    def _set_temperature(self, text: str) -> str:
        try:
            value = float(text) if text else None
        except ValueError:
            value = -1.0
        if value is not None and not 0 <= value <= 2:
            return f"{text}: a number from 0 to 2 is needed"
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
    """Talk until the user leaves; returns the exit code. `base_url` with or without /v1; `lines`
    instead of stdin.
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
    """The first model the server lists. Raises ChatError."""
    try:
        reply = client.get("/models")
    except httpx.HTTPError as error:
        raise ChatError(
            f"there is no server at {client.base_url} ({error}). Start one with `hadal serve`, or"
            " name another's address with `--url`."
        ) from error
    if reply.status_code != 200:
        raise ChatError(_error_of(reply))
    try:
        return str(reply.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ChatError(
            f"{client.base_url} lists no model. Is it a server of models? Name one with `--model`."
        ) from None


def _said(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _error_of(reply: httpx.Response) -> str:
    if reply.status_code == 401:
        return "401: the server wants an API key that it knows: give --api-key, or HADAL_API_KEY."
    try:
        return f"{reply.status_code}: {reply.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"{reply.status_code}: {reply.text[:200]}"
