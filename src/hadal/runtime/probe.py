"""Asks the gateway whether it answers, over the port its clients use, in a thread of its own.

Knows one path. Any status is an answer: what it says of the units is not asked here.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import urllib.parse

_PERIOD_S = 0.03
_TIMEOUT_S = 5.0


class Probe:
    """One question at a time: `ask`, sleep on `fd`, `take`."""

    def __init__(self, url: str) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when the answer has come."""
        self._address = urllib.parse.urlsplit(url)
        self._question = 0
        self._answered = 0
        self._stop = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe", daemon=True)
        self._thread.start()

    def ask(self, number: int) -> None:
        """Begin to ask until there is an answer. `number` grows: the answer to an earlier question does not count."""
        self._question = number
        self._changed.set()

    def take(self) -> bool:
        """True once per question, when it was answered."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
            return self._answered == self._question
        return False

    def close(self) -> None:
        self._stop.set()
        self._changed.set()
        self._thread.join(_TIMEOUT_S)
        os.close(self.fd)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._answered == self._question:
                self._changed.wait(1.0)
                self._changed.clear()
                continue
            number = self._question
            if self._answers():
                self._answered = number
                os.eventfd_write(self.fd, 1)
            else:
                self._stop.wait(_PERIOD_S)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status > 0
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
