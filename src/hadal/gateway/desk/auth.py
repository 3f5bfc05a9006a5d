"""API keys: a Bearer token compared in constant time, and the rights of its tenant.

    KEY [RIGHT ...] [FIELD=VALUE ...]                 a line of a keys file, or the text between
    sha256:DIGEST name=NAME [RIGHT ...] [FIELD=...]   two commas of HADAL_API_KEYS

A key has no blank and no comma. Without keys, or with a single key without a name, there is no
other tenant to protect: the tenant has all rights. Depends on headers; the front applies a tenant's
quotas (policy/quotas).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from hadal.core.errors import ConfigError
from hadal.core.messages.requests import Quota
from hadal.gateway.desk.salts import EVERYONE, name_of, salt_of
from hadal.gateway.edge.errors import ApiError, overloaded
from hadal.stats.prices import PICO_PER_MICRO, micro_usd

PRIORITY = "priority"
"""Right to jump the queue: a `priority` above 0."""
OPERATOR = "operator"
"""Right to see all tenants' activity: /audit, /trace, /status, and /metrics unless it is open."""
RIGHTS = frozenset({PRIORITY, OPERATOR})


@dataclass(frozen=True)
class Tenant:
    """Sender of requests, identified by an API key."""

    salt: bytes
    rights: frozenset[str] = frozenset()
    given_name: str = ""
    """Name from the keys file. Empty: the name is derived from the salt."""
    weight: float = 1.0
    """Share of scarce capacity, relative to other tenants (policy/fairness)."""
    models: frozenset[str] = frozenset()
    """Models that the tenant may use; empty: all."""
    quota: Quota | None = None
    key_digest: bytes = field(default=b"", repr=False, compare=False)
    """Digest of the tenant's key; empty without keys. Identifies the key as long as it is accepted."""

    @cached_property
    def name(self) -> str:
        """Return the tenant's name in the ledger, in logs and at the front."""
        return self.given_name or name_of(self.salt)

    def may_ask(self, model: str) -> bool:
        """Return True if the tenant may use this model."""
        return not self.models or model in self.models


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="hadal"'}
_EVERYONE = Tenant(salt_of(b""), RIGHTS)


def credentials(headers: Mapping[str, str]) -> str | None:
    """Return the Authorization header, or one made from `x-api-key` (of Anthropic's clients)."""
    given, key = headers.get("authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if key and not given else given


class Keys:
    """Accepted keys; without keys, every request is accepted unless `is_closed`."""

    def __init__(
        self, lines: Iterable[str] = (), *, is_closed: bool = False, is_known: bool = True
    ) -> None:
        """`lines`: as parse_key reads them; blank ones are skipped. `is_closed`: no request is
        accepted if there are no keys. `is_known`: if False, the keys were not read or fetched
        yet, and `check` raises 503. Raises ConfigError.
        """
        digest_to_tenant: dict[bytes, Tenant] = {}
        for digest, tenant in map(parse_key, filter(str.strip, lines)):
            first = digest_to_tenant.get(digest)
            if first is not None and replace(first, rights=frozenset()) != replace(
                tenant, rights=frozenset()
            ):
                raise ConfigError("a key is given twice, with different values.")
            rights = tenant.rights | (first.rights if first is not None else frozenset())
            digest_to_tenant[digest] = replace(tenant, rights=rights)
        # All digests have one length, so the time of a comparison does not reveal a key's length.
        self._digests = tuple(digest_to_tenant)
        # A named tenant must not gain rights because the other keys were removed from the file.
        is_alone = len(self._digests) == 1 and not next(iter(digest_to_tenant.values())).given_name
        self.tenants = tuple(
            replace(tenant, key_digest=digest, rights=RIGHTS if is_alone else tenant.rights)
            for digest, tenant in digest_to_tenant.items()
        )
        """Tenants in the order of their keys. A hashed key's salt is empty (unknown)."""
        names = [tenant.name for tenant in self.tenants]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two keys have the name {min(twice)}; names must be unique.")
        self._is_closed = is_closed
        self.is_known = is_known

    @property
    def is_open(self) -> bool:
        """Return True if every request is accepted, because there are no keys."""
        return not self._digests and not self._is_closed

    @property
    def digests(self) -> tuple[bytes, ...] | None:
        """Return the digests of the accepted keys; None if every request is accepted."""
        return None if self.is_open else self._digests

    @property
    def quotas(self) -> tuple[Quota, ...]:
        """Return the quotas of tenants that have one."""
        return tuple(tenant.quota for tenant in self.tenants if tenant.quota is not None)

    def check(self, authorization: str | None) -> Tenant:
        """Return the tenant of the header's key; without keys there is one tenant.

        Raises ApiError 401 for a header without any of the keys, 503 while they are not known.
        """
        if not self.is_known:
            raise overloaded(503, "The server is starting; try again.", 1.0, "no_keys")
        if self.is_open:
            return _EVERYONE
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise ApiError(
                401,
                "An API key is needed: send 'Authorization: Bearer KEY'.",
                code="missing_api_key",
                headers=_CHALLENGE,
            )
        # Header values arrive as latin-1; keys with other letters were sent as UTF-8 bytes.
        key = token.strip().encode("latin-1", "replace")
        given = _digest(key)
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "This API key is not valid; check it.",
                code="invalid_api_key",
                headers=_CHALLENGE,
            )
        tenant = self.tenants[matches.index(True)]
        return tenant if tenant.salt else replace(tenant, salt=salt_of(key))


