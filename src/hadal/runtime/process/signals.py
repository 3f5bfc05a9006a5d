"""Signals as bytes on a descriptor, so that one sleep waits for everything.

Knows neither processes nor what a signal brings about.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def signal_pipe(numbers: Sequence[signal.Signals]) -> Iterator[int]:
    """A descriptor that can be read when one of these signals came. As before when the block
    ends.
    """
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    # What is ignored stays so: `nohup` and a shell's background mean it.
    heard = [n for n in numbers if n == signal.SIGCHLD or signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, lambda *_: None) for number in heard}
    try:
        yield receiver.fileno()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        receiver.close()
        sender.close()


def read_signals(fd: int) -> bytes:
    """The numbers of those that came since, one a byte."""
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 4096)
    return b""
