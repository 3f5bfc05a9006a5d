"""The tokenizer of hadal-tiny: whole words it was taught, and single characters or bytes for
everything else.

It is a byte-level BPE whose vocabulary holds the frequent whole words of the generated text and no
pieces of words (`ignore_merges` finds a whole word at once). A word it does not know is therefore
read letter by letter, so spelling, reversing and counting work on any word; any UTF-8 text is a
sequence of known bytes.
"""

import random
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from evals.tasks import TASKS, sample
from evals.words import ALL_LOWER, COUNTED, MONTHS, NAMES, WEEKDAYS

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, THINK_END = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
SPECIALS = (BOS, EOS, PAD, USER, ASSISTANT, THINK, THINK_END)
VOCAB_SIZE = 1536

# Words and single digits keep the space before them; punctuation and line breaks stand alone.
_PATTERN = r" ?\p{L}+| ?\p{N}|\n+| ?[^\s\p{L}\p{N}]|\s"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{"
    " message['content'] }}{% endif %}{% endfor %}{% for message in messages %}{% if"
    " message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% elif message['role'] =="
    " 'assistant' %}{% set content = message['content'] or '' %}{% if '</think>' in content %}{%"
    " set content = content.split('</think>')[-1].lstrip() %}{% endif %}{{ '<｜Assistant｜>' +"
    " content + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{"
    " '<｜Assistant｜><think>\\n' }}{% endif %}"
)


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _frequent_words(num_words: int, num_examples: int) -> list[str]:
    """Return the commonest pre-tokens of generated text, the task words first of all."""
    rng, counts, splitter = random.Random(7), Counter(), _splitter()
    for index in range(num_examples):
        example = sample(rng, TASKS[index % len(TASKS)])
        text = " \n".join(
            [m["content"] for m in example.messages] + [example.reasoning, example.answer]
        )
        counts.update(piece for piece, _ in splitter.pre_tokenize_str(text))
    words = [*ALL_LOWER, *COUNTED, *NAMES, *MONTHS, *WEEKDAYS]
    taught = {"Ġ" + word for word in words} | set(words)
    for piece in taught:
        counts[piece] += 2  # A tie goes to the words of the tasks.
    pieces = [piece for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    is_word = lambda piece: (  # noqa: E731
        len(piece.removeprefix("Ġ")) > 1 or (piece[0] == "Ġ" and not piece[-1].isalnum())
    )
    return [piece for piece in pieces if is_word(piece)][:num_words]


def build(num_examples: int = 60_000) -> Tokenizer:
    """Return the tokenizer, the same for the same task code."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", c) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    vocab = [*SPECIALS, *alphabet, *("Ġ" + c for _, c in merges)]
    vocab += [word for word in _frequent_words(VOCAB_SIZE, num_examples) if word not in set(vocab)]
    ids = {piece: index for index, piece in enumerate(vocab[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    # The thinking marks must survive decoding with skip_special_tokens, as in R1's tokenizer.
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIALS[:5]]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in SPECIALS[5:]])
    return tokenizer


def config() -> dict:
    """Return tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }


def load_or_build(path: Path) -> Tokenizer:
    """Return the tokenizer kept at `path`, building it first if it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build().save(str(path))
    return Tokenizer.from_file(str(path))
