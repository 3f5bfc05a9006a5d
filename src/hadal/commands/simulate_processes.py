"""Parts of a simulation, each in a fresh process, so that its memory is given back; Ctrl-C ends all
at any moment.

    submit -> a thread: starts a process, sends it the part over a pipe of theirs, waits for what
    comes of it

Nobody else holds a process's end of its pipe: however it ends, its thread reads that, and no queue,
lock or semaphore is shared that it could leave as it was. The pool of the standard library has
those: ended in the middle it told of files that were closed, and may wait for the rest of a result
whose writer is gone.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType
from typing import Any

from hadal.runtime.entry import die_with


@contextmanager
def processes(num_jobs: int) -> Iterator[Executor]:
    """So many parts at once. An error or Ctrl-C ends those that run, and none outlives this one.

    Of Ctrl-C only the first press counts: what is to be done then is not interrupted.
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
    """At most `num_jobs` at once, each for one call. A future raises BrokenExecutor if its process
    died.
    """

    def __init__(self, num_jobs: int) -> None:
        self._context = get_context("spawn")
        self._threads = ThreadPoolExecutor(num_jobs)
        self._lock = threading.Lock()
        self._running: set[SpawnProcess] = set()
        self._is_ending = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """What is given and what comes of it are pickled."""
        return self._threads.submit(self._run, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; those that run go on."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def end(self) -> None:
        """Kill those that run, begin no other."""
        with self._lock:
            self._is_ending = True
            for process in self._running:
                process.kill()
        self.shutdown(cancel_futures=True)

    def _run(self, *part: Any) -> Any:
        """In a thread: one part."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
        with ours:
            with theirs:
                self._start(process)
            try:
                ours.send(part)
                is_done, found = ours.recv()
            except (
                EOFError,
                OSError,
            ) as error:  # OSError, too, where it was killed in the middle of what it said.
                raise BrokenExecutor("a process ended without a result.") from error
            finally:
                process.kill()  # It has said what it had to say, or never will.
                process.join()
                with self._lock:
                    self._running.remove(process)
        if not is_done:
            raise found
        return found

    def _start(self, process: SpawnProcess) -> None:
        """A process is killed if it was started before the end, and is not started after it."""
        with self._lock:
            if self._is_ending:
                raise BrokenExecutor("the others are being ended.")
            # Ctrl-C of a terminal reaches every process, and one that still imports would tell its
            # traceback. So it is born with the signal blocked, as this thread has it, which has no
            # use for it. What start() would begin first takes the block away again, and is begun
            # before.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            process.start()
            self._running.add(process)


def _work(pipe: Connection, parent: int) -> None:
    """In a process: one part."""
    die_with(parent)
    function, arguments, options = pipe.recv()
    try:
        answer = True, function(*arguments, **options)
    except Exception as error:
        error.add_note(f"In a process of the simulation:\n{traceback.format_exc()}")
        answer = False, error
    pipe.send(answer)


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
