"""Whose keys a caller may handle: its own, those of teams that it administers, those of machines that it answers for.

A node's key belongs to a provider, and is handled by that provider's people; a service's key belongs to a provider too
and is handled by admins, who may handle every provider's.
"""

from __future__ import annotations

from dataclasses import dataclass

from marketplace.http.acting import party
from marketplace.http.errors import Code, Refusal
from marketplace.http.operation import Call
from marketplace.keys import service as keys
from marketplace.keys.rules import KeyKind
from marketplace.keys.service import KeyRow, UnknownKeyError
from marketplace.providers import service as providers
from marketplace.providers.service import Provider
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import service as teams
from marketplace.teams.rules import at_least
from marketplace.users.permissions import Permission

LIMITS = (
    "allowed_models",
    "budget",
    "budget_period",
    "requests_per_minute",
    "tokens_per_minute",
    "max_concurrency",
)
"""Of keys that ask for inference."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Whom a key speaks for, and who pays."""

    kind: KeyKind
    id: str
    account_id: str | None
    provider: str | None = None
    """id of the provider of a node's or service's key"""


def holder(call: Call, unit: ReadUnit, kind: KeyKind | None, team_id: str | None, provider: str | None) -> Holder:
    """Return for whom the caller may make or list keys of a kind; without one, its own or the team's.

    Refusal: ValidationFailed when the kind does not fit to a team or provider; NotTeamMember, PermissionDenied,
    ProviderNotFound.
    """
    if kind in ("node", "service"):
        if team_id is not None:
            raise Refusal(Code.VALIDATION_FAILED, f"team_id: a {kind}'s key belongs to no team", param="team_id")
        found = _provider(call, unit, kind, provider)
        return Holder(kind, found.id, None, found.id)
    if provider is not None:
        raise Refusal(Code.VALIDATION_FAILED, "provider: only of a node's or service's key", param="provider")
    if kind == "team" and team_id is None:
        raise Refusal(Code.VALIDATION_FAILED, "team_id: it is missing", param="team_id")
    if kind == "user" and team_id is not None:
        raise Refusal(Code.VALIDATION_FAILED, "team_id: a person's key belongs to no team", param="team_id")
    if team_id is not None and isinstance(unit, WriteUnit):
        teams.lock(unit, team_id)  # whoever deletes it at the same time revokes this key too, or comes first
    mine = party(call, unit, team_id, needs="Admin")
    return Holder(mine.kind, mine.id, mine.account_id)


def reachable(call: Call, unit: ReadUnit, key_id: str) -> KeyRow:
    """Return the key of that id that the caller may handle. Refusal: KeyNotFound; somebody else's looks the same as
    none."""
    try:
        row = keys.find_by_id(unit, key_id)
    except UnknownKeyError as error:
        raise _unknown() from error
    if not _may_handle(call, unit, row):
        raise _unknown()
    return row


def check_unbound(call: Call, unit: ReadUnit) -> None:
    """Refusal: CredentialsNotPermitted for a key that is limited itself: it could lift its own limits."""
    caller = call.caller
    if caller.credential != "user_key":
        return
    row = keys.find_by_id(unit, caller.credential_id)
    if any(getattr(row, name) is not None for name in LIMITS):
        raise Refusal(
            Code.CREDENTIALS_NOT_PERMITTED, "A key with limits handles no keys: sign in, or use a key without limits."
        )


def _may_handle(call: Call, unit: ReadUnit, row: KeyRow) -> bool:
    caller = call.caller
    if row.kind == "user":
        return row.owner_id == caller.id
    if row.kind == "team":
        if isinstance(unit, WriteUnit):
            teams.lock(unit, row.owner_id)
        role = teams.role_of(unit, row.owner_id, caller.id)
        return role is not None and at_least(role, "Admin")
    if Permission.KEYS_SERVICE in caller.permissions:
        return True
    mine = providers.provider_of(unit, caller.id)
    return (
        row.kind == "node"
        and Permission.KEYS_NODE in caller.permissions
        and mine is not None
        and mine.id == row.owner_id
    )


def _provider(call: Call, unit: ReadUnit, kind: KeyKind, name: str | None) -> Provider:
    permissions = call.caller.permissions
    needed = Permission.KEYS_NODE if kind == "node" else Permission.KEYS_SERVICE
    if needed not in permissions:
        raise Refusal(Code.PERMISSION_DENIED, f"You lack the permission {needed}.", param="kind")
    mine = providers.provider_of(unit, call.caller.id)
    if name is None:
        if mine is None:
            raise Refusal(Code.VALIDATION_FAILED, "provider: it is missing", param="provider")
        return mine
    found = providers.find_by_name(unit, name)
    every = Permission.KEYS_SERVICE in permissions
    if found is None or not (every or (mine is not None and mine.id == found.id)):
        raise Refusal(Code.PROVIDER_NOT_FOUND, "There is no such provider that you act for.", param="provider")
    return found


def _unknown() -> Refusal:
    return Refusal(Code.KEY_NOT_FOUND, "You have no usable key of this id.", param="id")
