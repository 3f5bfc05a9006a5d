"""Lines of the terminal chat: words are never broken, several lines can be one turn, and only the
owner can read the history.
"""

from __future__ import annotations

import io
import os
import pty
import random
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path

import httpx
import pytest
from rich.cells import cell_len
from rich.console import Console

from hadal.apps.terminal.chat import Chat, ChatError
from hadal.apps.terminal.screen import WordWrap, turns
from hadal.gateway.desk.service import ServedModel
from tests.waiting import DEADLINE_S, wait_until

from .serving import serving
from .world import spell

TEXT = (
    "It is asked for a rather long line of words, so that it has to be broken somewhere.\n"
    "    an indented line keeps what stands before it\n"
    "Umlauts äöü and 漢字是這樣寫的嗎 and QQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQQ end."
)


def wrapped(text: str, width: int | None, margin: str = "", seed: int = 0) -> str:
    """Return the text wrapped, after feeding it in pieces of random lengths."""
    out: list[str] = []
    wrap = WordWrap(out.append, width, margin)
    draw = random.Random(seed)
    while text:
        size = draw.randint(1, 9)
        wrap.feed(text[:size])
        text = text[size:]
    wrap.end()
    return "".join(out)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("width", [20, 33, 80])
def test_lines_break_between_words(width: int, seed: int) -> None:
    lines = wrapped(TEXT, width, seed=seed).splitlines()
    assert max(map(cell_len, lines)) <= width
    words = [word for word in TEXT.split() if word.isascii() and len(word) < 20]
    assert [word for word in " ".join(lines).split() if word in words] == words
    assert "".join("".join(lines).split()) == "".join(TEXT.split()), "nothing is lost"
    assert any(line.startswith("    an indented") for line in lines)


def test_the_way_it_is_cut_into_pieces_changes_nothing() -> None:
    assert len({wrapped(TEXT, 24, "| ", seed) for seed in range(20)}) == 1


def test_a_margin_stands_before_every_line() -> None:
    lines = wrapped(f"{TEXT}\n\nend", 24, "│ ").splitlines()
    assert all(line.startswith("│ ") for line in lines)
    assert max(map(cell_len, lines)) <= 24


def test_where_nothing_is_broken_nothing_waits() -> None:
    out: list[str] = []
    wrap = WordWrap(out.append, None)
    for piece in ("a wo", "rd of  ", "text"):
        wrap.feed(piece)
    assert "".join(out) == "a word of  text"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one \\\nand more\ntwo", ["one \nand more", "two"]),
        ('"""\nfirst\n\n  second\n"""\nnext\n', ["first\n\n  second", "next"]),
        ('"""all in one"""\nnext', ["all in one", "next"]),
        ('"""\nnever ends\n', ["\nnever ends"]),
        ("ends \\", ["ends "]),
    ],
)
def test_turns_of_several_lines(typed: str, said: list[str]) -> None:
    assert list(turns(Console(file=io.StringIO()), io.StringIO(typed), None)) == said


class Typist:
    """A real `hadal chat` on a terminal of its own, 40 cells wide."""

    def __init__(self, url: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 40))
        environment = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "COLUMNS": "40"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hadal.cli", "chat", "--url", url],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self._seen = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def seen(self) -> str:
        """Text on the screen, without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x01\x02\r]", "", self._seen)

    def type(self, keys: str, then: str, times: int = 1) -> None:
        """Press keys, and wait until the screen has shown `then` at least `times` times."""
        os.write(self._master, keys.encode())
        wait_until(lambda: self.seen.count(then) >= times, f"{then!r} is shown")

    def leave(self) -> int:
        # Before the prompt, the terminal itself would read Ctrl-D as an empty line.
        wait_until(lambda: self.seen.endswith("> "), "it asks again")
        os.write(self._master, b"\x04")
        code = self._process.wait(DEADLINE_S)
        os.close(self._master)
        return code

    def _read(self) -> None:
        try:
            while piece := os.read(self._master, 4096):
                self._seen += piece.decode(errors="replace")
        except OSError:  # The other end is closed.
            pass


def test_a_chat_at_a_terminal(model: ServedModel, tmp_path: Path) -> None:
    answer = (
        "I think about it for more than a line of this screen.</think>\n\nIt is longer than a line"
        " is, as you see."
    )
    with serving(model, spell(model, answer)) as it:
        first = Typist(it.url, tmp_path)
        first.type("", "> ")
        first.type("how are you\r", "first token")
        first.type('"""\rtwo\rlines\r"""\r', "first token", 2)
        assert first.leave() == 0
        second = Typist(it.url, tmp_path)
        second.type("", "> ")
        for _ in range(5):
            second.type("\x1b[A", "")  # Up, through the lines of the last chat.
        second.type("\r", "first token")
        assert second.leave() == 0
        asked = [
            model.vocabulary.decode(generation.prompt) for generation in it.world.units.submitted
        ]
    thinking = "thinking\n│ I think about it for more than a line\n│ of this screen.\n"
    assert f"{thinking}answer\nIt is longer than a line is, as you see.\n" in first.seen
    assert "two\nlines" in asked[1]
    assert "how are you" in second.seen
    assert "how are you" in asked[2]
    kept = tmp_path / "hadal" / "chat_history"
    assert "how are you" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


def answered(*events: str) -> str:
    """Return what a chat shows if the server's stream has these events."""
    body = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
    reply = httpx.Response(200, headers={"content-type": "text/event-stream"}, text=body)
    out = io.StringIO()
    with httpx.Client(
        base_url="http://here", transport=httpx.MockTransport(lambda request: reply)
    ) as client:
        Chat(client, Console(file=out, width=80), "m").turn("hi")
    return out.getvalue()


def test_what_a_model_writes_tells_the_terminal_nothing() -> None:
    text = r"a\u001b]52;c;aGk=\u0007\u001b[2J\u009b2J\r\nb"
    shown = answered(f'{{"choices": [{{"delta": {{"content": "{text}"}}}}]}}')
    assert shown.startswith("a]52;c;aGk=[2J2J\nb")


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"error": "overloaded"}', "overloaded"),
        ('{"error": {"message": "too much"}}', "too much"),
        ('{"choices": 3}', "answer is invalid"),
        ("what?", "answer is invalid"),
    ],
)
def test_whatever_a_server_sends_is_one_line(event: str, said: str) -> None:
    with pytest.raises(ChatError, match=said):
        answered(event)
    fine = '{"choices": [{"delta": null}, {"delta": {"content": "yes"}}], "usage": null}'
    assert answered(fine).startswith("yes")
