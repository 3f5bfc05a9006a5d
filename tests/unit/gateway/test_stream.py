"""The assembler of replies gives the text of a plain definition, however the tokens are grouped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadal.core.messages.generation import Token
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.text.piece import Piece
from hadal.gateway.text.stream import Assembler, TextReading
from hadal.gateway.text.vocabulary import Vocabulary, read_vocabulary

from .model_folder import EOS, USER, write_model_folder

STOPS = ["stop", "4.\n", "\n\n", "🙂", "a", "</think>", "think"]
TEXTS = [
    "The answer",
    " is 4.",
    "\n",
    "\n\n",
    "🙂",
    "你好",
    "stop",
    "stopped",
    "é",
    "a",
    "<thi",
    "nk>",
    "<",
    "</th",
    "ink>",
]


@pytest.fixture(scope="session")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Return a vocabulary in which the think marks are ordinary text."""
    return read_vocabulary(
        write_model_folder(tmp_path_factory.mktemp("spelled"), think_tokens=False)
    )


def tokens_of(ids: Sequence[int], finish: str | None = "length") -> list[Token]:
    return [
        Token("r", 0, i, token, finish if i == len(ids) - 1 else None, -0.5, ((token, -0.5),))
        for i, token in enumerate(ids)
    ]


def run(assembler: Assembler, tokens: Sequence[Token], cuts: Sequence[int] = ()) -> Piece:
    whole = Piece()
    permits = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    for start, end in itertools.pairwise(permits):
        piece = assembler.push(tokens[start:end])
        assert "\ud800" not in piece.content
        whole.add(piece)
    whole.add(assembler.end("length"))
    return whole


def one_by_one(assembler: Assembler, tokens: Sequence[Token]) -> Piece:
    return run(assembler, tokens, range(len(tokens)))


@st.composite
def outputs(draw: st.DrawFn) -> list[str | int]:
    """Draw text, think marks, and raw bytes that need not be UTF-8."""
    return draw(
        st.lists(st.sampled_from([*TEXTS, "<think>", "</think>", 0x80, 0xF0, 0xE4]), max_size=12)
    )


def ids_of(vocabulary: Vocabulary, parts: Sequence[str | int]) -> list[int]:
    byte_ids = {raw: i for i, raw in enumerate(vocabulary.token_bytes) if len(raw) == 1}
    ids: list[int] = []
    for part in parts:
        ids += (
            [byte_ids[bytes([part])]]
            if isinstance(part, int)
            else vocabulary.encode_controlled(part)
        )
    return ids


@given(
    outputs(),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from(STOPS), max_size=3, unique=True),
    st.integers(0, 6),
    st.lists(st.integers(0, 60)),
    st.booleans(),
)
def test_any_grouping_gives_the_same(
    model: ServedModel,
    spelled: Vocabulary,
    parts: list[str | int],
    sections: bool,
    thinks: bool,
    stops: list[str],
    min_tokens: int,
    cuts: list[int],
    spells: bool,
) -> None:
    vocabulary = spelled if spells else model.vocabulary
    tokens = tokens_of(ids_of(vocabulary, parts))

    def new() -> Assembler:
        return Assembler(
            vocabulary,
            TextReading(
                sections=sections,
                thinks=thinks and sections,
                stops=tuple(stops),
                min_tokens=min_tokens,
                logprobs=True,
            ),
        )

    first, second = new(), new()
    assert run(first, tokens, cuts) == one_by_one(second, tokens)
    assert (first.num_tokens, first.num_reasoning_tokens) == (
        second.num_tokens,
        second.num_reasoning_tokens,
    )


@given(outputs())
def test_text_without_sections_is_the_bytes(model: ServedModel, parts: list[str | int]) -> None:
    vocabulary = model.vocabulary
    ids = ids_of(vocabulary, parts)
    text = one_by_one(Assembler(vocabulary, TextReading(sections=False)), tokens_of(ids)).content
    assert text == b"".join(vocabulary.token_bytes[i] for i in ids).decode("utf-8", "replace")


