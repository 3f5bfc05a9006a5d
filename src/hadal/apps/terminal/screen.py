"""Terminal for a chat: prints text that arrives in pieces, with breaks between words, and reads
turns with a history.

Does not depend on a conversation. If standard input is a pipe, every line is a turn. If standard
output is a pipe, lines are not broken.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rich.cells import cell_len
from rich.console import Console

from hadal.core.errors import ConfigError
from hadal.runtime.process.private import make_private, take_from_others

try:  # Some Pythons lack readline. Importing it gives `input` arrow keys and a history.
    import readline
except ImportError:
    readline = None  # type: ignore[assignment]

QUOTES = '"""'
"""Marks around a turn of several lines. A backslash at a line's end also continues the turn."""
MAX_HISTORY_LINES = 1000
MAX_TURN_CHARS = 4 << 20
"""Characters after which an unclosed turn ends: as many as `limits.max_body_bytes` by default."""
_BLANKS = " \t"


class WordWrap:
    """Text in pieces, broken between words into lines of `width` cells; longer words are cut. A
    word is written once its end has arrived: the last word waits for the next piece or `flush`.
    Characters two cells wide are words by themselves, since Chinese has no spaces. If `width` is
    None, pieces are written unchanged and immediately.
    """

    def __init__(self, write: Callable[[str], object], width: int | None, margin: str = "") -> None:
        """`margin` is written at the start of every line and counts towards its width."""
        self._write = write
        self._width = None if width is None else max(2, width - cell_len(margin))
        self._margin = margin
        self._column = 0
        self._is_new = True
        self._blanks = self._word = ""

    def feed(self, text: str) -> None:
        """Add the next piece."""
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
        """Write the last word, even if its end has not arrived."""
        self._end_word()
        if self._blanks and (
            self._width is None or self._column + len(self._blanks) <= self._width
        ):
            self._put(self._blanks)
        self._blanks = ""

    def end(self) -> None:
        """Write the last word, and a line feed if the last line has none."""
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
    """Yield the user's turns. At a terminal, Ctrl-C drops the current input and Ctrl-D ends. Input
    is stored in the file `history`, which only its owner may read.
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
    """Yield lines from the keyboard, with prompt ">" for the first and "." for the others."""
    console.print()
    prompt = ">"
    while True:
        # Text between \1 and \2 has no width, so that readline knows the cursor's position.
        yield input(f"\1\33[1;32m\2{prompt}\1\33[0m\2 " if console.color_system else f"{prompt} ")
        prompt = "."


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Join lines to turns: lines between QUOTES, or after a backslash, are one turn. The end of
    input ends an open turn.
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
    """Load the history of earlier chats for the arrow keys; on exit store this chat's input."""
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
                f"input history is not saved: {path}: {trouble}",
                style="dim",
                markup=False,
                highlight=False,
            )


def let_any_text_in(source: IO[str]) -> None:
    """Accept any piped input: invalid UTF-8 becomes replacement characters (U+FFFD)."""
    if isinstance(source, io.TextIOWrapper):
        source.reconfigure(errors="replace")
