"""Running servers, as tests/dist has them."""

from tests.dist.conftest import start_server

__all__ = ["start_server"]
