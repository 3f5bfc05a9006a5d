"""Tokenizer of hadal-tiny: whole words for the words it was taught, and single characters or bytes
for everything else.

It is a byte-level BPE with the frequent whole words of the generated text in its vocabulary, and no
pieces of words (`ignore_merges` finds a whole word at once). So an unknown word is read letter by
letter, and spelling, reversing and counting work on any word. Any UTF-8 text is a sequence of known
bytes.
"""

import json
import os
import random
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from evals.tasks import ALL_TASKS, sample
from evals.words import (
    ALL_LOWER,
    CITIES,
    COUNTED,
    FOODS,
    JOBS,
    MONTHS,
    NAMES,
    WEEKDAYS,
)

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, THINK_END = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUTPUT, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
CONTROLS = (BOS, EOS, PAD, USER, ASSISTANT)
"""Special tokens that are left out when text is shown."""
MARKS = (THINK, THINK_END, CALLS, CALLS_END, CALL, CALL_END, SEPARATOR, OUTPUT, OUTPUT_END)
"""Marks that stay in the text, for readers of reasoning and calls, as in DeepSeek's tokenizers."""
VOCAB_SIZE = 2560

# A word, a digit or a sign is one piece, together with a space before it; a run of line breaks is
# one piece.
_PATTERN = r" ?\p{L}+| ?\p{N}|\n+| ?[^\s\p{L}\p{N}]|\s"

# Chats without tools and formats are rendered as by R1's template. Tools are listed in few words,
# because every word costs a small model's attention; calls are written as by DeepSeek-V3.1.
_TEMPLATE = """
{%- macro kind(field) -%}
{%- if field.enum -%}{{ field.enum | join(' | ') }}
{%- elif field.type is string -%}{{ field.type }}
{%- if field.type == 'array' -%}{{ ' of ' }}{{ field['items'].type }}{%- endif -%}
{%- elif field.type -%}{{ field.type | join(' | ') }}
{%- elif field.anyOf -%}{{ field.anyOf | map(attribute='type') | join(' | ') }}
{%- else -%}any{%- endif -%}
{%- endmacro -%}
{%- macro fields(schema) -%}
{%- if schema.properties is mapping -%}
{%- for name in schema.properties -%}
{%- set field = schema.properties[name] -%}
{{ '\\n- ' }}{{ name }} ({{ kind(field) }})
{%- if field.description -%}{{ ': ' }}{{ field.description }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ message['content'] }}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{ '\\n\\n## Tools' }}
{%- for tool in tools -%}
{%- set function = tool.function -%}
{{ '\\n' }}{{ function.name }}
{%- if function.description -%}{{ ': ' }}{{ function.description }}{%- endif -%}
{{ fields(function.parameters or {}) }}
{%- endfor -%}
{%- endif -%}
{%- if answer_schema is defined and answer_schema is not none -%}
{{ '\\n\\n## JSON' }}{{ fields(answer_schema) }}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '<｜User｜>' }}{{ message['content'] }}
{%- elif message['role'] == 'assistant' -%}
{%- set content = message['content'] or '' -%}
{%- if '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip() -%}
{%- endif -%}
{{ '<｜Assistant｜>' }}{{ content }}
{%- if message['tool_calls'] -%}
{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in message['tool_calls'] -%}
{{ '<｜tool▁call▁begin｜>' }}{{ call.function.name }}{{ '<｜tool▁sep｜>' }}
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}
{{ '<｜tool▁call▁end｜>' }}
{%- endfor -%}
{{ '<｜tool▁calls▁end｜>' }}
{%- endif -%}
{{ eos_token }}
{%- elif message['role'] == 'tool' -%}
{{ '<｜tool▁output▁begin｜>' }}{{ message['content'] }}{{ '<｜tool▁output▁end｜>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}
"""
# One line, because renderers have different rules for line breaks.
CHAT_TEMPLATE = _TEMPLATE.replace("\n", "")


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _frequent_words(num_words: int, num_examples: int) -> list[str]:
    """Return the pre-tokens that occur in most examples, with the words of the tasks first."""
    rng, counts, splitter = random.Random(7), Counter(), _splitter()
    tasks = [task for task in ALL_TASKS if task != "long"]
    for index in range(num_examples):
        task = tasks[index % len(tasks)]
        example = sample(rng, task, trained_only=True)
        texts = [message["content"] for message in example.messages]
        texts += [json.dumps(each) for each in (example.tools, example.calls, example.schema)]
        text = " \n".join([*texts, example.reasoning, example.answer])
        counts.update({piece for piece, _ in splitter.pre_tokenize_str(text)})
    words = [*ALL_LOWER, *COUNTED, *NAMES, *MONTHS, *WEEKDAYS, *CITIES, *JOBS, *FOODS]
    taught = {"Ġ" + word for word in words} | set(words)
    for piece in taught:
        counts[piece] += num_examples  # The tasks spell, count and sort each of these words.
    pieces = [piece for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    is_word = lambda piece: (  # noqa: E731
        len(piece.removeprefix("Ġ")) > 1 or (piece[0] == "Ġ" and not piece[-1].isalnum())
    )
    return [piece for piece in pieces if is_word(piece)][:num_words]


def build(num_examples: int = 60_000) -> Tokenizer:
    """Return the tokenizer. It depends only on the code of the tasks and on `num_examples`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", c) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
    vocab = [*CONTROLS, *MARKS, *alphabet, *("Ġ" + c for _, c in merges)]
    vocab += [word for word in _frequent_words(VOCAB_SIZE, num_examples) if word not in set(vocab)]
    ids = {piece: index for index, piece in enumerate(vocab[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROLS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    return tokenizer


def spellings(tokenizer: Tokenizer) -> list[tuple[str, bool, bool]]:
    """Return for each token its word in lower case, whether it has a space before it, and whether
    it begins with a capital.
    """
    pieces = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    words = [piece[1:] if piece[0] == "Ġ" and len(piece) > 1 else piece for piece in pieces]
    return [
        (word.lower(), word != piece, word[0].isupper())
        for word, piece in zip(words, pieces, strict=True)
    ]


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
    """Return the tokenizer stored at `path`; build it first if the file is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # A build that is killed leaves no incomplete file at `path`.
        aside = path.with_suffix(".tmp")
        build().save(str(aside))
        os.replace(aside, path)
    return Tokenizer.from_file(str(path))
