"""Executor that runs each part of a simulation in a fresh process, so that its memory is released.
Ctrl-C ends all parts at any moment.

    submit -> a thread -> pebble: a process with a pipe of its own

pebble's ProcessPool shares pipes and locks among its processes, and so does the pool of the
standard library. A process that is killed while it sends a result leaves these unusable.

Does not depend on the work of the parts.
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
"""Seconds between two rounds of killing: more processes may have started in the meantime."""


@contextmanager
def processes(num_jobs: int) -> Iterator[Executor]:
    """Yield an executor of at most `num_jobs` parts at once. An error or Ctrl-C ends running parts,
    and none outlives the block. Only the first Ctrl-C counts, so that the clean-up is not
    interrupted.
    """
    # SIGINT may be ignored already: a shell starts background jobs that way.
    is_handled = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    pool = Processes(num_jobs)
    if is_handled:
        signal.signal(signal.SIGINT, _interrupt_once)
    try:
        yield pool
        pool.shutdown()
    except BaseException as error:
        if is_handled:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        pool.end()
        if is_handled and not isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.default_int_handler)
        raise
    if is_handled:
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
        """Reject new calls; running ones go on."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def end(self) -> None:
        """Kill all processes and drop queued calls. Return when every future is done."""
        self.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self._submitted):
            for child in active_children():
                if child.name == NAME:
                    child.kill()
            time.sleep(KILL_S)
        self.shutdown()


def _block_interrupts() -> None:
    """Block Ctrl-C in this thread and in the processes that it starts.

    A terminal sends Ctrl-C to every process; a process that is still importing would print a
    traceback.
    """
    # multiprocessing's tracker unblocks the signal when it starts, so start it before blocking.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


# pebble's type stubs lack the `context` argument that its code has.
@process(name=NAME, context=get_context("spawn"))  # type: ignore[call-overload, untyped-decorator]
def _part(
    parent: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Any:
    """Run one part in a process of its own. The decorated call returns pebble's future."""
    die_with(parent)
    return function(*arguments, **options)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
