"""Switch encryption off for bench/hosts: Python imports this module at start-up if its folder is on
PYTHONPATH, and zmq sockets then ignore the CURVE options.

Hadal has no such switch. Both ends of a connection need it; otherwise they cannot communicate.
"""

from __future__ import annotations

from typing import Any

import zmq

CURVE = {
    zmq.CURVE_SERVER,
    zmq.CURVE_SERVERKEY,
    zmq.CURVE_PUBLICKEY,
    zmq.CURVE_SECRETKEY,
}
_set = zmq.Socket.set


def _set_but_curve(socket: zmq.Socket[Any], option: int, value: Any) -> None:
    if option not in CURVE:
        _set(socket, option, value)


zmq.Socket.set = _set_but_curve  # type: ignore[method-assign, assignment]
