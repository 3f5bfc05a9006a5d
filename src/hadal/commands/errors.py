"""Errors of commands: one line on stderr and an exit code, the same for all of them."""

from __future__ import annotations

import logging
from typing import Any

import typer
from typer.core import TyperGroup

from hadal.core.errors import EXIT_CONFIG, HadalError


class Commands(TyperGroup):
    """Commands whose HadalError or ValueError ends them with EXIT_CONFIG: a user can mend what it says."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the line names."""
        try:
            return super().invoke(ctx)
        except (HadalError, ValueError) as error:
            logging.getLogger("hadal").debug("", exc_info=True)
            names = [ctx.invoked_subcommand or ""]
            while ctx.parent is not None:
                names.insert(0, ctx.info_name or "")
                ctx = ctx.parent
            typer.echo(f"hadal {' '.join(names)}: {error}", err=True)
            raise typer.Exit(EXIT_CONFIG) from None
