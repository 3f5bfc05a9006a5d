"""Options of `hadal balance`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hadal.commands.examples import examples

EPILOG = examples(
    (
        (
            "echo '{\"tokens_per_expert\": [[90, 20, 10, 40]]}' > loads.json\n"
            "hadal balance --loads loads.json --ranks 2 --expert-slots 3"
        ),
        "one layer of 4 experts on 2 ranks of 3 slots each: the busy experts get the 2 spare slots",
    ),
    (
        (
            "hadal balance --loads v3.json.gz --ranks 32 --nodes 4 \\\n"
            "    --expert-slots 9 --mode hybrid"
        ),
        "DeepSeek-V3's prefill unit: each expert group stays on one node if balance is still 98 %",
    ),
    (
        (
            "hadal balance --loads v3.json.gz --ranks 144 --expert-slots 2 \\\n"
            "    --json > placement.json\n"
            "hadal balance --loads new.json --ranks 144 --expert-slots 2 \\\n"
            "    --current placement.json --max-moves 500"
        ),
        "new loads: the best placement that moves at most 500 replicas",
    ),
    after=(
        "Loads are numbers of tokens: one row per layer, one number per expert. A list of"
        " such matrices is a window of steps; each step lasts as long as its busiest"
        " rank."
    ),
)


def balance(
    loads: Annotated[
        Path,
        typer.Option(
            help="File (JSON or .gz) with tokens per layer and expert, or with an object that"
            " has tokens_per_expert."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Number of ranks of the unit.", min=1, max=4096)],
    expert_slots: Annotated[
        int,
        typer.Option(
            help="Expert slots per rank. A number of at least the number of experts is the"
            " total over all ranks.",
            min=1,
            max=65_536,
        ),
    ],
    nodes: Annotated[
        int, typer.Option(help="Number of nodes that the ranks run on.", min=1, max=4096)
    ] = 1,
    mode: Annotated[
        str,
        typer.Option(
            help="Placement algorithm: global, hierarchical (each expert group"
            " on one node), hybrid or fast."
        ),
    ] = "global",
    groups: Annotated[
        int,
        typer.Option(
            help="Number of expert groups, for hierarchical and hybrid (8 in DeepSeek-V3).", min=1
        ),
    ] = 8,
    target: Annotated[
        float,
        typer.Option(
            help="Wanted balance of each layer, for hybrid and --max-moves.", min=0.01, max=1
        ),
    ] = 0.98,
    current: Annotated[
        Path | None, typer.Option(help="File with the current placement, as --json prints it.")
    ] = None,
    max_moves: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of replicas to move; replicas that the current placement lacks"
            " are not counted.",
            min=0,
        ),
    ] = None,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Split experts unevenly over their replicas.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Place experts on ranks for measured loads. Print the plan, or its balance before and after."""
    from hadal.commands.placements import plan_text

    text = plan_text(
        loads,
        current,
        ranks,
        nodes,
        expert_slots,
        is_json=as_json,
        mode=mode,
        num_groups=groups,
        target=target,
        max_moves=max_moves,
        weighted=weighted,
    )
    typer.echo(text)
