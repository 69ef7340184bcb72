"""Who is calling: a session, a person's key or a team's key, resolved in one place to a principal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import and_, select

from marketplace.auth import sessions
from marketplace.http.errors import Code, Refusal
from marketplace.keys import service as keys
from marketplace.keys.rules import PREFIXES, KeyFormatError, digest, parse
from marketplace.keys.tables import api_key
from marketplace.store.db import ReadUnit
from marketplace.store.prepared import Prepared
from marketplace.store.vault import Vault
from marketplace.users import service as users
from marketplace.users.permissions import OF_ROLE, OF_SERVICE_KEY, OF_TEAM_KEY, Permission
from marketplace.users.service import User
from marketplace.users.tables import users as users_table

Credential = Literal["session", "user_key", "team_key", "service_key"]
EVERY_CREDENTIAL: frozenset[Credential] = frozenset({"session", "user_key", "team_key"})
PERSONAL: frozenset[Credential] = frozenset({"session", "user_key"})
_MAX_CREDENTIAL = 4096
_PERSON_OF_KEY = and_(
    api_key.c.kind == "user", users_table.c.id == api_key.c.owner_id, users_table.c.erased_at.is_(None)
)
_KEY_AND_PERSON = Prepared(
    select(*keys.COLUMNS, *users.COLUMNS).outerjoin_from(api_key, users_table, _PERSON_OF_KEY).where(*keys.OF_SECRET)
)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller: a person, a team through its key, or a service."""

    kind: Literal["user", "team", "service"]
    id: str
    """of the person or team; of the key of a service"""
    account_id: str
    """empty for a service: it has none"""
    permissions: frozenset[Permission]
    credential: Credential
    credential_id: str
    """id of the session or key"""
    user: User | None
    """the person; None for a team or service"""

    @property
    def person(self) -> User:
        """The person, where the operation admits nobody else."""
        assert self.user is not None, "the operation admits people only"
        return self.user


def resolve(
    unit: ReadUnit, headers: Mapping[str, str], *, pepper: bytes, vault: Vault, now: int, address: str
) -> Principal:
    """Return the caller. `headers` have lower-case names.

    Refusal: NotAuthenticated without a credential; InvalidToken, ExpiredToken, InvalidApiKey;
    CredentialsNotPermitted for keys that are not for this surface or not for this address; AmbiguousCredentials
    when two credentials speak for two different callers.
    """
    found = []
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme:
        if scheme.lower() != "bearer" or not bearer.strip():
            raise Refusal(Code.INVALID_TOKEN, "The Authorization header is not 'Bearer <token>'.")
        found.append(_one(unit, bearer.strip(), False, pepper, vault, now, address))
    if "x-api-key" in headers:
        found.append(_one(unit, headers["x-api-key"].strip(), True, pepper, vault, now, address))
    if not found:
        raise Refusal(
            Code.NOT_AUTHENTICATED,
            "No credential: send 'Authorization: Bearer <token or key>' or 'X-API-Key: <key>'.",
        )
    if len({(principal.kind, principal.id) for principal in found}) > 1:
        raise Refusal(Code.AMBIGUOUS_CREDENTIALS, "Authorization and X-API-Key speak for two different callers.")
    return found[0]


def _one(unit: ReadUnit, text: str, is_key: bool, pepper: bytes, vault: Vault, now: int, address: str) -> Principal:
    if is_key or text.startswith(tuple(PREFIXES.values())):
        return _by_key(unit, text, pepper, now, address)
    if len(text) > _MAX_CREDENTIAL:
        raise Refusal(Code.INVALID_TOKEN, "The session token is not valid.")
    session = sessions.read(unit, text, vault=vault, now=now)
    user = users.find(unit, session.user_id)
    if user is None:
        raise Refusal(Code.INVALID_TOKEN, "The session token is not valid.")
    return Principal("user", user.id, user.account_id, OF_ROLE[user.role], "session", session.id, user)


def _by_key(unit: ReadUnit, text: str, pepper: bytes, now: int, address: str) -> Principal:
    invalid = Refusal(Code.INVALID_API_KEY, "The API key is not valid: unknown, revoked, switched off or expired.")
    try:
        secret = parse(text)
    except KeyFormatError as error:
        raise invalid from error
    found = unit.rows(_KEY_AND_PERSON, {"digest": digest(secret, pepper)})
    row = keys.unexpired(found[0][: len(keys.COLUMNS)], now) if found else None
    if row is None:
        raise invalid
    if not keys.may_come_from(row, address):
        raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, "The API key may not be used from this address.")
    if row.kind == "user":
        person = found[0][len(keys.COLUMNS) :]
        if person[0] is None:
            raise invalid
        user = users.of_row(person)
        return Principal("user", user.id, user.account_id, OF_ROLE[user.role], "user_key", row.id, user)
    if row.kind == "team" and row.account_id is not None:
        return Principal("team", row.owner_id, row.account_id, OF_TEAM_KEY, "team_key", row.id, None)
    if row.kind == "service":
        return Principal("service", row.id, "", OF_SERVICE_KEY, "service_key", row.id, None)
    raise Refusal(Code.CREDENTIALS_NOT_PERMITTED, f"A {row.kind} key is not for the management API.")
