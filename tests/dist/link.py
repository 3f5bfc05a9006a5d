"""A slow link of one host: frames arrive later, and a share of them is lost.

    ip netns exec SWITCH python -m tests.dist.link PORT BRIDGE DELAY_S LOST_SHARE

A frame passes from the host's PORT over a bridge and two taps of this process to BRIDGE, or back.
Kernels of small machines lack netem(8), which does the same. On SIGTERM it ends and puts PORT back
on BRIDGE.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65_536
_BURST = 64
"""Frames read at a time; a limit, so that due frames do not wait."""


def ip(*words: str) -> None:
    """Run ip(8); raises CalledProcessError if that fails."""
    subprocess.run(["ip", *words], check=True, timeout=30.0)


def open_tap(name: str) -> int:
    """Create a network device and return the descriptor of its frames."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def relay(one: int, other: int, delay_s: float, lost_share: float) -> None:
    """Forward frames both ways, each after `delay_s`, and drop a share `lost_share` at random, until
    a signal ends the process.
    """
    rng = random.Random(1)
    to_frames: dict[int, deque[tuple[float, bytes]]] = {one: deque(), other: deque()}
    peer = {one: other, other: one}
    while True:
        now_s = time.monotonic()
        for tap, frames in to_frames.items():
            while frames and frames[0][0] <= now_s:
                write(tap, frames.popleft()[1])
        due_s = min((frames[0][0] for frames in to_frames.values() if frames), default=now_s + 1.0)
        readable, _, _ = select.select([one, other], [], [], max(0.0, due_s - time.monotonic()))
        for tap in readable:
            for _ in range(_BURST):
                try:
                    frame = os.read(tap, _FRAME_BYTES)
                except BlockingIOError:
                    break
                if rng.random() >= lost_share:
                    to_frames[peer[tap]].append((time.monotonic() + delay_s, frame))


def write(tap: int, frame: bytes) -> None:
    """Send a frame to the kernel; drop it if the kernel's queue is full, as a network does."""
    with contextlib.suppress(BlockingIOError):
        os.write(tap, frame)


def main(port: str, bridge: str, delay_s: float, lost_share: float) -> None:
    """Relay frames until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    near, far, middle = f"{port}-n", f"{port}-f", f"{port}-b"
    with contextlib.ExitStack() as undo:
        taps = []
        for name in (near, far):
            taps.append(open_tap(name))
            undo.callback(os.close, taps[-1])
        ip("link", "add", middle, "type", "bridge")
        undo.callback(ip, "link", "delete", middle)
        ip("link", "set", near, "master", middle, "up")
        ip("link", "set", far, "master", bridge, "up")
        ip("link", "set", middle, "up")
        ip("link", "set", port, "master", middle)
        undo.callback(ip, "link", "set", port, "master", bridge)
        print("slow", flush=True)
        relay(*taps, delay_s, lost_share)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
