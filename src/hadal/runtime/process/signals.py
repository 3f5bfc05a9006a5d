"""Signals as bytes on a descriptor, so that one poll waits for signals and all else.

Does not depend on processes or on the effects of a signal.
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
    """Yield a descriptor that is readable once one of these signals arrives. At the end of the
    block, restore the former handlers.
    """
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    # Ignored signals stay ignored: `nohup` and a shell's background jobs rely on it.
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
    """Return the numbers of the signals that arrived since the last call, one per byte."""
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 4096)
    return b""
