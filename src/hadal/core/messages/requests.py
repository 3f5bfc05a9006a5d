"""A gateway's messages to its front: new generations, refusals, quotas and charges.

Gateway and front share a process, but the messages are the same as between two.
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
    """As its ticket has it."""
    most_pico_usd: int = 0
    """Highest cost, reserved from the tenant's budget."""


class TurnedAway(Message, frozen=True):
    """Generations were refused before they were submitted, as the front would have refused them: it
    counts them, for the fleet grows with all that is asked for.
    """

    num_generations: int
    num_tokens: int = 0
    """Tokens of their prompts. 0: nobody has read them."""


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """What a tenant may have at most. 0: as much as there is."""

    tenant: str
    tokens_per_minute: int = 0
    requests: int = 0
    """Generations at once, those that wait included."""
    day_pico_usd: int = 0
    """To be charged in a day of UTC, in 10^-12 dollars."""


class Quotas(Message, frozen=True):
    """The tenants that have quotas, all of them, and the time of day."""

    unix_s: float
    quotas: tuple[Quota, ...]


class Charged(Message, frozen=True):
    """A generation has ended, and a gateway wrote down what it was charged. Said again, it counts
    once.
    """

    request_id: str
    tenant: str
    day: int
    """Days of UTC since 1970."""
    pico_usd: int


class Counted(Message, frozen=True):
    """Tokens of a prompt that a tenant had counted, without a generation. They are drawn from its
    tokens per minute.
    """

    tenant: str
    num_tokens: int


class Spent(Message, frozen=True):
    """What the ledger and its outbox hold of a day, read at one instant."""

    day: int
    tenant_to_pico_usd: dict[str, int]
    """Of tenants that were asked for; those with nothing are in it as well."""
    request_ids: tuple[str, ...]
    """Of those facts that are not old: a gateway may say them again."""