@given(outputs(), st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True))
def test_stop_strings_cut_the_text(
    model: ServedModel, parts: list[str | int], stops: list[str]
) -> None:
    ids = ids_of(model.vocabulary, parts)
    whole = one_by_one(
        Assembler(model.vocabulary, TextReading(sections=False)), tokens_of(ids)
    ).content
    cut = one_by_one(
        Assembler(model.vocabulary, TextReading(sections=False, stops=tuple(stops))), tokens_of(ids)
    )
    assert not any(stop in cut.content for stop in stops)
    assert whole.startswith(cut.content)
    assert (cut.finish == "stop") == any(stop in whole for stop in stops)
    if cut.finish == "length":
        assert cut.content == whole


def without_marks(text: str) -> str:
    """Remove each mark when it is complete, also one that was split by another mark."""
    kept = ""
    for char in text:
        kept = (kept + char).removesuffix("<think>").removesuffix("</think>")
    return kept


@given(outputs(), st.booleans())
def test_sections_split_at_the_first_mark(
    model: ServedModel, spelled: Vocabulary, parts: list[str | int], spells: bool
) -> None:
    vocabulary = spelled if spells else model.vocabulary
    parts = [
        part
        for part in parts
        if isinstance(part, str) and (spells or "think" in part or part not in ("</th", "<thi"))
    ]
    # If the mark is a token, its spelling is plain text, which the definition below does not cover.
    if not spells:
        parts = [part for part in parts if part not in ("<", "ink>", "nk>")]
    text = "".join(parts)
    piece = one_by_one(
        Assembler(vocabulary, TextReading(sections=True, thinks=True)),
        tokens_of(ids_of(vocabulary, parts)),
    )
    reasoning, mark, content = text.partition("</think>")
    reasoning, content = without_marks(reasoning), without_marks(content)
    assert piece.reasoning == reasoning.lstrip("\n")
    assert piece.content == (content.lstrip("\n") if mark else "")


@given(outputs(), st.booleans(), st.booleans())
def test_no_control_mark_reaches_a_chat(
    model: ServedModel, spelled: Vocabulary, parts: list[str | int], thinks: bool, spells: bool
) -> None:
    """A model may write `</think>` although thinking is disabled; it once stood in the content."""
    vocabulary = spelled if spells else model.vocabulary
    texts = [part for part in parts if isinstance(part, str)]
    mixed = [text for part in texts for text in (part, USER, "</think>", EOS, "<think>")]
    tokens = tokens_of(ids_of(vocabulary, mixed))
    piece = one_by_one(Assembler(vocabulary, TextReading(sections=True, thinks=thinks)), tokens)
    for text in (piece.content, piece.reasoning):
        assert not any(mark in text for mark in (USER, EOS, "<think>", "</think>"))


def test_a_mark_that_is_spelled_out_is_no_content_either(model: ServedModel) -> None:
    vocabulary = model.vocabulary
    ids = [i for text in ("a</th", "ink>", " b") for i in vocabulary.encode_plain(text)]
    pieces = [one_by_one(Assembler(vocabulary, TextReading(sections=True)), tokens_of(ids))]
    pieces.append(Assembler(vocabulary, TextReading(sections=True)).push(tokens_of(ids)))
    assert [piece.content for piece in pieces] == ["a b"] * 2
    nested = [i for text in ("a</thi<thi", "nk>nk> b") for i in vocabulary.encode_plain(text)]
    assert (
        one_by_one(Assembler(vocabulary, TextReading(sections=True)), tokens_of(nested)).content
        == "a b"
    )
    raw = one_by_one(
        Assembler(vocabulary, TextReading(sections=False)), tokens_of(ids)
    )  # A plain completion shows marks.
    assert raw.content == "a</think> b"


def test_the_end_of_a_thought_that_never_began_is_dropped(model: ServedModel) -> None:
    tokens = tokens_of(ids_of(model.vocabulary, ["</think>", "\n\n", "The answer"]))
    assert (
        one_by_one(Assembler(model.vocabulary, TextReading(sections=True)), tokens).content
        == "The answer"
    )


