"""Ids of a tiktoken.model equal those of tiktoken itself, on which Kimi models were trained."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from hadal.core.errors import CheckpointError
from hadal.core.messages.generation import Token
from hadal.gateway.text.stream import Assembler, TextReading
from hadal.gateway.text.vocabulary import Vocabulary, read_vocabulary
from hadal.tokens.tiktoken import byte_of_char
from tests.fresh import fresh

# From tokenization_kimi.py, one alternative per line.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEXTS = [
    "Hello, world! I'll say we've done what they'd want; it's JOHN'S turn.",
    "人工智能正在改变世界。月之暗面公司发布了Kimi大模型,支持超长上下文。",
    "中文English混合 中English文 中's 々〇 한국어 日本語のテキスト",
    "1234567890 3.14159 v2.6 100,000,000 一二三",
    "def f(x: int) -> int:\n    return x + 1  # path/to/file\n\n\n\tfor i in range(10):\r\n",
    "café naïve Ñoño İstanbul ﬁnancial ǅ ʰ e\u0301",
    "emoji 🚀🌍🎉 👩‍👩‍👧 🇩🇪 世界🌎",
    "   \n\n\t\r\n   a  b   \n",
]
CHARS = "ab zE's'LL'd\n\r\t 12,./{}=漢字世界ñéß🙂\u0301\u200d\u3000\u00a0"
BOS, END, OPEN = "[BOS]", "<|im_end|>", "<think>"


@cache
def some_tokens() -> tuple[bytes, ...]:
    """Return tokens in the order of ranks: bytes, tokens that BPE finds in the texts, and inserted
    tokens that no merges lead to. The latter are used only for whole words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    to_byte = byte_of_char()
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [bytes(to_byte[char] for char in token) for token, _ in by_id]
    rng = Random(3)
    for word in (b" qzxw", "漢世字".encode(), b"zzzz", b"'LL"):
        if word not in tokens:
            tokens.insert(rng.randrange(256, len(tokens)), word)
    return tuple(tokens)


def write_folder(folder: Path, tokens: tuple[bytes, ...] | None = None) -> Path:
    tokens = some_tokens() if tokens is None else tokens
    lines = [f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    named = {BOS: len(tokens), END: len(tokens) + 2, OPEN: len(tokens) + 9}
    decoder = {
        str(i): {"content": content, "special": content != OPEN} for content, i in named.items()
    }
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def oracle(tokens: tuple[bytes, ...]) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "kimi",
        pat_str=PATTERN,
        mergeable_ranks={token: i for i, token in enumerate(tokens)},
        special_tokens={BOS: len(tokens), END: len(tokens) + 2, OPEN: len(tokens) + 9},
    )


@pytest.fixture(scope="module")
def encoding() -> tiktoken.Encoding:
    return oracle(some_tokens())


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return read_vocabulary(write_folder(tmp_path_factory.mktemp("kimi")))


@pytest.mark.parametrize("text", TEXTS)
def test_texts(vocabulary: Vocabulary, encoding: tiktoken.Encoding, text: str) -> None:
    ids = vocabulary.encode_plain(text)
    assert ids == encoding.encode_ordinary(text)
    assert len(ids) < len(text.encode()), "some tokens are longer than a byte"
    assert vocabulary.decode(ids) == text


@given(st.text() | st.text(CHARS, max_size=60))
def test_any_text(vocabulary: Vocabulary, encoding: tiktoken.Encoding, text: str) -> None:
    ids = vocabulary.encode_plain(text)
    assert ids == encoding.encode_ordinary(text)
    assert vocabulary.decode(ids) == text


def test_every_character_between_others(
    vocabulary: Vocabulary, encoding: tiktoken.Encoding
) -> None:
    """tiktoken and tokenizers use two regex engines, each with tables of its own."""
    rng = fresh()
    for code in rng.sample([*range(0xD800), *range(0xE000, 0x110000)], 20_000):
        text = f"a{chr(code)}B {chr(code)}{chr(code)}'s"
        assert vocabulary.encode_plain(text) == encoding.encode_ordinary(text), hex(code)


