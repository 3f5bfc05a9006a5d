"""Examples below a command's help, within 80 columns: a command, its effect on the next line."""

from __future__ import annotations

import textwrap

from rich.markup import escape

COLUMNS = 78
"""Columns of an example: a terminal has 80, and the margins of help take 2."""


def examples(*command_and_effect: tuple[str, str], after: str = "") -> str:
    """Return the epilog of a command's help. The caller must break commands longer than a line,
    with a backslash at each line's end. `after`: a last paragraph.
    """
    blocks = ["[bold]Examples[/bold]"]
    for command, effect in command_and_effect:
        what = textwrap.wrap(effect, COLUMNS - 2)
        blocks.append(
            "\n".join([escape(command), *(f"  [dim]{escape(line)}[/dim]" for line in what)])
        )
    return "\n\n".join([*blocks, *([after] if after else [])])
