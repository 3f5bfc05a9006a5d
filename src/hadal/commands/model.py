"""`hadal model`: a model folder's contents, memory needs, and deployments that can serve it.

commands/model_rows reads the folder.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Annotated

import typer

from hadal.commands.examples import examples

EXIT_NOT_SERVED = 1
EPILOG = examples(
    ("hadal model", "describe the model that ships with Hadal"),
    (
        "hadal model ~/models/Moonlight-16B-A3B-Instruct",
        "describe a model in a Hugging Face folder",
    ),
    ("hadal model configs/deepseek_v3", "a config.json is enough; weights are not checked then"),
    ("hadal model FOLDER --memory-gb 512", "show what would fit into another machine"),
    after=(
        "On a CPU, all ranks of a host share one copy of the weights, in their stored"
        " type. For details of a deployment: `hadal serve --config FILE --model FOLDER"
        " --dry-run`."
    ),
)


def model(
    folder: Annotated[
        str,
        typer.Argument(
            help="Hugging Face folder of the model. [dim]HADAL_MODEL, else hadal-tiny[/dim]",
            show_default=False,
        ),
    ] = "",
    memory_gb: Annotated[
        float | None,
        typer.Option(
            help="Memory for the model, in 10^9 bytes. [dim]the free memory of this machine[/dim]",
            min=0.001,
            max=1e6,
        ),
    ] = None,
    accept_config: Annotated[
        list[str] | None,
        typer.Option(
            help="Unknown key to ignore, as in `hadal serve`.", metavar="KEY", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Describe the model in a folder: its parameters, bytes, KV per token and chat template, and
    the deployments that could serve it. The exit code is 0 if `hadal serve` would start.
    """
    from hadal.commands.model_rows import as_json as values_of
    from hadal.commands.model_rows import read_folder, sections
    from hadal.runtime.plan_rows import console_for, print_sections

    if memory_gb is not None and math.isnan(memory_gb):
        raise typer.BadParameter("a number is needed.", param_hint="--memory-gb")
    found = read_folder(folder, tuple(accept_config or ()), memory_gb)
    why = found.why_not_served
    if as_json:
        typer.echo(json.dumps(values_of(found), indent=2))
        sys.exit(EXIT_NOT_SERVED if why else 0)
    print_sections(console_for(sys.stdout), sections(found), 16)
    typer.echo()
    if why:
        typer.echo(f"hadal model: `hadal serve` would not start: {why}", err=True)
        sys.exit(EXIT_NOT_SERVED)
