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
        "DeepSeek-V3's prefill unit: groups stay on a node as far as 98 % balance allows",
    ),
    (
        (
            "hadal balance --loads v3.json.gz --ranks 144 --expert-slots 2 \\\n"
            "    --json > placement.json\n"
            "hadal balance --loads new.json --ranks 144 --expert-slots 2 \\\n"
            "    --current placement.json --max-moves 500"
        ),
        "other loads since: the best placement that moves at most 500 replicas",
    ),
    after=(
        "Loads are tokens, a row per layer, a number per expert. A list of such matrices is a"
        " window of steps; a step lasts as long as its busiest rank."
    ),
)


def balance(
    loads: Annotated[
        Path,
        typer.Option(
            help="JSON or .gz: tokens, layers by experts, or an object with tokens_per_expert."
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of the unit.", min=1, max=4096)],
    expert_slots: Annotated[
        int,
        typer.Option(
            help="Expert slots of each rank; as many as experts or more: of all ranks together.",
            min=1,
            max=65_536,
        ),
    ],
    nodes: Annotated[int, typer.Option(help="Nodes that the ranks are on.", min=1, max=4096)] = 1,
    mode: Annotated[
        str, typer.Option(help="global, hierarchical (groups on one node), hybrid or fast.")
    ] = "global",
    groups: Annotated[
        int,
        typer.Option(
            help="The gate's groups of experts, for modes with nodes (8 in DeepSeek-V3).", min=1
        ),
    ] = 8,
    target: Annotated[
        float,
        typer.Option(
            help="Balancedness that hybrid and --max-moves ask of every layer.", min=0.01, max=1
        ),
    ] = 0.98,
    current: Annotated[
        Path | None, typer.Option(help="Today's placement, as --json prints it.")
    ] = None,
    max_moves: Annotated[
        int | None,
        typer.Option(
            help="Stay near today's placement: at most this many replicas move, and those it lacks.",
            min=0,
        ),
    ] = None,
    weighted: Annotated[
        bool, typer.Option("--weighted", help="Split experts unevenly over their replicas.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Place experts on ranks for measured loads; print the plan, or how balanced it is beside
    today's.
    """
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
