"""Erasure: a person goes, the books stay.

What names the person or lets them in is deleted: address, name, password, sessions, second factor, keys, identities
elsewhere, mail and invites, their recipes and presets, and what the machines that they had were called and had in them;
teams that nobody is left in lose their names, too. What the platform must keep (their account and everything posted on
it, usage, teams, the audit log) stays as it is and from then on leads to a row of `users` that holds nothing but ids
and times. The address is free again: whoever registers with it is a new person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from sqlalchemy import ColumnElement, Select, Table, delete, func, or_, select, update

from marketplace.accounts import service as accounts
from marketplace.accounts.activity import live_instances
from marketplace.auth.oauth_tables import oauth_identity, oauth_state
from marketplace.auth.tables import email_token, partial_login, session, totp
from marketplace.events.transitions import Scene
from marketplace.http.tables import idempotency
from marketplace.keys.tables import api_key
from marketplace.ledger.tables import entry, hold, ledger_tx
from marketplace.notify.tables import outbox
from marketplace.payments import service as payments
from marketplace.presets.tables import instance_preset
from marketplace.providers.tables import provider_customer, provider_member
from marketplace.recipes.tables import recipe, recipe_tag
from marketplace.services import service as services
from marketplace.ssh_keys.tables import ssh_key
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit
from marketplace.teams import service as teams
from marketplace.teams.service import Departure
from marketplace.teams.tables import team, team_invite
from marketplace.users import erasure_rentals, roles
from marketplace.users.rules import email_key
from marketplace.users.service import User
from marketplace.users.tables import users
from marketplace.volumes import keeping as volumes

_SHOWN = 20


class Obstacle(msgspec.Struct, frozen=True):
    """Why somebody cannot be erased now: a name for programs, a reason in words, and what it is about."""

    reason: str
    message: str
    ids: tuple[str, ...]


class Erased(msgspec.Struct, frozen=True, kw_only=True):
    """What an erasure did: rows by kind, and what became of the person's teams."""

    hard_deleted: Mapping[str, int]
    anonymized: Mapping[str, int]
    departures: tuple[Departure, ...]


def obstacles(unit: ReadUnit, user: User) -> list[Obstacle]:
    """Return everything that stands in the way; nothing is changed while there is any."""
    found = []
    root = unit.select(
        select(provider_member.c.provider_id).where(
            provider_member.c.user_id == user.id, provider_member.c.is_root.is_(True)
        )
    ).scalar_one_or_none()
    if root is not None:
        found.append(Obstacle("ProviderRoot", "they answer for a provider", (root,)))
    if roles.last_admin(unit, user.id):
        found.append(Obstacle("LastAdmin", "they are the only admin", (user.id,)))
    running = select(hold.c.request_id).where(hold.c.account_id == user.account_id, hold.c.state == "open")
    requests = tuple(unit.select(running.order_by(hold.c.request_id).limit(_SHOWN)).scalars())
    if requests or live_instances(unit, [user.account_id]):
        found.append(Obstacle("ActiveExecutors", "something still runs on their account", requests))
    alone = teams.alone_in(unit, user.id)
    left = live_instances(unit, [team.account_id for team in alone]) if alone else {}
    if left:
        ids = tuple(team.id for team in alone if team.account_id in left)
        found.append(Obstacle("ActiveExecutors", "machines of a team that has nobody else still run", ids))
    return found


def erase(unit: WriteUnit, user: User, scene: Scene) -> Erased:
    """Erase a person whom nothing protects. All of it happens in this unit, or nothing."""
    now = scene.now
    departures = tuple(teams.leave_all(unit, user.id, now))
    closed = [accounts.of_owner(unit, "team", left.team_id) for left in departures if left.closed]
    owned = [user.account_id, *(account_id for account_id in closed if account_id is not None)]
    gone = [left.team_id for left in departures if left.closed]
    left_behind = erasure_rentals.forget(unit, user.id, owned, scene)
    deleted_volumes = sum(volumes.delete_all(unit, account_id, scene) for account_id in owned)
    _close_teams(unit, gone)
    unit.execute(delete(recipe_tag).where(recipe_tag.c.recipe_id.in_(_recipes(user.id, gone))))
    epochs.bump(unit, epochs.KEYS)  # whoever keeps keys in memory forgets theirs
    hard_deleted = {
        **{name: _delete(unit, table, condition) for name, table, condition in _personal(user, gone)},
        **left_behind,
        "payment_customers": payments.forget(unit, user.id, user.account_id),
        "volumes": deleted_volumes,
    }
    anonymized = {
        "fraud_activities": 0,
        "team_memberships": len(departures),
        "team_api_keys_creator_nulled": _forget_creator(unit, user.id),
        **_retained(unit, user.account_id),
    }
    unit.execute(
        update(users)
        .where(users.c.id == user.id)
        .values(
            email="",
            email_key=f"erased:{user.id}",  # not an address: nobody can register or sign in with it
            name="",
            role="user",
            password_hash=None,
            last_login_at=None,
            email_verified_at=None,
            erased_at=now,
        )
    )
    return Erased(hard_deleted=hard_deleted, anonymized=anonymized, departures=departures)


