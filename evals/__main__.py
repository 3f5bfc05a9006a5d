"""Measure how well a running server answers the tasks its model was taught: `python -m evals`."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import msgspec
import typer
from httpx import HTTPError
from rich.console import Console
from rich.markup import escape

from evals.foreign import foreign_examples
from evals.run import ask_all, drafts_of, drafts_said, held_out_examples, table_of, wrong_said
from evals.tasks import ALL_TASKS
from hadal.commands.address import URL, server_url
from hadal.commands.examples import examples
from hadal.core.errors import EXIT_CONFIG
from hadal.progress import Bar

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(
    epilog=examples(
        ("python -m evals", "30 prompts of each task, and how many answers are exact"),
        (
            "python -m evals --task reverse --num-per-task 100 --seed 1",
            "other prompts, of one task",
        ),
        (
            "python -m evals --at-least 0.9 --json",
            "for programs: it leaves with 1 if fewer are exact",
        ),
    ),
)
def evaluate(
    url: Annotated[str, typer.Option(help="Where the server is.", callback=server_url)] = URL,
    num_per_task: Annotated[int, typer.Option(help="Prompts per task.", min=1)] = 30,
    task: Annotated[
        list[str] | None, typer.Option(help="Only this task; may be given again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which held-out prompts are drawn.")] = 0,
    model: Annotated[
        str, typer.Option(help="Name of the model. [dim]the first the server lists[/dim]")
    ] = "",
    api_key: Annotated[str, typer.Option(help="Key for the server.", envvar="HADAL_API_KEY")] = "",
    concurrency: Annotated[int, typer.Option(help="Prompts asked at once.", min=1)] = 16,
    show_wrong: Annotated[int, typer.Option(help="Wrong answers to show.", min=0)] = 3,
    at_least: Annotated[
        float, typer.Option(help="Leave with 1 if fewer are exact.", min=0, max=1)
    ] = 0.0,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Ask the probe of wordings written by hand instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Ask a server held-out prompts of hadal-tiny's tasks; print how many answers are exact."""
    base_url = url.rstrip("/").removesuffix("/v1")
    try:
        examples = (
            foreign_examples()
            if foreign
            else held_out_examples(num_per_task, seed, tuple(task or ALL_TASKS))
        )
        drafts_before = drafts_of(base_url, api_key)
        with Bar("evals", len(examples)) as bar:
            answers = asyncio.run(
                ask_all(
                    base_url,
                    examples,
                    model=model,
                    api_key=api_key,
                    concurrency=concurrency,
                    on_answer=lambda _: bar.update("prompts answered", advance=1),
                )
            )
        drafts = drafts_said(drafts_before, drafts_of(base_url, api_key))
    except (ValueError, HTTPError) as error:
        hint = (
            " Is there a server? Start one with `hadal serve`."
            if isinstance(error, HTTPError)
            else ""
        )
        typer.echo(f"evals: {url}: {error}.{hint}" if hint else f"evals: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    wrong = [answer for answer in answers if not answer.correct]
    share = 1 - len(wrong) / max(len(answers), 1)
    console = Console(stderr=as_json)
    console.print(table_of(answers))
    if drafts:
        console.print(f"accepted by the server meanwhile: {drafts}")
    for answer in wrong[:show_wrong]:
        console.print(f"[red]wrong[/]{escape(wrong_said(answer))}")
    if as_json:
        rows = [answer.as_json() for answer in answers]
        print(msgspec.json.encode({"exact": share, "drafts": drafts, "answers": rows}).decode())
    sys.exit(0 if share >= at_least else 1)


if __name__ == "__main__":
    app(prog_name="python -m evals")
