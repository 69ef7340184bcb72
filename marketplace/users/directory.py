"""The directory of people: pages of them by selector, and search. Erased people are in none."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import ColumnElement, FromClause, Select, func, or_, select

from marketplace.http.pagination import newest_first
from marketplace.ledger.tables import account, hold
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit
from marketplace.users.rules import Role
from marketplace.users.tables import users

_ESCAPE = "\\"


class Person(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody as others may see them."""

    id: str
    email: str
    name: str
    role: Role
    account_id: str
    created_at: int
    last_login_at: int | None


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a list is about: everybody to whom all of it applies; None does not narrow."""

    ids: tuple[str, ...] | None = None
    provider_id: str | None = None
    """people and customers of a provider"""
    min_spend: int | None = None
    """who spent at least so many nano-units"""
    active: bool = False
    """who has something running now"""
    visible_to: str | None = None
    """a provider that asks: it sees nobody but its own people and customers"""


_COLUMNS = (
    users.c.id,
    users.c.email,
    users.c.name,
    users.c.role,
    users.c.account_id,
    users.c.created_at,
    users.c.last_login_at,
)


def page(unit: ReadUnit, selection: Selection, *, cursor: str | None, limit: int) -> list[Person]:
    """Return people, newest first: one more than `limit` when there are more."""
    wanted = select(*_COLUMNS).select_from(_joined(selection)).where(*_conditions(selection))
    rows = unit.select(newest_first(wanted, users.c.created_at, users.c.id, cursor, limit))
    return [Person(**row._mapping) for row in rows]


def total(unit: ReadUnit, selection: Selection) -> int:
    """Return how many people there are on all pages together."""
    wanted = select(func.count()).select_from(_joined(selection)).where(*_conditions(selection))
    return int(unit.select(wanted).scalar_one())


def search(unit: ReadUnit, text: str, *, limit: int, visible_to: str | None = None) -> list[Person]:
    """Return people whose name or address contains a text, however it is capitalised, newest first. Nothing in the
    text stands for anything but itself."""
    pattern = f"%{_literal(text.casefold())}%"
    found = or_(users.c.email_key.like(pattern, escape=_ESCAPE), func.lower(users.c.name).like(pattern, escape=_ESCAPE))
    wanted = (
        select(*_COLUMNS)
        .where(*_conditions(Selection(visible_to=visible_to)), found)
        .order_by(users.c.created_at.desc(), users.c.id.desc())
        .limit(limit)
    )
    return [Person(**row._mapping) for row in unit.select(wanted)]


def visible(unit: ReadUnit, user_ids: Collection[str], visible_to: str | None) -> set[str]:
    """Return which of these people are there and may be seen."""
    conditions = _conditions(Selection(ids=tuple(sorted(user_ids)), visible_to=visible_to))
    return set(unit.select(select(users.c.id).where(*conditions)).scalars())


def running() -> Select[str]:
    """A query for the ids of accounts that something runs on now: requests that have not ended."""
    return select(hold.c.account_id).where(hold.c.state == "open")


def _joined(selection: Selection) -> FromClause:
    return users if selection.min_spend is None else users.join(account, account.c.id == users.c.account_id)


def _conditions(selection: Selection) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = [users.c.erased_at.is_(None)]
    if selection.ids is not None:
        found.append(users.c.id.in_(selection.ids))
    for provider_id in (selection.provider_id, selection.visible_to):
        if provider_id is not None:
            found.append(users.c.id.in_(providers.related(provider_id)))
    if selection.min_spend is not None:
        found.append(account.c.spent >= selection.min_spend)
    if selection.active:
        found.append(users.c.account_id.in_(running()))
    return found


def _literal(text: str) -> str:
    return "".join(_ESCAPE + character if character in (_ESCAPE, "%", "_") else character for character in text)
