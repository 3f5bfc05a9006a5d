"""The simulator decides with the code that serves: a walk of imports from both sides, and no
decision defined twice.

The sources tell which modules a server's processes and the simulator reach. The tables below list
differences with their reasons; an entry that is no longer true fails as well.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import hadal.gateway.process
import hadal.lab.sim.day.fluid
import hadal.lab.sim.world.units
import hadal.lab.sim.world.world
import hadal.runtime.rank.host
import hadal.runtime.supervisor.rollout
from hadal.core.config import Deployment, FleetConfig

SOURCE = Path(__file__).resolve().parents[1] / "src"

SERVER = (
    "hadal.gateway.process",
    "hadal.runtime.launch",
    "hadal.runtime.unit",
    "hadal.runtime.rank.host",
)
"""Modules that `hadal serve` starts, and the one that starts them."""
SIMULATOR = (
    "hadal.lab.sim.world.world",
    "hadal.lab.sim.day.fluid",
    "hadal.lab.sim.day.cache",
    "hadal.lab.sim.replay",
    "hadal.lab.simulate.run",
)
"""Modules that simulate. A missing module is skipped."""
CONNECT = ("hadal.gateway", "hadal.runtime")
"""Packages at which the simulator's walk stops: modules reached through the server's own ones prove
nothing.
"""

RANKS = (
    "a simulated unit's ranks are one Runner (lab/sim/runners): none forms, beats or dies by itself"
)
PLACING = (
    "replicas move when ranks report what they received; a simulated step takes the expected"
    " imbalance"
)
AGENTS = "a simulated node has no agent that speaks: its failure ends its units outright"
ONLY_LIVE = {
    "roles": {
        "nodes": AGENTS,
        "ranks.clocks": RANKS,
        "ranks.formation": RANKS,
        "ranks.membership": RANKS,
        "ranks.notes": RANKS,
        "ranks.processes": RANKS,
        "ranks.ranks": RANKS,
        "ranks.slow": RANKS,
        "ranks.states": RANKS,
        "ranks.steps": RANKS,
        "experts.counts": PLACING,
        "experts.experts": PLACING,
        "experts.gain": PLACING,
        "experts.install": PLACING,
        "experts.installer": PLACING,
        "experts.moved": PLACING,
        "experts.planner": PLACING,
        "experts.window": PLACING,
    },
    "policy": {"slow_hosts": RANKS},
}
"""Room -> its modules that the server reaches and the simulator does not -> reason. `hadal replay`
runs those too, since the server's modules make its roles.
"""
CACHE_DAY = (
    "a day through the disk cache's own ledger (kv/disk_slots), which is given its policy as the"
    " server's is"
)
VALUE = "a value of this type is what a role is given"
SIZES = (
    "sizes units before there are any: what comes of it is given to the fleet's role, or written"
    " into a deployment"
)
SPREAD = "what the balancer that serves leaves of drawn loads: no simulated rank moves replicas"
SHAPE = "the shape of a trace, which is what the planner is asked about"
DIRECT = {
    ("day.cache", "eviction.Arc"): CACHE_DAY,
    ("day.cache", "eviction.Lru"): CACHE_DAY,
    ("day.disk_replay", "eviction.Arc"): CACHE_DAY,
    ("day.disk_replay", "eviction.Lru"): CACHE_DAY,
    ("day.study", "eviction.Arc"): CACHE_DAY,
    ("day.study", "eviction.Lru"): CACHE_DAY,
    ("day.published", "demand.DayShape"): VALUE,
    ("day.demand", "demand.DayShape"): VALUE,
    ("day.study", "scaling.RoleRules"): VALUE,
    ("day.study", "scaling.ScalingRules"): VALUE,
    ("day.fluid_day", "scaling.Units"): VALUE,
    ("day.hour_window", "scaling.Units"): VALUE,
    ("day.curves", "capacity.DecodePoint"): SIZES,
    ("day.curves", "capacity.decode_capacity"): SIZES,
    ("plan.day", "demand.DayShape"): VALUE,
    ("plan.traffic", "demand.DayShape"): VALUE,
    ("plan.day", "scaling.RoleRules"): VALUE,
    ("plan.day", "scaling.ScalingRules"): VALUE,
    ("plan.measure", "scaling.RoleRules"): VALUE,
    ("plan.plan", "slo.Slo"): VALUE,
    ("plan.units", "slo.Slo"): VALUE,
    ("plan.plan", "capacity.units_needed"): SIZES,
    ("plan.units", "capacity.prefill_use"): SIZES,
    ("plan.traffic", "demand.learned_shape"): SHAPE,
    ("expert_loads", "experts.balance.balance"): SPREAD,
    ("expert_loads", "experts.balance.rank_loads"): SPREAD,
    ("expert_loads", "experts.balance.Cluster"): SPREAD,
    ("expert_loads", "experts.balance.ExpertPlan"): SPREAD,
}
"""(module of lab/sim, class or function of policy) used without a role -> reason. Constants, and
imports for type checkers alone, need no entry.
"""

DECIDES = (
    "choose",
    "plan",
    "balance",
    "admit",
    "route",
    "evict",
    "preempt",
    "place",
    "assign",
    "scale",
    "forecast",
)
"""First words of a decision's name."""
NOT_DECIDED: dict[str, str] = {}
"""Function of lab/sim with a name that begins with one of DECIDES -> why it decides nothing that the
server decides.
"""
ROLES = (
    "front.front.Front",
    "prefill.leader.PrefillLeader",
    "decode.leader.DecodeLeader",
    "fleet.fleet.Fleet",
)
"""Roles of a simulated fleet."""


