"""Fixtures of running servers, from tests/dist."""

from tests.dist.conftest import start_server

__all__ = ["start_server"]
