"""Compare drawn configurations with transformers, and print the results.

`python -m tests.drawn --cases 5000` prints agreed, refused and failed cases by family, and how
often each key of the table had a value other than its default. Ends with 1 if a case failed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch

from hadal.core import model_keys
from tests.drawn.cases import FAMILIES, Case, draw
from tests.drawn.oracle import AGREED, OBJECTS, REFUSED, Counts, count_keys, scratch, verdict

LEAST_DRAWS = 20
"""Number of draws below which a key is marked "few"."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", default="0")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    outcomes: Counter[tuple[str, str]] = Counter()
    counts: Counts = Counter()
    with scratch() as folder:
        for number in range(asked.cases):
            case = drawn(asked.seed, number)
            inside = Path(folder) / str(number)
            inside.mkdir()
            said = verdict(case, inside)
            shutil.rmtree(inside)
            count_keys(counts, case)
            outcomes[case.family, said if said in (AGREED, REFUSED) else "failed"] += 1
            if said not in (AGREED, REFUSED):
                print(f"case {number} ({case.family}): {said}\n  {case.fields}", flush=True)
    print_outcomes(outcomes)
    print_counts(counts)
    failed = sum(count for (_, name), count in outcomes.items() if name == "failed")
    return 1 if failed or 5 * sum_of(outcomes, AGREED) < 3 * asked.cases else 0


def drawn(seed: str, number: int) -> Case:
    """Return case `number` of a seed; families take turns."""
    return draw(random.Random(f"{seed}/{number}"), FAMILIES[number % len(FAMILIES)])


def sum_of(outcomes: Counter[tuple[str, str]], name: str) -> int:
    return sum(count for (_, each), count in outcomes.items() if each == name)


def print_outcomes(outcomes: Counter[tuple[str, str]]) -> None:
    names = (AGREED, REFUSED, "failed")
    print(f"{'family':<20}" + "".join(f"{name:>10}" for name in names))
    for family in FAMILIES:
        print(f"{family:<20}" + "".join(f"{outcomes[family, name]:>10}" for name in names))
    print(f"{'all':<20}" + "".join(f"{sum_of(outcomes, name):>10}" for name in names))


def print_counts(counts: Counts) -> None:
    """Print how often each key had a value other than its default, by family."""
    print(f"\n{'key':<45}" + "".join(f"{family:>17}" for family in FAMILIES) + f"{'all':>8}")
    for key in all_keys():
        row = [counts[family, key] for family in FAMILIES]
        few = "" if sum(row) >= LEAST_DRAWS else "  few"
        print(f"{key:<45}" + "".join(f"{each:>17}" for each in row) + f"{sum(row):>8}{few}")


def all_keys() -> list[str]:
    """Return every key of the tables of config.json; an object's keys begin with its name."""
    top = {key: None for table in model_keys.CONFIG.values() for key in table}
    return [*top, *(f"{name}.{key}" for name, table in OBJECTS.items() for key in table)]


if __name__ == "__main__":
    sys.exit(main())
