"""Randomly drawn configurations: the logits equal transformers', or the error names the key.

`python -m tests.drawn` draws thousands and prints the counts (docs/testing.md).
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hadal.core import model_keys
from hadal.core.model_keys import ConfigKey, Table, Use
from tests.drawn.__main__ import LEAST_DRAWS, all_keys, drawn
from tests.drawn.cases import CLASS_OF, FAMILIES, draw, draw_wrong
from tests.drawn.oracle import (
    AGREED,
    REFUSED,
    Counts,
    Made,
    compare,
    count_keys,
    has_key,
    ignoring,
    make,
    read_keys,
    scratch,
    verdict,
)
from tests.levels import FULL, MORE

NUM_CASES = 5000 if FULL else 500 if MORE else 60
"""Number of cases; about 50 ms each on an idle core."""
NUM_TRIES = 30
"""Number of cases with a key that are tried: at least one must fail if the key is ignored."""
NUM_DRAWS = 2000
OTHERS = pytest.mark.more("one family's keys, and those of objects, stay in `make test`")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow("transformers is imported, and computes each case")
@pytest.mark.campaign("more cases, at all levels")
def test_drawn_configurations_agree_or_are_refused_by_name() -> None:
    outcomes: dict[int, str] = {}
    counts: Counts = Counter()
    with scratch() as folder:
        for number in range(NUM_CASES):
            inside = Path(folder) / str(number)
            inside.mkdir()
            case = drawn("0", number)
            outcomes[number] = verdict(case, inside)
            shutil.rmtree(inside)
            count_keys(counts, case)
    failed = {number: said for number, said in outcomes.items() if said not in (AGREED, REFUSED)}
    assert not failed
    assert 5 * sum(said == AGREED for said in outcomes.values()) >= 3 * NUM_CASES
    if FULL:
        few = [key for key in all_keys() if times(counts, key) < LEAST_DRAWS]
        assert not few


def times(counts: Counts, key: str) -> int:
    return sum(count for (_, each), count in counts.items() if each == key)


@pytest.mark.parametrize(
    "name",
    [
        model_keys.V3,
        *(pytest.param(family, marks=OTHERS) for family in FAMILIES if family != model_keys.V3),
        "rope",
        "quantization_config",
    ],
)
def test_no_key_that_is_read_can_be_ignored(name: str) -> None:
    """Read files as if one key of the table were absent: the comparison must fail."""
    rng, made, unseen = random.Random(name), [], []
    with scratch() as folder:
        for table_name, table, key in read_keys():
            belongs = "quantization_config" if table_name in _OBJECTS else table_name
            if belongs == name and not shows(rng, made, Path(folder), table_name, table, key):
                unseen.append(f"{table_name}.{key}")
    assert not unseen


_OBJECTS = ("fp8", "compressed", "compressed.group", "compressed.weights")


def shows(
    rng: random.Random, made: list[Made], folder: Path, name: str, table: Table, key: str
) -> bool:
    """Return whether some case fails when the key is ignored. `made`: earlier cases; new ones are
    added.
    """
    row = table[key]
    if row.use in (Use.FIXED, Use.SAME):
        family = name if name in model_keys.CONFIG else model_keys.V3
        inside = folder / f"{name}-{key}"
        inside.mkdir()
        wrong = make(draw_wrong(rng, family, name, key), inside)
        return compare(wrong) == REFUSED and fails_without(wrong, table, key)
    tried = 0
    for each in [each for each in made if has_key(each.case, name, key)]:
        if fails_without(each, table, key):
            return True
    for family in _families(name, row):
        for _ in range(NUM_DRAWS):
            case = draw(rng, family, share_refused=0.0)
            if case.must_refuse or case.may_refuse or not has_key(case, name, key):
                continue
            # The file has the same value under another key, too.
            if row.use is Use.ALIAS and row.of in case.fields:
                continue
            if key == "first_k_dense_replace" and "mlp_layer_types" in case.fields:
                continue
            inside = folder / str(len(made))
            inside.mkdir()
            made.append(make(case, inside))
            tried += 1
            if compare(made[-1]) == AGREED and fails_without(made[-1], table, key):
                return True
            if tried == NUM_TRIES:
                return False
    return False


def _families(name: str, row: ConfigKey) -> tuple[str, ...]:
    # A file of V3.2 with V3's model_type is drawn as one of V3.2.
    if "as_v32" in row.source:
        return (model_keys.V32,)
    return (name,) if name in CLASS_OF else (model_keys.V3,)


def fails_without(made: Made, table: Table, key: str) -> bool:
    """Return whether the case gives wrong logits when the key is ignored."""
    with ignoring(table, key):
        return compare(made) not in (AGREED, REFUSED)