HASHED = "sha256:"
"""Prefix of a key's digest, written where the key itself is not stored."""
_NAME_FORM = re.compile(r"(?!t-|everyone$)[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that no line of a keys file may contain; a tab may separate words."""
_MAX_NUMBER = 10**12
_MAX_WEIGHT = 1000.0


def parse_key(line: str) -> tuple[bytes, Tenant]:
    """Return a key's digest and its tenant. Raises ConfigError, which does not show the key."""
    if _CONTROL.search(line):
        raise ConfigError("control characters are not allowed.")
    key, *words = line.split()
    if "," in line:
        raise ConfigError("a key cannot contain a comma.")
    rights = frozenset(word for word in words if "=" not in word)
    pairs = [word.partition("=")[::2] for word in words if "=" in word]
    if not RIGHTS.issuperset(rights) or not _FIELDS.keys() >= {name for name, _ in pairs}:
        raise ConfigError(
            f"an unknown word follows the key: the rights {' and '.join(sorted(RIGHTS))}, and NAME=VALUE"
            f" for {', '.join(_FIELDS)}, are allowed; a key contains no blanks."
        )
    digest, salt = _digest(key.encode()), salt_of(key.encode())
    if key.startswith(HASHED):
        if not re.fullmatch("[0-9a-f]{64}", key[len(HASHED) :]):
            raise ConfigError(f"{HASHED} must be followed by the 64 hex digits of a key's hash.")
        digest, salt = bytes.fromhex(key[len(HASHED) :]), b""
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return digest, _tenant(salt, rights, values)


def _tenant(salt: bytes, rights: frozenset[str], values: dict[str, list[str]]) -> Tenant:
    for name, given in values.items():
        if len(given) > 1 and name != MODEL:
            raise ConfigError(f"{name} is given twice.")
    read = {name: _FIELDS[name](name, given[0]) for name, given in values.items()}
    if not salt and NAME not in values:
        raise ConfigError("a hashed key needs a name: name=NAME.")
    name = str(read.get(NAME, ""))
    limits = (
        int(read.get(TOKENS_PER_MINUTE, 0)),
        int(read.get(REQUESTS, 0)),
        int(read.get(DOLLARS_PER_DAY, 0)),
    )
    return Tenant(
        salt,
        rights,
        name,
        float(read.get(WEIGHT, 1.0)),
        frozenset(values.get(MODEL, ())),
        Quota(name or name_of(salt), *limits) if any(limits) else None,
    )


def check_name(field: str, text: str) -> str:
    """Return the name if it is a valid tenant name. Raises ConfigError."""
    if not _NAME_FORM.fullmatch(text):
        raise ConfigError(
            f"{field} is {text[:70]!r}; use up to 64 letters, digits and . _ @ -, but neither"
            f" {EVERYONE} nor a name that begins with t-."
        )
    return text


def _model(field: str, text: str) -> str:
    if not text:
        raise ConfigError(f"{field} is empty; name a model, or leave it out for all.")
    return text


def _number(field: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,13}", text) or not 1 <= int(text) <= _MAX_NUMBER:
        raise ConfigError(f"{field} is {text[:70]!r}; a whole number of at least 1 is needed.")
    return int(text)


def _pico_usd(field: str, text: str) -> int:
    is_amount = re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text) is not None
    micro = micro_usd(text) if is_amount else 0
    if not micro:
        raise ConfigError(
            f"{field} is {text[:70]!r}; an amount in dollars is needed, from 0.000001 to 999999,"
            " with at most 6 decimals."
        )
    return micro * PICO_PER_MICRO


def _weight(field: str, text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not (
        1.0 / _MAX_WEIGHT <= float(text) <= _MAX_WEIGHT
    ):
        raise ConfigError(f"{field} is {text[:70]!r}; a number from 0.001 to 1000 is needed.")
    return float(text)


NAME, MODEL, WEIGHT = "name", "model", "weight"
TOKENS_PER_MINUTE, REQUESTS, DOLLARS_PER_DAY = "tokens_per_minute", "requests", "dollars_per_day"
_FIELDS: dict[str, Callable[[str, str], str | int | float]] = {
    NAME: check_name,
    MODEL: _model,
    TOKENS_PER_MINUTE: _number,
    REQUESTS: _number,
    DOLLARS_PER_DAY: _pico_usd,
    WEIGHT: _weight,
}
"""Fields with values in a key's line, and their parsers. `model` may occur more than once."""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def hashed(key: str) -> str:
    """Return a key in the hashed form of a keys file."""
    return f"{HASHED}{_digest(key.encode()).hex()}"
