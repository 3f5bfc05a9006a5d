"""Counts of a run of the suite, and its closing tables: skipped tests and how to run them, slow
tests without a stated reason, and processor time by folder against the budget.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from tests.needs import HOW
from tests.suite.budget import Budget
from tests.suite.events import Ended, Event, Selected, Used
from tests.suite.folders import folder_of

LEFT_FROM = 0.03
"""Share of the work that must be done before the remaining time is estimated."""


@dataclass
class Summary:
    """Totals of all events received so far."""

    part_to_tests: dict[str, dict[str, int]] = field(default_factory=dict)
    """Part -> folder -> number of tests, once the part has collected."""
    num_done: Counter[str] = field(default_factory=Counter)
    """Part -> number of ended tests."""
    outcomes: Counter[str] = field(default_factory=Counter)
    folder_to_s: Counter[str] = field(default_factory=Counter)
    """Folder -> processor seconds."""
    folder_to_num_done: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    num_servers: int = 0
    """Servers started for tests."""
    slow: list[Ended] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Skip reason -> number of tests."""

    def note(self, part: str, event: Event) -> str | None:
        """Count an event; return the name of a failed test, else None."""
        if isinstance(event, Selected):
            self.part_to_tests[part] = event.folder_to_num
        elif isinstance(event, Used):
            self.folder_to_s.update(event.folder_to_s)
            self.num_servers += event.num_servers
        else:
            return self._note_end(part, event)
        return None

    def _note_end(self, part: str, event: Ended) -> str | None:
        self.outcomes[event.outcome] += 1
        if event.outcome != "error" or event.test not in self.failed:
            self.num_done[part] += event.outcome != "error"
            self.folder_to_num_done[folder_of(event.test)] += event.outcome != "error"
        if event.is_slow_without_reason:
            self.slow.append(event)
        if event.outcome == "skipped":
            self.left_out[event.why] += 1
        if event.outcome in ("failed", "error"):
            self.failed.append(event.test)
            return event.test
        return None

    def progress(self, budget: Budget, passed_s: float) -> tuple[str, float]:
        """Return the progress of the parts as text, and as a share of the budget's total cost."""
        texts, done, whole = list[str](), 0.0, 0.0
        for part, folder_to_num in self.part_to_tests.items():
            texts.append(f"{part} {self.num_done[part]} of {sum(folder_to_num.values())}")
            for folder, num in folder_to_num.items():
                cost = (budget.of(folder) or 1.0) / num
                whole += num * cost
                done += min(num, self.folder_to_num_done[folder]) * cost
        if not whole:
            return "collecting", 0.0
        if self.failed:
            texts.append(f"{len(self.failed)} failed")
        share = done / whole
        if share > LEFT_FROM:
            texts.append(f"about {passed_s * (1 - share) / share / 60:.0f} min left")
        return ", ".join(texts), share

    def closing_line(self) -> str:
        """Return the last line of the run, with the numbers of passed, failed and skipped tests."""
        num_failed = self.outcomes["failed"] + self.outcomes["error"]
        return (
            f"{self.outcomes['passed']} passed, {num_failed} failed, "
            f"{self.outcomes['skipped']} skipped"
        )

    def table_left_out(self) -> Table:
        """Return the table of skipped tests: how many, why, and the command that gets them."""
        table = Table("tests", "left out because", "to run them", title="Left out")
        for why, num in sorted(self.left_out.items(), key=lambda item: -item[1]):
            reason, _, command = why.partition(HOW)
            table.add_row(str(num), reason, command or "-")
        return table

    def table_slow(self) -> Table:
        """Return a table of tests above the limit without the mark `slow`: the 30 slowest."""
        table = Table("s", "test", title="Slow, and no mark `slow` says why")
        for one in sorted(self.slow, key=lambda one: -one.seconds)[:30]:
            table.add_row(f"{one.seconds:.1f}", one.test)
        return table

    def table_processor(self, budget: Budget, loop_s: float) -> tuple[Table, list[str]]:
        """Return a table of processor time by folder, and the folders above SLACK times the budget."""
        table = Table("folder", "processor s", "units", "budget", title="Processor time")
        over = []
        for folder, seconds in sorted(self.folder_to_s.items(), key=lambda item: -item[1]):
            units, allowed = seconds / loop_s, budget.of(folder)
            is_over = allowed is not None and units > budget.SLACK * allowed
            if is_over:
                over.append(folder)
            table.add_row(
                folder,
                f"{seconds:.0f}",
                f"{units:.0f}",
                ("none" if allowed is None else f"{allowed:.0f}") + (" OVER" if is_over else ""),
            )
        table.add_row("all", f"{sum(self.folder_to_s.values()):.0f}", "", "")
        return table, over


def chosen_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into options of pytest and paths of tests."""
    paths = [one for one in arguments if re.match(r"^(\./)?tests(/|$)", one)]
    return [one for one in arguments if one not in paths], paths
