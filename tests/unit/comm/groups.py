"""Groups of several ranks over loopback, in threads or in processes of their own."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from hadal.comm.mesh.mesh import MeshGroup
from hadal.core.plans import Member
from tests import waiting
from tests.levels import FULL

DEADLINE_S = 120.0
"""Deadline of one exchange; only a hang reaches it."""
JOIN_TIMEOUT_S = 600.0 if FULL else waiting.DEADLINE_S
"""Deadline to join threads; at full size eight ranks share two cores."""
KEY = b"the key of every group here ...."


def member(group: MeshGroup) -> Member:
    return Member(group.rank, group.epoch, "127.0.0.1", group.port)


def run_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call each function in a thread; return their results, or raise the first error."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def call(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=(index,), daemon=True) for index in range(len(functions))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


def form_all(groups: Sequence[MeshGroup], formation: int) -> None:
    """Form one formation of all these groups, together."""
    members = [member(group) for group in groups]
    run_threads([lambda group=group: group.form(formation, members) for group in groups])  # type: ignore[misc]


@contextlib.contextmanager
def mesh_threads(
    num_ranks: int, deadline_s: float = DEADLINE_S, **options: Any
) -> Iterator[list[MeshGroup]]:
    """Yield the MeshGroup of each of `num_ranks` ranks, all in formation 1. Use each in one thread
    (`run_threads`).
    """
    groups = [
        MeshGroup(rank, f"e{rank}", key=KEY, deadline_s=deadline_s, **options)
        for rank in range(num_ranks)
    ]
    try:
        form_all(groups, 1)
        yield groups
    finally:
        for group in groups:
            group.close()


def _rank_main(
    function: Callable[..., Any], rank: int, pipe: Connection, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    group = MeshGroup(rank, f"e{rank}", key=KEY, deadline_s=DEADLINE_S)
    try:
        pipe.send(group.port)
        ports = pipe.recv()
        group.form(
            1, [Member(peer, f"e{peer}", "127.0.0.1", port) for peer, port in enumerate(ports)]
        )
        pipe.send(("ok", function(group, *arguments)))
        pipe.recv()  # Ranks are done: leaving ends the others' formation.
    except BaseException as error:
        pipe.send(("error", f"rank {rank}: {type(error).__name__}: {error}"))
        raise
    finally:
        group.close()


def run_processes(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(group, *arguments)` on every rank, each a process; return results by rank.

    They are forked from an idle process that has imported torch: eight imports would take longer
    than the tests. The function is at a module's top level; arguments and results are picklable.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.unit.comm.groups"])
    pipes, processes = [], []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(function, rank, theirs, arguments), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        ports = [_receive(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send(ports)
        results = []
        for pipe in pipes:
            state, result = _receive(pipe)
            assert state == "ok", result
            results.append(result)
        for pipe in pipes:
            pipe.send("leave")
        for process in processes:
            process.join(JOIN_TIMEOUT_S)
        return results
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join(JOIN_TIMEOUT_S)
        for pipe in pipes:
            pipe.close()


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(JOIN_TIMEOUT_S), "a rank hangs"
    return pipe.recv()
