"""A gateway's messages to its front: new generations, refusals, quotas and charges.

Gateway and front share a process, but the messages are the same as between two processes.
"""

from __future__ import annotations

import msgspec

from hadal.core.messages.base import Message
from hadal.core.messages.generation import Generation


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Admission of the generations of one request."""

    is_admitted: bool = False
    """True if a front admitted them all; False: the front that gets them decides."""
    most_pico_usd: tuple[int, ...] = ()
    """Highest cost of each generation; empty: their tenant has no budget."""

    def cost(self, index: int) -> int:
        """Return the highest cost of one generation, pico-dollars."""
        return self.most_pico_usd[index] if self.most_pico_usd else 0


class Submit(Message, frozen=True):
    """One generation, new or resumed after the end of another front."""

    generation: Generation
    is_admitted: bool = False
    """True if a front has admitted it already (Ticket)."""
    most_pico_usd: int = 0
    """Highest cost in 10^-12 dollars, reserved from the tenant's budget."""


class RejectedEarly(Message, frozen=True):
    """Generations rejected before they were submitted, for lack of capacity. The front counts them,
    because the fleet scales with all demand.
    """

    num_generations: int
    num_tokens: int = 0
    """Tokens of their prompts. 0: the prompts were not tokenized."""


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """Limits of a tenant. 0: no limit."""

    tenant: str
    tokens_per_minute: int = 0
    requests: int = 0
    """Maximum number of generations at once, queued ones included."""
    day_pico_usd: int = 0
    """Maximum amount charged per UTC day, in 10^-12 dollars."""


class Quotas(Message, frozen=True):
    """Current time, and all tenants with quotas."""

    unix_s: float
    quotas: tuple[Quota, ...]


class Charged(Message, frozen=True):
    """Charge of an ended generation, recorded by a gateway. A repeat counts once."""

    request_id: str
    tenant: str
    day: int
    """Days of UTC since 1970."""
    pico_usd: int


class Counted(Message, frozen=True):
    """Tokens of a prompt that a tenant had counted without a generation. They count against its
    tokens per minute.
    """

    tenant: str
    num_tokens: int


class Spent(Message, frozen=True):
    """Charges of a day in the ledger and its outbox, read at one instant."""

    day: int
    tenant_to_pico_usd: dict[str, int]
    """Charges of the requested tenants, including those with nothing charged."""
    request_ids: tuple[str, ...]
    """Requests included in these charges: the front ignores a late Charged of them."""
