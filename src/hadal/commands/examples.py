"""Examples under a command's help: what to type on a line of its own, what it does below it, within
80 columns.
"""

from __future__ import annotations

import textwrap

from rich.markup import escape

COLUMNS = 78
"""Columns of an example: a terminal has 80, and the margins of help take 2."""


def examples(*command_and_effect: tuple[str, str], after: str = "") -> str:
    """The epilog of a command. A command too long for a line is given in lines that end in a
    backslash; `after`: what else there is to say.
    """
    blocks = ["[bold]Examples[/bold]"]
    for command, effect in command_and_effect:
        what = textwrap.wrap(effect, COLUMNS - 2)
        blocks.append(
            "\n".join([escape(command), *(f"  [dim]{escape(line)}[/dim]" for line in what)])
        )
    return "\n\n".join([*blocks, *([after] if after else [])])