def test_never_half_a_character(model: ServedModel) -> None:
    byte_ids = {raw: i for i, raw in enumerate(model.vocabulary.token_bytes) if len(raw) == 1}
    assembler = Assembler(model.vocabulary, TextReading(sections=False))
    tokens = tokens_of([byte_ids[bytes([byte])] for byte in "🙂é".encode()], finish=None)
    shown = [assembler.push([token]).content for token in tokens]
    assert shown == ["", "", "", "🙂", "", "é"]


def test_half_a_character_at_the_end_is_shown_as_such(model: ServedModel) -> None:
    ids = ids_of(model.vocabulary, ["a", 0xF0])
    assert (
        one_by_one(Assembler(model.vocabulary, TextReading(sections=False)), tokens_of(ids)).content
        == "a�"
    )


def test_reply_that_opens_its_own_thought(model: ServedModel, spelled: Vocabulary) -> None:
    for vocabulary in (model.vocabulary, spelled):
        assembler = Assembler(vocabulary, TextReading(sections=True))
        tokens = tokens_of(ids_of(vocabulary, ["<think>", "\n", "a", "</think>", "\n\n", "é"]))
        piece = one_by_one(assembler, tokens)
        assert (piece.reasoning, piece.content, piece.finish) == ("a", "é", "length")
        assert 0 < assembler.num_reasoning_tokens < assembler.num_tokens == len(tokens)


def test_reply_without_thought(model: ServedModel, spelled: Vocabulary) -> None:
    for vocabulary in (model.vocabulary, spelled):
        assembler = Assembler(vocabulary, TextReading(sections=True))
        piece = one_by_one(assembler, tokens_of(ids_of(vocabulary, ["\n", "<thi", "a"])))
        assert (piece.reasoning, piece.content) == ("", "\n<thia")
        assert assembler.num_reasoning_tokens == 0


def test_stop_id_has_no_text(model: ServedModel) -> None:
    vocabulary = model.vocabulary
    ids = [*ids_of(vocabulary, ["a"]), vocabulary.control_ids[EOS]]
    assembler = Assembler(vocabulary, TextReading(sections=False, logprobs=True))
    piece = one_by_one(assembler, tokens_of(ids, finish="stop"))
    assert (piece.content, piece.finish, assembler.num_tokens) == ("a", "stop", 2)
    assert [token.token for token in piece.content_tokens] == ids[:1]


def test_logprobs_go_with_their_text(model: ServedModel) -> None:
    vocabulary = model.vocabulary
    tokens = tokens_of(ids_of(vocabulary, ["a", "</think>", "é", "stop", "a"]))
    piece = one_by_one(
        Assembler(
            vocabulary, TextReading(sections=True, thinks=True, stops=("stop",), logprobs=True)
        ),
        tokens,
    )
    assert vocabulary.decode([token.token for token in piece.reasoning_tokens]) == "a</think>"
    assert (
        vocabulary.decode([token.token for token in piece.content_tokens]) == piece.content == "é"
    )
    assert piece.finish == "stop"


def test_stop_string_before_min_tokens_is_text(model: ServedModel) -> None:
    tokens = tokens_of(ids_of(model.vocabulary, ["a", "é", "a"]))
    piece = one_by_one(
        Assembler(model.vocabulary, TextReading(sections=False, stops=("a",), min_tokens=1)), tokens
    )
    assert (piece.content, piece.finish) == ("aé", "stop")


def test_tokens_after_the_end_are_ignored(model: ServedModel) -> None:
    assembler = Assembler(model.vocabulary, TextReading(sections=False, stops=("a",)))
    tokens = tokens_of(ids_of(model.vocabulary, ["é", "a", "é"]), finish=None)
    assert assembler.push(tokens).content == "é"
    assert assembler.num_tokens == len(tokens) - len(ids_of(model.vocabulary, ["é"]))
    assert not assembler.push(tokens)


def test_ids_beyond_the_table_have_no_text(model: ServedModel) -> None:
    tokens = tokens_of([len(model.vocabulary) + 5])
    assert Assembler(model.vocabulary, TextReading(sections=False)).push(tokens).content == ""
