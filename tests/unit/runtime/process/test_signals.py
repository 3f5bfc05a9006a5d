"""Test that signals become bytes, and that the handlers are restored afterwards."""

from __future__ import annotations

import os
import select
import signal

from hadal.runtime.process.signals import read_signals, signal_pipe


def test_a_signal_is_a_byte_that_wakes_a_sleep() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with signal_pipe([signal.SIGUSR1]) as fd:
        assert read_signals(fd) == b""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([fd], [], [], 5.0)[0] == [fd]
        assert read_signals(fd) == bytes([signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with signal_pipe([signal.SIGUSR2]) as fd:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert read_signals(fd) == b""
    finally:
        signal.signal(signal.SIGUSR2, before)
