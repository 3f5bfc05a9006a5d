"""Errors of commands: a message on stderr and one exit code for all commands."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from hadal.core.errors import EXIT_CONFIG, HadalError, InvariantError
from hadal.core.extras import install_hint

_CHECK_VALUES = {"balance", "bench", "plan", "replay", "report", "simulate", "step"}
"""Commands that raise a plain ValueError for bad options."""


class Commands(TyperGroup):
    """Command group that prints the message of a HadalError, of a ValueError in a command of
    `_CHECK_VALUES`, or a hint if an extra is not installed, and exits with EXIT_CONFIG.

    Bugs (InvariantError and unexpected errors) keep their traceback. So do all errors of `serve`,
    which prints its ConfigErrors itself.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command named on the command line."""
        try:
            return super().invoke(ctx)
        except (HadalError, ValueError, ModuleNotFoundError) as error:
            name = ctx.invoked_subcommand or ""
            message: str | None = str(error)
            is_expected = isinstance(error, HadalError) or name in _CHECK_VALUES
            if isinstance(error, ModuleNotFoundError):
                message = install_hint(error.name or "")
                is_expected = message is not None
            if name == "serve" or isinstance(error, InvariantError) or not is_expected:
                raise
            names = [name]
            while ctx.parent is not None:
                names.insert(0, ctx.info_name or "")
                ctx = ctx.parent
            typer.echo(f"hadal {' '.join(names)}: {message}", err=True)
            raise typer.Exit(EXIT_CONFIG) from None
