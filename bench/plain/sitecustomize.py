"""Not encrypted: Python imports this at its start where this folder is on PYTHONPATH, and whatever
asks zmq for CURVE gets a plain connection (bench/hosts).

Hadal has no such switch. Both ends need it, or they do not understand each other.
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
