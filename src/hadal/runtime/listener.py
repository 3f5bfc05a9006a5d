"""HTTP ports, opened by the supervisor for gateways and pages, so that they outlive processes.

While a crashed gateway restarts, new connections wait in the socket's backlog.
"""

from __future__ import annotations

import errno
import socket

from hadal.core.errors import ConfigError

_BACKLOG = 1024


def open_listener(host: str, port: int) -> socket.socket:
    """Bind and listen; port 0 takes a free one. Raises ConfigError naming what to change."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"host {host!r} is not an address of this machine ({error.strerror})."
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use. Choose another with --port (0: any)."
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}).") from error
    return listener


def url_of(listener: socket.socket, host: str) -> str:
    """Return the URL that reaches the listener from this machine."""
    port = listener.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