class Tree:
    """The package's sources below a folder, module by module."""

    def __init__(self, source: Path) -> None:
        self.module_to_path = {}
        for path in sorted((source / "hadal").rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            self.module_to_path[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path

    @functools.cache  # noqa: B019
    def parsed(self, module: str) -> ast.Module:
        return ast.parse(self.module_to_path[module].read_text(encoding="utf-8"))

    def room(self, name: str) -> list[str]:
        """Return the modules of a room."""
        return [module for module in self.module_to_path if module.startswith(f"hadal.{name}.")]

    @functools.cache  # noqa: B019
    def imports(self, module: str) -> frozenset[str]:
        """Return our modules that this one imports at run time."""
        found = set()
        for node in _running(self.parsed(module)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        return frozenset(found & self.module_to_path.keys())

    def reached(self, entries: tuple[str, ...], stops: tuple[str, ...] = ()) -> set[str]:
        """Return all modules that the entries import, directly or not."""
        seen: set[str] = set()
        waiting = [entry for entry in entries if entry in self.module_to_path]
        while waiting:
            module = waiting.pop()
            if module not in seen and not module.startswith(stops):
                seen.add(module)
                waiting += self.imports(module)
        return seen

    def defined(self, module: str) -> set[str]:
        """Return the classes and functions at the module's top level."""
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        return {node.name for node in self.parsed(module).body if isinstance(node, kinds)}

    def functions(self, module: str) -> set[str]:
        """Return functions at any depth, including methods."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        return {node.name for node in ast.walk(self.parsed(module)) if isinstance(node, kinds)}


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements except those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.expr() | ast.If(test=ast.Name("TYPE_CHECKING")):
                continue
            case ast.If(test=ast.Attribute(attr="TYPE_CHECKING")):
                continue
        yield node
        yield from _running(node)


def short(modules: set[str], room: str) -> set[str]:
    """Return the names, within a room, of its modules among `modules`."""
    prefix = f"hadal.{room}."
    return {module.removeprefix(prefix) for module in modules if module.startswith(prefix)}


def unlike(tree: Tree, room: str) -> tuple[set[str], set[str]]:
    """Return the modules of a room that only the server reaches, and those only the simulator
    reaches.
    """
    live, simulated = (
        short(tree.reached(SERVER), room),
        short(tree.reached(SIMULATOR, CONNECT), room),
    )
    return live - simulated, simulated - live


def direct(tree: Tree) -> set[tuple[str, str]]:
    """Return (module of lab/sim, class or function of policy) for all run-time imports of lab/sim from
    policy. An imported module of policy counts like a function.
    """
    found = set()
    for module in tree.room("lab.sim"):
        for node in _running(tree.parsed(module)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                parent, _, last = name.rpartition(".")
                is_code = name in tree.module_to_path or (
                    parent in tree.module_to_path and last in tree.defined(parent)
                )
                if name.startswith("hadal.policy.") and is_code:
                    found.add(
                        (module.removeprefix("hadal.lab.sim."), name.removeprefix("hadal.policy."))
                    )
    return found


def decided_again(tree: Tree) -> set[str]:
    """Return names in lab/sim that equal a name in roles or policy, or that sound like a decision."""
    deciding = [*tree.room("roles"), *tree.room("policy")]
    taken = {
        name for module in deciding for name in tree.defined(module) if not name.startswith("_")
    }
    files = {module.rpartition(".")[2] for module in deciding}
    found = short(set(tree.room("lab.sim")), "lab.sim") & files
    for module in tree.room("lab.sim"):
        decisions = {
            name for name in tree.functions(module) if name.lstrip("_").split("_")[0] in DECIDES
        }
        again = (tree.defined(module) & taken) | decisions
        found |= {f"{module.removeprefix('hadal.lab.sim.')}.{name}" for name in again}
    return found


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(SOURCE)


@pytest.mark.promise(
    "tests/test_same_code.py walks the imports from the server's processes and from the "
    "simulator: both reach the same roles and policies"
)
@pytest.mark.parametrize("room", ["roles", "policy"])
def test_server_and_simulator_reach_the_same(tree: Tree, room: str) -> None:
    only_live, only_simulated = unlike(tree, room)
    assert only_live == ONLY_LIVE[room].keys(), (
        "used live and not simulated, or the other way round: mend or explain"
    )
    assert only_simulated == set(), "decides in a simulation alone"


@pytest.mark.promise(
    "tests/test_same_code.py walks the imports from the server's processes and from the "
    "simulator: both reach the same roles and policies"
)
@pytest.mark.parametrize("role", ROLES)
def test_both_reach_every_role(tree: Tree, role: str) -> None:
    module = f"hadal.roles.{role.rpartition('.')[0]}"
    assert module in tree.reached(SERVER)
    assert module in tree.reached(SIMULATOR, CONNECT)


@pytest.mark.promise(
    "tests/test_same_code.py walks the imports from the server's processes and from the "
    "simulator: both reach the same roles and policies"
)
def test_they_are_the_very_classes() -> None:
    """Compares the classes that the modules which host roles have imported."""
    assert hadal.lab.sim.world.world.Front is hadal.gateway.assembly.Front
    assert hadal.lab.sim.world.units.make_leader is hadal.runtime.rank.host.make_leader
    deployment = Deployment(fleet=FleetConfig(mode="auto"))
    made = hadal.runtime.supervisor.rollout.make_fleet(deployment, 0.0)
    assert type(made) is hadal.lab.sim.day.fluid.Fleet


def test_the_simulator_asks_policies_through_the_roles(tree: Tree) -> None:
    assert direct(tree) == DIRECT.keys(), (
        "a policy asked past its role, or no longer: let the role ask, or explain"
    )


def test_nothing_is_decided_twice(tree: Tree) -> None:
    assert decided_again(tree) == NOT_DECIDED.keys(), (
        "named as a decision is: take the one that serves, or explain"
    )


def test_a_copy_would_be_noticed(tmp_path: Path) -> None:
    """A simulator with its own front, policy and decision, beside a server that uses the real ones."""
    front = [
        "from hadal.policy import admission",
        "from hadal.policy.prefill_balance import choose_rank",
        "class Front: ...",
    ]
    world = [
        "from typing import TYPE_CHECKING",
        "from hadal.lab.sim.front import Front",
        "from hadal.policy.guess import guess",
        "from hadal.policy.admission import LIMIT",
        "if TYPE_CHECKING:",
        "    from hadal.policy.prefill_balance import choose_rank",
    ]
    own_front = [
        "class Front:",
        "    def _plan_step(self): ...",
        "def choose_rank(ranks): ...",
        "def run(): ...",
    ]
    sources = {
        "gateway/process": ["from hadal.roles.front import Front"],
        "roles/front": front,
        "lab/sim/front": own_front,
        "policy/admission": ["LIMIT = 3", "def admit(view): ..."],
        "lab/sim/world/world": world,
        "policy/prefill_balance": ["def choose_rank(ranks): ..."],
        "policy/guess": ["def guess(): ..."],
    }
    for name, lines in sources.items():
        path = tmp_path / "hadal" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")
    tree = Tree(tmp_path)
    assert unlike(tree, "roles") == ({"front"}, set())
    assert unlike(tree, "policy") == ({"prefill_balance"}, {"guess"})
    assert direct(tree) == {("world.world", "guess.guess")}
    assert decided_again(tree) == {"front", "front.Front", "front.choose_rank", "front._plan_step"}
