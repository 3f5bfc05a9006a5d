"""Random tokenizer folders from a seed, in published forms, and texts that try their flags."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<s>", "</s>"
CONTENTS = [
    *("<think>", "</think>", "<|user|>", "<|end|>", "<|end|>x", "[INST]", "<A>", "<a>", "é"),
    *(
        "yes",
        "Yes day",
        "  ",
        "    ",
        "\n",
        "\n\n",
        "½",
        "ﬁ",
        "①",
        "<",
        "the",
        "<｜User｜>",
        " day",
    ),
]
"""Texts of added tokens: prefixes of one another, words, space, and what normalisers change."""
PIECES = [
    *(
        "hello",
        " world",
        "The",
        "the day",
        "yesterday",
        "YES",
        "yes",
        " ",
        "   ",
        "\n",
        "\t",
        "\u3000",
    ),
    *(
        "é",
        "e\u0301",
        "ﬁ",
        "①",
        "½",
        "_",
        "-",
        "١",
        "你好",
        "🙂",
        "\u200d",
        "<",
        ">",
        "|",
        "12",
        "'s",
    ),
    *("<THINK>", "＜a＞", "\x1c", "\x85", "ⓐ"),
]
_CORPUS = [
    "The answer to the day is yes.",
    "hello world 12 yes the <think> day",
    "你好 café 🙂 fine",
]


@cache
def _bare() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer.to_str()


def draw_folder(rng: Random, folder: Path) -> list[str]:
    """Write a random tokenizer's files in place of those in the folder, and return texts of its
    added tokens.
    """
    for old in folder.iterdir():
        old.unlink()
    fields: dict[str, Any] = json.loads(_bare())
    vocab = fields["model"]["vocab"]
    contents = rng.sample(CONTENTS, rng.randrange(2, 9))
    for text in (BOS, EOS, *contents):
        if rng.random() < 0.3:
            vocab.setdefault(text, len(vocab))
    fields["model"]["ignore_merges"] = rng.random() < 0.3
    added = [_token(rng, text) for text in contents]
    added += [{**_token(rng, text), "special": True} for text in (BOS, EOS) if rng.random() < 0.8]
    rng.shuffle(added)
    next_id = len(vocab)
    for token in added:
        right = vocab.get(token["content"], next_id)
        next_id += token["content"] not in vocab
        token["id"] = right if rng.random() < 0.9 else rng.randrange(400)
    fields["added_tokens"] = added
    fields["normalizer"] = _normalizer(rng)
    fields["pre_tokenizer"] = _pre_tokenizer(rng)
    fields["post_processor"] = _post_processor(rng, vocab)
    if rng.random() < 0.1:
        fields["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    _write(folder / "tokenizer.json", fields)
    config, more = _config(rng, contents)
    _write(folder / "tokenizer_config.json", config)
    for name, value in more.items():
        _write(folder / name, value)
    _write(folder / "config.json", {"model_type": rng.choice(("deepseek_v3", "glm4_moe_lite"))})
    return [*contents, BOS, EOS, "<|new|>"]


def draw_text(rng: Random, contents: list[str]) -> str:
    """Draw a text of added tokens mixed with words and white space."""
    pieces = rng.choices([*PIECES, *contents, *contents], k=rng.randrange(1, 14))
    return "".join(pieces)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def _token(rng: Random, content: str) -> dict[str, Any]:
    often = rng.choice((0.1, 0.5))
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, **{name: rng.random() < often for name in names}}


def _normalizer(rng: Random) -> Any:
    each = [
        None,
        {"type": "Sequence", "normalizers": []},
        {"type": "NFC"},
        {"type": "NFKC"},
        {"type": "Lowercase"},
        {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]},
        {"type": "Replace", "pattern": {"String": "e"}, "content": "E"},
        {"type": "Prepend", "prepend": "x"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ]
    return rng.choice([*each, None, None, None, each[1], each[2]])


def _pre_tokenizer(rng: Random) -> Any:
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": rng.random() < 0.3,
        "trim_offsets": True,
        "use_regex": rng.random() < 0.6,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\p{N}{1,3}|\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
    digits = {"type": "Digits", "individual_digits": True}
    first = rng.choice((None, None, split, digits, {"type": "Punctuation", "behavior": "Isolated"}))
    if first is None:
        return bytes_
    return {"type": "Sequence", "pretokenizers": [first, bytes_]}


def _post_processor(rng: Random, vocab: dict[str, int]) -> Any:
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    ids = {text: vocab.get(text, 300 + number) for number, text in enumerate((BOS, EOS))}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    bos, eos = ({"SpecialToken": {"id": text, "type_id": 0}} for text in (BOS, EOS))
    template = {
        "type": "TemplateProcessing",
        "single": rng.choice(
            ([bos, sequence], [sequence, eos], [bos, sequence, eos], [bos, bos, sequence])
        ),
        "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in ids
        },
    }
    roberta = {
        "type": "RobertaProcessing",
        "sep": [EOS, ids[EOS]],
        "cls": [BOS, ids[BOS]],
        "trim_offsets": True,
        "add_prefix_space": False,
    }
    both = {"type": "Sequence", "processors": [bytes_, template]}
    return rng.choice((None, bytes_, template, template, both, roberta))


def _config(rng: Random, contents: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a tokenizer_config.json, and older config files by file name."""
    config: dict[str, Any] = {}
    more: dict[str, Any] = {}

    def maybe(name: str, share: float, *values: Any) -> None:
        if rng.random() < share:
            config[name] = rng.choice(values)

    def named(text: str) -> Any:
        return rng.choice((text, {"__type": "AddedToken", **_token(rng, text)}))

    classes = (
        "PreTrainedTokenizerFast",
        "LlamaTokenizerFast",
        "LlamaTokenizer",
        "TokenizersBackend",
    )
    maybe("tokenizer_class", 0.8, *classes, "OwnTokenizer", "Qwen2Tokenizer", "GPT2TokenizerFast")
    maybe("add_bos_token", 0.5, True, False)
    maybe("add_eos_token", 0.3, True, False)
    maybe("add_prefix_space", 0.2, True, False)
    maybe("split_special_tokens", 0.05, True, False)
    maybe("bos_token", 0.8, named(BOS))
    maybe("eos_token", 0.8, named(EOS))
    maybe("unk_token", 0.2, None, "", "<unk>")
    maybe("pad_token", 0.3, EOS, "<|pad|>", rng.choice(contents))
    maybe("image_token", 0.1, named("<|new|>"))
    lists = ([], [rng.choice(contents)], ["<|new|>", *contents[:1]], [named("<|new|>")])
    maybe("additional_special_tokens", 0.3, *lists)
    maybe("extra_special_tokens", 0.2, {}, {"new_token": "<|new|>"}, *lists)
    maybe("clean_up_tokenization_spaces", 0.3, True, False)
    maybe("model_max_length", 0.5, 4, 10**30)
    if rng.random() < 0.4:
        tokens = [_token(rng, text) for text in rng.sample([*contents, "<|new|>", BOS], 2)]
        config["added_tokens_decoder"] = {str(rng.randrange(500)): token for token in tokens}
    if rng.random() < 0.15:
        flags = _token(rng, BOS)
        more["special_tokens_map.json"] = {"bos_token": flags, "eos_token": EOS}
    if rng.random() < 0.15:
        more["added_tokens.json"] = {"<|older|>": 350, contents[0]: 351}
    return config, more
