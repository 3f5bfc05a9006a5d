"""Measure what the balancers gain on a running server: tokens/s of one unit of several ranks, with and
without each balancer, under the same load.

    python -m bench.balance_live [--quick] [--scene NAME ...]

Scenes of *real compute* run the unchanged `hadal serve`, with ranks that share this machine's cores. Work
that moves to another rank stays on the same cores, so balance changes no time, and these scenes show the cost
of balancing. Scenes of *virtual devices* have the same server, messages, weights and tokens. But in each
rank's process, attention and routed experts last as long as a device of its own would need for that work
(bench/balance_device). There the slowest rank decides when a step ends, as on GPUs. The gain depends on the
chosen costs of the device, which are printed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from bench.balance_device import DeviceCosts
from bench.claims import Claim, print_claims
from bench.live_load import Ask, lognormal_lengths, task_prompts
from bench.live_rounds import (
    BOTH,
    EXPERTS,
    OFF,
    REQUESTS,
    Scene,
    Served,
    Variant,
    measure,
    serve_all,
)
from bench.tables import parser_of
from hadal.core.balance import EXPERTS as EXPERT_LOADS
from hadal.core.balance import KV, OBJECTIVES, TIME

TASK = "arithmetic"
DECODE_DEVICE = DeviceCosts(row_us=120.0, position_us=1.0)
"""Costs at which a step of 48 requests spends about equal times on attention and on experts, and
most of its time on the two together.
"""
PREFILL_DEVICE = DeviceCosts(row_us=20.0, position_us=0.1)
DECODE_RANKS = "redundant_experts = 32\nmax_requests = 24\n"
"""Settings of the decode unit: more slots than requests, so that each request may run on any rank."""


@dataclass(frozen=True)
class Sizes:
    """Number of rounds, and seconds of each phase, of a measurement."""

    num_rounds: int
    warm_s: float
    settle_s: float
    window_s: float


FULL = Sizes(num_rounds=3, warm_s=40.0, settle_s=4.0, window_s=12.0)
QUICK = Sizes(num_rounds=1, warm_s=20.0, settle_s=2.0, window_s=8.0)


def decode_asks() -> list[Ask]:
    """Return chats of one task with long outputs. About every fifth prompt is long, so a rank may
    have several long ones or none.
    """
    rng = random.Random(3)
    lengths = [
        rng.randint(1500, 3200) if rng.random() < 0.2 else rng.randint(60, 300) for _ in range(96)
    ]
    prompts = task_prompts(TASK, lengths, seed=2)
    return [Ask(prompt, rng.randint(100, 500), ignore_eos=True) for prompt in prompts]


def prefill_asks() -> list[Ask]:
    """Return prompts of one task; each requests one output token."""
    return [
        Ask(prompt, 1)
        for prompt in task_prompts(TASK, lognormal_lengths(128, 400.0, 1.2, seed=5), seed=6)
    ]


def scenes() -> dict[str, Scene]:
    decode, prefill = decode_asks(), prefill_asks()
    chunks = "chunk_tokens = 256\n"
    virtual, real = "virtual devices", "real compute"
    decodes = ((virtual, DECODE_DEVICE), (real, None))
    prefills = (
        (virtual, 4, 48, PREFILL_DEVICE),
        (virtual, 2, 32, PREFILL_DEVICE),
        (real, 4, 48, None),
    )
    return {
        scene.name: scene
        for scene in (
            *(
                Scene(f"decode EP4, {kind}", "decode", 4, decode, 48, device, DECODE_RANKS)
                for kind, device in decodes
            ),
            *(
                Scene(
                    f"prefill EP{ranks}, {kind}", "prefill", ranks, prefill, num, device, "", chunks
                )
                for kind, ranks, num, device in prefills
            ),
        )
    }


def table(scene: Scene, servers: Sequence[Served], others_cores: float) -> Table:
    """Return a table with a column for each variant. Tokens/s are medians over rounds. A ratio compares two variants
    in the same round, and the median of the rounds is shown. An objective's value is the ranks' mean divided by their
    maximum. `slower ops`: share of ops that computed for longer than the device would have needed.
    """
    kind = (
        "REAL COMPUTE: the ranks share this machine's cores"
        if scene.device is None
        else (
            f"VIRTUAL DEVICES: {scene.device.row_us:g} us a row of routed experts,"
            f" {scene.device.position_us:g} us a position of attention, in each layer"
        )
    )
    title = f"{scene.unit}, {scene.ranks} ranks, hadal-tiny, {scene.num_clients} clients. {kind}"
    out = Table(
        title=title, title_justify="left", caption=f"others kept {others_cores:.2f} cores busy"
    )
    out.add_column("balancers on")
    for served in servers:
        out.add_column(served.variant.name, justify="right")

    def row(name: str, cell: Callable[[Served], str]) -> None:
        out.add_row(name, *map(cell, servers))

    row("tokens/s", lambda served: f"{served.tokens_per_s:,.0f}")
    row(
        "least, most",
        lambda s: f"{min(s.all_tokens_per_s()):,.0f}, {max(s.all_tokens_per_s()):,.0f}",
    )
    row("[bold]over off[/bold]", lambda served: f"[bold]{served.over(servers[0]):.2f}x[/bold]")
    row("step ms", lambda served: f"{served.step_ms:.1f}")
    for objective in OBJECTIVES:
        values = [served.balance(objective) for served in servers]
        if any(value is not None for value in values):
            out.add_row(objective, *("-" if value is None else f"{value:.3f}" for value in values))
    for text, name in (
        ("layers flipped", "layers_flipped"),
        ("replicas moved", "replicas_moved"),
        ("requests moved", "requests_moved"),
    ):
        out.add_row(text, *(f"{served.counters[f'hadal_{name}_total']:.0f}" for served in servers))
    if scene.device is not None:
        row("slower ops", lambda s: "-" if s.late_share is None else f"{s.late_share:.0%}")
    return out


def claims(scene: Scene, servers: Sequence[Served]) -> list[Claim]:
    """Return the claims for a scene of virtual devices: each balancer makes the ranks more equal, and both
    together serve at least as many tokens/s.

    Ranks that share cores show neither, so a scene of real compute has no claims.
    """
    if scene.device is None:
        return []
    by_name = {served.variant.name: served for served in servers}
    off = by_name[OFF.name]
    objectives = (
        ((REQUESTS, TIME, "steps cut by cost give ranks equal times"),)
        if scene.role == "prefill"
        else (
            (EXPERTS, EXPERT_LOADS, "moved experts give ranks equal loads"),
            (REQUESTS, KV, "moved requests give ranks equal KV"),
        )
    )
    found = []
    for variant, objective, what in objectives:
        now, before = by_name[variant.name].balance(objective), off.balance(objective)
        ratio = now / before if now and before else None
        found.append(Claim(f"{what}, {scene.name}", ratio, "the balance without", 1.0))
    speed = by_name[BOTH.name].over(off)
    return [*found, Claim(f"balancers serve more, {scene.name}", speed, "tokens/s without", 1.0)]


def run_scene(
    scene: Scene, variants: Sequence[Variant], sizes: Sizes, say: Callable[[str], None]
) -> tuple[Table, list[Claim]]:
    with serve_all(scene, variants) as servers:
        others_cores = measure(
            scene,
            servers,
            num_rounds=sizes.num_rounds,
            warm_s=sizes.warm_s,
            settle_s=sizes.settle_s,
            window_s=sizes.window_s,
            say=lambda text: say(f"{scene.name}, {text}"),
        )
        return table(scene, servers, others_cores), claims(scene, servers)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("balance_live", __doc__, "one short round, fewer scenes")
    known = scenes()
    parser.add_argument(
        "--scene", action="append", choices=known, help="default: all; --quick: fewer"
    )
    options = parser.parse_args(arguments)
    console = Console()
    sizes = QUICK if options.quick else FULL
    for name in options.scene or list(known)[: 3 if options.quick else None]:
        scene = known[name]
        variants = (
            (OFF, EXPERTS, REQUESTS, BOTH)
            if scene.device is not None or not options.quick
            else (OFF, BOTH)
        )
        shown, made = run_scene(
            scene, variants, sizes, lambda text: console.print(f"  [dim]{text}[/dim]")
        )
        console.print(shown)
        print_claims(console, made)


if __name__ == "__main__":
    main()
