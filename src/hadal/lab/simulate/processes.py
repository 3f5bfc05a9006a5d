"""Parts of a simulation, each in a fresh process, so that its memory is given back. Ctrl-C ends all
of them at any moment.

    submit -> a thread -> pebble: a process with a pipe of its own

pebble's ProcessPool shares its pipes and locks among processes, and so does the pool of the
standard library. A process that is killed while it sends a result leaves them unusable.

This file does not know what the parts compute.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, resource_tracker
from types import FrameType
from typing import Any

from pebble.concurrent import process

from hadal.runtime.process.entry import die_with

NAME = "part of a simulation"
KILL_S = 0.02
"""Time between two looks for processes that were started in the meantime."""


@contextmanager
def processes(num_jobs: int) -> Iterator[Executor]:
    """Return an executor of at most `num_jobs` parts at once. An error or Ctrl-C ends running
    parts, and none outlives the block.

    Only the first Ctrl-C counts, so that the clean-up is not interrupted.
    """
    # It may be ignored: a shell starts what is to run in the background so.
    is_heard = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    pool = Processes(num_jobs)
    if is_heard:
        signal.signal(signal.SIGINT, _interrupt_once)
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        if is_heard:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        pool.end()
        if is_heard and not isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        raise
    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Processes(Executor):
    """Executor of at most `num_jobs` processes at once, each for one call. A future raises
    ProcessExpired if its process died.
    """

    def __init__(self, num_jobs: int) -> None:
        self._threads = ThreadPoolExecutor(num_jobs, initializer=_block_interrupts)
        self._submitted: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call. The call and its result are pickled."""
        future = self._threads.submit(lambda: _part(os.getpid(), fn, args, kwargs).result())
        self._submitted.append(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; running ones go on."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def end(self) -> None:
        """Kill running processes and start no other."""
        self.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self._submitted):
            for child in active_children():
                if child.name == NAME:
                    child.kill()
            time.sleep(KILL_S)
        self.shutdown()


def _block_interrupts() -> None:
    """Block Ctrl-C in this thread and in the processes that it starts.

    A terminal sends Ctrl-C to every process; one that still imports would print a traceback.
    """
    # The first process would start the tracker, which unblocks the signal again.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


# pebble's overloads do not name the context as its code does.
@process(name=NAME, context=get_context("spawn"))  # type: ignore[call-overload, untyped-decorator]
def _part(
    parent: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Run one part; called in a process of its own. The call returns pebble's future of it."""
    die_with(parent)
    return function(*arguments, **options)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