def test_random_vocabularies(tmp_path: Path) -> None:
    """Ids equal tiktoken's even for tokens that BPE would not find, in any order."""
    rng = fresh()
    for _ in range(20):
        alphabet = rng.choice((b"ab", b"abc", "aé漢".encode()))
        words = {bytes(rng.choices(alphabet, k=rng.randint(2, 6))) for _ in range(60)}
        tokens = (*(bytes([byte]) for byte in range(256)), *rng.sample(sorted(words), len(words)))
        vocabulary, encoding = read_vocabulary(write_folder(tmp_path, tokens)), oracle(tokens)
        for _ in range(200):
            text = bytes(rng.choices(alphabet, k=rng.randint(1, 40))).decode("utf-8", "ignore")
            assert vocabulary.encode_plain(text) == encoding.encode_ordinary(text), text


@given(st.lists(st.sampled_from([BOS, END, OPEN, "a", " b", "世", "<", "[", "\n"])).map("".join))
def test_control_tokens(vocabulary: Vocabulary, encoding: tiktoken.Encoding, text: str) -> None:
    assert vocabulary.encode_controlled(text) == encoding.encode(text, allowed_special="all")
    assert not set(vocabulary.control_ids.values()) & set(vocabulary.encode_plain(text))


def test_which_tokens_are_hidden(vocabulary: Vocabulary) -> None:
    ids = vocabulary.control_ids
    assert vocabulary.hidden_ids == {ids[BOS], ids[END]}
    assert vocabulary.decode([ids[BOS] + 1, ids[OPEN] + 100]) == "", "ids between and behind them"


@given(st.text() | st.text(CHARS, max_size=40))
def test_text_comes_out_as_tokens_come(vocabulary: Vocabulary, text: str) -> None:
    assembler = Assembler(vocabulary, TextReading(sections=False))
    shown = "".join(
        assembler.push([Token("r", 0, 0, i)]).content for i in vocabulary.encode_plain(text)
    )
    assert shown + assembler.end("length").content == text


def lines_changed(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "tiktoken.model"
        path.write_text("\n".join(change(path.read_text().splitlines())))

    return damage


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda lines: [*lines[:300], "no", *lines[301:]],
            "line 301 is 'no'; it needs a token in base64",
        ),
        (lambda lines: [*lines[:300], "YWI= 7", *lines[301:]], "line 301 is 'YWI= 7'; .* rank 300"),
        (lambda lines: [*lines[:300], "Y=I= 300", *lines[301:]], "line 301 is 'Y=I= 300'"),
        (lambda lines: [*lines[:300], " 300", *lines[301:]], "line 301 is ' 300'"),
        (lambda lines: [*lines[:300], lines[3][:4] + " 300"], "a token occurs twice"),
        (lambda lines: lines[:100], "there is no token for byte .*; the file is damaged or cut"),
        (lambda lines: [], "there is no token for byte 0"),
        (lambda lines: [*lines[:300], "é 300"], "line 301 is 'é 300'"),
    ],
)
def test_damaged_vocabularies(
    tmp_path: Path, change: Callable[[list[str]], list[str]], words: str
) -> None:
    lines_changed(change)(write_folder(tmp_path))
    with pytest.raises(CheckpointError, match=rf"tiktoken\.model: {words}"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokenizer_class": "Other"}, "tokenizer_class is 'Other', which is not supported"),
        ({"tokenizer_class": None}, "tokenizer_class is None, which is"),
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder is \[1\]; an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder\['x'\] is"),
        ({"added_tokens_decoder": {"5": {"content": "a"}}}, r"added_tokens_decoder\['5'\] is"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, r"added_tokens_decoder\['9+"),
        ({"added_tokens_decoder": {"9999": {"content": ""}}}, r"added_tokens_decoder\['9999'\]"),
    ],
)
def test_a_configuration_that_does_not_go_with_it(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    path = write_folder(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {words}"):
        read_vocabulary(tmp_path)


def test_a_tokenizer_json_goes_first(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder is .*, not ByteLevel"):
        read_vocabulary(tmp_path)
