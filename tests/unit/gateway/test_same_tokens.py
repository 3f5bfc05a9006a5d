"""Ids equal those of transformers, for tokenizers drawn from a seed.

`python -m tests.unit.gateway.test_same_tokens 5000` draws 5000 and prints the outcomes.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from hadal.core.errors import CheckpointError
from hadal.gateway.text.vocabulary import read_vocabulary
from hadal.tokens.added import read_special_tokens
from hadal.tokens.refused import OWN_PIPELINES
from tests.levels import FULL, MORE

from .drawn_tokenizers import draw_folder, draw_text

NUM_DRAWS = 2000 if FULL else 500 if MORE else 40
NUM_TEXTS = 12


def outcome(seed: int, folder: Path) -> str:
    """Draw one folder, compare the ids, and return the outcome."""
    rng = Random(seed)
    contents = draw_folder(rng, folder)
    try:
        theirs: Any = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # What transformers cannot load may be refused or served.
        return f"transformers fails: {type(error).__name__}"
    try:
        vocabulary = read_vocabulary(folder)
    except CheckpointError as error:
        text = str(error)
        return "refused: " + (text.partition(": ")[2] or text.partition(" ")[2])[:40]
    assert read_special_tokens(folder) == theirs.special_tokens_map, seed
    for _ in range(NUM_TEXTS):
        text = draw_text(rng, contents)
        for adds_special in (False, True):
            ids = vocabulary.encode_controlled(text, adds_special=adds_special)
            wanted = _ids(theirs, text, adds_special=adds_special)
            assert wanted in (None, ids), (seed, text, adds_special)
        assert vocabulary.fewest_tokens(text) <= len(ids), (seed, text)
    return "agreed"


def _ids(tokenizer: Any, text: str, *, adds_special: bool) -> list[int] | None:
    """Return transformers' ids; None if its library panics: two tokens match the same space."""
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=adds_special)["input_ids"]
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None
    return ids


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    counts = Counter(outcome(seed, tmp_path) for seed in range(NUM_DRAWS))
    assert counts["agreed"] >= 0.6 * NUM_DRAWS, counts
    refused = {each for each in counts if each.startswith("refused")}
    known = ("tokenizer_class", "split_special_tokens", "is not a usable tokenizer (nothing is")
    assert all(each.startswith(tuple(f"refused: {name}" for name in known)) for each in refused), (
        counts
    )


@pytest.mark.more("it loads every tokenizer class of transformers")
def test_classes_that_build_their_own_are_all_refused() -> None:
    names = {name for name in tokenization_auto.TOKENIZER_MAPPING_NAMES.values() if name}
    own = set[str]()
    for name in sorted(names):
        kind = tokenization_auto.tokenizer_class_from_name(name.removesuffix("Fast"))
        if kind is None or kind.__name__ in ("TokenizersBackend", "PythonBackend"):
            continue
        is_backend = isinstance(kind, type) and issubclass(kind, TokenizersBackend)
        if not is_backend or any(
            "__init__" in each.__dict__
            for each in kind.__mro__[: kind.__mro__.index(TokenizersBackend)]
        ):
            own.add(name.removesuffix("Fast").removesuffix("Tokenizer"))
    assert own - OWN_PIPELINES <= {"Llama", "MistralCommonBackend", "SentencePieceBackend"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = Counter(outcome(seed, Path(name)) for seed in range(int(sys.argv[1])))
    for what, number in found.most_common():
        print(f"{number:6} {what}")
