"""The directory of people: pages of them by selector, and search. Erased people are in none.

Each is read from one index in the order of its pages. What people spent is on their accounts, which are opened with
them, at the same time: there the accounts are read in that order.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, FromClause, Select, func, or_, select

from marketplace.http.pagination import newest_first
from marketplace.ledger.tables import account
from marketplace.providers import service as providers
from marketplace.store.db import ReadUnit
from marketplace.users.rules import Role
from marketplace.users.tables import users


class Person(msgspec.Struct, frozen=True):
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
    account_ids: tuple[str, ...] | None = None
    """whose accounts these are"""
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
    return [Person(*row) for row in unit.select(page_query(selection, cursor, limit)).all()]


def page_query(selection: Selection, cursor: str | None, limit: int) -> Select[*tuple[Any, ...]]:
    """The query behind `page`."""
    wanted = select(*_COLUMNS).select_from(_joined(selection)).where(*_conditions(selection))
    if selection.min_spend is None:
        return newest_first(wanted, users.c.created_at, users.c.id, cursor, limit)
    return newest_first(wanted, account.c.created_at, account.c.owner_id, cursor, limit)


def total(unit: ReadUnit, selection: Selection) -> int:
    """Return how many people there are on all pages together."""
    if selection.min_spend is not None and selection == Selection(min_spend=selection.min_spend):
        # Far fewer people were erased than not: to count them apart spares a look at everybody's row.
        spenders = select(func.count()).where(*_spent(selection.min_spend))
        gone = users.join(account, account.c.id == users.c.account_id)
        erased = (
            select(func.count())
            .select_from(gone)
            .where(users.c.erased_at.is_not(None), account.c.spent >= selection.min_spend)
        )
        return int(unit.select(spenders).scalar_one()) - int(unit.select(erased).scalar_one())
    wanted = select(func.count()).select_from(_joined(selection)).where(*_conditions(selection))
    return int(unit.select(wanted).scalar_one())


def search(unit: ReadUnit, text: str, *, limit: int, visible_to: str | None = None) -> list[Person]:
    """Return people whose name or address contains a text, however it is capitalised, newest first. Nothing in the
    text stands for anything but itself."""
    return [Person(*row) for row in unit.select(search_query(unit.dialect, text, limit, visible_to)).all()]


def search_query(dialect: str, text: str, limit: int, visible_to: str | None) -> Select[*tuple[Any, ...]]:
    """The query behind `search`. It looks at everybody until it has enough: at names and addresses in the index, and at
    the rows of those who are found. A text is looked for as it is: patterns take ten times as long."""
    place = func.instr if dialect == "sqlite" else func.strpos
    part = text.casefold()
    found = or_(place(users.c.email_key, part) > 0, place(func.lower(users.c.name), part) > 0)
    return (
        select(*_COLUMNS)
        .where(*_conditions(Selection(visible_to=visible_to)), found)
        .order_by(users.c.created_at.desc(), users.c.id.desc())
        .limit(limit)
    )


def visible(unit: ReadUnit, user_ids: Collection[str], visible_to: str | None) -> set[str]:
    """Return which of these people are there and may be seen."""
    conditions = _conditions(Selection(ids=tuple(sorted(user_ids)), visible_to=visible_to))
    return set(unit.select(select(users.c.id).where(*conditions)).scalars())


def _joined(selection: Selection) -> FromClause:
    return users if selection.min_spend is None else account.join(users, users.c.id == account.c.owner_id)


def _spent(amount: int) -> tuple[ColumnElement[bool], ...]:
    """Accounts of people who spent at least so much."""
    return account.c.owner_kind == "user", account.c.spent >= amount


def _conditions(selection: Selection) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = [users.c.erased_at.is_(None)]
    if selection.ids is not None:
        found.append(users.c.id.in_(selection.ids))
    for provider_id in (selection.provider_id, selection.visible_to):
        if provider_id is not None:
            found.append(users.c.id.in_(providers.related(provider_id)))
    if selection.min_spend is not None:
        found.extend(_spent(selection.min_spend))
    if selection.account_ids is not None:
        found.append(users.c.account_id.in_(selection.account_ids))
    return found