def _close_teams(unit: WriteUnit, team_ids: Sequence[str]) -> None:
    """Teams that nobody is left in are called nothing any more, nor are their keys, which are revoked."""
    nameless = {"name": team.c.id, "name_key": team.c.id, "description": ""}
    unit.execute(update(team).where(team.c.id.in_(team_ids)).values(**nameless))
    theirs = (api_key.c.kind == "team") & api_key.c.owner_id.in_(team_ids)
    unit.execute(update(api_key).where(theirs).values(name=api_key.c.id))


def _personal(user: User, gone: Sequence[str]) -> list[tuple[str, Table, ColumnElement[bool]]]:
    """What is deleted: a name for the report, the table, and which rows; `gone` are the teams that end with them."""
    key = email_key(user.email)
    to_them = or_(outbox.c.recipient == user.email, func.lower(outbox.c.recipient) == key)
    return [
        ("api_keys", api_key, (api_key.c.kind == "user") & (api_key.c.owner_id == user.id)),
        ("sessions", session, session.c.user_id == user.id),
        ("partial_logins", partial_login, partial_login.c.user_id == user.id),
        ("second_factors", totp, totp.c.user_id == user.id),
        ("email_tokens", email_token, email_token.c.user_id == user.id),
        ("identities", oauth_identity, oauth_identity.c.user_id == user.id),
        ("sign_ins", oauth_state, oauth_state.c.user_id == user.id),
        ("mails", outbox, or_(outbox.c.user_id == user.id, to_them)),
        ("invites", team_invite, team_invite.c.email_key == key),
        ("kept_answers", idempotency, idempotency.c.principal_id == user.id),
        ("provider_memberships", provider_member, provider_member.c.user_id == user.id),
        ("provider_customers", provider_customer, provider_customer.c.user_id == user.id),
        ("ssh_keys", ssh_key, _of(ssh_key, user.id, gone)),
        ("instance_presets", instance_preset, instance_preset.c.user_id == user.id),
        ("recipes", recipe, recipe.c.id.in_(_recipes(user.id, gone))),
    ]


def _of(table: Table, user_id: str, team_ids: Sequence[str]) -> ColumnElement[bool]:
    kind, owner = table.c.owner_kind, table.c.owner_id
    return or_((kind == "user") & (owner == user_id), (kind == "team") & owner.in_(team_ids))


def _recipes(user_id: str, team_ids: Sequence[str]) -> Select[str]:
    mine: Select[str] = select(recipe.c.id).where(_of(recipe, user_id, team_ids))
    return mine


def _delete(unit: WriteUnit, table: Table, condition: ColumnElement[bool]) -> int:
    return unit.execute(delete(table).where(condition)).rowcount


def _forget_creator(unit: WriteUnit, user_id: str) -> int:
    return unit.execute(update(api_key).where(api_key.c.created_by == user_id).values(created_by=None)).rowcount


def _retained(unit: ReadUnit, account_id: str) -> dict[str, int]:
    """How many transactions stay that from now on lead to nobody."""
    kinds = (
        select(ledger_tx.c.kind, func.count())
        .join(entry, entry.c.tx_id == ledger_tx.c.id)
        .where(entry.c.account_id == account_id)
        .group_by(ledger_tx.c.kind)
    )
    counts = {kind: int(number) for kind, number in unit.select(kinds)}
    return {
        "usage_payout_tx_nulled": counts.get("usage", 0),
        "service_usage_payout_tx_nulled": counts.get(services.KIND, 0),
    }
